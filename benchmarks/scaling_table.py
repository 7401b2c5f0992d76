"""The tables of docs/scaling.md, made of what `scale.py` and `scaling.py` have measured and simulated.

    python benchmarks/scaling_table.py aims            # print a table, or several, or all
    python benchmarks/scaling_table.py --write         # put them into docs/scaling.md

tests/unit/test_scaling.py holds the page to the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
import scale
import scaling
import tables
from harness import Figure

PAGE = harness.ROOT / "docs" / "scaling.md"
SIMULATIONS = harness.RESULTS / "scaling.json"
COMMAND = "python benchmarks/scaling_table.py"

SIZES = {"tiny": "tiny, 50 kB", "medium": "medium, 1.2 MB", "large": "large, 9.6 MB"}
SIMULATED = (16, 64, 256, 1024, 4096)  # workers
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


def known() -> list[Figure]:
    """All that was measured and simulated last."""
    measured = [figure for way in scale.known().values() for figure in way["figures"]]
    return [*measured, *json.loads(SIMULATIONS.read_text())["figures"]]


def _get(figures: list[Figure], way: str, case: str, metric: str, workers: int) -> Figure | None:
    return harness.find(figures, implementation=way, case=case, metric=metric, workers=workers)


def _median(figures: list[Figure], way: str, case: str, metric: str, workers: int) -> float:
    """The value of a figure that must be there."""
    figure = _get(figures, way, case, metric, workers)
    assert figure is not None, (way, case, metric, workers)
    return float(figure["median"])


def _header(counts: Sequence[int]) -> list[str]:
    first, *others = counts
    return ["", f"{first} {'worker' if first == 1 else 'workers'}", *(f"{count:,}" for count in others)]


def _by_counts(
    figures: list[Figure], metric: str, show: Callable[[Any], str], counts: tuple[int, ...], ways: Sequence[str]
) -> list[list[str]]:
    """A row for each way and size that has such figures."""
    rows = [_header(counts)]
    for way in ways:
        for case, name in SIZES.items():
            found = [_get(figures, way, case, metric, count) for count in counts]
            if any(found):
                rows.append([f"{way}, {name}", *("-" if figure is None else show(figure) for figure in found)])
    return rows


def _rates(figures: list[Figure]) -> list[list[str]]:
    def show(figure: Any) -> str:
        return f"{figure['median']:.0f} ({figure['median'] / figure['ideal']:.0%})"

    return _by_counts(figures, scale.RATE, show, scale.COUNTS, scale.WAYS)


def _thread(figures: list[Figure]) -> list[list[str]]:
    return _by_counts(figures, scale.THREAD, _ms, scale.COUNTS, [way for way in scale.WAYS if way != "ray-data"])


def _process(figures: list[Figure]) -> list[list[str]]:
    return _by_counts(figures, scale.PROCESS, _ms, scale.COUNTS, scale.WAYS)


def _ms(figure: Any) -> str:
    return f"{1e3 * figure['median']:.2f}"


def _held_against(figures: list[Figure]) -> list[list[str]]:
    def show(figure: Any) -> str:
        return f"{figure['median']:.0f} / {figure['measured']:.0f}"

    return _by_counts(figures, "simulated rate", show, scale.COUNTS, ["local", "remote"])


def _simulated(figures: list[Figure]) -> list[list[str]]:
    return _by_counts(figures, "rate", lambda figure: f"{figure['median']:,.0f}", SIMULATED, ["local", "remote"])


def _without(figures: list[Figure]) -> list[list[str]]:
    rows = [["", *COSTS.values()]]
    for way in ("local", "remote"):
        for case, name in SIZES.items():
            whole = _median(figures, way, case, "rate", scaling.WITHOUT)
            found = [_get(figures, way, case, f"rate without {cost}", scaling.WITHOUT) for cost in COSTS]
            rows.append([f"{way}, {name}", *("-" if f is None else f"{f['median'] / whole:.2f}" for f in found)])
    return rows


def _schedule(figures: list[Figure]) -> list[list[str]]:
    rows = [_header(SIMULATED)]
    for kind in ("in order", "in_order=False", 'scheduling="dynamic"'):
        times = [1e6 * _median(figures, "rayloader", kind, "schedule a batch", count) for count in SIMULATED]
        name = kind if kind == "in order" else f"`{kind}`"
        rows.append([name, *(f"{time:.1f}" if time < 10 else f"{time:.0f}" for time in times)])
    return rows


def _aims(figures: list[Figure]) -> list[list[str]]:
    rows = [(*row, "yes" if met else "no") for *row, met in _aimed(figures)]
    return [["of remote workers", "asked", "measured", "met"], *map(list, rows)]


def _aimed(figures: list[Figure]) -> Iterator[tuple[str, str, str, bool]]:
    for case in CPU_MS:
        rate: Any = _get(figures, "remote", case, scale.RATE, 16)
        share = rate["median"] / rate["ideal"]
        yield f"rate of 16, {case}", f"{SHARE:.0%} of the ideal", f"{share:.1%}", share >= SHARE
    cpu = {(case, n): 1e3 * _median(figures, "remote", case, scale.PROCESS, n) for case in CPU_MS for n in (2, 16, 32)}
    for case, most in CPU_MS.items():
        for workers in (16, 32):
            ms = cpu[case, workers]
            yield f"CPU for a batch of {workers}, {case}", f"{most:g} ms", f"{ms:.2f} ms", ms <= most
    for case in CPU_MS:
        growth = cpu[case, 32] / cpu[case, 2]
        yield f"CPU of 32 to that of 2, {case}", f"{GROWTH:g} times", f"{growth:.2f} times", growth <= GROWTH
    times = _median(figures, "remote", "medium", scale.RATE, 4) / _median(figures, "ray-data", "medium", scale.RATE, 4)
    yield "rate of 4 to Ray Data's, medium", f"{RAY_DATA:g} times", f"{times:.1f} times", times >= RAY_DATA
    fastest: Any = _get(figures, "remote", "large", scale.RATE, 32)
    share = fastest["median"] * fastest["nbytes"] / _median(figures, "ray-get", "large", scale.BANDWIDTH, 1)
    yield "bytes/s of 32 to one `ray.get`'s, large", f"{RAY_GET:g} times", f"{share:.1f} times", share >= RAY_GET
    gap = harness.find(figures, metric=scale.GAP)["median"]  # type: ignore[index]
    yield "time without a batch when a node is lost", f"{GAP_S:g} s", f"{gap:.1f} s", gap <= GAP_S


TABLES: dict[str, Callable[[list[Figure]], list[list[str]]]] = {
    "rates": _rates,
    "thread": _thread,
    "process": _process,
    "aims": _aims,
    "held-against": _held_against,
    "simulated": _simulated,
    "without": _without,
    "schedule": _schedule,
}


def table(name: str, figures: list[Figure]) -> str:
    """One of TABLES, in Markdown."""
    return tables.markdown(TABLES[name](figures))


def main() -> None:
    """Prints or writes the tables that the command line names."""
    names = [name for name in sys.argv[1:] if name != "--write"] or list(TABLES)
    figures = known()
    for name in names:
        made = table(name, figures)
        print(f"{name}\n\n{made}\n")
        if "--write" in sys.argv[1:]:
            tables.put(PAGE, f"{COMMAND} {name}", made)


if __name__ == "__main__":
    main()
