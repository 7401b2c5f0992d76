"""What the trainer's process spends on a batch as the workers grow more.

Motive: the loader must not slow the training loop down, and the trainer's share must not grow with the workers.
Method: two questions. First the CPU time of the trainer's process, all threads, for a batch of the tiny and the medium
case (`throughput.epoch` counts it beside the rate), with 1 to 8 workers, implementations alternating. Then the schedule
alone, with 1 to 1,024 workers: events of a simulated crew that answers in turn, timed around `Schedule.handle`.
Command: python benchmarks/driver_cpu.py [--rounds N] [--cases tiny,medium,schedule] [--peers torch,rayloader] [--quick]
Last results: benchmarks/results/latest.json, question "driver CPU".
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

import harness
import processes
from cases import CASES
from harness import Figure, Options
from processes import Missing

QUESTION = "driver CPU"
PEERS = ["torch", "rayloader"]
LOADED = ("tiny", "medium")
WORKERS = (1, 2, 4, 8)
SCHEDULE_WORKERS = (1, 4, 16, 64, 256, 1024)
METRIC = "CPU a batch"
SCHEDULE_BUDGET_S = 0.5  # of one simulated epoch; a slow schedule gets fewer batches


def schedule_cpu(name: str, workers: int, prefetch_factor: int) -> float:
    """Microseconds in the schedule for a batch."""
    from rayloader.epoch import messages as rules
    from rayloader.epoch.schedule import Schedule

    schedule = Schedule(workers, prefetch_factor)
    pending: deque[Any] = deque([*(rules.WorkerReady(n) for n in range(workers)), rules.Opened()])
    submitted: deque[Any] = deque()
    spent, taken = 0.0, 0
    while pending or submitted:
        if not pending:
            pending.append(rules.TaskDone(submitted.popleft().task_id))
        event = pending.popleft()
        begin = time.perf_counter()
        commands = schedule.handle(event)
        spent += time.perf_counter() - begin
        for command in commands:
            match command:
                case rules.DrawIndices(count):
                    pending.extend([rules.IndicesDrawn(None)] * count)
                case rules.Submit(task):
                    submitted.append(task)
                case rules.Deliver(task):
                    taken += 1
                    pending.append(rules.BatchTaken(task.task_id))
        if spent > SCHEDULE_BUDGET_S and taken:
            break
    return 1e6 * spent / taken


def measure(options: Options) -> list[Figure]:
    """Microseconds a batch, for each number of workers."""
    cases = options.pick_cases([*LOADED, "schedule"], quick=["tiny", "schedule"])
    names = options.pick_peers(PEERS)
    found = []
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(processes.Peer(name)) for name in names}
        for case in cases:
            if case == "schedule":
                found += _measure_schedule(options)
                continue
            counts = (1, 4) if options.quick else WORKERS
            for workers in counts:
                found += _measure_workers(case, workers, sides, options)
    return found


def _measure_workers(case: str, workers: int, sides: dict[str, processes.Peer], options: Options) -> list[Figure]:
    # A third of the throughput's epoch, or a tenth: enough batches for a clock that counts nanoseconds.
    batches = CASES[case].batches // (10 if options.quick else 3)
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    missing: dict[str, Missing] = {}
    for number in range(-1, options.rounds):  # one unmeasured
        harness.say(f"{QUESTION}: {case}, {workers} workers, round {number + 1} of {options.rounds}")
        for name in harness.rotated(list(sides), number):
            answer = sides[name].call("throughput:epoch", case=case, batches=batches, workers=workers)
            if isinstance(answer, Missing):
                missing[name] = answer
            elif number >= 0:
                rounds[name].append(1e6 * answer["cpu_s_per_batch"])
    return [
        harness.figure(QUESTION, case, name, METRIC, "us", missing.get(name) or rounds[name], workers=workers)
        for name in sides
    ]


def _measure_schedule(options: Options) -> list[Figure]:
    found = []
    with processes.Peer("rayloader") as side:
        for workers in SCHEDULE_WORKERS[:: 5 if options.quick else 1]:
            harness.say(f"{QUESTION}: schedule, {workers} workers")
            asked = {"function": "driver_cpu:schedule_cpu", "workers": workers, "prefetch_factor": 2}
            rounds = [side.call(**asked) for _ in range(options.rounds)]
            found.append(harness.figure(QUESTION, "schedule", "rayloader", METRIC, "us", rounds, workers=workers))
    return found


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    counts = sorted({f["workers"] for f in figures})
    rows = [
        [
            case,
            name,
            *(harness.show(harness.find(figures, case=case, implementation=name, workers=count)) for count in counts),
        ]
        for case, name in dict.fromkeys((f["case"], f["implementation"]) for f in figures)
    ]
    header = ["case", "loader", *(f"{count} workers" for count in counts)]
    harness.print_table("Microseconds of the trainer's CPU for a batch", header, rows)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__)))
