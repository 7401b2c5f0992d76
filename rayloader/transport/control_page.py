"""One page of news between a worker and the driver, beside Ray's calls.

Promise: a worker publishes each result of a call that carries several tasks as soon as it has it, so that a finished
batch is never withheld by an unfinished one; the driver tells it here which tasks nobody waits for any more. Nobody
waits for anybody: the driver looks while it waits for the call, the worker between batches.

The page is the one slot of an arena of its own, so that it is opened, and goes, as arenas do. Layout: number of the
call that is at work, number of its entries; 64 bytes on, what is dropped; 128 bytes on, the entries. What is longer
than a word has a checksum, begun with the call's number, for machines that reorder writes: what does not match is not
there yet.
"""

from __future__ import annotations

import struct
import zlib

from rayloader.transport.arena import Arena, ArenaAddress, ArenaError, ArenaWriter
from rayloader.transport.slots import PAGE

# What a call's results may take together: descriptors, and batches that are as small.
PAGE_BYTES = 1 << 20

_WORD = struct.Struct("<q")
_DROPPED = struct.Struct("<qqI")  # up to this call, from this task on, checksum of both
_ENTRY = struct.Struct("<II")  # length and checksum of the bytes that follow
_CALL, _COUNT, _DROP, _ENTRIES = 0, 8, 64, 128

PageAddress = ArenaAddress


class ControlPage:
    """The driver's side, for one actor."""

    def __init__(self) -> None:
        self._arena = Arena(PAGE_BYTES, kind="page")
        self._memory = self._arena.view(((1, PAGE, PAGE_BYTES), 0, PAGE_BYTES), {})  # where `allocate` begins
        self._call, self._count, self._place = 0, 0, _ENTRIES  # entries that were read
        self.address: PageAddress = self._arena.address

    def read(self, call: int) -> list[bytes]:
        """The entries of a call that were not read before; none if the worker is not at that call."""
        memory = self._memory
        if _WORD.unpack_from(memory, _CALL)[0] != call:
            return []
        if call != self._call:
            self._call, self._count, self._place = call, 0, _ENTRIES
        entries = []
        for _ in range(_WORD.unpack_from(memory, _COUNT)[0] - self._count):
            if self._place + _ENTRY.size > PAGE_BYTES:
                break  # the worker has begun another call since, whose count this is
            length, checksum = _ENTRY.unpack_from(memory, self._place)
            begin = self._place + _ENTRY.size
            entry = bytes(memory[begin : begin + length])
            if zlib.crc32(entry, call) != checksum:
                break
            entries.append(entry)
            self._count, self._place = self._count + 1, begin + length
        return entries

    def drop(self, up_to_call: int, from_task: int) -> None:
        """Tells the worker that of these calls' tasks nobody wants those from `from_task` on."""
        words = up_to_call, from_task
        _DROPPED.pack_into(self._memory, _DROP, *words, _checksum(*words))

    @property
    def file_name(self) -> str:
        """Of the memory file that it lies in."""
        return self._arena.address.name


def make_page() -> ControlPage | None:
    """A page, where this system has memory files."""
    try:
        return ControlPage()
    except ArenaError:
        return None


class WorkerPage:
    """The worker's side.

    Raises:
        ArenaError: the page can't be reached from this process.
    """

    def __init__(self, address: PageAddress) -> None:
        memory = ArenaWriter.open(address).allocate(PAGE_BYTES)
        assert memory is not None
        self.address = address
        self._memory = memory
        self._call, self._count, self._place = 0, 0, _ENTRIES

    def begin(self, call: int) -> None:
        """Starts a call: what was published before is gone."""
        self._call, self._count, self._place = call, 0, _ENTRIES
        _WORD.pack_into(self._memory, _COUNT, 0)
        _WORD.pack_into(self._memory, _CALL, call)

    def publish(self, entry: bytes) -> bool:
        """Shows a result to the driver; False if there is no room."""
        begin = self._place + _ENTRY.size
        end = begin + len(entry)
        if end > PAGE_BYTES:
            return False
        self._memory[begin:end] = entry
        _ENTRY.pack_into(self._memory, self._place, len(entry), zlib.crc32(entry, self._call))
        self._place, self._count = end, self._count + 1
        _WORD.pack_into(self._memory, _COUNT, self._count)
        return True

    def dropped(self, call: int, task_id: int) -> bool:
        """Whether nobody wants this task any more, which came with this call."""
        up_to_call, from_task, checksum = _DROPPED.unpack_from(self._memory, _DROP)
        if call > up_to_call or task_id < from_task:
            return False
        return bool(_checksum(up_to_call, from_task) == checksum)


def _checksum(up_to_call: int, from_task: int) -> int:
    return zlib.crc32(_WORD.pack(up_to_call) + _WORD.pack(from_task))
