"""Our side of the conformance suite where a system lacks what our workers need, so that torch's own are at work.

python without_linux.py OUT WAY CASE...   write the records of these cases to OUT
"""

import pickle
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from taken_away import take_away

take_away(sys.argv[2])  # in workers that are spawned, too

from conformance_cases import CASES  # noqa: E402
from conformance_record import record  # noqa: E402
from rayloader import DataLoader  # noqa: E402

if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as caught:  # what is said once is no part of a case
        list(DataLoader([0], num_workers=1))
    assert any("rayloader's own workers can't be had here" in str(one.message) for one in caught), caught
    out, _, *names = sys.argv[1:]
    records = {case.name: record(case, DataLoader) for case in CASES if case.name in names}
    Path(out).write_bytes(pickle.dumps(records))
