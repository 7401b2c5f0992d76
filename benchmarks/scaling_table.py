"""The table of docs/scaling.md that holds what was measured against what was asked for, made of scale.json.

    python benchmarks/scaling_table.py            # print it
    python benchmarks/scaling_table.py --write    # put it into docs/scaling.md

tests/unit/test_scaling.py holds the page to the file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scaling.md"
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
BEGIN, END = "<!-- table: python benchmarks/scaling_table.py --write -->", "<!-- end of table -->"
BLOCK = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)

# What was asked for.
SHARE = 0.95  # of the ideal rate, with 16 remote workers
CPU_MS = {"tiny": 0.1, "medium": 0.4}  # of the trainer's process, for a batch
GROWTH = 1.3  # of that CPU time, from 2 workers to 32
RAY_DATA = 1.5  # times its rate, medium
RAY_GET = 0.5  # of the bytes a second of one ray.get at a time, large
GAP_S = 5.0  # without a batch, when a node is lost


def table(results: dict[str, Any]) -> str:
    """The block between the markers, with them."""
    rows = [(*row, "yes" if met else "no") for *row, met in _rows(results)]
    lines = ["| " + " | ".join(row) + " |" for row in (("of remote workers", "asked", "measured", "met"), *rows)]
    return "\n".join([BEGIN, "", lines[0], "|---|---|---|---|", *lines[1:], "", END])


def _rows(results: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    def of(way: str, case: str, metric: str, workers: int) -> dict[str, Any]:
        found = results[way]["figures"]
        key = case, metric, workers
        return next(dict(f) for f in found if (f["case"], f["metric"], f["workers"]) == key)

    for case in CPU_MS:
        rate = of("remote", case, "batches/s", 16)
        share = rate["median"] / rate["ideal"]
        yield f"rate of 16, {case}", f"{SHARE:.0%} of the ideal", f"{share:.1%}", share >= SHARE
    cpu = {(c, n): 1e3 * of("remote", c, "CPU of the process", n)["median"] for c in CPU_MS for n in (2, 16, 32)}
    for case, most in CPU_MS.items():
        for workers in (16, 32):
            ms = cpu[case, workers]
            yield f"CPU for a batch of {workers}, {case}", f"{most:g} ms", f"{ms:.2f} ms", ms <= most
    for case in CPU_MS:
        growth = cpu[case, 32] / cpu[case, 2]
        yield f"CPU of 32 to that of 2, {case}", f"{GROWTH:g} times", f"{growth:.2f} times", growth <= GROWTH
    times = of("remote", "medium", "batches/s", 4)["median"] / of("ray-data", "medium", "batches/s", 4)["median"]
    yield "rate of 4 to Ray Data's, medium", f"{RAY_DATA:g} times", f"{times:.1f} times", times >= RAY_DATA
    most = of("remote", "large", "batches/s", 32)
    share = most["median"] * most["nbytes"] / of("ray-get", "large", "bytes/s", 1)["median"]
    yield "bytes/s of 32 to one `ray.get`'s, large", f"{RAY_GET:g} times", f"{share:.1f} times", share >= RAY_GET
    gap = next(f for f in results["remote"]["figures"] if f["metric"].startswith("longest time between"))["median"]
    yield "time without a batch when a node is lost", f"{GAP_S:g} s", f"{gap:.1f} s", gap <= GAP_S


if __name__ == "__main__":
    made = table(json.loads(RESULTS.read_text()))
    print(made)
    if "--write" in sys.argv[1:]:
        PAGE.write_text(BLOCK.sub(lambda _: made, PAGE.read_text()))
