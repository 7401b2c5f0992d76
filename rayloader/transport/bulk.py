"""Many small tensors and arrays in a replica: pickled, stored, compared and recreated in bulk.

A dataset may hold a list of 100,000 of them. One by one, each takes some 40 microseconds to send, hardly any of
which is due to its bytes. So those of one type, data type and shape form a *group*. The pickle says only "the next of
this group"; their bytes lie one after the other in a few buffers, which are assembled when they are read; and a worker
recreates the whole group in one operation.

Promise: only objects that are recreated exactly are grouped: dense tensors that require no gradient and own exactly
their storage, and arrays of numbers. If one turns out to share its storage with another, or to lie in a file, the
object is pickled once more, without groups. Tensors over parts of one storage, such
as the rows of another, are *views*: they have no bytes of their own, and the skeleton holds their offsets. The first
few of each kind are left to the codec: an object with few tensors has no groups.

No state besides that of one pickle. This module does not import Ray.
"""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rayloader.transport.raw import gather, resized

if TYPE_CHECKING:
    from rayloader.transport.mapped import Mappings

_FEW = 8  # members of a group that are left to the codec
_SMALL = 1 << 16  # maximum bytes of a member: copying more costs as much as is saved
_BUFFER = (1 << 20) - 1  # maximum bytes of a buffer of several members: the piece that is rewritten for a change
# torch's data types that also exist in NumPy, by NumPy's name.
_WIDTHS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
_DTYPES = {getattr(torch, name): name for name in ("bool", *_WIDTHS)}
_NBYTES = operator.attrgetter("nbytes")  # of an array


@dataclass(frozen=True, slots=True)
class GroupHeader:
    """What is needed to recreate a group besides the bytes."""

    of_tensors: bool
    dtype: str  # NumPy's
    shape: tuple[int, ...]
    writable: bool
    buffers: int  # how many, after those of earlier groups

    def remake(self, buffers: Iterator[memoryview]) -> list[Any]:
        """The members of a group, as views of its buffers, of which it takes as many as it needs."""
        members: list[Any] = []
        for _ in range(self.buffers):
            whole = np.frombuffer(next(buffers), self.dtype).reshape(-1, *self.shape)
            if not self.writable:
                whole.flags.writeable = False
            # Not `list(whole)` if members have no axes: that returns scalars.
            arrays = list(whole) if self.shape else [whole[number, ...] for number in range(len(whole))]
            members += map(torch.from_numpy, arrays) if self.of_tensors else arrays
        return members


@dataclass(frozen=True, slots=True)
class ViewsHeader:
    """What is needed to recreate views besides the storage."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: np.ndarray[Any, Any]  # in elements

    def remake(self, storage: torch.UntypedStorage, start: int) -> list[Tensor]:
        """The tensors over a storage that begins with byte `start` of the original one."""
        dtype = getattr(torch, self.dtype)
        whole = torch.empty(0, dtype=dtype, device="cpu")
        whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        offsets = self.offsets - start // dtype.itemsize
        steps = np.unique(np.diff(offsets))
        if len(steps) == 1 and steps[0] > 0:  # for example the rows of a tensor: one call creates them all
            rows = whole.as_strided((len(offsets), *self.shape), (int(steps[0]), *self.stride), int(offsets[0]))
            members: Iterable[Tensor] = rows.unbind(0)
        else:
            members = (whole.as_strided(self.shape, self.stride, offset) for offset in offsets.tolist())
        return [member.data for member in members]  # no views of each other for autograd


class Gathered:
    """A buffer that is assembled from members of a group when it is read."""

    def __init__(self, group: Group, first: int, count: int) -> None:
        self._group, self._part = group, slice(first, first + count)
        self.nbytes: int = count * group.nbytes

    def content(self) -> memoryview:
        """The current bytes.

        Raises:
            ValueError: the memory of a member is gone; see `raw.resized`.
        """
        group, members = self._group, self._group.members[self._part]
        if group.of_tensors:
            addresses = group.addresses(self._part)
            whole = min(map(torch.UntypedStorage.nbytes, members)) >= group.nbytes
            content = gather(addresses, group.nbytes).data if whole else memoryview(b"")
        else:
            whole = set(map(_NBYTES, members)) == {group.nbytes}
            content = memoryview(b"".join(members))
        if not whole or content.nbytes != self.nbytes:
            raise resized()
        return content


class Group:
    """The tensors or the arrays of one data type and shape, in the order in which unpickling will request them.

    For tensors the members are the storages: a tensor may be given another storage at any time, by another thread or
    while an object behind it is pickled, and only a reference to the storage keeps its bytes.
    """

    def __init__(self, of_tensors: bool, dtype: str, shape: tuple[int, ...], writable: bool = True) -> None:
        self.of_tensors, self.dtype, self.shape, self.writable = of_tensors, dtype, shape, writable
        self.strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))  # in elements
        self.nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        self.left = _FEW  # for the codec
        self.members: list[Any] = []
        self.token = pickle.PickleBuffer(bytearray())
        # The same for every member, so the pickle holds its arguments once. An iterator replaces the token.
        self.reduction = next, (self.token,)

    def addresses(self, part: slice = slice(None)) -> np.ndarray[Any, Any]:
        """Where the bytes of tensors are now: `share_memory_` and `resize_` move them."""
        storages = self.members[part]
        return np.fromiter(map(torch.UntypedStorage.data_ptr, storages), np.int64, len(storages))

    def gather(self) -> list[Gathered]:
        """The buffers of all members."""
        each, count = max(1, _BUFFER // self.nbytes), len(self.members)
        return [Gathered(self, first, min(each, count - first)) for first in range(0, count, each)]

    def header(self, buffers: int) -> GroupHeader:
        """Its header, with the number of its buffers."""
        return GroupHeader(self.of_tensors, self.dtype, self.shape, self.writable, buffers)


class Views:
    """The tensors of one data type, shape and stride over one storage, in the order of unpickling."""

    def __init__(self, storage: torch.UntypedStorage, tensor: Tensor) -> None:
        self.storage, self._itemsize = storage, tensor.itemsize
        self._kind = _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.stride()
        last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        self.farthest = storage.nbytes() // self._itemsize - last - 1  # largest offset inside the storage
        self.offsets: list[int] = []
        self._extent = (last + 1) * self._itemsize
        self.token = pickle.PickleBuffer(bytearray())
        self.reduction = next, (self.token,)

    @property
    def span(self) -> tuple[int, int]:
        """The first byte of the storage that they need, and the one after the last."""
        return min(self.offsets) * self._itemsize, max(self.offsets) * self._itemsize + self._extent

    @property
    def header(self) -> ViewsHeader:
        """Their header."""
        return ViewsHeader(*self._kind, np.array(self.offsets, np.int64))


class Groups:
    """The groups of one object that is being pickled, in a process with these mappings."""

    def __init__(self, mappings: Mappings) -> None:
        self._mappings = mappings
        # None: such members are never grouped.
        self._of_tensors: dict[tuple[torch.dtype, torch.Size], Group | None] = {}
        self._of_arrays: dict[tuple[np.dtype[Any], tuple[int, ...], bool], Group | None] = {}
        self._dtype: torch.dtype | None = None  # of the last tensor: most equal the previous one
        self._shape: torch.Size | None = None
        self._group: Group | None = None
        self._of_views: dict[tuple[Any, ...], int | Views] = {}  # by storage; first only their number

    def tensor(self, tensor: Tensor) -> Any:
        """The reduction of a tensor of no subclass and without attributes; None if it is not grouped."""
        try:
            dtype, shape = tensor.dtype, tensor.shape
            if dtype is not self._dtype or shape != self._shape:
                try:
                    group = self._of_tensors[dtype, shape]
                except KeyError:
                    group = self._of_tensors[dtype, shape] = _group(True, _DTYPES.get(dtype), tuple(shape))
                self._dtype, self._shape, self._group = dtype, shape, group
            group = self._group
            if group is None:
                return None
            if group.left:
                group.left -= 1
                return None
            storage, stride = tensor.untyped_storage(), tensor.stride()
            if storage.nbytes() != group.nbytes:
                return self._view(tensor, storage, (storage._cdata, dtype, shape, stride))
            if stride != group.strides:
                return None
            if tensor.requires_grad or tensor.storage_offset():
                return None
            if not tensor.is_cpu or tensor.is_neg():
                return None
        except (RuntimeError, NotImplementedError):  # nested or sparse: without a shape or a storage
            return None
        group.members.append(storage)
        return group.reduction

    def _view(self, tensor: Tensor, storage: torch.UntypedStorage, kind: tuple[Any, ...]) -> Any:
        views = self._of_views.get(kind, 0)
        if isinstance(views, int):
            if views < _FEW:
                self._of_views[kind] = views + 1
                return None
            views = self._of_views[kind] = Views(storage, tensor)
        offset = tensor.storage_offset()
        if tensor.requires_grad or not tensor.is_cpu or tensor.is_neg():
            return None
        if offset > views.farthest:
            return None
        views.offsets.append(offset)  # type: ignore[arg-type] # no SymInt without a compiler
        return views.reduction

    def array(self, array: np.ndarray[Any, Any]) -> Any:
        """The reduction of an array of no subclass; None if it is not grouped."""
        dtype, shape, flags = array.dtype, array.shape, array.flags
        kind = dtype, shape, flags.writeable
        try:
            group = self._of_arrays[kind]
        except KeyError:
            plain = dtype.isbuiltin == 1 and dtype.kind in "biufc"
            group = self._of_arrays[kind] = _group(False, dtype.str if plain else None, *kind[1:])
        if group is None:
            return None
        if group.left:
            group.left -= 1
            return None
        owner = array if array.base is None else array.base
        # An array that owns its memory has it from the heap, not from a file.
        if type(owner) is not np.ndarray or not owner.flags.owndata or not flags.c_contiguous or dtype.metadata:
            return None
        group.members.append(array)
        return group.reduction

    def filled(self) -> list[Group]:
        """The groups that have members."""
        groups = [*self._of_tensors.values(), *self._of_arrays.values()]
        return [group for group in groups if group is not None and group.members]

    def share_memory(self, storages: Iterable[torch.UntypedStorage]) -> bool:
        """Whether a tensor of the groups shares its storage with another one, with one of these, or lies in a file."""
        of_tensors = [group for group in self.filled() if group.of_tensors]
        if not of_tensors:
            return False
        addresses = np.concatenate([group.addresses() for group in of_tensors])
        sizes = np.repeat([group.nbytes for group in of_tensors], [len(group.members) for group in of_tensors])
        others = np.fromiter(map(torch.UntypedStorage.data_ptr, storages), np.int64)
        return (
            len(np.unique(addresses)) < len(addresses)
            or bool(np.isin(addresses, others).any())
            or bool((self._mappings.find(addresses, sizes) >= 0).any())
        )

    def views(self) -> list[Views]:
        """The storages that have views."""
        return [views for views in self._of_views.values() if isinstance(views, Views) and views.offsets]


def _group(of_tensors: bool, dtype: str | None, shape: tuple[int, ...], writable: bool = True) -> Group | None:
    if dtype is None:
        return None
    group = Group(of_tensors, dtype, shape, writable)
    return group if 0 < group.nbytes <= _SMALL else None
