"""Splits any object into a skeleton and raw buffers, and puts it together again without copying.

What it promises:

- `encode` copies no tensor and no contiguous array: its buffers are views of the object's own memory. One buffer
  per *storage span*, lowest to highest byte of a storage that the payload uses, so that a view of a big storage
  stays small and tensors that shared memory share it again. One buffer per NumPy array.
- `decode` copies nothing either: tensors and arrays are views of the buffers it was given, writable where those
  are, and keep them alive.
- What has no such form (quantized, sparse, nested, conjugated tensors, wrapper subclasses) is pickled as torch
  pickles it, with the storages inside it taken out as spans. Everything else is cloudpickle's.

It holds no state but a cache of class definitions, knows nothing of Ray, and may run in any thread.

NOTE [Spans]. The skeleton refers to a buffer by pickle's own opcode for out-of-band buffers, which takes the next
item of an iterable, whatever that is. A tensor's reduction therefore holds a *token*, an empty `PickleBuffer` that
stands for its storage, and `decode` hands out the rebuilt storage in its place: no context, no registry. Spans grow
while the payload is pickled, so tensors carry absolute offsets and the spans' starts follow at the skeleton's end:

    body (pickle) | header (pickle: which buffer each reference means, size and start of each) | header's length
"""

from __future__ import annotations

import functools
import io
import pickle
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from cloudpickle import cloudpickle as by_value
from torch import Tensor
from torch.multiprocessing import reductions

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PROTOCOL = 5
_LENGTH = 4  # bytes of the header's length at the end of a skeleton
_ALIGN = 64  # spans start at a multiple of it: every item size divides it, and so every offset stays whole
_IN_BAND = 256  # bytes; for an array up to this size a buffer of its own costs more than a copy

# Data types that a plain strided tensor can have, by the name that travels; quantized ones need their quantizer.
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NAMES = {d: name for name, d in _DTYPES.items() if not name.startswith(("qint", "quint"))}
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}

# Class -> tracker id and by-value pickle; see NOTE [Classes].
_definitions: weakref.WeakKeyDictionary[type, tuple[str, bytes | None]] = weakref.WeakKeyDictionary()


@dataclass(slots=True, frozen=True)
class Encoded:
    """An object taken apart.

    Attributes:
        skeleton: All but the buffers.
        buffers: Views of the object's own memory, flat bytes. They keep it alive, and may be read-only in name
            only: don't write to them.
    """

    skeleton: bytes
    buffers: list[memoryview]

    @property
    def nbytes(self) -> int:
        """Bytes of skeleton and buffers together."""
        return len(self.skeleton) + sum(buffer.nbytes for buffer in self.buffers)


def encode(obj: object, *, known_classes: bool = False) -> Encoded:
    """Takes an object apart.

    Args:
        obj: Anything that cloudpickle can pickle.
        known_classes: Whether classes that travel by value are named rather than defined, for the way back to the
            process that defined them; see NOTE [Classes].

    Raises:
        RuntimeError: For a tensor that requires grad and is no leaf, in torch's words.
        Exception: Whatever pickling `obj` raises, unchanged; `explain_unpicklable` finds the culprit.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, known_classes)
    pickler.dump(obj)
    buffers: list[memoryview] = []
    uses: list[int] = []
    places: list[tuple[int, int]] = []
    for reference in pickler.references:
        span = pickler.tokens.get(reference)
        if span is None:
            raw, start = reference.raw(), -1
        elif span.index is None:
            span.index = len(buffers)
            start = span.start & -_ALIGN
            raw = memoryview(_memory(span.storage.data_ptr() + start, span.end - start, span.storage))
        else:
            uses.append(span.index)
            continue
        uses.append(len(buffers))
        places.append((raw.nbytes, start))
        buffers.append(raw)
    header = pickle.dumps((uses, places), _PROTOCOL)
    file.write(header)
    file.write(len(header).to_bytes(_LENGTH, "little"))
    return Encoded(file.getvalue(), buffers)


def decode(skeleton: Buffer, buffers: Sequence[Buffer]) -> Any:
    """Puts an object together again.

    Args:
        skeleton: What `encode` made.
        buffers: One for each of `Encoded.buffers`, in order, of the same sizes. Tensors and arrays become views of
            them and keep them alive. An array over a read-only buffer is read-only; a tensor can't say so, and
            writing to it crashes, as with `torch.from_numpy` of a read-only memory map.

    Raises:
        ValueError: If number or sizes of the buffers are not the skeleton's.
    """
    tail = memoryview(skeleton)
    header = tail[-_LENGTH - int.from_bytes(tail[-_LENGTH:], "little") : -_LENGTH]
    uses, places = pickle.loads(header)
    if len(buffers) != len(places):
        raise ValueError(f"the skeleton needs {len(places)} buffers, got {len(buffers)}")
    sources: list[object] = []
    for index, ((nbytes, start), buffer) in enumerate(zip(places, buffers, strict=True)):
        view = memoryview(buffer)
        if view.nbytes != nbytes:
            raise ValueError(f"buffer {index} must have {nbytes} bytes, got {view.nbytes}")
        if view.format != "B" or view.ndim != 1:
            view = view.cast("B")
        sources.append(view if start < 0 else (_storage_over(view), start))
    return pickle.loads(skeleton, buffers=[sources[index] for index in uses])


def writable_copies(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Copies each buffer once, for readers of read-only memory such as Ray's object store.

    One allocation a buffer, so that a small tensor that is kept does not keep a whole batch.
    """
    copies = []
    for buffer in buffers:
        source = np.frombuffer(buffer, np.uint8)
        # torch's allocator: aligned to 64 bytes, and not filled with zeros first.
        copy = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu").numpy()
        copy[:] = source
        copies.append(memoryview(copy))
    return copies


class _Memory:
    """Shows raw memory to NumPy, writable, and keeps its owner alive.

    Not `Tensor.numpy()`: that makes the user's storage non-resizable for good. Not the array's own buffer: NumPy
    exports none for datetimes, and a read-only one would arrive read-only.
    """

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self.owner = owner


def _memory(address: int, nbytes: int, owner: object) -> np.ndarray[Any, Any]:
    return np.asarray(_Memory(address, nbytes, owner))


class _Span:
    """The bytes of one storage that the payload uses, `start` to `end`, and the token that stands for them."""

    __slots__ = ("end", "index", "start", "storage", "token")

    def __init__(self, storage: torch.UntypedStorage, start: int, end: int) -> None:
        self.storage = storage  # kept: another storage could otherwise get its identity
        self.start, self.end = start, end
        self.token = pickle.PickleBuffer(bytearray())  # writable: a read-only one has another opcode
        self.index: int | None = None


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle's, with tensors, storages, arrays and known classes reduced as this module says."""

    def __init__(self, file: io.BytesIO, known_classes: bool) -> None:
        self.references: list[pickle.PickleBuffer] = []  # in the order in which unpickling asks for them
        super().__init__(file, protocol=_PROTOCOL, buffer_callback=self.references.append)
        self.known_classes = known_classes
        self.spans: dict[int, _Span] = {}
        self.tokens: dict[pickle.PickleBuffer, _Span] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor:
            return self._tensor(obj)
        if kind is np.ndarray:
            return self._array(obj)
        if issubclass(kind, Tensor):
            return self._subclass(obj, kind)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            return self._storage(obj)
        if isinstance(obj, torch.TypedStorage) and obj._untyped_storage.device.type == "cpu":
            exact = kind is torch.TypedStorage
            return (reductions.reduce_typed_storage if exact else reductions.reduce_typed_storage_child)(obj)
        if kind is np.memmap and (reduced := self._array(obj.view(np.ndarray))) is not NotImplemented:
            attributes = {name: value for name, value in vars(obj).items() if name != "_mmap"}
            return _memmap, (attributes, *reduced[1])
        if kind is types.FunctionType and obj.__module__ == __name__:
            return NotImplemented  # spares our own functions cloudpickle's search for them
        if self.known_classes and issubclass(kind, type):
            return self._class(obj)
        return super().reducer_override(obj)

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            reductions.reduce_tensor(tensor)  # refuses, in torch's words
        place = self._place(tensor)
        state = tensor.__dict__ or None
        if place is not None:
            return (_tensor, place) if state is None else (_tensor, place, state, None, None, _set_state)
        if tensor.layout in _SPARSE:
            return _sparse, tensor._reduce_ex_internal(_PROTOCOL)[1], state, None, None, _set_state
        return NotImplemented

    def _subclass(self, tensor: Tensor, kind: type[Tensor]) -> Any:
        own_pickling = kind.__reduce_ex__ is not Tensor.__reduce_ex__
        if own_pickling or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return NotImplemented  # a Parameter's holds its `data`, which comes back here as a plain tensor
        with torch._C.DisableTorchFunctionSubclass():
            if (place := self._place(tensor)) is None:
                return NotImplemented
            return _tensor, (*place, kind), torch._utils._get_obj_state(tensor), None, None, _set_state

    def _place(self, tensor: Tensor) -> tuple[Any, ...] | None:
        """The arguments of `_tensor`, or None if `tensor` is more than a strided view of CPU memory."""
        dtype = tensor.dtype
        name = _NAMES.get(dtype)
        if name is None or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor():
            return None
        offset, size, stride = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        last = offset
        for count, step in zip(size, stride, strict=True):
            if count == 0:
                return None, name, offset, size, stride, tensor.requires_grad
            last += (count - 1) * step
        storage, itemsize = tensor.untyped_storage(), dtype.itemsize
        if (last + 1) * itemsize > storage.nbytes():
            return None  # its storage was shrunk under it: torch's pickling decides
        token = self._token(storage, offset * itemsize, (last + 1) * itemsize)
        return token, name, offset, size, stride, tensor.requires_grad

    def _token(self, storage: torch.UntypedStorage, start: int, end: int) -> pickle.PickleBuffer:
        span = self.spans.get(storage._cdata)
        if span is None:
            span = self.spans[storage._cdata] = _Span(storage, start, end)
            self.tokens[span.token] = span
        else:
            span.start, span.end = min(span.start, start), max(span.end, end)
        return span.token

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        nbytes = storage.nbytes()
        return (_whole, (self._token(storage, 0, nbytes),)) if nbytes else (torch.UntypedStorage, (0,))

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        dtype = array.dtype
        if dtype.hasobject or array.nbytes == 0:
            return NotImplemented
        strides = None
        if not array.flags.c_contiguous:
            # As NumPy's pickling: memory order is kept if it is dense in some order of the axes, else C order.
            axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
            if array.transpose(axes).flags.c_contiguous:
                strides = array.strides
            else:
                array = array.copy("C")
        content = _memory(array.__array_interface__["data"][0], array.nbytes, array)
        buffer = bytearray(content) if array.nbytes <= _IN_BAND else pickle.PickleBuffer(content)
        plain = dtype.isbuiltin == 1 and dtype.metadata is None
        return _array, (buffer, array.shape, dtype.str if plain else dtype, strides)

    def _class(self, cls: type) -> Any:
        """NOTE [Classes].

        Cloudpickle sends the classes of `__main__` and notebooks by value, under an id, and a process that knows
        the id has its class overwritten, attribute by attribute. From driver to worker that is wanted: a warm
        worker gets to see changed methods. A batch must not do it to the driver's class, so there the id travels,
        with the definition in its wake for a process that does not know it (any more).
        """
        definition = _definitions.get(cls)
        if definition is None:
            reduced = super().reducer_override(cls)
            if reduced is NotImplemented or reduced[0] not in _MAKERS:
                return reduced
            try:
                text = cloudpickle.dumps(cls, _PROTOCOL)
            except Exception:
                text = None  # something unpicklable was put into it here; who knows the id does not need it
            definition = _definitions[cls] = (by_value._get_or_create_tracker_id(cls), text)
        return _known_class, definition


_MAKERS = (by_value._make_skeleton_class, by_value._make_skeleton_enum)


def _storage_over(view: memoryview) -> torch.UntypedStorage:
    if view.readonly:  # torch.frombuffer would warn
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return torch.from_numpy(_memory(address, view.nbytes, view)).untyped_storage()
    return torch.frombuffer(view, dtype=torch.uint8).untyped_storage()


# What skeletons call. A span arrives as its storage and the byte of the original storage at which that starts.


def _tensor(
    span: tuple[torch.UntypedStorage, int] | None,
    name: str,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    kind: type[Tensor] = Tensor,
) -> Tensor:
    dtype = _DTYPES[name]
    storage, start = span or (torch.UntypedStorage(0), 0)
    # An explicit device: the user may have set another default one.
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    tensor.set_(storage, offset - start // dtype.itemsize, size, stride)  # type: ignore[call-overload]
    if kind is not Tensor:
        tensor = tensor.as_subclass(kind)
    if requires_grad:
        with torch._C.DisableTorchFunctionSubclass():
            tensor.requires_grad_()
    return tensor


def _set_state(tensor: Tensor, state: object) -> None:
    torch._tensor._rebuild_from_type_v2(lambda: tensor, type(tensor), (), state)


def _sparse(layout: torch.layout, parts: tuple[Any, ...]) -> Tensor:
    # Not torch's own function: it keeps every tensor in a list that only torch.load empties.
    if layout is torch.sparse_coo:
        *parts_, coalesced = parts
        return torch.sparse_coo_tensor(*parts_, check_invariants=False, is_coalesced=coalesced)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _whole(span: tuple[torch.UntypedStorage, int]) -> torch.UntypedStorage:
    return span[0]


def _array(
    buffer: Buffer, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, buffer, 0, strides)


def _memmap(attributes: dict[str, object], *place: Any) -> np.ndarray[Any, Any]:
    array = _array(*place).view(np.memmap)
    vars(array).update(attributes)
    return array


def _known_class(tracker_id: str, definition: bytes | None) -> type:
    cls: type | None = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker_id)
    if cls is None and definition is None:
        raise pickle.UnpicklingError(
            "a class of the batch is unknown here and its definition can't be pickled"
        )
    return cls or _Definition(io.BytesIO(definition)).load()


class _Definition(pickle.Unpickler):
    """Loads a class by value and leaves alone the classes it refers to that this process has."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if found in _MAKERS:
            return functools.partial(self._make, found)
        return self._fill if found is by_value._class_setstate else found

    def _make(self, maker: Callable[..., type], *args: Any) -> type:
        known: type | None = by_value._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
        if known is None:
            known = maker(*args)
            self._new = (*getattr(self, "_new", ()), known)
        return known

    def _fill(self, cls: type, state: object) -> type:
        if any(cls is new for new in getattr(self, "_new", ())):
            by_value._class_setstate(cls, state)
        return cls


# Finding what can't be pickled.


def explain_unpicklable(obj: object, name: str) -> str | None:
    """Names the part of `obj` that `encode` fails on, and the remedy.

    Args:
        obj: What could not be encoded.
        name: How the user knows it; paths start with it.

    Returns:
        A line such as `dataset.lock: _thread.lock can't be sent to a worker (...); create it in ...`, or None if
        nothing was found. It never raises. It looks at no more than 2000 objects, 6 levels deep.
    """
    try:
        return _culprit(obj, name, 6, iter(range(2000)), [])
    except Exception:
        return None


def _culprit(obj: object, path: str, depth: int, budget: Iterator[int], above: list[object]) -> str | None:
    if next(budget, None) is None or any(obj is one for one in above):
        return None
    try:
        encode(obj)
        return None
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    for suffix, part in _parts(obj) if depth else ():
        if found := _culprit(part, path + suffix, depth - 1, budget, [*above, obj]):
            return found
    kind = type(obj)
    remedy = "create it in worker_init_fn or lazily on first use, or drop it in __getstate__"
    if "multiprocessing" in kind.__module__:
        remedy = f"share numbers through a tensor after tensor.share_memory_(), or {remedy}"
    return f"{path}: {kind.__module__}.{kind.__qualname__} can't be sent to a worker ({reason}); {remedy}"


def _parts(obj: Any) -> Iterator[tuple[str, object]]:
    """What pickling `obj` pickles, each with what it adds to the path."""
    if isinstance(obj, dict):
        yield from ((f"[{key!r:.40}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, types.FunctionType):
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True):
            yield f".<closure>.{name}", cell.cell_contents
        for name in obj.__code__.co_names:
            if name in obj.__globals__:
                yield f".<globals>.{name}", obj.__globals__[name]
    elif isinstance(obj, types.MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, type):
        yield from ((f".{name}", value) for name, value in vars(obj).items())
    else:  # by its reduction, not its attributes: __getstate__ may drop some
        _, args, *rest = obj.__reduce_ex__(_PROTOCOL)
        for state in (*(rest[0] if rest and isinstance(rest[0], tuple) else rest[:1]), args):
            if isinstance(state, dict):
                yield from ((f".{name}", value) for name, value in state.items())
            elif state is not None:
                yield "", state
