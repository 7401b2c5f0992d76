"""A worker that goes on in another process builds the same batches or says that it can't: after a kill, and resumed.

The conformance tests do the same to datasets that can be built again whole; here are those with random generators of
their own wherever these may be, and those that can't.
"""

import os
import re
import signal
import time

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import rayloader.host.worker
import restoring_data as data
import stateful
from checkpoint_data import plain
from inside import kill_worker
from latches import Gate
from probes import Calls, Stream
from rayloader import DataLoader, ReplayError, StateError
from rayloader.workers.fleet import Fleet
from restoring_data import LENGTH

HANG_LIMIT = 500.0  # seconds that a test waits for a batch


def make(arguments, **options):
    """A loader of forks. Without `snapshots`, those of so short an epoch are rare, and all of it may be built again."""
    torch.manual_seed(1)
    usual = {"batch_size": 4, "num_workers": 2, "prefetch_factor": 2, "timeout": HANG_LIMIT, "workers": "fork"}
    return DataLoader(**{**usual, **arguments, **options})


@pytest.fixture
def snapshots(monkeypatch):
    """A snapshot after each batch."""
    monkeypatch.setattr("rayloader.resume.snapshot.SHARE", 1e9)


def resumed(loader, state):
    loader.load_state_dict(state)
    return [plain(batch) for batch in loader]


# ---- what can be built again


def check(arguments, killed):
    """That a run goes on after 16 batches, one of its workers killed, or in another loader; gives all batches."""
    expected = [plain(batch) for batch in make(arguments())]
    loader = make(arguments())
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(16)]
    if killed:
        kill_worker(iterator)
        found += [plain(batch) for batch in iterator]
    else:
        found += resumed(make(arguments()), loader.state_dict())
    assert found == expected
    return expected


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("case", data.GENERATORS)
def test_generators_go_on_wherever_they_are(case, killed, snapshots):
    check(data.GENERATORS[case], killed)


@pytest.mark.parametrize("killed", [False, True])
def test_albumentations_go_on(killed, snapshots):
    """Without a seed the generators come out of nowhere, but once for all workers: with the dataset."""
    dataset = data.augmented()
    expected = check(lambda: {"dataset": dataset}, killed)
    assert len({str(images) for _, images in expected}) >= 12  # the two workers draw the same, as with torch's loader


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_before_and_after_one_is_made_late(seeding, snapshots):
    """Batch 5 makes it: until the state of that batch is left behind, another process makes it again, too."""

    def fresh():
        return make({"dataset": Calls(data.Late(), LENGTH)}, seeding=seeding, num_workers=1)

    loader = fresh()
    found, states = [], []
    for batch in loader:
        found.append(plain(batch))
        states.append(loader.state_dict())
    assert resumed(fresh(), states[4]) == found[5:]
    for taken in (7, 8, 16):
        with pytest.raises(ReplayError, match=r"a random generator that was created while loading.* in __init__"):
            resumed(fresh(), states[taken - 1])


# ---- what cannot


CANNOT = {  # the dataset; the error of each batch of a worker that has to build it again
    "made late": (lambda: Calls(data.Late(), LENGTH), ReplayError, "that was created while loading"),
    "the process": (lambda: Calls(lambda index: [index, os.getpid()], LENGTH), ReplayError, ""),
    "a stream of the process": (lambda: Stream(lambda worker: ([k, os.getpid()] for k in range(80))), ReplayError, ""),
    "a buffer": (data.ForgetsItsBuffer, ReplayError, r"differs from the original: .* such as a shuffle buffer"),
    "a stream that raises": (lambda: data.FailsToGoOn(True), ReplayError, "did not come|as planned"),
    "a stream that ends": (lambda: data.FailsToGoOn(False), ReplayError, "did not come|has ended"),
    "load_state_dict raises": (data.FailsToLoad, ValueError, "as planned"),
    "can't be pickled": (
        lambda: data.Untellable(int, LENGTH),
        ReplayError,
        r"state of worker 0 could not be saved(.|\n)*pickle",
    ),
    "state_dict raises": (
        lambda: data.RaisesInStateDict(int, LENGTH),
        ReplayError,
        r"state of worker 0 could not be saved(.|\n)*OSError: as planned",
    ),
}
NO_STATE = "can't be pickled", "state_dict raises"


def outcomes(iterator, count=10):
    """What so many calls of next() gave: batches, and what was raised."""
    found = []
    for _ in range(count):
        try:
            found.append(plain(next(iterator)))
        except StopIteration:
            break
        except Exception as error:
            found.append(error.with_traceback(None))  # whose frames have the iterator, and `found`
    return found


def are(errors, case):
    """Whether all are what is expected of the case."""
    _, kind, text = CANNOT[case]
    return errors and all(isinstance(error, kind) and re.search(text, str(error)) for error in errors)


@pytest.mark.parametrize("case", CANNOT)
def test_after_a_kill_what_cannot_be_built_again_is_an_error_and_never_another_stream(case, snapshots):
    iterator = iter(make({"dataset": CANNOT[case][0]()}))
    for _ in range(12):
        next(iterator)
    kill_worker(iterator)
    found = outcomes(iterator)
    assert len(found) >= 8
    assert not any(isinstance(batch, Exception) for batch in found[1::2]), "worker 1 has lost nothing"
    errors = [error for error in found[::2] if isinstance(error, Exception)]
    assert are(found[4::2], case), found[::2]  # two batches may have been built before
    assert are(errors, case), errors
    if CANNOT[case][1] is ReplayError:
        assert all("worker 0" in str(error) for error in errors)


@pytest.mark.parametrize("case", [case for case in CANNOT if case not in NO_STATE])
def test_resumed_it_is_one_for_every_batch(case, snapshots):
    loader, again = (make({"dataset": CANNOT[case][0]()}) for _ in range(2))
    iterator = iter(loader)
    for _ in range(12):
        next(iterator)
    again.load_state_dict(loader.state_dict())
    found = outcomes(iter(again))
    assert len(found) >= 8
    assert are(found, case), found


@pytest.mark.parametrize("case", NO_STATE)
def test_a_state_that_cannot_be_told_hurts_only_who_asks_for_it(case):
    loader = make({"dataset": CANNOT[case][0]()})
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(8)]
    with pytest.raises(StateError, match=r"could not save its state(.|\n)*(pickle|as planned)"):
        loader.state_dict()
    found += [plain(batch) for batch in iterator]
    assert found == [list(range(first, first + 4)) for first in range(0, LENGTH, 4)]


@pytest.mark.parametrize(("raises", "text"), [(True, "as planned"), (False, "has ended")])
def test_without_snapshots_a_stream_that_gives_nothing_is_an_error_too(raises, text, monkeypatch):
    monkeypatch.setattr("rayloader.resume.snapshot.SHARE", 0.0)
    loader, again = (make({"dataset": data.FailsToGoOn(raises)}) for _ in range(2))
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    with pytest.raises(ReplayError, match=text):
        resumed(again, loader.state_dict())


def test_a_stream_that_depends_on_how_often_it_was_iterated_over_is_an_error():
    loader, again = (make({"dataset": stateful.CountsEpochs()}, batch_size=3, persistent_workers=True) for _ in "ab")
    list(loader)
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(ReplayError):
        resumed(again, loader.state_dict())


class CannotGoOn(data.Numbers):
    """It tells a state with which it can't begin; and after a while it raises in any case."""

    def __iter__(self):
        if self.resumed:
            raise IndexError("no such place")
        yield from range(200)
        raise IndexError("no more")


def test_an_error_at_the_first_batch_from_a_loaded_state_says_so(snapshots):
    iterator = iter(make({"dataset": CannotGoOn()}))
    for _ in range(8):
        next(iterator)
    kill_worker(iterator)
    with pytest.raises((IndexError, ReplayError), match="no such place") as after_a_loss:  # built again, or new
        list(iterator)
    assert "the first batch since load_state_dict() of the dataset" in str(after_a_loss.value)
    with pytest.raises(IndexError, match="no more") as unloaded:
        list(make({"dataset": CannotGoOn()}))
    assert "load_state_dict" not in str(unloaded.value)


class Heavy(Calls):
    """Its state is large; its samples show how often it was told."""

    told = 0

    def __getitem__(self, index):
        return self.told

    def state_dict(self):
        self.told += 1
        return {"content": torch.zeros(4_000_000)}

    def load_state_dict(self, state):
        """Takes nothing."""


def test_a_state_is_taken_rarely(ray_session):
    """After the first call of an actor; then not for a hundred times what that took."""
    loader = make({"dataset": Heavy(None, LENGTH)}, num_workers=1, workers="ray")
    assert max(plain(batch)[-1] for batch in loader) == 1


# ---- building again takes its time


@pytest.fixture
def samples(monkeypatch):
    """A function of an index that takes 0.03 s, by the clock of the driver, however fast this machine is."""
    clock = torch.zeros(1, dtype=torch.double).share_memory_()

    class Clock:
        sleep, perf_counter = time.sleep, time.perf_counter

        @staticmethod
        def monotonic():
            return 1e9 + clock.item()  # after everything that was timed by another clock

    def sample(index):
        clock.add_(0.03)
        return index

    monkeypatch.setattr("rayloader.epoch.engine.time", Clock)
    return sample


def in_small_steps(worker_id):
    """What must be built again is built one batch a call."""
    rayloader.host.worker.REPLAY_SECONDS = 0.0


def test_building_again_is_no_hang(samples, monkeypatch):
    """All together it takes more than twice the timeout, and each batch an eighth of it."""
    monkeypatch.setattr("rayloader.resume.journal._is_before", lambda state, task_id: False)  # snapshots are rare
    arguments = {"dataset": Stream(lambda worker: map(samples, range(96))), "worker_init_fn": in_small_steps}
    options = {"num_workers": 1, "timeout": 1.0, "on_timeout": "restart", "max_worker_restarts": 1}
    loader = make(arguments, **options)
    iterator = iter(loader)
    found = [plain(next(iterator)) for _ in range(20)]
    state = loader.state_dict()
    kill_worker(iterator)
    found += [plain(batch) for batch in iterator]
    assert found == torch.arange(96).view(-1, 4).tolist()
    assert resumed(make(arguments, **options), state) == found[20:]


def test_a_replay_that_hangs_times_out(tmp_path):
    gate = Gate(tmp_path / "gate")

    def until_the_gate(worker_id):
        for index in range(60):
            if index == 8 and (tmp_path / "again").exists():
                gate.wait()
            yield index

    loader = make({"dataset": Stream(until_the_gate)}, num_workers=1)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    list(iterator)
    (tmp_path / "again").touch()
    loader = make({"dataset": Stream(until_the_gate)}, num_workers=1, timeout=1.0)
    loader.load_state_dict(state)
    with pytest.raises(rayloader.BatchTimeoutError):
        next(iter(loader))
    gate.open()


# ---- a state from before a worker has begun its epoch


class HeldAtTheBegin(IterableDataset):
    """Worker 1 waits for the gate before each epoch, and dies then if a file says so."""

    def __init__(self, gate, death):
        self.gate = gate
        self.death = death

    def __iter__(self):
        worker_id = get_worker_info().id
        if worker_id == 1:
            self.gate.wait()
            if self.death.exists():
                self.death.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return ((index, torch.rand(1)) for index in range(worker_id, 24, 2))


@pytest.mark.parametrize("dies", [False, True])
def test_a_state_waits_for_workers_that_have_not_begun_the_epoch(dies, tmp_path, monkeypatch):
    gate, death = Gate(tmp_path / "gate"), tmp_path / "death"
    gate.open()

    def fresh():
        return make({"dataset": HeldAtTheBegin(gate, death)}, persistent_workers=True)

    loader = fresh()
    expected = [[plain(batch) for batch in loader] for _ in range(2)]
    loader = fresh()
    assert [plain(batch) for batch in loader] == expected[0]
    gate = Gate(tmp_path / "gate")  # closed again
    iterator = iter(loader)
    if dies:
        death.touch()
    held, wait = [], Fleet.wait

    def open_the_gate_and_wait(fleet, timeout):
        if not held:
            held.append(fleet.workers[1].journal.begun)
            gate.open()
        return wait(fleet, timeout)

    monkeypatch.setattr(Fleet, "wait", open_the_gate_and_wait)
    state = loader.state_dict()
    assert held == [False]  # it had not begun
    assert not death.exists()
    assert [plain(batch) for batch in iterator] == expected[1]
    assert resumed(fresh(), state) == expected[1]
