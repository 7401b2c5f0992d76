"""The shared file of a cache: samples that one process has written once, and that all processes of a node read.

Promise: nobody takes a lock, and a read sees a whole sample or none, also when its writer was killed in the middle.
What is read is private: whoever writes to it changes nobody else's. A file that somebody else can have written is not
read (`open_own`). A full disk or too little memory is an answer, and
no crash. Without Ray; any thread and any fork may call.

NOTE [File]. The file begins with its index, an array in NumPy's format (`np.load(path, mmap_mode="r")` reads it): a row
for the file, and one for each sample, with where its record is and how often it was read and built. The records follow:
the buffers of a sample, and then a pickle of all else, as pickle's protocol 5 keeps them apart.

NOTE [Publishing]. A record is appended by one call of the kernel, which lets no two appends overlap. Only then its
place is entered in the index, by one store of eight aligned bytes. A writer that is killed before leaves a record that
nobody reads. Two that build the same sample both append it, and one of the records is read. Counts are not exact where
two processes read the same sample at the same moment.

NOTE [After a crash of the machine]. Processes that die leave a file in a folder whole, for the kernel has it; but when
the machine dies, the index may have reached the disk, and a record not. So the file's row names the boot in which it
was written. Whoever opens it in a later one marks all samples as doubtful, and a doubtful record is compared with its
checksum when it is first read. The header is on the disk before the file grows.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import re
import stat
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rayloader.errors import CacheError
from rayloader.observe.stats import CacheStats
from rayloader.transport import codec
from rayloader.transport.memory_file import address_of_buffer, address_range, available, map_over, map_private
from rayloader.transport.raw import new_memory

ABSENT = object()  # instead of a sample
_BOOT, _FULL = 0, 1  # in the file's row: of which boot it is, and at which size it was full
# In a sample's row: its record, 0 if there is none, and how often it was read, and above that how often it was built.
_RECORD, _COUNTS = 0, 1
_ROW = 2
_BUILT = 32  # where the number of builds begins
_ALIGN = 64  # bytes, of which records and buffers are multiples
_SIZE, _PLACE, _DOUBTFUL = 30, 33, 1 << 63  # bits of a record's size and place, in units of 64 bytes, and a mark
_HEAD = struct.Struct("<II")  # of a record: the checksum of what follows, and where the pickle begins
_CHUNK = 1 << 24  # bytes that a process writes before it looks again how much memory there is
_SPARE = 1 << 29  # bytes of memory that a cache leaves free
_MAPPED = 1 << 20  # bytes; larger records are mapped, because copying them costs more


class SampleStore:
    """An open file of samples.

    Args:
        fd: of the file, readable and writable; the caller keeps it open as long as this object is used.
        count: samples.
        max_bytes: that they may take in all.
        in_memory: the file takes memory, of which some must remain.

    Raises:
        OSError: there is no room for the index.
        ValueError: the file is of another format or number of samples; it was not changed.
    """

    def __init__(self, fd: int, count: int, max_bytes: int, *, in_memory: bool) -> None:
        self._fd, self._count, self._in_memory = fd, count, in_memory
        header = _header(count)
        found = os.pread(fd, len(header), 0)
        if not header.startswith(found):
            raise ValueError(f"it is of another format, or of another number of samples than {count}")
        data = _aligned(len(header) + 8 * _ROW * (1 + count))
        if len(found) < len(header) or os.fstat(fd).st_size < data:  # others may do the same at this moment
            os.pwrite(fd, header, 0)
            if not in_memory:
                os.fsync(fd)
        os.posix_fallocate(fd, 0, data)
        self._data, self._end = data, data + max_bytes
        # Also where the file does not reach yet; what another program with more room keeps behind that is not read.
        self._bytes = address_range(max(self._end, os.fstat(fd).st_size))
        map_over(fd, address_of_buffer(self._bytes), len(self._bytes), 0, shared=True, writable=True)
        self._index = self._bytes[len(header) : len(header) + 8 * _ROW * (1 + count)].cast("Q")
        if self._index[_BOOT] != (boot := _boot()):
            records = self._rows[1:, _RECORD]
            records[records > 0] |= np.uint64(_DOUBTFUL)
            self._index[_BOOT] = boot
        self._unseen = 0  # bytes to write until the next look at the memory

    @property
    def _rows(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._index, np.uint64).reshape(-1, _ROW)

    def read(self, number: int) -> Any:
        """A sample, in memory of its own; ABSENT if it is not there."""
        row = _ROW * (1 + number)
        if not (entry := self._index[row + _RECORD]):
            return ABSENT
        at, nbytes = (entry >> _SIZE) % (1 << _PLACE) * _ALIGN, entry % (1 << _SIZE) * _ALIGN
        if entry & _DOUBTFUL:
            self._index[row + _RECORD] = entry ^ _DOUBTFUL if self._is_whole(at, nbytes, number) else 0
            return self.read(number)
        if at + nbytes > len(self._bytes):
            return ABSENT
        view = self._private(at, nbytes)
        self._index[row + _COUNTS] += 1
        skeleton, spans = pickle.loads(view[_HEAD.unpack_from(view)[1] :])
        return codec.decode(skeleton, [view[start:end] for start, end in spans])

    def _is_whole(self, at: int, nbytes: int, number: int) -> bool:
        if not nbytes or at + nbytes > os.fstat(self._fd).st_size:
            return False
        record = self._bytes[at : at + nbytes]
        checksum, end = _HEAD.unpack_from(record)
        return bool(checksum == _checksum(number, end, record[_HEAD.size :]))

    def _private(self, at: int, nbytes: int) -> memoryview:
        if nbytes >= _MAPPED:
            with contextlib.suppress(OSError):  # the kernel's limit of mappings, when very many samples are kept
                return map_private(self._fd, at, nbytes)
        view = new_memory(nbytes)
        view[:] = self._bytes[at : at + nbytes]
        return view

    def write(self, number: int, sample: Any) -> bool:
        """Keeps a sample that was built, if there is room.

        Returns:
            Whether this is the first one that finds no room.

        Raises:
            Exception: it can't be pickled.
        """
        row = _ROW * (1 + number)
        self._index[row + _COUNTS] += 1 << _BUILT
        if self._index[row + _RECORD] or self._is_full:
            return False
        record = self._record_of(number, sample)
        padding = bytes(-os.fstat(self._fd).st_size % _ALIGN)  # after an append that has failed in the middle
        if not self._has_room(len(record)):
            return self._fill()
        try:
            with open(f"/proc/self/fd/{self._fd}", "ab", 0) as file:
                written, end = file.write(padding + record), file.tell()
        except OSError:  # a full disk, or a limit on the size of files
            return self._fill()
        at = end - len(record)
        if written != len(padding) + len(record) or end > self._end or at % _ALIGN or at >= _ALIGN << _PLACE:
            return self._fill()
        self._index[row + _RECORD] = at // _ALIGN << _SIZE | len(record) // _ALIGN
        return False

    def _record_of(self, number: int, sample: Any) -> bytes:
        encoded = codec.encode(sample, known_classes=True)
        parts: list[bytes | memoryview] = [bytes(_ALIGN - _HEAD.size)]
        spans, end = [], _ALIGN
        for buffer in encoded.buffers:
            spans.append((end, end + buffer.nbytes))
            parts += buffer, bytes(-buffer.nbytes % _ALIGN)
            end += _aligned(buffer.nbytes)
        pickled = pickle.dumps((encoded.skeleton, spans), 5)
        content = b"".join([*parts, pickled, bytes(-len(pickled) % _ALIGN)])
        return _HEAD.pack(0 if self._in_memory else _checksum(number, end, content), end) + content

    @property
    def _is_full(self) -> bool:
        return self._index[_FULL] >= self._end

    def _fill(self) -> bool:
        """Keeps no more samples; returns whether this is the first object to find that."""
        was_full, self._index[_FULL] = self._is_full, max(self._end, self._index[_FULL])
        return not was_full

    def _has_room(self, nbytes: int) -> bool:
        self._unseen -= nbytes
        if self._in_memory and self._unseen < 0:
            if (free := available()) is not None and free < nbytes + _CHUNK + _SPARE:
                return False
            self._unseen = _CHUNK
        return nbytes < _ALIGN << _SIZE and os.fstat(self._fd).st_size + nbytes <= self._end

    def try_again(self) -> None:
        """A new run may find more room than the last one."""
        self._index[_FULL] = 0

    def stats(self) -> CacheStats:
        """What it holds, and how often it has served."""
        rows = self._rows[1:].copy()
        return CacheStats(
            samples=self._count,
            present=int(np.count_nonzero(rows[:, _RECORD])),
            nbytes=int((rows[:, _RECORD] % (1 << _SIZE)).sum()) * _ALIGN,
            max_bytes=self._end - self._data,
            hits=int((rows[:, _COUNTS] % (1 << _BUILT)).sum()),
            built=int((rows[:, _COUNTS] >> np.uint64(_BUILT)).sum()),
            full=self._is_full,
        )


def _header(count: int) -> bytes:
    file = io.BytesIO()
    kind = {"descr": "<u8", "fortran_order": False, "shape": (1 + count, _ROW)}
    np.lib.format.write_array_header_1_0(file, kind)
    return file.getvalue()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _checksum(number: int, end: int, content: bytes | memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(b"%d %d" % (number, end)))


def _boot() -> int:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return int(boot.replace("-", ""), 16) % (1 << 64)


def path_in(folder: str | os.PathLike[str], dataset: Any, key: Any) -> Path:
    """The first part of the path of a cache's file, for samples that a user calls by a key.

    Raises:
        ValueError: it is no key.
    """
    if not isinstance(key, str) or not key:
        raise ValueError(f"where= must have key=, a text that you change whenever the samples change, got {key!r}")
    kind = type(dataset).__name__
    readable = re.sub(r"[^A-Za-z0-9]+", "_", f"{kind} {key}")[:60]
    identity = hashlib.sha256(f"{kind} {key}".encode()).hexdigest()[:16]
    return Path(folder).absolute() / f"{readable}-{len(dataset)}-{identity}"


def open_own(path: Path) -> int:
    """Opens a file that nobody but this user can have written; makes one for this user alone if there is none.

    What is checked is the open file, in whose place nobody can put another one: use the descriptor, not the path again.

    Returns:
        A descriptor of the caller's, which programs that are started do not inherit.

    Raises:
        OSError: it cannot be opened, for instance because it is a symbolic link.
        CacheError: it is not a regular file, or of another user, or has other names, or others may write to it.
    """
    # The last flag: whoever opens a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    # It has no name if another process has put a newer file in its place.
    if not is_own or status.st_nlink > 1 or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        os.close(descriptor)
        raise CacheError(
            f"the cache file {path} must be a regular file of this user's, with one name, to which nobody else may "
            f"write, got mode {status.st_mode:o}, user {status.st_uid} and {status.st_nlink} names; delete it"
        )
    return descriptor
