"""Torch's side of the conformance suite: run the cases through torch's own loader, in a process without Ray.

    PYTHONPATH=.. python reference.py OUT [CASE...]   write the records of the cases (all by default) to OUT
    PYTHONPATH=.. python reference.py --check         run all cases twice: no case may differ from itself

Workers are forked, whatever this Python version's default is: that is what the library is compared with. Cases in which
torch's spawned workers differ run with these, too, for they are what Ray actors are compared with: as forks of a server
that has nothing of the program and has imported torch, which each spawned worker would take seconds for.
"""

import faulthandler
import pickle
import sys
import time
from pathlib import Path

import torch.multiprocessing
from torch.utils.data import DataLoader

from conformance_cases import CASES
from conformance_record import first_difference, record

SPAWNED = "{} spawned"  # the name of a case with spawned workers
TIME_LIMIT = 900.0  # seconds, for all cases; 60 are used on two idle cores. On expiry all stacks are printed.


def run(names):
    torch.multiprocessing.set_forkserver_preload(["torch.utils.data"])
    records, slowest = {}, []
    for case in CASES:
        if not names or case.name in names:
            for method in {"fork", case.actors or "fork"}:
                torch.multiprocessing.set_start_method("fork" if method == "fork" else "forkserver", force=True)
                start = time.perf_counter()
                name = case.name if method == "fork" else SPAWNED.format(case.name)
                records[name] = record(case, DataLoader)
                slowest.append((time.perf_counter() - start, name))
    return records, sorted(slowest, reverse=True)


def check():
    (first, slowest), (second, _) = run(()), run(())
    differences = {name: first_difference(first[name], second[name]) for name in first}
    for name, difference in differences.items():
        if difference:
            print(f"{name}: {difference}\n")
    seconds = sum(duration for duration, _ in slowest)
    print(f"{len(first)} cases in {seconds:.1f} s; slowest: {slowest[:8]}")
    return any(differences.values())


def main(arguments):
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    failed = False
    if arguments[0] == "--check":
        failed = check()
    else:
        records, _ = run(set(arguments[1:]))
        Path(arguments[0]).write_bytes(pickle.dumps(records))
    assert "ray" not in sys.modules, "the reference must not have Ray in it"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
