"""How a worker ends: what of its dataset is finalized in its process, and which shared memory goes with it.

What is expected here is what torch's loader does with workers that it forks.
"""

import atexit
import itertools
import multiprocessing
import os
import signal
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest
from torch.utils.data import IterableDataset

from probes import load
from rayloader import DataLoader
from rayloader.actors.pool import get_pool

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="Linux")]

EXIT_LIMIT = 500.0  # seconds for a process to end; on expiry the test fails
_numbers = itertools.count(500)


@pytest.fixture
def own():
    """Options of actors that serve this test alone."""
    return {"ray_remote_args": {"num_cpus": 0, "memory": next(_numbers)}}


def wait_for_end(*pids):
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert psutil.wait_procs(processes, EXIT_LIMIT)[1] == []


# ---- finalizers


class Noted:
    """Notes what is finalized in a process other than that in which it was made first."""

    def __init__(self, path):
        self.path, self.home = path, os.getpid()
        self.itself = self  # a cycle

    def note(self, text):
        if os.getpid() != self.home:
            with open(self.path, "a") as file:
                file.write(f"{text}\n")

    def __del__(self):
        self.note("__del__")

    def notes(self):
        return self.path.read_text().split("\n")[:-1] if self.path.exists() else []


class Numbers(Noted):
    """What is done in the worker is done by a function of this and of the sample's index."""

    def __init__(self, path, function=lambda dataset, index: None):
        super().__init__(path)
        self.function = function

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.function(self, index)
        return os.getpid()


def epochs(dataset, count, own, **options):
    """The process of each epoch."""
    loader = DataLoader(dataset, None, num_workers=1, **own, **options)
    pids = []
    for _ in range(count):
        (pid,) = set(loader)
        pids.append(pid)
    return pids


def test_the_dataset_is_not_finalized_in_a_warm_process(tmp_path, own):
    dataset = Numbers(tmp_path / "notes")
    assert len(set(epochs(dataset, 3, own))) == 1
    assert dataset.notes() == []


def test_what_user_code_drops_in_the_worker_is_finalized_there(tmp_path, own):
    def drop(dataset, index):
        held = Noted(dataset.path)
        held.home, held.itself = dataset.home, None
        dataset.held = held  # drops the one before

    dataset = Numbers(tmp_path / "notes", drop)
    epochs(dataset, 2, own)
    assert dataset.notes() == ["__del__"] * 4


def append(path, text):
    with open(path, "a") as file:
        file.write(f"{text}\n")


def by_sigterm(actor):
    os.kill(actor.address.pid, signal.SIGTERM)


def by_ray(actor):
    """As if nobody referred to the actor any more."""
    actor.handle.__ray_terminate__.remote()


def finalize(dataset, index):
    if index == 0:
        Finalize(None, append, (dataset.path, "finalized"), exitpriority=0)


def finalize_and_exit(dataset, index):
    finalize(dataset, index)
    if index == 0:
        atexit.register(append, dataset.path, "atexit")


@pytest.mark.parametrize(("end", "finalized"), [(by_sigterm, 0), (by_ray, 2)])
def test_a_warm_process_that_is_ended_runs_no_callback_but_multiprocessings_if_ray_ends_it(
    end, finalized, tmp_path, own
):
    dataset = Numbers(tmp_path / "notes", finalize_and_exit)
    loader = DataLoader(dataset, None, num_workers=1, **own)
    (pid,) = {*loader, *loader}
    assert dataset.notes() == []
    get_pool().wait()
    (actor,) = [actor for actor in get_pool().actors if actor.address is not None and actor.address.pid == pid]
    end(actor)
    wait_for_end(pid)
    assert dataset.notes() == ["finalized"] * finalized


@pytest.mark.parametrize("options", [{"fresh_processes": True}, {"workers": "fork"}])
def test_what_multiprocessing_finalizes_is_at_the_end_of_a_process(options, tmp_path, own):
    dataset = Numbers(tmp_path / "notes", finalize)
    wait_for_end(*epochs(dataset, 2, own if "fresh_processes" in options else {}, **options))
    assert dataset.notes() == ["finalized"] * 2


class Reads(IterableDataset):
    def __init__(self, path):
        self.path = path

    def __iter__(self):
        try:
            yield from [os.getpid()] * 20
        finally:
            append(self.path, "closed")


@pytest.mark.parametrize("to_the_end", [True, False])
def test_an_iterator_that_has_not_ended_is_closed_with_its_worker(to_the_end, tmp_path, own):
    loader = DataLoader(Reads(tmp_path / "notes"), None, num_workers=1, prefetch_factor=1, **own)
    pids = set()
    for _ in range(2):
        for pid in loader:
            pids.add(pid)
            if not to_the_end:
                break
    assert len(pids) == 1
    list(loader)  # the iterators before have gone
    assert (tmp_path / "notes").read_text() == "closed\n" * 3


# ---- shared memory


@pytest.fixture
def segment():
    memory = shared_memory.SharedMemory(create=True, size=100)
    memory.buf[0] = 7
    yield memory
    memory.close()
    memory.unlink()


class Once:
    """Kills its process once."""

    def __init__(self, path):
        self.path = path

    def strike(self):
        if not self.path.exists():
            self.path.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def exists(name):
    return Path("/dev/shm", name.lstrip("/")).exists()


class Carries:
    """Has the segment itself, as mosaicml-streaming's dataset has: it is attached when the dataset is unpickled."""

    def __init__(self, memory, once):
        self.memory, self.once = memory, once

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3:
            self.once.strike()
        self.memory.buf[index + 1] = index
        return self.memory.buf[0]


def test_memory_in_the_dataset_of_a_killed_worker_stays(segment, own, tmp_path):
    loader = DataLoader(Carries(segment, Once(tmp_path / "struck")), None, num_workers=1, **own)
    for _ in range(2):
        assert list(loader) == [7] * 6
    assert bytes(segment.buf[:7]) == bytes([7, *range(6)])
    assert exists(segment.name)


def test_a_worker_may_remove_memory_that_it_has_attached(own, capfd):
    memory = shared_memory.SharedMemory(create=True, size=100)
    name = memory.name

    def remove(index):
        attached = shared_memory.SharedMemory(name)
        attached.unlink()
        attached.close()

    assert list(load(remove, 1, **own)) == [None]
    assert not exists(name)
    memory.close()
    resource_tracker.unregister(memory._name, "shared_memory")
    assert "Error" not in capfd.readouterr().err


def create(index, kept=[]):  # noqa: B006  # a global of the worker
    memory = shared_memory.SharedMemory(create=True, size=100)
    kept.append(memory)
    return memory.name, os.getpid(), resource_tracker._resource_tracker._pid


def test_memory_that_a_killed_worker_has_created_goes_with_its_own_tracker(own, tmp_path):
    once = Once(tmp_path / "struck")

    def create_and_die(index):
        created = create(index)
        if not once.path.exists():
            (tmp_path / "created").write_text(f"{created[0]} {created[2]}")
        once.strike()

    assert list(load(create_and_die, 1, **own)) == [None]
    name, tracker = (tmp_path / "created").read_text().split()
    wait_for_end(int(tracker))
    assert not exists(name)


# ---- names


@pytest.mark.parametrize("workers", ["fork", "ray"])
def test_a_process_that_replaces_another_has_a_name_of_its_own(workers, tmp_path):
    once = Once(tmp_path / "struck")

    def get(index):
        process = multiprocessing.current_process()
        append(tmp_path / "names", f"{process.name} {process._identity}")
        if index == 1:
            once.strike()

    before = multiprocessing.Process()._identity[-1]
    assert list(load(get, 3, 1, workers=workers)) == [None] * 3
    first, replacement = f"Process-{before + 1} ({before + 1},)", f"Process-{before + 2} ({before + 2},)"
    names = (tmp_path / "names").read_text().splitlines()
    assert names == [first] * 2 + [replacement] * (len(names) - 2)
    assert len(names) in (4, 5)  # the first batch may have been lost with its worker
