"""The reader's side of an image: its address, and the mapping.

Promise: `open_image` maps memory files private and writable, so that pages are shared until a worker writes, and its
writes stay its own; that is what a fork gives torch's workers. Regions of the user's files are mapped in their own
mode. Opened memory stays valid for as long as something refers to it, even after the end of the image. No descriptor is
kept, except for those that torch keeps of its shared memory.

Images are created by image.py. No state; any thread may call. This module does not import Ray.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rayloader.errors import ReplicaError, add_note
from rayloader.transport import codec
from rayloader.transport.mapped import Region, open_region, open_storage
from rayloader.transport.memory import check_room, no_collection
from rayloader.transport.memory_file import FileAddress, open_file
from rayloader.transport.raw import memory

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PAGE = mmap.PAGESIZE
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # of Linux, the same on all its common machines

libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mmap.restype = ctypes.c_void_p
libc.memcpy.argtypes = libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
libc.memcpy.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of bytes in one of an image's files."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WrittenPages:
    """Pages of a private mapping that the driver had written: they replace those of the region, at `start`."""

    region: int
    start: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """Everything that a worker needs to open an image."""

    files: tuple[FileAddress, ...]
    regions: tuple[Region, ...]
    skeleton: Piece
    table: Piece  # rows of int64: file, or number of files plus region; offset; bytes
    patches: tuple[WrittenPages, ...]

    @property
    def name(self) -> str:
        """The image's name, which changes with every change."""
        return self.files[-1].name


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
    whole = memoryview(mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | _MAP_NORESERVE))
    base = address_of_buffer(whole)
    parts = []
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}  # of a part: it, and its start in the region
    for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        part = whole[start : start + size]
        if number >= len(address.files):
            region = address.regions[number - len(address.files)]
            fd = open_region(region, here=here)
            try:
                if (storage := open_storage(region, fd)) is not None:
                    storages[number] = storage
                else:
                    writable = region.writable or not region.shared
                    _map(fd, base + start, region.nbytes, region.offset, region.shared, writable)
            finally:
                os.close(fd)
        elif contents is None:
            fd = open_file(address.files[number], writable=False)
            try:
                _map(fd, base + start, size, 0, False, True)
            finally:
                os.close(fd)
        else:
            part[:] = memoryview(contents[number]).cast("B")
        parts.append(part)
    for patch in address.patches:
        target = parts[len(address.files) + patch.region]
        target[patch.start : patch.start + patch.piece.nbytes] = _cut(parts, patch.piece)
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


def decode(
    skeleton: Buffer, buffers: Sequence[Buffer | torch.UntypedStorage], carried: Sequence[Any], name: str = "dataset"
) -> Any:
    """As `codec.decode`, with a note below an error of unpickling; `name` is the user's for the object."""
    with no_collection():
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


def _map(fd: int, address: int, nbytes: int, offset: int, shared: bool, writable: bool) -> None:
    """Maps a file over the memory at an address."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = (mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | _MAP_FIXED | _MAP_NORESERVE
    if libc.mmap(address, nbytes, protection, flags, fd, offset) != address:
        raise ReplicaError(f"can't map {nbytes} bytes of the dataset: {os.strerror(ctypes.get_errno())}")


def address_of_buffer(buffer: Any) -> int:
    """The address of a buffer's memory; 0 for an empty one."""
    view = np.frombuffer(buffer, np.uint8)
    return int(view.__array_interface__["data"][0]) if view.size else 0
