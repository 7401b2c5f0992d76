"""How far one trainer's process reaches: the simulation with the costs that `scale.py` has measured.

Motive: which number of workers, and how many bytes a second, can one process take, and what would move that?
Method: the costs of the user's thread come from benchmarks/results/scale.json, by step; those of the thread that reads
large remote batches are the rest of the process's, with the most workers: on a line through the sizes, what it takes
for each byte counts as the kernel's, and the rest as Python's; what a wake-up costs for each worker that is looked
at, from `waiting.py` in the same run. First the simulation is held against the rates that were
measured. Then it goes to 4,096 workers of 40 ms a batch, on a network of 25 Gbit/s
with 0.5 ms each way, for a consumer that takes all it gets; then each cost is left out in turn; then one node of eight
is lost, for as long as `scale.py` has measured. The time that the real schedule takes is measured on the way.
Command: python benchmarks/scaling.py [--quick]
Results: benchmarks/results/scaling.json and scaling.png.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import harness
import scale
import waiting
from harness import Figure
from rayloader.transport.lanes import SMALL_BYTES
from simulate import Costs, NodeLoss, Plan, simulate

QUESTION = "scaling"
COUNTS = (16, 64, 256, 512, 1024, 2048, 4096)
WITHOUT = 1024  # workers where each cost is left out in turn
NETWORK = {"bandwidth": 25e9 / 8, "latency": 0.0005}
SHARED: dict[str, Any] = {"local": {}, "calls": {}, "remote": NETWORK}
KINDS: dict[str, dict[str, Any]] = {
    "in order": {},
    "in_order=False": {"in_order": False},
    'scheduling="dynamic"': {"dynamic": True},
}


def wakes_per_worker(options: harness.Options) -> dict[str, float]:
    """Seconds of a wake-up for each worker, by way: the slope of a line through what `waiting.py` measures."""
    figures = waiting.measure(options)
    waiting.show(figures)
    slopes = {}
    for way in waiting.WAYS:
        points = {f["workers"]: 1e-6 * f["median"] for f in figures if f["case"] == way}
        slopes[way] = statistics.linear_regression(list(points), list(points.values())).slope
    return {"local": slopes["lines"], "calls": slopes["Ray calls"], "remote": slopes["lines"]}


def costs_of(figures: list[Figure], way: str, case: str, wake_per_worker: float) -> Costs:
    """The measured costs of a way and a case."""
    step = {name: _by_workers(figures, way, case, f"step {name}") for name in ("draw", "schedule", "send", "open")}
    looked = _sum(_by_workers(figures, way, case, f"step {name}") for name in ("wait", "receive"))
    waits = _by_workers(figures, way, case, "waits a batch")
    wakes = [seconds / waits[n] - n * wake_per_worker for n, seconds in looked.items()]
    wake = statistics.median(wakes or [0.0])  # large remote batches are waited for by the other thread
    known = _sum([*step.values(), looked])
    rest = {n: seconds - known[n] for n, seconds in _by_workers(figures, way, case, "steps in all").items()}
    typical = {name: statistics.median(values.values()) for name, values in step.items()}
    typical |= {"wake": max(0.0, wake), "wake_per_worker": wake_per_worker}
    if way == "remote" and scale.NBYTES[case] > SMALL_BYTES:  # smaller ones are read by the user's thread
        measured = {f["case"] for f in figures if f["implementation"] == way and f["metric"] == scale.PROCESS}
        read = {scale.NBYTES[one]: _beside(figures, way, one) for one in measured if scale.NBYTES[one] > SMALL_BYTES}
        line = statistics.linear_regression(list(read), list(read.values()))
        typical |= {"ahead": max(0.0, line.intercept), "read_per_byte": max(0.0, line.slope)}
    return Costs(**typical, receive=statistics.median(rest.values()))


def _beside(figures: list[Figure], way: str, case: str) -> float:
    """Seconds of CPU time a batch that the process takes beside the user's thread.

    With the most workers: the more there are, the more batches the thread that reads finds when it is woken.
    """
    process, thread = (_by_workers(figures, way, case, metric) for metric in (scale.PROCESS, scale.THREAD))
    return process[max(process)] - thread[max(process)]


def _by_workers(figures: list[Figure], way: str, case: str, metric: str) -> dict[int, float]:
    found = [f for f in figures if (f["implementation"], f["case"], f["metric"]) == (way, case, metric)]
    return {f["workers"]: f["median"] for f in found}


def _sum(parts: Any) -> dict[int, float]:
    total: dict[int, float] = {}
    for part in parts:
        for workers, seconds in part.items():
            total[workers] = total.get(workers, 0.0) + seconds
    return total


def plan(way: str, case: str, workers: int, costs: Costs, **more: Any) -> Plan:
    """An epoch whose middle half is two windows: where the trainer is the limit, it goes in rounds of one."""
    steady = {"batches": 8 * workers, "work": scale.WORK_S, "spread": 0.05, "nbytes": scale.NBYTES[case]}
    return Plan(workers, costs=costs, **{**steady, **SHARED[way], **more})


def check(figures: list[Figure], costs: dict[tuple[str, str], Costs]) -> list[Figure]:
    """What the simulation says of what was measured: a figure each, beside the measured rate."""
    found = []
    for (way, case), known in costs.items():
        for workers, rate in _by_workers(figures, way, case, scale.RATE).items():
            here = {"bandwidth": float("inf"), "latency": 0.001, "spread": 0.0, "step": scale.STEP_S}
            simulated = simulate(plan(way, case, workers, known, **here)).rate
            found.append(_figure(case, way, "simulated rate", simulated, "1/s", workers=workers, measured=rate))
    return found


def extrapolate(costs: dict[tuple[str, str], Costs], counts: tuple[int, ...]) -> list[Figure]:
    """Rates for up to thousands of workers; and the limit with each cost left out."""
    found = []
    for (way, case), known in costs.items():
        if way == "calls":
            continue  # on one machine nobody needs them
        for workers in counts:
            rate = simulate(plan(way, case, workers, known)).rate
            ideal = workers / scale.WORK_S
            found.append(_figure(case, way, "rate", rate, "1/s", workers=workers, ideal=ideal))
        for name in [field.name for field in dataclasses.fields(Costs) if getattr(known, field.name)]:
            without = simulate(plan(way, case, WITHOUT, dataclasses.replace(known, **{name: 0.0}))).rate
            found.append(_figure(case, way, f"rate without {name}", without, "1/s", workers=WITHOUT))
    return found


def lose_a_node(costs: Costs, away: float) -> dict[str, list[float]]:
    """When each batch came to the user: 64 workers on 8 nodes, of which one is lost after 2 s.

    Args:
        costs: of remote tiny batches.
        away: seconds until processes on other nodes are its workers.
    """
    lost = [NodeLoss(2.0, range(8), notice=away, restart=0.0)]
    more: dict[str, Any] = {"losses": lost, "batches": 20_000}
    return {name: simulate(plan("remote", "tiny", 64, costs, **more, **kind)).delivered for name, kind in KINDS.items()}


def time_schedule(counts: tuple[int, ...]) -> list[Figure]:
    """What `Schedule.handle` itself takes on this machine."""
    found = []
    for name, kind in KINDS.items():
        for workers in counts:
            seconds = simulate(
                plan("local", "tiny", workers, Costs(receive=1e-5), batches=4 * workers, **kind)
            ).handle_s
            found.append(_figure(name, "rayloader", "schedule a batch", seconds, "s", workers=workers))
    return found


def _figure(case: str, way: str, metric: str, value: float, unit: str, **more: Any) -> Figure:
    return harness.figure(QUESTION, case, way, metric, unit, [value], **more)


def draw(figures: list[Figure], deliveries: dict[str, list[float]], path: Path) -> None:
    """Writes the plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, ((rates, nbytes), (loss, schedule)) = pyplot.subplots(2, 2, figsize=(16, 10), layout="constrained")
    of_rate = [f for f in figures if f["metric"] == "rate"]
    for way, case in dict.fromkeys((f["implementation"], f["case"]) for f in of_rate):
        points = _by_workers(of_rate, way, case, "rate")
        rates.plot(list(points), list(points.values()), marker="o", label=f"{way}, {case}")
        gigabytes = [rate * scale.NBYTES[case] / 1e9 for rate in points.values()]
        nbytes.plot(list(points), gigabytes, marker="o", label=f"{way}, {case}")
    counts = sorted({f["workers"] for f in of_rate})
    rates.plot(counts, [count / scale.WORK_S for count in counts], "k:", label="ideal")
    rates.set_title("Batches a second of one trainer, 40 ms of work each")
    nbytes.axhline(NETWORK["bandwidth"] / 1e9, color="k", linestyle=":", label="25 Gbit/s")
    nbytes.set_title("GB a second")
    nbytes.set_ylim(1e-2, 1e2)
    for name, delivered in deliveries.items():
        bins = [sum(second <= when < second + 0.25 for when in delivered) * 4 for second in _quarters(12)]
        loss.plot(_quarters(12), bins, label=name)
    loss.set_title("64 workers on 8 nodes, one lost at 2 s: batches a second")
    loss.set_xlabel("seconds")
    of_schedule = [f for f in figures if f["metric"] == "schedule a batch"]
    for name in dict.fromkeys(f["case"] for f in of_schedule):
        points = _by_workers(of_schedule, "rayloader", name, "schedule a batch")
        schedule.plot(list(points), [1e6 * seconds for seconds in points.values()], marker="o", label=name)
    schedule.set_title("The real schedule, microseconds a batch")
    for axes in (rates, nbytes, schedule):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("workers")
    for axes in (rates, nbytes, loss, schedule):
        axes.legend(fontsize="small")
    canvas.savefig(path, dpi=90)
    pyplot.close(canvas)


def _quarters(seconds: int) -> list[float]:
    return [quarter / 4 for quarter in range(4 * seconds)]


def main() -> None:
    """Simulates, prints and writes the results."""
    options = harness.options(__doc__, choice=False, needs=("rich", "matplotlib"))
    measured = [figure for way in scale.known().values() for figure in way["figures"]]
    pairs = dict.fromkeys((f["implementation"], f["case"]) for f in measured if f["metric"] == "waits a batch")
    per_worker = wakes_per_worker(options)
    costs = {(way, case): costs_of(measured, way, case, per_worker[way]) for way, case in pairs}
    counts = COUNTS[:-2] if options.quick else COUNTS
    figures = check(measured, costs) + extrapolate(costs, counts) + time_schedule(counts)
    rows = [[f["implementation"], f["case"], f["metric"], str(f["workers"]), harness.show(f)] for f in figures]
    harness.print_table("Simulated", ["way", "case", "metric", "workers", "value"], rows)
    (away,) = _by_workers(measured, "remote", "tiny", scale.GAP).values()
    deliveries = lose_a_node(costs["remote", "tiny"], away)
    document = {
        "costs": [{"way": way, "case": case, **dataclasses.asdict(known)} for (way, case), known in costs.items()],
        "network": NETWORK,
        "figures": figures,
    }
    path = harness.RESULTS / "scaling.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    draw(figures, deliveries, path.with_suffix(".png"))
    print(f"wrote {path.relative_to(harness.ROOT)} and {path.with_suffix('.png').relative_to(harness.ROOT)}")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
