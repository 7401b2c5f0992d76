"""What workers that are no forks get of the driver's objects: how it is pickled, and what cannot be.

Promise: an object that a worker gets is as a fork has it, or an error names the part that cannot be sent. Memory of
files that a dataset has mapped is found by the types of its objects, sent as a `Region`, a reference to a part of a
file, and never read whole: `np.memmap`, tensors in torch's shared memory and those of `torch.from_file(shared=True)`,
and NumPy's views of all these. Mapped again it behaves as before: shared and writable, or read-only. The caller copies
all other memory: that of private maps (mode "c"), and memory of a file whose object does not tell so, such as
`torch.from_numpy` of an `np.memmap`; `shared_file` tells whether others would miss what is written there.

Driver: `encode_for_worker`, `explain`. Worker: `open_region`, `open_storage`; `note_batch`, in forks too. This module
does not import Ray.

NOTE [Torch's shared memory]. A storage is shared for torch if torch's own allocator has mapped it: `share_memory_()`
then does nothing, while it moves any other storage to new memory, which separates it from all other users. An object
that shares its tensors again when it is unpickled must not lose them that way. So a storage that torch regards as
shared in the driver is opened by torch's allocator in the worker too. Those of the sharing strategy "file_system" are
copied: another process counts their users.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import multiprocessing
import os
import pickle
import re
import socket
import sys
import types
import warnings
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch import Tensor

from rayloader import _compat
from rayloader.errors import ReplicaError, add_note
from rayloader.namespaces import is_a, names_in, namespace_of
from rayloader.transport import raw
from rayloader.transport.codec import encode_by
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file
from rayloader.transport.pickler import IN_BAND, MAINS, ByValuePickler, Pickler, array_over

_PAGE = mmap.PAGESIZE
_DELETED = " (deleted)"
_COUNT = 64  # bytes before a storage of the strategy "file_system": the count of its users
# Of /proc/self/maps what is shared and writable: start, end, path. Page-locked memory is a device's.
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw.s \S+ \S+ [1-9]\d* +(/(?!dev/(?!shm/)|SYSV).*)$", re.MULTILINE)
_OURS_OR_RAYS = re.compile(rb"rayloader-|/plasma")  # their memory has owners of its own

# How some kinds of objects, and of derived classes, are pickled by code that knows more of them than this module: given
# the object, and a function that returns the usual reduction of one.
Reduce = Callable[[Any, Callable[[Any], Any]], Any]


def _usual(obj: Any, reduced: Callable[[Any], Any]) -> Any:
    return reduced(obj)


class EncodedReplica(NamedTuple):
    """As `codec.Encoded`.

    Attributes:
        mapped: the memory of files among the buffers, by number, which need not be copied.
    """

    skeleton: bytes
    buffers: Sequence[memoryview]
    carried: Sequence[Any]
    mapped: Mapping[int, Mapped]


def encode_for_worker(
    obj: object, carry: tuple[type, ...] = (), special: tuple[type, ...] = (), reduce: Reduce = _usual
) -> EncodedReplica:
    """Splits an object of the driver's, as `codec.encode` does a batch.

    Args:
        obj: anything that cloudpickle can pickle.
        carry: as for `codec.encode`.
        special: kinds of objects that `reduce` reduces.
        reduce: see `Reduce`.

    Raises:
        ReplicaError: it holds memory of a file that is shared and writable, and cannot be reached.
        Exception: any error of pickling it; `explain` finds the culprit.
    """
    pickler = ReplicaPickler(carry, special, reduce)
    encoded = encode_by(pickler, obj)
    mapped = {number: pickler.mapped[key] for key, number in pickler.numbers.items() if key in pickler.mapped}
    return EncodedReplica(*encoded, mapped)


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a file, whole pages, that is mapped shared."""

    path: str  # as the kernel shows it
    writable: bool
    offset: int
    nbytes: int
    device: int
    inode: int
    size: int  # of the file, in bytes
    held: FileAddress | None = None  # a descriptor of it, for memory that no path leads to
    storage_nbytes: int | None = None  # of a storage that fills it, see NOTE [Torch's shared memory]

    @property
    def named(self) -> Region:
        """The region without a descriptor: equal if it is the same memory."""
        return replace(self, held=None)


class Mapped(NamedTuple):
    """A region that this process has mapped; the address is that of its first byte, `keeper` keeps `region.held`."""

    region: Region
    address: int
    keeper: MemoryFile | None = None


class RegionArray(np.ndarray[Any, Any]):
    """All bytes of a region in a worker, so that its views are found by type there too. Its slices have no region."""

    mapped: Mapped | None = None

    @classmethod
    def over(cls, content: memoryview, mapped: Mapped) -> RegionArray:
        """The array of a region whose memory this is."""
        array = cls(len(content), np.uint8, content)
        array.mapped = mapped
        return array


class ReplicaPickler(Pickler):
    """The pickler of one object; the arguments are those of `encode_for_worker`.

    Attributes:
        mapped: of `references` those to memory that is mapped again.
    """

    def __init__(self, carry: tuple[type, ...] = (), special: tuple[type, ...] = (), reduce: Reduce = _usual) -> None:
        super().__init__(carry=carry)
        self.mapped: dict[pickle.PickleBuffer, Mapped] = {}
        self._special, self._reduce = special, reduce
        self._has_warned = False
        self._found: dict[int, Mapped | None] = {}  # by the address of a storage, or the identity of an `np.memmap`
        self._from_accelerators: dict[int, torch.UntypedStorage] = {}  # copies of storages, by address

    def _other(self, obj: Any, kind: type) -> Any:
        if issubclass(kind, np.ndarray):
            return self._subclass_of_array(obj)
        if (reduction := _of_multiprocessing(obj, kind)) is not None:
            return reduction
        if issubclass(kind, _compat.DataPipeWrapper):
            # Its own pickling is plain pickle's, which needs the same __main__.
            return kind, (_compat.datapipe_in(obj),)
        if issubclass(kind, self._special):
            return self._reduce(obj, self._reduced)
        reduction = super()._other(obj, kind)
        if kind is types.FunctionType and reduction is not NotImplemented:
            self._check_copies(obj)
        return reduction

    def _check_copies(self, function: types.FunctionType) -> None:
        """Warns of a function that travels by value, with a copy of a special object that all its module uses."""
        module = sys.modules.get(function.__module__ or "")
        if module is None or namespace_of(module) is not function.__globals__ or module.__name__ in MAINS:
            return  # everything in __main__ travels
        for name in names_in(function.__code__):
            if is_a(function.__globals__.get(name), self._special) and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"the workers have a copy of the random generator {name} for {function.__module__}."
                    f"{function.__qualname__}, and another one for the rest of its module; define the function at the "
                    "top level of its module, or let the dataset hold the generator",
                    stacklevel=2,
                )

    def _class(self, cls: type) -> Any:
        return ByValuePickler.reducer_override(self, cls)

    def _in_main_memory(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """A copy of a storage of an accelerator, which workers keep off; always the same one."""
        if storage.data_ptr() not in self._from_accelerators:
            self._from_accelerators[storage.data_ptr()] = storage.cpu()
        return self._from_accelerators[storage.data_ptr()]

    def _token(self, storage: torch.UntypedStorage, start: int, end: int) -> pickle.PickleBuffer:
        if (mapped := self._of_storage(storage)) is None:
            return super()._token(storage, start, end)
        token = super()._token(storage, 0, storage.nbytes())  # the whole: it is opened again, not copied
        self.mapped[token] = mapped
        return token

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        """As it is, but for gaps; mapped again if it is a view of mapped memory."""
        if array.dtype.hasobject or array.dtype.itemsize == 0:
            return NotImplemented
        owned = raw.root_of(array).base is None
        mapped = None if owned or not array.nbytes else self._of_array(array)
        low, nbytes, writable = raw.address(array), array.nbytes, array.flags.writeable
        strides, offset = None, 0
        if not array.flags.c_contiguous:
            first, end = byte_bounds(array)
            if mapped is not None or end - first <= nbytes:
                strides, offset = array.strides, low - first
                low, nbytes = first, end - first
            else:
                array = array.copy("C")
                low = raw.address(array)
        content = raw.memory(low, nbytes, array)
        # Memory that is not NumPy's is none of the pickle's: others may write to it, which `shared_file` looks for.
        in_band = owned and nbytes <= IN_BAND
        buffer: Any = bytearray(content) if in_band else pickle.PickleBuffer(content)
        if mapped is not None:
            self.mapped[buffer] = mapped
        layout = () if writable and strides is None else ("C", strides, offset, writable)
        return array_over(buffer, array, *layout)

    def _of_array(self, array: np.ndarray[Any, Any]) -> Mapped | None:
        """All of the mapped memory that an array is a view of; None if it is a view of no such memory."""
        root = raw.root_of(array)
        if isinstance(root, RegionArray):
            found = root.mapped
        elif isinstance(root, np.memmap) and isinstance(root.base, mmap.mmap):
            if id(root) not in self._found:
                self._found[id(root)] = self._of_memmap(root)
            found = self._found[id(root)]
        else:
            found = self._of_storage(root.base.untyped_storage()) if isinstance(root.base, Tensor) else None
        return None if found is None else found._replace(region=replace(found.region, storage_nbytes=None))

    def _of_storage(self, storage: torch.UntypedStorage) -> Mapped | None:
        """The shared memory that a storage fills, if torch says that it is shared."""
        if storage.device.type != "cpu" or not storage.is_shared():
            return None
        start = storage.data_ptr()
        if start not in self._found:
            self._found[start] = _of_shared(storage)
        return self._found[start]

    def _of_memmap(self, root: Any) -> Mapped | None:
        """The region of an `np.memmap`, whose file Python keeps open; a private one is copied, as is all else."""
        if root.mode == "c":
            return None
        path = os.path.realpath(root.filename) if root.filename is not None else "of no name"
        if path in self._descriptors and path + _DELETED not in self._descriptors:  # otherwise which of them?
            with contextlib.suppress(OSError):
                fd, writable = self._descriptors[path], root.mode != "r"
                return Mapped(*_region(fd, path, root.offset, raw.address(root), root.nbytes, writable=writable))
        if root.mode == "r":
            return None
        raise _unreachable(path)

    @functools.cached_property
    def _descriptors(self) -> dict[str, int]:
        """Of the files that this process has open, by path."""
        found: dict[str, int] = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found[os.readlink(f"/proc/self/fd/{name}")] = int(name)
        return found


def _of_multiprocessing(obj: Any, kind: type) -> tuple[Any, ...] | None:
    """A proxy of a manager, with the manager's key, or shared memory; None for anything else."""
    managers: Any = sys.modules.get("multiprocessing.managers")
    memory: Any = sys.modules.get("multiprocessing.shared_memory")
    if memory is not None and kind is memory.SharedMemory:
        return _attached, (obj.name, obj.size)
    if managers is None or kind.__reduce__ is not managers.BaseProxy.__reduce__:
        return None
    rebuild, (make, token, serializer, options), *state = obj.__reduce__()
    key, of_process = bytes(obj._authkey), obj._authkey == multiprocessing.current_process().authkey
    return _proxy, (of_process, rebuild, make, token, serializer, {**options, "authkey": key}), *state


def _proxy(of_process: bool, rebuild: Any, make: Any, token: Any, serializer: str, options: dict[str, Any]) -> Any:
    """A proxy in a worker, whose process has the driver's key then: for proxies that this one returns."""
    if of_process:
        multiprocessing.current_process().authkey = options["authkey"]
    return rebuild(make, token, serializer, options)


def _attached(name: str, size: int) -> Any:
    """Shared memory that stays its creator's: Python would remove it as soon as a process that has attached it ends."""
    from multiprocessing import resource_tracker, shared_memory

    memory = shared_memory.SharedMemory(name, size=size)
    resource_tracker.unregister(f"/{memory.name}", "shared_memory")
    return memory


def shared_file(addresses: Iterable[int]) -> str | None:
    """A file that one of these addresses belongs to and is written to by all who have mapped it; None for none.

    Devices, our own files and Ray's do not count.
    """
    with open("/proc/self/maps", "rb") as file:
        lines = [line for line in _LINE.findall(file.read()) if not _OURS_OR_RAYS.search(line[2])]
    starts = [int(start, 16) for start, _, _ in lines]
    for address in addresses if lines else ():
        found = bisect(starts, address) - 1
        if found >= 0 and address < int(lines[found][1], 16):
            return os.fsdecode(lines[found][2])
    return None


def _region(
    file: int | str, path: str, offset: int, address: int, nbytes: int, *, writable: bool = True, **more: Any
) -> tuple[Region, int]:
    """The whole pages of a file that hold a part of it, and the address of the first, given that of the part."""
    status, before = os.stat(file), offset % _PAGE
    where = status.st_dev, status.st_ino, status.st_size
    return Region(path, writable, offset - before, nbytes + before, *where, **more), address - before


def _of_shared(storage: torch.UntypedStorage) -> Mapped | None:
    """The memory of a storage that is shared for torch; see NOTE [Torch's shared memory]."""
    start, nbytes, path = storage.data_ptr(), storage.nbytes(), storage.filename
    try:
        if path is not None:
            path = os.path.abspath(path)
            return Mapped(*_region(path, path, 0, start, nbytes, storage_nbytes=nbytes))
        if start % _PAGE == _COUNT:
            return None
        fd, _ = _compat.share_by_descriptor(storage)  # it is shared already: this only returns its descriptor
        if fd < 0:  # it is a private mapping, of `torch.from_file(shared=False)`, whose file torch does not tell
            return None
        path = os.readlink(f"/proc/self/fd/{fd}").removesuffix(_DELETED)
        held = MemoryFile.received(os.dup(fd), path)  # no path leads to it, or none for long
        return Mapped(*_region(fd, path, 0, start, nbytes, held=held.address, storage_nbytes=nbytes), held)
    except (OSError, MemoryFileError) as error:
        raise _unreachable(path or "a shared tensor's") from error


def _unreachable(path: str) -> ReplicaError:
    return ReplicaError(
        f"the dataset writes to memory that it shares with other processes, {path}, which can't be opened any more; "
        'keep the file under its name, give the dataset a copy, or use workers="fork"'
    )


def open_region(region: Region, *, here: bool) -> int:
    """Opens the file of a region that another process described.

    Args:
        region: what to open.
        here: whether this is that process's node.

    Returns:
        A descriptor of the caller's.

    Raises:
        ReplicaError: the file is not here, or is a different one.
    """
    node, where = socket.gethostname(), f"The dataset refers to a file, {region.path}, which"
    if region.held is not None:
        try:
            if here:
                return open_file(region.held, writable=True)
            why = "it is another node"
        except MemoryFileError as error:
            why = str(error)
        raise ReplicaError(
            f"The dataset refers to shared memory, {region.path}, which can't be opened on node {node} ({why}); give "
            "the dataset a copy (clone(), np.array()), or keep the workers on the driver's node"
        )
    remedy = (
        "put it on every node under the same path, or keep the workers where it is "
        "(ray_remote_args, for instance a scheduling_strategy or label_selector)"
    )
    try:
        fd = os.open(region.path, (os.O_RDWR if region.writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise ReplicaError(f"{where} node {node} does not have, or may not open: {error.strerror}; {remedy}") from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (region.device, region.inode) if here else status.st_size != region.size:
        os.close(fd)
        raise ReplicaError(
            f"{where} on node {node} is another file, of {status.st_size} bytes; the driver's had {region.size}; "
            f"{remedy}"
        )
    return fd


def open_storage(region: Region, fd: int) -> torch.UntypedStorage | None:
    """The storage of a region as torch has it; None if there is none.

    Args:
        region: of this node's.
        fd: from `open_region`.
    """
    if (nbytes := region.storage_nbytes) is None:
        return None
    if region.held is None:
        return cast("Any", torch.UntypedStorage).from_file(region.path, True, nbytes)  # type: ignore[no-any-return]
    return _compat.shared_by_descriptor(fd, nbytes)  # type: ignore[no-any-return] # duplicates the descriptor


# ---- what cannot be pickled: to name it never raises, and never hangs

# What to hold in place of an object that only a fork inherits, by the beginning of the name of its type.
_INSTEAD = {
    "multiprocessing.sharedctypes.": "a tensor after share_memory_()",
    "multiprocessing.connection.": "a tensor after share_memory_(), or multiprocessing.Manager().Queue(),",
    "multiprocessing.queues.": "multiprocessing.Manager().Queue()",
    "multiprocessing.synchronize.": "that of a manager, such as multiprocessing.Manager().Lock(),",
}


_Culprit = tuple[str, str, str]  # path to the part that can't be pickled, its type, the error that pickling it raises


def explain(obj: object, name: str) -> str | None:
    """Names the part of a replica that can't be pickled, and the remedy.

    Args:
        obj: the object that `encode_for_worker` failed on.
        name: the user's name for it.

    Returns:
        `dataset.file: _io.FileIO can't be sent to a worker (reason); remedy`, or None if nothing was found.
        At most 2000 objects and 6 levels are searched, and nothing is raised.
    """
    if (found := _search(obj, name, encode_for_worker)) is None:
        return None
    path, kind, reason = found
    remedy = "create it in worker_init_fn or lazily on first use, or drop it in __getstate__"
    for beginning, instead in _INSTEAD.items():
        if kind.startswith(beginning):
            remedy = f"use {instead} instead, which all workers on this machine share, or {remedy}"
    return f"{path}: {kind} can't be sent to a worker ({reason}); {remedy}"


def note_batch(error: Exception, batch: object, send: Callable[[object], object]) -> None:
    """Adds a note to an error of `send`: which part of the batch can't be pickled, and the remedy."""
    if found := _search(batch, "batch", send):
        path, kind, reason = found
        add_note(
            error,
            "What the dataset or collate_fn has returned cannot be sent to the trainer: "
            f"{path}: {kind} ({reason}); let them return what it can be made from, or leave it out",
        )


def _search(obj: object, name: str, send: Callable[[object], object]) -> _Culprit | None:
    try:
        return _culprit(obj, name, 6, iter(range(2000)), send)
    except Exception:  # the user's objects may raise anything, and this only adds to an error that is already raised
        return None


def _culprit(
    obj: object, path: str, depth: int, budget: Iterator[int], send: Callable[[object], object]
) -> _Culprit | None:
    if next(budget, None) is None:
        return None
    try:
        send(obj)
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # an object that can't even be taken apart is the culprit itself
        for suffix, part in _pickled_with(obj) if depth else ():
            if found := _culprit(part, path + suffix, depth - 1, budget, send):
                return found
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}"
    return path, kind, reason


def _pickled_with(obj: Any) -> Iterator[tuple[str, object]]:
    """The objects that pickling an object pickles in turn, each with its addition to the path."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.40}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, types.FunctionType):
        if _compat.COMPILED in vars(obj):
            return  # it is the culprit, and not what torch has put into it
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f".<closure>.{name}", cell.cell_contents
        used = set(obj.__code__.co_names) & obj.__globals__.keys()
        yield from ((f".<globals>.{name}", obj.__globals__[name]) for name in sorted(used))
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    else:  # through its reduction, not its attributes, because __getstate__ may drop some
        _, args, *rest = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        states = rest[0] if rest and isinstance(rest[0], tuple) else rest[:1]
        for state in (*states, args):
            if isinstance(state, dict):
                yield from ((f".{name}", value) for name, value in state.items())
            elif state is not None:
                yield "", state
