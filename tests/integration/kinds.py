"""Kinds of datasets that real programs hold: one function each, which uses a loader and returns what came of it.

Each is given a `Program`, whose `load` makes the loader of one side: torch's, or ours with one kind of workers. The
decorator says what is expected of actors; forks always give what torch's forked workers give. A kind that is `Spawned`
defines nothing within its function that workers need: torch would have to pickle it.
"""

import collections
import contextlib
import contextvars
import ctypes
import dataclasses
import decimal
import enum
import functools
import gc
import gzip
import importlib.util
import itertools
import json
import locale
import logging
import mmap
import multiprocessing.util
import os
import queue
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import threading
import types
import warnings
import weakref
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, get_worker_info

REMEDY = "create it in worker_init_fn or lazily on first use"
END_LIMIT = 500  # seconds for an object to end after its last reference; on expiry the test fails


class Same:
    """Actors give the same."""

    method = "fork"

    def check(self, torchs, actors):
        assert actors == torchs


@dataclasses.dataclass(frozen=True)
class Refused:
    """`iter()` raises an error that names this part of the replica, its type if that is given, and a remedy."""

    part: str
    kind: str = ""
    error: str = "TypeError"
    remedy: str = REMEDY
    method: ClassVar[str] = "fork"

    def check(self, torchs, actors):
        assert actors["error"] == self.error
        assert f"It cannot be sent to the workers: {self.part}" in actors["text"]
        assert f"{self.kind} can't be sent to a worker (" in actors["text"]
        assert self.remedy in actors["text"]


@dataclasses.dataclass(frozen=True)
class Fails:
    """The worker cannot open the replica, and `next()` raises this error."""

    error: str
    text: str
    method: ClassVar[str] = "fork"

    def check(self, torchs, actors):
        assert actors["error"] == self.error
        assert self.text in actors["text"]


class Spawned(Same):
    """Actors give the same as torch's workers do with the start method spawn."""

    method = "spawn"


class Differs:
    """Actors give something else: they have none of the trainer's folder, environment, output and signals."""

    method = "fork"

    def check(self, torchs, actors):
        assert actors != torchs
        assert "error" not in actors


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    run: Callable[["Program"], Any]
    actors: Same | Refused | Fails | Spawned | Differs
    needs: tuple[str, ...]

    @property
    def missing(self):
        """Which modules it needs and this machine lacks."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


KINDS: list[Kind] = []


def kind(actors=Same(), needs=()):  # noqa: B008 - it has no state
    def add(run):
        KINDS.append(Kind(run.__name__, run, actors, needs))
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


class Streaming(IterableDataset):
    """Has these attributes; each worker reads `stream(dataset)`."""

    def __init__(self, stream, **attributes):
        self.stream = stream
        vars(self).update(attributes)

    def __iter__(self):
        return iter(self.stream(self))


def taken(loader):
    """The batches of one epoch."""
    return [plain(batch) for batch in loader]


def plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


# ---- what processes share: multiprocessing

SHARED = "a tensor after share_memory_()"


@kind(Refused("dataset.epoch", "multiprocessing.sharedctypes.Synchronized", "RuntimeError", SHARED))
def a_value_that_tells_workers_of_a_new_epoch(program):
    epoch = multiprocessing.Value("i", 1)
    loader = program.load(
        Holding(lambda self, index: 100 * self.epoch.value + index, epoch=epoch), persistent_workers=True
    )
    first = taken(loader)
    epoch.value = 2
    return first, taken(loader)


@kind(Refused("dataset.written", "multiprocessing.sharedctypes.SynchronizedArray", "RuntimeError", SHARED))
def an_array_that_workers_write(program):
    written = multiprocessing.Array("i", 8)

    def sample(self, index):
        self.written[index] = index + 1
        return index

    return taken(program.load(Holding(sample, written=written))), written[:]


def counted_under(lock):
    def sample(self, index):
        with self.lock:
            self.count += 1
        return index

    return Holding(sample, lock=lock, count=torch.zeros(1, dtype=torch.int64).share_memory_(), length=200)


@kind(Refused("dataset.lock", "multiprocessing.synchronize.Lock", "RuntimeError", "multiprocessing.Manager().Lock()"))
def a_lock(program):
    dataset = counted_under(multiprocessing.Lock())
    return taken(program.load(dataset)), dataset.count.item()


@kind(Refused("dataset.lock", "multiprocessing.synchronize.RLock", "RuntimeError", "multiprocessing.Manager().Lock()"))
def a_reentrant_lock(program):
    dataset = counted_under(multiprocessing.RLock())
    return taken(program.load(dataset)), dataset.count.item()


@kind(Refused("dataset.ready", "multiprocessing.synchronize.Condition", "RuntimeError", "use that of a manager"))
def an_event(program):
    ready = multiprocessing.Event()
    loader = program.load(Holding(lambda self, _: self.ready.is_set(), ready=ready), persistent_workers=True)
    before = taken(loader)
    ready.set()
    return before, taken(loader)


@kind(Refused("dataset.epochs", "multiprocessing.queues.Queue", "RuntimeError", "multiprocessing.Manager().Queue()"))
def a_queue_that_tells_workers_of_a_new_epoch(program):
    def sample(self, index):
        if index == 0:
            self.epoch = self.epochs.get()
        return 100 * self.epoch + index

    epochs = multiprocessing.Queue()
    loader = program.load(Holding(sample, epochs=epochs), num_workers=1, persistent_workers=True)
    batches = []
    for epoch in (1, 2):
        epochs.put(epoch)
        batches.append(taken(loader))
    epochs.close()
    return batches


@kind(Refused("dataset.seen", "multiprocessing.queues.Queue", "RuntimeError", "multiprocessing.Manager().Queue()"))
def a_queue_that_workers_fill(program):
    def sample(self, index):
        self.seen.put(index)
        return index

    seen = multiprocessing.Queue()
    batches = taken(program.load(Holding(sample, seen=seen)))
    return batches, sorted(seen.get() for _ in range(8))


@kind(
    Refused("dataset.seen", "multiprocessing.queues.SimpleQueue", "RuntimeError", "multiprocessing.Manager().Queue()")
)
def a_simple_queue(program):
    def sample(self, index):
        self.seen.put(index)
        return index

    seen = multiprocessing.SimpleQueue()
    batches = taken(program.load(Holding(sample, seen=seen)))
    return batches, sorted(seen.get() for _ in range(8))


@kind(Refused("dataset.end", "multiprocessing.connection.Connection", remedy=SHARED))
def a_pipe(program):
    def sample(self, index):
        self.end.send(index)
        return index

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        batches = taken(program.load(Holding(sample, end=theirs), num_workers=1))
        return batches, [ours.recv() for _ in range(8)]


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


@kind()
def a_shared_tensor_that_workers_write(program):
    def sample(self, index):
        self.written[index] = index + 1
        return index

    written = torch.zeros(8).share_memory_()
    return taken(program.load(Holding(sample, written=written))), written.tolist()


@kind(Refused("dataset.written[1][0]['_wrapper']._state"))
def a_shared_array_without_a_lock(program):
    def sample(self, index):
        self.written[index] = index + 1
        return index

    written = multiprocessing.RawArray("i", 8)
    return taken(program.load(Holding(sample, written=written))), written[:]


@kind()
def named_shared_memory(program):
    memory = shared_memory.SharedMemory(create=True, size=8)
    try:

        def sample(self, index):
            self.memory.buf[index] = index + 1
            return index

        return taken(program.load(Holding(sample, memory=memory))), bytes(memory.buf[:8])
    finally:
        memory.close()
        memory.unlink()


# ---- files


def mapped(program, mode):
    np.arange(8).tofile(program.folder / "array")

    def sample(self, index):
        value = int(self.array[index])
        if self.array.flags.writeable:
            self.array[index] = -1
        return value

    array = np.memmap(program.folder / "array", np.int64, mode)
    batches = taken(program.load(Holding(sample, array=array)))
    return batches, array.tolist(), np.fromfile(program.folder / "array", np.int64).tolist()


@kind()
def a_memory_map_to_read(program):
    return mapped(program, "r")


@kind()
def a_memory_map_to_write(program):
    return mapped(program, "r+")


@kind()
def a_private_memory_map(program):
    return mapped(program, "c")


@kind(Refused("dataset.bytes", "mmap.mmap"))
def an_mmap_object(program):
    (program.folder / "bytes").write_bytes(bytes(range(8)))
    with open(program.folder / "bytes", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        return taken(program.load(Holding(lambda self, index: self.bytes[index], bytes=mapping)))


@kind(Refused("dataset.view", "builtins.memoryview"))
def a_memoryview(program):
    return taken(program.load(Holding(lambda self, index: self.view[index], view=memoryview(bytes(range(8))))))


def lines_of(file, encode=str):
    """A dataset of the lines of an open file, by one worker: forks share the offset."""
    offsets = [0]
    while line := file.readline():
        offsets.append(offsets[-1] + len(line))

    def sample(self, index):
        self.file.seek(self.offsets[index])
        return int(self.file.readline())

    return Holding(sample, file=file, offsets=offsets)


LINES = "".join(f"{number}\n" for number in range(8))


@kind(Refused("dataset.file", "_io.TextIOWrapper"))
def an_open_text_file(program):
    (program.folder / "text").write_text(LINES)
    with open(program.folder / "text") as file:
        return taken(program.load(lines_of(file), num_workers=1))


@kind(Refused("dataset.file", "_io.BufferedReader"))
def an_open_binary_file(program):
    (program.folder / "binary").write_text(LINES)
    with open(program.folder / "binary", "rb") as file:
        return taken(program.load(lines_of(file), num_workers=1))


@kind(Refused("dataset.file", "_io.BufferedReader"))
def a_file_that_workers_read_at_offsets(program):
    (program.folder / "binary").write_bytes(bytes(range(8)))
    with open(program.folder / "binary", "rb") as file:
        dataset = Holding(lambda self, index: os.pread(self.file.fileno(), 1, index)[0], file=file)
        return taken(program.load(dataset))


@kind(Refused("dataset.log", "_io.TextIOWrapper"))
def a_file_that_workers_append_to(program):
    def sample(self, index):
        print(index, file=self.log, flush=True)
        return index

    with open(program.folder / "log", "a") as log:
        batches = taken(program.load(Holding(sample, log=log)))
    return batches, sorted((program.folder / "log").read_text().split())


@kind(Refused("dataset.file", "_io.BufferedReader"))
def an_open_gzip_file(program):
    with gzip.open(program.folder / "text.gz", "wb") as file:
        file.write(LINES.encode())
    with gzip.open(program.folder / "text.gz") as file:
        return taken(program.load(lines_of(file), num_workers=1))


@kind(Refused("dataset.archive", "_io.BufferedReader"))
def an_open_zip_archive(program):
    with zipfile.ZipFile(program.folder / "archive.zip", "w") as archive:
        for number in range(8):
            archive.writestr(str(number), str(number))
    with zipfile.ZipFile(program.folder / "archive.zip") as archive:
        dataset = Holding(lambda self, index: int(self.archive.read(str(index))), archive=archive)
        return taken(program.load(dataset, num_workers=1))


@kind(Refused("dataset.archive", "_io.BufferedReader"))
def an_open_tar_archive(program):
    (program.folder / "text").write_text(LINES)
    with tarfile.open(program.folder / "archive.tar", "w") as archive:
        archive.add(program.folder / "text", "text")
    with tarfile.open(program.folder / "archive.tar") as archive:

        def sample(self, index):
            return int(self.archive.extractfile("text").read().split()[index])

        return taken(program.load(Holding(sample, archive=archive), num_workers=1))


@kind(Refused("dataset.file", "_io.TextIOWrapper"))
def a_temporary_file(program):
    with tempfile.NamedTemporaryFile("w+", dir=program.folder) as file:
        file.write(LINES)
        file.seek(0)
        return taken(program.load(lines_of(file), num_workers=1)), os.path.exists(file.name)


@kind()
def a_temporary_folder(program):
    folder = tempfile.TemporaryDirectory(dir=program.folder)
    (Path(folder.name) / "number").write_text("7")
    dataset = Holding(lambda self, index: int((Path(self.folder.name) / "number").read_text()) + index, folder=folder)
    try:
        return taken(program.load(dataset)), os.path.isdir(folder.name)
    finally:
        folder.cleanup()


def database(program):
    with contextlib.closing(sqlite3.connect(program.folder / "database")) as connection, connection:
        connection.execute("create table numbers (number integer)")
        connection.executemany("insert into numbers values (?)", [(number,) for number in range(8)])
    return program.folder / "database"


@kind(Refused("dataset.connection", "sqlite3.Connection"))
def a_connection_to_sqlite_to_read(program):
    def sample(self, index):
        return self.connection.execute("select number from numbers where number = ?", (index,)).fetchone()[0]

    uri = f"file:{database(program)}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        return taken(program.load(Holding(sample, connection=connection)))


@kind(Refused("dataset.connection", "sqlite3.Connection"))
def a_connection_to_sqlite_to_write(program):
    def sample(self, index):
        with self.connection:
            self.connection.execute("update numbers set number = number + 100 where number = ?", (index,))
        return index

    path = database(program)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        batches = taken(program.load(Holding(sample, connection=connection), num_workers=1))
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return batches, connection.execute("select number from numbers order by number").fetchall()


@kind(Refused("dataset.file", "pyarrow._parquet.ParquetReader"), needs=("pyarrow",))
def an_open_parquet_file(program):
    import pyarrow
    import pyarrow.parquet

    path = program.folder / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"number": range(8)}), path, row_group_size=1)
    with pyarrow.parquet.ParquetFile(path) as file:
        dataset = Holding(lambda self, index: self.file.read_row_group(index)["number"][0].as_py(), file=file)
        return taken(program.load(dataset, num_workers=1))


@kind(needs=("pyarrow",))
def a_table_of_arrow_over_a_memory_map(program):
    import pyarrow
    import pyarrow.feather

    pyarrow.feather.write_feather(pyarrow.table({"number": range(8)}), program.folder / "table", "uncompressed")
    table = pyarrow.feather.read_table(program.folder / "table", memory_map=True)
    return taken(program.load(Holding(lambda self, index: self.table["number"][index].as_py(), table=table)))


@kind(Refused("dataset.file", "h5py._hl.files.File"), needs=("h5py",))
def an_open_hdf5_file(program):
    import h5py

    with h5py.File(program.folder / "numbers.h5", "w") as file:
        file["numbers"] = np.arange(8)
    with h5py.File(program.folder / "numbers.h5") as file:
        return taken(program.load(Holding(lambda self, index: int(self.file["numbers"][index]), file=file), 1))


@kind(Refused("dataset.file", "builtins.safe_open"), needs=("safetensors",))
def an_open_safetensors_file(program):
    import safetensors
    import safetensors.torch

    safetensors.torch.save_file({"numbers": torch.arange(8)}, program.folder / "numbers.safetensors")
    with safetensors.safe_open(program.folder / "numbers.safetensors", "pt") as file:
        return taken(program.load(Holding(lambda self, index: self.file.get_tensor("numbers")[index], file=file)))


@kind(Refused("dataset.environment", "builtins.Environment"), needs=("lmdb",))
def an_environment_of_lmdb(program):
    import lmdb

    def sample(self, index):
        with self.environment.begin() as transaction:
            return int(transaction.get(str(index).encode()))

    with lmdb.open(str(program.folder / "numbers")) as environment, environment.begin(write=True) as transaction:
        for number in range(8):
            transaction.put(str(number).encode(), str(number).encode())
    with lmdb.open(str(program.folder / "numbers"), readonly=True, lock=False) as environment:
        return taken(program.load(Holding(sample, environment=environment)))


@kind(Refused("dataset.image", "rasterio.io.DatasetReader"), needs=("rasterio",))
def an_open_raster(program):
    import rasterio

    path, shape = program.folder / "numbers.tif", {"width": 8, "height": 1, "count": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no place on earth
        with rasterio.open(path, "w", driver="GTiff", dtype="uint8", **shape) as image:
            image.write(np.arange(8, dtype=np.uint8).reshape(1, 1, 8))
        with rasterio.open(path) as image:
            return taken(program.load(Holding(lambda self, index: int(self.image.read(1)[0, index]), image=image), 1))


@kind(Refused("dataset.image", "_io.BufferedReader"), needs=("tifffile",))
def an_open_tiff_file(program):
    import tifffile

    tifffile.imwrite(program.folder / "numbers.tif", np.arange(64, dtype=np.uint8).reshape(8, 8))
    with tifffile.TiffFile(program.folder / "numbers.tif") as image:
        return taken(program.load(Holding(lambda self, index: int(self.image.asarray()[index, 0]), image=image), 1))


@kind(needs=("datasets",))
def a_dataset_of_hugging_face(program):
    import datasets

    dataset = datasets.Dataset.from_dict({"number": list(range(8)), "word": [str(number) for number in range(8)]})
    return taken(program.load(dataset.with_format("torch")))


@kind(Refused("dataset.ours", "socket.socket"))
def a_socket(program):
    def sample(self, index):
        self.ours.sendall(bytes([index]))
        return index

    ours, theirs = socket.socketpair()
    with ours, theirs:
        batches = taken(program.load(Holding(sample, ours=ours)))
        return batches, sorted(theirs.recv(1)[0] for _ in range(8))


@kind(Refused("dataset.process", "_thread.lock"))
def a_process_that_answers_over_pipes(program):
    def sample(self, index):
        self.process.stdin.write(f"{index}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["cat"], text=True, **pipes) as process:
        return taken(program.load(Holding(sample, process=process), num_workers=1))


# ---- threads, generators, references


def doubled(number):
    return 2 * number


@kind()
def a_thread_pool_that_is_made_in_the_worker(program):
    def sample(self, index):
        self.pool = self.pool or ThreadPoolExecutor(2)
        return sum(self.pool.map(doubled, range(index)))

    loader = program.load(Holding(sample, pool=None))
    return taken(loader), taken(loader)


@kind(Refused("dataset.pool", "_queue.SimpleQueue"))
def a_thread_pool_that_is_made_before(program):
    with ThreadPoolExecutor(2) as pool:
        return taken(program.load(Holding(lambda self, index: sum(self.pool.map(doubled, range(index))), pool=pool)))


@kind(Refused("dataset.numbers", "_thread.lock"))
def a_thread_that_fills_a_queue(program):
    numbers, ended = queue.Queue(), threading.Event()

    def fill():
        for number in range(8):
            numbers.put(number)
        numbers.join()

    thread = threading.Thread(target=fill)
    thread.start()
    while numbers.qsize() < 8:
        ended.wait(0.001)

    def sample(self, _):
        return self.numbers.get(), self.thread.is_alive()

    try:
        return taken(program.load(Holding(sample, numbers=numbers, thread=thread), num_workers=1))
    finally:
        for _ in range(8):
            numbers.task_done()
        thread.join()


@kind(Refused("dataset.lock", "_thread.lock"))
def locks_of_threads(program):
    def sample(self, index):
        with self.lock, self.reentrant, self.reentrant, self.condition:
            self.ready.set()
        return index, self.ready.is_set(), self.local.number

    local = threading.local()
    local.number = 7
    dataset = Holding(
        sample,
        lock=threading.Lock(),
        reentrant=threading.RLock(),
        condition=threading.Condition(),
        ready=threading.Event(),
        local=local,
    )
    return taken(program.load(dataset))


def counting():
    yield from range(100, 200)


@kind(Refused("dataset.numbers", "builtins.generator"))
def a_generator(program):
    numbers = counting()
    next(numbers)
    loader = program.load(Holding(lambda self, _: next(self.numbers), numbers=numbers))
    return taken(loader), taken(loader), next(numbers)


@kind(Refused("dataset.numbers", "builtins.generator"))
def an_iterator_over_a_generator(program):
    numbers = zip(counting(), itertools.count(), strict=False)
    loader = program.load(Holding(lambda self, _: next(self.numbers), numbers=numbers))
    return taken(loader), taken(loader), next(numbers)


@kind(Refused("dataset.numbers", "builtins.generator"))
def a_stream_over_a_generator(program):
    loader = program.load(Streaming(lambda self: self.numbers, numbers=(number for number in range(7))))
    return taken(loader), taken(loader)


class Owner:
    def __init__(self, number):
        self.number = number


@kind(Refused("dataset.owner", "weakref.ReferenceType"))
def a_weak_reference(program):
    owner = Owner(7)
    dataset = Holding(lambda self, index: self.owner().number + index, owner=weakref.ref(owner))
    return taken(program.load(dataset))


@kind(Refused("dataset.weak"))
def a_dictionary_of_weak_references(program):
    owners = [Owner(number) for number in range(8)]
    weak = weakref.WeakValueDictionary({owner.number: owner for owner in owners})
    return taken(program.load(Holding(lambda self, index: self.weak[index].number, weak=weak)))


# ---- functions


@functools.lru_cache
def cached_square(number):
    return number * number


class Caching(Dataset):
    """Caches in each way that Python offers."""

    def __init__(self):
        self.decoded = {}
        self.calls = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        self.calls += 1
        if index not in self.decoded:
            self.decoded[index] = np.full(3, index)
        return self.decoded[index], self.method(index), cached_square(index), self.table[index], self.calls

    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033 - as programs do
    def method(self, index):
        return index + 1

    @functools.cached_property
    def table(self):
        return [3 * number for number in range(8)]


@kind()
def caches(program):
    dataset = Caching()
    loader = program.load(dataset, persistent_workers=True)
    return taken(loader), taken(loader), dataset.calls


@kind()
def a_cached_function_of_an_instance(program):
    @functools.lru_cache
    def cube(number):
        return number**3

    cube(1)
    return taken(program.load(Holding(lambda self, index: self.cube(index), cube=cube)))


@kind(needs=("numba",))
def a_function_that_numba_has_compiled(program):
    import numba

    square = numba.njit(lambda number: number * number)
    square(2)
    return taken(program.load(Holding(lambda self, index: self.square(index), square=square)))


class Doubling(torch.nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values


def incremented(values: torch.Tensor) -> torch.Tensor:
    return values + 1


def scripted(obj):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to give it up
        return torch.jit.script(obj)


@kind(Refused("dataset.module", "torch.ScriptModule", "RuntimeError"))
def a_scripted_module(program):
    module = scripted(Doubling())
    return taken(program.load(Holding(lambda self, index: self.module(torch.tensor(index)), module=module)))


@kind(Refused("dataset.function", "torch.jit.ScriptFunction", "PickleError"))
def a_scripted_function(program):
    function = scripted(incremented)
    return taken(program.load(Holding(lambda self, index: self.function(torch.tensor(index)), function=function)))


@functools.partial(torch.compile, backend="eager")
def compiled(values):
    return values + 1


@kind()
def a_compiled_function_of_a_module(program):
    return taken(program.load(Holding(lambda self, index: self.add(torch.tensor(index)), add=compiled)))


@kind(Refused("dataset.add", "builtins.function"))
def a_compiled_function(program):
    add = torch.compile(lambda values: values + 1, backend="eager")
    return taken(program.load(Holding(lambda self, index: self.add(torch.tensor(index)), add=add)))


@kind()
def lambdas_and_closures(program):
    calls = []

    def note(index):
        calls.append(index)
        return len(calls)

    steps = [lambda number, by=by: number * by for by in (2, 3)]
    dataset = Holding(lambda self, index: [note(index), *[step(index) for step in self.steps]], steps=steps)
    return taken(program.load(dataset)), calls


# ---- classes and values


class Node:
    __slots__ = "next", "number"

    def __init__(self, number, following):
        self.number = number
        self.next = following


@kind(Refused("dataset.first", "kinds.Node", "PicklingError"))
def a_long_linked_list(program):
    def sample(self, index):
        node, total = self.first, 0
        while node is not None:
            node, total = node.next, total + node.number
        return total + index

    first = None
    for number in range(100_000):
        first = Node(number, first)
    try:
        return taken(program.load(Holding(sample, first=first)))
    finally:
        while first is not None:  # one by one, without recursion
            first = first.next


@kind()
def classes_made_at_run_time(program):
    @dataclasses.dataclass
    class Local:
        number: int

    class Colour(enum.Enum):
        RED = 1
        BLUE = 2

    made = type("Made", (Owner,), {"double": lambda self: 2 * self.number})
    pair = collections.namedtuple("pair", "one other")

    def sample(self, index):
        local = pair(Local(index), self.made)  # no such object can leave torch's workers
        return local.one.number, local.other.double(), self.colour is Colour.RED, self.pair.other

    dataset = Holding(sample, made=made(7), colour=Colour.RED, pair=pair(1, 2))
    return taken(program.load(dataset))


@kind(Fails("ModuleNotFoundError", "No module named 'made_at_run_time'"))
def an_object_of_a_module_made_at_run_time(program):
    module = types.ModuleType("made_at_run_time")
    exec("def triple(number):\n    return 3 * number", vars(module))
    sys.modules[module.__name__] = module
    try:
        return taken(program.load(Holding(lambda self, index: self.triple(index), triple=module.triple)))
    finally:
        del sys.modules[module.__name__]


@kind(Refused("dataset.pointer", "LP_c_int", "ValueError"))
def a_pointer(program):
    number = ctypes.c_int(7)
    return taken(program.load(Holding(lambda self, i: self.pointer.contents.value + i, pointer=ctypes.pointer(number))))


@kind(Refused("dataset", "kinds.Stubborn", "NotImplementedError"))
def a_dataset_that_refuses_to_be_pickled(program):
    return taken(program.load(Stubborn(lambda self, index: index)))


class Stubborn(Holding):
    def __getstate__(self):
        raise NotImplementedError("it must not be pickled")


@kind()
def a_wrapper_that_delegates(program):
    wrapped = Delegating(Holding(lambda self, index: index + self.offset, offset=10))
    return taken(program.load(ConcatDataset([Subset(wrapped, [5, 1, 3]), wrapped])))


class Delegating:
    def __init__(self, wrapped):
        self.wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self.wrapped, name)

    def __len__(self):
        return len(self.wrapped)

    def __getitem__(self, index):
        return self.wrapped[index]


class Augment:
    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __call__(self):
        return self.generator.random()


@kind()
def thousands_of_objects_with_random_generators(program):
    dataset = Holding(
        lambda self, index: self.augments[600 * index](), augments=[Augment(seed) for seed in range(5000)]
    )
    loader = program.load(dataset)
    kept = program.load(dataset, persistent_workers=True)
    return [taken(each) for each in (loader, loader, kept, kept)], dataset.augments[600]()


# ---- the program around the dataset

REGISTRY = {}
setting = 0
context = contextvars.ContextVar("context", default=0)


@kind(Spawned())
def what_the_program_has_set(program):
    return contextvars.copy_context().run(set_and_taken, program)


def set_and_taken(program):
    global setting
    precision, dtype, characters = (
        decimal.getcontext().prec,
        torch.get_default_dtype(),
        locale.setlocale(locale.LC_CTYPE),
    )
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8" if characters == "C" else "C")
    REGISTRY["triple"] = lambda number: 3 * number
    setting = 1
    context.set(7)
    decimal.getcontext().prec = 5
    torch.set_default_dtype(torch.float64)
    np.seterr(divide="ignore")
    try:
        return taken(program.load(Holding(of_program), num_workers=1))
    finally:
        locale.setlocale(locale.LC_CTYPE, characters)
        REGISTRY.clear()
        setting = 0
        decimal.getcontext().prec = precision
        torch.set_default_dtype(dtype)
        np.seterr(divide="warn")


def of_program(self, index):
    of_python = [*REGISTRY], setting, context.get(), str(decimal.Decimal(1) / 3), locale.setlocale(locale.LC_CTYPE)
    return index, *of_python, torch.tensor(0.5), np.geterr()


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
def the_folder_and_the_environment(program):
    before = os.getcwd(), os.umask(0o027)
    os.chdir(program.folder)
    os.environ["KINDS"] = "set"
    try:
        return taken(program.load(Holding(of_environment)))
    finally:
        os.chdir(before[0])
        os.umask(before[1])
        del os.environ["KINDS"]


def of_environment(self, index):
    os.umask(umask := os.umask(0))
    return os.path.basename(os.getcwd()), os.environ.get("KINDS", ""), umask


@kind(Refused("dataset.handler.lock", "_thread.RLock"))
def a_handler_of_logging(program):
    def sample(self, index):
        self.handler.handle(logging.makeLogRecord({"msg": f"sample {index}"}))
        return index

    handler = logging.FileHandler(program.folder / "log")
    try:
        batches = taken(program.load(Holding(sample, handler=handler)))
    finally:
        handler.close()
    return batches, sorted((program.folder / "log").read_text().splitlines())


@kind(Differs())
def a_dataset_that_prints_logs_and_warns(program):
    path, logger = program.folder / "output", logging.getLogger("kinds")
    handler = logging.FileHandler(program.folder / "log")
    logger.addHandler(handler)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        batches = taken(program.load(Holding(talking)))
    finally:
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(file)
        logger.removeHandler(handler)
        handler.close()
    said = sorted(line for line in path.read_text().splitlines() if re.match("sample|.*UserWarning: sample", line))
    return batches, said, sorted((program.folder / "log").read_text().splitlines())


def talking(self, index):
    print(f"sample {index} on stdout", flush=True)
    print(f"sample {index} on stderr", file=sys.stderr)
    logging.getLogger("kinds").warning("sample %d in the log", index)
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


@kind(Spawned())
def finalized(program):
    """By the end of the program; see test_kinds_of_datasets.py."""
    dataset = Holding(as_it_is, path=str(program.folder / "workers"))
    return taken(program.load(dataset, worker_init_fn=finalize_at_the_end))


def as_it_is(self, index):
    return index


def finalize_at_the_end(worker_id):
    path = get_worker_info().dataset.path
    multiprocessing.util.Finalize(None, append, (path, f"{worker_id}\n"), exitpriority=0)


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


FORKED = []
os.register_at_fork(after_in_child=lambda: FORKED.append(os.getpid()))


@kind(Spawned())
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


@kind()
def a_loader_within_a_sample(program):
    def sample(self, index):
        inner = program.loader_class(range(index), 2)
        return sum(int(batch.sum()) for batch in inner), get_worker_info().id

    return taken(program.load(Holding(sample)))


@kind()
def json_lines_that_are_found_by_their_offsets(program):
    path = program.folder / "lines.jsonl"
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(8)))

    class Lines(Dataset):
        def __init__(self):
            self.file = None
            self.offsets = [0]
            with path.open("rb") as file:
                while file.readline():
                    self.offsets.append(file.tell())

        def __len__(self):
            return len(self.offsets) - 1

        def __getitem__(self, index):
            self.file = self.file or path.open("rb")  # lazily, in the worker
            self.file.seek(self.offsets[index])
            return json.loads(self.file.readline())

    return taken(program.load(Lines()))
