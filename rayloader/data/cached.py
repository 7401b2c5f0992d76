"""`rayloader.cached`: a dataset whose samples are built once per node, and read from shared memory or a file later.

Promise: batches are those without the cache, or there is an error. A sample that draws from a random generator is
refused, and so is one that comes out differently when it is built again: the first samples that a process builds, the
first that it reads, and a share of all others are compared. Nothing is ever removed: with a random order no other rule
keeps more of what will be asked for. This module does not import Ray; any thread and any fork may call.

NOTE [Which file]. In memory, the file belongs to the process that has made the cache, and ends with it. Forks have it;
other processes of the node open it through `/proc`, and those of another node have one of their own, which belongs to
all of them: each looks for it among the files that processes there have open, and whoever finds none makes one. Where
several make one at the same moment, all use the oldest, by the time in its name. In a folder, each node has a file of
its own, named by the dataset's class and length, and by what the user calls its samples.

NOTE [Content]. Samples are compared by their content, as bytes. Equal ones have the same content, in one process:
whichever of their parts are one object, in whatever order their sets are, wherever in memory their tensors lie. Classes
and functions count by their names.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import operator
import os
import re
import secrets
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import finalize

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from rayloader._compat import no_torch_function
from rayloader.data.sample_store import ABSENT, SampleStore, open_own, path_in
from rayloader.errors import CacheError
from rayloader.fetching import ask, one_by_one
from rayloader.namespaces import attributes_in
from rayloader.observe.stats import CacheStats
from rayloader.random.generators import RandomState
from rayloader.random.search import search, walk
from rayloader.resume.wrapped import pass_on
from rayloader.transport import codec
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file

_T = TypeVar("_T")

logger = logging.getLogger("rayloader")

# Of the samples that a process builds, so many at first and then one in so many are built twice.
_FIRST_BUILT, _BUILT = 2, 128
_SEARCHED = 8  # with so many builds generators are looked for: some are created with the first samples
# Of those that it reads, the first and then one in so many are built too.
_READ = 1024


def cached(
    dataset: Dataset[_T] | Sequence[_T],
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
    if where == "memory" and key is not None:
        raise ValueError("key= is of a folder: a cache in memory ends with the program; leave it out")
    place = None if where == "memory" else path_in(where, dataset, key)
    kept: CachedDataset[_T] = CachedDataset(dataset, place, len(dataset), _bytes_of(max_bytes))
    kept._store.try_again()
    return kept


def _bytes_of(size: Any) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?", size) if isinstance(size, str) else None
    if match is not None:
        size = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or not 1 <= size < 1 << 62:
        raise ValueError(f"max_bytes must be a whole number of bytes >= 1, or such as '500MB' or '20GiB', got {size!r}")
    return int(size)


class CachedDataset(Dataset[_T]):
    """A dataset with a cache, from `cached`.

    Attributes:
        dataset: the one that builds the samples.
    """

    def __init__(self, dataset: Any, place: Path | FileAddress | None, count: int, max_bytes: int) -> None:
        """Opens the cache.

        Args:
            dataset: builds the samples.
            place: of the file: a path without the name of the node; or in memory; None: a new one in memory.
            count: samples.
            max_bytes: that they may take.
        """
        self.dataset = dataset
        pass_on(self, dataset)
        self._where = f"in {place.parent}" if isinstance(place, Path) else "in memory"
        try:
            if isinstance(place, Path):
                fd, in_memory = _file_in_folder(place)
                finalize(self, os.close, fd)
            else:
                self._file = _file_in_memory(place)
                fd, in_memory, place = self._file.fd, True, self._file.address
            self._store = SampleStore(fd, count, max_bytes, in_memory=in_memory)
        except (OSError, ValueError, MemoryFileError) as error:
            raise CacheError(
                f"the cache {self._where} can't be used: {error}; make room, raise this process's limits of memory and "
                "open files (ulimit), lower max_bytes, or pass another where= or key="
            ) from error
        self._place, self._count, self._max_bytes = place, count, max_bytes
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, self._place, self._count, self._max_bytes)

    def __len__(self) -> int:
        if (now := len(self.dataset)) != self._count:
            raise CacheError(f"the cached dataset had {self._count} samples and has {now} now; make a new cache")
        return self._count

    def __repr__(self) -> str:
        return f"cached({self.dataset!r}, {self._where!r})"

    def __getitem__(self, index: int) -> _T:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[_T]:
        """The samples of a batch."""
        numbers = [self._number(index) for index in indices]
        samples = list(map(self._store.read, numbers))
        self._look()
        missing: list[int] = []
        for place, sample in enumerate(samples):
            if sample is ABSENT:
                missing.append(place)
                continue
            self._read += 1
            if self._read % _READ == 1:
                self._compare(numbers[place], sample)
        if missing:
            built = self._built_now([numbers[place] for place in missing])
            for place, sample in zip(missing, built, strict=True):
                samples[place] = sample
        return samples

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
        if not 0 <= (number := operator.index(index)) < self._count:  # what a negative one means differs
            raise IndexError(f"index {number} is out of range for {self._count} samples, which are counted from 0 on")
        return number

    def _built_now(self, numbers: list[int]) -> list[_T]:
        """Samples that are not there: built, and kept."""
        samples = self._build(numbers)
        for number, sample in zip(numbers, samples, strict=True):
            if self._built < _FIRST_BUILT or self._built % _BUILT == 0:
                self._compare(number, sample)
            self._built += 1
            if self._store.write(number, sample):
                logger.warning(
                    "rayloader: the cache %s is full: %s. The others are built each time: raise max_bytes where there "
                    "is more room, or cache smaller samples",
                    self._where,
                    str(self.stats()),  # a handler may keep what is logged
                )
        return samples

    def _compare(self, number: int, sample: _T) -> None:
        if _content_of(_as_read(sample)) != _content_of(_as_read(self._build([number])[0])):
            raise CacheError(
                f"sample {number} of the cached {type(self.dataset).__name__} differs when it is built again; make a "
                "new cache, in a folder by another key=, or apply what changes to the samples of the cache"
            )

    def _build(self, numbers: list[int]) -> list[_T]:
        """Builds samples, which must not draw from any generator."""
        generators = self._generators  # another thread may look for them too
        if self._searches > 0:
            self._searches -= 1
            self._generators = generators = [*search({"dataset": self.dataset}).values()]
        before = self._state = RandomState.capture(generators, self._state)
        samples: Any
        if len(numbers) > 1 and getattr(self.dataset, "__getitems__", None):
            samples = ask(self.dataset, numbers)
            if not isinstance(samples, list) or len(samples) != len(numbers):
                kind, count = type(samples).__name__, len(numbers)
                raise CacheError(f"__getitems__ of a cached dataset must return a list of {count} samples, got {kind}")
        else:
            samples = one_by_one(self.dataset, numbers)
        attributes, self._attributes = len(self._attributes), _attributes_of(self.dataset)
        if len(self._attributes) != attributes:  # it may be a generator, made with these samples: all are compared
            self._built, self._searches = -len(numbers), _SEARCHED + 2 * len(numbers)
        if not RandomState.capture(generators, before).equals(before):
            which = f"sample {numbers[0]}" if len(numbers) == 1 else f"one of samples {numbers[:8]}"
            raise CacheError(
                f"{which} of the cached {type(self.dataset).__name__} draws from a random generator, or a thread does; "
                "cache what comes before the random part, and let threads use generators of their own"
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


def _file_in_folder(place: Path) -> tuple[int, bool]:
    """Opens this node's file, and makes it if there is none; tells whether it takes memory."""
    path = place.with_name(f"{place.name}-{os.uname().nodename}.rayloader-cache")
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    fd = open_own(path)
    return fd, os.path.exists("/dev/shm") and os.fstat(fd).st_dev == os.stat("/dev/shm").st_dev


_here: dict[str, MemoryFile] = {}  # of caches of other nodes, by name; they live as long as a process that uses them


def _file_in_memory(address: FileAddress | None) -> MemoryFile:
    """That of an address, or the one in its place on this node, which is made if there is none; None: a new one."""
    if address is None:
        return MemoryFile(f"cache-{secrets.token_hex(8)}", 0, grows=True)
    with contextlib.suppress(MemoryFileError):
        return MemoryFile.received(open_file(address, writable=True), address.name)
    kind = "-".join(address.name.split("-")[1:3])
    if kind not in _here:
        prefix = f"rayloader-{kind}-on-"
        made = _oldest(prefix) or MemoryFile(f"{kind}-on-{time.time_ns():020}", 0, grows=True)
        _here[kind] = _oldest(prefix) or made
    return _here[kind]


def _oldest(prefix: str) -> MemoryFile | None:
    """Of the memory files with such a name, and then a time, that processes of this node have open."""
    links: dict[str, Path] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # of another user, or closed meanwhile
            if prefix in (target := os.readlink(link)):
                links[target] = link
    for target, link in sorted(links.items()):
        with contextlib.suppress(OSError):
            fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
            if os.readlink(f"/proc/self/fd/{fd}") == target and os.fstat(fd).st_uid == os.geteuid():
                return MemoryFile.received(fd, target.removeprefix("/memfd:").removesuffix(" (deleted)"))
            os.close(fd)  # the number has become another file's meanwhile, or another user has taken the name
    return None


def _content_of(sample: Any) -> bytes:
    """The content of a sample that can be pickled; see NOTE [Content]."""
    try:
        return _dumped(sample, fast=True)
    except ValueError:  # it contains itself
        return _dumped(sample, fast=False)


def _dumped(sample: Any, fast: bool) -> bytes:
    file = io.BytesIO()
    pickler = _Content(file, protocol=5)
    pickler.fast = fast  # does not record which parts are one object
    pickler.dump(sample)
    return hashlib.sha256(file.getbuffer()).digest()


class _Content(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a sample for its content only."""

    def persistent_id(self, obj: Any) -> Any:
        """Stands for a set."""
        return sorted(map(_content_of, obj)) if type(obj) in (set, frozenset) else None

    def reducer_override(self, obj: Any) -> Any:
        """How another object is described."""
        if obj is str:  # what descriptions are made of
            return NotImplemented
        if isinstance(obj, (type, types.FunctionType)):
            return str, (f"{obj.__module__}.{obj.__qualname__}",)
        if isinstance(obj, torch.Tensor) and (described := _tensor(obj)):
            return str, (described,), vars(obj) or None
        return super().reducer_override(obj)


def _tensor(tensor: torch.Tensor) -> str:
    """A tensor, also of a class of the user's; empty if it has no plain memory."""
    with no_torch_function():
        plain = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
        if not plain or tensor.device.type == "meta":
            return ""
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        content = hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        return f"{type(tensor).__qualname__} {tensor.dtype} {tuple(tensor.shape)} {content}"
