"""The commands: their arguments, and how they print the results."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rayloader.cli import advice, doctor, rates
from rayloader.cli.rates import LoaderKind, Measurer, Rate, Workload

app = typer.Typer(
    name="rayloader",
    help="Look whether rayloader works here, and how many workers a dataset needs.",
    add_completion=False,
    no_args_is_help=True,
)
CORES = os.cpu_count() or 1
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

DatasetName = Annotated[
    str, typer.Argument(help="module:name of a dataset, or of a function that returns one", show_default=False)
]
BatchSize = Annotated[int, typer.Option(help="samples per batch", min=1)]
Shuffle = Annotated[bool, typer.Option(help="load in random order")]
Collate = Annotated[str, typer.Option(help="module:name of a collate_fn; torch's by default")]
Most = Annotated[int, typer.Option(help="try up to this many workers", min=0)]
Seconds = Annotated[float, typer.Option(help="how long to measure each loader", min=0.1)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else")]


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
        _print_json([asdict(check) for check in found])
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
    workload = Workload(dataset, batch_size, shuffle, collate_fn)
    kinds: tuple[LoaderKind, LoaderKind] = ("torch", "rayloader")
    measured: dict[str, list[Rate]] = {kind: [] for kind in kinds}
    try:
        with Measurer("torch", workload) as torchs, Measurer("rayloader", workload) as ours:
            for number in advice.numbers_of_workers(max_workers):
                for kind, measurer in zip(kinds, (torchs, ours), strict=True):
                    with err.status(f"{kind}, num_workers={number}"):
                        measured[kind].append(measurer.measure(number, seconds))
    except rates.RateError as error:
        _fail(error)
    number, reason = advice.fastest(measured["rayloader"])
    if plot is not None:
        _plot(measured, plot)
    if as_json:
        _print_json({**_as_dicts(measured), "num_workers": number, "reason": reason})
        return
    columns = (f"{kind}, {what}" for kind in kinds for what in ("batches/s", "first batch"))
    table = Table("num_workers", *columns, "ratio")
    for theirs, own in zip(measured["torch"], measured["rayloader"], strict=True):
        cells = [f"{value}" for rate in (theirs, own) for value in (f"{rate.batches:,.1f}", f"{rate.first:.2f} s")]
        table.add_row(str(own.num_workers), *cells, f"{own.batches / theirs.batches:.2f}")
    out.print(table)
    out.print(f"[bold]num_workers={number}[/]: {reason}")


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
    measured: list[Rate] = []
    try:
        with Measurer("rayloader", Workload(dataset, batch_size, shuffle, collate_fn)) as ours:
            for number in advice.numbers_of_workers(max_workers):
                with err.status(f"num_workers={number}"):
                    measured.append(ours.measure(number, seconds, step_ms / 1000))
                if measured[-1].wait_share <= advice.LITTLE_WAIT:
                    break
    except rates.RateError as error:
        _fail(error)
    number, reason = advice.for_step(measured, step_ms / 1000)
    if as_json:
        _print_json({**_as_dicts({"rayloader": measured}), "num_workers": number, "reason": reason})
        return
    table = Table("num_workers", "batches/s", "waits", "first batch")
    for rate in measured:
        table.add_row(str(rate.num_workers), f"{rate.batches:,.1f}", f"{rate.wait_share:.1%}", f"{rate.first:.2f} s")
    out.print(table)
    out.print(f"[bold]num_workers={number}[/]: {reason}")


def _as_dicts(measured: dict[str, list[Rate]]) -> dict[str, Any]:
    return {kind: [asdict(rate) for rate in found] for kind, found in measured.items()}


def _print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def _fail(error: Exception) -> None:
    err.print("[red]rayloader:[/]", escape(str(error)))
    raise typer.Exit(2) from error


def _plot(measured: dict[str, list[Rate]], path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        _fail(rates.RateError("--plot needs matplotlib; run: pip install matplotlib"))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for kind, found in measured.items():
        axes.plot(_column(found, "num_workers"), _column(found, "batches"), marker="o", label=kind)
    axes.set(xlabel="num_workers", ylabel="batches a second", ylim=(0, None))
    axes.legend()
    figure.savefig(path)


def _column(found: Iterable[Rate], name: str) -> list[Any]:
    return [getattr(rate, name) for rate in found]
