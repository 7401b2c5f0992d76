"""The commands: their arguments, and how they print the results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rayloader.cli import doctor, inspecting, rates, replaying
from rayloader.cli.console import AsJson, err, fail, out, print_json
from rayloader.cli.rates import LoaderKind, Measurer, Rate, Workload

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
    batch_size: BatchSize = 32,
    shuffle: Shuffle = False,
    collate_fn: Collate = "",
    max_workers: Most = CORES,
    seconds: Seconds = 3.0,
    plot: Annotated[Path | None, typer.Option(help="write a plot to this file (needs matplotlib)")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a dataset with torch's loader and with rayloader, with more and more workers; say how many to use."""
    kinds: tuple[LoaderKind, ...] = ("torch", "rayloader")
    measured = _measured(kinds, Workload(dataset, batch_size, shuffle, collate_fn), max_workers, seconds)
    if plot is not None:
        _plot(measured, plot)
    columns = (f"{kind}, {what}" for kind in kinds for what in ("batches/s", "first batch"))
    table = Table("num_workers", *columns, "ratio")
    for theirs, own in zip(measured["torch"], measured["rayloader"], strict=True):
        cells = [f"{value}" for rate in (theirs, own) for value in (f"{rate.batches:,.1f}", f"{rate.first:.2f} s")]
        table.add_row(str(own.num_workers), *cells, f"{own.batches / theirs.batches:.2f}")
    _print(measured, rates.fastest(measured["rayloader"]), table, as_json)


@app.command()
def tune(
    dataset: DatasetName,
    step_ms: Annotated[float, typer.Option(help="how many ms the trainer works on each batch", min=0.0)],
    batch_size: BatchSize = 32,
    shuffle: Shuffle = False,
    collate_fn: Collate = "",
    max_workers: Most = CORES,
    seconds: Seconds = 3.0,
    as_json: AsJson = False,
) -> None:
    """Say how many workers keep a trainer of a given step time from waiting."""
    step = step_ms / 1000
    workload = Workload(dataset, batch_size, shuffle, collate_fn)
    measured = _measured(("rayloader",), workload, max_workers, seconds, step)
    table = Table("num_workers", "batches/s", "waits", "first batch")
    for rate in measured["rayloader"]:
        table.add_row(str(rate.num_workers), f"{rate.batches:,.1f}", f"{rate.wait_share:.1%}", f"{rate.first:.2f} s")
    _print(measured, rates.for_step(measured["rayloader"], step), table, as_json)


def _measured(
    kinds: Iterable[LoaderKind], workload: Workload, most: int, seconds: float, step: float | None = None
) -> dict[LoaderKind, list[Rate]]:
    """Measures these loaders in turn, with more and more workers; with a step, until the trainer hardly waits."""
    measured: dict[LoaderKind, list[Rate]] = {kind: [] for kind in kinds}
    try:
        for kind, found in measured.items():  # torch's first, whose workers are forks: Ray is not there yet
            measurer = Measurer(kind, workload)
            for number in rates.numbers_of_workers(most):
                with err.status(f"{kind}, num_workers={number}"):
                    found.append(measurer.measure(number, seconds, step or 0.0))
                if step is not None and found[-1].wait_share <= rates.LITTLE_WAIT:
                    break
    except rates.RateError as error:
        fail(error)
    return measured


def _print(measured: dict[LoaderKind, list[Rate]], choice: tuple[int, str], table: Table, as_json: bool) -> None:
    number, reason = choice
    if as_json:
        found = {kind: [asdict(rate) for rate in own] for kind, own in measured.items()}
        print_json({**found, "num_workers": number, "reason": reason})
        return
    out.print(table)
    out.print(f"[bold]num_workers={number}[/]: {reason}")


def _plot(measured: dict[LoaderKind, list[Rate]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        fail(rates.RateError("--plot needs matplotlib; run: pip install matplotlib"))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, found in measured.items():
        axes.plot([rate.num_workers for rate in found], [rate.batches for rate in found], marker="o", label=kind)
    axes.set(xlabel="num_workers", ylabel="batches a second", ylim=(0, None))
    axes.legend()
    figure.savefig(path)
