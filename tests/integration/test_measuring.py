"""What a loader with workers measures: counts, workers, lanes, and to what time is counted.

What follows from times is tested on times that a test gives, in `test_stats.py`: here they depend on the machine.
"""

import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from inside import await_more, kill_worker, results_of
from probes import Calls, Stream
from rayloader import DataLoader
from rayloader.transport.lanes import read_only_bytes

pytestmark = pytest.mark.usefixtures("ray_session")


def fours(index):
    return torch.full((4,), index)


def threes(index):
    """Fails for one in four."""
    return torch.full((4,), index) if index % 4 else {}[index]


def tens(worker_id):
    return map(torch.tensor, range(10))


def work(length, function=fours):
    return Calls(function, length)


def run(loader):
    list(loader)
    return loader.stats()


def counts(period):
    return period.batches, period.samples, period.nbytes


LINE = "line, arena"


@pytest.mark.parametrize(
    ("given", "counted", "skipped", "lane"),
    [
        ({"dataset": work(20)}, (5, 20, 640), 0, LINE),
        ({"dataset": work(20), "in_order": False}, (5, 20, 640), 0, LINE),
        ({"dataset": work(20), "persistent_workers": True}, (5, 20, 640), 0, LINE),
        ({"dataset": work(20), "arenas": False}, (5, 20, 640), 0, "Ray calls"),
        ({"dataset": work(20), "pin_memory": True}, (5, 20, 640), 0, LINE),
        ({"dataset": Stream(tens)}, (6, 20, 160), 0, LINE),
        ({"dataset": Stream(tens), "batch_size": None}, (20, 20, 160), 0, LINE),
        ({"dataset": work(20, threes), "on_error": "skip"}, (5, 15, 480), 5, LINE),
    ],
)
def test_batches_samples_and_bytes_are_counted_by_epochs_and_workers(given, counted, skipped, lane, accelerator):
    loader = DataLoader(**{"batch_size": 4, "num_workers": 2, **given})
    run(loader)
    found = run(loader)
    assert counts(found.epoch) == counted
    assert counts(found.total) == tuple(2 * number for number in counted)
    assert found.epoch.skipped == skipped
    assert {worker.lane for worker in found.epoch.workers} == {lane}
    assert sum(worker.build.count for worker in found.epoch.workers) == counted[0]
    assert [one.epoch for one in found.epochs] == [0, 1]
    known = {""} if isinstance(given["dataset"], Stream) else {str([*range(n, n + 4)]) for n in range(20)}
    assert {slow.indices for slow in found.epoch.slowest} <= known
    assert f"workers     2 Ray actors ({lane}), busy " in str(found)


def test_an_epoch_that_is_broken_off_or_resumed_counts_what_it_gave_and_restarts():
    loader = DataLoader(work(40), batch_size=4, num_workers=2)
    list(itertools.islice(loader, 3))
    state, found = loader.state_dict(), loader.stats()
    assert counts(found.total) == (3, 12, 384)
    assert (found.bytes_under_way, found.bytes_held) == (0, 0)
    other = DataLoader(work(40), batch_size=4, num_workers=2)
    other.load_state_dict(state)
    iterator = iter(other)
    next(iterator)
    kill_worker(iterator, 0)
    list(iterator)
    assert (*counts(other.stats().epoch), other.stats().epoch.restarts) == (7, 28, 896, 1)


@pytest.mark.parametrize("arenas", [True, False])
def test_memory_of_batches_under_way_and_of_those_that_the_trainer_holds_is_told_apart(arenas):
    dataset, nbytes = work(12, lambda index: torch.full((1 << 18,), index)), 2 * 8 * (1 << 18)
    loader = DataLoader(dataset, batch_size=2, num_workers=1, prefetch_factor=2, arenas=arenas)
    iterator = iter(loader)
    kept = [next(iterator), next(iterator)]
    while [read_only_bytes(result.wire) for result in results_of(iterator)] != [0, 0]:  # all that may be under way
        await_more(iterator)
    for held in (2, 1, 0):
        found = loader.stats()
        assert (found.bytes_under_way, found.bytes_held) == (2 * nbytes, held * nbytes)
        del kept[:1]
    assert f"batches: {2 * nbytes / 1e6:.3g} MB wait, 0 B held\n" in str(found)


def test_any_thread_may_ask_at_any_time():
    loader, done = DataLoader(work(400), batch_size=1, num_workers=2), threading.Event()

    def ask():
        while not done.is_set():
            str(loader.stats())

    with ThreadPoolExecutor(1) as other:
        asking = other.submit(ask)
        try:
            assert run(loader).total.batches == 400
        finally:
            done.set()
        asking.result()


def spend():
    """The seconds that this took, a thousandth at least."""
    began = time.perf_counter()
    while (spent := time.perf_counter() - began) < 0.001:
        pass
    return spent


def timed(samples):
    return sum(samples), spend()


def test_time_is_counted_to_where_it_was_spent():
    drawing = []

    def indices():
        for index in range(40):
            drawing.append(spend())
            yield index

    dataset, steps, sums, ahead = work(40, lambda _: spend()), 0.0, (0.0, 0.0), None
    loader = DataLoader(dataset, 4, sampler=indices(), num_workers=2, collate_fn=timed)
    for fetch, collate in loader:
        ahead = ahead or len(drawing)  # drawn before the first batch, whose wait is counted by itself
        steps += spend()
        sums = sums[0] + fetch, sums[1] + collate
    found = loader.stats().epoch
    assert sum(worker.fetch for worker in found.workers) >= sums[0] > 0.04
    assert sum(worker.collate for worker in found.workers) >= sums[1] > 0.01
    assert found.build.total >= sum(sums)
    assert found.step.total >= steps
    assert found.drawing >= sum(drawing[ahead:]) > 0.0


def test_what_a_worker_spends_that_cannot_start_is_not_taken_from_nowhere():
    def fail(_):
        raise ValueError("it does not start")

    loader, began = DataLoader(work(8), num_workers=1, worker_init_fn=fail), time.perf_counter()
    with pytest.raises(ValueError, match="it does not start"):
        run(loader)
    assert loader.stats().epoch.build.longest <= time.perf_counter() - began


def test_torchs_profiler_shows_a_range_for_each_next():
    ranges = {}
    for loader_class in (torch.utils.data.DataLoader, DataLoader):
        loader = loader_class(work(8), batch_size=4, num_workers=1, multiprocessing_context="fork")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(loader)
        ranges[loader_class] = [e.name for e in profile.events() if e.name.startswith("enumerate(DataLoader)#")]
    torchs, ours = ranges.values()
    assert len(ours) == len(torchs) == 3  # the last one finds the end
    assert set(ours) == {"enumerate(DataLoader)#EpochIterator.__next__"}


@pytest.mark.parametrize("arenas", [True, False])
def test_a_trace_has_a_lane_for_each_worker(tmp_path, arenas):
    loader = DataLoader(work(24), batch_size=4, num_workers=2, arenas=arenas)
    with loader.trace(tmp_path / "trace.json"):
        run(loader)
    run(loader)  # is in no trace
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert names == ["trainer", "worker 0", "worker 1"]
    for worker_id in range(2):
        lane = [(e["name"], e["args"]["batch"]) for e in events if e["ph"] == "X" and e["tid"] == 1 + worker_id]
        batches = range(worker_id, 6, 2)
        assert lane == [(what, batch) for batch in batches for what in ("fetch", "collate", "transfer")]
    assert {e["args"]["indices"] for e in events if e["name"] == "fetch"} >= {"[0, 1, 2, 3]", "[20, 21, 22, 23]"}
    trainer = [(e["name"], e["args"]["batch"]) for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert trainer == [(what, batch) for batch in range(6) for what in ("wait", "step")]
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")
