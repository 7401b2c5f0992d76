"""Measures loaders over a user's dataset: batches per second, how long a trainer would wait, and how many workers do.

What the dataset prints meanwhile goes to standard error.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from rayloader.loader import DataLoader
from rayloader.observe.stats import figure
from rayloader.options import OwnArguments, Workers

LoaderKind = Literal["torch", "rayloader"]

# A rate within this share of the best is good enough: more workers would gain too little.
ENOUGH = 0.95
# A trainer that waits less than this has no use for more workers.
LITTLE_WAIT = 0.02
# How many rounds a measurement has, whose rates are compared: how far they differ says how far to trust their median.
ROUNDS = 5


class RateError(Exception):
    """A loader could not be measured; the text says why."""


@dataclass(frozen=True)
class Rate:
    """What was measured."""

    num_workers: int  # of the loader.
    first: float  # seconds to the first batch, including the start of the workers.
    batches: float  # per second, once all workers run, over as many epochs as needed: the median of the rounds.
    lowest: float  # of the rounds.
    highest: float  # likewise.
    wait_share: float  # the share of the time from then on that the trainer spent in `next` and `iter`.


@dataclass(frozen=True)
class Subject:
    """What is measured: the arguments of the loaders, but for `num_workers`.

    Attributes:
        common: of torch's loader and of rayloader's.
        own: of rayloader's alone.
    """

    common: dict[str, Any]
    own: dict[str, Any]

    @classmethod
    def of(cls, given: Any, **options: Any) -> Subject:
        """What a loader, of torch's class or ours, or a dataset stands for.

        Args:
            given: that one.
            **options: of the loaders of a dataset; those that are None are left out.

        Raises:
            RateError: a loader is given, and options that it has already.
        """
        set_here = {name: value for name, value in options.items() if value is not None}
        if not isinstance(given, TorchDataLoader):
            return cls({"dataset": given, "batch_size": 32, **set_here}, {})
        if set_here:
            raise RateError(f"a loader is measured as it is: leave out {' and '.join(map(_option, set_here))}")
        return cls(*_arguments(given))

    def loader(self, kind: LoaderKind, num_workers: int, workers: Workers | None = None) -> Any:
        """The loader of so many workers; of rayloader's also what these are, None: as given."""
        arguments = {**self.common, **(self.own if kind == "rayloader" else {})}
        if kind == "rayloader" and workers is not None:
            arguments["workers"] = workers
            if workers == "fork":
                arguments = {name: value for name, value in arguments.items() if name not in _OF_ACTORS}
        if num_workers == 0:
            arguments = {name: value for name, value in arguments.items() if name not in _OF_WORKERS}
        loader_class: Any = TorchDataLoader if kind == "torch" else DataLoader
        return loader_class(num_workers=num_workers, **arguments)


# torch's arguments that a loader without workers refuses, and those that say how indices are grouped.
_OF_WORKERS = {"prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
# Those that ask for actors, or are refused beside workers="fork".
_OF_ACTORS = {"ray_remote_args", "arenas", "multiprocessing_context", "fresh_processes"}
_ORDER = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _arguments(loader: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those with which torch's class, and ours, makes such a loader; but for `num_workers`."""
    names = [*inspect.signature(TorchDataLoader.__init__).parameters][1:]
    common = {name: getattr(loader, name) for name in names if name not in {*_ORDER, "num_workers"}}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable:
        common |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    elif loader.batch_sampler is not None:
        common["batch_sampler"] = loader.batch_sampler
    else:
        common |= {"batch_size": None, "sampler": loader.sampler}
    if not isinstance(loader, DataLoader):
        return common, {}
    # What a rank reads of a stream it asks by itself; the samplers are those of the rank already.
    without = {"skip_steps", *(() if is_iterable else ("num_replicas", "rank", "seed"))}
    return common, {name: getattr(loader, name) for name in OwnArguments.__annotations__ if name not in without}


def measure(
    kind: LoaderKind,
    subject: Subject,
    num_workers: int,
    seconds: float,
    step: float,
    workers: Workers | None = None,
) -> Rate:
    """Loads for `seconds` with so many workers.

    Args:
        kind: of the loader.
        subject: what is loaded.
        num_workers: of the loader.
        seconds: how long to measure.
        step: how long the trainer works on each batch, in seconds.
        workers: see `Subject.loader`.

    Raises:
        RateError: the dataset gives no batch, or raised.
    """
    try:
        return measured(subject.loader(kind, num_workers, workers), num_workers, seconds, step)
    except RateError:
        raise
    except Exception as error:  # anything that the user's code raises
        raise RateError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def prints_to_standard_error() -> Iterator[None]:
    """Reserves the standard output, of this process and of its children, for the answers."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(answers, 1)
        os.close(answers)


def numbers_of_workers(most: int) -> Iterator[int]:
    """The numbers to try: none, one, and then twice as many each time."""
    yield 0
    number = 1
    while number < most:
        yield number
        number *= 2
    if most >= 1:
        yield most


def fastest(rates: Sequence[Rate]) -> tuple[int, str]:
    """The smallest number of workers that is about as fast as any, and the reason."""
    best = max(rates, key=lambda rate: rate.batches)
    chosen = min((rate for rate in rates if rate.batches >= ENOUGH * best.batches), key=lambda rate: rate.num_workers)
    share = chosen.batches / best.batches
    reason = f"{chosen.batches:,.1f} batches a second with {_workers(chosen.num_workers)}"
    if chosen is best:
        reason += ", the most of those tried"
    else:
        reason += f", {share:.0%} of the rate with {_workers(best.num_workers)}"
    return chosen.num_workers, reason


def for_step(rates: Sequence[Rate], step: float) -> tuple[int, str]:
    """The smallest number of workers with which a trainer hardly waits, and the reason."""
    for rate in rates:
        if rate.wait_share <= LITTLE_WAIT:
            who = f"with {_workers(rate.num_workers)} a trainer of {step * 1000:g} ms a step"
            return rate.num_workers, f"{who} waits {rate.wait_share:.1%} of its time"
    best = min(rates, key=lambda rate: rate.wait_share)
    who = f"even with {_workers(best.num_workers)} a trainer of {step * 1000:g} ms a step"
    more = "try more workers, or " if best is rates[-1] else "more workers did not help; "
    return best.num_workers, f"{who} waits {best.wait_share:.0%} of its time: {more}make the samples cheaper"


def spread(rate: Rate) -> str:
    """The rate, and the lowest and the highest of its rounds, as text."""
    return f"{figure(rate.batches)} ({figure(rate.lowest)}-{figure(rate.highest)})"


def _workers(number: int) -> str:
    return "no workers" if number == 0 else f"{number} worker{'s' * (number > 1)}"


def measured(loader: Any, num_workers: int, seconds: float, step: float) -> Rate:
    """Takes batches from a loader, epoch after epoch."""
    began = time.perf_counter()
    iterator = iter(loader)
    try:
        next(iterator)
    except StopIteration:
        raise RateError("the dataset gives no batch") from None
    first = time.perf_counter() - began
    for _ in zip(range(num_workers), iterator, strict=False):  # a worker that has given a batch has started
        pass
    start = now = time.perf_counter()
    ends, waited, came = [start], 0.0, True
    while now < start + seconds:
        try:
            next(iterator)
        except StopIteration:
            if not came:
                break  # the dataset can be read only once
            iterator, came = iter(loader), False
            continue
        got = time.perf_counter()
        waited, came = waited + got - now, True
        if step:
            time.sleep(step)
        now = time.perf_counter()
        ends.append(now)
    if len(ends) == 1:
        raise RateError("the dataset gives too few batches to be measured")
    rounds = rates_of_rounds(ends)
    return Rate(num_workers, first, statistics.median(rounds), min(rounds), max(rounds), waited / (now - start))


def rates_of_rounds(ends: Sequence[float]) -> list[float]:
    """Batches a second in rounds of equally many batches, from when the first one began, and then each one ended."""
    count = min(ROUNDS, len(ends) - 1)
    bounds = [(len(ends) - 1) * number // count for number in range(count + 1)]
    return [(last - first) / (ends[last] - ends[first]) for first, last in itertools.pairwise(bounds)]
