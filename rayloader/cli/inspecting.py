"""The commands that look at what a run has saved: `rayloader show` and `rayloader diff`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
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
from rayloader.replay.describe import Difference
from rayloader.resume.state import State

if TYPE_CHECKING:
    from rayloader.replay.compare import Comparison, Parting
    from rayloader.replay.provenance import Log

Key = Annotated[
    str, typer.Option(help="which one, if there are several: a state's place, as loaders.train; a loader's name")
]
_FEW = 20  # differences that are printed
_LONG = 120  # characters of a value that are printed

Source = Annotated[
    Path, typer.Argument(help="a checkpoint or JSON file with a state, or a provenance log", show_default=False)
]


def show(source: Source, key: Key = "", as_json: AsJson = False) -> None:
    """Say what a checkpoint or a provenance log is: position, seeds, workers, and what can go on from it."""
    with _errors():
        found = sources.load(source, key)
        if isinstance(found, list):
            described: Any = [describe.described(State.load(one)) for one in found]
            rows = describe.together_in_words(described)
        elif isinstance(found, dict):
            described = describe.described(State.load(found))
            rows = describe.in_words(described)
        else:
            from rayloader.replay import compare  # needs pyarrow

            described = compare.described_log(found)
            rows = compare.log_in_words(described)
    if as_json:
        print_json(described)
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    for heading, text in rows:
        grid.add_row(shown(heading), shown(text))
    out.print(grid)


def diff(a: Source, b: Source, key: Key = "", as_json: AsJson = False) -> None:
    """Say where two states, or two runs by their logs, part ways. Exits with 1 if they do, and with 0 if not."""
    with _errors():
        ours, theirs = sources.load(a, key), sources.load(b, key)
        if isinstance(ours, (dict, list)) and isinstance(theirs, (dict, list)):
            same = _diff_states(_pairs(ours, theirs), as_json)
        elif isinstance(ours, (dict, list)) or isinstance(theirs, (dict, list)):
            raise SourceError(f"compare two states or two logs: one of {a} and {b} is a state, and the other a log")
        else:
            same = _diff_logs(ours, theirs, as_json)
    raise typer.Exit(not same)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Ends the command where a source is not what it must be."""
    try:
        yield
    except (SourceError, RayloaderError) as error:
        fail(error)


def _pairs(a: Any, b: Any) -> list[tuple[State, State]]:
    """The states to compare: of the same rank where one is a list of those of all ranks."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [(State.load(a), State.load(b))]
    ours, theirs = (
        {state.fits.rank: state for state in map(State.load, [one] if isinstance(one, dict) else one)} for one in (a, b)
    )
    ranks = ours.keys() & theirs.keys() if isinstance(a, dict) or isinstance(b, dict) else ours.keys() | theirs.keys()
    if not ranks or not ranks <= ours.keys() & theirs.keys():
        raise SourceError(
            f"these are the states of other ranks: {[*ours]} and {[*theirs]}; choose one of each by --key"
        )
    return [(ours[rank], theirs[rank]) for rank in sorted(ranks, key=str)]


def _diff_states(pairs: list[tuple[State, State]], as_json: bool) -> bool:
    found = [(a, b, describe.differences(describe.described(a), describe.described(b))) for a, b in pairs]
    same = not any(differences for *_, differences in found)
    if as_json:
        states = [
            {
                "rank": a.fits.rank,
                "relation": describe.relation(a, b) if differences else "",
                "differences": [one._asdict() for one in differences],
            }
            for a, b, differences in found
        ]
        print_json({"same": same, "states": states})
        return same
    for a, b, differences in found:
        who = "" if len(pairs) == 1 else f"Rank {a.fits.rank}: "
        if differences:
            out.print(shown(f"{who}{describe.relation(a, b)}."))
            _print_differences(differences)
        elif len(pairs) == 1:
            out.print("The states are the same.")
    if same and len(pairs) > 1:
        out.print(f"The states of all {len(pairs)} ranks are the same.")
    return same


def _diff_logs(a: Log, b: Log, as_json: bool) -> bool:
    from rayloader.replay.compare import compared  # needs pyarrow

    for log in (a, b):
        if len(log.loaders) > 1:
            raise SourceError(f"{log.path} is of several loaders; choose one by --key: {', '.join(log.loaders)}")
    found = compared(a, b)
    if not found.compared:
        raise SourceError("the logs have no step in common")
    if as_json:
        partings, causes = ([one._asdict() for one in some] for some in (found.partings, found.causes))
        print_json({"same": found.same, "compared": found.compared, "partings": partings, "causes": causes})
        return found.same
    out.print(f"{found.compared:,} steps are in both logs. " + _verdict(found))
    if found.partings:
        _print_differences([_in_row(one) for one in found.partings])
    if found.causes:
        out.print("What else differs:")
        _print_differences(found.causes)
    return found.same


def _in_row(parting: Parting) -> Difference:
    column, epoch, step, *values = parting
    a, b = (f"{value:08x}" if column == "digest" else value for value in values)
    return Difference(f"{column}, epoch {epoch}, step {step}", a, b)


def _verdict(found: Comparison) -> str:
    if found.same:
        return "The runs had the same batches."
    first = next(one for one in found.partings if one.is_decisive)
    return f"The runs part ways in epoch {first.epoch} at step {first.step:,}, in: {first.column}."


def _print_differences(differences: Sequence[Difference]) -> None:
    table = Table("", "A", "B", box=box.SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for name, a, b in differences[:_FEW]:
        table.add_row(shown(name), *(shown(_in_short(value)) for value in (a, b)))
    out.print(table)
    if len(differences) > _FEW:
        out.print(f"and {len(differences) - _FEW} more; --json lists all")


def _in_short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
