"""Measures loaders over a user's dataset: batches per second, how long a trainer would wait, and how many workers do.

What the dataset prints meanwhile goes to standard error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import DataLoader as TorchDataLoader

from rayloader.loader import DataLoader

LoaderKind = Literal["torch", "rayloader"]

# A rate within this share of the best is good enough: more workers would gain too little.
ENOUGH = 0.95
# A trainer that waits less than this has no use for more workers.
LITTLE_WAIT = 0.02


class RateError(Exception):
    """A loader could not be measured; the text says why."""


@dataclass(frozen=True)
class Rate:
    """What was measured."""

    num_workers: int  # of the loader.
    first: float  # seconds to the first batch, including the start of the workers.
    batches: float  # per second, once all workers run, over as many epochs as needed.
    wait_share: float  # the share of the time from then on that the trainer spent in `next` and `iter`.


def measure(kind: LoaderKind, dataset: str, num_workers: int, seconds: float, step: float, **options: Any) -> Rate:
    """Loads for `seconds` with so many workers.

    Args:
        kind: of the loader.
        dataset: "module:name" of a dataset, or of a function that returns one without arguments.
        num_workers: of the loader.
        seconds: how long to measure.
        step: how long the trainer works on each batch, in seconds.
        **options: of the loader; `collate_fn` as "module:name", or "" for torch's.

    Raises:
        RateError: the dataset gives no batch, or raised.
    """
    loader_class: Any = TorchDataLoader if kind == "torch" else DataLoader
    try:
        with _prints_to_standard_error():
            collate_fn = named(options["collate_fn"]) if options["collate_fn"] else None
            loader = loader_class(_dataset(dataset), num_workers=num_workers, **{**options, "collate_fn": collate_fn})
            return measured(loader, num_workers, seconds, step)
    except RateError:
        raise
    except Exception as error:  # anything that the user's code raises
        raise RateError(f"{type(error).__name__}: {error}") from error


@functools.cache
def _dataset(name: str) -> Any:
    dataset = named(name)
    is_made = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    return dataset if is_made and not isinstance(dataset, type) else dataset()


@contextlib.contextmanager
def _prints_to_standard_error() -> Iterator[None]:
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


def _workers(number: int) -> str:
    return "no workers" if number == 0 else f"{number} worker{'s' * (number > 1)}"


def named(name: str) -> Any:
    """The object named by "module:name"; modules are also searched for in the working directory.

    Raises:
        RateError: there is none.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    module, _, path = name.partition(":")
    if not module or not path:
        raise RateError(f"an object must be named as module:name, got {name!r}; for instance train:dataset")
    try:
        target = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise RateError(f"{name} cannot be found: {error}") from error
    return target


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
    batches, waited, came = 0, 0.0, True
    while now < start + seconds:
        try:
            next(iterator)
        except StopIteration:
            if not came:
                break  # the dataset can be read only once
            iterator, came = iter(loader), False
            continue
        got = time.perf_counter()
        waited += got - now
        batches, came = batches + 1, True
        if step:
            time.sleep(step)
        now = time.perf_counter()
    if not batches:
        raise RateError("the dataset gives too few batches to be measured")
    spent = now - start
    return Rate(num_workers, first, batches / spent, waited / spent)
