"""Memory of files that a dataset has mapped: found by the types of its objects, and mapped again elsewhere.

Promise: these are sent as a `Region`, a reference to a part of a file, and are never read whole: `np.memmap`, tensors
in torch's shared memory and those of `torch.from_file(shared=True)`, the arrays of `multiprocessing` (`RawArray`, or
what is in an `Array`), buffers of Arrow's memory maps, and NumPy's views of all these. Mapped again they behave as
before: shared and writable, private, or read-only. What the program has written to in a private mapping is its own, and
no region. The caller copies all other memory, also memory of a file whose object does not tell so, such as
`torch.from_numpy` of an `np.memmap`; `shared_file` tells whether others would miss what is written there.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rayloader._compat import (
    file_of_ctypes,
    share_by_descriptor,
    share_by_name,
    shared_by_descriptor,
    shared_by_name,
)
from rayloader.errors import ReplicaError
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file
from rayloader.transport.raw import address as address_of
from rayloader.transport.raw import root_of

_PAGE = mmap.PAGESIZE
_SCAN = 1 << 17  # entries of pagemap read at a time: 1 MiB
_DELETED = " (deleted)"
_SHARED_MEMORY = "/dev/shm/"
_COUNT = 64  # bytes before a storage of the strategy "file_system": the count of its users
# Of /proc/self/maps: start, end, whether writable and shared, offset, inode, path. Page-locked memory is a device's.
_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r(.).(.) ([0-9a-f]+) \S+ ([1-9]\d*) +(/(?!dev/(?!shm/)|SYSV).*)$", re.MULTILINE
)
_OURS_OR_RAYS = re.compile(rb"rayloader-|/plasma")  # their memory has owners of its own


class SharedStorage(NamedTuple):
    """A storage that fills a region; see NOTE [Torch's shared memory]."""

    manager: bytes  # the address of the process that counts the users of `handle`; empty if none does
    handle: bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a file, and how it was mapped."""

    path: str  # as the kernel shows it; with " (deleted)" it no longer exists
    mode: str  # "r+" is shared and writable, "c" private, "r" read-only
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
    keeper: MemoryFile | None


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
        if isinstance(root, RegionArray) or (isinstance(root, np.memmap) and isinstance(owner, mmap.mmap)):
            return self._once("array", id(root), lambda: self._of_root(root))
        if isinstance(owner, Tensor):
            found = self.of_storage(owner.untyped_storage())
            return None if found is None else found._replace(region=replace(found.region, storage=None))
        return self.of_ctypes(owner.obj if isinstance(owner, memoryview) else owner)

    def of_storage(self, storage: torch.UntypedStorage) -> Mapped | None:
        """The shared memory that a storage fills, if torch says that it is shared. Raises as `of_array`."""
        if storage.device.type != "cpu" or not storage.is_shared():
            return None
        return self._once("storage", storage.data_ptr(), lambda: _of_shared(storage))

    def of_ctypes(self, obj: object) -> Mapped | None:
        """The shared memory of an object of ctypes that `multiprocessing` has made."""
        found = file_of_ctypes(obj)
        return None if found is None else self._once("ctypes", id(obj), lambda: _held(*found))

    def of_buffer(self, buffer: Any) -> Mapped | None:
        """The mapped file of a buffer of Arrow's."""
        whole = buffer
        while whole.parent is not None:
            whole = whole.parent
        if not whole.size or whole.address % _PAGE:  # as buffers in the heap
            return None
        return self._once("buffer", whole.address, lambda: self._of_whole(whole))

    def _once(self, kind: str, number: int, find: Callable[[], Mapped | None]) -> Mapped | None:
        """What was found before, for the same object or memory, which the graph keeps."""
        if (kind, number) not in self._found:
            self._found[kind, number] = find()
        return self._found[kind, number]

    def _of_root(self, root: np.ndarray[Any, Any]) -> Mapped | None:
        mapped = root.mapped if isinstance(root, RegionArray) else self._of_memmap(root)
        if mapped is None or (mapped.region.mode == "c" and is_written(mapped.address, mapped.region.nbytes)):
            return None
        return mapped

    def _of_memmap(self, root: Any) -> Mapped | None:
        """The region of an `np.memmap`, whose file Python keeps open."""
        path = os.path.realpath(root.filename) if root.filename is not None else "of no name"
        mode = "r+" if root.mode == "w+" else root.mode
        if path in self._descriptors and path + _DELETED not in self._descriptors:  # otherwise which of them?
            with contextlib.suppress(OSError):
                region = _region(self._descriptors[path], path, mode, root.offset, root.nbytes)
                return Mapped(region, address_of(root), None)
        if mode != "r+":
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

    def _of_whole(self, whole: Any) -> Mapped | None:
        """The region of a whole buffer; None if its file is not to be found. Only the kernel knows which it is."""
        for mapping in self._mappings:
            if mapping.start == whole.address and mapping.end >= whole.address + whole.size:
                mode = "r+" if mapping.shared and mapping.writable else "r"
                with contextlib.suppress(OSError), _opened(mapping.path, os.O_RDONLY) as fd:
                    region = _region(fd, mapping.path, mode, mapping.offset, whole.size)
                    return Mapped(region, whole.address, None) if region.inode == mapping.inode else None
        return None

    @functools.cached_property
    def _mappings(self) -> list[_Mapping]:
        return _mappings()


def shared_file(addresses: Iterable[int]) -> str | None:
    """A file that one of these addresses belongs to and is written to by all who have mapped it; None for none."""
    shared = [mapping for mapping in _mappings() if mapping.shared and mapping.writable]
    if not shared:
        return None
    starts = [mapping.start for mapping in shared]
    for address in addresses:
        found = bisect(starts, address) - 1
        if found >= 0 and address < shared[found].end:
            return shared[found].path
    return None


class _Mapping(NamedTuple):
    """A line of `/proc/self/maps`."""

    start: int
    end: int
    writable: bool
    shared: bool
    offset: int
    inode: int
    path: str


def _mappings() -> list[_Mapping]:
    """The files that this process has mapped, by address, besides devices, our own and Ray's."""
    try:
        with open("/proc/self/maps", "rb") as file:
            lines = _LINE.findall(file.read())
    except OSError:  # no /proc
        return []
    return [
        _Mapping(int(start, 16), int(end, 16), write == b"w", share == b"s", int(offset, 16), int(inode), path)
        for start, end, write, share, offset, inode, name in lines
        if not _OURS_OR_RAYS.search(name) and (path := os.fsdecode(name.replace(rb"\012", b"\n")))
    ]


def _region(fd: int, path: str, mode: str, offset: int, nbytes: int, **more: Any) -> Region:
    status = os.fstat(fd)
    return Region(path, mode, offset, nbytes, status.st_dev, status.st_ino, status.st_size, **more)


def _held(fd: int, offset: int, address: int, nbytes: int, storage: SharedStorage | None = None) -> Mapped:
    """Shared memory, to which no path leads, or none for long: another descriptor of it is kept."""
    path = os.readlink(f"/proc/self/fd/{fd}")
    held = MemoryFile.received(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), path)
    return Mapped(_region(held.fd, path, "r+", offset, nbytes, held=held.address, storage=storage), address, held)


def _of_shared(storage: torch.UntypedStorage) -> Mapped | None:
    """The memory of a storage that is shared for torch; see NOTE [Torch's shared memory]."""
    start, plain = storage.data_ptr(), SharedStorage(b"", b"", storage.nbytes())
    path = storage.filename
    try:
        if path is not None:
            path = os.path.abspath(path)
            with _opened(path, os.O_RDONLY) as fd:
                return Mapped(_region(fd, path, "r+", 0, plain.nbytes, storage=plain), start, None)
        if start % _PAGE == _COUNT:
            counted = SharedStorage(*share_by_name(storage))  # shared already: this only returns its name
            path = _SHARED_MEMORY + os.fsdecode(counted.handle).lstrip("/")
            with _opened(path, os.O_RDWR) as fd:
                return _held(fd, _COUNT, start, counted.nbytes, counted)
        fd, _ = share_by_descriptor(storage)  # likewise, its descriptor
        # Without one it is a private mapping, of `torch.from_file(shared=False)`, whose file torch does not tell.
        return None if fd < 0 else _held(fd, 0, start, plain.nbytes, plain)
    except (OSError, MemoryFileError) as error:
        raise _unreachable(path or "a shared tensor's") from error


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor of a file, for the block."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def _unreachable(path: str) -> ReplicaError:
    return ReplicaError(
        f"the dataset writes to memory that it shares with other processes, {path}, which can't be opened any more; "
        'keep the file under its name, give the dataset a copy, or use workers="fork"'
    )


def is_written(address: int, nbytes: int) -> bool:
    """Whether a private mapping of this process may differ from its file: also if the kernel does not reveal that."""
    first_page, last_page = address // _PAGE, -(-(address + nbytes) // _PAGE)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            for first in range(first_page, last_page, _SCAN):
                count = min(_SCAN, last_page - first)
                entries = np.frombuffer(os.pread(file.fileno(), 8 * count, 8 * first), np.uint64)
                if len(entries) != count:
                    return True
                # Bits 63 and 62: there is a page, in memory or swapped out. Bit 61: it is the file's.
                own = (entries >> np.uint64(61) & np.uint64(1)) == 0
                if np.any((entries >> np.uint64(62) != 0) & own):
                    return True
    except OSError:
        return True
    return False


def placed(parts: Iterable[tuple[Mapped, int, int]]) -> tuple[list[Region], list[tuple[int, int]]]:
    """What is to be mapped for parts of mapped memory, each given with its address and its bytes.

    Private parts that overlap get a mapping each: what is written to one must not show in the other, as if they had
    been copied one by one.

    Returns:
        Regions of whole pages, and for each part the number of its region and where it begins there.
    """
    regions: list[Region] = []
    homes: dict[int, tuple[int, int]] = {}
    ends: dict[Mapped, dict[int, int]] = {}  # of the last part in each of its regions, an address
    for number, (mapped, start, nbytes) in sorted(enumerate(parts), key=lambda part: part[1][1]):
        own, whole, before = ends.setdefault(mapped, {}), mapped.region, mapped.region.offset % _PAGE
        free = [home for home, end in own.items() if whole.mode != "c" or end <= start]
        home = free[0] if free else len(regions)
        if not free:
            regions.append(replace(whole, offset=whole.offset - before, nbytes=whole.nbytes + before))
        own[home] = start + nbytes
        homes[number] = home, start - mapped.address + before
    return regions, [homes[number] for number in range(len(homes))]


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
        fd = os.open(region.path, (os.O_RDWR if region.mode == "r+" else os.O_RDONLY) | os.O_CLOEXEC)
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
        storage = shared_by_descriptor(fd, shared.nbytes)  # duplicates the descriptor
    else:
        with contextlib.suppress(OSError, RuntimeError):  # without a name, it cannot be shared again
            status = os.stat(region.path)
            if (status.st_dev, status.st_ino) == (region.device, region.inode):
                storage = shared_by_name(*shared)
    return storage
