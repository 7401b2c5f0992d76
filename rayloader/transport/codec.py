"""Splits any object into a skeleton and raw buffers, and puts it together again without copying.

- `encode` copies no tensor and no contiguous array: its buffers are views of the object's own memory. There is
  one for each *storage span*, lowest to highest byte of a storage that the payload uses, so that a view of a big
  storage stays small and tensors that shared memory share it again; and one for each NumPy array.
- `decode` makes tensors and arrays views of its buffers: writable where those are, and keeping them alive.
- Batches of plain tensors have a skeleton of their own, see plain.py. Of replicas, many small tensors and arrays of one
  kind go together, see bulk.py.
- Quantized, sparse, nested, conjugated tensors and wrapper subclasses are pickled as torch pickles them, with
  the storages inside taken out as spans. Anything else is cloudpickle's.

No state beside caches. Any thread may call; Ray is unknown here.

NOTE [Spans]. Pickle's opcode for out-of-band buffers takes the next item of an iterable, whatever that is. So a
tensor's reduction holds a *token*, an empty `PickleBuffer` that stands for its storage, and `decode` hands out
the rebuilt storage in its place: no context, no registry. Spans grow while the payload is pickled; hence tensors
carry absolute offsets, and the spans' starts follow at the end of the skeleton, which is

    body (a pickle) | header (a pickle: buffer of each reference; size, start of each buffer; groups) | its length
"""

from __future__ import annotations

import functools
import io
import mmap
import operator
import pickle
import sys
import types
from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cloudpickle
import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds
from torch import Tensor
from torch.multiprocessing import reductions
from torch.utils.hooks import RemovableHandle, warn_if_has_hooks

from rayloader._compat import DataPipeWrapper, no_torch_function, rebuild_from_type, state_of_subclass
from rayloader.state.generator_kinds import KINDS
from rayloader.state.generators import reduce_generator
from rayloader.transport import bulk, classes, handles, plain
from rayloader.transport.raw import DTYPES, NAMES, flat_bytes, memory, storage_over

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from rayloader.transport.mapped import Mappings

_PROTOCOL = 5
_LENGTH = 4  # bytes of the header's length
_ALIGN = 64  # bytes; every item size divides it, so offsets relative to a span stay whole
_MAPPED = 1 << 20  # bytes; copies from this size on are not taken from the heap
_SWAPPED = ">" if sys.byteorder == "little" else "<"  # a byte order that is not this machine's
_IN_BAND = 256  # bytes; an array up to this size costs less as a copy than as a buffer of its own

_NO_BUFFERS = pickle.dumps(([], [], [], [], []), _PROTOCOL)
_NO_BUFFERS += len(_NO_BUFFERS).to_bytes(_LENGTH, "little")
_INT = {int}
_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # of a tensor: dicts by number
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class Encoded(NamedTuple):
    """An object taken apart.

    Attributes:
        skeleton: All but the buffers.
        buffers: The object's own memory as flat bytes, kept alive. Not to be written to, whatever they say.
        carried: Parts of the object that travel as they are.
        gathered: Of a replica: more buffers, behind the others.
        shared: Of a replica: the storages in torch's shared memory, whole, by the number of their buffer.
        overlap: Of a replica: two arrays, or an array and a tensor, that share memory and will not do so when decoded,
            in words; there may be more, and of many of a kind only the first few are looked at.
    """

    skeleton: bytes
    buffers: list[memoryview]
    carried: list[Any]
    gathered: Sequence[bulk.Gathered] = ()
    shared: Mapping[int, torch.UntypedStorage] = MappingProxyType({})
    overlap: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of skeleton and buffers together."""
        buffers = sum(buffer.nbytes for buffer in self.buffers) + sum(buffer.nbytes for buffer in self.gathered)
        return len(self.skeleton) + buffers


def encode(
    obj: object, *, known_classes: bool = False, carry: tuple[type, ...] = (), mapped: Mappings | None = None
) -> Encoded:
    """Takes an object apart.

    Args:
        obj: Anything that cloudpickle can pickle.
        known_classes: Name the classes that travel by value instead of defining them, for the way back to the
            process that they came from; see classes.py.
        carry: Types whose instances are left to whoever transports the rest, such as Ray's references.
        mapped: For replicas: the file-backed memory of this process, which must not be copied, however small an
            array is, or in whatever steps it goes through it. Arrays that go through the same memory more than once
            keep doing so. And a replica's random generators can be noted when it is decoded, see
            generators.py.

    Raises:
        Exception: Whatever pickling `obj` raises, unchanged; `unpicklable.explain` finds the culprit. A tensor
            that requires grad and is no leaf is refused in torch's words.
    """
    if type(obj) is int or (type(obj) is list and set(map(type, obj)) == _INT):  # a sample's index, or a batch's
        return Encoded(pickle.dumps(obj, _PROTOCOL) + _NO_BUFFERS, [], [])
    if mapped is None and (simple := plain.encode(obj)) is not None:
        return Encoded(*simple, [])
    file = io.BytesIO()
    pickler = _Pickler(file, known_classes, carry, mapped)
    pickler.dump(obj)
    buffers: list[memoryview] = []
    shared: dict[int, torch.UntypedStorage] = {}
    uses: list[int] = []
    places: list[tuple[int, int]] = []
    groups = pickler.groups.filled() if pickler.groups is not None else []
    views = pickler.groups.views() if pickler.groups is not None else []
    over = [pickler._token(some.storage, *some.span) for some in views]
    replaced = pickler.replace_members(groups)
    tokens = *(group.token for group in groups), *(some.token for some in views)
    in_bulk = {token: number for number, token in enumerate(tokens)}
    for reference in (*pickler.references, *(token for *_, token in replaced), *over):
        if reference in in_bulk:
            uses.append(in_bulk[reference])
            continue
        if reference in pickler.carried:
            uses.append(-1 - pickler.carried[reference])
            continue
        span = pickler.tokens.get(reference)
        if span is None:
            raw, start = reference.raw(), -1
        elif span.index is None:
            if span.end > span.storage.nbytes():
                raise bulk.resized()
            span.index, start = len(buffers), span.start & -_ALIGN
            raw = memoryview(memory(span.storage.data_ptr() + start, span.end - start, span.storage))
            if span.shared:
                shared[span.index] = span.storage
        else:
            uses.append(len(in_bulk) + span.index)
            continue
        uses.append(len(in_bulk) + len(buffers))
        places.append((raw.nbytes, start))
        buffers.append(raw)
    gathered = [group.gather() for group in groups]
    headers = [
        bulk.GroupHeader(group.of_tensors, group.dtype, group.shape, group.writable, len(parts))
        for group, parts in zip(groups, gathered, strict=True)
    ]
    of_bulk = headers, [where for *where, _ in replaced], [some.header for some in views]
    header = pickle.dumps((uses, places, *of_bulk), _PROTOCOL)
    file.write(header)
    file.write(len(header).to_bytes(_LENGTH, "little"))
    return Encoded(file.getvalue(), buffers, pickler.carried_objects, list(chain(*gathered)), shared, pickler.overlap())


def decode(skeleton: Buffer, buffers: Sequence[Buffer | torch.UntypedStorage], carried: Sequence[Any] = ()) -> Any:
    """Puts an object together again.

    Args:
        skeleton: What `encode` made.
        buffers: One for each of `Encoded.buffers`, same order and sizes. Tensors and arrays become views of
            them. Over a read-only buffer an array is read-only; a tensor can't be, and writing to it crashes, as
            with `torch.from_numpy` of a read-only memory map. A storage stands for its memory, and tensors get that
            very storage.
        carried: `Encoded.carried`, or what stands for it here.

    Raises:
        ValueError: The number or a size of the buffers is not the skeleton's.
    """
    tail = memoryview(skeleton)
    if tail[0] == plain.MARK:
        return plain.decode(bytes(skeleton), cast("Sequence[Buffer]", buffers))  # of a batch, not a replica
    if tail[-len(_NO_BUFFERS) :] == _NO_BUFFERS and not buffers:
        return pickle.loads(skeleton)
    header = _header(bytes(tail[-_LENGTH - int.from_bytes(tail[-_LENGTH:], "little") : -_LENGTH]))
    count = len(header.places) + sum(group.buffers for group in header.groups)
    if len(buffers) != count:
        raise ValueError(f"decode needs the skeleton's {count} buffers, got {len(buffers)}")
    rest = iter([memoryview(cast("Buffer", buffer)) for buffer in buffers[len(header.places) :]])
    in_bulk = [*(bulk.remake(group, rest) for group in header.groups), *([] for _ in header.views)]
    sources: list[Any] = [*map(iter, in_bulk)]
    for number, (buffer, (nbytes, start)) in enumerate(zip(buffers, header.places, strict=False)):
        if isinstance(buffer, torch.UntypedStorage):
            view = memory(buffer.data_ptr(), nbytes, buffer)
            sources.append(view if start < 0 else (buffer, start))
            continue
        view = flat_bytes(buffer, nbytes, number)
        sources.append(view if start < 0 else (storage_over(view), start))
    tokens = [sources[index] if index >= 0 else carried[-1 - index] for index in header.uses]
    spans = iter(tokens[len(tokens) - len(header.replaced) - len(header.views) :])
    for number, place in header.replaced:
        member = in_bulk[number][place]
        in_bulk[number][place] = _tensor(
            next(spans), header.groups[number].dtype, 0, member.shape, member.stride(), False
        )
    for number, views in enumerate(header.views, start=len(header.groups)):
        in_bulk[number] += bulk.remake_views(views, *next(spans))
    return pickle.loads(skeleton, buffers=tokens)


@functools.lru_cache(maxsize=64)
def _header(header: bytes) -> _Header:
    return _Header(*pickle.loads(header))


class _Header(NamedTuple):
    """What the end of a skeleton says; the last three of replicas only."""

    uses: list[int]  # what each reference stands for: part in bulk or, behind those, buffer; or -1 - carried
    places: list[tuple[int, int]]  # of the buffers: size, start in the storage or -1
    groups: list[bulk.GroupHeader]
    replaced: list[tuple[int, int]]  # group, and place in it; the spans are behind the other uses
    views: list[bulk.ViewsHeader]  # their spans are the last uses


def writable_copies(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Copies each buffer once, for readers of read-only memory such as Ray's object store.

    One allocation a buffer, so that a small tensor that is kept does not keep a whole batch.
    """
    copies = []
    for buffer in buffers:
        source = np.frombuffer(memoryview(buffer), np.uint8)
        copy = new_memory(source.nbytes)
        np.frombuffer(copy, np.uint8)[:] = source
        copies.append(copy)
    return copies


def new_memory(nbytes: int) -> memoryview:
    """Writable bytes of their own, with whatever was there.

    Many are mapped: the heap would cut what is kept out of the room that they leave, and could give nothing of it back.
    """
    memory: Any
    if nbytes >= _MAPPED:
        memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    else:  # torch's allocator aligns to 64 bytes and does not fill with zeros first
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
    return memoryview(memory)


class _Span:
    """The bytes `start` to `end` of one storage, and the token that stands for them."""

    __slots__ = ("end", "index", "shared", "start", "storage", "token")

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int, *, shared: bool) -> None:
        self.storage = storage  # kept: else another storage could get its identity
        self.shared = shared
        self.start, self.end = start, end
        self.token = pickle.PickleBuffer(bytearray())  # writable: a read-only one has an opcode of its own
        self.index: int | None = None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, known_classes: bool, carry: tuple[type, ...], mapped: Mappings | None) -> None:
        self.references: list[pickle.PickleBuffer] = []  # in the order in which unpickling will ask for them
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=self.references.append)
        self.known_classes = known_classes
        self.carry = carry
        self.mapped = mapped
        self.groups = None if mapped is None else bulk.Groups()
        self.ordinary: set[type] = set()  # types whose instances are pickled as their class says
        self.carried: dict[pickle.PickleBuffer, int] = {}  # place in `carried_objects` of what a token stands for
        self.carried_objects: list[Any] = []
        self.spans: dict[int, _Span] = {}
        self.tokens: dict[pickle.PickleBuffer, _Span] = {}
        self.arrays: list[tuple[np.ndarray[Any, Any], int, int]] = []  # of a replica: with address and bytes

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor:
            if self.groups is not None and not obj.__dict__ and (reduction := self.groups.tensor(obj)) is not None:
                return reduction
            if self.mapped is not None:
                return self._with_autograd(obj, self._tensor(obj))
            if obj._backward_hooks:
                warn_if_has_hooks(obj)  # as between torch's processes
            return self._tensor(obj)
        if kind in self.ordinary:
            return NotImplemented
        if kind is np.ndarray:
            if self.groups is not None and (reduction := self.groups.array(obj)) is not None:
                return reduction
            return self._array(obj)
        if issubclass(kind, Tensor):
            reduction = self._subclass(obj, kind)
            if self.mapped is not None:
                return self._with_autograd(obj, reduction)
            with no_torch_function():
                warn_if_has_hooks(obj)
            return reduction
        if kind in self.carry:
            token = pickle.PickleBuffer(bytearray())
            self.carried[token] = len(self.carried_objects)
            self.carried_objects.append(obj)
            return _carried, (token,)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            nbytes = obj.nbytes()
            return (operator.getitem, (self._token(obj, 0, nbytes), 0)) if nbytes else (torch.UntypedStorage, (0,))
        if kind is torch.TypedStorage and obj._untyped_storage.device.type == "cpu":
            return reductions.rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
        if kind is np.memmap and (reduced := self._array(obj.view(np.ndarray))) is not NotImplemented:
            return _memmap, ({k: v for k, v in vars(obj).items() if k != "_mmap"}, *reduced[1])
        if kind is types.FunctionType and obj.__module__ == __name__:
            return NotImplemented  # spares our own functions cloudpickle's search
        if self.mapped is not None and (reduction := handles.reduce(obj, kind)) is not None:
            return reduction
        if kind.__module__ == "multiprocessing.connection" and hasattr(obj, "fileno"):
            # Its pickle is the number of a descriptor, which is another one's elsewhere.
            raise TypeError(f"cannot pickle {kind.__name__!r} object: a descriptor of this process")
        if kind is io.TextIOWrapper and obj is not sys.stdout and obj is not sys.stderr:
            # cloudpickle would send the text, in a StringIO in which the offsets of `tell` lead to other places.
            raise TypeError(f"cannot pickle {kind.__name__!r} object: an open file")
        if self.mapped is not None and issubclass(kind, DataPipeWrapper):
            return kind, (obj._datapipe,)  # its own way is plain pickle's, which leaves what __main__ has to __main__
        if self.mapped is not None and issubclass(kind, KINDS):
            return reduce_generator(obj, self._reduced)
        if issubclass(kind, type):
            if self.known_classes:
                return classes.reduce_by_id(obj, super().reducer_override)
            return classes.with_slots(obj, super().reducer_override(obj))
        if not issubclass(kind, types.FunctionType):  # cloudpickle's own are of these
            self.ordinary.add(kind)
            return NotImplemented
        return super().reducer_override(obj)

    def _reduced(self, obj: Any) -> Any:
        """As if this class had no `reducer_override`."""
        reduce = self.dispatch_table.get(type(obj))
        return reduce(obj) if reduce is not None else obj.__reduce_ex__(_PROTOCOL)

    def replace_members(self, groups: Sequence[bulk.Group]) -> list[tuple[int, int, pickle.PickleBuffer]]:
        """The members of groups that must be over a span: group, place in it, token."""
        if self.mapped is None:
            return []
        replaced = []
        storages = [span.storage.data_ptr() for span in self.spans.values()]
        for group, place in bulk.not_alone(groups, self.mapped, storages):
            token = self._token(groups[group].members[place], 0, groups[group].nbytes)
            replaced.append((group, place, token))
        return replaced

    def overlap(self) -> tuple[str, str] | None:
        """As `Encoded.overlap`. Memory that is a file's is shared by all that refer to it.

        Raises:
            ValueError: an array was resized after it was pickled.
        """
        stretches = []
        for array, low, nbytes in self.arrays:
            if (_address(array), array.nbytes) != (low, nbytes):
                raise bulk.resized()
            dense = array.flags.forc  # else only its first item is sure not to be a gap
            high = low + (nbytes if dense else min(nbytes, array.itemsize))
            stretches.append((low, high, f"an array of shape {array.shape}"))
        if not stretches:
            return None
        for span in self.spans.values():
            low = span.storage.data_ptr()
            stretches.append((low + span.start, low + span.end, "a tensor"))
        farthest, before = 0, ""
        for low, high, what in sorted(stretches):
            if low < min(high, farthest) and low not in cast("Mappings", self.mapped):
                return before, what
            if high > farthest:
                farthest, before = high, what
        return None

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            reductions.reduce_tensor(tensor)  # refuses
        state = tensor.__dict__ or None
        if (place := self._place(tensor)) is not None:
            return (_tensor, place) if state is None else (_tensor, place, state, None, None, _set_state)
        if tensor.layout in _SPARSE:
            plain = tensor if self.mapped is None else tensor.detach()  # whose values are no part of a graph
            return _sparse, plain._reduce_ex_internal(_PROTOCOL)[1], state, None, None, _set_state
        return NotImplemented

    def _with_autograd(self, tensor: Tensor, reduction: Any) -> Any:
        """A reduction of a replica's tensor, with what autograd keeps of it and torch's pickling leaves out."""
        with no_torch_function():
            if not tensor.is_leaf:
                return reduction
            kept = {name: hooks for name in _HOOKS if (hooks := getattr(tensor, name))}
            if tensor.grad is not None:
                kept["grad"] = tensor.grad
            if tensor.requires_grad and tensor.layout in _SPARSE:
                kept["requires_grad"] = True
        if not kept:
            return reduction
        if reduction is NotImplemented:
            reduction = self._reduced(tensor)
        state = reduction[2] if len(reduction) > 2 else None
        return *reduction[:2], (state, kept), None, None, _set_autograd

    def _subclass(self, tensor: Tensor, kind: type[Tensor]) -> Any:
        # A Parameter pickles its `data`, which comes back here as a plain tensor.
        own_pickling = kind.__reduce_ex__ is not Tensor.__reduce_ex__
        if own_pickling or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return NotImplemented
        with no_torch_function():
            if (place := self._place(tensor)) is None:
                return NotImplemented
            return _tensor, (*place, kind), state_of_subclass(tensor), None, None, _set_state

    def _place(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """The arguments of `_tensor`, or None if `tensor` is not just a strided view of CPU memory."""
        dtype = tensor.dtype
        name = NAMES.get(dtype)
        if name is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if tensor.is_neg() or tensor.is_conj():
            return None
        offset, size, stride = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        end: int = offset + 1  # type: ignore[assignment] # no SymInt without a compiler
        for count, step in zip(size, stride, strict=True):
            if count == 0:
                return None, name, offset, size, stride, tensor.requires_grad
            end += (count - 1) * step
        storage, itemsize = tensor.untyped_storage(), dtype.itemsize
        if end * itemsize > storage.nbytes():
            return None  # the storage was shrunk under the tensor
        token = self._token(storage, int(offset) * itemsize, end * itemsize)
        return token, name, offset, size, stride, tensor.requires_grad

    def _token(self, storage: torch.UntypedStorage, start: int, end: int) -> pickle.PickleBuffer:
        span = self.spans.get(storage._cdata)
        if span is None:
            # Of shared memory in a replica, the whole storage: it is opened again, not copied.
            shared = self.mapped is not None and storage.is_shared()
            start, end = (0, storage.nbytes()) if shared else (start, end)
            span = self.spans[storage._cdata] = _Span(storage, start, end, shared=shared)
            self.tokens[span.token] = span
        else:
            span.start, span.end = min(span.start, start), max(span.end, end)
        return span.token

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype, strides = array.dtype, None
        writable = True  # as all arrays are after the pickling between torch's processes
        if self.mapped is not None:
            self.arrays.append((array, _address(array), array.nbytes))
            writable = array.flags.writeable
        if dtype.hasobject or dtype.itemsize == 0:
            if dtype.hasobject and not writable:
                return *self._reduced(array), None, None, _set_read_only
            return NotImplemented
        if self.mapped is None and dtype.byteorder == _SWAPPED:  # as NumPy's pickling between torch's processes
            dtype = dtype.newbyteorder("=")
            array = array.astype(dtype)
        if self.mapped is not None and array.nbytes and not array.flags.c_contiguous:
            low, high = byte_bounds(array)
            if low in self.mapped or high - low <= array.nbytes:
                content = memory(low, high - low, array)
                offset = _address(array) - low
                return _array, (pickle.PickleBuffer(content), array.shape, dtype, array.strides, offset, writable)
        if not array.flags.c_contiguous:
            # As in NumPy's pickling: memory that is dense in some order of the axes keeps it, else C order.
            axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            if array.transpose(axes).flags.c_contiguous:
                strides = array.strides
            else:
                array = array.copy("C")
        address = _address(array)
        content = memory(address, array.nbytes, array)
        in_band = array.nbytes <= _IN_BAND and (self.mapped is None or address not in self.mapped)
        buffer = bytearray(content) if in_band else pickle.PickleBuffer(content)
        by_name = dtype.isbuiltin == 1 and dtype.metadata is None
        place = buffer, array.shape, dtype.str if by_name else dtype, strides
        return _array, (place if writable else (*place, 0, False))


def _address(array: np.ndarray[Any, Any]) -> int:
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


# What skeletons call. A span arrives as (storage, the byte of the original storage at which it starts).


def _tensor(span: Any, name: str, offset: int, size: Any, stride: Any, grad: bool, kind: Any = Tensor) -> Tensor:
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


def _carried(obj: Any) -> Any:
    return obj


def _set_state(tensor: Tensor, state: object) -> None:
    rebuild_from_type(lambda: tensor, type(tensor), (), state)


def _set_autograd(tensor: Tensor, both: tuple[object, dict[str, Any]]) -> None:
    state, kept = both
    if state is not None:
        _set_state(tensor, state)
    with no_torch_function():
        for name, value in kept.items():
            setattr(tensor, name, value)
            if name in _HOOKS:  # the next hook gets another number
                RemovableHandle.next_id = max(RemovableHandle.next_id, *(number + 1 for number in value))


def _sparse(layout: torch.layout, parts: tuple[Any, ...]) -> Tensor:
    # Not torch's own function: that also appends the tensor to a list which only torch.load empties.
    if layout is torch.sparse_coo:
        *data, coalesced = parts
        return torch.sparse_coo_tensor(*data, check_invariants=False, is_coalesced=coalesced)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _array(
    buffer: Any,
    shape: tuple[int, ...],
    dtype: Any,
    strides: tuple[int, ...] | None,
    offset: int = 0,
    writable: bool = True,
) -> Any:
    array = np.ndarray(shape, dtype, buffer, offset, strides)
    if not writable:
        array.flags.writeable = False
    return array


def _set_read_only(array: np.ndarray[Any, Any], state: Any) -> None:
    array.__setstate__(state)
    array.flags.writeable = False


def _memmap(attributes: dict[str, object], *place: Any) -> Any:
    array = _array(*place).view(np.memmap)
    vars(array).update(attributes)
    return array
