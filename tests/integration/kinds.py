"""Kinds of datasets that real programs hold: one function each, which uses a loader and returns what came of it.

Each is given a `Program`, whose `load` makes the loader of one side: torch's, or ours with one kind of workers. The
decorator says what is expected of actors; forks always give what torch's forked workers give. A kind that is `Spawned`
defines nothing within its function that workers need: torch would have to pickle it.
"""

import collections
import contextlib
import contextvars
import dataclasses
import decimal
import enum
import functools
import gc
import importlib.util
import locale
import logging
import multiprocessing.util
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
import warnings
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


@kind()
def a_shared_tensor_that_workers_write(program):
    def sample(self, index):
        self.written[index] = index + 1
        return index

    written = torch.zeros(8).share_memory_()
    return taken(program.load(Holding(sample, written=written))), written.tolist()


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


@kind(needs=("pyarrow",))
def a_table_of_arrow_over_a_memory_map(program):
    import pyarrow
    import pyarrow.feather

    pyarrow.feather.write_feather(pyarrow.table({"number": range(8)}), program.folder / "table", "uncompressed")
    table = pyarrow.feather.read_table(program.folder / "table", memory_map=True)
    return taken(program.load(Holding(lambda self, index: self.table["number"][index].as_py(), table=table)))


@kind(needs=("datasets",))
def a_dataset_of_hugging_face(program):
    import datasets

    dataset = datasets.Dataset.from_dict({"number": list(range(8)), "word": [str(number) for number in range(8)]})
    return taken(program.load(dataset.with_format("torch")))


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


def counting():
    yield from range(100, 200)


@kind(Refused("dataset.numbers", "builtins.generator"))
def a_generator(program):
    numbers = counting()
    next(numbers)
    loader = program.load(Holding(lambda self, _: next(self.numbers), numbers=numbers))
    return taken(loader), taken(loader), next(numbers)


@kind(Refused("dataset.numbers", "builtins.generator"))
def a_stream_over_a_generator(program):
    loader = program.load(Streaming(lambda self: self.numbers, numbers=(number for number in range(7))))
    return taken(loader), taken(loader)


class Owner:
    def __init__(self, number):
        self.number = number


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


@functools.partial(torch.compile, backend="eager")
def compiled(values):
    return values + 1


@kind()
def a_compiled_function_of_a_module(program):
    return taken(program.load(Holding(lambda self, index: self.add(torch.tensor(index)), add=compiled)))


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
