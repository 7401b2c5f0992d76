"""Seconds that the frameworks' own examples take with torch's loader and with rayloader: first batch, epoch, exit.

Motive: most people load through a framework. What they wait for is the first batch, each epoch and the end of the
process, and their losses must stay what they were.
Method: each round starts each framework's example (`framework_cases.py`) twice, by turns, in new processes: with
torch's loader (torchdata's own for torchdata), without Ray, and with rayloader. Three epochs of batches of 32 pictures
(3x64x64, augmented at random, with labels), a small network on one thread. First batch: from the beginning of `fit()`
or `train()`, or from making the loader, until the network gets it; packages are imported by then, but what rayloader
imports and starts at `iter()` counts. Later epoch: from the last batch of one epoch to that of the next. Exit: from the
end of the training to the end of the process. Medians of the rounds; the losses of the last batch must be equal to the
last digit. With torchrun and Ray Train two processes train, with a loader each and half the batch. Each of torchrun's
ranks starts a Ray of its own; with Ray Train either loader runs in one.
Command: python benchmarks/frameworks.py [--rounds N] [--workers N] [--cases lightning,datasets] [--quick]
Needs the extras `frameworks` and `trainers`; a framework that is not installed is left out.
Results: benchmarks/results/frameworks.json, and the table in docs/performance.md; those of --quick and of single
frameworks go to a file that git ignores.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import tables
from framework_cases import FRAMEWORKS, RANKS
from harness import Figure, Options
from processes import Missing, PeerError

QUESTION = "frameworks.patching"
COMMAND = "python benchmarks/frameworks.py"
RESULTS = harness.RESULTS / "frameworks.json"
DOCUMENT = harness.ROOT / "docs" / "performance.md"
LOADERS = ("torch", "rayloader")
METRICS = ("first batch", "later epoch", "exit")
BATCHES, QUICK_BATCHES = 60, 10  # an epoch
PACKAGES = {*FRAMEWORKS} - {"plain loop", "torchrun", "ray train"}  # named as the frameworks
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}")
LIMIT_S = 300.0  # of one example, which takes well under a minute; then it is killed


def measure(options: Options) -> list[Figure]:
    """All metrics of each framework with each loader."""
    batches = QUICK_BATCHES if options.quick else BATCHES
    found: list[Figure] = []
    for framework in options.pick_cases(list(FRAMEWORKS)):
        if framework in PACKAGES and importlib.util.find_spec(framework) is None:
            missing = Missing(f"{framework} is not installed")
            found += [
                harness.figure(QUESTION, framework, name, metric, "s", missing)
                for name in LOADERS
                for metric in METRICS
            ]
            continue
        answers: dict[str, list[Any]] = {name: [] for name in LOADERS}
        for number in range(options.rounds):
            harness.say(f"{QUESTION}: {framework}, round {number + 1} of {options.rounds}")
            for name in harness.rotated(LOADERS, number):
                answers[name].append(trained(framework, name, batches, options.workers))
        for name, of_name in answers.items():
            losses = [answer["loss"] for answer in of_name]
            for metric in METRICS:
                seconds = [answer["figures"][metric] for answer in of_name]
                found.append(harness.figure(QUESTION, framework, name, metric, "s", seconds, losses=losses))
    return found


def trained(framework: str, loader: str, batches: int, workers: int) -> dict[str, Any]:
    """What one process has measured, and the time that it took to end.

    Raises:
        PeerError: it failed, or took too long.
    """
    script = Path(__file__).with_name("framework_cases.py")
    launcher = TORCHRUN if framework == "torchrun" else ()
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "said", "w+") as said:
        file = Path(folder) / "figures"
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), framework, loader, str(batches), str(workers), str(file)],
            stdout=said,
            stderr=said,
            env={**environment, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            start_new_session=True,
        )
        ended = None
        try:
            with os.fdopen(os.pidfd_open(process.pid)) as end:
                if select.select([end], [], [], LIMIT_S)[0]:
                    ended = time.monotonic()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left
            process.wait()
        if process.returncode or ended is None:
            said.seek(0)
            raise PeerError(f"{framework} with {loader} failed (status {process.returncode}):\n{said.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(file.read_text())
    answer["figures"]["exit"] = ended - answer["ended"]
    return answer


def table(document: dict[str, Any]) -> str:
    """In Markdown: what was measured on, and a row for each framework."""
    machine, settings, figures = document["machine"], document["settings"], document["figures"]
    caption = (
        f"Seconds with {settings['workers']} workers on {machine['cores']} cores, epochs of {BATCHES} batches of 32 "
        f"pictures, {rounds_of(settings['rounds'])}, {machine['date'][:10]}."
    )
    rows = [["framework", *(f"{metric}, {name}" for metric in METRICS for name in LOADERS), "same loss"]]
    for framework in dict.fromkeys(figure["case"] for figure in figures):
        of_it = [
            harness.find(figures, case=framework, implementation=name, metric=metric)
            for metric in METRICS
            for name in LOADERS
        ]
        rows.append([framework, *(harness.show(figure) for figure in of_it), same_loss(figures, framework)])
    return f"{caption}\n\n{tables.markdown(rows)}"


def rounds_of(count: int) -> str:
    """How often it was measured, in words."""
    return "one round" if count == 1 else f"medians of {count} rounds"


def same_loss(figures: list[Figure], framework: str) -> str:
    """Whether the losses of all rounds, with both loaders, are one."""
    losses = {loss for figure in figures if figure["case"] == framework for loss in figure.get("losses", [])}
    return "-" if not losses else "yes" if len(losses) == 1 else "NO"


def main() -> None:
    """Measures, prints and writes."""
    options = harness.options(__doc__, needs=())
    machine = harness.machine()
    figures = measure(options)
    harness.say("")
    settings = {"rounds": options.rounds, "workers": options.workers, "quick": options.quick}
    document = {"machine": machine, "settings": settings, "figures": figures}
    print(made := table(document))
    harness.print_missing(figures)
    path = harness.RESULTS / "quick.frameworks.json" if options.quick or options.cases else RESULTS
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.relative_to(harness.ROOT)}")
    if path == RESULTS:
        tables.put(DOCUMENT, COMMAND, made)
    if any(same_loss(figures, framework) == "NO" for framework in FRAMEWORKS):
        sys.exit("error: the losses differ")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
