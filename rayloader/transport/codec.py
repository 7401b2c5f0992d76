"""Splits any object into a skeleton and raw buffers, and reassembles it without copying.

- `encode` copies no tensor and no contiguous array: its buffers are views of the object's own memory. There is
  one for each *storage span*, lowest to highest byte of a storage that the payload uses, so that a view of a big
  storage stays small and tensors that shared memory share it again; and one for each NumPy array.
- `decode` makes tensors and arrays views of its buffers: writable where those are, and keeping them alive.
- A *plain* batch has a skeleton of its own, see NOTE [Plain batches].
- Everything else is pickled in the skeleton, see pickler.py.

No state besides caches. Any thread may call; this module does not import Ray.

NOTE [Spans]. Pickle's opcode for out-of-band buffers takes the next item of an iterable, whatever that is. So a
tensor's reduction holds a *token*, an empty `PickleBuffer` that represents its storage, and `decode` returns
the rebuilt storage in its place: no context, no registry. Spans grow while the payload is pickled; so tensors
carry absolute offsets, and the spans' starts follow at the end of the skeleton, which is

    body (a pickle) | header (a pickle: buffer of each reference; size, start of each buffer) | its length

NOTE [Plain batches]. Most batches are a dense contiguous tensor, or a tuple, list or dict of some, each with a storage
of its own, and are like the batch before. Pickling them costs more than all the rest of their transport, so their
skeleton only describes the parts, and both ends remember the skeletons that they met last. Samples often hold a few
values beside tensors, such as a label: these differ each time, and follow such a skeleton in a pickle of their own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayloader.transport import raw
from rayloader.transport.pickler import PROTOCOL, Pickler

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LENGTH = 4  # bytes of the header's length
_VALUES_AT = 1 + _LENGTH  # where the description of the parts begins in a skeleton with values, after its length
_ALIGN = 64  # bytes; every item size divides it, so offsets relative to a span remain whole numbers

_NO_BUFFERS = pickle.dumps(([], []), PROTOCOL)
_NO_BUFFERS += len(_NO_BUFFERS).to_bytes(_LENGTH, "little")
_INDICES = {int, type(None)}  # an iterable dataset's are None
PLAIN, _LABELLED = 0, 1  # first byte of the skeleton of a plain batch, and of one with values; a pickle's is another
_PLAIN_PARTS = {Tensor, int, float, bool, str, bytes, type(None)}
_KINDS: tuple[type, ...] = (Tensor, tuple, list, dict)
_CACHED = 64  # skeletons
_MOST_DIMENSIONS = 32  # of a NumPy array, in any version

_Spec = tuple[str, tuple[int, ...], tuple[int, ...], int]  # of a tensor: dtype's name, size, stride, bytes


class Fresh(NamedTuple):
    """A tensor that only the collate function has had, which made it plain, contiguous and in memory of its own."""

    tensor: Tensor
    memory: memoryview  # its bytes, flat


NOT_FRESH: Mapping[int, Fresh] = MappingProxyType({})


class Encoded(NamedTuple):
    """An object in parts.

    Attributes:
        skeleton: everything except the buffers.
        buffers: the object's own memory as flat bytes, kept alive. Do not write to them, even if they are writable.
        carried: parts of the object that travel unchanged.
    """

    skeleton: bytes
    buffers: Sequence[memoryview]
    carried: Sequence[Any]


def encode(
    obj: object,
    *,
    known_classes: bool = False,
    carry: tuple[type, ...] = (),
    fresh: Mapping[int, Fresh] = NOT_FRESH,
) -> Encoded:
    """Splits a batch, its indices, or a part of one.

    Args:
        obj: anything that cloudpickle can pickle.
        known_classes: for the way back to the process that classes and functions came from: what lies here where its
            name says goes by that name. See NOTE [The driver's classes] in pickler.py.
        carry: types whose instances are left to the transport of the rest, such as Ray's references.
        fresh: see `_encode_plain`.

    Raises:
        Exception: any error of pickling `obj`, unchanged. A tensor that requires grad and is no leaf is refused in
            torch's words.
    """
    if type(obj) in _INDICES or (type(obj) is list and set(map(type, obj)) <= _INDICES):  # a sample's, or a batch's
        return Encoded(pickle.dumps(obj, PROTOCOL) + _NO_BUFFERS, (), ())
    if (simple := _encode_plain(obj, fresh)) is not None:
        return Encoded(*simple, ())
    return encode_by(Pickler(known_classes, carry), obj)


def encode_by(pickler: Pickler, obj: object) -> Encoded:
    """Splits an object as a pickler of its own pickles it; raises as `encode`."""
    pickler.dump(obj)
    buffers: list[memoryview] = []
    carried: list[Any] = []
    uses: list[int] = []
    extents: list[tuple[int, int]] = []
    for reference in pickler.references:
        if reference in pickler.carried:
            carried.append(pickler.carried[reference])
            uses.append(-len(carried))
            continue
        number = pickler.numbers.setdefault(reference, len(buffers))
        uses.append(number)
        if number < len(buffers):
            continue
        span = pickler.tokens.get(reference)
        if span is None:
            part, start = reference.raw(), -1
        else:
            if span.end > span.storage.nbytes():
                raise ValueError(
                    "a tensor was resized while it was being sent to the workers, so its values are gone; resize none "
                    "in __getstate__, nor in a thread while iter() runs, but assign new ones"
                )
            start = span.start & -_ALIGN
            part = memoryview(raw.memory(span.storage.data_ptr() + start, span.end - start, span.storage))
        extents.append((part.nbytes, start))
        buffers.append(part)
    header = pickle.dumps((uses, extents), PROTOCOL)
    skeleton = b"".join((pickler.file.getbuffer(), header, len(header).to_bytes(_LENGTH, "little")))
    return Encoded(skeleton, buffers, carried)


def decode(
    skeleton: Buffer,
    buffers: Sequence[Buffer | torch.UntypedStorage],
    carried: Sequence[Any] = (),
) -> Any:
    """Reassembles an object.

    Args:
        skeleton: from `encode`.
        buffers: one for each of `Encoded.buffers`, in the same order and with the same sizes. Tensors and arrays become
            views of them. Over a read-only buffer an array is read-only; a tensor can't be, and writing to it crashes,
            as with `torch.from_numpy` of a read-only memory map. A storage represents its memory, and tensors get that
            very storage.
        carried: `Encoded.carried`, or its replacement here.

    Raises:
        ValueError: the number or a size of the buffers differs from the skeleton's.
    """
    tail = memoryview(skeleton)
    if tail[0] == PLAIN:
        return _decode_plain(bytes(skeleton), buffers)  # type: ignore[arg-type] # of a batch: no storages
    if tail[0] == _LABELLED:
        end = _VALUES_AT + int.from_bytes(tail[1:_VALUES_AT], "little")
        values = pickle.loads(tail[end:])
        return _decode_plain(bytes(tail[_VALUES_AT:end]), buffers, values)  # type: ignore[arg-type]
    if not buffers and tail[-len(_NO_BUFFERS) :] == _NO_BUFFERS:
        return pickle.loads(skeleton)
    # What each reference means: a buffer, or -1 - carried; and of the buffers: size, start in the storage or -1.
    uses, extents = pickle.loads(tail[-_LENGTH - int.from_bytes(tail[-_LENGTH:], "little") : -_LENGTH])
    if len(buffers) != len(extents):
        raise ValueError(f"decode needs the skeleton's {len(extents)} buffers, got {len(buffers)}")
    sources: list[Any] = []
    for number, (buffer, (nbytes, start)) in enumerate(zip(buffers, extents, strict=True)):
        if isinstance(buffer, torch.UntypedStorage):
            sources.append((buffer, start))
            continue
        view = _flat_bytes(buffer, nbytes, number)
        if start >= 0:
            sources.append((raw.storage_over(view), start))
        else:
            sources.append(buffer if isinstance(buffer, np.ndarray) else view)  # its views show what it is
    tokens = [sources[index] if index >= 0 else carried[-1 - index] for index in uses]
    return pickle.loads(skeleton, buffers=tokens)


def _flat_bytes(buffer: Buffer, nbytes: int, number: int) -> memoryview:
    """A buffer as flat bytes.

    Raises:
        ValueError: its size is not `nbytes`; the error calls it `buffer <number>`.
    """
    view = memoryview(buffer)
    if view.nbytes != nbytes:
        raise ValueError(f"buffer {number} must have {nbytes} bytes, got {view.nbytes}")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pauses Python's garbage collector while many objects and no garbage are created: three times as fast."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# ---- plain batches


def _encode_plain(obj: Any, fresh: Mapping[int, Fresh]) -> tuple[bytes, list[memoryview]] | None:
    """Skeleton and buffers; None if `obj` is not a plain batch. `fresh` tensors, by their `id`, are not inspected."""
    kind = type(obj)
    names: tuple[str, ...] = ()
    if kind is Tensor:
        parts: tuple[Any, ...] = (obj,)
    elif kind is dict:
        names, parts = tuple(obj), tuple(obj.values())
        if set(map(type, names)) != {str}:
            return None
    elif kind is tuple or kind is list:
        parts = tuple(obj)
    else:
        return None
    kinds = set(map(type, parts))
    if Tensor not in kinds or not kinds <= _PLAIN_PARTS:
        return None
    specs: list[_Spec | None] = []
    buffers = []
    addresses = set()  # of the storages
    for tensor in parts:
        if type(tensor) is not Tensor:
            specs.append(None)
            continue
        dtype = tensor.dtype
        if (made := fresh.get(id(tensor))) is not None:
            buffers.append(made.memory)
            specs.append((raw.NAMES[dtype], tensor.shape, tensor.stride(), made.memory.nbytes))
            addresses.add(tensor.data_ptr())
            continue
        if dtype not in raw.NAMES or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        if not tensor.is_contiguous() or tensor.requires_grad or tensor.__dict__ or tensor.is_neg() or tensor.is_conj():
            return None
        storage, nbytes = tensor.untyped_storage(), tensor.nbytes
        if not nbytes or storage.nbytes() != nbytes or tensor.storage_offset():
            return None
        specs.append((raw.NAMES[dtype], tensor.shape, tensor.stride(), nbytes))
        address = storage.data_ptr()
        buffers.append(memoryview(raw.memory(address, nbytes, storage)))
        addresses.add(address)
    if len(addresses) != len(buffers):
        return None
    skeleton = _skeleton(_KINDS.index(kind), names, tuple(specs))
    if len(buffers) == len(parts):
        return skeleton, buffers
    values = [part for part in parts if type(part) is not Tensor]
    length = len(skeleton).to_bytes(_LENGTH, "little")
    return b"".join((bytes([_LABELLED]), length, skeleton, pickle.dumps(values, PROTOCOL))), buffers


def _decode_plain(skeleton: bytes, buffers: Sequence[Buffer], values: Sequence[Any] = ()) -> Any:
    kind, names, places, parts = _parts(skeleton)
    if len(buffers) != len(parts):
        raise ValueError(f"decode needs the skeleton's {len(parts)} buffers, got {len(buffers)}")
    tensors: list[Any] = []
    for buffer, (nbytes, array, dtype, size, stride) in zip(buffers, parts, strict=True):
        view = _flat_bytes(buffer, nbytes, len(tensors))
        if array is None or view.readonly:
            tensors.append(raw.tensor_over(view, dtype, size, stride))
        else:
            tensor: Any = torch.from_numpy(np.ndarray(size, array, view))  # takes a third of the time
            tensor.untyped_storage().rayloader_memory = view
            tensors.append(tensor)
    if kind is Tensor:
        return tensors[0]
    for place, value in zip(places, values, strict=True):
        tensors.insert(place, value)
    return dict(zip(names, tensors, strict=True)) if kind is dict else kind(tensors)


@functools.lru_cache(_CACHED)
def _skeleton(kind: int, names: tuple[str, ...], specs: tuple[_Spec | None, ...]) -> bytes:
    plain = tuple(spec and (spec[0], tuple(spec[1]), *spec[2:]) for spec in specs)
    return bytes([PLAIN]) + pickle.dumps((kind, names, plain), PROTOCOL)


class _TensorPlan(NamedTuple):
    """How to create a tensor."""

    nbytes: int
    array: np.dtype[Any] | None  # if an array of this type has exactly its strides
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@functools.lru_cache(_CACHED)
def _parts(skeleton: bytes) -> tuple[type, tuple[str, ...], list[int], tuple[_TensorPlan, ...]]:
    """Kind and names of a plain batch, the places of values in it, and its tensors."""
    kind, names, specs = pickle.loads(memoryview(skeleton)[1:])
    places = [place for place, spec in enumerate(specs) if spec is None]
    return _KINDS[kind], names, places, tuple(_part(*spec) for spec in specs if spec is not None)


def _part(name: str, size: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> _TensorPlan:
    dtype = raw.DTYPES[name]
    steps = [math.prod(size[axis + 1 :]) for axis in range(len(size))]  # of a new array
    as_array = list(stride) == steps and len(size) <= _MOST_DIMENSIONS
    return _TensorPlan(nbytes, raw.NUMPYS.get(dtype) if as_array else None, dtype, size, stride)
