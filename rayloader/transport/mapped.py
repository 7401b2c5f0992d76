"""The file that backs memory: finds the file mapped at an address, so that another process can map it again.

Promise: memory that comes from a file (`np.memmap`, `torch.from_file`, Arrow's memory maps, torch's shared memory)
is sent as a `Region`, a reference, and is never read whole. Mapped again it behaves as before: shared and writable,
private, or read-only. Memory without a nameable file, or not the user's, has no region and is copied by the caller:
anonymous memory, Ray's object store, our own files. So is what lies in a private mapping that was written to.

Driver: `Mappings`, a snapshot of `/proc/self/maps`. Worker: `open_region`. This module does not import Ray.

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
import stat
from bisect import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rayloader._compat import share_by_descriptor, share_by_name, shared_by_descriptor, shared_by_name
from rayloader.errors import ReplicaError
from rayloader.transport.memory_file import FileAddress, MemoryFile, MemoryFileError, open_file

_PAGE = mmap.PAGESIZE
_SCAN = 1 << 17  # entries of pagemap read at a time: 1 MiB

# start, end, writable, shared, offset, device, inode, path. Libraries are not data.
_LINE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r([w-]).([sp]) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([1-9]\d*) +(/.*)$", re.MULTILINE
)
_LIBRARY = re.compile(rb"\.so[.\d]*$")
# Never referred to: Ray's object store reuses its memory, and our files have an owner of their own. Huge pages
# of hugetlbfs and System V segments can't be mapped like files.
_NO_DATA = re.compile(rb"^/(?:.*/)?plasma[^/]*$|rayloader-|^/anon_hugepage|^/SYSV")
_DELETED = " (deleted)"
# Files here are as short-lived as memory: they are held open, because their names may disappear at any time.
_SHARED_MEMORY = "/dev/shm/"
_COUNT = 64  # bytes before a storage of the strategy "file_system": the count of its users


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """A storage that fills a region; see NOTE [Torch's shared memory]."""

    nbytes: int
    has_descriptor: bool  # torch keeps the file open, so that the storage can be sent on
    manager: bytes = b""  # the address of the process that counts the users of `handle`; empty if none does
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a file as it was mapped; `offset` and `nbytes` in whole pages."""

    path: str  # as the kernel shows it; with " (deleted)" it no longer exists
    offset: int
    nbytes: int
    shared: bool
    writable: bool
    device: int
    inode: int
    size: int  # of the file, in bytes
    held: FileAddress | None = None  # the driver's descriptor of it, if the path is not enough
    storage: SharedStorage | None = None  # how torch has mapped it

    @property
    def named(self) -> Region:
        """The region without a descriptor: equal if it is the same memory."""
        return replace(self, held=None)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """One mapping of this process, or several adjacent ones."""

    start: int
    end: int
    offset: int
    shared: bool
    writable: bool
    device: int
    inode: int
    path: str


class Mappings:
    """The file-backed memory of this process, as it is on first use. That takes some milliseconds."""

    @functools.cached_property
    def _mapped(self) -> list[_Mapped]:
        try:
            with open("/proc/self/maps", "rb") as file:
                return _read(file.read())
        except OSError:  # no /proc: everything is copied
            return []

    @functools.cached_property
    def _ends(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """For each mapping: its first address, and the one after its last."""
        starts, ends = [mapped.start for mapped in self._mapped], [mapped.end for mapped in self._mapped]
        return np.array(starts, np.int64), np.array(ends, np.int64)

    @functools.cached_property
    def _descriptors(self) -> dict[tuple[int, int], str]:
        """The path of a descriptor of each file that this process has open, by inode and device."""
        found = {}
        for name in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{name}"
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found[status.st_ino, status.st_dev] = path
        return found

    def __contains__(self, address: object) -> bool:
        """Whether the bytes at the address belong to a file, for `codec.encode`."""
        assert isinstance(address, int)
        return self._at(address) is not None

    def _at(self, address: int) -> _Mapped | None:
        found = bisect(self._mapped, address, key=lambda mapped: mapped.start) - 1
        return self._mapped[found] if found >= 0 and address < self._mapped[found].end else None

    def find(self, addresses: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The mapping that contains each stretch of memory, for `region`; -1 for none, and for empty stretches."""
        if not len(addresses) or not self._mapped:
            return np.full(len(addresses), -1, np.int64)
        starts, ends = self._ends
        found = np.searchsorted(starts, addresses, "right") - 1
        inside = (found >= 0) & (sizes > 0) & (addresses + sizes <= ends[found])
        return np.where(inside, found, -1)

    def region(
        self, index: int, low: int, high: int, storages: Iterable[torch.UntypedStorage] = ()
    ) -> tuple[Region, MemoryFile | None, int] | None:
        """The part of a mapping that holds the addresses from `low` to `high`.

        Args:
            index: of the mapping.
            low: address of its first byte that is needed.
            high: address after the last.
            storages: those there that are shared memory for torch.

        Returns:
            The region, the open file it depends on, and the address of its first byte; None if its file can't be
            reached.
        """
        mapped = self._mapped[index]
        start = low & -_PAGE
        nbytes = min(mapped.end, (high + _PAGE - 1) & -_PAGE) - start
        reached = _reach(mapped, self._descriptors)
        if reached is None:
            return None
        fd, by_name = reached
        status = os.fstat(fd)
        region = Region(
            path=mapped.path,
            offset=mapped.offset + start - mapped.start,
            nbytes=nbytes,
            shared=mapped.shared,
            writable=mapped.writable,
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            storage=next(filter(None, (_shared_storage(mapped, storage) for storage in storages)), None),
        )
        if by_name and not mapped.path.startswith(_SHARED_MEMORY):
            os.close(fd)
            return region, None, start
        try:
            held = MemoryFile.received(fd, os.readlink(f"/proc/self/fd/{fd}"))
        except MemoryFileError:
            return None
        return replace(region, held=held.address), held, start


def _read(maps: bytes) -> list[_Mapped]:
    """The mappings in `/proc/self/maps` that hold data, ascending."""
    mapped: list[_Mapped] = []
    for start, end, write, share, offset, major, minor, inode, path in _LINE.findall(maps):
        if _LIBRARY.search(path) or _NO_DATA.search(path):
            continue
        new = _Mapped(
            start=int(start, 16),
            end=int(end, 16),
            offset=int(offset, 16),
            shared=share == b"s",
            writable=write == b"w",
            device=os.makedev(int(major, 16), int(minor, 16)),
            inode=int(inode),
            path=os.fsdecode(path.replace(rb"\012", b"\n")),
        )
        if mapped:
            # The kernel splits a mapping if advice was given for a part of it.
            last = mapped[-1]
            if new == replace(last, start=last.end, end=new.end, offset=last.offset + last.end - last.start):
                new = replace(last, end=new.end)
                mapped.pop()
        mapped.append(new)
    return mapped


def is_written(start: int, nbytes: int) -> bool:
    """Whether a private mapping of this process may differ from its file: also if the kernel does not reveal that."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            for first in range(start // _PAGE, (start + nbytes) // _PAGE, _SCAN):
                count = min(_SCAN, (start + nbytes) // _PAGE - first)
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
    writable = region.shared and region.writable
    what = "shared memory" if region.path.startswith((_SHARED_MEMORY, "/memfd:", "/dev/zero")) else "a file"
    where = f"The dataset refers to {what}, {region.path} ({'writable' if writable else 'read only'}), which"
    if region.held is not None and here:
        try:
            return open_file(region.held, writable=writable)
        except MemoryFileError as error:
            raise ReplicaError(f"{where} this worker on {socket.gethostname()} can't open: {error}") from error
    remedy = (
        "put it on every node under the same path, or keep the workers where it is "
        "(ray_remote_args, for instance a scheduling_strategy or label_selector)"
    )
    if region.path.endswith(_DELETED) or region.held is not None:
        remedy = "give the dataset a copy (clone(), np.array()), or keep the workers on the driver's node"
        if writable:  # a file with that name here is not the same memory
            raise ReplicaError(f"{where} does not reach node {socket.gethostname()}; {remedy}")
    try:
        fd = os.open(region.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError as error:
        raise ReplicaError(
            f"{where} node {socket.gethostname()} does not have, or may not open: {error.strerror}; {remedy}"
        ) from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (region.device, region.inode) if here else status.st_size != region.size:
        os.close(fd)
        raise ReplicaError(
            f"{where} on node {socket.gethostname()} is another file, of {status.st_size} bytes; the driver's had "
            f"{region.size}; {remedy}"
        )
    return fd


def open_storage(region: Region, fd: int) -> tuple[torch.UntypedStorage, int] | None:
    """The storage of a region as torch has it, and where in the region it starts.

    None if there is none, or if the driver has dropped it since: then its name no longer exists.

    Args:
        region: of this node's.
        fd: from `open_region`.
    """
    shared = region.storage
    if shared is None:
        return None
    kind: Any = torch.UntypedStorage
    storage: torch.UntypedStorage
    if not shared.manager:
        if shared.has_descriptor:
            storage = shared_by_descriptor(fd, shared.nbytes)  # duplicates the descriptor
        else:
            storage = kind.from_file(f"/proc/self/fd/{fd}", True, shared.nbytes)
        return storage, 0
    try:
        status = os.stat(_SHARED_MEMORY + os.fsdecode(shared.handle).lstrip("/"))
        if (status.st_dev, status.st_ino) != (region.device, region.inode):
            return None
        storage = shared_by_name(shared.manager, shared.handle, shared.nbytes)
        return storage, _COUNT
    except (OSError, RuntimeError):  # without a name, it cannot be shared again
        return None


def _shared_storage(mapped: _Mapped, storage: torch.UntypedStorage) -> SharedStorage | None:
    """How torch's allocator has mapped a storage; None if workers do not need to know."""
    if not mapped.shared or mapped.offset:
        return None
    start = storage.data_ptr() - mapped.start
    if start == 0:
        fd, _ = share_by_descriptor(storage)  # shared already: this only returns the descriptor
        return SharedStorage(storage.nbytes(), fd >= 0)
    if start == _COUNT:
        manager, handle, nbytes = share_by_name(storage)  # shared already, see above
        return SharedStorage(nbytes, True, manager, handle)
    return None


def _reach(mapped: _Mapped, descriptors: dict[tuple[int, int], str]) -> tuple[int, bool] | None:
    """A descriptor of the file behind a mapping, and whether its path leads to it; None if it can't be opened."""
    flags = (os.O_RDWR if mapped.shared and mapped.writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
    for path in _ways(mapped, descriptors):
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue  # a device: opening it can have effects
            fd = os.open(path, flags)
            if path.startswith("/proc/self/map_files/") or os.fstat(fd).st_ino == mapped.inode:
                return fd, path == mapped.path
            os.close(fd)
    return None


def _ways(mapped: _Mapped, descriptors: dict[tuple[int, int], str]) -> Iterator[str]:
    yield mapped.path
    if not mapped.path.endswith(_DELETED):
        # It exists, but with another number: some file systems show one in `stat` and another in `maps`.
        yield f"/proc/self/map_files/{mapped.start:x}-{mapped.end:x}"
        return
    if (mapped.inode, mapped.device) in descriptors:
        yield descriptors[mapped.inode, mapped.device]
    yield f"/proc/self/map_files/{mapped.start:x}-{mapped.end:x}"  # needs a privilege
