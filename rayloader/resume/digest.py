"""Checksums: of the sampler's indices for a task, and of a batch, to tell whether a rebuilt one is what was delivered.

Promise: a sampler may reuse and overwrite what it yields, for instance views of one array; a worker still gets the
drawn values, whenever and however often it is told. The checksum of indices depends on all values and on nothing else:
not on data beside them in memory. Equal batches have equal digests, in any process. Different ones have different
digests unless they differ only in parts that are not read: large buffers and long lists are sampled, and of objects
that are neither data nor containers nor have attributes only the type counts. A digest never raises, calls no code of
the user's, and takes microseconds.
"""

from __future__ import annotations

import io
import struct
import types
import zlib
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor

from rayloader._compat import make_class, make_enum, no_torch_function
from rayloader.protocol import carried
from rayloader.transport.codec import PLAIN, Encoded, decode, encode
from rayloader.transport.pickler import BY_ID
from rayloader.transport.raw import copied, memory

_ALL = 2048  # bytes: a buffer up to this size is read completely
_SAMPLES = 256  # bytes read of a larger one
_ITEMS = 64  # items read of a list
_BUDGET = 512  # objects read of a batch
_DEPTH = 20
_FLOAT = struct.Struct("<d")


class Drawn(NamedTuple):
    """The indices of a task."""

    encoded: Encoded  # owns its memory
    checksum: int  # of all the indices of the epoch, up to these

    @property
    def indices(self) -> Any:
        """The sampler's object, created again in memory of its own."""
        return decode(self.encoded.skeleton, [*map(copied, self.encoded.buffers)], self.encoded.carried)


def drawn(indices: Any, before: int, carry: tuple[type, ...] = ()) -> Drawn:
    """Records the indices that the sampler yielded.

    Args:
        indices: anything that can be pickled.
        before: the checksum of the indices drawn before these.
        carry: as in `codec.encode`.
    """
    encoded = encode(indices, carry=carry)
    if not encoded.buffers and BY_ID not in encoded.skeleton:
        return Drawn(encoded, zlib.crc32(encoded.skeleton, before))
    encoded = encoded._replace(buffers=[memoryview(bytes(buffer)) for buffer in encoded.buffers])
    # The skeleton contains a tensor's place in memory, and the buffers contain the data beside it.
    values = io.BytesIO()
    _Values(values, protocol=5).dump(indices)
    return Drawn(encoded, zlib.crc32(values.getbuffer(), before))


class _Values(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors by their values, and classes that travel by value by their names."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided and not obj.is_quantized and not obj.is_nested:
            content = obj.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
            return Tensor, (str(obj.dtype), tuple(obj.shape), content.numpy().tobytes())
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and reduced[0] in (make_class, make_enum):
            return str, (f"{obj.__module__}.{obj.__qualname__}",)
        return reduced


def chain(checksum: int, before: int) -> int:
    """The checksum of several batches, from that of the last and that of those before it."""
    return zlib.crc32(checksum.to_bytes(4, "little"), before)


def digest(batch: Any, encoded: Encoded | None = None) -> int:
    """The checksum of a batch from `collate_fn`. Pass `encoded` always or never: it saves time."""
    if encoded is not None and encoded.skeleton[0] == PLAIN:  # its skeleton describes everything except the data
        checksum = zlib.crc32(encoded.skeleton)
        for buffer in encoded.buffers:
            checksum = zlib.crc32(_sample(buffer), checksum)
        return checksum
    # A pickle also records which of its parts are the same object: that may depend on what a dataset has cached.
    try:
        return _Walk().of(batch, 0, 0)
    except Exception:  # an object that does not even reveal its attributes
        return zlib.crc32(type(batch).__qualname__.encode())


def digest_of(batch: Any) -> int:
    """The checksum of a batch that no worker has built, as a worker computes it."""
    try:
        return digest(batch, encode(batch, known_classes=True, carry=carried()))
    except Exception:  # here it need not be picklable
        return digest(batch)


def of_error(kind: type[BaseException]) -> int:
    """The checksum of an exception of this kind in the place of a batch."""
    return zlib.crc32(kind.__qualname__.encode())


class _Walk:
    def __init__(self) -> None:
        self.left = _BUDGET

    def of(self, obj: Any, before: int, depth: int) -> int:  # noqa: C901 # for each part of a batch, without a call more
        """The checksum of an object and of everything before it."""
        kind = type(obj)
        if kind is torch.Tensor:
            return _tensor(obj, before)
        if kind is int:
            return zlib.crc32(b"i%x" % obj, before)
        if kind is float:
            return zlib.crc32(b"f" + _FLOAT.pack(obj), before)
        if kind is bool:
            return zlib.crc32(b"yes" if obj else b"no", before)
        if kind is str:
            return zlib.crc32(_sample(obj.encode("utf-8", "surrogatepass")), zlib.crc32(b"s", before))
        if isinstance(obj, (bytes, bytearray)):
            return zlib.crc32(_sample(obj), zlib.crc32(b"b", before))
        if isinstance(obj, torch.Tensor):
            with no_torch_function():
                return _tensor(obj, before)
        if isinstance(obj, (np.ndarray, np.generic)):
            return self._array(np.asarray(obj), before, depth)
        self.left -= 1
        before = zlib.crc32(kind.__qualname__.encode(), before)
        if self.left < 0 or depth > _DEPTH or obj is None or isinstance(obj, (type, types.ModuleType)):
            return before
        if isinstance(obj, complex):
            return zlib.crc32(_FLOAT.pack(obj.real) + _FLOAT.pack(obj.imag), before)
        if isinstance(obj, dict):
            before = zlib.crc32(b"%x," % len(obj), before)
            if len(obj) <= _ITEMS:  # in any order: it may come from a set's
                return before ^ sum(self.of(v, self.of(k, 0, depth + 1), depth + 1) for k, v in obj.items()) % (1 << 32)
            return self._items(list(obj.values()), before, depth)
        if isinstance(obj, (set, frozenset)):
            before = zlib.crc32(b"%x," % len(obj), before)
            return before ^ sum(self.of(o, 0, depth + 1) for o in obj) % (1 << 32) if len(obj) <= _ITEMS else before
        if isinstance(obj, (list, tuple)):
            before = zlib.crc32(b"%x," % len(obj), before)
            before = self._items(obj, before, depth)
        if isinstance(obj, BaseException):
            return before
        try:
            attributes = object.__getattribute__(obj, "__dict__")
        except AttributeError:
            return before
        for name, value in attributes.items():
            before = self.of(value, zlib.crc32(name.encode(), before), depth + 1)
        return before

    def _items(self, items: Any, before: int, depth: int) -> int:
        step = max(1, len(items) // _ITEMS)
        for item in items[::step] if step > 1 else items:
            before = self.of(item, before, depth + 1)
        return before

    def _array(self, array: np.ndarray[Any, Any], before: int, depth: int) -> int:
        before = zlib.crc32(f"{array.dtype.str}{array.shape}".encode(), before)
        if array.dtype.hasobject:
            return self._items(array.ravel()[:_BUDGET].tolist() if array.dtype.names is None else [], before, depth)
        return _values(array, before)


def _tensor(tensor: torch.Tensor, before: int) -> int:
    before = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), before)
    plain = tensor.layout is torch.strided and tensor.is_cpu and not tensor.is_nested and not tensor.is_quantized
    if not plain or not tensor.numel():
        return before
    itemsize = tensor.element_size()
    if tensor.is_contiguous():
        return zlib.crc32(_sample(memory(tensor.data_ptr(), tensor.numel() * itemsize, tensor)), before)
    strides = [step * itemsize for step in tensor.stride()]
    span = itemsize + sum((count - 1) * step for count, step in zip(tensor.shape, strides, strict=True))
    content = memory(tensor.data_ptr(), span, tensor)
    return _values(np.ndarray(tuple(tensor.shape), f"V{itemsize}", content, 0, strides), before)


def _values(array: np.ndarray[Any, Any], before: int) -> int:
    if array.flags.c_contiguous and array.nbytes:
        return zlib.crc32(_sample(memory(array.__array_interface__["data"][0], array.nbytes, array)), before)
    step = max(1, array.size // _SAMPLES)
    return zlib.crc32(np.ascontiguousarray(array.flat[:: step | 1]).tobytes(), before)


def _sample(content: Any) -> Any:
    """All of it, or bytes sampled from all over it: of numbers, the lower bytes as well as the higher ones."""
    nbytes = len(content)
    if nbytes <= _ALL:
        return content
    return np.frombuffer(content, np.uint8)[:: nbytes // _SAMPLES | 1].tobytes()
