"""Kinds of datasets that real programs hold, and that forks or actors could treat in another way than torch's workers.

One function each, which uses a loader and returns what came of it. Each is given a `Program`, whose `load` makes the
loader of one side: torch's, or ours with one kind of workers. The decorator says what is expected of actors; forks
always give what torch's forked workers give.
"""

import dataclasses
import functools
import gc
import logging
import multiprocessing.util
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

END_LIMIT = 500  # seconds for an object to end after its last reference; on expiry the test fails


class Same:
    """Actors give the same."""

    def check(self, torchs, actors):
        assert actors == torchs


@dataclasses.dataclass(frozen=True)
class Refused:
    """`iter()` raises an error that names this part of the replica, its type, and a remedy."""

    part: str
    kind: str
    error: str
    remedy: str

    def check(self, torchs, actors):
        assert actors["error"] == self.error
        assert f"It cannot be sent to the workers: {self.part}" in actors["text"]
        assert f"{self.kind} can't be sent to a worker (" in actors["text"]
        assert self.remedy in actors["text"]


class Differs:
    """Actors give something else: they have none of the trainer's folder, environment, output and signals."""

    def check(self, torchs, actors):
        assert actors != torchs
        assert "error" not in actors


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    run: Callable[["Program"], Any]
    actors: Same | Refused | Differs


KINDS: list[Kind] = []


def kind(actors=Same()):  # noqa: B008 - it has no state
    def add(run):
        KINDS.append(Kind(run.__name__, run, actors))
        return run

    return add


@dataclasses.dataclass
class Program:
    """What a kind is given.

    Attributes:
        loader_class: torch's or ours.
        options: of the loader.
        folder: empty.
    """

    loader_class: type
    options: dict[str, Any]
    folder: Path

    def load(self, dataset, num_workers=2, **options):
        return self.loader_class(dataset, 2, num_workers=num_workers, **self.options, **options)


class Holding(Dataset):
    """Has these attributes; sample i is `sample(dataset, i)`."""

    def __init__(self, sample, length=8, **attributes):
        self.sample = sample
        self.length = length
        vars(self).update(attributes)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.sample(self, index)


def taken(loader):
    """The batches of one epoch."""
    return [plain(batch) for batch in loader]


def plain(batch):
    return (str(batch.dtype), batch.tolist()) if isinstance(batch, torch.Tensor) else batch


# ---- what processes share: multiprocessing


@kind(Refused("dataset.seen", "multiprocessing.queues.Queue", "RuntimeError", "multiprocessing.Manager().Queue()"))
def a_queue_that_workers_fill(program):
    def sample(self, index):
        self.seen.put(index)
        return index

    seen = multiprocessing.Queue()
    batches = taken(program.load(Holding(sample, seen=seen)))
    return batches, sorted(seen.get() for _ in range(8))


@kind()
def proxies_of_a_manager(program):
    def sample(self, index):
        self.seen.append(index)
        with self.lock:
            self.counts["all"] = self.counts["all"] + 1
        return self.epoch.value

    with multiprocessing.Manager() as manager:
        seen, counts, epoch = manager.list(), manager.dict(all=0), manager.Value("i", 1)
        dataset = Holding(sample, seen=seen, counts=counts, epoch=epoch, lock=manager.Lock())
        loader = program.load(dataset, persistent_workers=True)
        first = taken(loader)
        epoch.value = 2
        return first, taken(loader), sorted(seen), counts.copy()


# ---- files


@kind()
def a_memory_map_to_write(program):
    def sample(self, index):
        value, self.array[index] = int(self.array[index]), -1
        return value

    np.arange(8).tofile(program.folder / "array")
    array = np.memmap(program.folder / "array", np.int64, "r+")
    batches = taken(program.load(Holding(sample, array=array)))
    return batches, array.tolist(), np.fromfile(program.folder / "array", np.int64).tolist()


# ---- threads, generators, references


@kind(Refused("dataset.numbers", "builtins.generator", "TypeError", "create it in worker_init_fn or lazily"))
def a_generator(program):
    numbers = (number for number in range(100, 200))
    next(numbers)
    loader = program.load(Holding(lambda self, _: next(self.numbers), numbers=numbers))
    return taken(loader), taken(loader), next(numbers)


# ---- functions and classes


@functools.partial(torch.compile, backend="eager")
def compiled(values):
    return values + 1


@kind()
def a_compiled_function_of_a_module(program):
    return taken(program.load(Holding(lambda self, index: self.add(torch.tensor(index)), add=compiled)))


@kind()
def a_wrapper_that_delegates(program):
    return taken(program.load(Delegating(Holding(lambda self, index: index + self.offset, offset=10))))


class Delegating:
    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.wrapped, name)

    def __len__(self):
        return len(self.wrapped)

    def __getitem__(self, index):
        return self.wrapped[index]


# ---- the program around the dataset

setting = 0


@kind(Differs())
def a_module_global_that_the_program_sets_from_epoch_to_epoch(program):
    global setting
    loader, kept = program.load(Holding(of_module)), program.load(Holding(of_module), persistent_workers=True)
    epochs = []
    for setting in (1, 2):  # noqa: B007 - it is global
        epochs.append((taken(loader), taken(kept)))
    iterator = iter(loader)
    setting = 3
    epochs.append([plain(batch) for batch in iterator])
    setting = 0
    return epochs


def of_module(self, index):
    return 100 * setting + index


@kind()
def an_object_that_removes_a_file_at_its_end(program):
    (program.folder / "file").touch()
    gone = threading.Event()
    owner = Removing(str(program.folder / "file"), gone.set)
    dataset = Holding(lambda self, index: os.path.exists(self.owner.path), owner=owner)
    epochs = [taken(program.load(dataset, persistent_workers=persistent)) for persistent in (False, True)]
    del dataset
    before = os.path.exists(owner.path)
    del owner
    gc.collect()  # torch's loader may be in a cycle
    return epochs, before, gone.wait(END_LIMIT)


class Removing:
    def __init__(self, path, told):
        self.path = path
        self.told = told

    def __getstate__(self):
        return {"path": self.path}

    def __del__(self):
        os.unlink(self.path)
        self.told()


@kind(Differs())
def a_dataset_that_prints_and_warns(program):
    path = program.folder / "output"
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        batches = taken(program.load(Holding(talking)))
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    return batches, sorted(line for line in path.read_text().splitlines() if re.search("sample .* (says|warns)", line))


def talking(self, index):
    print(f"sample {index} says so", file=sys.stderr)
    logging.getLogger("kinds").warning("sample %d warns in the log", index)
    warnings.warn(f"sample {index} warns", stacklevel=1)
    return index


@kind()
def names_of_processes(program):
    before = multiprocessing.Process()._identity[-1]

    def sample(self, index):
        process = multiprocessing.current_process()
        return process.name, process._identity

    loaders = [program.load(Holding(sample), collate_fn=list, persistent_workers=number == 1) for number in range(2)]
    found = []
    for _ in range(2):
        iterators = [*map(iter, loaders)]  # both live
        found += [{sample for batch in iterator for sample in batch} for iterator in iterators]
    assert all(name == f"Process-{number}" for names in found for name, (number,) in names)
    found.append({("", multiprocessing.Process()._identity)})
    return [sorted(number - before for _, (number,) in names) for names in found]


@kind(Differs())
def a_process_and_its_parent(program):
    trainer = os.getpid()

    def sample(self, index):
        parent, process = multiprocessing.parent_process(), multiprocessing.current_process()
        return parent and (parent.pid == trainer, parent.name, parent.is_alive()), process.daemon

    return taken(program.load(Holding(sample), collate_fn=list))


SIGNALS = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]


@kind()
def signals_of_what_a_sample_starts(program):
    def sample(self, index):
        path = program.folder / f"{index}"
        os.system(f"{' '.join(SIGNALS[:2])} '{SIGNALS[2]}' {SIGNALS[3]} > {path}")
        with ThreadPoolExecutor(1) as threads:
            in_thread = threads.submit(subprocess.check_output, SIGNALS, text=True).result()
        with subprocess.Popen(["sleep", str(END_LIMIT)]) as recorder:
            recorder.send_signal(signal.SIGINT)
            ended = recorder.wait()
        return subprocess.check_output(SIGNALS, text=True), in_thread, path.read_text(), ended

    return taken(program.load(Holding(sample), collate_fn=list, worker_init_fn=signals_in_a_child))


def signals_in_a_child(worker_id):
    assert subprocess.run(["true"]).returncode == 0
    assert os.waitstatus_to_exitcode(os.system("exit 3")) == 3


@kind(Differs())
def what_a_sample_starts_where_the_program_ignores_interrupts(program):
    def sample(self, index):
        return subprocess.check_output(SIGNALS, text=True)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return taken(program.load(Holding(sample), collate_fn=list))
    finally:
        signal.signal(signal.SIGINT, before)


FORKED = []
os.register_at_fork(after_in_child=lambda: FORKED.append(os.getpid()))


@kind(Differs())
def callbacks_of_forks(program):
    return taken(program.load(Holding(forked), collate_fn=list))


def forked(self, index):
    told = [pid == os.getpid() for pid in FORKED]
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, bytes([len(FORKED) - len(told), FORKED[-1] == os.getpid()]))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    in_child = list(os.read(reading, 2))
    os.close(reading)
    return told, in_child
