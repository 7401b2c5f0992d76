"""The parts of a batch, for the command line: where each is, what it is, and statistics of its numbers.

Promise: the batch is not changed, and of the user's code only `repr` of its types is asked.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_PARTS = 100
_DEPTH = 8


def parts_in(batch: Any) -> list[dict[str, Any]]:
    """The parts of a batch: name, kind, and statistics of their numbers, if they have some."""
    found = itertools.islice(_parts(batch, "", 0), MOST_PARTS)
    return [{"part": name or "batch", "kind": _kind(part), **_statistics(part)} for name, part in found]


def _parts(obj: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        inner = [(f".{key}", value) for key, value in obj.items()]
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        inner = [(f".{one.name}", getattr(obj, one.name)) for one in dataclasses.fields(obj)]
    elif isinstance(obj, tuple) and hasattr(obj, "_fields"):
        inner = [(f".{key}", value) for key, value in zip(obj._fields, obj, strict=True)]
    elif isinstance(obj, (list, tuple)) and any(not isinstance(one, (str, bytes, int, float)) for one in obj):
        inner = [(f"[{place}]", value) for place, value in enumerate(obj)]
    else:
        inner = []
    if not inner or depth == _DEPTH:
        yield name, obj
        return
    for key, value in inner:
        yield from _parts(value, f"{name}{key}".lstrip("."), depth + 1)


def _kind(part: Any) -> str:
    if isinstance(part, (Tensor, np.ndarray)):
        return f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
    kind = type(part).__name__
    return f"{kind} of {len(part)}" if isinstance(part, (list, tuple, str, bytes)) else kind


def _statistics(part: Any) -> dict[str, Any]:
    """Of all numbers in a part; the first four are of the finite ones, and None if there are none."""
    try:
        numbers = torch.as_tensor(part).detach().cpu().double().reshape(-1)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of objects, texts or dates, or not dense
        return {}
    if not numbers.numel():
        return {}
    finite = numbers[numbers.isfinite()]
    some = [finite.min(), finite.max(), finite.mean(), finite.std(correction=0)] if finite.numel() else [None] * 4
    names = "least", "most", "mean", "deviation"
    found: dict[str, Any] = {name: None if one is None else one.item() for name, one in zip(names, some, strict=True)}
    return {**found, "nans": int(numbers.isnan().sum()), "infinite": int(numbers.isinf().sum())}
