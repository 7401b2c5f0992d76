"""Raw memory as NumPy and torch see it, and the names of torch's data types. No state."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Data types of plain strided tensors by the name that is sent. Quantized ones need their quantizer too.
DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
NAMES = {d: name for name, d in DTYPES.items() if not name.startswith(("qint", "quint"))}
# Those that exist in NumPy under the same name, and those that `torch.frombuffer` knows.
NUMPYS: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
_FROM_BUFFER = {*NUMPYS, torch.bfloat16}
_MAPPED = 1 << 20  # bytes; copies from this size on are not taken from the heap


class _Memory:
    """Shows memory to NumPy as writable bytes and keeps its owner alive.

    `Tensor.numpy()` would leave the user's storage non-resizable for good; an array's own buffer does not exist
    for datetimes, and where it is read-only the array would arrive read-only.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, count: int, owner: object, kind: str = "|u1", step: int = 1) -> None:
        self.owner = owner
        memory = {"data": (address, False), "shape": (count,), "typestr": kind, "strides": (step,)}
        self.__array_interface__ = {"version": 3, **memory}


def memory(address: int, nbytes: int, owner: object) -> Any:
    """An array of these bytes, writable, which keeps `owner` alive."""
    return np.asarray(_Memory(address, nbytes, owner))


def address(array: np.ndarray[Any, Any]) -> int:
    """Where its first item is."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def gather(addresses: np.ndarray[Any, Any], nbytes: int) -> np.ndarray[Any, Any]:
    """A copy of `nbytes` bytes from each address, one after the other."""
    offsets = addresses - addresses.min()
    # They are items of one array, which begins at the lowest and whose items overlap; only these are read. The larger
    # its step, the sooner NumPy can count the bytes of so many items.
    whole = int(np.bitwise_or.reduce(offsets))
    step = whole & -whole or 1
    items = _Memory(int(addresses.min()), int(offsets.max()) // step + 1, None, f"|V{nbytes}", step)
    return np.asarray(items)[offsets // step].view(np.uint8)  # type: ignore[no-any-return]


def storage_over(view: memoryview) -> torch.UntypedStorage:
    """A storage of these flat bytes, which it keeps alive.

    Torch moves a storage to other memory when it is shared (`share_memory_`, a multiprocessing queue) and releases
    the old memory, even if NumPy views of it exist. So these bytes belong to the storage object, not only to its
    memory: a NumPy view keeps a tensor, the tensor its storage, and that the bytes.
    """
    storage: Any
    if view.readonly:  # torch.frombuffer would warn
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        storage = torch.from_numpy(memory(address, view.nbytes, view)).untyped_storage()
    else:
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
    storage.rayloader_memory = view  # torch keeps this object as long as the storage
    return storage  # type: ignore[no-any-return]


def tensor_over(view: memoryview, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor of these flat bytes, which are its whole storage, and which that keeps alive as above."""
    if view.readonly or dtype not in _FROM_BUFFER:
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage_over(view), 0, size, stride)
    tensor = torch.frombuffer(view, dtype=dtype)
    if stride != (1,):
        tensor.as_strided_(size, stride)
    tensor.untyped_storage().rayloader_memory = view  # type: ignore[attr-defined]
    return tensor


def array_tensor_over(view: memoryview, dtype: np.dtype[Any], size: tuple[int, ...]) -> torch.Tensor:
    """Like `tensor_over`, writable and contiguous, of a type that NumPy has: in a third of the time."""
    tensor = torch.from_numpy(np.ndarray(size, dtype, view))
    tensor.untyped_storage().rayloader_memory = view  # type: ignore[attr-defined]
    return tensor


def flat_bytes(buffer: Buffer, nbytes: int, number: int) -> memoryview:
    """A buffer as flat bytes.

    Raises:
        ValueError: its size is not `nbytes`; the error calls it `buffer <number>`.
    """
    view = memoryview(buffer)
    if view.nbytes != nbytes:
        raise ValueError(f"buffer {number} must have {nbytes} bytes, got {view.nbytes}")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def writable_copies(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Copies each buffer once, for readers of read-only memory such as Ray's object store.

    One allocation per buffer, so that a small tensor that is kept does not keep a whole batch.
    """
    copies = []
    for buffer in buffers:
        source = np.frombuffer(memoryview(buffer), np.uint8)
        copy = new_memory(source.nbytes)
        np.frombuffer(copy, np.uint8)[:] = source
        copies.append(copy)
    return copies


def new_memory(nbytes: int) -> memoryview:
    """Writable bytes of their own, uninitialized.

    Large sizes are mapped: the heap would cut smaller blocks out of the room that they leave, and could not return it.
    """
    memory: Any
    if nbytes >= _MAPPED:
        memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    else:  # torch's allocator aligns to 64 bytes and does not fill with zeros first
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
    return memoryview(memory)
