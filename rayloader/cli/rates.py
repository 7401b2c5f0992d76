"""Measures loaders over a user's dataset: batches per second, how long a trainer would wait, and how many workers do.

    python -m rayloader.cli.rates torch|rayloader WORKLOAD

measures in a process of its own; torch's loader runs in a process without Ray. It reads one request per line from its
standard input, and answers each with one line. Both are JSON. What the dataset prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

LoaderKind = Literal["torch", "rayloader"]

# A rate within this share of the best is good enough: more workers would gain too little.
ENOUGH = 0.95
# More workers are worth a try if the last doubling has brought at least this factor.
GROWS = 1.10
# A trainer that waits less than this has no use for more workers.
LITTLE_WAIT = 0.02


class RateError(Exception):
    """A loader could not be measured; the text says why."""


@dataclass(frozen=True)
class Workload:
    """The loader to measure."""

    dataset: str  # "module:name" of a dataset, or of a function that returns one without arguments.
    batch_size: int = 32  # samples.
    shuffle: bool = False  # whether the samples come in random order.
    collate_fn: str = ""  # "module:name", or "" for torch's.


@dataclass(frozen=True)
class Rate:
    """What was measured."""

    num_workers: int  # of the loader.
    first: float  # seconds to the first batch, including the start of the workers.
    batches: float  # per second, once all workers run, over as many epochs as needed.
    wait_share: float  # the share of the time from then on that the trainer spent in `next` and `iter`.


class Measurer:
    """A process that measures one kind of loader; a context manager."""

    def __init__(self, kind: LoaderKind, workload: Workload) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rayloader.cli.rates", kind, json.dumps(asdict(workload))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def measure(self, num_workers: int, seconds: float, step: float = 0.0) -> Rate:
        """Loads for `seconds` with so many workers; `step`: how long the trainer works on each batch, in seconds.

        Raises:
            RateError: the dataset gives no batch, or raised.
        """
        request = {"num_workers": num_workers, "seconds": seconds, "step": step}
        with contextlib.suppress(BrokenPipeError):  # it has ended: there will be no answer
            print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()  # type: ignore[union-attr]
        if not answer:
            raise RateError("the process that measures has ended; what it printed says why")
        content = json.loads(answer)
        if "error" in content:
            raise RateError(content["error"])
        return Rate(**content)


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
    last, before = rates[-1], rates[-2] if len(rates) > 1 else rates[-1]
    if chosen is last and len(rates) > 1 and last.batches >= GROWS * before.batches:
        reason += f"; {before.batches:,.1f} with {_workers(before.num_workers)}, so more may be faster still"
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


def _serve(kind: LoaderKind, workload: Workload, answers: TextIO) -> None:
    dataset = named(workload.dataset)
    if isinstance(dataset, type) or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        dataset = dataset()
    options: dict[str, Any] = {"batch_size": workload.batch_size}
    if workload.shuffle:
        options["shuffle"] = True
    if workload.collate_fn:
        options["collate_fn"] = named(workload.collate_fn)
    for line in sys.stdin:
        request = json.loads(line)
        loader = _loader_class(kind)(dataset, num_workers=request["num_workers"], **options)
        print(json.dumps(asdict(measured(loader, **request))), file=answers, flush=True)


def _loader_class(kind: LoaderKind) -> Any:
    if kind == "torch":
        from torch.utils.data import DataLoader as TorchDataLoader

        return TorchDataLoader
    from rayloader import DataLoader

    return DataLoader


@contextlib.contextmanager
def _answers() -> Iterator[TextIO]:
    """Reserves the standard output for the answers."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        yield answers


def _main() -> None:
    sys.path.insert(0, os.getcwd())
    kind, workload = sys.argv[1:]
    with _answers() as answers:
        try:
            _serve("torch" if kind == "torch" else "rayloader", Workload(**json.loads(workload)), answers)
        except Exception as error:  # anything that the user's code raises
            text = str(error) if isinstance(error, RateError) else f"{type(error).__name__}: {error}"
            print(json.dumps({"error": text}), file=answers, flush=True)


if __name__ == "__main__":
    _main()
