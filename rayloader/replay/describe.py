"""What a state is, in plain types.

Promise: a pure function. A description holds everything that is in a state: what is long or of no meaning to a reader
(generators, the states of the user's own objects, digests) by its size and a checksum, so that states with equal
descriptions continue in the same way.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

from rayloader.resume.checkpoint import fits_any_ranks, fits_any_workers
from rayloader.resume.state import State, as_saved

_LONG = 64  # characters of a text that is shown


@as_saved()
def described(state: State) -> dict[str, Any]:
    """Everything that a state holds, in types that JSON knows."""
    packed = state.pack()
    return {
        "next": {"epoch": state.epoch, "step": state.step, "between_epochs": state.is_between_epochs},
        "continues_on": {
            "no_workers": not state.num_workers or fits_any_workers(state),
            "workers": bool(state.num_workers) or fits_any_workers(state),
            "other_ranks": fits_any_ranks(state),
        },
        **{name: _plain(value) for name, value in state._asdict().items()},
        "version": packed["version"],
        "bytes": len(json.dumps(packed, default=str)),
    }


def _plain(value: Any) -> Any:
    """A part of a state: records by the names of their fields."""
    if value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= _LONG):
        return value
    if hasattr(value, "_asdict"):
        return {name: _plain(inner) for name, inner in value._asdict().items()}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and len(value) <= _LONG:
        return [_plain(inner) for inner in value]
    content = value if isinstance(value, bytes) else repr(value).encode()
    return f"{len(content)} bytes, checksum {zlib.crc32(content):08x}"
