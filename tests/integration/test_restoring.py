"""A worker that goes on in another process builds the same batches or says that it can't: after a kill, and resumed."""

import copy
import os
import re
import signal
import time
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import rayloader.host.worker
import restoring_data as data
from checkpoint_data import read, save
from inside import kill_worker
from latches import Gate
from probes import Calls, Stream
from rayloader import DataLoader, ReplayError, StateError
from rayloader.workers.fleet import Fleet
from restoring_data import lists

pytestmark = pytest.mark.usefixtures("ray_session")

HANG_LIMIT = 500.0  # seconds that a test waits for a batch


def make(arguments, **options):
    torch.manual_seed(1)
    usual = {"batch_size": 4, "num_workers": 2, "prefetch_factor": 2, "timeout": HANG_LIMIT}
    return DataLoader(**{**usual, **arguments, **options})


def interrupted(loader, at, killed=True):
    """All batches of a run whose worker 0 is killed when so many were taken, and the state of the loader then."""
    iterator = iter(loader)
    found = [lists(next(iterator)) for _ in range(at)]
    state = loader.state_dict()
    if killed:
        kill_worker(iterator)
    return found + [lists(batch) for batch in iterator], state


def outcomes(iterator, count):
    """What so many calls of next() gave: batches, and what was raised."""
    found = []
    for _ in range(count):
        try:
            found.append(lists(next(iterator)))
        except Exception as error:
            found.append(error.with_traceback(None))  # whose frames have the iterator, and `found`
    return found


def resumed(loader, state):
    loader.load_state_dict(state)
    return [lists(batch) for batch in loader]


# ---- random generators


@pytest.mark.parametrize("case", data.CASES)
def test_generators_go_on_wherever_they_are(case):
    loader = make(data.CASES[case]())
    iterator = iter(loader)
    for _ in range(16):
        next(iterator)
    state = loader.state_dict()
    assert resumed(make(data.CASES[case]()), state) == [lists(batch) for batch in iterator]


KILLED = {"global of a module"}  # each takes the start of a process


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in KILLED else pytest.mark.full) for c in data.CASES])
def test_generators_go_on_after_a_kill(case):
    expected = [lists(batch) for batch in make(data.CASES[case]())]
    assert interrupted(make(data.CASES[case]()), at=16)[0] == expected


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", [pytest.param(5, marks=pytest.mark.full), None])
def test_albumentations_go_on(seed, killed):
    """Without a seed the generators come out of nowhere, but once for all workers: with the dataset."""
    dataset = data.Augmented(seed)
    expected = [lists(batch) for batch in make({"dataset": dataset})]
    assert len({str(images) for _, images in expected}) >= 12  # the two workers draw the same, as with torch's loader
    found, state = interrupted(make({"dataset": dataset}), at=16, killed=killed)
    assert found == expected
    assert resumed(make({"dataset": dataset}), state) == expected[16:]


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_before_and_after_one_is_made_late(seeding, monkeypatch):
    """Batch 5 makes it: until the state of that batch is left behind, another process makes it again, too."""
    monkeypatch.setattr("rayloader.resume.snapshot.SHARE", 1e9)  # a snapshot after each batch, also in forks
    options = {"seeding": seeding, "num_workers": 1, "workers": "fork"}
    loader = make({"dataset": data.Late()}, **options)
    found, states = [], []
    for batch in loader:
        found.append(lists(batch))
        states.append(loader.state_dict())
    assert resumed(make({"dataset": data.Late()}, **options), states[4]) == found[5:]
    for taken in (7, 8, 16):
        with pytest.raises(ReplayError, match=r"a random generator that was created while loading.* in __init__"):
            resumed(make({"dataset": data.Late()}, **options), states[taken - 1])


CANNOT = {
    "system's, shown": lambda: {"dataset": data.SystemRandom(shows=True), "workers": "fork"},
    "a package's": lambda: {"dataset": data.OfAPackage()},
    "imported late": lambda: {"dataset": data.ImportsLate(), "workers": "fork"},
    "made late": lambda: {"dataset": data.Late(), "workers": "fork"},
    "the process": lambda: {"dataset": Calls(lambda index: [index, os.getpid()], data.LENGTH)},
}


@pytest.mark.parametrize(
    "case",
    [
        "system's, shown",
        "a package's",
        "made late",
        "imported late",
        pytest.param("the process", marks=pytest.mark.full),
    ],
)
def test_what_cannot_be_followed_is_an_error_and_never_another_stream(case, monkeypatch):
    monkeypatch.setattr("rayloader.resume.snapshot.SHARE", 1e9)  # in forks; else all of an epoch may be built again
    expected = [lists(batch)[0] for batch in make(CANNOT[case]())]
    assert len(expected) == 24
    loader = make(CANNOT[case]())
    iterator = iter(loader)
    for _ in range(16):
        next(iterator)
    state = loader.state_dict()
    kill_worker(iterator)
    errors = []
    for _ in range(8):  # the batches under way may have been built before
        try:
            next(iterator)
        except ReplayError as error:
            errors.append(str(error))
    assert len(errors) >= 2
    assert all("worker 0" in error for error in errors)
    loader = make(CANNOT[case]())
    loader.load_state_dict(state)
    iterator = iter(loader)
    for _ in range(8):
        with pytest.raises(ReplayError):
            next(iterator)


# ---- datasets that tell their state


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.parametrize("at", [4, *(pytest.param(at, marks=pytest.mark.full) for at in (1, 9))])
def test_a_dataset_that_is_its_own_iterator(at, killed):
    expected = [lists(batch) for batch in make({"dataset": data.OwnIterator()})]
    assert len(expected) == 20
    found, state = interrupted(make({"dataset": data.OwnIterator()}), at, killed)
    assert found == expected
    assert resumed(make({"dataset": data.OwnIterator()}), state) == expected[at:]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_restore_that_fails_is_that_error_for_every_batch(num_workers):
    loader = make({"dataset": data.OwnIterator()}, num_workers=2)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    loader = make({"dataset": data.OwnIterator(fails=True)}, num_workers=num_workers)
    loader.load_state_dict(state)
    iterator = iter(loader)
    for _ in range(12):
        with pytest.raises(ValueError, match="as planned"):
            next(iterator)


class LostItsWay(IterableDataset):
    """Its `load_state_dict` is quiet, and the stream that was resumed raises, or ends at once."""

    def __init__(self, how):
        self.how, self.at, self.resumed = how, 0, False

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.resumed = state["at"], True

    def __iter__(self):
        if self.resumed and self.how == "raises":
            raise FileNotFoundError("as planned")
        while self.at < 80 and not self.resumed:
            self.at += 1
            yield self.at


@pytest.mark.parametrize("how", ["raises", pytest.param("ends", marks=pytest.mark.full)])
def test_a_stream_with_state_that_gives_nothing_after_a_kill_is_an_error(how):
    iterator = iter(make({"dataset": LostItsWay(how)}))
    for _ in range(7):
        next(iterator)
    kill_worker(iterator)
    *_, eleventh, twelfth, thirteenth, fourteenth = outcomes(iterator, 8)
    for error in (twelfth, fourteenth):
        assert isinstance(error, ReplayError)
        assert "did not come" in str(error)
    assert not any(isinstance(batch, Exception) for batch in (eleventh, thirteenth)), "worker 1 has lost nothing"


@pytest.mark.parametrize("share", [0.0, 1e9], ids=["no snapshot", "a snapshot after each batch"])
@pytest.mark.parametrize("how", ["raises", "ends"])
def test_a_stream_with_state_that_gives_nothing_when_it_is_resumed_is_an_error(how, share, monkeypatch):
    monkeypatch.setattr("rayloader.resume.snapshot.SHARE", share)
    loader = make({"dataset": LostItsWay(how)}, workers="fork")
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    state = loader.state_dict()
    loader = make({"dataset": LostItsWay(how)}, workers="fork")
    with pytest.raises(ReplayError, match="as planned" if how == "raises" else "has ended"):
        resumed(loader, state)


class Differs(IterableDataset):
    """Another stream in each process."""

    def __iter__(self):
        return iter([[index, os.getpid()] for index in range(40)])


def test_a_stream_that_differs_is_that_error_for_every_batch():
    loader = make({"dataset": Differs()}, num_workers=1)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    kill_worker(iterator)
    with pytest.raises(ReplayError):
        list(iterator)
    for _ in range(4):
        with pytest.raises(ReplayError):
            next(iterator)
    loader = make({"dataset": Differs()}, num_workers=1)
    loader.load_state_dict(state)
    iterator = iter(loader)
    for _ in range(4):
        with pytest.raises(ReplayError):
            next(iterator)


def test_a_state_that_cannot_be_told_hurts_only_who_asks_for_it():
    loader = make({"dataset": data.Untellable()})
    iterator = iter(loader)
    found = [lists(next(iterator)) for _ in range(8)]
    with pytest.raises(StateError, match=r"could not save its state(.|\n)*pickle"):
        loader.state_dict()
    found += [lists(batch) for batch in iterator]
    assert found == [lists(batch) for batch in make({"dataset": data.Indices()})]


LOST = {
    "its state can't be pickled": (data.Untellable, ReplayError, r"state of worker 0 could not be saved(.|\n)*pickle"),
    "state_dict raises": (
        lambda: data.Untellable(raises=True),
        ReplayError,
        r"state of worker 0 could not be saved(.|\n)*OSError: as planned",
    ),
    "load_state_dict raises": (lambda: data.OwnIterator(fails=True), ValueError, "as planned"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full if case == "state_dict raises" else ()) for case in LOST]
)
def test_a_worker_that_cannot_be_restored_after_a_kill_is_that_error_for_each_of_its_batches(case):
    dataset, kind, text = LOST[case]
    expected = [lists(batch) for batch in make({"dataset": dataset()})]
    assert len(expected) >= 20
    iterator = iter(make({"dataset": dataset()}))
    found = [lists(next(iterator)) for _ in range(8)]
    kill_worker(iterator)
    found += outcomes(iterator, len(expected) - 8)
    assert found[1::2] == expected[1::2], "worker 1 has lost nothing"
    before, after = found[:12:2], found[12::2]  # two batches may have been built before
    assert all(a == b or isinstance(a, kind) for a, b in zip(before, expected[::2], strict=False))
    assert all(isinstance(error, kind) and re.search(text, str(error)) for error in after), after


class Remembers(data.Sized):
    """Its state is of types that a file of plain data can't hold, and of NumPy's; each batch shows it."""

    def __init__(self):
        self.state = {
            "by name": OrderedDict(second=0, first=0),
            "counts": Counter(),
            "last": np.zeros(3, np.int16),
            "number": np.float32(0.5),
            "dtype": torch.float32,
        }

    def __getitem__(self, index):
        self.state["by name"].move_to_end("first" if index % 2 else "second")
        self.state["counts"][index // 10] += 1
        self.state["last"][index % 3] = index
        self.state["number"] = np.float32(index)
        self.state["dtype"] = torch.bfloat16 if index % 3 else torch.int8
        return [index, repr(self.state)]

    def state_dict(self):
        return copy.deepcopy(self.state)

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_of_the_types_of_python_and_torch_goes_through_a_file(num_workers):
    options = {"num_workers": 1} if num_workers else {"num_workers": 0, "prefetch_factor": None, "timeout": 0}
    loader = make({"dataset": Remembers()}, **options)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    state = read(save(loader))
    found = resumed(make({"dataset": Remembers()}, **options), state)
    assert len(found) == 14
    assert found == [lists(batch) for batch in iterator]
    shown = found[-1][1][-1]
    for text in ("OrderedDict(", "Counter(", "dtype=int16", "np.float32(", "torch."):
        assert text in shown


class Heavy(data.Indices):
    """Its state is large; its samples may show how often it was told."""

    def __init__(self, shows=False):
        self.told = 0
        self.calls = 0
        self.shows = shows

    def __getitem__(self, index):
        self.calls += 1
        return [index, self.calls, self.told if self.shows else 0]

    def state_dict(self):
        self.told += 1
        return {"calls": self.calls, "content": torch.zeros(4_000_000)}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def test_a_state_is_taken_rarely_and_nothing_is_lost():
    loader = make({"dataset": Heavy(shows=True)}, num_workers=1)
    iterator = iter(loader)
    batches = [lists(next(iterator)) for _ in range(24)]
    assert max(batches[-1][2]) == 1  # after the first call; then not for a hundred times what that took
    assert [batch[1] for batch in batches] == [[4 * n + k for k in range(1, 5)] for n in range(24)]
    loader = make({"dataset": Heavy()}, num_workers=1)
    iterator = iter(loader)
    for _ in range(10):
        next(iterator)
    rest = resumed(make({"dataset": Heavy()}, num_workers=1), loader.state_dict())
    assert [batch[1] for batch in rest] == [batch[1] for batch in batches[10:]]


# ---- reading again takes its time


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


NEWS = re.compile(
    r"rayloader: worker 0 is rebuilding earlier batches: (\d+) of (\d+) in (\d+) s, ([\d.]+) a second; "
    r"a dataset with state_dict\(\) and load_state_dict\(\) need not be read again"
)


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.full)])
def test_building_again_is_no_hang(stream, samples, monkeypatch, caplog):
    """All together it takes more than twice the timeout, and each batch an eighth of it."""
    monkeypatch.setattr("rayloader.epoch.engine.REBUILDING_PATIENCE_S", 0.2)
    monkeypatch.setattr("rayloader.resume.journal._is_before", lambda state, task_id: False)  # snapshots are rare
    arguments = {
        "dataset": Stream(lambda worker: map(samples, range(96))) if stream else Calls(samples, 96),
        "worker_init_fn": in_small_steps,
        "ray_remote_args": {"num_cpus": 0, "memory": 5},  # the steps of these actors stay small
    }
    options = {"num_workers": 1, "timeout": 1.0, "on_timeout": "restart", "max_worker_restarts": 1}
    loader = make(arguments, **options)
    found, state = interrupted(loader, at=20)
    assert found == torch.arange(96).view(-1, 4).tolist()
    news = [r.getMessage() for r in caplog.records if "is rebuilding" in r.getMessage()]
    assert len(news) >= 2
    told = [NEWS.fullmatch(text).groups() for text in news]
    assert [int(done) for done, *_ in told] == sorted({int(done) for done, *_ in told}), "it goes on"
    assert len({total for _, total, *_ in told}) == 1
    assert 20 <= int(told[0][1]) <= 22  # two batches may have been built that were not taken
    for done, total, seconds, rate in told:
        assert 0 < int(done) < int(total)
        # Four samples of 0.03 s a batch; the clock runs from the answer that one is built.
        assert (int(seconds), rate) == (round((int(done) - 1) * 0.12), "8.3")
    assert resumed(make(arguments, **options), state) == found[20:]


def test_a_replay_that_hangs_times_out(tmp_path):
    gate = Gate(tmp_path / "gate")

    def samples(worker_id):
        for index in range(60):
            if index == 8 and (tmp_path / "again").exists():
                gate.wait()
            yield index

    loader = make({"dataset": Stream(samples)}, num_workers=1)
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    list(iterator)
    (tmp_path / "again").touch()
    loader = make({"dataset": Stream(samples)}, num_workers=1, timeout=1.0)
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


@pytest.mark.parametrize(("dies", "pins"), [(False, False), (True, False), (False, True)])
def test_a_state_waits_for_workers_that_have_not_begun_the_epoch(dies, pins, tmp_path, monkeypatch, accelerator):
    gate, death = Gate(tmp_path / "gate"), tmp_path / "death"
    gate.open()

    def fresh():
        return make({"dataset": HeldAtTheBegin(gate, death)}, persistent_workers=True, pin_memory=pins)

    loader = fresh()
    expected = [[lists(batch) for batch in loader] for _ in range(2)]
    loader = fresh()
    assert [lists(batch) for batch in loader] == expected[0]
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
    assert [lists(batch) for batch in iterator] == expected[1]
    assert resumed(fresh(), state) == expected[1]


class ForgetsItsBuffer(IterableDataset):
    """Its state says how far it was read, and nothing of the buffer that it shuffles in."""

    def __init__(self):
        self.at, self.buffer = 0, []

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def __iter__(self):
        while self.at < 200:
            self.at += 1
            self.buffer.append(self.at)
            if len(self.buffer) > 20:
                yield self.buffer.pop(0)
        yield from self.buffer


@pytest.mark.parametrize("killed", [True, False])
def test_a_dataset_whose_state_leaves_something_out_is_an_error(killed):
    loader = make({"dataset": ForgetsItsBuffer()}, persistent_workers=True)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    if killed:
        kill_worker(iterator)
    else:
        state = loader.state_dict()
        loader = make({"dataset": ForgetsItsBuffer()}, persistent_workers=True)
        loader.load_state_dict(state)
        iterator = iter(loader)
    with pytest.raises(ReplayError, match=r"differs from the original: .* such as a shuffle buffer"):
        list(iterator)


class CannotGoOn(IterableDataset):
    """It tells a state with which it can't begin; and after a while it raises in any case."""

    def __init__(self):
        self.loaded = False

    def state_dict(self):
        return {"at": None}

    def load_state_dict(self, state):
        self.loaded = True

    def __iter__(self):
        if self.loaded:
            raise IndexError("no such place")
        yield from range(200)
        raise IndexError("no more")


def test_an_error_at_the_first_batch_from_a_loaded_state_says_so():
    loader = make({"dataset": CannotGoOn()})
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    kill_worker(iterator)
    with pytest.raises((IndexError, ReplayError), match="no such place") as after_a_loss:  # built again, or new
        list(iterator)
    assert "the first batch since load_state_dict() of the dataset" in str(after_a_loss.value)
    with pytest.raises(IndexError, match="no more") as unloaded:
        list(make({"dataset": CannotGoOn()}))
    assert "load_state_dict" not in str(unloaded.value)
