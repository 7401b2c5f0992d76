"""Anonymous memory files, which one process creates and others on the machine open by an address, and room for them.

Promise: nothing is visible in the file system, and the kernel frees a file with its last user, whichever process dies.
A file never shrinks, so that no access to a mapping of it can fail. `open_file` opens that very file or nothing: the
number in an address may belong to another process's file by the time it is used, or in another PID namespace.

Arenas and images consist of them. No state; any thread may call. This module does not import Ray.

NOTE [Proof of identity]. A descriptor is reached as `/proc/<pid>/fd/<n>`. Boot and PID namespace must be the creator's,
or the numbers mean something else. The link must show our name, with its 128 random bits, *before* anything is opened:
opening a stranger's device or pipe can have effects. Inode, device and size must match afterwards, because the number
may have been reused in between.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayloader.errors import RayloaderError, ReplicaMemoryError

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux, the same on all its common machines
# Smaller sizes are not checked: the check would cost more than it is worth.
_SMALL = 1 << 24

if sys.platform != "win32":  # which has neither, and no memory files
    import fcntl

    libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mmap.restype = ctypes.c_void_p


class MemoryFileError(RayloaderError):
    """A memory file can't be made or opened here."""


@dataclass(frozen=True, slots=True)
class FileAddress:
    """What another process needs to open a file by its descriptor, and to verify that it is the right one."""

    pid: int  # of the process that holds it open, in its PID namespace
    fd: int
    inode: int
    device: int
    name: str  # as `/proc` shows it, in part: "rayloader-<kind>-" and 128 random bits in hex
    nbytes: int
    machine: str  # boot and PID namespace


class MemoryFile:
    """A memory file and its descriptor, which close together.

    Args:
        kind: its purpose; a part of its name.
        nbytes: its size.
        grows: whether it may be appended to; otherwise its size cannot change.

    Attributes:
        fd: readable and writable.
        address: for others to open it while this object is open.

    Raises:
        MemoryFileError: this system has no memory files, or no room for one.
    """

    _fds: Sequence[int] = ()  # also for `close`, if an interrupt came before the constructor's first line

    def __init__(self, kind: str, nbytes: int, *, grows: bool = False) -> None:
        fds: list[int] = []
        self._fds = fds
        name = f"rayloader-{kind}-{secrets.token_hex(16)}"
        try:
            # In one step: an interrupt would lose what was made and is not assigned yet.
            fds.extend(map(os.memfd_create, [name], [os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING]))
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | (0 if grows else fcntl.F_SEAL_GROW))
            self.address = address_of(self.fd, name)
        except (OSError, AttributeError) as error:  # AttributeError: not Linux
            self.close()
            raise MemoryFileError(f"can't make a memory file of {nbytes} bytes: {error}") from error

    @property
    def fd(self) -> int:
        """-1 after the end."""
        return self._fds[0] if self._fds else -1

    @classmethod
    def received(cls, fd: int, name: str) -> MemoryFile:
        """One that exists, from a descriptor that now belongs to this object; `name` as for `FileAddress`."""
        file = cls.__new__(cls)
        file._fds = [fd]
        file.address = address_of(fd, name)
        return file

    def seal(self, *, writes: bool) -> None:
        """Forbids further seals, and writing if `writes`, which fails while any process has it mapped for that."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, (fcntl.F_SEAL_WRITE if writes else 0) | fcntl.F_SEAL_SEAL)

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """No process can open it any more; those that have it open or mapped keep it. Callable more than once."""
        fds, self._fds = self._fds, ()  # no handler runs from here to the call of `close`
        for fd in fds:
            close(fd)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        self.close(close)


def address_of(fd: int, name: str) -> FileAddress:
    """The address of an open file of this process."""
    status = os.fstat(fd)
    return FileAddress(os.getpid(), fd, status.st_ino, status.st_dev, name, status.st_size, this_machine())


def open_file(address: FileAddress, *, writable: bool) -> int:
    """Opens the file of another process; see NOTE [Proof of identity].

    Returns:
        A descriptor of the caller's.

    Raises:
        MemoryFileError: it is on another machine or in another PID namespace, is gone, may not be opened, or what is
            found in its place is another file.
    """
    if (here := this_machine()) != address.machine:
        raise MemoryFileError(f"{address.name} must be opened where it was made, {address.machine}; this is {here}")
    path = f"/proc/{address.pid}/fd/{address.fd}"
    try:
        if address.name not in (target := os.readlink(path)):
            raise MemoryFileError(f"{path} must be {address.name}, but it is {target}")
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        status = os.fstat(fd)
    except OSError as error:
        raise MemoryFileError(f"can't open {address.name} at {path}: {error}") from error
    if (status.st_ino, status.st_dev) != (address.inode, address.device) or status.st_size < address.nbytes:
        os.close(fd)
        raise MemoryFileError(f"{path} is named {address.name}, but is not that file")
    return fd


_boot_id = Path("/proc/sys/kernel/random/boot_id")
# Read now, because later this process may be out of descriptors. It is the same in all processes of the machine.
_boot = _boot_id.read_text().strip() if _boot_id.exists() else ""


def this_machine() -> str:
    """Identifies where a process's number in `/proc` means the same process."""
    try:
        return f"boot {_boot}, {os.readlink('/proc/self/ns/pid')}"
    except OSError as error:
        raise MemoryFileError(f"a memory file needs /proc: {error}") from error


# ---- mappings of parts of files, which need no descriptor


def address_range(nbytes: int) -> memoryview:
    """Addresses for mappings, which end with the last reference to it; until something is mapped there, zeros."""
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE))


def map_over(fd: int, address: int, nbytes: int, offset: int, *, shared: bool, writable: bool) -> None:
    """Maps a file over the memory at an address.

    Raises:
        OSError: it can't be.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | _MAP_FIXED | _MAP_NORESERVE
    if libc.mmap(address, nbytes, protection, flags, fd, offset) != address:
        raise OSError(ctypes.get_errno(), f"can't map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")


def map_private(fd: int, offset: int, nbytes: int) -> memoryview:
    """A range of a file, private and writable.

    Raises:
        OSError: it can't be mapped.
    """
    before = offset % mmap.PAGESIZE
    view = address_range(before + nbytes)
    map_over(fd, address_of_buffer(view), before + nbytes, offset - before, shared=False, writable=True)
    return view[before:]


def address_of_buffer(buffer: Any) -> int:
    """The address of a buffer's memory; 0 for an empty one."""
    view = np.frombuffer(buffer, np.uint8)
    return int(view.__array_interface__["data"][0]) if view.size else 0


# ---- room for them


def check_room(nbytes: int, purpose: str) -> None:
    """Makes sure that so much memory can be written to.

    Raises:
        ReplicaMemoryError: there is less; it says what was needed, what is available, and what to do.
    """
    if nbytes < _SMALL:
        return
    free = available()
    if free is not None and nbytes > free:
        raise ReplicaMemoryError(
            f"{nbytes / 1e9:.2f} GB are needed {purpose}, and {free / 1e9:.2f} GB are available; hold "
            "memory-mapped files (np.memmap) and a rayloader.SharedList of other objects, or load them in __getitem__"
        )


def available() -> int | None:
    """Bytes that are available without swapping, on this machine and in this process's control group."""
    return min(_machine_and_groups(), default=None)


def _machine_and_groups() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield from _groups(Path("/sys/fs/cgroup"), group, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                yield from _groups(Path("/sys/fs/cgroup/memory"), group, *names)


def _groups(root: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    """The remaining bytes of a control group and those above it; a container may see its own as the root."""
    path = root / group.strip("/")
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no such file
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(f"{cache} "):
                    left += int(line.split()[1])  # pages of files, which the kernel drops first
            yield max(0, left)
        if folder == root:
            return
