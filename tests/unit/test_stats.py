"""What a loader measures of itself: times, tallies with a clock of the test's own, and the verdict on numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import weakref
from collections import namedtuple
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from rayloader import DataLoader, LoaderStats
from rayloader.epoch.local import _nbytes
from rayloader.observe import recorder
from rayloader.observe.recorder import FOLD, KEPT, KEPT_EPOCHS, SLOW, SLOWEST, Recorder, Series, Tally
from rayloader.observe.stats import (
    ENOUGH_BATCHES,
    CacheStats,
    EpochTimes,
    Period,
    SlowBatch,
    Times,
    WorkerStats,
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
    for one in times:
        made.add(one)
    return made


def test_quantiles_are_those_of_the_last_times_and_series_add_up():
    source = random.Random(1)
    times = [source.lognormvariate(0, 1) for _ in range(3 * KEPT)]
    for made in (series(times), series(times[:100]).merged(series(times[100:]))):
        found = made.times()
        assert (found.count, found.longest, found.total) == (3 * KEPT, max(times), pytest.approx(sum(times)))
        assert [found.median, found.p95, found.p99] == np.quantile(times[-KEPT:], [0.5, 0.95, 0.99]).tolist()
    assert Series().times() == Times()
    assert Series().above(0.004) == (0, 0.0)
    half = series([0.001] * 4 * KEPT + [0.03] * (KEPT // 2))  # of the last times half
    assert half.above(0.004) == pytest.approx(((4 * KEPT + KEPT // 2) // 2, 0.03))


# ---- tallies: what happens, and which number it changes


def run_epoch(tally, clock, steps, *, samples=4, nbytes=100):
    """One epoch: pairs of what `next` and then the step take."""
    for wait, step in steps:
        clock.now += wait
        tally.gave(clock.now - wait, tally.batches, samples, nbytes)
        clock.now += step
    tally.raised(clock.now)  # StopIteration


def answered(tally, worker_id, *, idle=0.0, fetch=1.0, collate=0.0):
    spent, worker = pack_spent(worker_id, 0.0, idle, fetch, collate, 0.0), tally.workers[worker_id]
    tally.answers.append(spent if worker.settled else tally.settle(worker, spent))
    if len(tally.answers) >= tally.fold_at:
        tally.fold_answers()


def waits(tally, clock):
    """Three batches; the wait for the first is counted by itself."""
    run_epoch(tally, clock, [(5.0, 0.5), (1.0, 2.0), (1.0, 2.0)])


def raises(tally, clock):
    """What a `next` that raises took is neither wait nor step; nor is what the program does then."""
    run_epoch(tally, clock, [(1.0, 1.0)] * 2)
    tally.raised(clock.now)
    clock.now += 100.0
    tally.gave(clock.now, 2, 4, 100)
    clock.now += 1.0
    tally.raised(clock.now - 2.0)  # it was interrupted after it had counted the batch
    clock.now += 100.0
    tally.gave(clock.now - 1.0, 3, 4, 100)


def idles(tally, clock):
    """What workers waited for before the first batch is not their idleness."""
    answered(tally, 0, idle=30.0)
    clock.now += 60.0
    tally.gave(clock.now - 60.0, 0, 1, 1)
    answered(tally, 0, idle=30.0)
    assert tally.period().workers[0].idle == 0.0
    clock.now += 10.0
    tally.gave(clock.now - 1.0, 0, 1, 1)
    answered(tally, 0, idle=4.0)


def builds(tally, clock):
    """More batches than are folded at once."""
    for batch in range(3 * FOLD + 7):
        answered(tally, batch % 2, fetch=0.5, collate=0.25)
    run_epoch(tally, clock, [(1.0, 2.0)] * (3 * FOLD + 7))


HALF = (3 * FOLD + 7) // 2  # of these, the batches of the second worker


def stragglers(tally, clock):
    """In any order."""
    for batch in random.Random(2).sample(range(100), 100):
        if batch > tally.slow:
            tally.note_slow((batch, batch % 2, float(batch), ""))
    for batch in range(20):
        answered(tally, 0, fetch=SLOW + 1.0 if batch < 2 else 1.0)


@pytest.mark.parametrize(
    ("happens", "numbers"),
    [
        (waits, {"batches": 3, "samples": 12, "nbytes": 300, "first_wait": 5.0, "wait.count": 2, "wait.total": 2.0}),
        (waits, {"step.total": 4.5, "wait_share": 2.0 / 6.5, "samples_per_s": 2 * 4 / 6.5}),
        (raises, {"seconds": 1.0 + 2.0 + 1.0, "batches": 4}),
        (idles, {"workers.0.idle": 4.0, "workers.0.build.count": 3}),
        (builds, {"batches": 3 * FOLD + 7, "wait.count": 3 * FOLD + 6, "step.total": 2.0 * (3 * FOLD + 7)}),
        (builds, {"workers.0.build.count": 3 * FOLD // 2 + 4, "workers.1.fetch": (3 * FOLD // 2 + 3) * 0.5}),
        (
            builds,
            {"workers.0.collate": (3 * FOLD // 2 + 4) * 0.25, "workers.0.build.total": (3 * FOLD // 2 + 4) * 0.75},
        ),
        (stragglers, {"slowest": tuple(SlowBatch(n, n % 2, float(n), "") for n in (99, 98, 97)[:SLOWEST])}),
        (stragglers, {"slow": 2, "slow_ratio": SLOW + 1.0}),
    ],
)
def test_a_number_counts_what_happens(happens, numbers, clock):
    tally = Tally(num_workers=2)
    happens(tally, clock)
    twice = Tally.of([tally, tally]).period()
    for path, number in numbers.items():
        found, double = tally.period(), twice
        for name in path.split("."):
            found, double = ((one[int(name)] if name.isdigit() else getattr(one, name)) for one in (found, double))
        assert found == (pytest.approx(number) if isinstance(number, float) else number), path
        if isinstance(number, int):
            assert double == 2 * number, path


# ---- the epochs of a loader


class Iterator:
    pass


def epochs_of(clock, *epochs):
    """A recorder of epochs, given as how many batches and workers each has, and what `next` and the step take."""
    kept, iterator = Recorder(), Iterator()
    for number, (batches, workers, wait, step) in enumerate(epochs):
        run_epoch(kept.begins(iterator, workers, epoch=number), clock, [(wait, step)] * batches)
    return kept.tell(), kept, iterator


LONG_AGO = (1000, 2, 9.0, 1.0)


@pytest.mark.parametrize(
    ("epochs", "recent"),
    [
        ([LONG_AGO, (ENOUGH_BATCHES + 1, 2, 1.0, 9.0)], (1, ENOUGH_BATCHES + 1)),  # enough to speak for itself
        ([LONG_AGO, (ENOUGH_BATCHES, 2, 1.0, 1.0)], (2, ENOUGH_BATCHES + 1000)),
        ([LONG_AGO, *[(6, 2, 1.0, 1.0)] * 30], (4, 24)),  # as many of the last as it takes
        ([LONG_AGO, (100, 2, 1.0, 1.0), (2, 2, 1.0, 1.0)], (2, 102)),  # one that has just begun
        ([(100, 8, 9.0, 1.0), (5, 2, 1.0, 1.0), (5, 2, 1.0, 1.0)], (2, 10)),  # those of other workers tell nothing
    ],
)
def test_the_verdict_is_of_as_many_of_the_last_epochs_as_it_takes(epochs, recent, clock):
    told, _, _ = epochs_of(clock, *epochs)
    assert (told.recent.epochs, told.recent.batches) == recent
    assert (told.epoch.epochs, told.epoch.batches, len(told.epoch.workers)) == (1, *epochs[-1][:2])
    assert (told.total.epochs, told.total.batches) == (len(epochs), sum(batches for batches, *_ in epochs))
    assert told.num_workers == epochs[-1][1]


def test_the_last_epochs_are_told_one_by_one_and_no_more_are_kept(clock):
    _, kept, iterator = epochs_of(clock, *[(3, 2, 1.0, 1.0)] * 100)
    kept.begins(iterator, 2, epoch=100)  # broken off before its first batch
    run_epoch(kept.begins(iterator, 0, epoch=101), clock, [(2.0, 1.0)] * 3)
    assert [one.epoch for one in kept.tell().epochs] == [*range(101 - KEPT_EPOCHS, 100), 101][-KEPT_EPOCHS:]
    assert kept.tell().epochs[-1] == EpochTimes(101, wait=4.0, step=3.0, build=4.0, workers=0)
    other, ref = Iterator(), weakref.ref(iterator)
    run_epoch(kept.begins(other, 0), clock, [(1.0, 1.0)])
    assert (kept.tell().epoch.batches, kept.tell().total.batches) == (1, 304)  # both live side by side
    del iterator
    assert ref() is None, "the recorder keeps no iterator"
    assert kept.tell().total.batches == 304


# ---- the verdict


def times(count, each):
    return Times(count, count * each, each, each, each, each)


def stats(
    *, wait, step, batches=200, workers=2, build=0.01, busy=0.99, blocked=1.0, behind=0.0, lane="line, arena", **more
):
    """Stats of an epoch: seconds for each batch, shares for the others; of `build`, for each worker or for all."""
    builds = build if isinstance(build, list) else [build] * workers
    workers = len(builds)
    each = batches // workers if workers else 0
    period_fields = {field.name for field in dataclasses.fields(Period)}
    of_period = {name: value for name, value in more.items() if name in period_fields}
    period = Period(
        batches=batches + 1,
        wait=times(batches, wait),
        step=times(batches, step),
        blocked=blocked * batches * wait,
        behind=behind * blocked * batches * wait,
        build=times(batches if workers else 0, sum(builds) / max(1, workers)),
        workers=tuple(
            WorkerStats(
                worker_id, times(each, one), each * one * (0.01 if one > 0.03 else (1 - busy) / busy), lane=lane
            )
            for worker_id, one in enumerate(builds)
        ),
    )
    period = dataclasses.replace(period, **of_period)
    others = {name: value for name, value in more.items() if name not in period_fields}
    of_loader = {"num_workers": workers, "cpus": 16.0, **dict.fromkeys(("epoch", "recent", "total"), period), **others}
    return LoaderStats(**of_loader)


SLOWER = {"wait": 0.01, "step": 0.01, "busy": 0.5, "behind": 0.9, "slow": 4, "slow_ratio": 30.0}
MORE = "about 2 more workers would end it"
OTHERS = " as the others': scheduling='dynamic' (with seeding='batch')"
DYNAMIC = ": scheduling='dynamic' (with seeding='batch')"
# Two workers at 30 ms a batch bring one in 15 ms, and the trainer takes 10 ms for its step: 30 * 1.2 / 10 = 3.6.
FEW = {"wait": 0.005, "step": 0.010, "build": 0.030}
WAITS = {"wait": 0.01, "step": 0.01, "busy": 0.4}
RESTS = {"wait": 0.0001, "step": 0.1, "build": 0.15}
FULL = CacheStats(1_281_167, 640_000, 123 * 10**9, 10**12, 12_345_678, 1_281_167, full=True)


@pytest.mark.parametrize(
    ("given", "begins", "ends"),
    [
        ({**FEW, "batches": 0}, "too little to say: only 0 batches so far", ""),
        ({**FEW, "batches": 1}, "too little to say: only 1 batch so far", ""),
        ({**FEW, "batches": ENOUGH_BATCHES - 1}, "too little to say: only 19 batches", ""),
        ({**FEW, "batches": ENOUGH_BATCHES}, "input-bound", MORE),
        ({**FEW, "batches": 63, "workers": 32}, "too little to say: only 63 batches", ""),
        ({**FEW, "batches": 64, "workers": 32}, "input-bound", "about 1 more worker would end it"),
        (FEW, "input-bound: the trainer waits 33% of the time", f"busy 99% of theirs; {MORE}"),
        ({**FEW, "cache": FULL}, "input-bound", MORE + "; the cache is full: raise max_bytes"),
        ({**FEW, "cpus": 4.0}, "input-bound", MORE),
        ({**FEW, "cpus": 3.0, "load": 0.5}, "input-bound", MORE + ", if they need less than a CPU each"),
        ({**FEW, "load": 0.97}, "input-bound", "; all CPUs of this machine are in use already"),
        ({**FEW, "cpus": 2.0, "load": 0.97, "lane": "Ray calls"}, "input-bound", MORE),
        ({"wait": 0.01, "step": 0.00001}, "input-bound", "of a trainer that does next to nothing with a batch"),
        (RESTS, "nothing to mend: the trainer waits only 0.1% of the time", ""),
        ({**RESTS, "workers": 0, "cache": FULL}, "nothing to mend", ""),
        ({**RESTS, "workers": 6, "busy": 0.25}, "the trainer is the bottleneck: 2 of 6 workers would", "only 0.1%"),
        (SLOWER, "slow batches are the bottleneck", "one batch in 50, which takes 30 times the median" + DYNAMIC),
        ({**SLOWER, "dynamic": True}, "slow batches are the bottleneck", "30 times the median"),
        ({**SLOWER, "iterable": True}, "slow batches are the bottleneck", "30 times the median"),
        ({**SLOWER, "behind": 0.3}, "input-bound", "a larger prefetch_factor may help"),  # nobody waits behind them
        ({**SLOWER, "slow": 60}, "input-bound", "a larger prefetch_factor may help"),  # too many to be stragglers
        ({**SLOWER, "busy": 0.95}, "input-bound", "about 1 more worker would end it"),
        ({**SLOWER, "build": [0.01, 0.039, 0.01]}, "worker 1 is the bottleneck", "3.9 times as long" + OTHERS),
        ({**SLOWER, "build": [0.01, 0.039], "busy": 0.25}, "worker 1 is the bottleneck", "3.9 times as long" + OTHERS),
        ({**SLOWER, "build": [0.01, 0.019, 0.01]}, "slow batches are the bottleneck", DYNAMIC),
        ({**SLOWER, "build": [0.01, 0.039, 0.01], "batches": 27}, "slow batches are the bottleneck", DYNAMIC),
        ({**WAITS, "blocked": 0.1}, "input-bound", "the loader's own work in its process (9 ms a batch)"),
        ({**WAITS, "blocked": 0.1, "drawing": 1.6}, "the sampler is the bottleneck", "while the sampler draws indices"),
        ({**WAITS, "restarts": 3}, "input-bound", "busy 40% of theirs; workers were restarted 3 times meanwhile"),
        ({**WAITS, "prefetch_factor": 1}, "input-bound", "; at most 1 batches of each are under way"),
        ({**WAITS, "lane": "Ray calls"}, "input-bound", "the time on their way through Ray"),
        ({"wait": 0.03, "step": 0.02, "workers": 0}, "input-bound", "itself; num_workers=2 would build them meanwhile"),
        ({"wait": 0.03, "step": 0.0002, "workers": 0}, "input-bound", "itself; num_workers=1 or more would build them"),
        ({"wait": 0.03, "step": 0.02, "workers": 0, "load": 1.0}, "input-bound", "itself; all CPUs of this machine"),
    ],
)
def test_the_verdict(given, begins, ends):
    whole = stats(**given)
    found = verdict(whole)
    assert found.startswith(begins)
    assert ends in found
    assert ("scheduling" in found) == (DYNAMIC in ends)
    assert ("; about " in found) == ("about " in ends)
    assert ("the cache is full" in found) == ("the cache is full" in ends)
    if "the trainer waits" in found:
        text = str(dataclasses.replace(whole, verdict=found)).replace("\n            ", " ")
        share = text.split("the trainer waits ")[1].removeprefix("only ").split(" of the time")[0]
        assert f"trainer     waits {share}: " in text, "the verdict agrees with the figures below it"


# ---- what is shown

PATHS = tuple(SlowBatch(10**6, 127, 1.25, str(["directory/" * 20] * 6)) for _ in range(3))
MOVING = (SlowBatch(1, 1, 1.25, "Sample(\n  1,\x1b[2J\x00)"),)
NUMBERED = tuple(SlowBatch(batch, 127, 1.25, str([1_000_000] * 6)) for batch in range(3))
ALL = {
    **{"workers": 128, "batches": 1_234_567, "samples": 987_654_321, "nbytes": 10**15, "epochs": 123},
    **{"restarts": 12, "skipped": 345_678, "page_locked": 1_234_567, "locked_bytes": 10**12, "cache": FULL},
    **{"cpus": 127.5, "load": 1.0, "bytes_under_way": 123 * 10**9, "bytes_held": 123 * 10**9},
}
SAID = [FEW, SLOWER, {**SLOWER, "slow_ratio": 1234.0, "slow": 1}, {**WAITS, "restarts": 123}, {**WAITS, "blocked": 0.1}]
LOADERS = [{"workers": 0}, {**ALL, "workers": 0}, {}, {"batches": 600, "samples": 12_345_678, "epochs": 123}, ALL]


def shown(**given):
    whole = stats(**given)
    return dataclasses.replace(whole, verdict=verdict(whole))


@pytest.mark.parametrize("slowest", [(), NUMBERED, PATHS, MOVING])
def test_the_text_of_any_loader_fits(slowest):
    for loader, said in itertools.product(LOADERS, SAID):
        lines = str(shown(**{**said, **loader}, slowest=slowest)).split("\n")
        assert len(lines) <= 12
        assert max(map(len, lines)) <= 100
        assert all(line.isprintable() for line in lines)
        assert len([line for line in lines if line.endswith(" ...")]) == (len(slowest) if slowest is PATHS else 0)
        assert [line.split("  ")[0] for line in lines].count("slowest") == bool(slowest)


def test_the_text_and_a_dict_hold_every_part():
    whole = shown(**{**SLOWER, **ALL}, slowest=NUMBERED)
    text, found = str(whole), whole.as_dict()
    for part in [
        "last epochs 123 epochs, 1.23M batches, 988M samples, 1 PB; 50 batches/s, 40k samples/s, 40.5 GB/s",
        "waits 50%: median 10 ms, p99 10 ms, first 0 us; steps 50%: median 10 ms",
        "128 workers (line, arena), busy 50%: fetch 0, collate 0, transfer 0 ms",
        "CPUs 127.5, load 100%; batches: 123 GB wait, 123 GB held, 100% in 1 TB page-locked",
        "640k of 1.28M samples in 123 GB, full; 12.3M were read and 1.28M built: 91%",
        "123 epochs, 1.23M batches, 988M samples, 1 PB; restarts 12, skipped samples 346k",
        "batch 2: 1.25 s, indices [1000000, 1000000, 1000000, 1000000, 1000000, 1000000]",
    ]:
        assert part in text, text
    assert json.loads(json.dumps(found)) == found
    assert (found["total"]["batches"], found["total"]["wait_share"]) == (whole.total.batches, whole.total.wait_share)
    assert found["recent"]["workers"][1]["build"]["median"] == whole.recent.workers[1].build.median
    assert found["cache"]["hit_rate"] == FULL.hit_rate
    whole = LoaderStats()
    assert "cache" not in whole.as_dict()
    assert str(dataclasses.replace(whole, verdict=verdict(whole))).split("\n") == [
        "verdict     too little to say: only 0 batches so far, without the first of each epoch",
        "last epoch  0 batches, 0 samples, 0 B; 0 batches/s, 0 samples/s, 0 B/s",
        "in all      0 epochs, 0 batches, 0 samples, 0 B",
    ]


def test_a_notebook_shows_the_text_below_a_bar_of_each_epoch():
    assert [one.tag for one in ElementTree.fromstring(LoaderStats()._repr_html_())] == ["pre"]
    epochs = EpochTimes(3, 1.0, 1.0, 1.0, 2), EpochTimes(5, 0.5, 0.5, 0.5, 0)
    whole = dataclasses.replace(stats(**FEW, slowest=MOVING), epochs=epochs, verdict="a < b & c")
    picture, text = ElementTree.fromstring(whole._repr_html_())
    assert text.text == str(whole) == repr(whole)
    bars, words = ([one for one in picture if one.tag.endswith(tag)] for tag in ("rect", "text"))
    assert [one.text for one in words] == [
        *("the trainer waits", "its step", "batches are built"),
        *("epoch 3", "wait 50%, step 50% of 2 s", "build 50%"),
        *("epoch 5", "build 50%, step 50% of 1 s"),  # without workers the trainer builds
    ]
    assert [float(one.get("width")) for one in bars] == [14, 14, 14, 180, 180, 180, 90, 90]
    wait, step, build, *colours = [one.get("fill") for one in bars]
    assert len({wait, step, build}) == 3
    assert colours == [wait, step, build, build, step]


# ---- of a loader without workers


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Failing(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {4: 4, 6: 6, 7: 7, 8: 8, 9: 9}[index]


ZEROS = TensorDataset(torch.zeros(10, 4))


@pytest.mark.parametrize(
    ("given", "counts"),
    [
        ({"dataset": ZEROS, "batch_size": 4}, (3, 10, 160, 0)),
        ({"dataset": Stream(), "batch_size": None}, (10, 10, 0, 0)),
        ({"dataset": Failing(), "batch_size": 4, "on_error": "skip"}, (2, 5, 40, 5)),
    ],
)
def test_a_loader_counts_batches_samples_bytes_and_what_it_skips(given, counts):
    loader = DataLoader(**given)
    assert loader.stats().total.batches == 0
    for _ in range(2):
        list(loader)
    found = loader.stats()
    assert (found.num_workers, found.epoch.workers) == (0, ())
    for period, factor in ((found.epoch, 1), (found.total, 2)):
        numbers = period.batches, period.samples, period.nbytes, period.skipped
        assert numbers == tuple(factor * one for one in counts)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_bytes_of_a_batch_are_counted_without_calling_the_users_code():
    class Refuses(dict):
        values = None

    Pair = namedtuple("Pair", "left right")
    zeros = torch.zeros(4)
    endless = []
    endless.append(endless)
    counted = [zeros, (zeros, {"a": np.zeros(2)}), Pair(zeros, zeros), Refuses(a=zeros)]
    uncounted = [zeros.to_sparse(), torch.nested.nested_tensor([zeros]), endless, object()]
    assert [_nbytes(batch) for batch in counted + uncounted] == [16, 32, 32, 16, 0, 0, 0, 0]
