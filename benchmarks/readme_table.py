"""The README's table, made of benchmarks/results/latest.json.

Command: python benchmarks/readme_table.py, which prints it; --write puts it into README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tables

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "latest.json"
COMMAND = "python benchmarks/readme_table.py --write"
HEADER = ("what", "unit", "torch", "forks", "actors", "forks to torch", "actors to torch", "actors of the floor")
OURS = ("rayloader-fork", "rayloader")

Figure = dict[str, Any]


def table(document: dict[str, Any]) -> str:
    """What was measured on, and a row for each thing measured."""
    machine, settings = document["machine"], document["settings"]
    workers, cores = settings["workers"], machine["cores"]
    caption = (
        f"{workers} workers on {cores} cores ({machine['cpu']}), torch {machine['torch']}, Ray {machine['ray']}, "
        f"medians, {_dates(document)}."
    )
    rows = [_row(HEADER), _row(["---"] * len(HEADER))]
    figures = document["figures"]
    for rate in _of_torch(figures, question="throughput", metric="batches/s"):
        rows.append(_rate_row(figures, rate))
    for first in _of_torch(figures, question="first batch", metric="second epoch"):
        rows.append(_pair_row(figures, first, f"second epoch's first batch, {first['title']}", "ms", 1e3))
    for cold in _of_torch(figures, question="first batch", metric="cold", case="tiny"):
        rows.append(_pair_row(figures, cold, "first batch of a process", "s"))
    for held in _of_torch(figures, question="memory", workers=workers):
        rows.append(_pair_row(figures, held, f"workers' memory, {held['title']}", "GB"))
    return "\n".join([caption, "", *rows])


def _dates(document: dict[str, Any]) -> str:
    """When it was measured and how often: rates, which may have been measured anew, and all else."""
    rounds = {figure["question"]: len(figure["rounds"]) for figure in document["figures"] if "rounds" in figure}
    dates = {question: date[:10] for question, date in document["dates"].items() if question in rounds}
    rates = f"{dates.pop('throughput')} ({_counted(rounds.pop('throughput'), 'round')})"
    most = _counted(max(rounds.values(), default=document["settings"]["rounds"]), "round")
    others = f"{' and '.join(sorted(set(dates.values())))} ({most})"
    return rates if others == rates else f"batches/s of {rates}, all else of {others}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _of_torch(figures: list[Figure], **names: Any) -> list[Figure]:
    return [f for f in figures if f["implementation"] == "torch" and names.items() <= f.items()]


def _ours(figures: list[Figure], theirs: Figure, implementation: str, **names: Any) -> Figure:
    """The figure of rayloader beside one of torch's."""
    keys = ("question", "case", "metric", "workers")
    wanted = {**{key: theirs[key] for key in keys if key in theirs}, "implementation": implementation, **names}
    return next((f for f in figures if wanted.items() <= f.items()), {"missing": "not measured"})


def _rate_row(figures: list[Figure], theirs: Figure) -> str:
    rates = [theirs, *(_ours(figures, theirs, name) for name in OURS)]
    ratios = [_ours(figures, theirs, name, metric="ratio to torch") for name in OURS]
    of_floor = _ours(figures, theirs, OURS[-1], metric="of the floor")
    floor = "-" if "missing" in of_floor else f"{of_floor['median']:.0%}"
    return _row([theirs["title"], "batches/s", *map(_number, [*rates, *ratios]), floor])


def _pair_row(figures: list[Figure], theirs: Figure, title: str, unit: str, factor: float = 1.0) -> str:
    shown = [theirs, *(_ours(figures, theirs, name) for name in OURS)]
    return _row([title, unit, *(_number(figure, factor) for figure in shown), "", "", ""])


def _number(figure: Figure, factor: float = 1.0) -> str:
    if "missing" in figure:
        return "-"
    value = max(0.0, figure["median"] * factor)  # a difference below zero is noise
    if figure["unit"] == "GB":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _row(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    tables.tell(DOCUMENT, COMMAND, lambda: table(json.loads(RESULTS.read_text())))
