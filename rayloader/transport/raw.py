"""Raw memory as NumPy and torch see it: arrays, tensors and storages over it, and the names of torch's data types.

The functions at the end are those that skeletons name: they create what a pickle holds over the skeleton's buffers. A
span arrives there as (storage, the byte of the original storage at which it starts). No state.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from rayloader._compat import no_torch_function, rebuild_from_type

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


class Memory:
    """Shows memory to NumPy as writable bytes and keeps its owner alive.

    `Tensor.numpy()` would leave the user's storage non-resizable for good; an array's own buffer does not exist
    for datetimes, and where it is read-only the array would arrive read-only.
    """

    __slots__ = ("__array_interface__", "__weakref__", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.owner = owner
        memory = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "strides": (1,)}
        self.__array_interface__ = {"version": 3, **memory}

    def view(self) -> memoryview:
        """The bytes, which keep this object alive."""
        array: Any = np.asarray(self)
        return memoryview(array)


def memory(address: int, nbytes: int, owner: object) -> Any:
    """An array of these bytes, writable, which keeps `owner` alive."""
    if not address:  # of no bytes; NumPy 2.0 takes no array from there
        return np.empty(0, np.uint8)
    return np.asarray(Memory(address, nbytes, owner))


def address(array: np.ndarray[Any, Any]) -> int:
    """Where its first item is."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def root_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array that this one is a view of, which is a view of no other array."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


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


def tensor_over(view: memoryview, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """A tensor of these flat bytes, which are its whole storage, and which that keeps alive as above."""
    if view.readonly or dtype not in _FROM_BUFFER:
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage_over(view), 0, size, stride)
    tensor = torch.frombuffer(view, dtype=dtype)
    if stride != (1,):
        tensor.as_strided_(size, stride)
    tensor.untyped_storage().rayloader_memory = view  # type: ignore[attr-defined]
    return tensor


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


def copied(buffer: Buffer, room: Callable[[int], memoryview] = new_memory) -> memoryview:
    """A copy of a buffer as flat bytes, in memory from `room`."""
    source = np.frombuffer(memoryview(buffer), np.uint8)
    copy = room(source.nbytes)
    np.frombuffer(copy, np.uint8)[:] = source
    return copy


# ---- what skeletons name


def make_tensor(span: Any, name: str, offset: int, size: Any, stride: Any, grad: bool, kind: Any = Tensor) -> Tensor:
    """Creates a view of a span."""
    dtype = DTYPES[name]
    storage, start = span or (torch.UntypedStorage(0), 0)
    tensor = torch.empty(0, dtype=dtype, device="cpu")  # the user may have set another default device
    tensor.set_(storage, offset - start // dtype.itemsize, size, stride)
    if kind is not Tensor:
        tensor = tensor.as_subclass(kind)
    if grad:
        with no_torch_function():
            tensor.requires_grad_()
    return tensor


def itself(obj: Any) -> Any:
    """Returns an object that was carried besides the skeleton."""
    return obj


def set_state(tensor: Tensor, state: object) -> None:
    """Gives a tensor its attributes."""
    rebuild_from_type(lambda: tensor, type(tensor), (), state)


def make_sparse(layout: torch.layout, parts: tuple[Any, ...], grad: bool) -> Tensor:
    """Creates a sparse tensor from others."""
    # Not torch's own function, which also appends the tensor to a list that only torch.load empties.
    if layout is torch.sparse_coo:
        *data, coalesced = parts
        tensor = torch.sparse_coo_tensor(*data, check_invariants=False, is_coalesced=coalesced)
    else:
        tensor = torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)
    return tensor.requires_grad_(grad)


def make_array(
    buffer: Any,
    shape: tuple[int, ...],
    dtype: Any,
    order: Literal["C", "F"] = "C",
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    writable: bool = True,
) -> Any:
    """Creates a view of a buffer."""
    array: Any = np.ndarray(shape, dtype, buffer, offset, strides, order)
    if not writable:
        array.flags.writeable = False
    return array


def set_attributes(obj: Any, state: Any) -> None:
    """Gives an object its attributes, as unpickling does, but does not ask the object how."""
    attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    if attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in (slots or {}).items():
        setattr(obj, name, value)
