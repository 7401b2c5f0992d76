"""All benchmarks, one after the other: tables to the terminal, figures to a JSON file, a plot to a PNG file.

Command: python benchmarks/run_all.py [--rounds N] [--workers N] [--quick], as `make bench` and `make bench-quick` do.
Results: benchmarks/results/latest.json and latest.png; with --quick quick.json and quick.png, which git ignores. The
JSON file holds a list of figures, each with its median, every round's value and its unit, or with what is `missing`
and why; and the machine. Until all is measured, a file whose name ends with `.part` has what there is so far. The
README's table is made of it: python benchmarks/readme_table.py --write. `--plot FILE` only draws the plot of a file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import first_batch
import harness
import memory
import peers
import throughput

COLOURS = {
    "torch": "#ee6c4d",
    "torch-spawn": "#f4a58a",
    "torchdata": "#c9a227",
    "spdl": "#7a9e7e",
    "grain": "#8d6cab",
    "ray-data": "#5fa8d3",
    "rayloader": "#1b4965",
    "rayloader-fork": "#62a87c",
}
QUESTIONS = (throughput, first_batch, memory)


def main() -> None:
    """Runs them, then writes the files."""
    options = harness.options(__doc__, choice=False, needs=(*throughput.NEEDS, "psutil", "matplotlib"))
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
    draw(document, path.with_suffix(".png"))
    print(f"wrote {path.relative_to(harness.ROOT)} and {path.with_suffix('.png').relative_to(harness.ROOT)}")


# ---- the plot


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = [f for f in document["figures"] if "missing" not in f]
    canvas, panels = pyplot.subplot_mosaic("AA;BC", figsize=(16, 10), layout="constrained")
    ratios, first, held = panels["A"], panels["B"], panels["C"]
    _bars(ratios, [f for f in figures if f.get("metric") == "ratio to torch"], "Batches a second, ratio to torch")
    ratios.axhline(1, color=COLOURS["torch"], linewidth=1)
    _bars(first, [f for f in figures if f["question"] == "first batch"], "Seconds to the first batch")
    _lines(held, [f for f in figures if f["question"] == "memory" and "workers" in f], "Memory of the workers, GB")
    machine, settings = document["machine"], document["settings"]
    canvas.suptitle(
        f"{settings['workers']} workers, {machine['cores']} cores ({machine['cpu']}), medians of {settings['rounds']} "
        f"rounds, {machine['date'][:10]}"
    )
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def _bars(axes: Any, figures: list[dict[str, Any]], title: str) -> None:
    """A group of bars for each case, a bar for each implementation; logarithmic."""
    metrics = {f["metric"] for f in figures}
    groups = list(dict.fromkeys(_group(f, metrics) for f in figures))
    names = list(dict.fromkeys(f["implementation"] for f in figures))
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        of_name = {_group(f, metrics): f["median"] for f in figures if f["implementation"] == name}
        places = [place + width * (number - (len(names) - 1) / 2) for place, g in enumerate(groups) if g in of_name]
        heights = [of_name[group] for group in groups if group in of_name]
        axes.bar(places, heights, width, label=name, color=COLOURS.get(name))
    axes.set_title(title)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_yscale("log")
    if names:
        axes.legend(fontsize="small")


def _group(figure: dict[str, Any], metrics: set[str]) -> str:
    return figure["case"] if len(metrics) == 1 else f"{figure['case']}:\n{figure['metric']}"


def _lines(axes: Any, figures: list[dict[str, Any]], title: str) -> None:
    """A line for each case and implementation, over the number of workers."""
    cases = list(dict.fromkeys(f["case"] for f in figures))
    for case, name in dict.fromkeys((f["case"], f["implementation"]) for f in figures):
        points = [(f["workers"], f["median"]) for f in figures if (f["case"], f["implementation"]) == (case, name)]
        style = ["-", "--", ":", "-."][cases.index(case) % 4]
        axes.plot(*zip(*points, strict=True), style, marker="o", label=f"{case}, {name}", color=COLOURS.get(name))
    axes.set_title(title)
    axes.set_xlabel("workers")
    axes.set_xscale("log", base=2)
    if figures:
        axes.legend(fontsize="small")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plot"]:
        draw(json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[2]).with_suffix(".png"))
    else:
        with harness.clean_exit():
            main()
