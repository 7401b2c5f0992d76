"""Workers that die in ways that the table does not have: several, again and again, in loaders of every kind."""

import contextlib
import os
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

import rayloader
from fault_points import BATCH_SIZE, DATASETS, POISONED, SAMPLES, STRUCK, Faults, epoch, kill, wait_for_exit, warned
from pretended import pretend_accelerator
from rayloader import DataLoader
from rayloader.workers import ray_use

pytestmark = pytest.mark.usefixtures("ray_session")

# Where it makes little difference, one kind is for full runs.
MAP = pytest.param("map", marks=pytest.mark.full)
ITERABLE = pytest.param("iterable", marks=pytest.mark.full)
HANG_LIMIT = 500.0  # seconds; on expiry the loader raises and the test fails


@pytest.fixture(params=["fork", pytest.param("ray", marks=pytest.mark.full)], autouse=True)
def kind_of_workers(request, monkeypatch):
    """Recovery knows no kind of workers. Where a test does not say which it means, they are forks, which start soon."""
    monkeypatch.setattr(ray_use, "is_used", lambda: request.param == "ray")


@pytest.fixture
def faults(tmp_path):
    folder = tmp_path / "faults"
    folder.mkdir()
    return Faults(folder)


def make(faults, kind="map", **options):
    dataset = DATASETS[kind](faults, own_generator=options.get("seeding") != "batch")
    functions = {"collate_fn": dataset.collate, "worker_init_fn": dataset.worker_init}
    return DataLoader(dataset, BATCH_SIZE, **{"num_workers": 2, "timeout": HANG_LIMIT, **functions, **options})


# ---- what is told again


class OverwritesItsIndices(Sampler):
    """Gives the same object for every batch, with other indices in it."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 12

    def __iter__(self):
        memory = np.zeros(BATCH_SIZE, np.int64)
        indices = {"list": [0] * BATCH_SIZE, "array": memory, "tensor": torch.from_numpy(memory)}[self.kind]
        for batch in range(len(self)):
            for place in range(BATCH_SIZE):
                indices[place] = (batch * BATCH_SIZE + place) % SAMPLES
            yield indices
        indices[:] = [0] * BATCH_SIZE if self.kind == "list" else 0


@pytest.mark.parametrize("kind", ["array", *(pytest.param(k, marks=pytest.mark.full) for k in ("list", "tensor"))])
def test_a_sampler_may_overwrite_its_indices_and_what_is_lost_is_told_again_as_it_was(kind, faults, caplog):
    dataset = DATASETS["map"](faults, own_generator=True)
    loader = DataLoader(
        dataset,
        batch_sampler=OverwritesItsIndices(kind),
        num_workers=2,
        timeout=HANG_LIMIT,
        prefetch_factor=5,
        collate_fn=dataset.collate,
    )
    undisturbed = epoch(loader)
    drawn = [index for batch in undisturbed[0] for index in batch[0]]
    assert drawn == [position % SAMPLES for position in range(12 * BATCH_SIZE)]
    faults.plan("collate_fn", "SIGKILL")
    assert epoch(loader) == undisturbed
    assert len(faults.struck()) == len(warned(caplog)) == 1


# ---- deaths on deaths


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        ("map", "replacement's worker_init_fn"),
        pytest.param("iterable", "replacement's worker_init_fn", marks=pytest.mark.full),
        pytest.param("iterable", "rebuild", marks=pytest.mark.full),
    ],
)
def test_killed_again_while_recovering(faults, kind, again, caplog):
    loader = make(faults, kind)
    undisturbed = epoch(loader)
    faults.plan("collate_fn", "SIGKILL")
    faults.plan(again, "SIGKILL")
    assert epoch(loader) == undisturbed
    assert len(set(faults.struck())) == len(warned(caplog)) == 2
    wait_for_exit(faults.struck())


class Noise(Dataset):
    """Enough samples for every worker to have work left when the first batches are there."""

    def __len__(self):
        return 60

    def __getitem__(self, index):
        return index, torch.rand(1), random.random(), np.random.rand()


class NoiseStream(IterableDataset):
    def __iter__(self):
        return (Noise()[index] for index in range(20))


@pytest.mark.parametrize("dataset", [pytest.param(Noise(), marks=pytest.mark.full), NoiseStream()])
def test_all_workers_killed_at_once(dataset, faults, caplog):
    options = {"worker_init_fn": faults.started, "prefetch_factor": 2, "timeout": HANG_LIMIT}
    loader = DataLoader(dataset, 2, num_workers=2, **options)
    undisturbed = contents(loader)
    torch.manual_seed(0)
    iterator = iter(loader)
    found = [content(next(iterator)) for _ in range(3)]
    kill(*map(faults.process_of, range(2)))
    assert found + list(map(content, iterator)) == undisturbed
    assert len(warned(caplog)) == 2


def content(batch):
    return [column.tolist() for column in batch]


def contents(loader):
    torch.manual_seed(0)
    return [content(batch) for batch in loader]


# ---- how many deaths are too many


@pytest.mark.parametrize("kind", ["map", ITERABLE])
def test_without_restarts_a_death_is_the_end_of_the_epoch_and_not_of_the_loader(faults, kind, caplog):
    loader = make(faults, kind, max_worker_restarts=0)
    undisturbed = epoch(loader)
    faults.plan("collate_fn", "SIGKILL")
    torch.manual_seed(0)
    batches = []
    with pytest.raises(rayloader.WorkerDiedError, match=r"^DataLoader worker \(pid\(s\) \d+\) exited unexpectedly"):
        batches.extend(batch.content() for batch in loader)
    assert batches == undisturbed[0][: len(batches)]
    assert warned(caplog) == []
    assert epoch(loader) == undisturbed


class DiesEveryThirdTime(Dataset):
    """Each process builds two batches, which leads one further than the one before it, then dies over the next one."""

    def __init__(self):
        self.built = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.built += 1
        if self.built == 3:
            os._exit(1)
        return index


@pytest.mark.full
def test_a_finished_batch_starts_the_count_of_deaths_anew(caplog):
    loader = DataLoader(DiesEveryThirdTime(), None, num_workers=1, max_worker_restarts=1, prefetch_factor=1)
    assert list(loader) == list(range(4))
    assert len(warned(caplog)) == 2


# ---- loaders of every kind


def persistent_epochs(faults, kind):
    """Undisturbed ones: each goes on in the random streams of the one before."""
    loader = make(faults, kind, persistent_workers=True)
    found = [epoch(loader) for _ in range(3)]
    assert found[0] != found[1] != found[2]
    return found


@pytest.mark.parametrize("in_epoch", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", [MAP, "iterable"])
def test_persistent_workers_go_on_where_they_were(faults, kind, in_epoch, caplog):
    undisturbed = persistent_epochs(faults, kind)
    loader, found = make(faults, kind, persistent_workers=True), []
    for number in range(3):
        if number == in_epoch:
            faults.plan("collate_fn", "SIGKILL")
        found.append(epoch(loader))
    assert found == undisturbed
    assert len(faults.struck()) == len(warned(caplog)) == 1


@pytest.mark.parametrize("kind", ["map", ITERABLE])
def test_persistent_workers_that_were_killed_between_epochs(faults, kind, caplog):
    undisturbed = persistent_epochs(faults, kind)
    loader = make(faults, kind, persistent_workers=True)
    found = [epoch(loader)]
    kill(faults.process_of(STRUCK))
    assert [*found, epoch(loader), epoch(loader)] == undisturbed
    assert len(warned(caplog)) == 1


def test_any_worker_goes_on_for_another_with_dynamic_scheduling(faults, caplog):
    loader = make(faults, seeding="batch", scheduling="dynamic")
    undisturbed = [epoch(loader, seed) for seed in range(2)]
    faults.plan("__getitem__", "SIGKILL")
    assert [epoch(loader, seed) for seed in range(2)] == undisturbed
    assert len(faults.struck()) == len(warned(caplog)) == 1


@pytest.mark.full
@pytest.mark.parametrize("kind", DATASETS)
def test_without_order_each_batch_comes_once(faults, kind, caplog):
    loader = make(faults, kind, in_order=False)
    faults.plan("collate_fn", "SIGKILL")
    batches, _ = epoch(loader)
    assert sorted(content[0] for content in batches) == [[k, k + 1] for k in range(0, 16, 2)]
    assert len(faults.struck()) == len(warned(caplog)) == 1


@pytest.mark.full
def test_without_order_a_batch_with_its_own_seed_is_the_same(faults, caplog):
    loader = make(faults, seeding="batch")
    undisturbed, _ = epoch(loader)
    loader = make(faults, in_order=False, seeding="batch")
    faults.plan("collate_fn", "SIGKILL")
    assert sorted(epoch(loader)[0]) == undisturbed
    assert len(faults.struck()) == len(warned(caplog)) == 1


@pytest.fixture
def accelerator(monkeypatch):
    """One that is none: gives a list as long as the number of tensors that were pinned."""
    pinned = []
    pretend_accelerator(monkeypatch, lambda tensor: pinned.append(None) or tensor)
    return pinned


@pytest.mark.parametrize("kind", ["map", ITERABLE])
def test_the_thread_that_pins_goes_on(faults, kind, accelerator, caplog):
    loader = make(faults, kind, pin_memory=True)
    undisturbed = epoch(loader)
    faults.plan("collate_fn", "SIGKILL")
    assert epoch(loader) == undisturbed
    assert len(accelerator) == 2 * 8 * 5  # epochs, batches, tensors
    assert len(faults.struck()) == len(warned(caplog)) == 1


# ---- datasets of every kind


class Reseeds(Dataset):
    """Changes the global generators itself; what follows depends on it."""

    def __init__(self, faults):
        self.faults = faults

    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == POISONED:
            self.faults.strike("__getitem__")
        if index in (4, 7):
            random.seed(index)
            np.random.seed(index)
            torch.manual_seed(index)
        return index, random.gauss(0, 1), np.random.randn(), torch.randn(1)


class ReseedsStream(Reseeds, IterableDataset):
    def __iter__(self):
        return (self[index] for index in range(get_worker_info().id, 16, 2))


class Counts(Reseeds):
    """Its samples depend on how many came before: a state that it tells and takes itself."""

    calls = 0

    def __getitem__(self, index):
        self.calls += 1
        return self.calls, *super().__getitem__(index)

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Resumes(IterableDataset):
    """A stream that tells where it is, and goes on from there, or from the start where no snapshot has come yet."""

    def __init__(self, faults):
        self.faults = faults
        self.position = 0

    def __iter__(self):
        while self.position < 8:
            if get_worker_info().id == STRUCK and self.position == 5:
                self.faults.strike("__next__")
            self.position += 1
            yield self.position, torch.rand(1)

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize(
    ("dataset", "where"),
    [
        pytest.param(Reseeds, "__getitem__", marks=pytest.mark.full),
        (ReseedsStream, "__getitem__"),
        (Counts, "__getitem__"),
        (Resumes, "__next__"),
    ],
)
def test_the_state_of_a_dataset_comes_back(dataset, where, faults, caplog):
    loader = DataLoader(dataset(faults), 2, num_workers=2, timeout=HANG_LIMIT)
    undisturbed = contents(loader)
    faults.plan(where, "SIGKILL")
    assert contents(loader) == undisturbed
    assert len(faults.struck()) == len(warned(caplog)) == 1


class NeverTheSame(ReseedsStream):
    def __getitem__(self, index):
        return super().__getitem__(index), time.monotonic_ns()


class DrawsDifferently(ReseedsStream):
    """A random number of random numbers, of a generator that nobody can see."""

    def __getitem__(self, index):
        torch.rand(int.from_bytes(os.urandom(2), "big") + 1)
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [pytest.param(NeverTheSame, marks=pytest.mark.full), DrawsDifferently])
def test_a_stream_that_cannot_be_replayed_is_an_error_and_never_another_stream(dataset, faults):
    loader = DataLoader(dataset(faults), 2, num_workers=2, timeout=HANG_LIMIT)
    faults.plan("__getitem__", "SIGKILL")
    with pytest.raises(rayloader.ReplayError):
        list(loader)
    assert len(list(loader)) == 8


# ---- who waits for whom


class WaitsForTheOther(Dataset):
    """Sample 2, in worker 0, comes when sample 3, in worker 1, is begun."""

    def __init__(self, faults, pipe):
        self.faults = faults
        self.pipe = pipe
        os.mkfifo(pipe)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 2:
            open(self.pipe).close()
        if index == 3:
            self.faults.strike("__getitem__")
            open(self.pipe, "w").close()
        return index


def test_a_live_worker_may_wait_for_one_that_has_to_be_replaced(faults, tmp_path):
    loader = DataLoader(WaitsForTheOther(faults, tmp_path / "pipe"), None, num_workers=2, timeout=HANG_LIMIT)
    faults.plan("__getitem__", "SIGKILL")
    assert list(loader) == list(range(8))
    assert len(faults.struck()) == 1


class SlowToReturn(Dataset):
    """Worker 1 dies over sample 3; the next one waits in its worker_init_fn until something is written to the pipe."""

    def __init__(self, faults, pipe):
        self.faults = faults
        self.pipe = pipe
        os.mkfifo(pipe)

    def __len__(self):
        return 24

    def worker_init(self, worker_id):
        if worker_id == 1 and self.faults.struck():
            with open(self.pipe) as pipe:
                pipe.read(1)

    def __getitem__(self, index):
        if index == 3:
            self.faults.strike("__getitem__")
        return index


@pytest.mark.parametrize("in_order", [True, pytest.param(False, marks=pytest.mark.full)])
def test_batches_of_live_workers_are_delivered_meanwhile(in_order, faults, tmp_path):
    dataset = SlowToReturn(faults, tmp_path / "pipe")
    faults.plan("__getitem__", "SIGKILL")
    options = {"num_workers": 2, "prefetch_factor": 2, "in_order": in_order, "timeout": HANG_LIMIT}
    iterator = iter(DataLoader(dataset, None, worker_init_fn=dataset.worker_init, **options))
    # In order all before the lost one; otherwise all but what the lost worker may hold.
    found = [next(iterator) for _ in range(3 if in_order else 24 - 2)]
    pipe = os.open(dataset.pipe, os.O_RDWR)  # this waits for no reader
    os.write(pipe, b".")
    found += iterator
    os.close(pipe)
    assert (found if in_order else sorted(found)) == list(range(24))


class TerminatesItself(Dataset):
    """The worker gets SIGTERM, as from outside, over sample 5 each time that it is built, up to `times`."""

    def __init__(self, faults, times):
        self.faults, self.times = faults, times

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 5 and len(self.faults.struck()) < self.times:
            self.faults.plan("__getitem__", "SIGTERM")
            self.faults.strike("__getitem__")
        return index


def test_sigterm_is_not_blamed_on_the_batch_as_an_exit_of_its_own_is(faults):
    loader = DataLoader(TerminatesItself(faults, 3), None, num_workers=1, max_worker_restarts=9)
    assert list(loader) == list(range(10))
    assert len(set(faults.struck())) == 3


class Forks(Dataset):
    """The worker forks a child that outlives it, with copies of its descriptors, and dies over sample 5."""

    def __init__(self, faults, pipe):
        self.faults, self.pipe = faults, str(pipe)
        os.mkfifo(pipe)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 5 and not self.faults.struck():
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # that of the list itself
                    os.dup(int(number))
            if not os.fork():
                with open(self.pipe) as pipe:
                    pipe.read(1)
                os._exit(0)
            self.faults.strike("__getitem__")
        return index


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_a_worker_is_dead_though_a_child_of_it_lives(workers, faults, tmp_path):
    dataset = Forks(faults, tmp_path / "pipe")
    faults.plan("__getitem__", "SIGKILL")
    pipe = os.open(dataset.pipe, os.O_RDWR)
    assert list(DataLoader(dataset, None, num_workers=1, workers=workers, timeout=HANG_LIMIT)) == list(range(10))
    os.write(pipe, b"!")  # the child ends
    os.close(pipe)
