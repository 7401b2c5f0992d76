"""Where faults strike, and how: the datasets of the fault tests, and a worker with places in rayloader's own code.

A fault is asked for by a file named after its place, which holds the way. Whoever comes to the place first takes the
file away, leaves its process id behind and strikes; a fault that is to strike always leaves the file where it is.
"""

import contextlib
import ctypes
import logging
import os
import pickle
import random
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import rayloader.actors.process
from rayloader import DataLoader

EXIT_LIMIT = 500.0  # seconds for a process to end; on expiry the test fails
SAMPLES = 16  # of the map-style dataset; and of all workers of the iterable one
BATCH_SIZE = 2
STRUCK = 1  # the worker that is struck, of two
FIRST = 2  # its first sample
POISONED = 10  # the sample that is struck, in batch 5, which is the third of worker STRUCK
LAST = {"map": 15, "iterable": 11}  # its last one; of the iterable dataset, the other worker has what comes then
SHAPE = (128, 128)  # of a sample: a batch of two is more than Ray sends inline


class PlannedError(Exception):
    """Raised by a fault."""


def raise_planned():
    raise PlannedError("as planned")


def interrupt():
    raise KeyboardInterrupt


def run_out_of_memory():
    """As Python notices it, at a limit of the process's own."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**30, before[1]))
    try:
        bytearray(2**31)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def be_killed():
    """By another process, as the kernel and Ray kill when memory is short."""
    subprocess.run(["sh", "-c", "kill -KILL $PPID"])
    threading.Event().wait()


HOW = {
    "raise": raise_planned,
    "MemoryError": run_out_of_memory,
    "unpicklable result": threading.Lock,  # it becomes part of the batch
    "sys.exit": lambda: sys.exit("as planned"),
    "KeyboardInterrupt": interrupt,
    "os._exit": lambda: os._exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "segfault": lambda: ctypes.string_at(0),
    "killed": be_killed,
    "hang": lambda: threading.Event().wait(),
    "hang, restart": lambda: threading.Event().wait(),
}


class Faults:
    """The faults that a test asks for, in one folder for all processes; none strikes in the test's own."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.driver = os.getpid()

    def plan(self, where, how, *, always=False):
        (self.folder / f"{where}{' always' * always}").write_text(how)

    def strike(self, where):
        """Called at the place, or with None; what it returns belongs into the batch."""
        how = self._take(where) if where is not None and os.getpid() != self.driver else None
        if how is None:
            return None
        with open(self.folder / "struck", "a") as struck:
            struck.write(f"{os.getpid()}\n")
        return HOW[how]()

    def _take(self, where):
        for path in (self.folder / where, self.folder / f"{where} always"):
            try:
                how = path.read_text()
                if not path.name.endswith("always"):
                    path.unlink()
            except FileNotFoundError:  # not planned, or another process was faster
                continue
            return how
        return None

    def struck(self):
        """The processes that were struck, in order."""
        path = self.folder / "struck"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def started(self, worker_id):
        """A worker notes its process."""
        (self.folder / f"process of {worker_id}").write_text(str(os.getpid()))

    def process_of(self, worker_id):
        return int((self.folder / f"process of {worker_id}").read_text())

    def clear(self):
        for path in self.folder.iterdir():
            path.unlink()


class Augmented:
    """Samples with random augmentation from every generator that a worker has; with the places of user code.

    The dataset's own generator, which seeds of the batches don't reach, can be done without.
    """

    def __init__(self, faults, own_generator=True):
        self.faults = faults
        self.generator = np.random.default_rng(7) if own_generator else np.random

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.faults.strike("unpickling")

    def worker_init(self, worker_id):
        self.faults.started(worker_id)
        if worker_id == STRUCK:
            self.faults.strike("worker_init_fn")

    def sample(self, index, where, last):
        places = {FIRST: "first", POISONED: where, last: "last"}
        extra = self.faults.strike(places.get(index))
        noise = torch.rand(SHAPE)
        return index, noise, random.random(), np.random.rand(), self.generator.random(), extra

    def collate(self, samples):
        *columns, extras = zip(*samples, strict=True)
        faults = self.faults if POISONED in columns[0] else None
        extra = faults and faults.strike("collate_fn")
        return Batch([default_collate(column) for column in columns], [*extras, extra], faults)


class MapStyle(Augmented, Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.sample(index, "__getitem__", LAST["map"])


class Stream(Augmented, IterableDataset):
    """The same samples, each worker's in the order in which it would get them of the map-style dataset, but the last.

    Batch 7 is of the worker that is not struck: the stream of the other one has ended.
    """

    def __iter__(self):
        struck = get_worker_info().id == STRUCK
        if struck:
            self.faults.strike("__iter__")
        own = [index for index in range(SAMPLES) if index // BATCH_SIZE % 2 == struck]
        indices = own[:-BATCH_SIZE] if struck else [*own, SAMPLES - 2, SAMPLES - 1]
        for index in indices:
            yield self.sample(index, "__next__", LAST["iterable"])
        if struck:
            self.faults.strike("end")


class Calls(Dataset):
    """Sample i is what `function(i)` returns."""

    def __init__(self, function, length):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


DATASETS = {"map": MapStyle, "iterable": Stream}


class Batch:
    """Of a type of the user's; its pickling and its end in the worker are places."""

    def __init__(self, columns, extras, faults=None):
        self.columns = columns
        self.extras = extras
        self.faults = faults

    def __reduce__(self):
        if self.faults is not None:
            self.faults.strike("encode")
        return Batch, (self.columns, self.extras)

    def __del__(self):
        if self.faults is not None:
            self.faults.strike("between batches")

    def pin_memory(self):
        self.columns = [column.pin_memory() for column in self.columns]
        return self

    def content(self):
        return [column.tolist() if column.ndim == 1 else column.numpy().tobytes() for column in self.columns]


def striking_worker(faults):
    """The class of the pool's actors, with places where no code of the user's runs."""
    here, packed = str(Path(__file__).parent), pickle.dumps(faults)

    class WorkerProcess(rayloader.actors.process.WorkerProcess):  # of this name, for Ray names the process after it
        def __init__(self):
            sys.path.insert(0, here)  # its process does not know this module yet
            self.faults = pickle.loads(packed)
            self.faults.strike("init")
            super().__init__()
            self.run_one, self._hosting.run = self._hosting.run, self.run_one_and_strike

        def start(self, *arguments):
            self.calls = 0
            return super().start(*arguments)

        def run_one_and_strike(self, *arguments):
            self.calls += 1
            if self.calls > 1:
                self.faults.strike("between calls")
            answer = self.run_one(*arguments)
            if self.calls > 1:
                self.faults.strike("reply")
            return answer

    return WorkerProcess


def make(faults, kind="map", **options):
    """A loader of two workers over such a dataset."""
    dataset = DATASETS[kind](faults, own_generator=options.get("seeding") != "batch")
    functions = {"collate_fn": dataset.collate, "worker_init_fn": dataset.worker_init}
    return DataLoader(dataset, BATCH_SIZE, **{"num_workers": 2, **functions, **options})


def epoch(loader, seed=0):
    """What the batches of an epoch from this seed hold, all of them held to the end, and where the generator ends."""
    torch.manual_seed(seed)
    return [batch.content() for batch in list(loader)], torch.get_rng_state().tolist()


def wait_for_exit(pids):
    """Waits until these processes have ended, whether or not their parents have asked how."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            assert select.select([process], [], [], EXIT_LIMIT)[0]
            os.close(process)


def kill(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_exit(pids)


def warned(caplog):
    """What rayloader has told in its log, but that a warm process was late: one that hangs is, and any may be."""
    told = [r.getMessage() for r in caplog.records if r.name.startswith("rayloader") and r.levelno >= logging.WARNING]
    return [text for text in told if "warm worker process" not in text]


def table(rows, meetings):
    """The rows as parameters; those that are not in the sample are in a full run only.

    They are picked greedily, so always the same ones, until each meeting of the table is in one of them.

    Args:
        rows: all rows.
        meetings: gives the set of what meets in a row, such as the pairs of its values.
    """
    missing, picked = set().union(*map(meetings, rows)), []
    while missing:
        picked.append(max(rows, key=lambda row: len(missing & meetings(row))))  # the first of the best
        missing -= meetings(picked[-1])
    for row in rows:
        yield pytest.param(*row, id=", ".join(map(str, row)), marks=() if row in picked else pytest.mark.full)
