"""The command that looks at what a run has saved, `rayloader show`: the fields of a state, in plain types."""

from __future__ import annotations

import zlib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rayloader.cli import sources
from rayloader.cli.sources import AsJson, SourceError, fail, out, print_json, shown
from rayloader.errors import RayloaderError
from rayloader.resume.state import VERSION, State

Key = Annotated[str, typer.Option(help="which state, if there are several: its place in the file, as loaders.train")]
_LONG = 600  # characters of a part of a state that are printed

Source = Annotated[Path, typer.Argument(help="a checkpoint with a state", show_default=False)]


def show(source: Source, key: Key = "", as_json: AsJson = False) -> None:
    """Print what is in a loader's state: its position, what it fits, and versions."""
    try:
        states = [described(State.load(one)) for one in sources.load(source, key)]
    except (SourceError, RayloaderError) as error:
        fail(error)
    if as_json:
        print_json(states if len(states) > 1 else states[0])
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, value in states[0].items():
        if text := _in_words(value):
            text = text if len(text) <= _LONG else f"{text[:_LONG]}... (--json tells all)"
            differs = any(other[name] != value for other in states)
            grid.add_row(shown(name), shown(text + " (rank 0; --json tells the others)" * differs))
    out.print(grid)


def _in_words(value: Any) -> str:
    """A value of types that JSON knows; "" if there is nothing to tell."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {text}" for name, inner in value.items() if (text := _in_words(inner)))
    if isinstance(value, list):
        return "; ".join(map(_in_words, value)) and f"[{'; '.join(map(_in_words, value))}]"
    return "" if value is None else str(value)


_WHOLE = 64  # characters of a text, and items of a list, that a description holds; of more a size and a checksum


def described(state: State) -> dict[str, Any]:
    """Everything that a state holds, in types that JSON knows, after the epoch and step that it leads to."""
    fields_of_state = {name: _plain(value) for name, value in state._asdict().items()}
    return {"epoch": state.epoch, "step": state.step, **fields_of_state, "version": VERSION}


def _plain(value: Any) -> Any:
    """A part of a state: records by the names of their fields."""
    if value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= _WHOLE):
        return value
    if hasattr(value, "_asdict"):
        return {name: _plain(inner) for name, inner in value._asdict().items()}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and len(value) <= _WHOLE:
        return [_plain(inner) for inner in value]
    content = value if isinstance(value, bytes) else repr(value).encode()
    return f"{len(content)} bytes, checksum {zlib.crc32(content):08x}"
