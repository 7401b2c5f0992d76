"""The provenance log with workers: each batch that the user got is one row, whatever became of workers and epochs."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from interrupts import interrupted_at, no_hang
from probes import oversubscribed
from provenance_data import Dying, Noisy, Numbers
from rayloader import DataLoader, RayloaderError, share
from rayloader.replay.provenance import OUTCOMES, read
from rayloader.workers.janitor import janitor

pytestmark = [pytest.mark.usefixtures("ray_session"), oversubscribed]
BATCH = 3
KINDS = pytest.mark.parametrize("workers", ["fork", "ray"])
FULL = pytest.mark.full


def make(path, dataset=None, **options):
    options = {"num_workers": 2, "shuffle": True, **options}
    return DataLoader(Noisy() if dataset is None else dataset, BATCH, provenance=path, **options)


def indices_of(batches):
    return [batch[0].tolist() for batch in batches]


def rows(log, *names):
    """The rows of each iteration."""
    return [list(zip(*(one.rows[name].to_pylist() for name in names), strict=True)) for one in log.iterations]


@KINDS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"persistent_workers": True},
        {"seeding": "batch", "scheduling": "dynamic"},
        pytest.param({"prefetch_factor": 2}, marks=FULL),
        pytest.param({"pin_memory": False, "fresh_processes": False, "num_workers": 3}, marks=FULL),
    ],
    ids=str,
)
def test_each_batch_is_a_row(tmp_path, workers, options):
    loader = make(tmp_path / "log", workers=workers, **options)
    batches = [list(loader) for _ in range(3)]
    log = read(tmp_path / "log")
    assert [[indices for (indices,) in epoch] for epoch in rows(log, "indices")] == [indices_of(one) for one in batches]
    assert rows(log, "epoch", "step") == [[(epoch, step) for step in range(8)] for epoch in range(3)]
    if "scheduling" not in options:
        count = options.get("num_workers", 2)
        assert rows(log, "worker") == [[(step % count,) for step in range(8)]] * 3
    assert [one.error for one in log.iterations] == [""] * 3


@KINDS
def test_the_state_of_each_epoch_gives_its_batches_again(tmp_path, workers):
    for options in ({}, {"persistent_workers": True}):
        path = tmp_path / f"{len(options)}"
        loader = make(path, workers=workers, **options)
        batches = [list(loader) for _ in range(3)]
        del loader
        log = read(path)
        for epoch, expected in enumerate(batches):
            again = make(None, workers=workers, **options)
            again.load_state_dict(log.states_of(epoch)[0])
            found = list(again)
            assert all(map(equal, found, expected))
            assert len(found) == len(expected)


def equal(one, other):
    return all(map(torch.equal, one, other))


def test_digests_do_not_depend_on_who_builds_a_batch(tmp_path):
    found = []
    for options in ({"num_workers": 0}, {"workers": "fork"}, {"workers": "ray"}, {"num_workers": 1, "arenas": False}):
        torch.manual_seed(2)
        path = tmp_path / f"{len(found)}"
        list(make(path, Noisy(bad=(5,)), seeding="batch", on_error="skip", max_skipped=1, **options))
        found.append(rows(read(path), "indices", "digest", "skipped"))
    assert found == [found[0]] * len(found)
    assert sum(skipped for _, _, skipped in found[0][0]) == 1


def wait_for_ends():
    """Until the iterators that were dropped have ended; `shutdown()` would end the Ray of all tests."""
    done = threading.Event()
    janitor.later(done.set)
    assert done.wait(60)


@KINDS
def test_an_epoch_that_is_broken_off_has_what_the_user_got(tmp_path, workers):
    loader = make(tmp_path / "log", workers=workers)
    got = []
    for batch in loader:
        got.append(batch)
        if len(got) == 3:
            break
    del loader
    wait_for_ends()
    assert [indices for (indices,) in rows(read(tmp_path / "log"), "indices")[0]] == indices_of(got)


def test_persistent_workers_and_a_break(tmp_path):
    loader = make(tmp_path / "log", persistent_workers=True, workers="fork")
    first = [batch for batch, _ in zip(loader, range(2), strict=False)]
    second = list(loader)
    log = read(tmp_path / "log")
    # `zip` has asked for one batch more than it gave.
    assert [len(one) for one in rows(log, "step")] == [3, 8]
    assert [indices for (indices,) in rows(log, "indices")[0]][:2] == indices_of(first)
    again = make(None, persistent_workers=True, workers="fork")
    again.load_state_dict(log.states_of(1)[0])
    assert all(map(equal, list(again), second))


def test_the_iteration_of_a_resumed_epoch_has_the_rest(tmp_path):
    loader = make(tmp_path / "log", workers="fork")
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    del iterator, loader
    wait_for_ends()
    again = make(tmp_path / "log", workers="fork")
    again.load_state_dict(state)
    rest = list(again)
    list(again)
    log = read(tmp_path / "log")
    assert rows(log, "epoch", "step") == [
        [(0, 0), (0, 1), (0, 2)],
        [(0, step) for step in range(3, 8)],
        [(1, step) for step in range(8)],
    ]
    assert [indices for one in rows(log, "indices")[:2] for (indices,) in one] == indices_of([*first, *rest])
    resumed = make(None, workers="fork")
    resumed.load_state_dict(log.states_of(0)[1])
    assert all(map(equal, list(resumed), rest))


def test_out_of_order_the_rows_are_in_the_order_of_delivery(tmp_path):
    loader = make(tmp_path / "log", in_order=False, workers="fork")
    batches = list(loader)
    (found,) = rows(read(tmp_path / "log"), "step", "indices")
    assert [indices for _, indices in found] == indices_of(batches)
    assert sorted(step for step, _ in found) == list(range(8))


@KINDS
def test_a_worker_that_is_lost_is_counted_and_its_batches_are_rows_once(tmp_path, workers):
    loader = make(tmp_path / "log", Dying(tmp_path / "died", at=13), shuffle=False, workers=workers)
    batches = list(loader)
    (found,) = rows(read(tmp_path / "log"), "step", "indices", "worker", "restarts")
    assert [indices for _, indices, *_ in found] == indices_of(batches)
    assert [(step, worker) for step, _, worker, _ in found] == [(step, step % 2) for step in range(8)]
    assert found[-1][-1] == 1
    assert found[0][-1] == 0 or found == sorted(found)


def test_what_came_of_each_step(tmp_path):
    loader = make(tmp_path / "log", Noisy(bad=(3, 4, 5, 7)), on_error="skip", shuffle=False, skip_steps=[6])
    assert len(list(loader)) == 6
    (found,) = rows(read(tmp_path / "log"), "step", "outcome", "skipped", "indices")
    outcomes = {step: (OUTCOMES[outcome], skipped) for step, outcome, skipped, _ in found}
    assert outcomes == {
        **dict.fromkeys(range(8), ("batch", 0)),
        1: ("empty", 3),
        2: ("batch", 1),
        6: ("skipped", 0),
    }
    assert {step: indices for step, _, _, indices in found} == {
        step: [*range(3 * step, 3 * step + 3)] for step in range(8)
    }


def test_an_exception_is_a_row(tmp_path):
    iterator = iter(make(tmp_path / "log", Noisy(bad=(4,)), shuffle=False, workers="fork"))
    next(iterator)
    with pytest.raises(ValueError, match="sample 4 is bad"):
        next(iterator)
    list(iterator)
    local = iter(make(tmp_path / "local", Noisy(bad=(4,)), shuffle=False, num_workers=0))
    next(local)
    with pytest.raises(ValueError, match="sample 4 is bad"):
        next(local)
    list(local)
    found = [rows(read(tmp_path / name), "step", "outcome", "digest")[0] for name in ("log", "local")]
    assert [OUTCOMES[outcome] for _, outcome, _ in found[0]] == ["batch", "error", *["batch"] * 6]
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream(tmp_path, num_workers):
    loader = make(tmp_path / "log", Numbers(), shuffle=None, skip_steps=[1], num_workers=num_workers)
    batches = list(loader)
    (found,) = rows(read(tmp_path / "log"), "step", "worker", "outcome", "indices")
    assert [OUTCOMES[outcome] for _, _, outcome, _ in found].count("skipped") == 1
    assert len(found) == len(batches) + 1
    assert [indices for *_, indices in found] == [None] * len(found)
    first = [batch.tolist()[0] // 100 for batch in batches]
    assert [worker for _, worker, outcome, _ in found if OUTCOMES[outcome] == "batch"] == first


def test_the_producer_of_a_share_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loader = DataLoader(Noisy(), BATCH, num_workers=2, provenance="log.arrows")
    with share(loader, consumers=1) as shared_loader:
        batches = list(shared_loader.consumer(0))
    assert [indices for (indices,) in rows(read(tmp_path / "log.arrows"), "indices")[0]] == indices_of(batches)


PROGRAM = """
import sys
from rayloader import DataLoader
from provenance_data import Noisy
iterator = iter(DataLoader(Noisy(), 3, num_workers=2, workers="fork", provenance=sys.argv[1]))
for _ in range(4):
    next(iterator)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_program_that_ends_or_is_killed_leaves_a_log_that_the_next_one_continues(tmp_path, killed):
    path = str(tmp_path / "log")
    here = os.path.dirname(__file__)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=here, text=True
    ) as program:
        assert program.stdout.readline() == "ready\n"
        with pytest.raises(RayloaderError, match="another process writes to the provenance log"):
            iter(make(path))
        if killed:
            program.send_signal(signal.SIGKILL)
        program.stdin.close()
        program.wait()
    log = read(path)
    steps = [step for (step,) in rows(log, "step")[0]]
    assert steps == [*range(4)][: len(steps) if killed else 4]
    list(make(path, workers="fork"))
    assert [len(one) for one in rows(read(path), "step")] == [len(steps), 8]


STRIDE = 11


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_interrupt_loses_and_doubles_no_row(tmp_path, num_workers):
    """At any point of `next()`; every eleventh here."""
    for number in range(1, 2000, STRIDE):
        path = tmp_path / f"{number}"
        loader = make(path, num_workers=num_workers, workers="fork", shuffle=False)
        iterator = iter(loader)
        got = [next(iterator)]
        ignored = contextlib.suppress(KeyboardInterrupt)
        with no_hang(lambda at=number: at), ignored, interrupted_at(number) as interrupt:
            got.append(next(iterator))
        taken = loader.state_dict()["_num_yielded"] if num_workers else len(got)
        del iterator, loader
        gc.collect()
        wait_for_ends()
        steps = [step for (step,) in rows(read(path), "step")[0]]
        if num_workers:
            assert steps == [*range(taken)], interrupt.where
        else:
            assert steps[: len(got)] == [*range(len(got))], interrupt.where
        if not interrupt.fired:
            break
    assert number > STRIDE
