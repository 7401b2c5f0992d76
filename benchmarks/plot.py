"""The plot of a results file: ratios to torch, first batches, driver CPU and memory over the workers.

Command: python benchmarks/plot.py benchmarks/results/latest.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "torch": "#ee6c4d",
    "torch-spawn": "#f4a58a",
    "torchdata": "#c9a227",
    "spdl": "#7a9e7e",
    "spdl-threads": "#4f772d",
    "grain": "#8d6cab",
    "ray-data": "#5fa8d3",
    "rayloader": "#1b4965",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = [f for f in document["figures"] if "missing" not in f]
    canvas, ((ratios, first), (cpu, memory)) = pyplot.subplots(2, 2, figsize=(16, 10), layout="constrained")
    _bars(ratios, [f for f in figures if f.get("metric") == "ratio to torch"], "Batches a second, ratio to torch")
    ratios.axhline(1, color=COLOURS["torch"], linewidth=1)
    _bars(first, [f for f in figures if f["question"] == "first batch"], "Seconds to the first batch")
    _lines(cpu, [f for f in figures if f["question"] == "driver CPU"], "CPU of the trainer's process, us a batch")
    cpu.set_yscale("log")
    _lines(memory, [f for f in figures if f["question"] == "memory" and "workers" in f], "Memory of the workers, GB")
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
    source = Path(sys.argv[1]) if len(sys.argv) == 2 else None
    if source is None or not source.is_file():
        sys.exit("usage: python benchmarks/plot.py RESULTS.json")
    draw(json.loads(source.read_text()), source.with_suffix(".png"))
