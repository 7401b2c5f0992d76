"""The commands: their arguments, and how they print the results."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayloader.cli import doctor, inspecting, rates, replaying
from rayloader.cli.console import AsJson, err, fail, out, print_json
from rayloader.cli.rates import LoaderKind, Rate

app = typer.Typer(
    name="rayloader",
    help="Look whether rayloader works here, how many workers a dataset needs, and what a run has loaded.",
    add_completion=False,
    no_args_is_help=True,
)
CORES = os.cpu_count() or 1

DatasetName = Annotated[
    str, typer.Argument(help="module:name of a dataset, or of a function that returns one", show_default=False)
]
BatchSize = Annotated[int, typer.Option(help="samples per batch", min=1)]
Shuffle = Annotated[bool, typer.Option(help="load in random order")]
Collate = Annotated[str, typer.Option(help="module:name of a collate_fn; torch's by default")]
Most = Annotated[int, typer.Option(help="try up to this many workers", min=0)]
Seconds = Annotated[float, typer.Option(help="how long to measure each loader", min=0.1)]

app.command()(inspecting.show)
app.command()(inspecting.diff)
app.command()(replaying.replay)


@app.command("doctor")
def doctor_command(
    workers: Annotated[int, typer.Option(help="workers to try with", min=1)] = 2, as_json: AsJson = False
) -> None:
    """Check versions, cores, memory, Ray, and each way for batches to travel. Exits with 1 if something is wrong."""
    found = []
    for check in doctor.checks(workers):
        found.append(check)
        if not as_json:
            mark = "[green]ok[/]    " if check.ok else "[red]failed[/]"
            out.print(mark, f"[bold]{check.name}[/]:", escape(check.found))
            if check.advice:
                out.print("       ", escape(check.advice))
    if as_json:
        print_json([asdict(check) for check in found])
    raise typer.Exit(not all(check.ok for check in found))


@app.command()
def bench(
    dataset: DatasetName,
    step_ms: Annotated[float, typer.Option(help="how many ms a trainer works on each batch", min=0.0)] = 0.0,
    batch_size: BatchSize = 32,
    shuffle: Shuffle = False,
    collate_fn: Collate = "",
    max_workers: Most = CORES,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
) -> None:
    """Load a dataset with torch's loader and with rayloader, with more and more workers; say how many to use."""
    step = step_ms / 1000
    options = {"batch_size": batch_size, "shuffle": shuffle or None, "collate_fn": collate_fn}
    measured: dict[LoaderKind, list[Rate]] = {"torch": [], "rayloader": []}
    try:
        for kind, found in measured.items():  # torch's first, whose workers are forks: Ray is not there yet
            for number in rates.numbers_of_workers(max_workers):
                with err.status(f"{kind}, num_workers={number}"):
                    found.append(rates.measure(kind, dataset, number, seconds, step, **options))
    except rates.RateError as error:
        fail(error)
    own = measured["rayloader"]
    number, reason = rates.for_step(own, step) if step else rates.fastest(own)
    if as_json:
        told = {kind: [asdict(rate) for rate in found] for kind, found in measured.items()}
        print_json({**told, "num_workers": number, "reason": reason})
        return
    columns = (f"{kind}, {what}" for kind in measured for what in ("batches/s", "waits" if step else "first batch"))
    table = Table("num_workers", *columns, "ratio")
    for theirs, ours in zip(measured["torch"], own, strict=True):
        cells = [
            text
            for rate in (theirs, ours)
            for text in (f"{rate.batches:,.1f}", f"{rate.wait_share:.1%}" if step else f"{rate.first:.2f} s")
        ]
        table.add_row(str(ours.num_workers), *cells, f"{ours.batches / theirs.batches:.2f}")
    out.print(table)
    out.print(f"[bold]num_workers={number}[/]: {reason}")
