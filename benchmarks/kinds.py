"""Forks beside Ray actors on one machine: rate, waiting, memory and CPU, over long epochs, short ones and new loaders.

Motive: when is it worth having Ray on one machine? Forks begin at once and share the program's memory, until reference
counts copy it page by page; actors stay warm, and hold one image of the dataset's arrays, and copies of all else.
Method: each kind of workers has a process of its own; they alternate, one dataset after the other. A trainer that
sleeps a millisecond a batch takes epochs of a dataset: `long`, one epoch of `LONG_S` seconds; `epochs`, ten epochs of
`EPOCH_S` seconds; `short`, twenty epochs of 100 batches; `new`, the same with a new loader for each. The samples are
rows of an array (500 MB), of the same array in a mapped file, and fields of a million dicts in a list. What is told of
each: batches a second; the share of the time that the trainer waited; CPU seconds of all processes for 1,000 batches;
and after the last of the ten epochs the memory of all processes (PSS, GB), less the program's own before it had a
loader. Ray's own processes count with actors.
Command: python benchmarks/kinds.py [--cases array,file,dicts] [--quick]
Results: the table in docs/performance.md, by --write.
"""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import harness
import tables
from harness import Figure, Options
from processes import Peer

QUESTION = "kinds"
COMMAND = "python benchmarks/kinds.py --write"
DOCUMENT = harness.ROOT / "docs" / "performance.md"
KINDS = {"rayloader-fork": "forks", "rayloader": "actors"}
CASES = {"array": "500 MB array", "file": "500 MB mapped file", "dicts": "a million dicts"}
ROWS, COLUMNS = 1_000_000, 125  # float32
STEP_S = 0.001
LONG_S, EPOCH_S, EPOCHS = 20.0, 2.0, 10
SHORT_EPOCHS, SHORT_BATCHES = 20, 100
BATCH_SIZE = 64
_kept: dict[str, Any] = {}


class Rows(Dataset[Any]):
    """Samples with labels: rows of an array, or of a list of dicts."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if isinstance(row, dict):
            return float(row["x"]), row["label"]
        return torch.from_numpy(np.array(row)), index % 10


def prepare(name: str, case: str) -> None:
    """Makes the dataset."""
    if case == "dicts":
        rows: Any = [{"x": number / 7, "label": number % 10, "path": f"/data/{number}"} for number in range(ROWS)]
    else:
        rows = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    if case == "file":
        folder = _kept["folder"] = tempfile.TemporaryDirectory()
        path = Path(folder.name) / "rows"
        rows.tofile(path)
        rows = np.memmap(path, rows.dtype, "r", shape=rows.shape)
    gc.collect()
    _kept["dataset"], _kept["before"] = Rows(rows), harness.pss(descendants=True)
    next(iter(_loader(name)))  # Ray and the first actors have started


def _loader(name: str, length: int | None = None) -> Any:
    import rayloader

    workers = "ray" if name == "rayloader" else "fork"
    dataset = _kept["dataset"]
    sampler = torch.utils.data.RandomSampler(dataset, num_samples=length) if length else None
    return rayloader.DataLoader(
        dataset, BATCH_SIZE, sampler=sampler, shuffle=not length, num_workers=2, workers=workers
    )


def run(name: str, case: str, what: str, seconds: float) -> dict[str, float]:
    """Takes the batches of one row of the table in this process."""
    if _kept.get("case") != case:
        _kept.clear()
        prepare(name, case)
        _kept["case"] = case
    counted, waited, cpu, began = 0, 0.0, _cpu(), time.perf_counter()
    short = SHORT_BATCHES * BATCH_SIZE if what in ("short", "new") else None
    loader = _loader(name, short)
    epochs = {"long": 1, "epochs": EPOCHS}.get(what, SHORT_EPOCHS)
    for _ in range(epochs):
        if what == "new":
            loader = _loader(name, short)
        until = time.perf_counter() + seconds
        iterator = iter(loader)
        while True:
            asked = time.perf_counter()
            if next(iterator, None) is None:
                break
            got = time.perf_counter()
            waited += got - asked
            counted += 1
            if short is None and got > until:
                break
            time.sleep(STEP_S)
    spent = time.perf_counter() - began
    found = {"rate": counted / spent, "waits": waited / spent, "cpu": 1000 * (_cpu() - cpu) / counted}
    if what == "epochs":  # its last iterator, and its workers, still live
        found["held"] = (harness.pss(descendants=True) - _kept["before"]) / 1e9
    return found


def _cpu() -> float:
    """Seconds of CPU of this process and of those that it has started, ended ones included."""
    import psutil

    total = 0.0
    this = psutil.Process()
    for process in [this, *this.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


METRICS = {"rate": "batches/s", "waits": "waits", "cpu": "CPU s for 1,000", "held": "memory, GB"}


def measure(options: Options) -> list[Figure]:
    """The figures of each dataset, kind of workers and way to load."""
    whats = {"long": LONG_S, "epochs": EPOCH_S, "short": 0.0, "new": 0.0}
    if options.quick:
        whats = {"long": 3.0, "epochs": 0.3, "short": 0.0, "new": 0.0}
    found: list[Figure] = []
    for case in options.pick_cases(list(CASES)):
        with Peer("rayloader-fork") as forks, Peer("rayloader") as actors:
            for number, (what, seconds) in enumerate(whats.items()):
                for name in harness.rotated(list(KINDS), number):
                    harness.say(f"{QUESTION}: {case}, {what}, {KINDS[name]}")
                    peer = forks if name == "rayloader-fork" else actors
                    answer = peer.call("kinds:run", case=case, what=what, seconds=seconds)
                    for key, value in answer.items():
                        found.append(harness.figure(QUESTION, case, name, METRICS[key], "", [value], what=what))
    return found


def table(figures: list[Figure]) -> str:
    """A row for each dataset and way to load."""
    header = ["dataset", "way", *(f"{metric}: {kind}" for metric in METRICS.values() for kind in KINDS.values())]
    rows = [header]
    for case, what in dict.fromkeys((f["case"], f["what"]) for f in figures):
        cells = [
            harness.show(harness.find(figures, case=case, what=what, implementation=name, metric=metric))
            for metric in METRICS.values()
            for name in KINDS
        ]
        rows.append([CASES[case], what, *cells])
    return f"2 workers on 2 cores, {harness.today()[:10]}.\n\n{tables.markdown(rows)}"


if __name__ == "__main__":
    with harness.clean_exit():
        tables.tell(DOCUMENT, COMMAND, lambda: table(measure(harness.options(__doc__))))
