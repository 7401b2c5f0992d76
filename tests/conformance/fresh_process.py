"""Our side of the conformance suite in a process of its own, where the first case starts Ray.

python fresh_process.py OUT CASE...   write the records of these cases to OUT
"""

import pickle
import sys
from pathlib import Path

from conformance_cases import CASES
from conformance_record import record
from rayloader import DataLoader, shutdown

if __name__ == "__main__":
    out, *names = sys.argv[1:]
    records = {case.name: record(case, DataLoader) for case in CASES if case.name in names}
    shutdown()
    Path(out).write_bytes(pickle.dumps(records))
