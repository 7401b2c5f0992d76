"""`rayloader bench`: batches per second of a loader, how long a trainer would wait, and how many workers it needs."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.table import Table

from rayloader.cli import given
from rayloader.cli.doctor import busy
from rayloader.cli.given import CommandError, LoaderKind
from rayloader.observe.stats import count, figure
from rayloader.options import Workers

# A rate within this share of the best is good enough: more workers would gain too little.
ENOUGH = 0.95
# A trainer that waits less than this has no use for more workers.
LITTLE_WAIT = 0.02
# How many rounds a measurement has, whose rates are compared: how far they differ says how far to trust their median.
ROUNDS = 5
CORES = os.cpu_count() or 1

SubjectName = Annotated[
    str,
    typer.Argument(help="module:name or file.py:name of a loader or dataset, or what returns it", show_default=False),
]
Most = Annotated[int, typer.Option(help="try up to this many workers", min=0)]
Seconds = Annotated[float, typer.Option(help="how long to measure each loader", min=0.1)]
Kind = Annotated[Workers | None, typer.Option(help="what the workers of rayloader are; as the loader says by default")]


@dataclass(frozen=True)
class Rate:
    """What was measured."""

    num_workers: int  # of the loader.
    first: float  # seconds to the first batch, including the start of the workers.
    batches: float  # per second, once all workers run, over as many epochs as needed: the median of the rounds.
    lowest: float  # of the rounds.
    highest: float  # likewise.
    wait_share: float  # the share of the time from then on that the trainer spent in `next` and `iter`.


def bench(
    subject: SubjectName,
    step_ms: Annotated[float, typer.Option(help="how many ms a trainer works on each batch", min=0.0)] = 0.0,
    max_workers: Most = CORES,
    workers: Kind = None,
    seconds: Seconds = 3.0,
    as_json: given.AsJson = False,
) -> None:
    """Load with torch's loader and with rayloader, with more and more workers; say how many to use.

    A dataset is loaded in batches of 32 samples; for others name a loader. Each rate is the median of five rounds, with
    the lowest and the highest of them.
    """
    step, is_busy = step_ms / 1000, busy()  # before anything here keeps it so
    measured: dict[LoaderKind, list[Rate]] = {"torch": [], "rayloader": []}
    try:
        with given.prints_to_standard_error():
            loaders = given.Subject(given.made(subject))
            if is_busy and not as_json:
                given.err.print(f"[yellow]{is_busy}[/]: rates are lower, and differ more, than on a quiet one")
            for kind, found in measured.items():  # torch's first, whose workers are forks: Ray is not there yet
                for number in numbers_of_workers(max_workers):
                    with given.err.status(f"{kind}, num_workers={number}"):
                        found.append(measure(loaders.loader(kind, number, workers), seconds, step))
    except Exception as error:  # also of the user's code
        given.fail(error)
    own = measured["rayloader"]
    number, reason = for_step(own, step) if step else fastest(own)
    if as_json:
        told = {kind: [asdict(rate) for rate in found] for kind, found in measured.items()}
        given.print_json({**told, "num_workers": number, "reason": reason, "busy": is_busy})
        return
    table = Table("num_workers")
    for kind, what in itertools.product(measured, ("batches/s", "waits" if step else "first batch")):
        table.add_column(f"{kind}, {what}", overflow="fold")  # no figure is cut
    table.add_column("ratio")
    for rates in zip(measured["torch"], own, strict=True):
        cells = [(spread(rate), f"{rate.wait_share:.1%}" if step else f"{rate.first:.2f} s") for rate in rates]
        theirs, ours = rates
        table.add_row(str(ours.num_workers), *itertools.chain(*cells), f"{ours.batches / theirs.batches:.2f}")
    given.out.print(table)
    given.out.print(f"[bold]num_workers={number}[/]: {reason}")


def numbers_of_workers(most: int) -> list[int]:
    """The numbers to try: none, one, and then twice as many each time."""
    return sorted({0, most, *(2**power for power in range(most.bit_length()))})


def measure(loader: Any, seconds: float, step: float) -> Rate:
    """Takes batches from a loader for `seconds`, epoch after epoch; a trainer works `step` seconds on each.

    Raises:
        CommandError: the dataset gives too few batches.
    """
    began = time.perf_counter()
    iterator = iter(loader)
    first = None
    for _ in zip(range(1 + loader.num_workers), iterator, strict=False):  # who has given a batch has started
        first = first or time.perf_counter() - began
    start = now = time.perf_counter()
    ends, waited, came = [start], 0.0, True
    while now < start + seconds:
        try:
            next(iterator)
        except StopIteration:
            if not came:
                break  # the dataset is empty, or can be read only once
            iterator, came = iter(loader), False
            continue
        got = time.perf_counter()
        waited, came = waited + got - now, True
        if step:
            time.sleep(step)
        now = time.perf_counter()
        ends.append(now)
    if first is None or len(ends) == 1:
        raise CommandError("the dataset gives too few batches to be measured")
    rounds = rates_of_rounds(ends)
    return Rate(loader.num_workers, first, statistics.median(rounds), min(rounds), max(rounds), waited / (now - start))


def rates_of_rounds(ends: Sequence[float]) -> list[float]:
    """Batches a second in rounds of equally many batches, from when the first one began, and then each one ended."""
    several = min(ROUNDS, len(ends) - 1)
    bounds = [(len(ends) - 1) * number // several for number in range(several + 1)]
    return [(last - first) / (ends[last] - ends[first]) for first, last in itertools.pairwise(bounds)]


def fastest(rates: Sequence[Rate]) -> tuple[int, str]:
    """The smallest number of workers that is about as fast as any, and the reason."""
    best = max(rates, key=lambda rate: rate.batches)
    chosen = next(rate for rate in rates if rate.batches >= ENOUGH * best.batches)
    reason = f"{chosen.batches:,.1f} batches a second with {count(chosen.num_workers, 'worker')}"
    if chosen is best:
        return chosen.num_workers, f"{reason}, the most of those tried"
    share = chosen.batches / best.batches
    return chosen.num_workers, f"{reason}, {share:.0%} of the rate with {count(best.num_workers, 'worker')}"


def for_step(rates: Sequence[Rate], step: float) -> tuple[int, str]:
    """The smallest number of workers with which a trainer hardly waits, and the reason."""
    chosen = next((rate for rate in rates if rate.wait_share <= LITTLE_WAIT), None)
    best = chosen or min(rates, key=lambda rate: rate.wait_share)
    who = f"with {count(best.num_workers, 'worker')} a trainer of {step * 1000:g} ms a step"
    if chosen is not None:
        return best.num_workers, f"{who} waits {best.wait_share:.1%} of its time"
    more = "try more workers, or " if best is rates[-1] else "more workers did not help; "
    return best.num_workers, f"even {who} waits {best.wait_share:.0%} of its time: {more}make the samples cheaper"


def spread(rate: Rate) -> str:
    """The rate, and the lowest and the highest of its rounds, as text."""
    return f"{figure(rate.batches)} ({figure(rate.lowest)}-{figure(rate.highest)})"
