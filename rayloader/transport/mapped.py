"""Memory of files that a dataset has mapped: found by the types of its objects, and mapped again elsewhere.

Promise: these are sent as a `Region`, a reference to a part of a file, and are never read whole: `np.memmap`, tensors
in torch's shared memory and those of `torch.from_file(shared=True)`, the arrays of `multiprocessing` (`RawArray`, or
what is in an `Array`), and NumPy's views of all these. Mapped again they behave as before: shared and writable, or
read-only. The caller copies all other memory: that of private maps (mode "c"), and memory of a file whose object does
not tell so, such as `torch.from_numpy` of an `np.memmap`; `shared_file` tells whether others would miss what is written
there.

Driver: `Finder`, for one object that is being pickled. Worker: `open_region`, `open_storage`. This module does not
import Ray.

NOTE [Torch's shared memory]. A storage is shared for torch if torch's own allocator has mapped it: `share_memory_()`
then does nothing, while it moves any other storage to new memory, which separates it from all other users. An object
that shares its tensors again when it is unpickled must not lose them that way. So a storage that torch regards as
shared in the driver is opened by torch's allocator in the worker too, by the kind that created it: one for the sharing
strategy "file_descriptor" and for `torch.from_file`, one for "file_system", which counts its users through a manager
process.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import re
import socket
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rayloader import _compat
from rayloader.errors import ReplicaError
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file
from rayloader.transport.raw import address as address_of
from rayloader.transport.raw import root_of

_PAGE = mmap.PAGESIZE
_DELETED = " (deleted)"
_SHARED_MEMORY = "/dev/shm/"
_COUNT = 64  # bytes before a storage of the strategy "file_system": the count of its users
# Of /proc/self/maps what is shared and writable: start, end, path. Page-locked memory is a device's.
_LINE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw.s \S+ \S+ [1-9]\d* +(/(?!dev/(?!shm/)|SYSV).*)$", re.MULTILINE)
_OURS_OR_RAYS = re.compile(rb"rayloader-|/plasma")  # their memory has owners of its own


class SharedStorage(NamedTuple):
    """A storage that fills a region; see NOTE [Torch's shared memory]."""

    manager: bytes  # the address of the process that counts the users of `handle`; empty if none does
    handle: bytes
    nbytes: int


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
    storage: SharedStorage | None = None  # how torch has mapped it

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


class Finder:
    """Finds the mapped memory behind the objects of a graph that is being pickled."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Mapped | None] = {}

    def of_array(self, array: np.ndarray[Any, Any]) -> Mapped | None:
        """All of the mapped memory that an array is a view of; None if it is a view of no such memory.

        Raises:
            ReplicaError: its file is shared and writable, and cannot be reached.
        """
        root = root_of(array)
        owner = root.base
        if owner is None:
            return None
        if isinstance(root, RegionArray):
            found = root.mapped
        elif isinstance(root, np.memmap) and isinstance(owner, mmap.mmap):
            found = self._once("array", id(root), lambda: self._of_memmap(root))
        elif isinstance(owner, Tensor):
            found = self.of_storage(owner.untyped_storage())
        else:
            found = self.of_ctypes(owner.obj if isinstance(owner, memoryview) else owner)
        return None if found is None else found._replace(region=replace(found.region, storage=None))

    def of_storage(self, storage: torch.UntypedStorage) -> Mapped | None:
        """The shared memory that a storage fills, if torch says that it is shared. Raises as `of_array`."""
        if storage.device.type != "cpu" or not storage.is_shared():
            return None
        return self._once("storage", storage.data_ptr(), lambda: _of_shared(storage))

    def of_ctypes(self, obj: object) -> Mapped | None:
        """The shared memory of an object of ctypes that `multiprocessing` has made."""
        if (found := _compat.file_of_ctypes(obj)) is None:
            return None
        link = f"/proc/self/fd/{found[0]}"
        return self._once("ctypes", id(obj), lambda: _held(link, *found[1:]))

    def _once(self, kind: str, number: int, find: Callable[[], Mapped | None]) -> Mapped | None:
        """What was found before, for the same object or memory, which the graph keeps."""
        if (kind, number) not in self._found:
            self._found[kind, number] = find()
        return self._found[kind, number]

    def _of_memmap(self, root: Any) -> Mapped | None:
        """The region of an `np.memmap`, whose file Python keeps open; a private one is copied, as is all else."""
        if root.mode == "c":
            return None
        path = os.path.realpath(root.filename) if root.filename is not None else "of no name"
        if path in self._descriptors and path + _DELETED not in self._descriptors:  # otherwise which of them?
            with contextlib.suppress(OSError):
                fd, writable = self._descriptors[path], root.mode != "r"
                return Mapped(*_region(fd, path, root.offset, address_of(root), root.nbytes, writable=writable))
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


def _held(link: str, offset: int, address: int, nbytes: int, storage: SharedStorage | None = None) -> Mapped:
    """Shared memory, to which no path leads, or none for long: another descriptor of it is kept."""
    path = os.path.realpath(link)
    held = MemoryFile.received(os.open(link, os.O_RDWR | os.O_CLOEXEC), path)
    return Mapped(*_region(held.fd, path, offset, address, nbytes, held=held.address, storage=storage), held)


def _of_shared(storage: torch.UntypedStorage) -> Mapped | None:
    """The memory of a storage that is shared for torch; see NOTE [Torch's shared memory]."""
    start, plain = storage.data_ptr(), SharedStorage(b"", b"", storage.nbytes())
    path = storage.filename
    try:
        if path is not None:
            path = os.path.abspath(path)
            return Mapped(*_region(path, path, 0, start, plain.nbytes, storage=plain))
        if start % _PAGE == _COUNT:
            counted = SharedStorage(*_compat.share_by_name(storage))  # shared already: this only returns its name
            path = _SHARED_MEMORY + os.fsdecode(counted.handle).lstrip("/")
            return _held(path, _COUNT, start, counted.nbytes, counted)
        fd, _ = _compat.share_by_descriptor(storage)  # likewise, its descriptor
        # Without one it is a private mapping, of `torch.from_file(shared=False)`, whose file torch does not tell.
        return None if fd < 0 else _held(f"/proc/self/fd/{fd}", 0, start, plain.nbytes, plain)
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
    """The storage of a region as torch has it.

    None if there is none, or if the driver has dropped it since: then its name no longer exists.

    Args:
        region: of this node's.
        fd: from `open_region`.
    """
    shared, storage = region.storage, cast("torch.UntypedStorage | None", None)
    if shared is None:
        return None
    if region.held is None:
        storage = cast("Any", torch.UntypedStorage).from_file(region.path, True, shared.nbytes)
    elif not shared.manager:
        storage = _compat.shared_by_descriptor(fd, shared.nbytes)  # duplicates the descriptor
    else:
        with contextlib.suppress(OSError, RuntimeError):  # without a name, it cannot be shared again
            status = os.stat(region.path)
            if (status.st_dev, status.st_ino) == (region.device, region.inode):
                storage = _compat.shared_by_name(*shared)
    return storage
