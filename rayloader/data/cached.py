"""`rayloader.cached`: a dataset whose samples are built once per node, and read from shared memory or a file later.

Promise: batches are those without the cache, or there is an error. A sample that draws from a random generator is
refused, and so is one that comes out differently when it is built again: the first samples that a process builds, the
first that it reads, and a share of all others are compared. Nothing is ever removed: with a random order no other rule
keeps more of what will be asked for. This module does not import Ray; any thread and any fork may call.

NOTE [Which file]. In memory, the file belongs to the process that has made the cache, and ends with it. Forks have it;
other processes of the node open it through `/proc`, and those of another node have one of their own, which belongs to
all of them: each looks for it among the files that processes there have open, and the first one makes it. In a folder,
each node has a file of its own, named by the dataset's class and length, and by what the user calls its samples.
"""

from __future__ import annotations

import logging
import operator
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import finalize

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from rayloader.data.content import content_of
from rayloader.data.sample_store import ABSENT, SampleStore
from rayloader.data.trusted import open_own, path_in
from rayloader.errors import CacheError, add_note
from rayloader.fetching import ask, one_by_one
from rayloader.namespaces import attributes_in
from rayloader.observe.stats import CacheStats
from rayloader.random.generators import RandomState
from rayloader.random.search import search, walk
from rayloader.resume.wrapped import pass_on
from rayloader.transport import codec
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
if TYPE_CHECKING:
    _DatasetOf = Dataset
else:  # as in loader.py: what parameters torch's classes have may change
    _DatasetOf = {_T: Dataset}

logger = logging.getLogger("rayloader")

_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# Of the samples that a process builds, so many at first and then one in so many are built twice.
_FIRST_BUILT, _BUILT = 2, 128
_SEARCHED = 8  # with so many builds generators are looked for: some are created with the first samples
# Of those that it reads, the first and then one in so many are built too.
_READ = 1024
_TURN_S = 0.01  # between looks at whether another process has made the node's file


class MapStyle(Protocol[_T_co]):
    """What has samples by their numbers."""

    def __getitem__(self, index: int, /) -> _T_co:
        """A sample."""

    def __len__(self) -> int:
        """How many there are."""


def cached(
    dataset: Dataset[_T] | MapStyle[_T],
    max_bytes: int | str = "20GB",
    where: str | os.PathLike[str] = "memory",
    *,
    key: str | None = None,
) -> CachedDataset[_T]:
    """The same dataset, of which each sample is built once per node, and then read.

    All workers of a node share the samples, whatever loader they belong to, in all epochs: those of rayloader and of
    torch's own loader, and also the program itself with `num_workers=0`. Wrap what is always the same, such as decoding
    and resizing, and apply random augmentation outside, to the samples of the cache::

        decoded = rayloader.cached(Photos(paths))  # reads, decodes, resizes
        loader = rayloader.DataLoader(Augmented(decoded), batch_size=64, num_workers=8)

    Samples are whatever workers can send: tensors and arrays, also within other objects. Each time that one is read
    it is a new object, in memory of its own, which the program may write to.

    Args:
        dataset: map-style, with `__len__`; it is asked for numbers from 0 on. Its `__getitems__`, if there is one, must
            return a list.
        max_bytes: that the samples may take on a node, in all: a number, or one with a unit, such as "500MB" or
            "20GiB". Memory or disk is taken as samples come; the cache ends earlier where there is too little. What
            finds no room is built each time.
        where: "memory": the samples exist as long as this object. Otherwise a folder on a local disk, in which later
            runs find the samples again, each node by itself, and which the ranks of a machine share; `/dev/shm` is one
            in memory.
        key: for a folder, which needs it: a text that says what the samples are, such as "photos of May, 256 pixels".
            Samples of another key, or of a dataset of another class or length, are not used. Nothing else tells an old
            sample from a new one: change it whenever the samples change.

    Raises:
        TypeError: it is not a map-style dataset.
        ValueError: a value of an argument.
        CacheError: there is no room for the cache's own tables, or others could have written its file. From
            `__getitem__`: a sample draws from a random generator, or differs when it is built again.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"cached() needs a map-style dataset, with __getitem__ and __len__, got {type(dataset).__name__}; cache "
            "what an iterable dataset reads from instead"
        )
    count, limit = len(dataset), _bytes_of(max_bytes)
    if where == "memory":
        if key is not None:
            raise ValueError("key= is of a folder: a cache in memory ends with the program; leave it out")
        try:
            file = MemoryFile(f"cache-{secrets.token_hex(8)}", 0, grows=True)
        except MemoryFileError as error:
            raise CacheError(f"there is no room for a cache of {count} samples: {error}; {_InMemory.remedy}") from error
        return CachedDataset(dataset, _InMemory(file.address, file), count, limit)
    kept: CachedDataset[_T] = CachedDataset(dataset, _InFolder(path_in(where, dataset, key)), count, limit)
    kept._store.try_again()
    return kept


def _bytes_of(size: Any) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?i?B|)", size.strip()) if isinstance(size, str) else None
    if match is not None and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or not 1 <= size < 1 << 62:
        raise ValueError(f"max_bytes must be a whole number of bytes >= 1, or such as '500MB' or '20GiB', got {size!r}")
    return int(size)


class CachedDataset(_DatasetOf[_T], Generic[_T]):
    """A dataset with a cache, from `cached`.

    Attributes:
        dataset: the one that builds the samples.
    """

    def __init__(self, dataset: Any, place: _InMemory | _InFolder, count: int, max_bytes: int) -> None:
        self.dataset = dataset
        pass_on(self, dataset)
        self._place, self._count, self._max_bytes = place, count, max_bytes
        try:
            self._store = place.open(count, max_bytes)
        except (OSError, ValueError) as error:
            raise CacheError(f"the cache {place} can't be used: {error}; {place.remedy}") from error
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self._place, self._count, self._max_bytes)

    def __len__(self) -> int:
        if (now := len(self.dataset)) != self._count:
            raise CacheError(f"the cached dataset had {self._count} samples and has {now} now; make a new cache")
        return self._count

    def __repr__(self) -> str:
        return f"cached({self.dataset!r}, {str(self._place)!r})"

    def __getitem__(self, index: int) -> _T:
        number = self._number(index)
        sample = self._store.read(number)
        if sample is ABSENT:
            return self._built_now([number])[0]
        if self._is_to_be_compared():
            self._compare(number, sample)
        return sample  # type: ignore[no-any-return]

    def __getitems__(self, indices: Sequence[int]) -> list[_T]:
        """The samples of a batch."""
        numbers = [self._number(index) for index in indices]
        samples = list(map(self._store.read, numbers))
        missing: list[int] = []
        for place, sample in enumerate(samples):
            if sample is ABSENT:
                missing.append(place)
            elif self._is_to_be_compared():
                self._compare(numbers[place], sample)
        if missing:
            built = self._built_now([numbers[place] for place in missing])
            for place, sample in zip(missing, built, strict=True):
                samples[place] = sample
        return samples

    def _is_to_be_compared(self) -> bool:
        """Whether a sample that was read is; counts it."""
        self._look()
        self._read += 1
        return self._read % _READ == 1

    def _look(self) -> None:
        """After a read: begins again in another process, or if the program has set an attribute of the dataset."""
        now = _attributes_of(self.dataset)
        is_same = len(now) == len(self._attributes) and all(map(operator.is_, now, self._attributes))
        if self._pid != os.getpid() or not is_same:
            self._begin()

    def _begin(self) -> None:
        """As in a process that was forked, or has just got the dataset."""
        self._pid = os.getpid()
        self._built = self._read = 0  # samples
        self._generators: list[Any] = []  # that building could draw from
        self._searches = _SEARCHED  # that are left
        self._state: RandomState | None = None  # of generators, when a sample was last built
        self._attributes = _attributes_of(self.dataset)

    def _number(self, index: int) -> int:
        if not hasattr(index, "__index__"):
            raise TypeError(f"a cached dataset is asked for whole numbers from 0 on, got {index!r}")
        if not 0 <= (number := operator.index(index)) < self._count:  # what a negative one means differs
            raise IndexError(f"index {number} is out of range for {self._count} samples, which are counted from 0 on")
        return number

    def _built_now(self, numbers: list[int]) -> list[_T]:
        """Samples that are not there: built, and kept."""
        self._look()
        samples = self._build(numbers)
        for number, sample in zip(numbers, samples, strict=True):
            if self._built < _FIRST_BUILT or self._built % _BUILT == 0:
                self._compare(number, sample)
            self._built += 1
            if self._store.write(number, sample):
                logger.warning(
                    "rayloader: the cache %s is full: %s. The others are built each time: raise max_bytes where there "
                    "is more room, or cache smaller samples",
                    str(self._place),  # a handler may keep what is logged
                    str(self.stats()),
                )
        return samples

    def _compare(self, number: int, sample: _T) -> None:
        try:
            again = self._build([number])[0]
        except Exception as error:
            add_note(error, f"a share of a cache's samples is built again to be compared; this was sample {number}")
            raise
        if content_of(_as_read(sample)) != content_of(_as_read(again)):
            raise CacheError(
                f"sample {number} of the cached {type(self.dataset).__name__} differs when it is built again, so that "
                f"the cache {self._place} would give other batches. Something it depends on has changed (an attribute, "
                f"a file, the time): {self._place.anew}, or apply what changes to the samples of the cache"
            )

    def _build(self, numbers: list[int]) -> list[_T]:
        """Builds samples, which must not draw from any generator."""
        generators = self._generators  # another thread may look for them too
        if self._searches > 0:
            self._searches -= 1
            self._generators = generators = [*search({"dataset": self.dataset}).values()]
        before = self._state = RandomState.capture(generators, self._state)
        samples: Any = None
        if len(numbers) > 1 and getattr(self.dataset, "__getitems__", None):
            samples = ask(self.dataset, numbers)
            if not isinstance(samples, list) or len(samples) != len(numbers):
                raise CacheError(
                    f"__getitems__ of the cached {type(self.dataset).__name__} must return a list of {len(numbers)} "
                    f"samples, got {type(samples).__name__}; cache a dataset that gives samples one by one"
                )
        else:
            samples = one_by_one(self.dataset, numbers)
        attributes, self._attributes = len(self._attributes), _attributes_of(self.dataset)
        if len(self._attributes) != attributes:  # it may be a generator, made with these samples: all are compared
            self._built, self._searches = -len(numbers), _SEARCHED + 2 * len(numbers)
        if not RandomState.capture(generators, before).equals(before):
            which = f"sample {numbers[0]}" if len(numbers) == 1 else f"one of samples {numbers[:8]}"
            raise CacheError(
                f"{which} of the cached {type(self.dataset).__name__} draws from a random generator, so that it is "
                "another one each time, or a thread beside it does; cache what comes before the random part, and apply "
                "that to the samples of the cache; let threads use generators of their own"
            )
        return samples  # type: ignore[no-any-return]

    def stats(self) -> CacheStats:
        """What the cache of this node holds, and how often it has served, over all processes."""
        return self._store.stats()


def _attributes_of(dataset: Any) -> list[Any]:
    return list((attributes_in(dataset) or {}).values())


def _as_read(sample: Any) -> Any:
    """A sample as it would be read: objects may differ from those that were pickled, though they are equal."""
    encoded = codec.encode(sample, known_classes=True)
    return codec.decode(encoded.skeleton, encoded.buffers)


def cache_in(dataset: Any) -> CacheStats | None:
    """What the cache of a dataset has measured, or that of one which it holds; None if there is none."""
    for _, part in walk({"dataset": dataset}):
        if isinstance(part, CachedDataset):
            return part.stats()
    return None


_here: dict[str, MemoryFile] = {}  # of caches of other nodes, by name; they live as long as a process that uses them


class _InFolder:
    """Where a cache in a folder is: in a file that nobody else can have written, which each node has for itself."""

    remedy = (
        "name another folder, delete a file that is not one of this version, make room, or raise this process's "
        "limits of memory and open files (ulimit)"
    )

    def __init__(self, path: Path) -> None:
        self._given = path
        self._path = path.with_name(f"{path.name}-{os.uname().nodename}.rayloader-cache")
        self.anew = f"delete {self._path} to make a new cache, or pass another key="

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._given,)

    def __str__(self) -> str:
        return f"in {self._path.parent}"

    def open(self, count: int, max_bytes: int) -> SampleStore:
        """Opens this node's file, and makes it if there is none."""
        self._path.parent.mkdir(0o700, parents=True, exist_ok=True)
        fd = open_own(self._path, os.O_RDWR | os.O_CREAT)
        finalize(self, os.close, fd)
        in_memory = os.path.exists("/dev/shm") and os.fstat(fd).st_dev == os.stat("/dev/shm").st_dev
        return SampleStore(fd, count, max_bytes, in_memory=in_memory)


class _InMemory:
    """Where a cache in memory is: in a file of the process that made it, or in one of this node."""

    remedy = "raise this process's limits of memory and open files (ulimit), make room, or lower max_bytes"
    anew = "make a new cache"

    def __init__(self, address: FileAddress, file: MemoryFile | None = None) -> None:
        self._address, self._file = address, file

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._address,)

    def __str__(self) -> str:
        return "in memory"

    def open(self, count: int, max_bytes: int) -> SampleStore:
        """Opens the file, in a process that has it not."""
        if self._file is None:
            try:
                self._file = MemoryFile.received(open_file(self._address, writable=True), self._address.name)
            except MemoryFileError:
                self._file = self._of_this_node()
        return SampleStore(self._file.fd, count, max_bytes, in_memory=True)

    def _of_this_node(self) -> MemoryFile:
        """The file that processes of this node share, whose name begins like the original's; made if there is none."""
        kind = self._address.name.split("-")[2]
        if kind in _here:
            return _here[kind]
        with socket.socket(socket.AF_UNIX) as turn:  # its name is taken while the first one looks and makes
            file = None
            while file is None and not _bound(turn, f"\0rayloader-cache-{kind}"):
                time.sleep(_TURN_S)
                file = _found(f"rayloader-cache-{kind}-")  # a fork of the first one may keep the name
            if file is None and (file := _found(f"rayloader-cache-{kind}-")) is None:
                file = MemoryFile(f"cache-{kind}", 0, grows=True)
        return _here.setdefault(kind, file)


def _bound(turn: socket.socket, name: str) -> bool:
    try:
        turn.bind(name)
    except OSError:
        return False
    return True


def _found(prefix: str) -> MemoryFile | None:
    """A memory file that a process of this node has open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
            if prefix in target:
                fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
                if os.readlink(f"/proc/self/fd/{fd}") == target and os.fstat(fd).st_uid == os.geteuid():
                    return MemoryFile.received(fd, target.removeprefix("/memfd:").removesuffix(" (deleted)"))
                os.close(fd)  # the number has become another file's meanwhile, or another user has taken the name
        except OSError:  # of another user, or closed meanwhile
            continue
    return None
