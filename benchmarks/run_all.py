"""All benchmarks, one after the other: tables to the terminal, figures to a JSON file, a plot to a PNG file.

Command: python benchmarks/run_all.py [--rounds N] [--workers N] [--quick], as `make bench` and `make bench-quick` do.
Results: benchmarks/results/latest.json and latest.png; with --quick quick.json and quick.png, which git ignores. The
JSON file holds a list of figures, each with its median, every round's value and its unit, or with what is `missing`
and why; and the machine. Until all is measured, a file whose name ends with `.part` has what there is so far. The
README's table is made of it: python benchmarks/readme_table.py --write.
"""

from __future__ import annotations

import json
import os
import time

import driver_cpu
import first_batch
import harness
import memory
import peers
import plot
import shipping
import throughput

QUESTIONS = (throughput, first_batch, driver_cpu, shipping, memory)


def main() -> None:
    """Runs them, then writes the files."""
    options = harness.options(__doc__, choice=False, needs=(*throughput.NEEDS, "matplotlib"))
    machine = harness.machine()
    seconds: dict[str, float] = {}
    dates: dict[str, str] = {}
    figures: list[harness.Figure] = []
    harness.RESULTS.mkdir(exist_ok=True)
    unfinished = harness.RESULTS / f"{'quick' if options.quick else 'latest'}.json.part"
    for question in QUESTIONS:
        begin, dates[question.QUESTION] = time.monotonic(), harness.today()
        found = question.measure(options)
        seconds[question.QUESTION] = round(time.monotonic() - begin, 1)
        question.show(found)
        figures += found
        document = {
            "machine": {**machine, "load_at_end": [round(load, 2) for load in os.getloadavg()]},
            "settings": {"rounds": options.rounds, "workers": options.workers, "quick": options.quick},
            "seconds": seconds,
            "dates": dates,
            "implementations": peers.NOTES,
            "figures": figures,
        }
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
    path = unfinished.with_suffix("")
    unfinished.replace(path)
    plot.draw(document, path.with_suffix(".png"))
    print(f"wrote {path.relative_to(harness.ROOT)} and {path.with_suffix('.png').relative_to(harness.ROOT)}")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
