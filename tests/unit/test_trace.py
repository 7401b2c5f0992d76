"""What a trace holds, and its file."""

from __future__ import annotations

import gzip
import json

import pytest
import torch

import programs
from rayloader import DataLoader, RayloaderError
from rayloader.observe.trace import Trace
from rayloader.protocol import Spent


def slices(events, lane):
    return [(e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X" and e["tid"] == lane]


def names(events):
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_each_worker_has_a_lane_and_the_trainer_one():
    trace = Trace()
    trace.built(1, True, 0, "[5, 6]", Spent(0, 1.0, 0.5, 0.1, 0.2, 0.3))
    trace.built(2, True, 1, "", Spent(1, 2.0, 0.5, 0.1, 0.0, 0.0))
    trace.built(1, True, 2, "", Spent(0, 1.5, 0.0, 0.1, 0.0, 0.0))  # a worker does one thing at a time
    trace.trainer("wait", 0, 1.0, 1.6)
    events = list(trace.events("title"))
    assert names(events) == {0: "trainer", 1: "worker 0", 2: "worker 1"}
    assert slices(events, 0) == [("wait", 1_000_000, 600_000)]
    assert slices(events, 1) == [
        ("fetch", 1_000_000, 100_000),
        ("collate", 1_100_000, 200_000),
        ("transfer", 1_300_000, 200_000),
        ("fetch", 1_500_000, 100_000),
        ("collate", 1_600_000, 0),
        ("transfer", 1_600_000, 0),
    ]
    assert [e["args"] for e in events if e["name"] == "fetch"] == [
        {"batch": 0, "indices": "[5, 6]"},
        {"batch": 2},
        {"batch": 1},
    ]


def test_the_clock_of_another_machine_is_converted_by_what_came_fastest(monkeypatch):
    trace, now = Trace(), [0.0]
    monkeypatch.setattr("rayloader.observe.trace.perf_counter", lambda: now[0])
    for began, received in ((1000.0, 5.0), (1001.0, 5.5), (1002.0, 7.0)):
        now[0] = received
        trace.built(1, False, 0, "", Spent(0, began, 0.0, 0.5, 0.0, 0.0))
    assert [ts for name, ts, _ in slices(trace.events(""), 1) if name == "fetch"] == [4_000_000, 5_000_000, 6_000_000]


def loader():
    return DataLoader(torch.utils.data.TensorDataset(torch.zeros(10, 4)), batch_size=4)


def slices_of(path, opened=open):
    with opened(path) as file:
        return [(e["name"], e["args"]["batch"]) for e in json.load(file)["traceEvents"] if e["ph"] == "X"]


ALL = [(what, batch) for batch in range(3) for what in ("wait", "step")]


@pytest.mark.parametrize(("name", "opened"), [("trace.json", open), ("trace.json.gz", gzip.open)])
def test_the_file_holds_waits_and_steps_in_turn(tmp_path, name, opened):
    traced = loader()
    path = tmp_path / name
    path.write_text("what was there")
    list(traced)
    with traced.trace(path):
        list(traced)
    list(traced)
    assert slices_of(path, opened) == ALL
    with opened(path) as file:
        events = json.load(file)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rayloader: TensorDataset"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_may_begin_and_end_in_the_middle_of_an_epoch(tmp_path):
    traced = loader()
    iterator = iter(traced)
    next(iterator)
    with traced.trace(tmp_path / "trace.json"):
        next(iterator)
    next(iterator)
    assert slices_of(tmp_path / "trace.json") == [("step", 0), ("wait", 1)]


def test_one_trace_at_a_time_which_is_written_where_it_is_closed_or_the_block_raises(tmp_path):
    traced, path = loader(), tmp_path / "one.json"
    with pytest.raises(FileNotFoundError, match="make it first"):
        traced.trace(tmp_path / "missing" / "trace.json")
    with pytest.raises(RayloaderError, match="being traced already"), traced.trace(str(path)):
        traced.trace(tmp_path / "two.json")
    assert [*tmp_path.iterdir()] == [path]
    tracing = traced.trace(path)
    list(traced)
    assert slices_of(path) == []
    for _ in range(2):
        tracing.close()
        list(traced)
    assert slices_of(path) == ALL


def test_a_trace_that_nobody_closes_is_written_when_its_loader_or_the_program_ends_by_no_child(tmp_path):
    program = """
import os
from rayloader import DataLoader
folder = os.getcwd()
dropped, kept = (DataLoader(range(10), batch_size=4) for _ in range(2))
for loader, name in (dropped, "dropped.json"), (kept, "trace.json"):
    loader.trace(name)  # and the result is dropped
    list(loader)
os.chdir("/")  # the file's folder is that of the call
del loader, dropped
if os.fork() == 0:
    raise SystemExit
_, status = os.wait()
print(status, os.listdir(folder))
"""
    done = programs.run(program, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("0 ['dropped.json']\n", "")
    assert slices_of(tmp_path / "trace.json") == slices_of(tmp_path / "dropped.json") == ALL
