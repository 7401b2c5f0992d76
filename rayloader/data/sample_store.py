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
its checksum when it is first read. The header is on the disk before the file grows beyond it, so that only an empty
file is ever one to be begun: what holds anything else is not written to. What the header says of allocated room is not
relied on, for that may be missing, also in a copy of the file.

NOTE [Found samples]. Those that a file in a folder holds when a run opens it may be stale: their fingerprint does not
see everything. So each run has some of them compared with what would be built now, chosen at random. The offsets of
records end in zeros; an index entry has there in how many reads its sample is to be compared. All processes of a run
share these counts, and the header lists the runs whose samples were chosen.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import random
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rayloader.data import plain_samples
from rayloader.interrupts import new_lock
from rayloader.observe.stats import CacheStats
from rayloader.transport import codec
from rayloader.transport.memory_file import available, map_private
from rayloader.transport.raw import new_memory

if sys.platform != "win32":  # where no store can be opened
    import fcntl

FORMAT = 0x7261_796C_6F61_6404  # of the file, with its version in the last byte
ABSENT = object()  # instead of a sample
_T = TypeVar("_T")

# The header's fields, of eight bytes each.
_FORMAT, _COUNT, _END, _USED, _ALLOCATED, _PRESENT, _NBYTES, _BUILT, _FULL, _PROCESSES = range(10)
_BEGUN = 10  # runs that have opened it; the last of the fields
_IDENTITY, _BOOT, _RUNS = slice(96, 128), slice(128, 164), slice(512, 1024)
_HEADER = 4096
_SLOTS = 4096  # of counts of hits; further processes share them
_DOUBTFUL, _LEFT = 1 << 63, 63  # in an index entry; see the notes above
# Where a 64th of the samples are stale, 300 random ones are all right once in a hundred times. Each of them is compared
# within its first reads of the run, at one of these.
_COMPARED, _READS = 300, 8
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


def _new_header(count: int, end: int, identity: bytes) -> bytes:
    header = memoryview(bytearray(_HEADER))
    numbers = header.cast("Q")
    numbers[_FORMAT], numbers[_COUNT], numbers[_END] = FORMAT, count, end
    numbers[_USED] = numbers[_ALLOCATED] = _data(count)
    header[_IDENTITY], header[_BOOT] = identity, _boot()
    return bytes(header)


def _check_header(header: bytes, count: int, identity: bytes) -> None:
    numbers = memoryview(header.ljust(_HEADER, b"\0")).cast("Q")
    if (numbers[_FORMAT], numbers[_COUNT]) != (FORMAT, count):
        raise ValueError(f"it is of another format, or of {numbers[_COUNT]} samples instead of {count}")
    if header[_IDENTITY] != identity:
        raise ValueError("it is of another dataset")
    if not _data(count) <= numbers[_USED] <= numbers[_END] or numbers[_USED] % _ALIGN:
        raise ValueError("its header is damaged")


def _data(count: int) -> int:
    return _aligned(_HEADER + 8 * (_SLOTS + count), mmap.PAGESIZE)


class SampleStore:
    """An open file of samples.

    Args:
        fd: of the file, readable and writable; the caller keeps it open as long as this object is used.
        count: samples.
        max_bytes: that they may take in all.
        in_memory: the file takes memory, of which some must remain.
        identity: for a file in a folder, what the samples are of, 32 bytes.
        run: for a file in a folder: a number that objects of the same cache share, also in other processes.
        plain: what is in the file is not unpickled, because others may write to it.

    Attributes:
        is_new: this object has begun the file.

    Raises:
        OSError: there is no room for the index.
        ValueError: the file is of another format, number of samples or identity; it was not changed.
    """

    def __init__(
        self,
        fd: int,
        count: int,
        max_bytes: int,
        *,
        in_memory: bool,
        identity: bytes | None = None,
        run: int = 0,
        plain: bool = False,
    ) -> None:
        self._fd, self._count, self._in_memory, self._plain = fd, count, in_memory, plain
        self._lock = _Lock(fd)

        def begin() -> None:
            size, header = os.fstat(fd).st_size, os.pread(fd, _HEADER, 0)
            self.is_new = not any(header) if identity is None else not size
            if self.is_new:
                os.pwrite(fd, _new_header(count, size_of(count, max_bytes), identity or bytes(32)), 0)
                if not in_memory:
                    os.fsync(fd)
            else:
                _check_header(header, count, identity or bytes(32))
            if self.is_new or size == _HEADER:  # who began it may have died here
                os.ftruncate(fd, size_of(count, max_bytes))
            elif size < _data(count):
                raise ValueError("it is of another format, or was cut off")
            os.posix_fallocate(fd, 0, _data(count))
            self._map()
            if not self.is_new:
                self._adopt()
            if run and run not in (runs := self._bytes[_RUNS].cast("Q")):
                self._begin_run(max_bytes)
                runs[self._header[_BEGUN] % len(runs)] = run
                self._header[_BEGUN] += 1
            self._take_slot()

        self._alone(begin)

    def _map(self) -> None:
        self._bytes = memoryview(mmap.mmap(self._fd, os.fstat(self._fd).st_size))
        self._header = self._bytes[:_HEADER].cast("Q")
        self._hits = self._bytes[_HEADER : _HEADER + 8 * _SLOTS].cast("Q")
        index = _HEADER + 8 * _SLOTS
        self._index = self._bytes[index : index + 8 * self._count].cast("Q")

    def _begin_run(self, max_bytes: int) -> None:
        """The limits are those of the newest run, and of what it finds some samples are to be compared."""
        end = max(size_of(self._count, max_bytes), self._header[_USED])
        if end > len(self._bytes):
            os.ftruncate(self._fd, end)
            self._map()
        if end != self._header[_END]:
            self._header[_END], self._header[_FULL] = end, 0
        draw = random.Random()  # Python seeds it by the system
        for number in draw.sample(range(self._count), min(self._count, _COMPARED)):
            if entry := self._index[number]:
                self._index[number] = entry & ~_LEFT | draw.randint(2, 1 + _READS)

    def _adopt(self) -> None:
        """Prepares a file that was there before; see NOTE [After a crash of the machine]."""
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
        if (left := entry & _LEFT) > 1:
            self._index[number] = entry - 1  # if others do so at the same time, one read counts less
        entry -= left
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
        decode = plain_samples.decode if self._plain else codec.decode
        sample = decode(view[_RECORD.size + 8 * count : _RECORD.size + 8 * count + skeleton], buffers)
        if (slot := self._lock.slot) is None:
            slot = self._alone(self._take_slot)
        self._hits[slot] += 1
        return sample

    def is_due(self, number: int) -> bool:
        """Whether a sample that was read is to be compared with one that is built now; see NOTE [Found samples]."""
        return self._index[number] & _LEFT == 1

    def settle(self, number: int) -> None:
        """A sample was compared, and is right."""
        if (entry := self._index[number]) & _LEFT:
            self._index[number] = entry & ~_LEFT

    def doubt(self, number: int) -> None:
        """A sample was compared, and is wrong: each reader compares it from here on."""
        if entry := self._index[number]:
            self._index[number] = entry & ~_LEFT | 1

    def as_read(self, sample: Any) -> Any:
        """A sample as it would be read: objects may differ from those that were pickled, though they are equal."""
        skeleton, buffers = self._encoded(sample)
        return (plain_samples.decode if self._plain else codec.decode)(skeleton, buffers)

    def _encoded(self, sample: Any) -> tuple[bytes, Sequence[memoryview]]:
        if self._plain:
            return plain_samples.encode(sample)
        encoded = codec.encode(sample, known_classes=True)
        return encoded.skeleton, encoded.buffers

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
        at = entry & ~_LEFT
        if at + _RECORD.size <= len(self._bytes):
            nbytes, of, *_, checksum = _RECORD.unpack_from(self._bytes, at)
            is_inside = _RECORD.size <= nbytes <= len(self._bytes) - at
            record = self._bytes[at : at + nbytes]
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
            Exception: it can't be pickled, or is not plain.
        """
        skeleton, buffers = self._encoded(sample)
        sizes = [buffer.nbytes for buffer in buffers]
        parts: list[bytes | memoryview] = [struct.pack(f"<{len(sizes)}Q", *sizes) + skeleton]
        nbytes = _RECORD.size + len(parts[0])
        for buffer in buffers:
            parts += bytes(-nbytes % _ALIGN), buffer
            nbytes = _aligned(nbytes) + buffer.nbytes
        at, is_first = self._alone(lambda: self._reserve(number, _aligned(nbytes)))
        if not at:
            return is_first
        fields = nbytes, number, len(skeleton), len(sizes)
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
        self.pid, self._mutex = os.getpid(), new_lock(reentrant=False)
        self.slot: int | None = None
        self._own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)  # a fork shares the locks of its parent's

    def alone(self, work: Callable[[], _T]) -> _T:
        """Does it under the lock, which is free afterwards, whatever interrupts; see NOTE [Publishing]."""
        with self._mutex:
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
