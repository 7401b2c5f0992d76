"""How a worker ends: what of its dataset is finalized in its process, and which shared memory goes with it.

What is expected here is what torch's loader does with workers that it forks.
"""

import atexit
import functools
import itertools
import os
import signal
from multiprocessing import resource_tracker, shared_memory
from multiprocessing.util import Finalize
from pathlib import Path

import psutil
import pytest
from torch.utils.data import IterableDataset

from probes import Calls
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
    """Notes when it is finalized in a process other than that in which it was made first; in a cycle."""

    def __init__(self, path, home):
        self.path, self.home, self.itself = path, home, self

    def __del__(self):
        if os.getpid() != self.home:
            append(self.path, "__del__")


class Drops(Noted):
    """A dataset that holds one more object after each sample, and drops the one before."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.held = Noted(self.path, self.home)
        self.held.itself = None
        return os.getpid()


def notes_in(path):
    return path.read_text().splitlines() if path.exists() else []


def epochs(dataset, count, own, **options):
    """The process of each epoch."""
    loader = DataLoader(dataset, None, num_workers=1, **own, **options)
    pids = []
    for _ in range(count):
        (pid,) = set(loader)
        pids.append(pid)
    return pids


def test_what_user_code_drops_in_a_warm_process_is_finalized_there_and_the_dataset_itself_is_not(tmp_path, own):
    assert len(set(epochs(Drops(tmp_path / "notes", os.getpid()), 2, own))) == 1
    assert notes_in(tmp_path / "notes") == ["__del__"] * 4


def append(path, text):
    with open(path, "a") as file:
        file.write(f"{text}\n")


def finalize(path, index):
    if index == 0:
        Finalize(None, append, (path, "finalized"), exitpriority=0)
        atexit.register(append, path, "atexit")
    return os.getpid()


def test_a_warm_process_that_ray_ends_runs_no_callback_but_multiprocessings(tmp_path, own):
    """As if nobody referred to the actor any more."""
    (pid,) = {*epochs(Calls(functools.partial(finalize, tmp_path / "notes")), 2, own)}
    assert notes_in(tmp_path / "notes") == []
    get_pool().wait()
    (actor,) = [actor for actor in get_pool().actors if actor.address is not None and actor.address.pid == pid]
    actor.handle.__ray_terminate__.remote()
    wait_for_end(pid)
    assert notes_in(tmp_path / "notes") == ["finalized"] * 2


@pytest.mark.parametrize("options", [{"fresh_processes": True}, {"workers": "fork"}])
def test_what_multiprocessing_finalizes_is_at_the_end_of_a_process(options, tmp_path, own):
    dataset = Calls(functools.partial(finalize, tmp_path / "notes"))
    wait_for_end(*epochs(dataset, 2, own if "fresh_processes" in options else {}, **options))
    assert notes_in(tmp_path / "notes") == ["finalized"] * 2


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
        pids.update(loader if to_the_end else [next(iter(loader))])
    assert len(pids) == 1
    list(loader)  # the iterators before have gone
    assert (tmp_path / "notes").read_text() == "closed\n" * 3


# ---- shared memory


class Carries:
    """Has the segment itself, as mosaicml-streaming's dataset has: it is attached when the dataset is unpickled."""

    def __init__(self, memory, path):
        self.memory, self.path = memory, path

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if index == 3 and not self.path.exists():
            created = shared_memory.SharedMemory(create=True, size=100)
            self.path.write_text(f"{created.name} {resource_tracker._resource_tracker._pid}")
            os.kill(os.getpid(), signal.SIGKILL)
        self.memory.buf[index + 1] = index
        return self.memory.buf[0]


def test_memory_in_the_dataset_of_a_killed_worker_stays_and_what_the_worker_has_created_goes(own, tmp_path):
    memory = shared_memory.SharedMemory(create=True, size=100)
    try:
        memory.buf[0] = 7
        loader = DataLoader(Carries(memory, tmp_path / "created"), None, num_workers=1, **own)
        for _ in range(2):
            assert list(loader) == [7] * 6
        assert bytes(memory.buf[:7]) == bytes([7, *range(6)])
        name, tracker = (tmp_path / "created").read_text().split()
        wait_for_end(int(tracker))
        there = {path.name for path in Path("/dev/shm").iterdir()}
        assert (memory.name.lstrip("/") in there, name.lstrip("/") in there) == (True, False)
    finally:
        memory.close()
        memory.unlink()
