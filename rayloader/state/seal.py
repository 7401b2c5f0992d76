"""Tells whether a state is what `state_dict()` gave: whole, and unchanged.

Promise: pure. What is sealed and saved by torch, by `weights_only` too, to whatever device its tensors are loaded, has
the same seal; where a part was lost, replaced or changed, the error names it. Without that a damaged state ends in some
error far from its cause, or, where a number is another number, in another stream of batches.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from rayloader.errors import StateError

# Their values say all of them. Of an object of another type, the user's own, only its place counts.
_PLAIN = {int, float, complex, str, bytes, bool, type(None)}
_LISTS = list, tuple  # which are one another where a state has gone through JSON


def sealed(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The state, with the checksums of the parts of these names in place of earlier ones; others are the program's."""
    return {**state, "seal": _checksums({name: state[name] for name in names - {"seal"}})}


def check_seal(state: dict[str, Any], names: set[str]) -> None:
    """Raises StateError unless the parts of these names are what was sealed; others are the program's."""
    missing = sorted(names - state.keys())
    if missing:
        raise StateError(
            f"the state must have all that state_dict() gives, and lacks {', '.join(missing)}; load it as it was saved"
        )
    found = _checksums({name: state[name] for name in names - {"seal"}})
    saved = state["seal"] if isinstance(state["seal"], dict) else {}
    damaged = sorted(name for name in found.keys() | saved.keys() if found.get(name) != saved.get(name))
    if damaged:
        raise StateError(
            f"the state is not what state_dict() gave: {', '.join(map(str, damaged))} was changed or lost since; load "
            "it as it was saved, or an earlier state"
        )


def _checksums(parts: dict[str, Any]) -> dict[str, int]:
    """Of each part, and of each of what it holds by name."""
    checksums = {}
    for name, part in parts.items():
        inner = part if type(part) is dict else {}
        checksums[name] = _checksum(None if inner else part, 0)
        checksums.update({f"{name}.{key}": _checksum(value, 0) for key, value in inner.items()})
    return checksums


def _checksum(part: Any, before: int) -> int:
    if isinstance(part, dict):
        before = zlib.crc32(b"dict %d" % len(part), before)
        for key in sorted(part, key=repr):
            before = _checksum(part[key], _checksum(key, before))
        return before
    if isinstance(part, _LISTS):
        if part and _is_plain(part):
            return zlib.crc32(repr([*map(list, part)] if isinstance(part[0], _LISTS) else [*part]).encode(), before)
        before = zlib.crc32(b"list %d" % len(part), before)
        for item in part:
            before = _checksum(item, before)
        return before
    if type(part) is torch.Tensor and part.layout is torch.strided and not part.is_quantized and not part.is_nested:
        before = zlib.crc32(f"{part.dtype} {tuple(part.shape)}".encode(), before)
        content = part.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return zlib.crc32(content.view(torch.uint8).numpy().data, before)
    return zlib.crc32(repr(part).encode() if type(part) in _PLAIN else b"object", before)


def _is_plain(part: Sequence[Any]) -> bool:
    """Whether it holds nothing but plain values, or lists of nothing else."""
    kinds = set(map(type, part))
    return kinds <= _PLAIN or (
        all(issubclass(kind, _LISTS) for kind in kinds) and set(map(type, chain.from_iterable(part))) <= _PLAIN
    )
