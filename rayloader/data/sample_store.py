"""The shared file of a cache: samples that one process has written once, and that all processes of a node read.

Promise: a read takes no lock, and sees a whole sample or none, also when its writer was killed in the middle. What is
read is private: whoever writes to it changes nobody else's. What is written through a mapping was allocated before,
and records are written without one, so that a full disk or too little memory is an answer, and no crash. Without Ray;
any thread and any fork may call.

The file is a header, a count of hits for each process that has opened it, an index with the offset of each sample, and
the records of the samples. It is sparse: it takes the room of what was written.

NOTE [Publishing]. A writer reserves room and counts under the lock, writes the record, and only then, again under the
lock, enters its offset in the index, with one store of eight aligned bytes. A writer that is killed before leaves an
unused range. The lock is the kernel's, of a file description that each process opens for itself: it ends with the
process. A signal handler may raise at almost any line, so what is done under the lock is a function that `_Lock.alone`
calls: the `with` block of a generator or of a class written in Python could be left with the lock still held.

NOTE [After a crash of the machine]. Processes that die leave a file in a folder whole, for the kernel has it; but when
the machine dies, the index may have reached the disk, and a record not. So the header names the boot in which the file
was written. Whoever opens it in a later one marks all its entries as doubtful, and a doubtful record is compared with
its checksum when it is first read. Where the header has not reached the disk, the file is emptied. What the header
says of allocated room is not relied on either, for that may be missing, also in a copy of the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from rayloader.observe.stats import CacheStats
from rayloader.transport import codec
from rayloader.transport.memory_file import available, map_private
from rayloader.transport.raw import new_memory

FORMAT = 0x7261_796C_6F61_6402  # of the file, with its version in the last byte
ABSENT = object()  # instead of a sample
_T = TypeVar("_T")

# The header's fields, of eight bytes each.
_FORMAT, _COUNT, _END, _USED, _ALLOCATED, _PRESENT, _NBYTES, _BUILT, _FULL, _PROCESSES = range(10)
_IDENTITY, _BOOT = slice(96, 128), slice(128, 164)
_HEADER = 4096
_SLOTS = 4096  # of counts of hits; further processes share them
_DOUBTFUL = 1 << 63  # in an index entry
_RECORD = struct.Struct("<QQIII4x")  # bytes, number of the sample, bytes of the skeleton, buffers, checksum
_ALIGN = 64  # bytes; as the codec's spans
_CHUNK = 1 << 24  # bytes that are allocated at a time
_SPARE = 1 << 29  # bytes of memory that a cache leaves free
_MAPPED = 1 << 20  # bytes; larger records are mapped, because copying them costs more
_PARTS = 1024  # that the kernel writes at once


def _aligned(nbytes: int, unit: int = _ALIGN) -> int:
    return -(-nbytes // unit) * unit


def size_of(count: int, max_bytes: int) -> int:
    """The size of a file for so many samples, which take at most `max_bytes`."""
    return _data(count) + _aligned(max_bytes, mmap.PAGESIZE)


def as_read(sample: Any) -> Any:
    """A sample as it would be read: objects may differ from those that were pickled, though they are equal."""
    encoded = codec.encode(sample, known_classes=True)
    return codec.decode(encoded.skeleton, encoded.buffers)


def _data(count: int) -> int:
    return _aligned(_HEADER + 8 * (_SLOTS + count), mmap.PAGESIZE)


class SampleStore:
    """An open file of samples.

    Args:
        fd: of the file, readable and writable; the caller keeps it open as long as this object is used.
        count: samples.
        max_bytes: that they may take in all.
        in_memory: the file takes memory, of which some must remain.
        identity: what the samples are of, 32 bytes.
        again: another object of the same cache has opened it; so its limits stay as they have become.

    Raises:
        OSError: there is no room for the index.
        ValueError: the file is of another format, number of samples or identity.
    """

    def __init__(
        self,
        fd: int,
        count: int,
        max_bytes: int,
        *,
        in_memory: bool,
        identity: bytes = bytes(32),
        again: bool = False,
    ) -> None:
        self._fd, self._count, self._in_memory = fd, count, in_memory
        self._lock = _Lock(fd)

        def begin() -> None:
            is_new = not any(os.pread(fd, 8, 0))
            if is_new:
                if not in_memory:
                    os.ftruncate(fd, 0)
                os.ftruncate(fd, size_of(count, max_bytes))
            elif os.fstat(fd).st_size < _data(count):
                raise ValueError("it is of another format, or was cut off")
            os.posix_fallocate(fd, 0, _data(count))
            self._map()
            if is_new:
                self._header[_COUNT], self._header[_END] = count, size_of(count, max_bytes)
                self._header[_USED] = self._header[_ALLOCATED] = _data(count)
                self._bytes[_IDENTITY], self._bytes[_BOOT] = identity, _boot()
                self._header[_FORMAT] = FORMAT
            elif (self._header[_FORMAT], self._header[_COUNT]) != (FORMAT, count):
                raise ValueError(f"it is of another format, or of {self._header[_COUNT]} samples instead of {count}")
            elif bytes(self._bytes[_IDENTITY]) != identity:
                raise ValueError("it is of another dataset")
            elif not _data(count) <= self._header[_USED] <= self._header[_END] or self._header[_USED] % _ALIGN:
                raise ValueError("its header is damaged")
            else:
                self._adopt(None if again else max_bytes)
            self._take_slot()

        self._alone(begin)

    def _map(self) -> None:
        self._bytes = memoryview(mmap.mmap(self._fd, os.fstat(self._fd).st_size))
        self._header = self._bytes[:_HEADER].cast("Q")
        self._hits = self._bytes[_HEADER : _HEADER + 8 * _SLOTS].cast("Q")
        index = _HEADER + 8 * _SLOTS
        self._index = self._bytes[index : index + 8 * self._count].cast("Q")

    def _adopt(self, max_bytes: int | None) -> None:
        """Prepares a file that was there before; see NOTE [After a crash of the machine]."""
        if max_bytes is not None:
            end = max(size_of(self._count, max_bytes), self._header[_USED])
            if end > len(self._bytes):
                os.ftruncate(self._fd, end)
                self._map()
            if end != self._header[_END]:
                self._header[_END], self._header[_FULL] = end, 0
        if not self._in_memory:
            self._header[_ALLOCATED] = self._header[_USED]
        if bytes(self._bytes[_BOOT]) != _boot():
            used = self._header[_USED]
            for number, entry in enumerate(self._index):
                if entry:
                    self._index[number] = entry | _DOUBTFUL if entry & ~_DOUBTFUL < used else 0
            self._header[_PRESENT] = sum(map(bool, self._index))
            self._bytes[_BOOT] = _boot()

    # ---- each process, forks included, has a lock and a count of its own

    @property
    def pid(self) -> int:
        """The process that has read or written last."""
        return self._lock.pid

    def _alone(self, work: Callable[[], _T]) -> _T:
        """Does it, in one thread of one process at a time."""
        if self._lock.pid != os.getpid():
            self._lock = _Lock(self._fd)
        return self._lock.alone(work)

    def _take_slot(self) -> int:
        self._header[_PROCESSES] += 1
        self._lock.slot = slot = self._header[_PROCESSES] % _SLOTS
        return slot

    # ---- samples

    def read(self, number: int) -> Any:
        """A sample, in memory of its own; ABSENT if it is not there."""
        if self._lock.pid != os.getpid():
            self._alone(self._take_slot)
        entry = self._index[number]
        if entry & _DOUBTFUL:
            entry = self._examined(number, entry & ~_DOUBTFUL)
        if not entry or not self._reaches(entry + _RECORD.size):
            return ABSENT
        nbytes, of, skeleton, count, _ = _RECORD.unpack_from(self._bytes, entry)
        if of != number or not self._reaches(entry + nbytes):
            return ABSENT
        view = self._private(entry, nbytes)
        sizes = view[_RECORD.size : _RECORD.size + 8 * count].cast("Q")
        start = _RECORD.size + 8 * count + skeleton
        buffers = []
        for size in sizes:
            start = _aligned(start)
            buffers.append(view[start : start + size])
            start += size
        sample = codec.decode(view[_RECORD.size + 8 * count : _RECORD.size + 8 * count + skeleton], buffers)
        if (slot := self._lock.slot) is None:
            slot = self._alone(self._take_slot)
        self._hits[slot] += 1
        return sample

    def _reaches(self, end: int) -> bool:
        """Whether the file is so long; another process may have made it longer."""
        if end > len(self._bytes):
            self._map()
        return end <= len(self._bytes)

    def _private(self, start: int, nbytes: int) -> memoryview:
        if nbytes >= _MAPPED:
            with contextlib.suppress(OSError):  # the kernel's limit of mappings, when very many samples are kept
                return map_private(self._fd, start, nbytes)
        view = new_memory(nbytes)
        view[:] = self._bytes[start : start + nbytes]
        return view

    def _examined(self, number: int, entry: int) -> int:
        """The entry, if its record is whole; otherwise 0, and the sample will be built again."""
        if entry + _RECORD.size <= len(self._bytes):
            nbytes, of, *_, checksum = _RECORD.unpack_from(self._bytes, entry)
            is_inside = _RECORD.size <= nbytes <= len(self._bytes) - entry
            record = self._bytes[entry : entry + nbytes]
            if of == number and is_inside and checksum == _checksum(record[: _RECORD.size - 8], record[_RECORD.size :]):
                self._index[number] = entry
                return entry

        def drop() -> None:
            if self._index[number] == entry | _DOUBTFUL:  # nobody else has dropped it, and built the sample again
                self._index[number] = 0
                self._header[_PRESENT] -= 1

        self._alone(drop)
        return 0

    def write(self, number: int, sample: Any) -> bool:
        """Keeps a sample that was built, if there is room.

        Returns:
            Whether this is the first one that finds no room.

        Raises:
            Exception: it can't be pickled.
        """
        encoded = codec.encode(sample, known_classes=True)
        sizes = [buffer.nbytes for buffer in encoded.buffers]
        parts: list[bytes | memoryview] = [struct.pack(f"<{len(sizes)}Q", *sizes) + encoded.skeleton]
        nbytes = _RECORD.size + len(parts[0])
        for buffer in encoded.buffers:
            parts += bytes(-nbytes % _ALIGN), buffer
            nbytes = _aligned(nbytes) + buffer.nbytes
        at, is_first = self._alone(lambda: self._reserve(number, _aligned(nbytes)))
        if not at:
            return is_first
        fields = nbytes, number, len(encoded.skeleton), len(sizes)
        checksum = 0 if self._in_memory else _checksum(_RECORD.pack(*fields, 0)[:-8], *parts)
        try:
            _write([_RECORD.pack(*fields, checksum), *parts], self._fd, at)
        except OSError:  # such as a limit that is newer than the allocation
            return self._alone(self._end_at_used)

        def publish() -> None:
            if not self._index[number]:
                self._index[number] = at
                self._header[_PRESENT] += 1
                self._header[_NBYTES] += nbytes
            elif self._header[_USED] == at + _aligned(nbytes):  # another process was faster: the room is for the next
                self._header[_USED] = at

        self._alone(publish)
        return False

    def _reserve(self, number: int, nbytes: int) -> tuple[int, bool]:
        """The offset of room for a sample that was built, or 0, and whether this is the first one that finds none."""
        self._header[_BUILT] += 1
        if self._index[number]:
            return 0, False
        at = self._header[_USED]
        if not self._has_room(at + nbytes):
            return 0, self._is_first_to_fill()
        self._header[_USED] = at + nbytes
        return at, False

    def _end_at_used(self) -> bool:
        """Keeps no more samples, because one can't be written."""
        self._header[_END] = self._header[_USED]
        return self._is_first_to_fill()

    def _is_first_to_fill(self) -> bool:
        was_full, self._header[_FULL] = self._header[_FULL], 1
        return not was_full

    def _has_room(self, end: int) -> bool:
        """Allocates what is missing up to there; what can't be had is not asked for again.

        Memory is only looked for: it would be filled with zeros, which takes as long as writing the samples.
        """
        if end > self._header[_END]:
            return False
        allocated = self._header[_ALLOCATED]
        if end <= allocated:
            return True
        more = min(max(_CHUNK, end - allocated), self._header[_END] - allocated)
        try:
            if self._in_memory and (free := available()) is not None and free < more + _SPARE:
                raise OSError("too little memory")
            if not self._in_memory:
                os.posix_fallocate(self._fd, allocated, more)
        except OSError:  # also a full disk, or a limit on the size of files
            self._header[_END] = allocated
            return False
        self._header[_ALLOCATED] = allocated + more
        return True

    # ---- numbers

    def stats(self) -> CacheStats:
        """What it holds, and how often it has served."""
        header = self._header
        return CacheStats(
            samples=self._count,
            present=header[_PRESENT],
            nbytes=header[_NBYTES],
            max_bytes=header[_END] - _data(self._count),
            hits=sum(self._hits),
            built=header[_BUILT],
            full=bool(header[_FULL]),
        )


class _Lock:
    """Held by one thread of one process at a time. Each process, forks included, makes one of its own.

    Attributes:
        pid: the process.
        slot: where it counts its hits.
    """

    _own = -1  # for `__del__`, if the constructor was interrupted

    def __init__(self, fd: int) -> None:
        self.pid, self._mutex = os.getpid(), threading.Lock()
        self.slot: int | None = None
        self._own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # a fork shares the locks of its parent's

    def alone(self, work: Callable[[], _T]) -> _T:
        """Does it under the lock, which is free afterwards, whatever interrupts; see NOTE [Publishing]."""
        with self._mutex:  # entered and left in C
            try:
                fcntl.flock(self._own, fcntl.LOCK_EX)
                return work()
            finally:
                fcntl.flock(self._own, fcntl.LOCK_UN)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self._own >= 0:
            close(self._own)


def _checksum(*parts: bytes | memoryview) -> int:
    """Of all of a record but the checksum itself."""
    return functools.reduce(lambda checksum, part: zlib.crc32(part, checksum), parts, 0)


def _write(parts: list[bytes | memoryview], fd: int, at: int) -> None:
    """Writes parts one after the other. Through a mapping, each new page would be a fault, which costs more.

    Raises:
        OSError: they can't be written.
    """
    first = 0
    while first < len(parts):
        written = os.pwritev(fd, parts[first : first + _PARTS], at)
        at += written
        while first < len(parts) and written >= len(parts[first]):
            written -= len(parts[first])
            first += 1
        if written:  # the kernel takes at most two gigabytes at once
            parts[first] = memoryview(parts[first])[written:]


def _boot() -> bytes:
    return Path("/proc/sys/kernel/random/boot_id").read_bytes()[:36].ljust(36)
