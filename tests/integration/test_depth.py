"""Many tasks under way: nothing finished is withheld, and a batch is final, and the user's own.

That batches may be written to, and what they may be: tests/conformance.
"""

import numpy as np
import pytest
import torch

from latches import HANG_LIMIT, Gate
from probes import Calls, Stream, load
from rayloader import DataLoader
from rayloader.transport.memory_file import MemoryFileError

# Bytes of a batch that does not fit into a socket's buffer.
LARGE = 2 << 20

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize("arenas", [False, True])
def test_a_dataset_may_wait_for_the_trainer(tmp_path, arenas):
    """Batch i is built only when batch i - 1 was taken: as a replay buffer does it, or a live stream."""
    gates = [Gate(tmp_path / str(number)) for number in range(40)]

    def get(index):
        if index:
            gates[index - 1].wait()
        return torch.full((2000,), index)

    for number, batch in enumerate(load(get, 40, num_workers=1, prefetch_factor=24, arenas=arenas, timeout=HANG_LIMIT)):
        assert batch.unique().item() == number
        gates[number].open()
    assert number == 39


@pytest.mark.parametrize(
    ("num_workers", "depth", "arenas", "nbytes"),
    [(1, 18, True, 1), (2, 12, True, 1), (1, 15, False, LARGE)],
    ids=["one worker", "the other worker", "large results"],
)
def test_a_slow_batch_withholds_none_before_it(tmp_path, num_workers, depth, arenas, nbytes):
    gate, slow = Gate(tmp_path / "gate"), 13

    def get(index):
        if index == slow:
            gate.wait()
        return bytes([index]) * nbytes

    iterator = iter(load(get, 30, num_workers, prefetch_factor=depth, arenas=arenas, timeout=HANG_LIMIT))
    assert [next(iterator)[0] for _ in range(slow)] == list(range(slow))
    gate.open()
    assert [batch[0] for batch in iterator] == list(range(slow, 30))


@pytest.mark.parametrize("arenas", [True, False])
@pytest.mark.parametrize("numbers", [2, 50_000])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("stream", [False, True])
def test_a_result_is_final_when_its_task_ends(kind, numbers, arenas, stream):
    """A dataset may write to what it returned as soon as it is asked for the next."""
    array = np.zeros(numbers, np.int64)

    def get(index):
        array[:] = index
        return kind(array)

    dataset = Stream(lambda worker: map(get, range(100))) if stream else Calls(get, 100)
    loader = DataLoader(dataset, None, num_workers=1, prefetch_factor=48, arenas=arenas)
    for number, batch in enumerate(loader):
        assert (batch == number).all()
    assert number == 99


def test_a_kept_batch_outlives_its_loader():
    def get(index):
        return torch.arange(3_000_000) + index

    kept = [next(iter(load(get, 2, num_workers=1))) for _ in range(2)]
    for batch in load(get, 6, num_workers=2):
        batch.fill_(-1)
    assert all(torch.equal(batch, torch.arange(3_000_000)) for batch in kept)


def test_small_parts_of_a_batch_do_not_keep_all_of_it_and_a_batch_may_be_none():
    (big, small), none = load([(torch.zeros(1_000_000), torch.ones(2)), None].__getitem__, num_workers=1)
    assert small.untyped_storage().nbytes() < 1000 < big.untyped_storage().nbytes()
    assert none is None


def unknown_namespaces():
    raise MemoryFileError("as planned")


@pytest.mark.parametrize(
    ("namespaces", "persistent"),
    [(unknown_namespaces, True), (lambda: "another machine", False)],
    ids=["driver-persistent", "worker"],
)
def test_where_no_line_is_possible_batches_come_by_ray_calls_and_that_is_said(
    namespaces, persistent, monkeypatch, caplog
):
    """The driver cannot make one, or the worker cannot connect."""
    monkeypatch.setattr("rayloader.transport.line._namespaces", namespaces)
    # Fresh processes: what is noted of an actor outlives this test.
    loader = DataLoader(range(60), None, num_workers=1, persistent_workers=persistent, fresh_processes=True)
    assert [list(loader) for _ in range(2)] == [list(range(60))] * 2
    told = [record.getMessage() for record in caplog.records if "by Ray calls" in record.getMessage()]
    assert len(told) == (1 if persistent else 2)  # once a process
