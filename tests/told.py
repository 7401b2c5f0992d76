"""Values as what `==` compares, to the bit."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch


def told(value):
    """Types, data types, shapes, strides and bytes of all tensors and arrays within; any mapping counts as a dict."""
    match value:
        case torch.Tensor() if value.layout is not torch.strided:
            return value.layout, told(value.to_dense())
        case torch.Tensor():
            content = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return value.dtype, tuple(value.shape), value.stride() if value.numel() else (), content
        case np.ndarray():
            strides = value.strides if value.size else ()
            return value.dtype, value.shape, strides, value.flags.writeable, value.tobytes()
        case Mapping():
            return [(key, told(part)) for key, part in value.items()]
        case list() | tuple():
            return type(value), [told(part) for part in value]
    return (type(value), told(vars(value))) if dataclasses.is_dataclass(value) else (type(value), value)
