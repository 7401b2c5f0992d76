"""One table: where a fault strikes x how x what the user sees. After each fault the same loader works again.

A fault strikes once: the file that asks for it is consumed. What comes after must be torch's batches.
"""

import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as StockLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rayloader import DataLoader, WorkerDiedError

pytestmark = pytest.mark.usefixtures("ray_session")

EXIT_LIMIT = 30.0  # seconds for a process to end; on expiry the test fails
STRUCK = 1  # the worker that the fault strikes


class PlannedError(Exception):
    """Raised by a fault."""


def raise_planned():
    raise PlannedError("as planned")


HOW = {
    "raise": raise_planned,
    "sys.exit": lambda: sys.exit("as planned"),
    "os._exit": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


class Fault:
    """Strikes the first time that worker STRUCK comes to the place, and leaves its process id behind."""

    def __init__(self, folder, where, how):
        self.request = Path(folder, "request")
        self.pid = Path(folder, "pid")
        self.request.touch()
        self.where = where
        self.how = how

    def strike(self, where):
        if where != self.where:
            return
        try:
            self.request.unlink()
        except FileNotFoundError:
            return  # it has struck already
        self.pid.write_text(str(os.getpid()))
        HOW[self.how]()


class Images(Dataset):
    """Random samples of a seed of their own, so that torch's loader without workers gives the same."""

    def __init__(self, fault=None):
        self.fault = fault

    def __len__(self):
        return 12

    def strike(self, where):
        info = get_worker_info()
        if self.fault is not None and info is not None and info.id == STRUCK:
            self.fault.strike(where)

    def __getitem__(self, index):
        if index == 6:
            self.strike("__getitem__")
        return torch.rand(3, generator=torch.Generator().manual_seed(index))

    def worker_init(self, worker_id):
        self.strike("worker_init_fn")

    def collate(self, samples):
        self.strike("collate_fn")
        return Batch(torch.stack(samples), self)


class Batch:
    """Pickling it is a place for faults."""

    def __init__(self, tensor, dataset=None):
        self.tensor = tensor
        self.dataset = dataset

    def __reduce__(self):
        if self.dataset is not None:
            self.dataset.strike("pickling of the batch")
        return Batch, (self.tensor,)


class UnpicklesBadly(Images):
    """The first worker that unpickles it is struck; which that is, nobody can say at that point."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.fault.strike("unpickling of the dataset")


class Numbers(IterableDataset):
    def __init__(self, images):
        self.images = images

    def __iter__(self):
        self.images.strike("__iter__")
        for index in range(get_worker_info().id * 3, 9):
            if index == 6:
                self.images.strike("__next__")
            yield index


WHERE = ["worker_init_fn", "unpickling of the dataset", "__getitem__", "collate_fn", "pickling of the batch"]
WHERE_ITERABLE = ["__iter__", "__next__"]


def table(places):
    """Each place with each way; `make test` has each place with an error and one death, the deaths in turn."""
    deaths = [how for how in HOW if how != "raise"]
    for number, where in enumerate(places):
        for how in HOW:
            sample = how in ("raise", deaths[number % len(deaths)])
            yield pytest.param(where, how, marks=() if sample else pytest.mark.full)


def check_error(error, how, fault):
    pid = fault.pid.read_text()
    (note,) = error.__notes__
    worker = re.search(r"worker (\d)", note)[1]
    assert f"batch {note.split()[1]} from worker {worker} (pid {pid} on " in note
    if how == "raise":
        assert type(error) is PlannedError
        assert str(error).startswith(f"Caught PlannedError in DataLoader worker process {worker}.\nOriginal Traceback")
        assert 'raise PlannedError("as planned")' in str(error)
    else:
        assert type(error) is WorkerDiedError
        assert str(error).startswith(f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker {worker} on ")
        assert error.worker_id == int(worker)
        cause = "SystemExit: as planned" if how == "sys.exit" else "died"
        assert cause in str(error).split("Cause: ")[1]
    return int(worker)


def check_process(how, fault):
    """A worker that raised lives on; one that exited is gone."""
    pid = int(fault.pid.read_text())
    if how == "raise":
        assert psutil.Process(pid).is_running()
    elif psutil.pid_exists(pid):
        assert psutil.wait_procs([psutil.Process(pid)], EXIT_LIMIT)[1] == []


@pytest.mark.parametrize(("where", "how"), list(table(WHERE)))
def test_map_style(tmp_path, where, how):
    fault = Fault(tmp_path, where, how)
    dataset = UnpicklesBadly(fault) if where.startswith("unpickling") else Images(fault)
    loader = DataLoader(
        dataset,
        2,
        num_workers=2,
        collate_fn=dataset.collate,
        worker_init_fn=dataset.worker_init,
        persistent_workers=True,
    )
    with pytest.raises((PlannedError, WorkerDiedError)) as caught:
        list(loader)
    worker = check_error(caught.value, how, fault)
    assert where.startswith("unpickling") or worker == STRUCK
    check_process(how, fault)
    if how == "raise" and where in ("worker_init_fn", "unpickling of the dataset"):
        with pytest.raises(PlannedError):  # persistent workers keep what happened to them
            list(loader)
        loader = DataLoader(dataset, 2, num_workers=2, collate_fn=dataset.collate)
    expected = [batch.tolist() for batch in StockLoader(Images(), 2)]
    for _ in range(2):
        assert [batch.tensor.tolist() for batch in loader] == expected


@pytest.mark.parametrize(("where", "how"), list(table(WHERE_ITERABLE)))
def test_iterable(tmp_path, where, how):
    fault = Fault(tmp_path, where, how)
    loader = DataLoader(Numbers(Images(fault)), 2, num_workers=2)
    with pytest.raises((PlannedError, WorkerDiedError)) as caught:
        list(loader)
    assert check_error(caught.value, how, fault) == STRUCK
    check_process(how, fault)
    assert [batch.tolist() for batch in loader] == [[0, 1], [3, 4], [2, 3], [5, 6], [4, 5], [7, 8], [6, 7], [8]]


class Pids(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return os.getpid()


def kill(pid):
    process = psutil.Process(pid)
    process.kill()
    assert psutil.wait_procs([process], EXIT_LIMIT)[1] == []


@pytest.mark.parametrize("persistent", [False, True])
def test_killed_while_idle_between_epochs(persistent):
    options = {"ray_remote_args": {"num_cpus": 0, "memory": 11}}  # its own two actors
    loader = DataLoader(Pids(), None, num_workers=2, persistent_workers=persistent, **options)
    first, second, *_ = loader
    kill(second)
    if persistent:  # its dataset object is gone: the user must know
        with pytest.raises(WorkerDiedError, match=rf"\(pid\(s\) {second}\) exited unexpectedly: worker 1 on"):
            list(loader)
    again = list(loader)
    assert len(again) == 4
    assert second not in again
    assert persistent or first in again


class Waits(Pids):
    """Samples 2 and 3 come only once somebody has opened the named pipe for writing."""

    def __init__(self, path):
        self.path = path
        os.mkfifo(path)

    def __getitem__(self, index):
        if index >= 2:
            open(self.path).close()
        return os.getpid()

    def release(self):
        return os.open(self.path, os.O_RDWR)


@pytest.mark.parametrize("in_order", [True, False])
def test_killed_from_outside_between_batches(tmp_path, in_order):
    dataset = Waits(tmp_path / "pipe")
    loader = DataLoader(dataset, None, num_workers=2, in_order=in_order)
    iterator = iter(loader)
    _, victim = next(iterator), next(iterator)
    kill(victim)
    with pytest.raises(WorkerDiedError, match=rf"^DataLoader worker \(pid\(s\) {victim}\) exited unexpectedly"):
        next(iterator)
    pipe = dataset.release()
    again = list(loader)
    os.close(pipe)
    assert len(again) == 4
    assert victim not in again


def test_all_workers_killed(tmp_path):
    dataset = Waits(tmp_path / "pipe")
    loader = DataLoader(dataset, None, num_workers=2)
    iterator = iter(loader)
    victims = [next(iterator), next(iterator)]
    for victim in victims:
        kill(victim)
    with pytest.raises(WorkerDiedError, match="exited unexpectedly"):
        next(iterator)
    pipe = dataset.release()
    assert not {*loader} & {*victims}
    os.close(pipe)
