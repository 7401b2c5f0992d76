"""Seconds of short epochs over other libraries' datasets, with torch's loader and with rayloader.

Motive: what people run first is their library's dataset and few batches. There the start of an epoch counts, and what a
loader does with the objects of a large package that the program has imported.
Method: each library's case (`client_cases.py`) runs in three processes of its own: with torch's loader, and with
rayloader's forks, both without Ray, and with its actors. They make the same dataset, and take epochs of it by turns,
with fresh and with persistent workers. The first two rounds, in which Ray and the workers of both kinds start and
import the library, are not counted. Every batch of each epoch must be the same with all, as a checksum shows. With
--busy all is measured a second time while as many processes as there are cores do nothing but use them. Medians of the
rounds.
Command: python benchmarks/clients.py --busy [--rounds N] [--workers N] [--cases torchvision,monai] [--quick]
Needs the extra `clients`; a library that is not installed is left out.
Results: benchmarks/results/clients.json, and the table in docs/clients.md; those of --quick and of single cases go to a
file that git ignores.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import tables
from client_cases import CASES
from client_jobs import write_pictures
from harness import Figure, Options
from processes import Missing, Peer, PeerError

QUESTION = "clients"
COMMAND = "python benchmarks/clients.py --busy"
RESULTS = harness.RESULTS / "clients.json"
DOCUMENT = harness.ROOT / "docs" / "clients.md"
LOADERS = ("torch", "rayloader-fork", "rayloader")
KINDS = {"fresh": False, "persistent": True}  # workers
MACHINES = ("quiet", "busy")
BATCHES, QUICK_BATCHES = 16, 8  # an epoch
# Rounds before those that count: in the first, persistent workers keep the processes that the fresh ones began with.
WARMING = 2
FAILED = "failed: "

Epoch = tuple[float, int]  # seconds, and the checksum of its batches
Key = tuple[str, str, str]  # loader, kind of workers, machine


def measure(options: Options) -> list[Figure]:
    """All figures of each case."""
    batches = QUICK_BATCHES if options.quick else BATCHES
    machines = MACHINES if options.busy else MACHINES[:1]
    found: list[Figure] = []
    for case in options.pick_cases(list(CASES)):
        try:
            epochs: dict[Key, list[Epoch]] | Missing = taken(case, batches, options, machines)
        except PeerError as error:
            epochs = Missing(f"{case} {FAILED}{str(error).strip().splitlines()[-1]}")
        for machine in machines:
            for kind in KINDS:
                for name in LOADERS:
                    unable = Missing(f"{case} does not work in forks")
                    of_it = epochs if isinstance(epochs, Missing) else epochs.get((name, kind, machine), unable)
                    seconds = of_it if isinstance(of_it, Missing) else [one for one, _ in of_it]
                    sums = {} if isinstance(of_it, Missing) else {"checksums": [checksum for _, checksum in of_it]}
                    metric = f"{kind}, {machine}"
                    found.append(harness.figure(QUESTION, case, name, metric, "s", seconds, **sums))
    return found


def taken(case: str, batches: int, options: Options, machines: tuple[str, ...]) -> dict[Key, list[Epoch]] | Missing:
    """The epochs of a case with all loaders that can have it, by turns.

    Raises:
        PeerError: a process failed.
    """
    epochs: dict[Key, list[Epoch]] = {}
    loaders = [name for name in LOADERS if CASES[case].forks or name != "rayloader-fork"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as peers:
        write_pictures(Path(folder), batches)
        there = {name: peers.enter_context(Peer(name)) for name in loaders}
        for name, peer in there.items():
            harness.say(f"{QUESTION}: {case}, making it with {name}")
            made = peer.call("client_cases:make", case=case, folder=folder, batches=batches, workers=options.workers)
            if isinstance(made, Missing):
                return made
        for machine in machines:
            with spinning() if machine == "busy" else contextlib.nullcontext():
                for number in range(-WARMING if machine == machines[0] else 0, options.rounds):
                    harness.say(f"{QUESTION}: {case}, {machine}, round {number + 1} of {options.rounds}")
                    for name in harness.rotated(loaders, number):
                        for kind, persistent in KINDS.items():
                            answer = there[name].call("client_cases:epoch", persistent=persistent, batches=batches)
                            if isinstance(answer, Missing):
                                return answer
                            if number >= 0:
                                epochs.setdefault((name, kind, machine), []).append(tuple(answer))
    return epochs


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Keeps all cores busy."""
    count = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def table(document: dict[str, Any]) -> str:
    """In Markdown: what was measured on, and a row for each case."""
    machine, settings, figures = document["machine"], document["settings"], document["figures"]
    rounds = "one round" if settings["rounds"] == 1 else f"medians of {settings['rounds']} rounds"
    caption = (
        f"Seconds of an epoch of {settings['batches']} batches with {settings['workers']} workers on "
        f"{machine['cores']} cores, {rounds}, {machine['date'][:10]}."
    )
    loaders = [name for name in LOADERS if any(figure["implementation"] == name for figure in figures)]
    columns = [(f"{kind}, {where}", name) for where in MACHINES for kind in KINDS for name in loaders]
    rows = [["library", "way", *(f"{metric}, {name}" for metric, name in columns), "same batches"]]
    for case in dict.fromkeys(figure["case"] for figure in figures):
        of_it = [harness.find(figures, case=case, implementation=name, metric=metric) for metric, name in columns]
        rows.append([case, CASES[case].way, *map(harness.show, of_it), same_batches(figures, case)])
    return f"{caption}\n\n{tables.markdown(rows)}"


def same_batches(figures: list[Figure], case: str) -> str:
    """Whether all loaders gave the same batches in every epoch."""
    sums: dict[str, list[Any]] = {}
    for figure in figures:
        if figure["case"] == case and "checksums" in figure:
            sums.setdefault(figure["implementation"], []).append((figure["metric"], figure["checksums"]))
    return "-" if not sums else "yes" if all(found == sums["torch"] for found in sums.values()) else "NO"


def main() -> None:
    """Measures, prints and writes."""
    options = harness.options(__doc__, needs=(), busy=True)
    machine = harness.machine()
    figures = measure(options)
    harness.say("")
    batches = QUICK_BATCHES if options.quick else BATCHES
    settings = {"rounds": options.rounds, "workers": options.workers, "quick": options.quick, "batches": batches}
    document = {"machine": machine, "settings": settings, "figures": figures}
    print(made := table(document))
    harness.print_missing(figures)
    path = harness.RESULTS / "quick.clients.json" if options.quick or options.cases or not options.busy else RESULTS
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path.relative_to(harness.ROOT)}")
    if path == RESULTS:
        tables.put(DOCUMENT, COMMAND, made)
    if any(same_batches(figures, case) == "NO" for case in CASES):
        sys.exit("error: the batches differ")
    if any(FAILED in figure.get("missing", "") for figure in figures):
        sys.exit("error: a case failed")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
