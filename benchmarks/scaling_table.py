"""The tables of docs/scaling.md, made of what `scale.py` and `scaling.py` have measured and simulated.

    python benchmarks/scaling_table.py aims            # print a table, or several, or all
    python benchmarks/scaling_table.py --write         # put them into docs/scaling.md

tests/unit/test_scaling.py holds the page to the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tables

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "python benchmarks/scaling_table.py"

SIZES = {"tiny": "tiny, 50 kB", "medium": "medium, 1.2 MB", "large": "large, 9.6 MB"}
RATE, THREAD, PROCESS = "batches/s", "CPU of the user's thread", "CPU of the process"
COUNTS = (1, 2, 4, 8, 16, 32)  # workers
SIMULATED = (16, 64, 256, 1024, 4096)
# Costs of the simulation, and how a table calls them.
COSTS = {
    "draw": "draw",
    "schedule": "schedule",
    "send": "send",
    "wake": "wake-up",
    "receive": "receive",
    "open": "open",
    "ahead": "read: Python",
    "read_per_byte": "read: bytes",
}

# What was asked for.
SHARE = 0.95  # of the ideal rate, with 16 remote workers
CPU_MS = {"tiny": 0.1, "medium": 0.4}  # of the trainer's process, for a batch
GROWTH = 1.3  # of that CPU time, from 2 workers to 32
RAY_DATA = 1.5  # times its rate, medium
RAY_GET = 0.5  # of the bytes a second of one ray.get at a time, large
GAP_S = 5.0  # without a batch, when a node is lost


class Found:
    """The figures of both files."""

    def __init__(self, scale: dict[str, Any], scaling: dict[str, Any]) -> None:
        self.ways = list(scale)
        self._figures = [*(f for way in scale.values() for f in way["figures"]), *scaling["figures"]]
        self._known = {(f["implementation"], f["case"], f["metric"], f["workers"]): f for f in self._figures}

    @classmethod
    def load(cls) -> Found:
        """From the folder of results."""
        scale, scaling = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("scale", "scaling"))
        return cls(scale, scaling)

    def get(self, way: str, case: str, metric: str, workers: int) -> Any:
        """A figure; None if there is none."""
        return self._known.get((way, case, metric, workers))

    def median(self, way: str, case: str, metric: str, workers: int) -> float:
        """The value of a figure that must be there."""
        return float(self._known[way, case, metric, workers]["median"])

    @property
    def gap(self) -> float:
        """Seconds."""
        return next(float(f["median"]) for f in self._figures if f["metric"].startswith("longest time between"))


def _by_counts(
    found: Found, metric: str, show: Callable[[Any], str], counts: tuple[int, ...], ways: list[str]
) -> list[list[str]]:
    """A row for each way and size that has such figures."""
    rows = [["", *(f"{count:,}" for count in counts)]]
    rows[0][1] += " workers" if counts[0] > 1 else " worker"
    for way in ways:
        for case, name in SIZES.items():
            figures = [found.get(way, case, metric, count) for count in counts]
            if any(figures):
                rows.append([f"{way}, {name}", *("-" if figure is None else show(figure) for figure in figures)])
    return rows


def _rates(found: Found) -> list[list[str]]:
    def show(figure: Any) -> str:
        return f"{figure['median']:.0f} ({figure['median'] / figure['ideal']:.0%})"

    return _by_counts(found, RATE, show, COUNTS, found.ways)


def _thread(found: Found) -> list[list[str]]:
    return _by_counts(found, THREAD, _ms, COUNTS, [way for way in found.ways if way != "ray-data"])


def _process(found: Found) -> list[list[str]]:
    return _by_counts(found, PROCESS, _ms, COUNTS, found.ways)


def _ms(figure: Any) -> str:
    return f"{1e3 * figure['median']:.2f}"


def _held_against(found: Found) -> list[list[str]]:
    def show(figure: Any) -> str:
        return f"{figure['median']:.0f} / {figure['measured']:.0f}"

    return _by_counts(found, "simulated rate", show, COUNTS, ["local", "remote"])


def _simulated(found: Found) -> list[list[str]]:
    return _by_counts(found, "rate", lambda figure: f"{figure['median']:,.0f}", SIMULATED, ["local", "remote"])


def _without(found: Found) -> list[list[str]]:
    rows = [["", *COSTS.values()]]
    for way in ("local", "remote"):
        for case, name in SIZES.items():
            whole = found.median(way, case, "rate", 1024)
            figures = [found.get(way, case, f"rate without {cost}", 1024) for cost in COSTS]
            rows.append([f"{way}, {name}", *("-" if f is None else f"{f['median'] / whole:.2f}" for f in figures)])
    return rows


def _schedule(found: Found) -> list[list[str]]:
    rows = [["", *(f"{count:,}" for count in SIMULATED)]]
    rows[0][1] += " workers"
    for kind in ("in order", "in_order=False", 'scheduling="dynamic"'):
        times = [1e6 * found.median("rayloader", kind, "schedule a batch", count) for count in SIMULATED]
        name = kind if kind == "in order" else f"`{kind}`"
        rows.append([name, *(f"{time:.1f}" if time < 10 else f"{time:.0f}" for time in times)])
    return rows


def _aims(found: Found) -> list[list[str]]:
    rows = [(*row, "yes" if met else "no") for *row, met in _aimed(found)]
    return [["of remote workers", "asked", "measured", "met"], *map(list, rows)]


def _aimed(found: Found) -> Iterator[tuple[str, str, str, bool]]:
    for case in CPU_MS:
        rate = found.get("remote", case, RATE, 16)
        share = rate["median"] / rate["ideal"]
        yield f"rate of 16, {case}", f"{SHARE:.0%} of the ideal", f"{share:.1%}", share >= SHARE
    cpu = {(case, n): 1e3 * found.median("remote", case, PROCESS, n) for case in CPU_MS for n in (2, 16, 32)}
    for case, most in CPU_MS.items():
        for workers in (16, 32):
            ms = cpu[case, workers]
            yield f"CPU for a batch of {workers}, {case}", f"{most:g} ms", f"{ms:.2f} ms", ms <= most
    for case in CPU_MS:
        growth = cpu[case, 32] / cpu[case, 2]
        yield f"CPU of 32 to that of 2, {case}", f"{GROWTH:g} times", f"{growth:.2f} times", growth <= GROWTH
    times = found.median("remote", "medium", RATE, 4) / found.median("ray-data", "medium", RATE, 4)
    yield "rate of 4 to Ray Data's, medium", f"{RAY_DATA:g} times", f"{times:.1f} times", times >= RAY_DATA
    most = found.get("remote", "large", RATE, 32)
    share = most["median"] * most["nbytes"] / found.median("ray-get", "large", "bytes/s", 1)
    yield "bytes/s of 32 to one `ray.get`'s, large", f"{RAY_GET:g} times", f"{share:.1f} times", share >= RAY_GET
    yield "time without a batch when a node is lost", f"{GAP_S:g} s", f"{found.gap:.1f} s", found.gap <= GAP_S


TABLES: dict[str, Callable[[Found], list[list[str]]]] = {
    "rates": _rates,
    "thread": _thread,
    "process": _process,
    "aims": _aims,
    "held-against": _held_against,
    "simulated": _simulated,
    "without": _without,
    "schedule": _schedule,
}


def table(name: str, found: Found) -> str:
    """One of TABLES, in Markdown."""
    return tables.markdown(TABLES[name](found))


def main() -> None:
    """Prints or writes the tables that the command line names."""
    names = [name for name in sys.argv[1:] if name != "--write"] or list(TABLES)
    found = Found.load()
    for name in names:
        made = table(name, found)
        print(f"{name}\n\n{made}\n")
        if "--write" in sys.argv[1:]:
            tables.put(PAGE, f"{COMMAND} {name}", made)


if __name__ == "__main__":
    main()
