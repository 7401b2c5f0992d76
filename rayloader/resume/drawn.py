"""The sampler's indices for a task: as they were when they were drawn, and a checksum of the values.

Promise: a sampler may reuse and overwrite what it yields, for instance views of one array; a worker still gets
the drawn values, whenever and however often it is told. The checksum depends on all values and on nothing else: not on
data beside them in memory.
"""

from __future__ import annotations

import io
import zlib
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from rayloader.transport import codec, raw


class Drawn(NamedTuple):
    """The indices of a task."""

    encoded: codec.Encoded  # owns its memory
    checksum: int  # of all the indices of the epoch, up to these

    @property
    def indices(self) -> Any:
        """The sampler's object, created again in memory of its own."""
        return codec.decode(self.encoded.skeleton, [*map(raw.copied, self.encoded.buffers)], self.encoded.carried)


def drawn(indices: Any, before: int, carry: tuple[type, ...] = ()) -> Drawn:
    """Records the indices that the sampler yielded.

    Args:
        indices: anything that can be pickled.
        before: the checksum of the indices drawn before these.
        carry: as in `codec.encode`.
    """
    encoded = codec.encode(indices, carry=carry)
    if not encoded.buffers:
        return Drawn(encoded, zlib.crc32(encoded.skeleton, before))
    encoded = encoded._replace(buffers=[memoryview(bytes(buffer)) for buffer in encoded.buffers])
    # The skeleton contains a tensor's place in memory, and the buffers contain the data beside it.
    values = io.BytesIO()
    _Values(values, protocol=5).dump(indices)
    return Drawn(encoded, zlib.crc32(values.getbuffer(), before))


class _Values(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles tensors by their values."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.layout is torch.strided and not obj.is_quantized and not obj.is_nested:
            content = obj.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
            return Tensor, (str(obj.dtype), tuple(obj.shape), content.numpy().tobytes())
        return super().reducer_override(obj)
