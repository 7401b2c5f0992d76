"""What the driver sends of itself to actors, and images: the bytes from which the workers of a node open their replica.

Promise: an `Image` is immutable. It consists of one memory file, which holds the skeleton and all buffers that had to
be copied, and of regions of the user's own files (replica.py). `open_image` maps the file private and writable, so that
pages are shared until a worker writes, and its writes stay its own; that is what a fork gives torch's workers. Regions
are mapped in their own mode. Opened memory stays valid for as long as something refers to it, even after the end of the
image. No descriptor is kept, except for those of shared memory that has no name.

Each buffer has a place of its own in the file, though another one may have the same bytes: what pickling keeps as one
object is one in the worker, and a view and its base are two.

Driver: `Image.write`; the image holds the descriptors that its address names. On another node: `image_from_content`,
which fills the same file with content that came through Ray. Any thread may call. This module does not import Ray.

NOTE [Sealed]. A private mapping sees later writes to pages of the file that it has not written to itself. So the writer
seals the file against writing before its address is passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rayloader.errors import ReplicaError, add_note
from rayloader.protocol import Replica, carried
from rayloader.random.generators import KINDS, reduce_generator
from rayloader.transport import codec
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
from rayloader.transport.replica import (
    EncodedReplica,
    Mapped,
    Region,
    RegionArray,
    encode_for_worker,
    explain,
    open_region,
    open_storage,
    shared_file,
)

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

_PAGE = mmap.PAGESIZE
_ALIGN = 64  # bytes; as the codec's spans
_CHUNK = 1 << 20  # bytes written or compared at a time
_LARGE = 1 << 16  # bytes; smaller buffers are joined first

libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


@dataclass(frozen=True, slots=True)
class ImageAddress:
    """Everything that a worker needs to open an image.

    Attributes:
        file: where, one after the other, table, skeleton and buffers are, each from a multiple of 64 bytes on.
        regions: of other files.
        table_nbytes: rows of int64, one for each buffer: -1 for the image's file, or the number of a region; offset;
            bytes.
        skeleton_nbytes: for `codec.decode`.
    """

    file: FileAddress
    regions: tuple[Region, ...]
    table_nbytes: int
    skeleton_nbytes: int

    @property
    def name(self) -> str:
        """The image's name, which no other image has."""
        return self.file.name


class Contents:
    """What an image of an encoded object holds, whose buffers must stay as they were encoded."""

    def __init__(self, encoded: EncodedReplica) -> None:
        numbers = list(encoded.mapped)
        of_regions = {mapped: number for number, mapped in enumerate(dict.fromkeys(encoded.mapped.values()))}
        homes = [
            (of_regions[mapped], address_of_buffer(encoded.buffers[number]) - mapped.address)
            for number, mapped in encoded.mapped.items()
        ]
        self.regions = [mapped.region for mapped in of_regions]
        self.keepers = [mapped.keeper for mapped in of_regions if mapped.keeper is not None]
        table = np.full((len(encoded.buffers), 3), -1, np.int64)
        table[:, 2] = [buffer.nbytes for buffer in encoded.buffers]
        copied = np.ones(len(table), bool)
        copied[numbers] = False
        table[numbers, :2] = np.array(homes, np.int64).reshape(-1, 2)
        begin = _rounded(table.nbytes) + _rounded(len(encoded.skeleton))
        ends = begin + np.cumsum(_rounded(table[copied, 2]))
        table[copied, 1] = ends - _rounded(table[copied, 2])
        self.table_nbytes, self.skeleton_nbytes = table.nbytes, len(encoded.skeleton)
        self.nbytes = int(ends[-1]) if len(ends) else begin
        buffers = (buffer for number, buffer in enumerate(encoded.buffers) if number not in encoded.mapped)
        self._parts = [memoryview(table.tobytes()), memoryview(encoded.skeleton), *buffers]

    def chunks(self) -> Iterator[memoryview]:
        """The bytes of the file, in order."""
        small = bytearray()
        for part in self._parts:
            if part.nbytes < _LARGE:
                small += part
            else:
                yield memoryview(small)
                for done in range(0, part.nbytes, _CHUNK):
                    yield part[done : done + _CHUNK]
                small = bytearray()
            small += bytes(-part.nbytes % _ALIGN)
            if len(small) >= _CHUNK:
                yield memoryview(small)
                small = bytearray()
        yield memoryview(small)


def _rounded(nbytes: Any) -> Any:
    return -(-nbytes // _ALIGN) * _ALIGN


class Image:
    """An image, and the descriptors that its address names."""

    def __init__(self, file: MemoryFile, address: ImageAddress, keepers: Sequence[MemoryFile] = ()) -> None:
        self._file, self._keepers = file, keepers
        self.address = address

    @classmethod
    def write(cls, contents: Contents) -> Image:
        """A new image.

        Raises:
            ReplicaMemoryError: there is not enough memory; the error says what to do.
            MemoryFileError: this system has no memory files.
        """
        file = _written(contents.nbytes, contents.chunks())
        regions = tuple(contents.regions)
        address = ImageAddress(file.address, regions, contents.table_nbytes, contents.skeleton_nbytes)
        return cls(file, address, contents.keepers)

    def equals(self, contents: Contents) -> bool:
        """Whether an image of these contents would be the same."""
        address = self.address
        if (address.file.nbytes, address.skeleton_nbytes) != (contents.nbytes, contents.skeleton_nbytes):
            return False
        if [region.named for region in address.regions] != [region.named for region in contents.regions]:
            return False
        content = self.content()
        here = address_of_buffer(content)
        for chunk in contents.chunks():
            if chunk.nbytes and libc.memcmp(address_of_buffer(chunk), here, chunk.nbytes):
                return False
            here += chunk.nbytes
        return True

    def content(self) -> memoryview:
        """The bytes of the file, for `image_from_content` elsewhere."""
        # Private, because older kernels refuse to map a sealed file as shared, even for reading only.
        nbytes = self.address.file.nbytes
        return memoryview(mmap.mmap(self._file.fd, nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))


def image_from_content(address: ImageAddress, content: Buffer) -> Image:
    """Recreates the image on another node, for the workers there.

    Raises:
        ReplicaMemoryError: there is not enough memory.
        MemoryFileError: this system has no memory files.
    """
    view = memoryview(content).cast("B")
    file = _written(view.nbytes, (view[done : done + _CHUNK] for done in range(0, view.nbytes, _CHUNK)))
    return Image(file, replace(address, file=file.address))


def _written(nbytes: int, chunks: Iterable[memoryview]) -> MemoryFile:
    """A file with this content, permanently; see NOTE [Sealed]."""
    check_room(nbytes, "for one copy of the dataset on this node")
    file, offset = MemoryFile("image", nbytes), 0
    # Written, not copied into a mapping: no page is filled with zeros first, and none causes a page fault.
    for chunk in chunks:
        if os.pwrite(file.fd, chunk, offset) != chunk.nbytes:
            raise MemoryFileError(f"could not write {nbytes} bytes to a memory file")
        offset += chunk.nbytes
    file.seal(writes=True)
    return file


def open_image(
    address: ImageAddress, *, here: bool = True, content: Buffer | None = None
) -> tuple[memoryview, list[Any]]:
    """Opens an image: skeleton and buffers, for `codec.decode`.

    Args:
        address: of the image.
        here: whether this is the driver's node, with its files.
        content: of the image's file, if that can't be opened: it is copied.

    Raises:
        MemoryFileError: the memory file can't be opened here.
        ReplicaError: a file that the dataset refers to is not here, or there is too little memory for a copy.
    """
    if content is not None:
        check_room(address.file.nbytes, "for this worker's own copy of the dataset")
    sizes = [address.file.nbytes, *(region.nbytes for region in address.regions)]
    starts = [0, *np.cumsum([-(-size // _PAGE) * _PAGE for size in sizes]).tolist()]
    # One range of addresses for everything, which is freed with the last reference. Mappings that replace parts of it
    # need no descriptor.
    whole = address_range(starts[-1])
    base = address_of_buffer(whole)
    file, *of_regions = (whole[start : start + size] for start, size in zip(starts, sizes, strict=False))
    if content is not None:
        file[:] = memoryview(content).cast("B")
    else:
        with _mapped(open_file(address.file, writable=False)) as fd:
            map_over(fd, base, file.nbytes, 0, shared=False, writable=True)
    opened = [_open(*pair, here=here) for pair in zip(address.regions, of_regions, strict=True)]
    table = np.frombuffer(file[: address.table_nbytes], np.int64).reshape(-1, 3).tolist()
    buffers: list[Any] = []
    for home, offset, nbytes in table:
        if home < 0:
            buffers.append(file[offset : offset + nbytes])
        else:
            region = opened[home]
            buffers.append(region[offset : offset + nbytes] if isinstance(region, np.ndarray) else region)
    skeleton = _rounded(address.table_nbytes)
    return file[skeleton : skeleton + address.skeleton_nbytes], buffers


def _open(region: Region, memory: memoryview, *, here: bool) -> RegionArray | torch.UntypedStorage:
    """Maps a region over some memory, unless torch opens it elsewhere."""
    with _mapped(open_region(region, here=here)) as fd:
        if (storage := open_storage(region, fd)) is not None:
            return storage
        start = address_of_buffer(memory)
        map_over(fd, start, memory.nbytes, region.offset, shared=True, writable=region.writable)
        keeper = None
        if region.held is not None:  # nothing else leads to the file
            keeper = MemoryFile.received(os.dup(fd), region.held.name)
            region = replace(region, held=keeper.address)
    return RegionArray.over(memory if region.writable else memory.toreadonly(), Mapped(region, start, keeper))


@contextlib.contextmanager
def _mapped(fd: int) -> Iterator[int]:
    """Closes a file whose mappings have been made; raises a ReplicaError where that has failed."""
    try:
        yield fd
    except OSError as error:
        raise ReplicaError(f"can't map the dataset: {error}") from error
    finally:
        os.close(fd)


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
                f"The {name} cannot be opened in the worker, which must be able to import its modules; create the "
                "object at fault in worker_init_fn or on first use, and drop it in __getstate__",
            )
            raise


# ---- the replica


@dataclass(frozen=True, slots=True)
class Source:
    """Where an actor gets its replica from.

    Attributes:
        node_id: the driver's.
        sys_path: where the driver finds modules.
        image: of the replica, the driver's.
        carried: parts of the replica that Ray carries unchanged.
        content: for workers that cannot open the driver's files: in a list, Ray's object with the bytes of the image's
            file, or None if the node has an image of an earlier epoch.
        hosted: in a list too, the address of the image that one worker of the node has made of them.
    """

    node_id: str
    sys_path: list[str]
    image: ImageAddress
    carried: list[Any]
    content: list[Any] | None = None
    hosted: list[Any] | None = None


def module_folders() -> list[str]:
    """Where this process finds modules, for processes with another working directory."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing is found there
        cwd = ""
    return [os.path.join(cwd, entry) for entry in map(os.fspath, sys.path)]


def encode(obj: Any, parts: Mapping[str, Any], whom: str) -> EncodedReplica:
    """An object, to be written into an image.

    Args:
        obj: the object.
        parts: of it, by the user's names: an error of pickling names the one that is at fault.
        whom: it is sent to, in words.
    """
    try:
        return encode_for_worker(obj, carried(), KINDS, reduce_generator)
    except Exception as error:  # the user's objects may raise anything
        explained = (explain(part, name) for name, part in parts.items())
        if explanation := next(filter(None, explained), None):
            add_note(error, f"It cannot be sent to {whom}: {explanation}")
        raise


def encode_replica(replica: Replica) -> EncodedReplica:
    """A replica, to be written into an image. A copy of memory that processes share is warned of."""
    names = "dataset", "collate_fn", "worker_init_fn", "collate_fn_map"
    encoded = encode(replica, {name: getattr(replica, name) for name in names}, "the workers")
    copied = (buffer for number, buffer in enumerate(encoded.buffers) if number not in encoded.mapped)
    if (path := shared_file(map(address_of_buffer, copied))) is not None:
        warnings.warn(
            f"the dataset holds a tensor or an array in memory that processes share, {path}, of which the workers get "
            'a copy; hold the np.memmap or a tensor after share_memory_() itself, or use workers="fork"',
            stacklevel=1,
        )
    return encoded
