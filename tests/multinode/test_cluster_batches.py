"""What comes from another node: copied ahead into memory that is used again, and never more of it than was agreed."""

import gc
import os
import stat
import threading
from pathlib import Path

import pytest
import ray
import torch

from inside import tasks_of, workers_are_idle
from multinode_data import AWAY, Calls, as_is
from multinode_waiting import wait_until
from rayloader import DataLoader
from rayloader.actors.actors import TASKS_AHEAD
from rayloader.epoch.depth import Pace
from rayloader.transport.lanes import SMALL_BYTES

pytestmark = [pytest.mark.multinode, pytest.mark.usefixtures("warm")]

MB = 1 << 20
LENGTH = 60


def sample(index):
    """Every third is small, and every seventh an error."""
    if index % 7 == 3:
        raise LookupError(f"no sample {index}")
    numbers = 8 if index % 3 == 0 else 4 * SMALL_BYTES + index
    return {
        "image": torch.full((numbers,), index),
        "array": torch.full((SMALL_BYTES + index,), index % 128, dtype=torch.int8).numpy(),
        "labels": torch.tensor([index, -index]),
        "name": f"sample {index}",
    }


def is_sample(batch, index, plus=0):
    expected = sample(index)
    return (
        torch.equal(batch["image"], expected["image"] + plus)
        and (batch["array"] == expected["array"]).all()
        and torch.equal(batch["labels"], expected["labels"])
        and batch["name"] == expected["name"]
    )


def load(function, length, **options):
    options = {"num_workers": 2, "collate_fn": as_is, "ray_remote_args": AWAY, **options}
    return DataLoader(Calls(function, length), None, **options)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


def test_small_batches_need_no_thread_until_a_large_one_comes():
    iterator = iter(load(lambda index: torch.full((8 if index < 100 else MB,), index), 120, prefetch_factor=2))
    assert [int(next(iterator)[0]) for _ in range(90)] == list(range(90))
    assert threads() == []
    assert [int(next(iterator)[-1]) for _ in range(20)] == list(range(90, 110))
    assert len(threads()) == 1
    assert len(list(iterator)) == 10
    assert threads() == []


@pytest.mark.parametrize("depth", [None, 3])
def test_batches_of_every_kind_come_as_they_were_whatever_is_kept(depth):
    loader = load(sample, LENGTH, prefetch_factor=depth, persistent_workers=True)
    for _ in range(2):
        iterator, kept = iter(loader), {}
        for index in range(LENGTH):
            if index % 7 == 3:
                with pytest.raises(LookupError, match=f"no sample {index}"):
                    next(iterator)
                continue
            batch = next(iterator)
            assert is_sample(batch, index)
            batch["image"].add_(1)  # a read-only page would end this process
            batch["array"][0] = batch["array"][0]
            if index % 2:
                kept[index] = batch
            assert all(is_sample(batch, number, plus=1) for number, batch in kept.items())
        with pytest.raises(StopIteration):
            next(iterator)
        assert len(threads()) == 1
    assert all(is_sample(batch, number, plus=1) for number, batch in kept.items())


def test_breaking_off_while_batches_are_under_way_leaves_no_thread():
    iterator = iter(load(lambda index: torch.full((MB,), index), LENGTH))
    kept = [next(iterator) for _ in range(3)]
    assert len(threads()) == 1
    del iterator
    gc.collect()
    wait_until(lambda: not threads(), "the thread has ended")
    assert [int(batch.unique()) for batch in kept] == [0, 1, 2]


@pytest.fixture
def deep(monkeypatch):
    """The window is deep from the first batch on, so that nothing but the bytes bounds what is under way."""

    def saw(pace, *_):
        before, pace.depth, pace.ahead = pace.depth, 200, 200
        return before != pace.depth

    monkeypatch.setattr(Pace, "saw", saw)


def wait_until_idle(batches, look=lambda: None):
    """Until the workers have answered all that they may be given while no batch is taken; calls `look` meanwhile."""
    wait_until(lambda: workers_are_idle(batches, look), "the workers have done what they may")


@pytest.mark.usefixtures("deep")
def test_while_the_trainer_does_something_else_what_is_ready_stays_within_prefetch_bytes():
    """Though hundreds of tasks were drawn while batches were small."""
    budget, grown = 16 * MB, 2 * MB

    def get(index):
        return torch.full((1000 if index < 50 else grown,), index % 100, dtype=torch.uint8)

    iterator = iter(load(get, 500, prefetch_bytes=budget))
    for index in range(60):
        assert next(iterator)[0] == index
    assert len(threads()) == 1  # it receives while the trainer does something else, once a large batch has come
    ready = []
    assert len(tasks_of(iterator)) > 300, "the window is not deep, so nothing is tried"
    wait_until_idle(iterator, lambda: ready.append(iterator.bytes_under_way))
    assert budget // 4 < max(ready) <= budget + 2 * TASKS_AHEAD * grown  # beyond it what had been sent before
    assert [int(batch[0]) for batch in iterator] == [index % 100 for index in range(60, 500)]


@pytest.mark.full
@pytest.mark.parametrize(("depth", "budget", "spills"), [(None, 32 * MB, False), (60, 1000 * MB, True)])
def test_ray_spills_nothing_on_our_account_while_the_trainer_does_something_else(depth, budget, spills, add_node):
    """Where batches lie in the store of a node that holds a tenth of the epoch. A user may ask for more than that."""
    add_node(store=100 * MB, apart=1)
    there = {"num_cpus": 0, "resources": {"apart": 0.1}}
    options = {"arenas": False, "prefetch_factor": depth, "prefetch_bytes": budget, "ray_remote_args": there}
    batches = iter(load(lambda index: torch.full((4 * MB,), index, dtype=torch.uint8), 250, **options))
    assert int(next(batches)[0]) == 0
    wait_until_idle(batches)
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    assert bool(list(session.glob("ray_spilled_objects*/*"))) == spills
    assert [int(batch[-1]) for batch in batches] == list(range(1, 250))


def peak_bytes(node):
    """The most that the object store of a node has held so far.

    Its memory is a file of the raylet's, in which pages come to be when they are written to first, and then stay.
    """
    raylet = node.all_processes["raylet"][0].process.pid
    opened = [path for path in Path(f"/proc/{raylet}/fd").iterdir() if "plasma" in os.readlink(path)]
    files = {path.stat().st_ino: path.stat() for path in opened if stat.S_ISREG(path.stat().st_mode)}
    assert files, "where is the store?"
    return sum(file.st_blocks * 512 for file in files.values())


@pytest.mark.full
@pytest.mark.usefixtures("deep")
def test_the_object_store_never_holds_more_than_prefetch_bytes_while_the_trainer_does_something_else(add_node, nodes):
    """From the first batch on until the workers may build no more, however short the peak was."""
    budget, batch = 64 * MB, 4 * MB
    there = add_node(store=200 * MB, apart=1)
    options = {
        "arenas": False,
        "prefetch_bytes": budget,
        "ray_remote_args": {"num_cpus": 0, "resources": {"apart": 0.1}},
    }
    loader = load(lambda index: torch.full((batch,), index, dtype=torch.uint8), 250, **options)
    (node,) = [node for node in nodes.cluster.worker_nodes if node.node_id == there]
    before = peak_bytes(node)
    batches = iter(loader)
    assert int(next(batches)[0]) == 0
    wait_until_idle(batches)
    # Beside what is ready there is the batch that was taken, until Ray has freed it. And Ray adds some hundred bytes to
    # each object, which begins on a page that it may share with others.
    slack = batch + (budget // batch + 1) * 2 * os.sysconf("SC_PAGE_SIZE")
    assert batch <= peak_bytes(node) - before <= budget + slack
    assert [int(found[-1]) for found in batches] == list(range(1, 250))


@pytest.mark.parametrize("depth", [None, 3])
def test_who_keeps_all_batches_is_told_once_and_gets_the_rest(depth, caplog, monkeypatch):
    monkeypatch.setattr("rayloader.epoch.reports._warned_of_bytes", False)
    options = {"prefetch_bytes": 4 * MB, "prefetch_factor": depth}
    kept = list(load(lambda index: torch.full((MB,), index % 100, dtype=torch.uint8), 40, **options))
    assert [int(batch[-1]) for batch in kept] == list(range(40))
    told = [record.getMessage() for record in caplog.records if "the program keeps" in record.getMessage()]
    assert len(told) == 1
    assert "where prefetch_bytes is 4 MB" in told[0]
