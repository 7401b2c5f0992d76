"""Our side of the conformance suite in a process of its own, where the first case starts the workers.

python fresh_process.py OUT WORKERS CASE...   write the records of these cases, with these `workers`, to OUT
"""

import functools
import pickle
import sys
from pathlib import Path

from conformance_cases import CASES
from conformance_record import record
from rayloader import DataLoader, shutdown

if __name__ == "__main__":
    out, workers, *names = sys.argv[1:]
    loader_class = functools.partial(DataLoader, workers=workers)
    records = {case.name: record(case, loader_class) for case in CASES if case.name in names}
    shutdown()
    Path(out).write_bytes(pickle.dumps(records))
