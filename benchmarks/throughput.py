"""Batches a second, beside torch's own loader, other loaders, and the floor.

Motive: what does it cost, or bring, to change the import? And how much is left to gain?
Method: for each case the same dataset and arguments for all. Each implementation runs in a process of its own, torch's
and every other that is not built on Ray in one that never sees Ray. They alternate, one measurement each a round, in an
order that rotates, after one that does not count. The clock runs from the first batch to the end of the epoch, for
the first batch is a question of its own (`first_batch.py`); cases of several short epochs are timed whole, beginnings
included. The consumer touches nothing; torch's loader and rayloader are measured a second time with one that reads
every byte once. Everybody has OMP_NUM_THREADS=1. Figures are medians over the rounds; ratios are of medians. The floor
is what is left to gain: as many processes as there are workers, all at once, that fetch and collate the same batches
into four buffers in turn. Loaders beside these three have shorter epochs (`LONG`), for some take minutes. The CPU time
of torch's workers begins with the fork of their process, and that of rayloader's with the clock.
Command: python benchmarks/throughput.py [--rounds N] [--cases tiny,medium] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "throughput".
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import resource
import time
from collections.abc import Iterator
from typing import Any

import harness
import peers
import processes
from cases import CASES, Case, read_every_byte
from harness import Figure, Options
from processes import Missing

QUESTION = "throughput"
PEERS = ["torch", "torchdata", "spdl", "spdl-threads", "grain", "ray-data", "rayloader", "rayloader-fork", "floor"]
QUICK_PEERS = ["torch", "rayloader", "rayloader-fork", "floor"]
NEEDS = ("rich", "psutil", "PIL", "sklearn")
READERS = ("torch", "rayloader")  # measured with a consumer that reads, too, and by the CPU time they take
# The others have epochs of a sixth of the length, or two in place of several.
LONG = {*READERS, "rayloader-fork", "floor"}
QUICK_CASES = ("tiny", "tiny-short", "tiny-depth-2", "medium", "large", "text", "stream")
RATE, RATE_READ = "batches/s", "batches/s, every byte read"
CPU = {"cpu_s_per_batch": "trainer's CPU a batch", "workers_cpu_s_per_batch": "workers' CPU a batch"}
RATIOS = {RATE: "ratio to torch", RATE_READ: "ratio to torch, every byte read"}

_loader: dict[tuple[Any, ...], Any] = {}  # the last one, in an implementation's process


def epoch(name: str, case: str, batches: int, workers: int, *, epochs: int = 0, read: bool = False) -> dict[str, float]:
    """One measurement in this process: the rate, and the seconds of CPU that it and its workers spent on a batch.

    Args:
        name: the implementation.
        case: see `CASES`.
        batches: an epoch.
        workers: of the loader.
        epochs: in place of the case's number of them, where that is more than one.
        read: whether the consumer reads every byte.
    """
    epochs = epochs or CASES[case].epochs
    key = (case, batches, workers)
    if key not in _loader:
        _loader.clear()
        gc.collect()
        _loader[key] = peers.make(name, CASES[case], batches, workers)
    loader, workers_began = _loader[key], _workers_cpu()
    if isinstance(loader, peers.Floor):
        count, seconds, cpu_seconds = batches * epochs, loader.seconds(), 0.0
    elif CASES[case].epochs > 1:
        count, seconds, cpu_seconds = _whole_epochs(name, CASES[case], loader, batches, workers, epochs, read=read)
    else:
        iterator = iter(loader)
        next(iterator)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        count = _consume(iterator, CASES[case], read=read)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        _check(name, case, count + 1, batches)
    return {
        "batches_per_s": count / seconds,
        "cpu_s_per_batch": cpu_seconds / count,
        "workers_cpu_s_per_batch": (_workers_cpu() - workers_began) / count,
    }


def _workers_cpu() -> float:
    """Seconds of CPU of the workers: rayloader's, or child processes, whether they have ended or not."""
    import psutil

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = ended.ru_utime + ended.ru_stime
    for worker in harness.ray_workers() or psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended just now
            spent += sum(worker.cpu_times()[:2])
    return spent


def _whole_epochs(
    name: str, case: Case, loader: Any, batches: int, workers: int, epochs: int, *, read: bool
) -> tuple[int, float, float]:
    """Batches, seconds and seconds of CPU of several epochs, from the first `iter()` on."""
    count = 0
    dataset = case.dataset(batches) if case.new_loader else None
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for _ in range(epochs):
        if case.new_loader:
            loader = peers.make_for(name, case, dataset, batches, workers)
        taken = _consume(iter(loader), case, read=read)
        _check(name, case.title, taken, batches)
        count += taken
    return count, time.perf_counter() - begin, time.process_time() - cpu_begin


def _consume(iterator: Iterator[Any], case: Case, *, read: bool) -> int:
    """Takes the rest of an epoch's batches; their number."""
    count, kept = 0, []
    for batch in iterator:
        count += 1
        if read:
            read_every_byte(batch)
        if case.keep is not None:
            kept.append(case.keep(batch))
    return count


def _check(name: str, case: str, count: int, batches: int) -> None:
    if count != batches:
        raise RuntimeError(f"{name} gave {count} batches of {case} instead of {batches}")


def measure(options: Options) -> list[Figure]:
    """Rates, ratios to torch and shares of the floor, for each case."""
    names = options.pick_peers(PEERS, quick=QUICK_PEERS)
    for name in names:
        if (package := peers.PACKAGES.get(name)) is not None and importlib.util.find_spec(package) is None:
            harness.say(f"{QUESTION}: {name} is left out, for {package} of the extra `bench` is not installed")
    figures = []
    with contextlib.ExitStack() as stack:
        sides = {
            name: stack.enter_context(processes.Peer(name, peers.FLOOR_ENV if name == "floor" else None))
            for name in names
        }
        for case in options.pick_cases(list(CASES), quick=QUICK_CASES):
            figures += _measure_case(case, sides, options)
    return figures


def _measure_case(case: str, sides: dict[str, processes.Peer], options: Options) -> list[Figure]:
    sizes = {name: _size(name, CASES[case], options) for name in sides}
    rounds: dict[str, list[dict[str, float]]] = {}
    missing: dict[str, Missing] = {}
    for name, side in sides.items():
        harness.say(f"{QUESTION}: {case}, {name}, warming up")
        try:
            first = side.call(f"{QUESTION}:epoch", case=case, **sizes[name])
        except processes.PeerDied as died:
            if name in peers.REQUIRED:
                raise
            harness.say(str(died))
            side.restart()
            first = Missing("its process died, as when a machine runs out of memory")
        if isinstance(first, Missing):
            missing[name] = first
        else:
            rounds[name] = []
    read: dict[str, list[dict[str, float]]] = {name: [] for name in rounds if name in READERS and options.read}
    for number in range(options.rounds):
        harness.say(f"{QUESTION}: {case}, round {number + 1} of {options.rounds}")
        for name in harness.rotated(list(rounds), number):
            rounds[name].append(sides[name].call(f"{QUESTION}:epoch", case=case, **sizes[name]))
        for name in harness.rotated(list(read), number):
            read[name].append(sides[name].call(f"{QUESTION}:epoch", case=case, **sizes[name], read=True))

    def figure(name: str, metric: str, unit: str, answers: list[dict[str, float]] | Missing, key: str) -> Figure:
        scale = 1e6 if unit == "us" else 1
        values = answers if isinstance(answers, Missing) else [scale * answer[key] for answer in answers]
        return harness.figure(QUESTION, case, name, metric, unit, values, **sizes[name], title=CASES[case].title)

    rates = {name: figure(name, RATE, "1/s", missing.get(name) or rounds[name], "batches_per_s") for name in sides}
    rates_read = {name: figure(name, RATE_READ, "1/s", answers, "batches_per_s") for name, answers in read.items()}
    spent = [
        figure(name, metric, "us", rounds[name], key)
        for name in rounds
        if name in READERS
        for key, metric in CPU.items()
    ]
    return [*rates.values(), *rates_read.values(), *_ratios(case, rates), *_ratios_read(rates_read), *spent]


def _size(name: str, case: Case, options: Options) -> dict[str, int]:
    """Of an epoch; see `LONG`."""
    is_short = options.quick or (name not in LONG and case.epochs == 1)
    epochs = case.epochs if name in LONG else min(case.epochs, 2)
    return {"batches": case.epoch_length(is_short), "epochs": epochs, "workers": options.workers}


def _ratios(case: str, rates: dict[str, Figure]) -> list[Figure]:
    """Everybody's to torch; rayloader's to the floor, by both kinds of workers."""
    target = {"target": CASES[case].target} if CASES[case].target else {}
    floor_target = {"target": CASES[case].floor_target} if CASES[case].floor_target else {}
    found = [
        harness.ratio(rate, rates["torch"], metric=RATIOS[RATE], **(target if name == "rayloader" else {}))
        for name, rate in rates.items()
        if "torch" in rates and name not in ("torch", "floor")
    ]
    for name, aims in (("rayloader", floor_target), ("rayloader-fork", {})):
        if {name, "floor"} <= set(rates):
            found.append(harness.ratio(rates[name], rates["floor"], metric="of the floor", **aims))
    return [ratio for ratio in found if ratio is not None]


def _ratios_read(rates: dict[str, Figure]) -> list[Figure]:
    if not set(READERS) <= set(rates):
        return []
    ratio = harness.ratio(rates["rayloader"], rates["torch"], metric=RATIOS[RATE_READ])
    return [ratio] if ratio is not None else []


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    names = list(dict.fromkeys(f["implementation"] for f in figures))
    cases = list(dict.fromkeys(f["case"] for f in figures))
    metrics = (RATIOS[RATE], RATIOS[RATE_READ], "of the floor")
    ratios = [{"metric": metric} for metric in metrics] if "rayloader" in names else []
    rows = []
    for case in cases:
        of_case = [f for f in figures if f["case"] == case]
        cells = [harness.find(of_case, implementation=name, metric=RATE) for name in names]
        cells += [harness.find(of_case, implementation="rayloader", **ratio) for ratio in ratios]
        rows.append([CASES[case].title, *map(harness.show, cells)])
    harness.print_table(
        "Batches a second", ["case", *names, *("rayloader " + ratio["metric"] for ratio in ratios)], rows
    )
    spent = [(name, metric) for name in READERS if name in names for metric in CPU.values()]
    rows = [
        [
            CASES[case].title,
            *(harness.show(harness.find(figures, case=case, implementation=n, metric=m)) for n, m in spent),
        ]
        for case in cases
    ]
    header = ["case", *(f"{name}: {metric}" for name, metric in spent)]
    harness.print_table("Microseconds of CPU for a batch", header, rows)
    for name in names:
        print(f"- {name}: {peers.NOTES[name]}")
    harness.print_missing(figures)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__, needs=NEEDS)))
