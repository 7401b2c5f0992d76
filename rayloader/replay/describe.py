"""The fields of a state, in plain types.

Promise: a pure function. A description holds everything that is in a state: what is long or of no meaning to a reader
(generators, the states of the user's own objects, digests) by its size and a checksum, so that states with equal
descriptions continue in the same way.
"""

from __future__ import annotations

import zlib
from dataclasses import fields, is_dataclass
from typing import Any

from rayloader.resume.state import VERSION, State

_LONG = 64  # characters of a text that is shown


def described(state: State) -> dict[str, Any]:
    """Everything that a state holds, in types that JSON knows, after the epoch and step that it leads to."""
    fields_of_state = {name: _plain(value) for name, value in state._asdict().items()}
    return {"epoch": state.epoch, "step": state.step, **fields_of_state, "version": VERSION}


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
