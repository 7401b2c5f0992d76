"""How long each training step takes from the first on, by the way in which its batch gets to the GPU; and at what rate.

Method: each way is measured in a process of its own for each net, so that the first steps are those of a program that
begins; the ways take turns at being first. Of each net the first 200 steps are timed by events on the device, without
waiting for any of them: the mean of steps 5 to 100; the median of steady steps, the later half, and its ratio to steps
of the same process over a batch that is on the device; how many steps after the tenth took longer than twice the steady
median; the time in `next()`, with the call of `to` where the program copies batches itself. Then rates, over epochs
without a net: GB/s in the last of some seconds, as a share of one long copy from page-locked memory too; CPU of the
trainer's process for each batch; seconds from `iter()` to the first batch on the device, when workers start and run.
Ways: torch with `pin_memory` and `non_blocking`; the same with a prefetcher by hand, which copies the next batch on a
side stream; rayloader with `pin_memory`, and with `device`. Rayloader's workers are forks, as torch's are; Ray is not
used.
Command: python benchmarks/gpu.py [--simulate], under five minutes. With --simulate it shows without a GPU, with tiny
nets, that everything works: its figures mean nothing, and go to gpu-simulated.json.
Results: benchmarks/results/gpu.json, and the tables in docs/howto/gpu.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import gpu_cases
import harness
import tables
from gpu_cases import Case, Samples

HERE = Path(__file__).parent
COMMAND = "python benchmarks/gpu.py"
RESULTS = HERE / "results" / "gpu.json"
DOCUMENT = HERE.parent / "docs" / "howto" / "gpu.md"
sys.path += [str(HERE.parent), str(HERE.parent / "tests")]  # the library, and the simulated accelerator

STEPS = 200
RESIDENT_STEPS = 60
RATES_S = 3.0  # epochs without a net begin for so long
WARM_UP = 4  # batches, or steps, that are not counted
LIMIT_S = 120.0  # for each process; on expiry its figures are left out

Batches = Iterable[Any]


class Gpu:
    """The real device."""

    device = torch.device("cuda", 0)
    nets, rates, steps, rates_s = gpu_cases.NETS, gpu_cases.RATES, STEPS, RATES_S

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def move(self, batch: Any) -> Any:
        return [part.to(self.device, non_blocking=True) for part in batch]

    def prefetched(self, batches: Batches) -> Iterator[Any]:
        """The prefetcher that programs write by hand: the next batch is copied on a side stream."""
        side, ready = torch.cuda.Stream(), None
        for batch in batches:
            with torch.cuda.stream(side):
                following = self.move(batch)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(side)
            for part in following:
                part.record_stream(torch.cuda.current_stream())
            ready = following
        if ready is not None:
            yield ready

    def mark(self) -> Any:
        """A point in the device's time, behind all that is queued."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spans(self, marks: Sequence[Any]) -> list[float]:
        """Milliseconds from each mark to the next."""
        self.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]

    def link(self) -> float:
        """GB/s of one long copy from page-locked memory."""
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        rates = []
        for _ in range(5):
            self.synchronize()
            began = time.perf_counter()
            there.copy_(host, non_blocking=True)
            self.synchronize()
            rates.append(host.nbytes / (time.perf_counter() - began) / 1e9)
        return max(rates)

    def name(self) -> str:
        return torch.cuda.get_device_name()


class Simulated(Gpu):
    """Copies to main memory, when somebody asks whether they are done; steps are over when they return."""

    device = torch.device("cpu")
    nets, rates, steps, rates_s = gpu_cases.SIMULATED_NETS, gpu_cases.SIMULATED_RATES, 24, 0.0

    def synchronize(self) -> None:
        self.accelerator.advance(self.accelerator.queued)

    def move(self, batch: Any) -> Any:
        moved = [self.accelerator.copy(part, self.device) for part in batch]
        self.synchronize()
        return moved

    def prefetched(self, batches: Batches) -> Iterator[Any]:
        return map(self.move, batches)

    def mark(self) -> float:
        return time.perf_counter()

    def spans(self, marks: Sequence[float]) -> list[float]:
        return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]

    def link(self) -> float:
        return 1.0

    def name(self) -> str:
        return "simulated, so the figures mean nothing"

    def __init__(self) -> None:
        import pytest

        from simulated_device import SimulatedAccelerator

        torch.set_num_threads(1)  # tiny nets, beside other tests
        self.accelerator = SimulatedAccelerator(at_each_query=1).install(pytest.MonkeyPatch())


# ---- the ways


@dataclass
class Job:
    gpu: Gpu
    case: Case
    workers: int
    loader: Any = None  # of rayloader

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "dataset": Samples(self.case),
            "batch_size": self.case.batch_size,
            "num_workers": self.workers,
            "persistent_workers": True,
        }


STEADY, TO_RESIDENT, SHARE = "steady step, ms", "steady to resident", "of one long copy"
BORN, LOCKED, LOCKING = "built in page-locked memory", "page-locked, MB", "page-locking, ms"
OURS = "rayloader"
WAYS: dict[str, dict[str, Any]] = {  # with the loader's arguments
    "torch, pin_memory": {"pin_memory": True},
    "torch, prefetcher by hand": {"pin_memory": True},
    "rayloader, pin_memory": {"pin_memory": True, "workers": "fork"},
    "rayloader, device": {"device": "cuda", "workers": "fork"},
}
Epochs = Callable[[], Batches]


def epochs_of(way: str, job: Job) -> Epochs:
    """Makes a loader; gives the batches of an epoch, on the device, at each call."""
    import rayloader

    loader: Any = (rayloader.DataLoader if way.startswith(OURS) else DataLoader)(**job.arguments, **WAYS[way])
    if way.startswith(OURS):
        job.loader = loader
    if "device" in WAYS[way]:
        return lambda: loader
    return lambda: job.gpu.prefetched(loader) if "by hand" in way else map(job.gpu.move, loader)


# ---- one way and case, in a process of its own


def train(gpu: Gpu, case: Case, epochs: Epochs) -> dict[str, Any]:
    """Times the first steps, and then some over their last batch."""
    assert case.net is not None
    net = case.net().to(gpu.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        net(*batch).backward()
        optimizer.step()

    gpu.synchronize()
    marks, asked = [gpu.mark()], []
    began = time.perf_counter()
    batches, batch = iter(epochs()), None
    for _ in range(gpu.steps):
        batch = next(batches)
        asked.append(1e3 * (time.perf_counter() - began))  # the first also has iter()
        step(batch)
        marks.append(gpu.mark())
        began = time.perf_counter()
    spans = gpu.spans(marks)
    del batches
    marks = [gpu.mark()]
    for _ in range(RESIDENT_STEPS):
        step(batch)
        marks.append(gpu.mark())
    alone = statistics.median(gpu.spans(marks)[WARM_UP:])
    return of_steps(spans, asked, alone)


def of_steps(spans: list[float], asked: list[float], alone: float) -> dict[str, float]:
    """What the milliseconds of steps, of calls of `next()` and of a step over a resident batch come to."""
    half = len(spans) // 2
    steady = statistics.median(spans[half:])
    return {
        "steps 5 to 100, ms": statistics.fmean(spans[WARM_UP:half]),
        STEADY: steady,
        TO_RESIDENT: steady / alone,
        "slow steps": float(sum(span > 2 * steady for span in spans[10:])),
        "next(), median, ms": statistics.median(asked[WARM_UP:]),
        "first batch of all, s": asked[0] / 1e3,
    }


def page_locks(job: Job) -> dict[str, float]:
    """What rayloader tells of page-locked memory, of all epochs."""
    if job.loader is None:
        return {}
    total = job.loader.stats().total
    return {
        BORN: total.page_locked / total.batches,
        LOCKED: total.locked_bytes / 1e6,
        LOCKING: 1e3 * total.locking,
    }


def first_batch(gpu: Gpu, epochs: Epochs) -> float:
    """Seconds to the first batch on the device; the rest of the epoch is left."""
    began = time.perf_counter()
    batches = iter(epochs())
    next(batches)
    gpu.synchronize()
    seconds = time.perf_counter() - began
    del batches
    return seconds


def rates(gpu: Gpu, case: Case, epochs: Epochs) -> dict[str, Any]:
    """The rate over the batches of the last of some epochs, after its first few."""
    found: dict[str, Any] = {"first batch of all, s": first_batch(gpu, epochs)}
    found["first batch, s"] = first_batch(gpu, epochs)
    end = time.perf_counter() + gpu.rates_s
    while "GB/s" not in found or time.perf_counter() < end:
        seen = 0
        for batch in epochs():
            seen += 1
            if seen == WARM_UP:
                nbytes = batch[0].nbytes
                gpu.synchronize()
                began, own = time.perf_counter(), time.process_time()
        gpu.synchronize()
        seconds, count = time.perf_counter() - began, seen - WARM_UP
        found["GB/s"] = count * nbytes / seconds / 1e9
        found["trainer CPU, ms"] = 1e3 * (time.process_time() - own) / count
    return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one way and case."""
    gpu = Simulated() if arguments.simulate else Gpu()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    gpu.move([torch.zeros(1)])  # the context exists before anything is timed
    gpu.synchronize()
    way, name = arguments.one
    case = {**gpu.nets, **gpu.rates}[name]
    epochs = epochs_of(way, job := Job(gpu, case, arguments.workers))
    found = rates(gpu, case, epochs) if case.net is None else train(gpu, case, epochs)
    return {**found, **page_locks(job)}


# ---- all of them


def run(way: str, case: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one way and case in a process of its own; says why it could not."""
    command = [sys.executable, __file__, "--one", way, case, "--workers", str(arguments.workers)]
    command += ["--simulate"] if arguments.simulate else []
    harness.say(f"{case}: {way}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{way}, {case}: not done after {LIMIT_S:.0f} s", file=sys.stderr)
        return []
    if done.returncode:
        print(f"{way}, {case}: status {done.returncode}\n{done.stderr[-1500:]}", file=sys.stderr)
        return []
    return [{"case": case, "way": way, **json.loads(done.stdout.splitlines()[-1])}]


def run_all(gpu: Gpu, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of all rounds; each case begins with another way."""
    figures = []
    for number in range(arguments.rounds):
        cases = [case for case in (*gpu.nets, *gpu.rates) if any(part in case for part in arguments.cases)]
        for turn, case in enumerate(cases, number):
            for way in harness.rotated([*WAYS], turn):
                figures += run(way, case, arguments)
    harness.say("")
    return figures


# ---- what is made of the figures

LOCK_COLUMNS = {BORN: ".0%", LOCKED: ".0f", LOCKING: ".0f"}
STEP_COLUMNS = {  # with their formats in the document
    "steps 5 to 100, ms": ".2f",
    STEADY: ".2f",
    TO_RESIDENT: ".3f",
    "slow steps": ".0f",
    "next(), median, ms": ".2f",
    "first batch of all, s": ".2f",
    **LOCK_COLUMNS,
}
RATE_COLUMNS = {
    "GB/s": ".1f",
    SHARE: ".0%",
    "trainer CPU, ms": ".1f",
    "first batch, s": ".2f",
    "first batch of all, s": ".2f",
    **LOCK_COLUMNS,
}


def summary(figures: list[dict[str, Any]], cases: Iterable[str]) -> list[dict[str, Any]]:
    """Medians over the rounds, a row for each case and way."""
    rows = []
    for case, way in itertools.product(cases, WAYS):
        rounds = [figure for figure in figures if (figure["case"], figure["way"]) == (case, way)]
        if rounds:
            columns = [column for column, value in rounds[0].items() if isinstance(value, float)]
            medians = {column: statistics.median(figure[column] for figure in rounds) for column in columns}
            rows.append({"case": case, "way": way, **medians})
    return rows


def results_of(figures: list[dict[str, Any]], gpu: Gpu, link: float, title: str) -> dict[str, Any]:
    """All that is written down."""
    rate_rows = summary(figures, gpu.rates)
    for row in rate_rows:
        row[SHARE] = row["GB/s"] / link
    steps = summary(figures, gpu.nets)
    return {"title": title, "link": link, "steps": steps, "rates": rate_rows, "figures": figures}


def _cells(rows: list[dict[str, Any]], columns: dict[str, str]) -> list[list[str]]:
    cells = [[format(row[column], of) if column in row else "-" for column, of in columns.items()] for row in rows]
    return [[row["case"], row["way"], *line] for row, line in zip(rows, cells, strict=True)]


def show(results: dict[str, Any]) -> None:
    """The tables, on the terminal."""
    for title, rows, columns in (("steps", results["steps"], STEP_COLUMNS), ("rates", results["rates"], RATE_COLUMNS)):
        harness.print_table(f"{title}: {results['title']}", ["case", "way", *columns], _cells(rows, columns))


def table(results: dict[str, Any]) -> str:
    """The tables of the document."""
    steps = f"The steps have not been measured on a GPU yet: `{COMMAND}` does so, and puts their table here."
    if results["steps"]:
        steps = tables.markdown([["net", "way", *STEP_COLUMNS], *_cells(results["steps"], STEP_COLUMNS)])
    rates = tables.markdown([["batches", "way", *RATE_COLUMNS], *_cells(results["rates"], RATE_COLUMNS)])
    return "\n\n".join([results["title"], steps, rates])


# ---- the command line


def main() -> None:
    """Measures all, or with `--one` one way and case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="without a GPU")
    parser.add_argument("--rounds", type=int, default=1, help="how often each way is measured; 1 by default")
    most = max(1, min(12, len(os.sched_getaffinity(0)) - 4))
    parser.add_argument("--workers", type=int, default=most, help="of each loader; four less than cores, at most 12")
    parser.add_argument("--cases", nargs="+", default=[""], help="parts of the names of nets and batches to measure")
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder for gpu.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.simulate and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --simulate runs everything without one")
    if arguments.one:
        print(json.dumps(measure(arguments)))
        return
    if importlib.util.find_spec("rich") is None:
        parser.error("this needs rich, of the extra `bench`")
    gpu = Simulated() if arguments.simulate else Gpu()
    link = gpu.link()
    title = (
        f"{gpu.name()}; {os.cpu_count()} cores, {arguments.workers} workers; torch {torch.__version__}; "
        f"{harness.today()[:10]}; one long copy: {link:.1f} GB/s; rounds: {arguments.rounds}."
    )
    results = results_of(run_all(gpu, arguments), gpu, link, title)
    show(results)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"gpu{'-simulated' if arguments.simulate else ''}.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    if path.resolve() == RESULTS.resolve():
        tables.put(DOCUMENT, COMMAND, table(results))


if __name__ == "__main__":
    main()
