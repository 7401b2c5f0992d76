"""The cold start taken apart: what a short program pays besides its batches, from the import to the end of its process.

Motive: a short program, such as a test or the first try of a script, mostly waits for what only its beginning and its
end cost.
Method: each round gives each loader a new process, in an order that changes. The program imports the library, torch
included; makes the dataset, which is not counted; reads two epochs of a few batches, with the clock over `iter()` and
one `next()`; and ends. The end is from its last batch until the process is gone, as its parent sees it. The ratio to
torch's loader is the median over rounds.
Cases: "small" has 64 samples; "arrays" 2 GB in one array, and "dicts" a million small dicts, of which 64 are read.
Command: python benchmarks/cold_start.py [--rounds N] [--cases small,arrays,dicts] [--peers torch,fork,ray]
Results, where all cases and loaders are measured: benchmarks/results/cold_start.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import harness
from harness import Figure, Options

QUESTION = "cold start"
RESULTS = harness.RESULTS / "cold_start.json"
PEERS = {"torch": "torch's DataLoader", "fork": 'workers="fork"', "ray": 'workers="ray"'}
TITLES = {"small": "64 samples", "arrays": "2 GB of arrays", "dicts": "a million dicts"}
METRICS = ("import", "first batch", "second epoch", "end")
SAMPLES = 64  # that are read
BATCH_SIZE = 8
LIMIT_S = 600.0  # for a program; on expiry it is an error


def dataset(case: str) -> Any:
    """The samples of a case."""
    import numpy as np

    if case == "small":
        return np.arange(SAMPLES * 10, dtype=np.float32).reshape(SAMPLES, 10)
    if case == "arrays":
        return np.ones((8000, 62_500), dtype=np.float32)
    return [{"number": number, "name": f"sample {number}", "label": number % 10} for number in range(1_000_000)]


def program(peer: str, case: str, workers: int) -> None:
    """Runs one loader, and prints its seconds, with the time of its last batch."""
    begin = time.perf_counter()
    if peer == "torch":
        from torch.utils.data import DataLoader
    else:
        from rayloader import DataLoader  # type: ignore[assignment]
    seconds = {"import": time.perf_counter() - begin}
    from torch.utils.data import SequentialSampler

    more = {} if peer == "torch" else {"workers": peer}
    sampler = SequentialSampler(range(SAMPLES))
    loader = DataLoader(dataset(case), batch_size=BATCH_SIZE, sampler=sampler, num_workers=workers, **more)
    for metric in ("first batch", "second epoch"):
        begin = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        seconds[metric] = time.perf_counter() - begin
        count = 1 + sum(1 for _ in iterator)
        if count != SAMPLES // BATCH_SIZE:
            raise RuntimeError(f"{peer} gave {count} batches of {case} instead of {SAMPLES // BATCH_SIZE}")
    last = time.monotonic()
    print(json.dumps({"seconds": seconds, "last": last}), flush=True)


def seconds_of(peer: str, case: str, workers: int) -> dict[str, float]:
    """The seconds of a program in a process of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with tempfile.TemporaryFile("w+") as output:  # workers would keep a pipe open
        command = [sys.executable, __file__, "--program", peer, case, str(workers)]
        subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, stdout=output, check=True, timeout=LIMIT_S)
        end = time.monotonic()
        output.seek(0)
        answer = json.loads(output.read().splitlines()[-1])
    return {**answer["seconds"], "end": end - answer["last"]}


def measure(options: Options) -> list[Figure]:
    """All metrics, for each case and loader."""
    peers = options.pick_peers(list(PEERS))
    found: list[Figure] = []
    for case in options.pick_cases(list(TITLES), quick=["small"]):
        answers: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
        for number in range(options.rounds):
            harness.say(f"{QUESTION}: {case}, round {number + 1} of {options.rounds}")
            for peer in harness.rotated(peers, number):
                answers[peer].append(seconds_of(peer, case, options.workers))
        for peer, rounds in answers.items():
            for metric in METRICS:
                values = [seconds[metric] for seconds in rounds]
                found.append(harness.figure(QUESTION, case, peer, metric, "s", values, title=TITLES[case]))
    return found


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    rows = []
    for case, peer in dict.fromkeys((f["case"], f["implementation"]) for f in figures):
        cells = []
        for metric in METRICS:
            own, torchs = (harness.find(figures, case=case, implementation=p, metric=metric) for p in (peer, "torch"))
            cells.append(_cell(own, torchs if peer != "torch" else None))
        rows.append([TITLES[case], PEERS[peer], *cells])
    title = "Seconds, and in brackets the ratio to torch"
    harness.print_table(title, ["dataset", "loader", *METRICS], rows)


def _cell(figure: Figure | None, torchs: Figure | None) -> str:
    ratio = harness.ratio(figure, torchs) if figure and torchs else None
    return harness.show(figure) + ("" if ratio is None else f" ({statistics.median(ratio['rounds']):.2g})")


def main() -> None:
    """Measures, prints and writes."""
    options, machine = harness.options(__doc__), harness.machine()
    figures = measure(options)
    show(figures)
    if not (options.cases or options.peers or options.quick):
        settings = {"rounds": options.rounds, "workers": options.workers}
        RESULTS.write_text(json.dumps({"machine": machine, "settings": settings, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        with harness.clean_exit():
            main()
