"""Whether other libraries' datasets give torch's batches, by forks and by actors.

Motive: what a loader does with the objects of a large package shows in what arrives, on a busy machine as well as on a
quiet one; `clients.py` has the times too, which need a quiet one.
Method: the cases and epochs of `clients.py`, the same number from each loader, with fresh and with persistent workers.
Command: python benchmarks/same_batches.py [--rounds N] [--workers N] [--cases lmdb,duckdb]
Needs the extra `clients`; a library that is not installed is left out. Cases that were not chosen keep their results.
Results: benchmarks/results/same_batches.json, and the table in docs/clients.md.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import clients
import harness
import tables
from client_cases import CASES
from processes import Missing, PeerError

COMMAND = "python benchmarks/same_batches.py"
RESULTS = harness.RESULTS / "same_batches.json"
DOCUMENT = clients.DOCUMENT
WORKERS = {"rayloader-fork": "forks", "rayloader": "actors"}


def compare(case: str, options: harness.Options) -> dict[str, str]:
    """What is said of each kind of workers: yes, NO, or why it cannot be."""
    try:
        epochs = clients.taken(case, clients.QUICK_BATCHES, options, clients.MACHINES[:1])
    except PeerError as error:
        return dict.fromkeys(WORKERS, f"{clients.FAILED}{str(error).strip().splitlines()[-1]}")
    if isinstance(epochs, Missing):
        return dict.fromkeys(WORKERS, epochs.reason)
    sums = {key: [checksum for _, checksum in found] for key, found in epochs.items()}
    theirs = {key[1:]: found for key, found in sums.items() if key[0] == "torch"}
    said = {}
    for name in WORKERS:
        ours = {key[1:]: found for key, found in sums.items() if key[0] == name}
        said[name] = "not in forks" if not ours else "yes" if ours == theirs else "NO"
    return said


def table(document: dict[str, Any]) -> str:
    """In Markdown: a row for each case."""
    rows = [["library", "way", *(f"same batches by {workers}" for workers in WORKERS.values())]]
    rows += [[case, CASES[case].way, *(said[name] for name in WORKERS)] for case, said in document["cases"].items()]
    return tables.markdown(rows)


def main() -> None:
    """Compares, prints and writes."""
    options = harness.options(__doc__, needs=())
    found = {case: compare(case, options) for case in options.pick_cases(list(CASES))}
    failed = {case: said for case, said in found.items() if set(said.values()) - {"yes", "not in forks"}}
    print("\n".join(f"{case}: {said}" for case, said in failed.items()))
    before = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    cases = {**before, **{case: said for case, said in found.items() if case not in failed}}
    ordered = {case: cases[case] for case in CASES if case in cases}
    RESULTS.write_text(json.dumps({"machine": harness.machine(), "cases": ordered}, indent=1) + "\n")
    tables.put(DOCUMENT, COMMAND, made := table({"cases": ordered}))
    print(made)
    if any("NO" in said.values() or clients.FAILED in str(said) for said in failed.values()):
        sys.exit("error: the batches differ, or a case failed")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
