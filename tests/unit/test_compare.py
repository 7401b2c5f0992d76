"""Where two runs part ways, by their logs."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rayloader.replay.compare import compared, described_log
from rayloader.replay.provenance import SCHEMA, Iteration, Log
from states import saved

VERSIONS = {"torch": "2.0"}


def row(step, epoch=0, **changed):
    return {
        "step": step,
        "epoch": epoch,
        "indices": [2 * step, 2 * step + 1],
        "indices_other": None,
        "worker": step % 2,
        "digest": 100 + step,
        "outcome": 0,
        "skipped": 0,
        "restarts": 0,
        **changed,
    }


def iteration(rows, epoch=0, **changed):
    given = {"loader": "train", "state": None, "error": "", "versions": VERSIONS, "began": 1.0, **changed}
    return Iteration(epoch=epoch, rows=pa.Table.from_pylist(rows, SCHEMA), **given)


def log(*iterations, path=Path(__file__)):
    return Log(path, [*iterations])


def run(epochs=2, steps=10, **of_steps):
    """The log of a run; `of_steps`: what differs, by names such as `e1s3`."""
    changed = {(int(name[1]), int(name[3:])): values for name, values in of_steps.items()}
    rows = {epoch: [row(n, epoch, **changed.get((epoch, n), {})) for n in range(steps)] for epoch in range(epochs)}
    return log(*[iteration(some, epoch) for epoch, some in rows.items()])


def partings(a, b):
    return [tuple(one) for one in compared(a, b).partings]


def test_the_same_runs_are_the_same():
    found = compared(run(), run())
    assert found.same
    assert (found.compared, found.partings) == (20, [])


@pytest.mark.parametrize(
    ("changed", "parting"),
    [
        ({"indices": [7, 8]}, ("indices", 1, 3, [6, 7], [7, 8])),
        ({"indices": [6]}, ("indices", 1, 3, [6, 7], [6])),
        ({"indices": None}, ("indices", 1, 3, [6, 7], None)),
        ({"indices_other": b"x"}, ("indices_other", 1, 3, None, "1 bytes, checksum 8cdc1683")),
        ({"digest": 5}, ("digest", 1, 3, 103, 5)),
        ({"outcome": 2}, ("outcome", 1, 3, "batch", "empty")),
    ],
)
def test_the_first_step_that_differs_is_named(changed, parting):
    other = run(e1s3=changed, e1s7={"indices": [0], "digest": 0, "outcome": 1, "indices_other": b"y"})
    assert partings(run(), other)[0] == parting
    assert partings(other, run())[0] == (*parting[:3], parting[4], parting[3])
    assert not compared(run(), other).same


def test_each_column_has_a_first_step_of_its_own():
    other = run(e0s4={"worker": 1}, e0s8={"digest": 1}, e1s2={"indices": [5]})
    found = compared(run(), other)
    assert [one[:3] for one in found.partings] == [("worker", 0, 4), ("digest", 0, 8), ("indices", 1, 2)]


def test_another_worker_makes_no_other_run():
    found = compared(run(), run(e0s4={"worker": 1}))
    assert [one.column for one in found.partings] == ["worker"]
    assert found.same


def test_a_run_that_was_killed_is_the_same_as_far_as_it_went():
    a, b = run(), run(epochs=1, steps=4)
    assert compared(a, b).same
    assert compared(a, b).compared == 4


def test_a_step_that_one_run_left_out_is_a_difference():
    a = run()
    b = log(iteration([row(n) for n in range(10) if n != 6]), iteration([row(n, 1) for n in range(10)], 1))
    assert partings(a, b) == [("step", 0, 6, "logged", None)]
    assert partings(b, a) == [("step", 0, 6, None, "logged")]


def test_an_epoch_that_is_longer_in_one_run_is_a_difference():
    a, b = run(), log(iteration([row(n) for n in range(12)]), iteration([row(n, 1) for n in range(10)], 1))
    assert partings(a, b) == [("step", 0, 10, None, "logged")]


def test_what_a_resumed_run_delivered_again_counts():
    again = log(iteration([row(n) for n in range(6)]), iteration([row(n, digest=7) for n in range(4, 10)]))
    assert partings(run(epochs=1), again) == [("digest", 0, 4, 104, 7)]


def test_a_log_that_begins_later_is_compared_from_there():
    later = log(iteration([row(n, 1) for n in range(5, 10)], 1))
    found = compared(run(), later)
    assert (found.same, found.compared) == (True, 5)


def test_the_order_of_delivery_is_no_difference():
    shuffled = log(iteration([row(n) for n in (3, 0, 2, 1)]))
    assert compared(log(iteration([row(n) for n in range(4)])), shuffled).same


def test_runs_with_no_step_in_common_are_not_compared():
    assert compared(log(iteration([row(1)])), log(iteration([row(2)]))).compared == 0
    assert compared(log(), run()).compared == 0
    assert compared(log(iteration([])), run()).compared == 0


def test_long_logs_are_compared_at_once():
    count, where = 200_000, 150_001
    steps = np.arange(count, dtype=np.int32)
    numbers = np.arange(4 * count)

    def long_log(digests):
        columns = {
            "step": steps,
            "epoch": np.zeros(count, np.int32),
            "indices": pa.ListArray.from_arrays(np.arange(0, 4 * count + 1, 4, dtype=np.int32), numbers),
            "indices_other": pa.nulls(count, pa.binary()),
            "worker": np.zeros(count, np.int16),
            "digest": digests,
            "outcome": np.zeros(count, np.int8),
            "skipped": np.zeros(count, np.int16),
            "restarts": np.zeros(count, np.int16),
        }
        rows = pa.table(columns, SCHEMA)
        return log(Iteration("train", 0, None, "", VERSIONS, 1.0, rows))

    digests = np.arange(count, dtype=np.uint32)
    other = digests.copy()
    other[where:] += 1
    assert partings(long_log(digests), long_log(other)) == [("digest", 0, where, where, where + 1)]


# ---- one log


def test_a_log_is_described_in_plain_types():
    state = saved(0).pack()
    found = described_log(
        log(
            iteration([row(0), row(1, outcome=3), row(2, skipped=2, restarts=1)], state=state),
            iteration([], 1, error="why"),
        )
    )
    assert json.loads(json.dumps(found)) == found
    first, second = found["iterations"]
    assert found["loaders"] == ["train"]
    assert (first["first_step"], first["last_step"], first["steps"]) == (0, 2, 3)
    assert first["outcomes"] == {"batch": 2, "skipped": 1}
    assert (first["samples_skipped"], first["restarts"]) == (2, 1)
    assert first["state"]["num_workers"] == 2
    assert (second["first_step"], second["steps"], second["state"], second["error"]) == (None, 0, None, "why")
