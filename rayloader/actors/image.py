"""Images: the bytes from which the workers of a node open their replica, in one copy.

Promise: an `Image` is immutable. It consists of memory files, which hold the skeleton and all buffers that had to be
copied, and of regions of the user's own files (mapped.py). `open_image` maps the files private and writable, so that
pages are shared until a worker writes, and its writes stay its own; that is what a fork gives torch's workers. Regions
are mapped in their own mode. Opened memory stays valid for as long as something refers to it, even after the end of the
image. No descriptor is kept, except for those that torch keeps of its shared memory.

Driver: `Image.write`; the image holds the descriptors that its address names. On another node:
`image_from_contents`, which fills the same files with contents that came through Ray. Any thread may call; two threads,
`rayloader-image`, live while a big image is compared. This module does not import Ray.

NOTE [Sealed]. A private mapping sees later writes to pages of the file that it has not written to itself. So the writer
seals the file against writing before its address is passed on.

NOTE [Items]. An item is what an image stores in one piece: item 0 is the skeleton, then come the buffers that do not
belong to a file. The table, in the newest file, says where each buffer is: file or region, offset, bytes. Buffers that
are assembled when they are read have the addresses -1, -2, ...
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayloader.errors import ReplicaError, add_note
from rayloader.transport import codec
from rayloader.transport.mapped import Mappings, Region, is_written, open_region, open_storage
from rayloader.transport.memory_file import (
    FileAddress,
    MemoryFile,
    MemoryFileError,
    address_of_buffer,
    address_range,
    check_room,
    libc,
    map_over,
    open_file,
)
from rayloader.transport.raw import memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PAGE = mmap.PAGESIZE
_ALIGN = 64  # bytes; as the codec's spans
_CHUNK = 1 << 20  # bytes copied or compared at a time
_THREADED = 1 << 23  # bytes from which two threads are worth their start
_LARGE = 1 << 16  # bytes per chunk: below this, threads only hinder each other
_OLDER_FILES = 8  # how many an updated image keeps: each is a descriptor here and a mapping in every worker

_Numbers = np.ndarray[Any, Any]  # int64

libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of bytes in one of an image's files."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """Everything that a worker needs to open an image."""

    files: tuple[FileAddress, ...]
    regions: tuple[Region, ...]
    skeleton: Piece
    table: Piece  # rows of int64: file, or number of files plus region; offset; bytes

    @property
    def name(self) -> str:
        """The image's name, which changes with every change."""
        return self.files[-1].name


@contextlib.contextmanager
def _mapped(fd: int) -> Iterator[int]:
    """Closes a file whose mappings have been made; raises a ReplicaError where that has failed."""
    try:
        yield fd
    except OSError as error:
        raise ReplicaError(f"can't map the dataset: {error}") from error
    finally:
        os.close(fd)


def open_image(
    address: ImageAddress, *, here: bool = True, contents: Sequence[Buffer] | None = None
) -> tuple[memoryview, list[memoryview | torch.UntypedStorage]]:
    """Opens an image: skeleton and buffers, for `codec.decode`.

    Args:
        address: of the image.
        here: whether this is the driver's node, with its files.
        contents: of the files, if they can't be opened: they are copied.

    Raises:
        MemoryFileError: a memory file can't be opened here.
        ReplicaError: a file that the dataset refers to is not here, or there is too little memory for a copy.
    """
    if contents is not None:
        check_room(sum(file.nbytes for file in address.files), "for this worker's own copy of the dataset")
    sizes = [*(file.nbytes for file in address.files), *(region.nbytes for region in address.regions)]
    starts = [0, *np.cumsum([-(-size // _PAGE) * _PAGE for size in sizes]).tolist()]
    # One range of addresses for everything, which is freed with the last reference. Mappings that replace parts of it
    # need no descriptor.
    whole = address_range(starts[-1])
    base = address_of_buffer(whole)
    parts = []
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of a part: it, and its start in the region
    for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        part = whole[start : start + size]
        if number >= len(address.files):
            region = address.regions[number - len(address.files)]
            with _mapped(open_region(region, here=here)) as fd:
                if (storage := open_storage(region, fd)) is not None:
                    storages[number] = storage
                else:
                    writable = region.writable or not region.shared
                    shared = region.shared
                    map_over(fd, base + start, region.nbytes, region.offset, shared=shared, writable=writable)
        elif contents is None:
            with _mapped(open_file(address.files[number], writable=False)) as fd:
                map_over(fd, base + start, size, 0, shared=False, writable=True)
        else:
            part[:] = memoryview(contents[number]).cast("B")
        parts.append(part)
    for number, region in enumerate(address.regions, start=len(address.files)):
        if not region.writable:
            parts[number] = parts[number].toreadonly()
    table = np.frombuffer(_cut(parts, address.table), np.int64).reshape(-1, 3).tolist()
    buffers = [
        _cut_storage(*storages[number], offset, nbytes)
        if number in storages
        else parts[number][offset : offset + nbytes]
        for number, offset, nbytes in table
    ]
    return _cut(parts, address.skeleton), buffers


def decode_replica(
    skeleton: Buffer, buffers: Sequence[Buffer | torch.UntypedStorage], carried: Sequence[Any], name: str = "dataset"
) -> Any:
    """As `codec.decode`, with a note below an error of unpickling; `name` is the user's for the object."""
    with codec.no_collection():
        try:
            return codec.decode(skeleton, buffers, carried)
        except Exception as error:  # the user's objects may raise anything
            add_note(
                error,
                f"The {name} cannot be opened in the worker. Workers must be able to import the modules of its classes "
                "and functions, and its classes must allow what unpickling does (see __getnewargs__, __reduce__). Or "
                "create the object at fault in worker_init_fn or lazily on first use, and drop it in __getstate__",
            )
            raise


def _cut(parts: Sequence[memoryview], piece: Piece) -> memoryview:
    return parts[piece.file][piece.offset : piece.offset + piece.nbytes]


def _cut_storage(
    storage: torch.UntypedStorage, start: int, offset: int, nbytes: int
) -> memoryview | torch.UntypedStorage:
    if (offset, nbytes) == (start, storage.nbytes()):
        return storage
    return memoryview(memory(storage.data_ptr() + offset - start, nbytes, storage))


class Image:
    """The open files of an image, and what is needed to see later what has changed."""

    def __init__(self, files: tuple[MemoryFile, ...], address: ImageAddress, record: _Record | None = None) -> None:
        self._files = files
        self._record = record
        self.address = address

    @classmethod
    def write(cls, encoded: codec.Encoded, mappings: Mappings, old: Image | None = None) -> Image:
        """The image of an encoded object.

        Args:
            encoded: its buffers must be as they were encoded until this returns.
            mappings: of this process, from just before the object was encoded.
            old: of the object as it was before. It is returned if nothing has changed, or else shares the equal parts.

        Raises:
            ReplicaMemoryError: there is not enough memory; the error says what to do.
            MemoryFileError: this system has no memory files.
        """
        files: list[MemoryFile] = []
        if old is None:
            new = _Contents(encoded, mappings, {})
            origins = np.full((new.count, 2), -1, np.int64)  # file, offset of each item
        else:
            assert old._record is not None, "an image from contents can't be updated"
            new = _Contents(encoded, mappings, old._record.regions)
            kept = old._unchanged(new)
            if old._is(new, kept):
                return old
            origins, files = old._worth_keeping(new, kept)
        missing = np.flatnonzero(origins[:, 0] < 0)
        rounded = -(-new.sizes[missing] // _ALIGN) * _ALIGN
        ends = np.cumsum(rounded)
        table_nbytes = new.home.nbytes + new.region_offsets.nbytes + new.buffer_sizes.nbytes
        table_offset = int(ends[-1]) if len(ends) else 0
        check_room(table_offset + table_nbytes, "for one copy of the dataset on this node")
        origins[missing, 0] = len(files)
        origins[missing, 1] = ends - rounded
        stored = new.home >= 0
        table = np.empty((len(stored), 3), np.int64)
        table[stored, :2] = origins[new.home[stored]]
        table[~stored, 0] = len(files) + 1 + (-1 - new.home[~stored])
        table[~stored, 1] = new.region_offsets[~stored]
        table[:, 2] = new.buffer_sizes
        file = MemoryFile("image", table_offset + max(table_nbytes, _ALIGN))
        sources = [*zip(new.addresses[missing].tolist(), new.sizes[missing].tolist(), strict=True)]
        offsets = [*origins[missing, 1].tolist(), table_offset]
        _fill(file, [*sources, (address_of_buffer(table), table.nbytes)], offsets, new.read)
        files.append(file)

        address = ImageAddress(
            files=tuple(file.address for file in files),
            regions=tuple(new.regions),
            skeleton=Piece(int(origins[0, 0]), int(origins[0, 1]), int(new.sizes[0])),
            table=Piece(len(files) - 1, table_offset, table.nbytes),
        )
        return cls(tuple(files), address, _Record(new, origins))

    def _unchanged(self, new: _Contents) -> _Numbers:
        """For each new item, the item of this image that it equals, or -1."""
        record = self._record
        assert record is not None
        by_source = {key: item for item, key in enumerate(record.keys)}
        keys = list(zip(new.addresses.tolist(), new.sizes.tolist(), strict=True))
        # Compare with the item from the same memory if that was stored, else the one of the same number if its size is
        # equal.
        candidates = [by_source.get(key, -1) for key in keys]
        candidates[0] = 0  # the skeleton
        for item, candidate in enumerate(candidates):
            if candidate <= 0 and item < len(record.keys) and record.keys[item][1] == keys[item][1]:
                candidates[item] = item
        pairs = [(n, old) for n, old in enumerate(candidates) if old >= 0 and keys[n][1] == record.keys[old][1]]
        differs = np.zeros(new.count, bool)
        views = self.contents()
        starts = [address_of_buffer(view) for view in views]
        origins = record.origins.tolist()
        chunks = []
        for item, old in pairs:
            (source, nbytes), (file, offset) = keys[item], origins[old]
            for done in range(0, nbytes, _CHUNK):  # an item without an address is one chunk
                chunks.append((item, source + done, starts[file] + offset + done, min(_CHUNK, nbytes - done)))

        def compare(some: Sequence[tuple[int, int, int, int]]) -> None:
            for item, one, other, nbytes in some:
                source, _kept = new.read(one)
                if not differs[item] and libc.memcmp(source, other, nbytes):
                    differs[item] = True

        if sum(chunk[-1] for chunk in chunks) < _THREADED + len(chunks) * _LARGE:
            compare(chunks)
        else:
            bundle = max(1, len(chunks) // 64)
            with ThreadPoolExecutor(2, thread_name_prefix="rayloader-image") as threads:
                list(threads.map(compare, [chunks[first : first + bundle] for first in range(0, len(chunks), bundle)]))
        kept = np.full(new.count, -1, np.int64)
        for item, old in pairs:
            if not differs[item]:
                kept[item] = old
        return kept

    def _is(self, new: _Contents, kept: _Numbers) -> bool:
        record = self._record
        assert record is not None
        return (
            len(record.keys) == new.count
            and np.array_equal(kept, np.arange(new.count))
            and np.array_equal(record.home, new.home)
            and np.array_equal(record.region_offsets, new.region_offsets)
            and self.address.regions == tuple(new.regions)
        )

    def _worth_keeping(self, new: _Contents, kept: _Numbers) -> tuple[_Numbers, list[MemoryFile]]:
        """Files and offsets of the items that need not be written again, -1 for the rest, and the files that hold them.

        A file stays while at least half of it is used; among those, the ones that hold most.
        """
        record = self._record
        assert record is not None
        origins = np.where((kept >= 0)[:, None], record.origins[kept], -1)
        used: Counter[int] = Counter()
        for number in range(len(self._files)):
            used[number] = int(new.sizes[origins[:, 0] == number].sum())
        worth = [n for n, nbytes in used.most_common() if nbytes and 2 * nbytes >= self._files[n].address.nbytes]
        worth = sorted(worth[:_OLDER_FILES])
        numbers = np.full(len(self._files) + 1, -1, np.int64)  # the last entry is for -1
        numbers[worth] = np.arange(len(worth))
        origins[:, 0] = numbers[origins[:, 0]]
        return origins, [self._files[number] for number in worth]

    def contents(self) -> list[memoryview]:
        """The bytes of each file, for `image_from_contents` elsewhere."""
        # Private, because older kernels refuse to map a sealed file as shared, even for reading only.
        return [
            memoryview(mmap.mmap(file.fd, file.address.nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
            for file in self._files
        ]


class _Contents:
    """The contents of an image of an encoded object; see NOTE [Items]."""

    def __init__(
        self, encoded: codec.Encoded, mappings: Mappings, known: dict[Region, tuple[Region, MemoryFile | None]]
    ) -> None:
        self._encoded = encoded  # keeps the memory that the addresses point to
        gathered = [-1 - number for number in range(len(encoded.gathered))]
        addresses = np.array([*map(address_of_buffer, encoded.buffers), *gathered], np.int64)
        sizes = [*(buffer.nbytes for buffer in encoded.buffers), *(buffer.nbytes for buffer in encoded.gathered)]
        self.buffer_sizes = np.array(sizes, np.int64)
        self.home = np.zeros(len(sizes), np.int64)  # item of each buffer, or -1 - region
        self.region_offsets = np.zeros(len(sizes), np.int64)
        self.regions: list[Region] = []
        self.held: list[MemoryFile | None] = []
        self._refer(mappings, addresses, known)
        stored = np.flatnonzero(self.home >= 0)
        self.home[stored] = 1 + np.arange(len(stored))
        skeleton = [address_of_buffer(encoded.skeleton)], [len(encoded.skeleton)]
        self.addresses = np.concatenate([skeleton[0], addresses[stored]]).astype(np.int64)
        self.sizes = np.concatenate([skeleton[1], self.buffer_sizes[stored]]).astype(np.int64)
        self.count = len(self.sizes)

    def read(self, address: int) -> tuple[int, object]:
        """Returns where the bytes of the item with this address are, and an object that keeps them there."""
        if address >= 0:
            return address, None
        content = self._encoded.gathered[-1 - address].content()
        return address_of_buffer(content), content

    def _refer(
        self, mappings: Mappings, addresses: _Numbers, known: dict[Region, tuple[Region, MemoryFile | None]]
    ) -> None:
        """Fills in the regions."""
        found = mappings.find(addresses, self.buffer_sizes)
        for index in np.unique(found[found >= 0]).tolist():
            inside = np.flatnonzero(found == index)
            low, high = int(addresses[inside].min()), int((addresses[inside] + self.buffer_sizes[inside]).max())
            storages = [self._encoded.shared[n] for n in inside.tolist() if n in self._encoded.shared]
            reached = mappings.region(index, low, high, storages)
            if reached is None:
                continue
            region, held, start = reached
            region, held = known.get(region.named, (region, held))
            if not region.shared and is_written(start, region.nbytes):
                continue  # it is the program's own, in part at least, and not the file's
            self.home[inside] = -1 - len(self.regions)
            self.region_offsets[inside] = addresses[inside] - start
            self.regions.append(region)
            self.held.append(held)


class _Record:
    """What an image remembers of its contents: only their numbers, so that it does not keep them alive."""

    def __init__(self, contents: _Contents, origins: _Numbers) -> None:
        self.keys = list(zip(contents.addresses.tolist(), contents.sizes.tolist(), strict=True))
        self.origins = origins
        self.home, self.region_offsets = contents.home, contents.region_offsets
        held = zip(contents.regions, contents.held, strict=True)
        self.regions = {region.named: (region, keeper) for region, keeper in held}


def image_from_contents(address: ImageAddress, contents: Sequence[Buffer]) -> Image:
    """Recreates the image on another node, for the workers there.

    Raises:
        ReplicaMemoryError: there is not enough memory.
        MemoryFileError: this system has no memory files.
    """
    views = [memoryview(content) for content in contents]
    check_room(sum(view.nbytes for view in views), "for one copy of the dataset on this node")
    files = []
    for view in views:
        file = MemoryFile("image", view.nbytes)
        _fill(file, [(address_of_buffer(view), view.nbytes)], [0], lambda address: (address, None))
        files.append(file)
    return Image(tuple(files), replace(address, files=tuple(file.address for file in files)))


def _fill(
    file: MemoryFile,
    sources: Sequence[tuple[int, int]],
    offsets: Sequence[int],
    read: Callable[[int], tuple[int, object]],
) -> None:
    """Copies the memory at some addresses into a file, permanently; see NOTE [Sealed] and `_Contents.read`."""
    for (source, nbytes), offset in zip(sources, offsets, strict=True):
        address, kept = read(source)
        content = memory(address, nbytes, kept)
        # Written, not copied into a mapping: no page is filled with zeros first, and none causes a page fault.
        for done in range(0, nbytes, _CHUNK):
            piece = content[done : done + _CHUNK]
            if os.pwrite(file.fd, piece, offset + done) != len(piece):
                raise MemoryFileError(f"could not write {file.address.nbytes} bytes to a memory file")
    file.seal(writes=True)
