"""The commands that look at what a run has saved: `rayloader show` and `rayloader diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from rayloader.cli import sources
from rayloader.cli.console import AsJson, fail, out, print_json, shown
from rayloader.cli.sources import SourceError
from rayloader.errors import RayloaderError
from rayloader.replay import describe
from rayloader.resume.state import State

if TYPE_CHECKING:
    from rayloader.replay.compare import Comparison, Parting

Key = Annotated[
    str, typer.Option(help="which one, if there are several: a state's place, as loaders.train; a loader's name")
]
_LONG = 600  # characters of a part of a state that are printed

Source = Annotated[
    Path, typer.Argument(help="a checkpoint or JSON file with a state, or a provenance log", show_default=False)
]


def show(source: Source, key: Key = "", as_json: AsJson = False) -> None:
    """Say what a checkpoint or a provenance log is: position, seeds, workers, and what can go on from it."""
    try:
        found = sources.load(source, key)
        described: Any
        if isinstance(found, list):
            described = [describe.described(State.load(one)) for one in found]
            rows = _of_ranks(described)
        elif isinstance(found, dict):
            described = describe.described(State.load(found))
            rows = {name: _in_words(value) for name, value in described.items()}
        else:
            from rayloader.replay import compare  # needs pyarrow

            described = compare.described_log(found)
            rows = _of_log(described)
    except (SourceError, RayloaderError) as error:
        fail(error)
    if as_json:
        print_json(described)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for name, text in rows.items():
        if text:
            grid.add_row(shown(name), shown(text if len(text) <= _LONG else f"{text[:_LONG]}... (--json tells all)"))
    out.print(grid)


def _of_ranks(states: list[dict[str, Any]]) -> dict[str, str]:
    """The states of all ranks: what differs is told of the first one."""
    rows = {}
    for name, value in states[0].items():
        differs = any(other[name] != value for other in states)
        rows[name] = f"{_in_words(value)} (rank 0; --json tells the others)" if differs else _in_words(value)
    return rows


def _of_log(found: dict[str, Any]) -> dict[str, str]:
    rows = {"bytes": _in_words(found["bytes"])}
    for number, one in enumerate(found["iterations"]):
        rows[f"iteration {number}"] = _in_words({name: value for name, value in one.items() if name != "state"})
    return rows


def _in_words(value: Any) -> str:
    """A value of types that JSON knows; "" if there is nothing to tell."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {text}" for name, inner in value.items() if (text := _in_words(inner)))
    if isinstance(value, list):
        return "; ".join(map(_in_words, value)) and f"[{'; '.join(map(_in_words, value))}]"
    return "" if value is None else str(value)


def diff(a: Source, b: Source, key: Key = "", as_json: AsJson = False) -> None:
    """Say where two runs part ways, by their logs. Exits with 1 if they do, and with 0 if not."""
    try:
        found = _compared(a, b, key)
    except (SourceError, RayloaderError) as error:
        fail(error)
    if as_json:
        partings = [one._asdict() for one in found.partings]
        print_json({"same": found.same, "compared": found.compared, "partings": partings})
    else:
        out.print(f"{found.compared:,} steps are in both logs. " + _verdict(found))
        if found.partings:
            _print_partings(found.partings)
    raise typer.Exit(not found.same)


def _compared(a: Path, b: Path, key: str) -> Comparison:
    logs: list[Any] = []
    for path in (a, b):
        log = sources.load(path, key)
        if isinstance(log, (dict, list)):
            raise SourceError(
                f"{path} holds a state, and diff compares provenance logs; compare what rayloader show --json prints "
                "of two states"
            )
        if len(log.loaders) > 1:
            raise SourceError(f"{path} is of several loaders; choose one by --key: {', '.join(log.loaders)}")
        logs.append(log)
    from rayloader.replay.compare import compared  # needs pyarrow

    if not (found := compared(*logs)).compared:
        raise SourceError("the logs have no step in common")
    return found


def _verdict(found: Comparison) -> str:
    if found.same:
        return "The runs had the same batches."
    first = next(one for one in found.partings if one.is_decisive)
    return f"The runs part ways in epoch {first.epoch} at step {first.step:,}, in: {first.column}."


def _print_partings(partings: list[Parting]) -> None:
    table = Table("", "A", "B", box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for name, epoch, step, *values in partings:
        a, b = (f"{value:08x}" if name == "digest" else json.dumps(value) for value in values)
        table.add_row(f"{name}, epoch {epoch}, step {step}", shown(a), shown(b))
    out.print(table)
