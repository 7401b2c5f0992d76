"""The commands: their arguments, and how they print the results."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayloader import __version__
from rayloader.cli import doctor, inspecting, rates, replaying, sources
from rayloader.cli.console import AsJson, err, fail, out, print_json
from rayloader.cli.rates import LoaderKind, Rate
from rayloader.options import Workers

app = typer.Typer(
    name="rayloader",
    help="Look whether rayloader works here, how many workers a loader needs, and what a run has saved.",
    add_completion=False,
    no_args_is_help=True,
)
CORES = os.cpu_count() or 1

Subject = Annotated[
    str,
    typer.Argument(
        help="module:name or file.py:name of a loader or a dataset, or of a function that returns one",
        show_default=False,
    ),
]
LoaderName = Annotated[
    str,
    typer.Argument(
        help="module:name or file.py:name of a loader of yours, or of a function that returns it, to be tried too",
        show_default=False,
    ),
]
BatchSize = Annotated[int | None, typer.Option(help="samples per batch of a dataset; 32 by default", min=1)]
Shuffle = Annotated[bool | None, typer.Option("--shuffle", help="load a dataset in random order")]
Collate = Annotated[str, typer.Option(help="module:name or file.py:name of a dataset's collate_fn; torch's by default")]
Most = Annotated[int, typer.Option(help="try up to this many workers", min=0)]
Seconds = Annotated[float, typer.Option(help="how long to measure each loader", min=0.1)]
Kind = Annotated[Workers | None, typer.Option(help="what the workers of rayloader are; as the loader says by default")]

app.command()(inspecting.show)
app.command()(replaying.replay)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"rayloader {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="print the version, and end", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Runs before each command."""


@app.command("doctor")
def doctor_command(
    loader: LoaderName = "",
    num_workers: Annotated[int, typer.Option(help="workers to try with", min=1)] = 2,
    workers: Annotated[Workers, typer.Option(help="what they are; both by default")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Check versions, cores, memory, Ray, and each way for batches to travel. Exits with 1 if something is wrong."""
    found = []
    try:
        with rates.prints_to_standard_error():
            given = rates.Subject.of(sources.made(loader)) if loader else None
        for check in doctor.checks(num_workers, workers, given):
            found.append(check)
            if not as_json:
                mark = "[green]ok[/]    " if check.ok else "[red]failed[/]"
                out.print(mark, f"[bold]{check.name}[/]:", escape(check.found))
                if check.advice:
                    out.print("       ", escape(check.advice))
    except sources.SourceError as error:
        fail(error)
    if as_json:
        print_json([asdict(check) for check in found])
    raise typer.Exit(not all(check.ok for check in found))


@app.command()
def bench(
    subject: Subject,
    step_ms: Annotated[float, typer.Option(help="how many ms a trainer works on each batch", min=0.0)] = 0.0,
    batch_size: BatchSize = None,
    shuffle: Shuffle = None,
    collate_fn: Collate = "",
    max_workers: Most = CORES,
    workers: Kind = None,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
) -> None:
    """Load with torch's loader and with rayloader, with more and more workers; say how many to use.

    Each rate is the median of five rounds, with the lowest and the highest of them.
    """
    step = step_ms / 1000
    busy = doctor.busy()  # before anything here keeps it so
    measured: dict[LoaderKind, list[Rate]] = {"torch": [], "rayloader": []}
    try:
        with rates.prints_to_standard_error():
            collate = sources.named(collate_fn) if collate_fn else None
            options = {"batch_size": batch_size, "shuffle": shuffle, "collate_fn": collate}
            given = rates.Subject.of(sources.made(subject), **options)
            if busy and not as_json:
                err.print(f"[yellow]{busy}[/]: rates are lower, and differ more, than on a quiet one")
            for kind, found in measured.items():  # torch's first, whose workers are forks: Ray is not there yet
                for number in rates.numbers_of_workers(max_workers):
                    with err.status(f"{kind}, num_workers={number}"):
                        found.append(rates.measure(kind, given, number, seconds, step, workers))
    except (rates.RateError, sources.SourceError) as error:
        fail(error)
    own = measured["rayloader"]
    number, reason = rates.for_step(own, step) if step else rates.fastest(own)
    if as_json:
        told = {kind: [asdict(rate) for rate in found] for kind, found in measured.items()}
        print_json({**told, "num_workers": number, "reason": reason, "busy": busy})
        return
    columns = (f"{kind}, {what}" for kind in measured for what in ("batches/s", "waits" if step else "first batch"))
    table = Table("num_workers", *columns, "ratio")
    for column in table.columns:
        column.overflow = "fold"  # no figure is cut
    for theirs, ours in zip(measured["torch"], own, strict=True):
        cells = [
            text
            for rate in (theirs, ours)
            for text in (rates.spread(rate), f"{rate.wait_share:.1%}" if step else f"{rate.first:.2f} s")
        ]
        table.add_row(str(ours.num_workers), *cells, f"{ours.batches / theirs.batches:.2f}")
    out.print(table)
    out.print(f"[bold]num_workers={number}[/]: {reason}")
