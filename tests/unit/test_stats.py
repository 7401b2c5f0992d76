"""What a loader measures of itself: times, tallies with a clock of the test's own, and the verdict on numbers."""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import math
import pickle
import random
import tracemalloc
import weakref
from collections import namedtuple
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from rayloader import DataLoader, LoaderStats
from rayloader.epoch.local import _nbytes
from rayloader.observe import recorder
from rayloader.observe.recorder import FOLD, KEPT, KEPT_EPOCHS, SLOWEST, Recorder, Series, Tally, Work
from rayloader.observe.stats import (
    ENOUGH_BATCHES,
    CacheStats,
    EpochTimes,
    Period,
    SlowBatch,
    Times,
    WorkerStats,
    is_enough,
    verdict,
)
from rayloader.protocol import pack_spent


@pytest.fixture
def clock(monkeypatch):
    """Stands still until `clock.now` is set."""

    class Clock:
        now = 1000.0

    monkeypatch.setattr(recorder, "perf_counter", lambda: Clock.now)
    return Clock


# ---- series


def series(times):
    made = Series()
    for seconds in times:
        made.add(seconds)
    return made


def test_quantiles_are_those_of_the_last_times():
    source = random.Random(1)
    times = [source.lognormvariate(0, 1) for _ in range(3 * KEPT)]
    found = series(times).times()
    assert (found.count, found.longest) == (3 * KEPT, max(times))
    assert math.isclose(found.total, sum(times))
    assert [found.median, found.p95, found.p99] == np.quantile(times[-KEPT:], [0.5, 0.95, 0.99]).tolist()


def test_a_series_of_nothing_is_zero():
    assert Series().times() == Times()


def test_series_add_up():
    one, both = series([0.001] * 3), series([0.001] * 3 + [0.1] * 4)
    assert one.merged(series([0.1] * 4)).times() == both.times()
    assert one.times() == series([0.001] * 3).times()


def test_what_took_longer_is_counted():
    assert series([0.001] * 98 + [0.03] * 2).above(0.004) == (2, 0.03)
    number, seconds = series([0.001] * 4 * KEPT + [0.03] * (KEPT // 2)).above(0.004)
    assert number == (4 * KEPT + KEPT // 2) // 2  # half of the last times are slow
    assert math.isclose(seconds, 0.03)


def test_what_workers_did_adds_up_for_each_of_them():
    first, second = Work.nothing(2), Work.nothing(3)
    log = [
        pack_spent(0, 5.0, 1.0, 0.1, 0.2, 0.3),
        pack_spent(1, 5.0, 0.0, 0.4, 0.0, 0.0),
        pack_spent(0, 6.0, 2.0, 0.1, 0.0, 0.0),
    ]
    whole = first.plus(log).merged(second.plus([pack_spent(2, 0.0, 0.0, 1.0, 0.0, 0.0)]))
    assert whole.sums.round(6).tolist() == [[3.0, 0.2, 0.2, 0.3], [0.0, 0.4, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert [whole.of(worker).times().count for worker in range(3)] == [2, 1, 1]
    assert [round(whole.of(worker).longest, 6) for worker in range(3)] == [0.6, 0.4, 1.0]
    assert first.sums.sum() == 0.0  # what others may be reading does not change


# ---- tallies


def run_epoch(tally, clock, steps, *, samples=4, nbytes=100):
    """One epoch: pairs of what `next` and then the step take."""
    for wait, step in steps:
        clock.now += wait
        tally.gave(clock.now - wait, tally.batches, samples, nbytes)
        clock.now += step
    tally.raised(clock.now)  # StopIteration


def test_wait_is_inside_next_and_step_between_two_calls(clock):
    tally = Tally()
    run_epoch(tally, clock, [(5.0, 0.5), (1.0, 2.0), (1.0, 2.0)])
    period = tally.period()
    assert (period.batches, period.samples, period.nbytes, period.first_wait) == (3, 12, 300, 5.0)
    assert (period.wait.count, period.wait.total) == (2, 2.0)
    assert (period.step.count, period.step.total) == (3, 4.5)
    assert math.isclose(period.wait_share, 2.0 / 6.5)
    assert math.isclose(period.samples_per_s, 2 * 4 / 6.5)


def test_what_a_next_that_raises_took_is_neither(clock):
    tally = Tally()
    run_epoch(tally, clock, [(1.0, 1.0)] * 2)
    tally.raised(clock.now)
    clock.now += 100.0  # it raised, and then the program did something else
    tally.gave(clock.now, 2, 4, 100)
    clock.now += 1.0
    tally.raised(clock.now - 2.0)  # it was interrupted after it had counted the batch
    clock.now += 100.0
    tally.gave(clock.now - 1.0, 3, 4, 100)
    assert tally.period().seconds == 1.0 + 2.0 + 1.0


def answered(tally, worker_id, *, idle=0.0, fetch=1.0, collate=0.0, transfer=0.0):
    spent, worker = pack_spent(worker_id, 0.0, idle, fetch, collate, transfer), tally.workers[worker_id]
    tally.answers.append(spent if worker.settled else tally.settle(worker, spent))
    if len(tally.answers) >= tally.fold_at:
        tally.fold_answers()


def idleness(tally):
    return tally.period().workers[0].idle


def test_what_workers_waited_for_before_the_first_batch_is_not_their_idleness(clock):
    tally = Tally(num_workers=1)
    answered(tally, 0, idle=30.0)
    clock.now += 60.0
    tally.gave(clock.now - 60.0, 0, 1, 1)
    answered(tally, 0, idle=30.0)
    assert idleness(tally) == 0.0
    clock.now += 10.0
    tally.gave(clock.now - 1.0, 0, 1, 1)
    answered(tally, 0, idle=4.0)
    assert idleness(tally) == 4.0


def test_long_epochs_are_folded_and_nothing_of_them_is_lost(clock):
    tally, number = Tally(num_workers=2), 3 * FOLD + 7
    for batch in range(number):
        answered(tally, batch % 2, idle=1.0, fetch=0.5)
    run_epoch(tally, clock, [(1.0, 2.0)] * number)
    period = tally.period()
    assert (period.batches, period.wait.count, period.step.count) == (number, number - 1, number)
    assert (period.wait.total, period.step.total) == (number - 1, 2 * number)
    assert [worker.build.count for worker in period.workers] == [(number + 1) // 2, number // 2]
    assert [worker.fetch for worker in period.workers] == [(number + 1) // 2 * 0.5, number // 2 * 0.5]
    whole = Tally.of([tally, tally]).period()
    assert (whole.batches, whole.wait.count, whole.build.count) == (2 * number, 2 * number - 2, 2 * number)


def test_memory_does_not_grow_with_the_batches(clock):
    """What is kept of 200 times as many batches is the same, but for the logs, which are folded."""

    def size(number):
        tally = Tally(num_workers=2)
        tracemalloc.start()
        try:
            for batch in range(number):
                answered(tally, batch % 2)
                tally.gave(clock.now, batch, 1, 1)
                if batch % 100 == 0:
                    tally.period()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    size(100)
    assert size(20_000) < size(100) + FOLD * 250  # bytes, of an entry in the log, and of the last times


def test_the_slowest_batches_are_kept_and_no_others():
    tally = Tally(num_workers=2)
    order = list(range(100))
    random.Random(2).shuffle(order)
    for batch in order:
        if batch > tally.slow:
            tally.note_slow((batch, batch % 2, float(batch), ""))
    assert [batch for batch, *_ in tally.slowest] == [99, 98, 97][:SLOWEST]


class Iterator:
    pass


def test_epochs_add_up_and_the_last_one_is_told_apart(clock):
    kept = Recorder()
    first, second = Iterator(), Iterator()
    run_epoch(kept.begins(first, 2), clock, [(1.0, 1.0)] * 3)
    run_epoch(kept.begins(first, 2), clock, [(1.0, 1.0)] * 4)  # persistent workers: the same iterator
    del first
    run_epoch(kept.begins(second, 3), clock, [(1.0, 1.0)] * 5)
    told = kept.tell()
    assert (told.epoch.batches, told.total.batches) == (5, 12)
    assert (told.epoch.epochs, told.total.epochs) == (1, 3)
    assert (len(told.epoch.workers), len(told.total.workers)) == (3, 3)
    del second
    assert kept.tell().total.batches == 12


def test_iterators_that_live_side_by_side_are_both_counted(clock):
    kept = Recorder()
    iterators = Iterator(), Iterator()
    tallies = [kept.begins(iterator, 0) for iterator in iterators]
    for tally in tallies * 2:
        run_epoch(tally, clock, [(1.0, 1.0)])
    assert kept.tell().total.batches == 4


def epochs_of(clock, *epochs, num_workers=2):
    """A recorder of epochs, given as how many batches each has and what `next` and the step take; their iterator."""
    kept, iterator = Recorder(), Iterator()
    for number, (batches, wait, step) in enumerate(epochs):
        run_epoch(kept.begins(iterator, num_workers, epoch=number), clock, [(wait, step)] * batches)
    return kept, iterator


def test_an_epoch_with_enough_batches_speaks_for_itself(clock):
    kept, _iterator = epochs_of(clock, (100, 9.0, 1.0), (ENOUGH_BATCHES + 1, 1.0, 9.0))
    recent = kept.tell().recent
    assert (recent.epochs, recent.batches, recent.wait_share) == (1, ENOUGH_BATCHES + 1, 20 / (20 + 21 * 9))


def test_as_many_of_the_last_epochs_are_added_up_as_it_takes(clock):
    kept, _iterator = epochs_of(clock, (1000, 9.0, 1.0), *[(6, 1.0, 1.0)] * 30)
    recent = kept.tell().recent
    assert is_enough(recent.wait.count, 2)
    assert recent.epochs <= 3 * ENOUGH_BATCHES / 5
    assert recent.wait.longest == 1.0  # none of the epoch long ago


def test_an_epoch_that_has_just_begun_is_judged_with_the_one_before(clock):
    kept, iterator = epochs_of(clock, (1000, 9.0, 1.0), (100, 1.0, 1.0))
    run_epoch(kept.begins(iterator, 2), clock, [(1.0, 1.0)] * 2)
    assert (kept.tell().recent.epochs, kept.tell().recent.batches) == (2, 102)
    assert kept.tell().epoch.batches == 2


def test_epochs_of_other_workers_tell_nothing(clock):
    kept, iterator = epochs_of(clock, (100, 9.0, 1.0), num_workers=8)
    run_epoch(kept.begins(iterator, 2), clock, [(1.0, 1.0)] * 5)
    assert kept.tell().recent.batches == 5
    run_epoch(kept.begins(iterator, 2), clock, [(1.0, 1.0)] * 5)
    assert kept.tell().recent.batches == 10


def test_the_last_epochs_are_told_one_by_one_and_no_more_are_kept(clock):
    kept, iterator = epochs_of(clock, *[(3, 1.0, 1.0)] * 100)
    kept.begins(iterator, 2, epoch=100)  # broken off before its first batch
    run_epoch(kept.begins(iterator, 0, epoch=101), clock, [(2.0, 1.0)] * 3)
    assert [one.epoch for one in kept.tell().epochs] == [*range(101 - KEPT_EPOCHS, 100), 101][-KEPT_EPOCHS:]
    assert kept.tell().epochs[-1] == EpochTimes(101, wait=4.0, step=3.0, build=4.0, workers=0)
    assert len(kept._kept.ended) == KEPT_EPOCHS


def test_what_workers_build_is_told_as_their_share_of_the_trainers_time(clock):
    tally = Tally(num_workers=2)
    tally.gave(clock.now, 0, 1, 1)
    clock.now += 10.0
    tally.raised(clock.now)
    for worker_id, (idle, fetch) in enumerate([(1.0, 9.0), (8.0, 2.0)]):
        answered(tally, worker_id, idle=idle, fetch=fetch)
    assert tally.times() == EpochTimes(0, wait=0.0, step=10.0, build=10.0 * 11 / 20, workers=2)


def test_the_recorder_keeps_no_iterator():
    kept, iterator = Recorder(), Iterator()
    ref = weakref.ref(iterator)
    kept.begins(iterator, 0)
    del iterator
    assert ref() is None


# ---- the verdict


def times(count, each):
    return Times(count, count * each, each, each, each, each)


def stats(
    *, wait, step, batches=200, workers=2, build=0.01, busy=0.99, blocked=1.0, behind=0.0, lane="line, arena", **more
):
    """Stats of an epoch: seconds for each batch, shares for the others."""
    period_fields = {field.name for field in dataclasses.fields(Period)}
    each = batches // workers if workers else 0
    period = Period(
        **{
            "batches": batches + 1,
            "wait": times(batches, wait),
            "step": times(batches, step),
            "blocked": blocked * batches * wait,
            "behind": behind * blocked * batches * wait,
            "build": times(batches if workers else 0, build),
            "workers": tuple(
                WorkerStats(worker_id, times(each, build), each * build * (1 - busy) / busy, lane=lane)
                for worker_id in range(workers)
            ),
            **{name: value for name, value in more.items() if name in period_fields},
        }
    )
    others = {name: value for name, value in more.items() if name not in period_fields}
    return LoaderStats(
        **{
            **{"num_workers": workers, "cpus": 16.0},
            **dict.fromkeys(("epoch", "recent", "total"), period),
            **others,
        }
    )


def test_before_the_first_epoch_nothing_is_known():
    assert verdict(LoaderStats()) == "too little to say: only 0 batches so far, without the first of each epoch"


@pytest.mark.parametrize("batches", [1, ENOUGH_BATCHES - 1])
def test_a_few_batches_say_nothing(batches):
    few = verdict(stats(wait=1.0, step=0.1, batches=batches))
    assert few.startswith(f"too little to say: only {batches} batch{'es' * (batches > 1)} so far")


def test_many_workers_need_more_batches():
    assert verdict(stats(wait=1.0, step=0.1, batches=60, workers=32)).startswith("too little")


def test_workers_that_have_no_rest_need_more_beside_them():
    # Two workers at 30 ms a batch bring one in 15 ms, and the trainer takes 10 ms for its step: 30 * 1.2 / 10 = 3.6.
    said = verdict(stats(wait=0.005, step=0.010, build=0.030))
    assert said == (
        "input-bound: the trainer waits 33% of the time, and the workers are busy 99% of theirs; "
        "about 2 more workers would end it"
    )


def test_no_more_workers_are_recommended_than_there_are_cpus_without_a_word():
    said = verdict(stats(wait=0.005, step=0.010, build=0.030, cpus=3.0, load=0.5))
    assert said.endswith("would end it, if they need less than a CPU each: this machine has 3")


def test_where_all_cpus_are_in_use_more_workers_are_no_remedy():
    said = verdict(stats(wait=0.005, step=0.010, build=0.030, cpus=2.0, load=0.97))
    assert "all CPUs of this machine are in use already" in said
    assert "more worker" not in said


def test_the_cpus_of_this_machine_do_not_matter_to_workers_elsewhere():
    said = verdict(stats(wait=0.005, step=0.010, build=0.030, cpus=2.0, load=0.97, lane="Ray calls"))
    assert said.endswith("about 2 more workers would end it")


def test_a_trainer_that_does_nothing_waits_for_any_number_of_workers():
    said = verdict(stats(wait=0.010, step=0.00001))
    assert said.endswith("each further worker would raise the rate of a trainer that does next to nothing with a batch")


def test_workers_that_rest_are_too_many():
    said = verdict(stats(wait=0.0001, step=0.1, workers=6, build=0.15, busy=0.25))
    assert said == "the trainer is the bottleneck: 2 of 6 workers would do (the trainer waits only 0.1% of the time)"


def test_where_nothing_is_wrong_it_says_so():
    said = verdict(stats(wait=0.0001, step=0.1, workers=2, build=0.15, busy=0.75))
    assert said == "nothing to mend: the trainer waits only 0.1% of the time"


def test_stragglers_at_the_head_call_for_dynamic_scheduling():
    slow = stats(wait=0.01, step=0.01, busy=0.5, behind=0.9, slow=4, slow_ratio=30.0)
    said = verdict(slow)
    assert "mostly for one batch in 50, which takes 30 times the median" in said
    assert said.endswith("scheduling='dynamic' (with seeding='batch')")
    for already in ({"dynamic": True}, {"iterable": True}):
        assert "scheduling" not in verdict(dataclasses.replace(slow, **already))


@pytest.mark.parametrize("behind", [0.0, 0.3])
def test_slow_batches_that_nobody_waits_behind_are_not_to_blame(behind):
    assert "median" not in verdict(stats(wait=0.01, step=0.01, busy=0.5, behind=behind, slow=4, slow_ratio=30.0))


def test_slow_batches_of_workers_that_have_no_rest_call_for_more_workers():
    assert "more worker" in verdict(stats(wait=0.01, step=0.01, busy=0.95, behind=0.9, slow=4, slow_ratio=30.0))


def test_one_slow_worker_is_named():
    workers = (
        WorkerStats(0, times(100, 0.010), 3.0, lane="line, arena"),
        WorkerStats(1, times(100, 0.039), 0.1, lane="line, arena"),
        WorkerStats(2, times(100, 0.010), 3.0, lane="line, arena"),
    )
    whole = stats(wait=0.01, step=0.01, behind=0.9, workers=3, batches=300)
    said = verdict(dataclasses.replace(whole, recent=dataclasses.replace(whole.recent, workers=workers)))
    assert said.startswith("worker 1 is the bottleneck")
    assert "3.9 times as long as the others'" in said


def test_the_loaders_own_work_is_called_that():
    said = verdict(stats(wait=0.0004, step=0.001, build=0.0003, busy=0.4, blocked=0.1))
    assert "the loader's own work in its process (360 us a batch)" in said
    assert said.endswith("more workers would not")


def test_a_slow_sampler_is_named():
    said = verdict(stats(wait=0.01, step=0.01, busy=0.1, blocked=0.1, drawing=0.8 * 200 * 0.01))
    assert said.startswith("the sampler is the bottleneck")


def test_restarts_are_named_where_nothing_else_explains_the_wait():
    assert "workers were restarted 3 times meanwhile" in verdict(stats(wait=0.01, step=0.01, busy=0.4, restarts=3))


def test_a_shallow_window_is_named():
    assert "at most 1 batches of each" in verdict(stats(wait=0.01, step=0.01, busy=0.4, prefetch_factor=1))


def test_the_way_through_ray_is_named():
    assert "on their way through Ray" in verdict(stats(wait=0.01, step=0.01, busy=0.4, lane="Ray calls"))


def test_without_workers_their_number_is_estimated():
    said = verdict(stats(wait=0.03, step=0.02, workers=0))
    assert said.startswith("input-bound: the trainer waits 60% of the time, in which it builds its batches itself")
    assert said.endswith("num_workers=2 would build them meanwhile")


def test_without_workers_and_without_a_cause_it_says_so():
    assert verdict(stats(wait=0.0001, step=0.02, workers=0)).startswith("nothing to mend")


def test_without_workers_and_without_a_free_cpu_none_are_recommended():
    assert "num_workers" not in verdict(stats(wait=0.03, step=0.02, workers=0, load=1.0, cpus=1.0))


# ---- the verdict on what a recorder has been told


def told(clock, batches, *, wait, step, workers=2, build=lambda batch: 0.01, idle=0.0, blocked=1.0, behind=0.0, **more):
    """The stats of a loader that has had an epoch of so many batches.

    Args:
        wait: seconds of the trainer for a batch.
        step: likewise.
        build: by the batch's number, how long its worker took.
        idle: how long the worker then had nothing to do.
        blocked: share of the wait.
        behind: likewise.
        more: options of the loader, or `drawing`, which is a share of the wait too.
    """
    drawing = more.pop("drawing", 0.0)
    loader, iterator = DataLoader(range(8), num_workers=workers, **more), Iterator()
    tally = loader._recorder.begins(iterator, workers, more.get("prefetch_factor", 2))
    for batch in range(batches):
        clock.now += wait
        if workers:
            answered(tally, batch % workers, idle=idle, fetch=build(batch))
        tally.gave(clock.now - wait, batch, 1, 1)
        tally.blocked += blocked * wait
        tally.behind += behind * wait
        tally.drawing += drawing * wait
        clock.now += step
    return loader.stats()


@pytest.fixture
def idle_machine(monkeypatch):
    """A machine of 16 CPUs that have nothing to do, whatever the one of the test does."""
    monkeypatch.setattr(recorder, "load", lambda: 0.0)
    monkeypatch.setattr(recorder, "cpus", lambda: 16.0)


@pytest.mark.parametrize(
    ("epoch", "begins", "ends"),
    [
        (
            {"batches": 60, "wait": 0.02, "step": 0.004, "build": lambda batch: 0.04},
            "input-bound: the trainer waits 83% of the time, and the workers are busy 100% of theirs",
            "more workers would end it",
        ),
        (
            {"batches": 30, "wait": 0.0, "step": 0.05, "idle": 0.1},
            "the trainer is the bottleneck: 1 of 2 workers would do",
            "(the trainer waits only 0% of the time)",
        ),
        (  # one batch in 16 takes 0.2 s, all the same worker's, the others next to nothing
            {
                **{"batches": 80, "wait": 0.02, "step": 0.004, "idle": 0.02, "behind": 0.9},
                "build": lambda batch: 0.2 if batch % 16 == 0 else 0.002,
            },
            "slow batches are the bottleneck: the trainer waits 83% of the time, mostly for one batch in 16, which",
            "takes 100 times the median: scheduling='dynamic' (with seeding='batch')",
        ),
        (
            {
                **{"batches": 80, "wait": 0.02, "step": 0.004, "idle": 0.02, "behind": 0.9},
                **{"scheduling": "dynamic", "seeding": "batch"},
                "build": lambda batch: 0.2 if batch % 16 == 0 else 0.002,
            },
            "slow batches are the bottleneck",
            "takes 100 times the median",
        ),
        (
            {"batches": 30, "wait": 0.02, "step": 0.004, "blocked": 0.0, "drawing": 0.9},
            "the sampler is the bottleneck: the trainer waits 83% of the time",
            "more workers would not",
        ),
        (
            {
                **{"batches": 80, "wait": 0.02, "step": 0.001, "behind": 0.9},
                "build": lambda batch: 0.05 if batch % 2 else 0.001,
                "idle": 0.01,
            },
            "worker 1 is the bottleneck: the trainer waits 95.2% of the time",
            "scheduling='dynamic' (with seeding='batch')",
        ),
        (
            {"batches": 40, "wait": 0.02, "step": 0.02, "workers": 0},
            "input-bound: the trainer waits 50% of the time, in which it builds its batches itself",
            "num_workers=2 would build them meanwhile",
        ),
    ],
)
@pytest.mark.usefixtures("idle_machine")
def test_the_bottleneck_is_found(clock, epoch, begins, ends):
    said = told(clock, **epoch).verdict
    assert said.startswith(begins)
    assert said.endswith(ends)


# ---- what is shown

SLOW = tuple(SlowBatch(batch, 127, 1.25, str([1_000_000 + n for n in range(6)])[:-1] + ", ...]") for batch in range(3))
LONG = tuple(SlowBatch(10**6, 127, 1.25, str(["directory/" * 20] * 6)) for _ in range(3))
MOVING = (SlowBatch(1, 1, 1.25, "Sample(\n  1,\x1b[2J\x00)"),)
FULL = CacheStats(1_281_167, 640_000, 123 * 10**9, 10**12, 12_345_678, 1_281_167, full=True)
ALL = {
    **{"workers": 128, "batches": 1_234_567, "samples": 987_654_321, "nbytes": 10**15, "epochs": 123},
    **{"restarts": 12, "skipped": 345_678, "page_locked": 1_234_567, "locked_bytes": 10**12, "cache": FULL},
    **{"cpus": 127.5, "load": 1.0, "bytes_under_way": 123 * 10**9, "bytes_held": 123 * 10**9},
}
LOADERS = {
    "none": {"workers": 0},
    "none, with all": {**ALL, "workers": 0, "slowest": SLOW},
    "two": {"slowest": SLOW},
    "short epochs": {"batches": 600, "samples": 12_345_678, "nbytes": 123 * 10**9, "epochs": 123},
    "eight": {"workers": 8, "load": 0.5, "cache": FULL},
    "all": {**ALL, "slowest": SLOW},
    "long": {**ALL, "slowest": LONG},
    "moving": {"slowest": MOVING},
}
SAID = {
    "nothing to mend": {"wait": 0.0001, "step": 0.1, "busy": 0.75},
    "the trainer is the bottleneck": {"wait": 0.0001, "step": 0.1, "build": 0.001, "busy": 0.25},
    "more workers": {"wait": 0.0127, "step": 0.0127, "build": 0.09},
    "each further worker": {"wait": 0.1, "step": 0.000001},
    "all CPUs": {"wait": 0.1, "step": 0.000001, "load": 1.0, "cpus": 127.5},
    "slow batches": {"wait": 0.1, "step": 0.000001, "busy": 0.5, "behind": 1.0, "slow": 1, "slow_ratio": 1234.0},
    "own work": {"wait": 0.1, "step": 0.000001, "blocked": 0.1},
    "the sampler": {"wait": 0.1, "step": 0.000001, "blocked": 0.1, "drawing": 1e9},
    "restarts": {"wait": 0.1, "step": 0.000001, "busy": 0.5, "restarts": 123},
    "shallow": {"wait": 0.1, "step": 0.000001, "busy": 0.5, "prefetch_factor": 123},
    "Ray calls": {"wait": 0.1, "step": 0.000001, "busy": 0.5, "lane": "Ray calls"},
    "unknown": {"wait": 0.1, "step": 0.000001, "busy": 0.5},
}


def shown(*parts):
    whole = stats(**{key: value for part in parts for key, value in part.items()})
    if whole.recent.batches > 1000:
        whole = dataclasses.replace(whole, recent=dataclasses.replace(whole.recent, epochs=1))
    return dataclasses.replace(whole, verdict=verdict(whole), epochs=(EpochTimes(7, 1.0, 2.0, 1.5, whole.num_workers),))


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("name", LOADERS)
def test_the_text_of_any_loader_fits(name, said):
    whole = shown(LOADERS[name], SAID[said])
    lines = str(whole).split("\n")
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100
    assert all(line.isprintable() for line in lines)
    assert {line for line in lines if line.endswith(" ...")} <= {*lines[-len(whole.recent.slowest) :]}  # are cut
    assert [line.split("  ")[0] for line in lines].count("slowest") == bool(whole.recent.slowest)


def test_the_text_holds_every_part():
    text = str(shown(LOADERS["all"], SAID["slow batches"]))
    for part in [
        "last epoch  1.23M batches, 988M samples, 1 PB; ",
        "123 epochs, 1.23M batches, 988M samples, 1 PB; ",
        "waits 100%: median 100 ms, p99 100 ms",
        "128 workers (line, arena), busy 50%",
        "CPUs 127.5, load 100%; batches: 123 GB wait, 123 GB held, 100% in 1 TB page-locked",
        "640k of 1.28M samples in 123 GB, full; 12.3M were read and 1.28M built: 91%",
        "restarts 12, skipped samples 346k",
        "batch 2: 1.25 s, indices [1000000, 1000001, 1000002, 1000003, 1000004, 1000005, ...]",
    ]:
        assert part in text, text


@pytest.mark.parametrize("said", SAID)
def test_the_verdict_agrees_with_the_figures_below_it(said):
    whole = shown(SAID[said])
    text = str(whole).replace("\n            ", " ")
    share = text.split("the trainer waits ")[1].removeprefix("only ").split(" of the time")[0]
    assert f"trainer     waits {share}: " in text


def test_before_the_first_epoch_the_text_is_short():
    whole = LoaderStats()
    assert str(dataclasses.replace(whole, verdict=verdict(whole))).split("\n") == [
        "verdict     too little to say: only 0 batches so far, without the first of each epoch",
        "last epoch  0 batches, 0 samples, 0 B; 0 batches/s, 0 samples/s, 0 B/s",
        "in all      0 epochs, 0 batches, 0 samples, 0 B",
    ]


def test_a_notebook_shows_the_text_below_a_bar_of_each_epoch():
    whole = dataclasses.replace(
        shown(LOADERS["moving"], SAID["own work"]),
        epochs=(EpochTimes(3, 1.0, 1.0, 1.0, 2), EpochTimes(4, 1.0, 3.0, 0.0, 2), EpochTimes(5, 0.5, 0.5, 0.5, 0)),
        verdict="a < b & c",
    )
    assert repr(whole) == str(whole)
    picture, text = ElementTree.fromstring(whole._repr_html_())
    assert text.text == str(whole)
    bars, words = ([one for one in picture if one.tag.endswith(tag)] for tag in ("rect", "text"))
    assert [one.text for one in words] == [
        *("the trainer waits", "its step", "batches are built"),
        *("epoch 3", "wait 50%, step 50% of 2 s", "build 50%"),
        *("epoch 4", "wait 25%, step 75% of 4 s", "build 0%"),
        *("epoch 5", "build 50%, step 50% of 1 s"),  # without workers the trainer builds
    ]
    lengths = [float(one.get("width")) for one in bars]
    assert lengths == [14, 14, 14, 90, 90, 90, 90, 270, 0, 45, 45]
    colours = [one.get("fill") for one in bars]
    wait, step, build = colours[:3]
    assert len({wait, step, build}) == 3
    assert colours[3:] == [wait, step, build, wait, step, build, build, step]


def test_before_the_first_batch_there_is_no_picture():
    assert [one.tag for one in ElementTree.fromstring(LoaderStats()._repr_html_())] == ["pre"]


def test_a_dict_holds_plain_values_only():
    def check(value):
        if type(value) is dict:
            assert all(type(key) is str for key in value)
            value = [*value.values()]
        if type(value) is list:
            return sum(map(check, value))
        assert type(value) in (int, float, str, bool)
        return 1

    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(10, 4)), batch_size=4)
    list(loader)
    assert check(loader.stats().as_dict()) > 50
    assert "cache" not in loader.stats().as_dict()
    whole = shown(LOADERS["all"], SAID["slow batches"])
    found = whole.as_dict()
    assert check(found) > 1000
    assert (found["total"]["batches"], found["total"]["wait_share"]) == (whole.total.batches, whole.total.wait_share)
    assert found["recent"]["workers"][1]["build"]["median"] == whole.recent.workers[1].build.median
    assert found["cache"]["hit_rate"] == FULL.hit_rate
    assert found["prefetch_factor"] == whole.prefetch_factor
    assert json.loads(json.dumps(found)) == found


# ---- of a loader without workers


def test_a_loader_counts_batches_samples_and_bytes():
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(10, 4)), batch_size=4)
    assert loader.stats().total.batches == 0
    for _ in range(2):
        for _ in loader:
            pass
    found = loader.stats()
    assert (found.num_workers, found.epoch.workers) == (0, ())
    assert (found.epoch.batches, found.epoch.samples, found.epoch.nbytes) == (3, 10, 160)
    assert (found.total.batches, found.total.samples, found.total.nbytes) == (6, 20, 320)
    assert found.verdict.startswith("too little to say: only 4 batches so far")


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(10))


@pytest.mark.parametrize(("batch_size", "batches"), [(4, 3), (None, 10)])
def test_samples_of_a_stream_are_those_that_were_built(batch_size, batches):
    loader = DataLoader(Stream(), batch_size=batch_size)
    list(loader)
    assert (loader.stats().epoch.batches, loader.stats().epoch.samples) == (batches, 10)


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index in (0, 1, 2, 3, 5):
            raise ValueError(index)
        return index


def test_samples_that_are_skipped_are_counted_as_such():
    loader = DataLoader(Failing(), batch_size=4, on_error="skip")
    assert len(list(loader)) == 2
    found = loader.stats().epoch
    assert (found.batches, found.samples, found.skipped) == (2, 5, 5)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_a_loader_begins_with_nothing(copied):
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(10, 4)), batch_size=4)
    list(loader)
    other = copied(loader)
    list(other)
    assert (loader.stats().total.batches, other.stats().total.batches) == (3, 3)


def test_stats_are_no_part_of_a_state():
    loader = DataLoader(torch.utils.data.TensorDataset(torch.zeros(10, 4)), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    other = DataLoader(torch.utils.data.TensorDataset(torch.zeros(10, 4)), batch_size=4)
    other.load_state_dict(state)
    list(other)
    assert other.stats().total.batches == 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_bytes_of_a_batch_are_counted_without_calling_the_users_code():
    class Refuses(dict):
        def values(self):
            raise AssertionError("this is the user's code")

    Pair = namedtuple("Pair", "left right")
    zeros = torch.zeros(4)
    endless = []
    endless.append(endless)
    for batch, nbytes in [
        ([zeros, (zeros, {"a": np.zeros(2)})], 48),
        (Pair(zeros, zeros), 32),
        (Refuses(a=zeros), 16),
        (zeros.to_sparse(), 0),
        (torch.nested.nested_tensor([zeros]), 0),
        (endless, 0),
        (object(), 0),
    ]:
        assert _nbytes(batch) == nbytes
