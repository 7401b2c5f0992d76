"""What a loader with workers measures: counts, workers, lanes, and the verdict on bottlenecks that cannot be missed.

A dataset's work is given as a sleep where the verdict is under test: the ratios are so large that a busy machine does
not turn them round.
"""

import json
import threading
import time

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from inside import await_more, results_of
from rayloader import DataLoader
from rayloader.transport.lanes import read_only_bytes

pytestmark = pytest.mark.usefixtures("ray_session")


class Work(Dataset):
    """Samples that take so many seconds each, by index."""

    def __init__(self, length, seconds=lambda index: 0.0):
        self.length = length
        self.seconds = seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.seconds(index))
        return torch.full((4,), index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10))


class Failing(Work):
    def __getitem__(self, index):
        if index % 4 == 0:
            raise ValueError(index)
        return super().__getitem__(index)


def run(loader, step=0.0):
    for _ in loader:
        time.sleep(step)
    return loader.stats()


def counts(period):
    return period.batches, period.samples, period.nbytes


def test_epochs_are_counted_and_told_apart():
    loader = DataLoader(Work(10), batch_size=4, num_workers=2)
    run(loader)
    found = run(loader)
    assert counts(found.epoch) == (3, 10, 320)
    assert counts(found.total) == (6, 20, 640)
    assert [worker.build.count for worker in found.epoch.workers] == [2, 1]
    assert {worker.lane for worker in found.epoch.workers} == {"line, arena"}
    assert all(worker.depth >= 1 for worker in found.epoch.workers)
    assert {slow.batch for slow in found.epoch.slowest} == {0, 1, 2}
    assert "[8, 9]" in {slow.indices for slow in found.epoch.slowest}
    assert "in all      6 batches, 20 samples" in str(found)


@pytest.mark.parametrize("batch_size", [4, None])
def test_samples_of_a_stream_are_counted_by_the_workers(batch_size):
    found = run(DataLoader(Stream(), batch_size=batch_size, num_workers=2))
    assert found.epoch.samples == 20
    assert found.epoch.batches == (6 if batch_size else 20)
    assert {slow.indices for slow in found.epoch.slowest} == {""}


@pytest.mark.parametrize("arguments", [{"in_order": False}, {"persistent_workers": True}, {"arenas": False}])
def test_other_ways_of_a_batch_are_counted_too(arguments):
    loader = DataLoader(Work(20), batch_size=4, num_workers=2, **arguments)
    run(loader)
    found = run(loader)
    assert counts(found.total) == (10, 40, 1280)
    lane = "Ray calls" if "arenas" in arguments else "line, arena"
    assert {worker.lane for worker in found.epoch.workers} == {lane}
    assert sum(worker.build.count for worker in found.epoch.workers) == 5


def test_batches_that_are_pinned_are_counted(accelerator):
    assert counts(run(DataLoader(Work(20), batch_size=4, num_workers=2, pin_memory=True)).epoch) == (5, 20, 640)


def test_skipped_samples_are_counted():
    found = run(DataLoader(Failing(20), batch_size=4, num_workers=2, on_error="skip"))
    assert (found.epoch.batches, found.epoch.samples, found.epoch.skipped) == (5, 15, 5)


def test_a_resumed_epoch_counts_what_it_gives():
    loader = DataLoader(Work(40), batch_size=4, num_workers=2)
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    state = loader.state_dict()
    other = DataLoader(Work(40), batch_size=4, num_workers=2)
    other.load_state_dict(state)
    assert counts(run(other).epoch) == (6, 24, 768)


def test_an_epoch_that_is_broken_off_counts_what_was_taken():
    loader = DataLoader(Work(40), batch_size=4, num_workers=2)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    found = loader.stats()
    assert counts(found.epoch) == (3, 12, 384)
    assert found.bytes_under_way >= 0
    del iterator, kept
    found = loader.stats()
    assert counts(found.total) == (3, 12, 384)
    assert (found.bytes_under_way, found.bytes_held) == (0, 0)


class Large(Work):
    """Two samples are a batch of NBYTES, to be laid in a slot of its own."""

    def __getitem__(self, index):
        return torch.full((1 << 18,), index)


NBYTES = 2 * 8 * (1 << 18)


@pytest.mark.parametrize("arenas", [True, False])
def test_memory_of_batches_under_way_and_of_those_that_the_trainer_holds_is_told_apart(arenas):
    loader = DataLoader(Large(12), batch_size=2, num_workers=1, prefetch_factor=2, arenas=arenas)
    iterator = iter(loader)
    kept = [next(iterator), next(iterator)]
    while [read_only_bytes(result.wire) for result in results_of(iterator)] != [0, 0]:  # all that may be under way
        await_more(iterator)
    found = loader.stats()
    assert found.bytes_under_way == 2 * NBYTES
    assert found.bytes_held == 2 * NBYTES
    first = kept[0]
    del kept
    assert loader.stats().bytes_held == NBYTES
    del first
    found = loader.stats()
    assert (found.bytes_under_way, found.bytes_held) == (2 * NBYTES, 0)
    assert f"{2 * NBYTES / 1e6:.3g} MB of batches wait for the trainer\n" in str(found)


def test_any_thread_may_ask_at_any_time():
    loader = DataLoader(Work(400), batch_size=1, num_workers=2)
    done, errors = threading.Event(), []

    def ask():
        while not done.is_set():
            try:
                str(loader.stats())
            except BaseException as error:
                errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for _ in range(2):
            run(loader)
    finally:
        done.set()
        thread.join()
    assert errors == []
    assert loader.stats().total.batches == 800


def test_a_restart_is_counted(tmp_path):
    class Dies(Work):
        def __getitem__(self, index):
            mark = tmp_path / "died"
            if index == 6 and not mark.exists():
                mark.touch()
                import os
                import signal

                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    found = run(DataLoader(Dies(12), batch_size=2, num_workers=1))
    assert (found.epoch.restarts, found.epoch.batches) == (1, 6)


def test_work_in_the_dataset_is_found_to_be_the_bottleneck():
    found = run(DataLoader(Work(120, lambda _: 0.02), batch_size=2, num_workers=2), step=0.004)
    assert found.verdict.startswith("input-bound: the trainer waits")
    assert "more workers" in found.verdict
    fetch = sum(worker.fetch for worker in found.epoch.workers)
    assert fetch > sum(worker.collate + worker.transfer for worker in found.epoch.workers)


def test_a_slow_trainer_is_found_to_be_the_bottleneck():
    found = run(DataLoader(Work(60), batch_size=2, num_workers=2), step=0.05)
    assert found.verdict.startswith("the trainer is the bottleneck: 1 of 2 workers would do")


def test_stragglers_are_found_to_be_the_bottleneck():
    # One batch in 16 takes 0.2 s, the others next to nothing: the other worker soon has nothing to do.
    work = Work(80, lambda index: 0.2 if index % 16 == 0 else 0.002)
    found = run(DataLoader(work, batch_size=1, num_workers=2, prefetch_factor=2), step=0.004)
    assert found.verdict.startswith("slow batches are the bottleneck: the trainer waits")
    assert "times the median, and the others wait for it" in found.verdict
    assert found.verdict.endswith("scheduling='dynamic' (with seeding='batch')")


def test_what_a_worker_spends_that_cannot_start_is_not_taken_from_nowhere():
    def fail(_):
        raise ValueError("it does not start")

    loader, began = DataLoader(Work(8), num_workers=1, worker_init_fn=fail), time.perf_counter()
    with pytest.raises(ValueError, match="it does not start"):
        run(loader)
    assert loader.stats().epoch.build.longest <= time.perf_counter() - began


@pytest.mark.full
def test_where_idle_workers_take_the_next_batch_stragglers_are_no_reason_for_that_advice():
    work = Work(160, lambda index: 0.4 if index % 16 == 0 else 0.002)
    loader = DataLoader(work, num_workers=2, prefetch_factor=2, scheduling="dynamic", seeding="batch")
    assert "scheduling" not in run(loader, step=0.004).verdict


def test_a_slow_sampler_is_found_to_be_the_bottleneck():
    def slow():
        for index in range(60):
            time.sleep(0.02)
            yield index

    found = run(DataLoader(Work(60), sampler=Once(slow()), batch_size=2, num_workers=2), step=0.004)
    assert found.verdict.startswith("the sampler is the bottleneck: the trainer waits")
    assert found.epoch.drawing > found.epoch.wait.total / 2


class Once:
    """A sampler that gives what an iterator gives."""

    def __init__(self, indices):
        self.indices = indices

    def __iter__(self):
        return self.indices


def test_a_slow_worker_is_found_to_be_the_bottleneck():
    class Uneven(Work):
        def __getitem__(self, index):
            time.sleep(0.05 if torch.utils.data.get_worker_info().id == 1 else 0.001)
            return torch.zeros(4)

    found = run(DataLoader(Uneven(80), batch_size=1, num_workers=2, prefetch_factor=2), step=0.001)
    assert found.verdict.startswith("worker 1 is the bottleneck: the trainer waits")
    assert found.verdict.endswith("scheduling='dynamic' (with seeding='batch')")


def test_without_workers_the_trainer_is_told_to_have_some():
    said = run(DataLoader(Work(40, lambda _: 0.02)), step=0.02).verdict
    assert said.startswith("input-bound: the trainer waits")
    assert "in which it builds its batches itself" in said


def test_torchs_profiler_shows_a_range_for_each_next():
    ranges = {}
    for loader_class in (torch.utils.data.DataLoader, DataLoader):
        loader = loader_class(Work(8), batch_size=4, num_workers=1, multiprocessing_context="fork")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            list(loader)
        ranges[loader_class] = [e.name for e in profile.events() if e.name.startswith("enumerate(DataLoader)#")]
    torchs, ours = ranges.values()
    assert len(ours) == len(torchs) == 3  # the last one finds the end
    assert set(ours) == {"enumerate(DataLoader)#EpochIterator.__next__"}


@pytest.mark.parametrize("arenas", [True, False])
def test_a_trace_has_a_lane_for_each_worker(tmp_path, arenas):
    loader = DataLoader(Work(24), batch_size=4, num_workers=2, arenas=arenas)
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
