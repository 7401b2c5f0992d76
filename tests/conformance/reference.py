"""Torch's side of the conformance suite: run the cases through torch's own loader, in a process without Ray.

    PYTHONPATH=.. python reference.py OUT [CASE...]   write the records of the cases (all by default) to OUT

Workers are forked, whatever this Python version's default is: that is what the library is compared with. Cases in which
torch's spawned workers differ run with these, too, for they are what Ray actors are compared with: as forks of a server
that has nothing of the program and has imported torch, which each spawned worker would take seconds for.
"""

import faulthandler
import pickle
import sys
from pathlib import Path

import torch.multiprocessing
from torch.utils.data import DataLoader

from conformance_cases import CASES
from conformance_record import record

SPAWNED = "{} spawned"  # the name of a case with spawned workers
TIME_LIMIT = 900.0  # seconds, for all cases; 60 are used on two idle cores. On expiry all stacks are printed.


def run(names):
    torch.multiprocessing.set_forkserver_preload(["torch.utils.data"])
    records = {}
    for case in CASES:
        if not names or case.name in names:
            for method in {"fork", case.actors or "fork"}:
                torch.multiprocessing.set_start_method("fork" if method == "fork" else "forkserver", force=True)
                name = case.name if method == "fork" else SPAWNED.format(case.name)
                records[name] = record(case, DataLoader)
    return records


def main(arguments):
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    Path(arguments[0]).write_bytes(pickle.dumps(run(set(arguments[1:]))))
    assert "ray" not in sys.modules, "the reference must not have Ray in it"


if __name__ == "__main__":
    main(sys.argv[1:])
