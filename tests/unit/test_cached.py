"""`rayloader.cached`: the same samples as without it, from memory or a folder, or an error; here without workers."""

import collections
import copy
import dataclasses
import datetime
import errno
import fractions
import functools
import gc
import io
import logging
import multiprocessing
import os
import pickle
import random
import resource
import secrets
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import rayloader
from rayloader import CacheError, CacheStats, cached
from rayloader.data import cached as module
from rayloader.data import sample_store
from rayloader.observe.stats import LoaderStats, Period, Times, verdict
from rayloader.transport import memory_file
from rayloader.transport.pickler import ByValuePickler, dumped

HANG_LIMIT = 500.0  # seconds; on expiry the test fails
Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass
class Box:
    lower: torch.Tensor
    name: str


class Numbers(Dataset):
    """Sample `i` is `make(i)`; counts how often it was asked."""

    def __init__(self, make, count=20):
        self.make, self.count, self.asked = make, count, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked += 1
        return self.make(index)


def labelled(index):
    return torch.full((3, 4), index, dtype=torch.uint8), index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(())


KINDS = {
    "labelled": labelled,
    "tensors": lambda i: (torch.arange(i + 1.0), torch.tensor(i)),
    "dict": lambda i: {"ids": np.arange(i), "text": f"sample {i}", "none": None, "nested": [{"x": torch.ones(i, 2)}]},
    "strided": lambda i: torch.arange(24).reshape(4, 6)[:, i % 6],
    "transposed": lambda i: np.arange(24.0).reshape(4, 6).T + i,
    "bfloat16": lambda i: torch.full((5,), i, dtype=torch.bfloat16),
    "named tuple": lambda i: Pair(torch.tensor([i]), i),
    "dataclass": lambda i: Box(torch.tensor([i]), str(i)),
    "large": lambda i: torch.full((1 << 18,), i, dtype=torch.int32),  # with its head, just as large as is mapped
    "large and small": lambda i: (np.full(1 << 21, i, np.uint8), torch.tensor(i), b"x"),
    "number": lambda i: i,
    "empty": lambda i: (torch.empty(0, 3), np.empty((0,)), "", [], {}),
    "text": lambda i: "word " * i,
    "shared": lambda i: [torch.arange(4)] * 2,
    "structured": lambda i: np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "sparse": lambda i: torch.eye(3).mul(i).to_sparse(),
}


def same(one, other):
    """Whether two samples are equal: types, data types, shapes, strides, values."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
        assert one.layout is not torch.strided or one.stride() == other.stride()
        assert torch.equal(one.to_dense(), other.to_dense()) if one.layout is not torch.strided else one.equal(other)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.flags.writeable) == (other.dtype, other.shape, other.flags.writeable)
        assert one.size == 0 or one.strides == other.strides
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif dataclasses.is_dataclass(one):
        same(vars(one), vars(other))
    else:
        assert one == other
    return True


@pytest.fixture(params=["memory", "folder"])
def place(request, tmp_path):
    return {} if request.param == "memory" else {"where": tmp_path / "cache", "key": "samples"}


def another(kept):
    """The same cache, as another process gets it."""
    return pickle.loads(dumped(kept, ByValuePickler))


def fork(work):
    """Begins it in a forked process; returns that process's number."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)  # a fork has none of the others
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def end_of(pid):
    """The exit status of a forked process, 0 if its work has returned; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_fork(work):
    """Does it in a forked process; returns that one's exit status."""
    return end_of(fork(work))


# ---- the same samples


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_dataset(kind, place):
    dataset = Numbers(KINDS[kind])
    kept = cached(dataset, **place)
    for _ in range(3):
        for index in random.Random(0).sample(range(20), 20):
            assert same(kept[index], KINDS[kind](index))
    stats = kept.stats()
    assert (stats.samples, stats.present, stats.built, stats.hits) == (20, 20, 20, 40)
    assert dataset.asked == 20 + 2 + 1  # the first two that were built, and the first that was read, are compared


def test_what_is_written_to_a_sample_stays_there(place):
    kept = cached(Numbers(KINDS["large and small"]), **place)
    for _ in range(3):
        array, number, _ = kept[7]
        assert array[5] == 7
        array[:], number[...] = 99, 99
    again = another(kept)
    assert same(again[7], KINDS["large and small"](7))


def test_a_sample_outlives_the_cache(place):
    kept = cached(Numbers(KINDS["large"]), **place)
    samples = [kept[3], kept[3]]
    del kept
    gc.collect()
    assert all(same(sample, KINDS["large"](3)) for sample in samples)


def test_batches_are_read_at_once_and_missing_samples_built_at_once():
    class AtOnce(Numbers):
        def __getitems__(self, indices):
            self.batches.append(list(indices))
            return [self.make(index) for index in indices]

    dataset = AtOnce(labelled)
    dataset.batches = []
    kept = cached(dataset)
    assert [label for _, label in kept.__getitems__([3, 1])] == [3, 1]
    assert [label for _, label in kept.__getitems__([1, 5, 3, 5, 6])] == [1, 5, 3, 5, 6]
    assert dataset.batches == [[3, 1], [5, 5, 6]]
    dataset.__class__.__getitems__ = lambda self, indices: torch.tensor(indices)
    with pytest.raises(CacheError, match=r"must return a list of 2 samples, got Tensor"):
        kept.__getitems__([8, 9])


def test_indices_are_those_of_a_sequence():
    kept = cached(Numbers(labelled))
    assert kept[np.int64(4)][1] == 4
    assert kept[torch.tensor(4)][1] == 4
    assert [label for _, label in kept] == list(range(20))
    with pytest.raises(IndexError, match="index 20 is out of range for 20 samples"):
        kept[20]
    with pytest.raises(IndexError, match="index -1 is out of range for 20 samples, which are counted from 0 on"):
        kept[-1]
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        kept["a"]
    kept.dataset.count = 21
    with pytest.raises(CacheError, match="had 20 samples and has 21 now; make a new cache"):
        len(kept)


def test_an_error_of_a_sample_is_raised_and_nothing_is_kept():
    def make(index):
        if index == 3:
            raise LookupError("no such file")
        return index

    kept = cached(Numbers(make))
    for _ in range(2):
        with pytest.raises(LookupError, match="no such file"):
            kept[3]
    assert kept.stats().present == 0


# ---- or an error

HELD = np.random.default_rng(0)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: random.random(),
        lambda: torch.rand(1),
        lambda: np.random.rand(),
        lambda: HELD.random(),
        lambda: random.seed(3),
    ],
)
def test_a_sample_that_draws_is_refused(draw, place):
    kept = cached(Numbers(lambda index: (index, draw())), **place)
    with pytest.raises(CacheError, match=r"sample 4 of the cached Numbers draws from a random generator"):
        kept[4]
    assert kept.stats().present == 0


def test_the_error_names_another_thread_as_a_possible_cause():
    drawn, ends = threading.Event(), threading.Event()

    def make(index):
        threading.Thread(target=lambda: (random.random(), drawn.set(), ends.wait(HANG_LIMIT))).start()
        assert drawn.wait(HANG_LIMIT)
        return index

    with pytest.raises(CacheError, match=r"draws from a random generator, or a thread does"):
        cached(Numbers(make))[4]
    ends.set()


def test_a_sample_that_draws_from_a_generator_of_its_dataset_is_refused():
    class Noisy(Numbers):
        def __getitem__(self, index):
            if not hasattr(self, "generator"):  # first used in the worker
                self.generator = torch.Generator().manual_seed(0)
            return torch.rand(1, generator=self.generator)

    with pytest.raises(CacheError, match="draws from a random generator"):
        cached(Noisy(None))[0]


@pytest.mark.parametrize("at_once", [False, True])
def test_a_generator_that_comes_late_and_is_rarely_drawn_from_is_found(at_once):
    class Late(Numbers):
        def __getitem__(self, index):
            if index >= 10 and not hasattr(self, "generator"):
                self.generator = np.random.default_rng(0)
            return self.generator.random() if index == 13 else index

    kept = cached(Late(None))
    assert [kept[index] for index in range(10)] == list(range(10))
    with pytest.raises(CacheError, match=r"sample 13 of the cached Late draws"):
        kept.__getitems__(list(range(10, 20))) if at_once else [kept[index] for index in range(10, 20)]
    assert kept._store.read(13) is sample_store.ABSENT


def test_a_generator_of_a_sample_s_own_is_no_draw():
    kept = cached(Numbers(lambda index: np.random.default_rng(index).random(3)))
    assert all(same(kept[i], np.random.default_rng(i).random(3)) for i in (1, 2, 1, 2))


def test_a_sample_that_differs_each_time_is_refused():
    calls = iter(range(100))
    kept = cached(Numbers(lambda index: next(calls)))
    with pytest.raises(CacheError, match=r"sample 4 of the cached Numbers differs when it is built again"):
        kept[4]


def test_samples_of_a_dataset_that_has_changed_are_not_given(place):
    dataset = Numbers(functools.partial(torch.full, (4,)))
    kept = cached(dataset, **place)
    kept[2]
    dataset.make = functools.partial(torch.full, (5,))
    with pytest.raises(CacheError, match=r"sample 2 .* differs .* make a new cache, in a folder by another key="):
        another(kept)[2]


class Moving:
    """Equal ones are, and it has no attributes to see."""

    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


OPAQUE = {
    "dates": lambda n: datetime.datetime.fromtimestamp(n, datetime.UTC),
    "slots": Moving,
    "paths": lambda n: Path(str(n)),
    "fractions": lambda n: fractions.Fraction(n, 7),
    "buffers": lambda n: io.BytesIO(bytes([n])),
    "sparse tensors": lambda n: torch.tensor([n, 1]).to_sparse(),
    "subclasses": lambda n: torch.nn.Parameter(torch.tensor([1.0, n])),
    "one number of many": lambda n: np.r_[np.zeros(100_003), n],
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_samples_of_all_kinds_are_compared_in_whole(kind):
    numbers = iter(range(10, 20))
    with pytest.raises(CacheError, match="sample 4 of the cached Numbers differs when it is built again"):
        cached(Numbers(lambda index: OPAQUE[kind](next(numbers))))[4]
    kept = cached(Numbers(OPAQUE[kind]))
    for _ in range(2):
        kept[4]


class Restored:
    """Has another attribute when it has been pickled, as images with palettes and data frames do."""

    def __init__(self, number):
        self.number, self.kept = number, {}

    def __reduce__(self):
        return Restored._again, (self.number,)

    @staticmethod
    def _again(number):
        made = Restored(number)
        made.restored = True
        return made


def itself(index):
    sample = [index]
    return [*sample, sample.append(sample), sample]


@pytest.mark.parametrize(
    "make",
    [
        lambda i: torch.tensor([1 + 2j]).conj(),
        lambda i: torch.tensor([1 + 2j]).conj().imag,
        lambda i: np.array([i], ">f4"),
        lambda i: Restored(i),
        lambda i: {"words": {"a", "b", str(i)}, "same": [str(i)] * 2},
        lambda i: [lambda x: x + i, Pair],
        itself,
    ],
)
def test_equal_samples_do_not_differ_when_one_was_read(make):
    kept = cached(Numbers(make))
    for _ in range(2):
        kept[4]
    assert kept.stats().hits == 1


def test_a_dataset_that_is_changed_in_this_process_is_compared_at_once():
    dataset = Numbers(labelled)
    dataset.shift = 0
    dataset.make = lambda index: index + dataset.shift
    kept = cached(dataset)
    for _ in range(2):
        assert [*kept] == list(range(20))
    assert dataset.asked == 20 + 2 + 1
    dataset.shift = 1
    with pytest.raises(CacheError, match="sample 5 of the cached Numbers differs"):
        kept[5]


def test_a_share_of_all_that_is_read_is_compared(monkeypatch):
    monkeypatch.setattr(module, "_READ", 10)
    dataset = Numbers(labelled)
    kept = cached(dataset)
    for _ in range(31):
        kept[0]
    assert dataset.asked == 1 + 1 + 3


class Read(IterableDataset):
    def __init__(self, kept):
        self.kept = kept

    def __iter__(self):
        return map(self.kept.__getitem__, range(20))


@pytest.mark.parametrize("around", [lambda kept: kept, lambda kept: Numbers(kept.__getitem__), Read])
def test_what_may_not_be_cached_is_not_skipped(around):
    def make(index):
        if index == 2:
            raise LookupError("no such file")
        return torch.rand(1) if index == 3 else index

    loader = rayloader.DataLoader(around(cached(Numbers(make))), batch_size=4, on_error="skip")
    with pytest.raises(CacheError, match="draws from a random generator"):
        list(loader)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (([], 0), ValueError, "max_bytes must be a whole number of bytes >= 1, or such as '500MB' or '20GiB', got 0"),
        (([], "5 apples"), ValueError, "got '5 apples'"),
        (([], True), ValueError, "got True"),
        (([], 1e9), ValueError, "got 1000000000.0"),
        (([], 10**30), ValueError, f"got {10**30}"),
        (([], np.int64(0)), ValueError, "max_bytes must be a whole number"),
        ((Stream(),), TypeError, "needs a map-style dataset, with __getitem__ and __len__, got Stream"),
        ((object(),), TypeError, "got object"),
    ],
)
def test_arguments_are_checked(arguments, error, words):
    with pytest.raises(error, match=words):
        cached(*arguments)


def test_sizes_have_units():
    given = (4096, np.uint32(4096), "4096", "8.192kB", "1MB", "2 MiB", "20GB")
    sizes = [cached([1], size).stats().max_bytes for size in given]
    assert sizes == [4096, 4096, 4096, 8192, 1_000_000, 2 << 20, 20_000_000_000]


# ---- room


def test_what_finds_no_room_is_built_each_time(place, caplog):
    dataset = Numbers(lambda i: torch.full((10_000,), i, dtype=torch.uint8))
    kept = cached(dataset, 55_000, **place)
    with caplog.at_level(logging.WARNING, "rayloader"):
        for _ in range(2):
            assert all(same(kept[i], dataset.make(i)) for i in range(20))
    stats = kept.stats()
    assert (stats.present, stats.built, stats.hits, stats.full) == (5, 35, 5, True)
    assert stats.missing == 15
    assert stats.nbytes <= stats.max_bytes == 55_000
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is full: 5 of 20 samples in 51.2 kB, full; 0 were read and 6 built: 0%. The others are built each" in said


def test_memory_is_left_for_others(monkeypatch, caplog):
    monkeypatch.setattr(sample_store, "available", lambda: 1 << 30)
    kept = cached(Numbers(KINDS["large"]))
    kept[0]
    monkeypatch.setattr(sample_store, "available", lambda: 1 << 28)
    assert all(same(kept[i], KINDS["large"](i)) for i in range(20))
    stats = kept.stats()
    assert stats.full
    assert stats.nbytes <= sample_store._CHUNK + (1 << 21)  # with the last one
    assert caplog.text.count("is full: 16 of 20 samples") == 1


def limited(nbytes, work):
    """Does it in a fork that can make no file of more bytes, which is like a full disk: a write ends in the middle."""

    def limits():
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        work()

    assert in_fork(limits) == 0


def test_a_full_disk_ends_the_cache_and_no_more(place, caplog):
    def work():
        kept = cached(Numbers(lambda i: b"%04d" % i * 2000), **place)
        for _ in range(2):
            assert [bytes(kept[i]) for i in range(20)] == [b"%04d" % i * 2000 for i in range(20)]
        stats = kept.stats()
        assert (stats.full, stats.present, stats.hits) == (True, 12, 12)
        assert caplog.text.count("is full: 12 of 20 samples") == 1

    limited(100_000, work)


def test_there_may_be_room_again_after_a_full_disk(tmp_path):
    """The append that failed in the middle has left a part of a record."""
    dataset = Numbers(lambda i: b"%04d" % i * 2000)
    limited(100_000, lambda: [*cached(dataset, where=tmp_path, key="texts")])
    kept = cached(dataset, where=tmp_path, key="texts")
    assert (kept.stats().present, kept.stats().full) == (12, False)
    for _ in range(2):
        assert [*kept] == [dataset.make(i) for i in range(20)]
    assert kept.stats().present == 20


def test_no_room_for_the_tables_is_an_error(place):
    def work():
        with pytest.raises(CacheError, match=r"the cache in .* can't be used: .*File too large.*make room"):
            cached(Numbers(labelled, 10_000), **place)

    limited(100_000, work)


def test_a_copy_leaves_a_full_cache_full(monkeypatch, caplog):
    """Otherwise the workers of each epoch would ask for memory again, and say again that there is none."""
    kept = cached(Numbers(KINDS["large"]))
    monkeypatch.setattr(sample_store, "available", lambda: 0)
    for cache in (kept, another(kept), another(kept)):
        assert [same(cache[i], KINDS["large"](i)) for i in range(20)] == [True] * 20
    assert kept.stats().full
    assert caplog.text.count("is full: 0 of 20 samples") == 1


def test_memory_files_may_be_refused(monkeypatch):
    def refused(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(CacheError, match=r"the cache in memory can't be used: .*too many open files"):
        cached(Numbers(labelled))


def test_the_verdict_counts_a_full_cache():
    busy = Period(batches=100, step=Times(100, 1.0), wait=Times(100, 9.0))
    full = CacheStats(samples=100, present=60, full=True)
    for stats, said in [
        (LoaderStats(recent=busy, cache=full), True),
        (LoaderStats(recent=busy, cache=dataclasses.replace(full, full=False)), False),
        (LoaderStats(recent=busy), False),
        (LoaderStats(recent=dataclasses.replace(busy, wait=Times(100, 0.01)), cache=full), False),
    ]:
        assert ("the cache is full: raise max_bytes" in verdict(stats)) == said


def test_the_statistics_of_a_loader_tell_of_a_cache_within_its_dataset():
    class Doubled(Dataset):
        def __init__(self, samples):
            self.samples = samples

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            return self.samples[index] * 2

    loader = rayloader.DataLoader(Doubled(cached(Numbers(torch.tensor))), batch_size=4)
    assert sum(len(batch) for _ in range(2) for batch in loader) == 40
    assert loader.stats().cache == loader.dataset.samples.stats()
    assert loader.stats().cache.hit_rate == 0.5
    assert "20 of 20 samples" in str(loader.stats())
    assert rayloader.DataLoader([1]).stats().cache is None


# ---- processes and threads


def test_all_processes_share_the_samples(place):
    kept = cached(Numbers(labelled, 200), **place)

    def work(seed):
        for _ in range(2):
            for index in random.Random(seed).sample(range(200), 200):
                assert same(kept[index], labelled(index))

    pids = [fork(functools.partial(work, seed)) for seed in range(4)]
    assert list(map(end_of, pids)) == [0] * 4
    stats = kept.stats()
    assert stats.present == 200
    assert stats.hits + stats.built <= 4 * 2 * 200  # two that read one sample at the same moment may count once
    assert all(same(kept[i], labelled(i)) for i in range(200))
    assert kept.stats().built == stats.built


def test_all_threads_share_the_samples():
    kept = cached(Numbers(KINDS["tensors"], 200))
    failed = []

    def work(seed):
        try:
            for index in random.Random(seed).sample(range(200), 200):
                assert same(kept[index], KINDS["tensors"](index))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_LIMIT)
    assert not failed
    assert kept.stats().present == 200


class Killed(io.FileIO):
    """Writes a part, and dies."""

    def write(self, data):
        super().write(data[:100])
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_is_killed_leaves_nothing_half(place, monkeypatch):
    kept = cached(Numbers(KINDS["large"]), **place)
    kept[0]

    def work():
        monkeypatch.setattr(sample_store, "open", lambda path, *_: Killed(path, "ab"), raising=False)
        kept[1]

    assert in_fork(work) == -signal.SIGKILL
    assert (kept.stats().present, kept.stats().built) == (1, 2)
    assert same(kept[1], KINDS["large"](1))
    assert same(kept[1], KINDS["large"](1))
    assert (kept.stats().present, kept.stats().built) == (2, 3)


class Interrupts:
    """Raises at the `left`-th place of the store where Python handles signals: at a function's entry, after a call."""

    def __init__(self, left):
        self.left = left

    def __enter__(self):
        sys.setprofile(self.event)

    def __exit__(self, *_):
        sys.setprofile(None)

    def event(self, frame, event, argument):
        if event in ("call", "return", "c_return") and frame.f_code.co_filename == sample_store.__file__ and self.left:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_an_interrupt_at_any_place_leaves_a_cache_that_serves(place):
    kept = cached(Numbers(labelled, 1000), **place)
    kept[0], kept[1], kept[2]  # the first ones are compared
    interrupts = 0
    for number in range(3, 1000):
        try:
            with Interrupts(number - 2):
                kept[number]
            break
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 20
    for _ in range(2):
        assert all(same(kept[i], labelled(i)) for i in range(number + 1))
    assert kept.stats().present == number + 1


@pytest.fixture(scope="module")
def processes():
    """Processes that have imported the library and have nothing of this one: forks of one that is started for them."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["rayloader.data.cached"])
    return found


def begin(processes, *lines):
    """A process that runs these lines, and this end of the pipe which is its `pipe`."""
    mine, pipe = processes.Pipe()
    text = "\n".join(["import pickle", "from rayloader import CachedDataset", *lines])
    process = processes.Process(target=exec, args=(text, {"pipe": pipe}))
    process.start()
    pipe.close()
    return process, mine


def run(processes, *lines):
    process, pipe = begin(processes, *lines)
    process.join(HANG_LIMIT)
    assert process.exitcode == 0
    pipe.close()


def test_copies_in_other_processes_read_the_same_samples(processes):
    kept = cached(torch.arange(10))
    assert [int(kept[i]) for i in range(10)] == list(range(10))
    run(processes, f"kept = pickle.loads({pickle.dumps(kept)!r}); assert kept[3] == 3; assert kept.stats().built == 10")
    assert kept.stats().hits == 1


def test_the_processes_of_another_node_share_a_file_of_their_own(processes):
    kept = cached(torch.arange(10))
    kept[3]
    name = f"rayloader-cache-{secrets.token_hex(8)}-another"  # of this test alone, whoever runs it at the same time
    there = dataclasses.replace(kept._place, name=name, machine="another one")
    made = f"kept = CachedDataset(*pickle.loads({pickle.dumps((kept.dataset, there, 10, 10_000))!r}))"
    first, pipe = begin(
        processes,
        made,
        "assert [int(kept[i]) for i in range(10)] == list(range(10))",
        "assert pickle.loads(pickle.dumps(kept)).stats().present == 10",
        "pipe.send('ready')",
        "assert pipe.recv() == 'end'",
    )
    assert pipe.recv() == "ready"
    run(processes, made, "assert kept[3] == 3 and kept.stats().present == kept.stats().built == 10, kept.stats()")
    pipe.send("end")
    first.join(HANG_LIMIT)
    assert first.exitcode == 0
    pipe.close()
    assert kept.stats().present == 1
    run(processes, made, "assert kept.stats().present == 0")  # it has ended with its last process


def test_of_files_that_are_made_at_the_same_moment_all_use_the_oldest(monkeypatch):
    """Each process looks for one, makes one, and looks again."""
    kept = cached(torch.arange(10))
    there = dataclasses.replace(kept._place, machine="another one")
    kind = "-".join(there.name.split("-")[1:3])
    others = [memory_file.MemoryFile(f"{kind}-on-{time:020}", 0, grows=True) for time in (3, 2, 10**20 - 1)]
    oldest, looks = module._oldest, []
    monkeypatch.setattr(module, "_here", {})
    monkeypatch.setattr(module, "_oldest", lambda prefix: oldest(prefix) if looks else looks.append(prefix))
    copied = module.CachedDataset(kept.dataset, there, 10, 10_000)
    assert copied._file.address.name == others[1].address.name


def test_a_number_that_has_become_another_file_s_is_not_taken(monkeypatch, tmp_path):
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    fd = os.memfd_create("rayloader-cache-raced-0")
    opened = os.open

    def raced(path, *options):
        os.dup2(victim, fd)
        return opened(path, *options)

    monkeypatch.setattr(os, "open", raced)
    try:
        assert module._oldest("rayloader-cache-raced-") is None
    finally:
        os.close(fd)
        os.close(victim)


def test_nothing_is_left_of_a_cache_that_is_dropped(place):
    def files():
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("rayloader-cache")

    gc.collect()
    before = files()
    kept = cached(Numbers(KINDS["large"]), **place)
    copied = copy.deepcopy(kept)
    sample = kept[0], kept[0], copied[0]
    del kept, copied, sample
    gc.collect()
    assert files() == before


# ---- in a folder


class Files(Dataset):
    """Reads files, and adds a number."""

    def __init__(self, paths, plus=0):
        self.paths, self.plus = paths, plus

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return int(self.paths[index].read_text()) + self.plus


@pytest.fixture
def paths(tmp_path):
    found = [tmp_path / f"{number}.txt" for number in range(5)]
    for number, path in enumerate(found):
        path.write_text(str(number))
    return found


def caches_in(folder):
    return sorted(folder.glob("*.rayloader-cache"))


def test_a_later_run_finds_the_samples(paths, tmp_path):
    folder = tmp_path / "cache"
    assert [*cached(Files(paths), where=folder, key="files")] == [0, 1, 2, 3, 4]
    again = cached(Files(paths), where=folder, key="files")
    assert [*again] == [0, 1, 2, 3, 4]
    assert (again.stats().built, again.stats().hits) == (5, 5)
    (file,) = caches_in(folder)
    assert file.name.startswith("Files_files-5-")
    assert np.load(file, mmap_mode="r").shape == (6, 2)


def test_samples_of_another_key_class_or_length_are_not_used(paths, tmp_path):
    folder = tmp_path / "cache"
    assert [*cached(Files(paths), where=folder, key="files")] == [0, 1, 2, 3, 4]
    paths[2].write_text("22")
    assert [*cached(Files(paths), where=folder, key="files 2")] == [0, 1, 22, 3, 4]
    assert [*cached(Files(paths[:3]), where=folder, key="files")] == [0, 1, 22]
    assert [*cached(Numbers(str, 5), where=folder, key="files")] == ["0", "1", "2", "3", "4"]
    assert [*cached(Numbers(repr, 5), where=folder, key="files!")] == ["0", "1", "2", "3", "4"]
    assert len(caches_in(folder)) == 5


@pytest.mark.parametrize("key", [None, "", b"1", 1])
def test_a_folder_needs_a_key(key, tmp_path):
    with pytest.raises(ValueError, match=r"where= must have key=, a text that you change whenever the samples"):
        cached([1], where=tmp_path, key=key)
    with pytest.raises(ValueError, match="key= is of a folder: a cache in memory ends with the program; leave it out"):
        cached([1], key="1")


def test_samples_that_do_not_fit_the_dataset_any_more_are_an_error(paths, tmp_path):
    first = cached(Files(paths), where=tmp_path, key="samples")
    assert [*first] == [0, 1, 2, 3, 4]
    for path in paths:
        path.write_text("7")
    with pytest.raises(CacheError, match="sample 1 of the cached Files differs when it is built again"):
        cached(Files(paths), where=tmp_path, key="samples")[1]


def damaged(kept, number, at, change):
    entry = kept._store._index[2 + 2 * number]
    place = (entry >> 30) * 64 + at
    kept._store._bytes[place : place + len(change)] = change


@pytest.mark.parametrize("at", [0, 4, 64])  # the checksum, the place of the pickle, and the pickle
def test_the_machine_may_die(paths, tmp_path, monkeypatch, at):
    """The index of a file may have reached the disk, and a record not."""
    kept = cached(Files(paths), where=tmp_path, key="files")
    assert [*kept] == [0, 1, 2, 3, 4]
    damaged(kept, 3, at, b"\7")
    damaged(kept, 4, 0, bytes(64))
    del kept
    monkeypatch.setattr(sample_store, "_boot", lambda: 7)
    for built in (7, 7):
        again = cached(Files(paths), where=tmp_path, key="files")
        assert [*again] == [0, 1, 2, 3, 4]
        assert (again.stats().built, again.stats().present) == (built, 5)


def test_a_record_may_be_another_sample_s_or_beyond_the_end(paths, tmp_path, monkeypatch):
    kept = cached(Files(paths), where=tmp_path, key="files")
    assert [*kept] == [0, 1, 2, 3, 4]
    index = kept._store._index
    index[2] = index[4]
    index[6] += 1 << 50
    index[8] += 1 << 20
    index[10] -= 1
    del kept, index
    monkeypatch.setattr(sample_store, "_boot", lambda: 7)
    for _ in range(2):
        again = cached(Files(paths), where=tmp_path, key="files")
        assert [*again] == [0, 1, 2, 3, 4]
    assert again.stats().built == 5 + 4


def test_a_header_is_on_the_disk_before_its_file_grows(paths, tmp_path, monkeypatch):
    """So the machine may die at any time, and no file of ours begins with zeros."""
    done = []
    for name in ("pwrite", "fsync", "posix_fallocate"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, call=call, name=name: (done.append(name), call(*given))[1])
    cached(Files(paths), where=tmp_path, key="files")
    assert done == ["pwrite", "fsync", "posix_fallocate"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_a_process_that_is_killed_while_it_makes_a_file_leaves_no_damaged_one(paths, tmp_path, monkeypatch, call):
    def work():
        monkeypatch.setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        cached(Files(paths), where=tmp_path, key="files")

    assert in_fork(work) == -signal.SIGKILL
    assert [*cached(Files(paths), where=tmp_path, key="files")] == [0, 1, 2, 3, 4]
    assert cached(Files(paths), where=tmp_path, key="files").stats().present == 5


def test_a_file_of_another_kind_is_not_written_over(paths, tmp_path):
    cached(Files(paths), where=tmp_path, key="samples")
    (file,) = caches_in(tmp_path)
    for content in (b"important " * times for times in (1, 10_000)):
        for start in (b"", bytes(8), bytes(4096)):
            file.write_bytes(start + content)
            with pytest.raises(CacheError, match="can't be used: it is of another format"):
                cached(Files(paths), where=tmp_path, key="samples")
            assert file.read_bytes() == start + content


def test_a_cache_may_grow(tmp_path):
    dataset = Numbers(lambda i: b"%04d" % i * 1000)
    small = cached(dataset, 20_000, tmp_path, key="numbers")
    for i in range(20):
        assert small[i] == dataset.make(i)
    assert small.stats().full
    large = cached(dataset, "1MB", tmp_path, key="numbers")
    assert not large.stats().full
    for i in range(15):
        assert large[i] == dataset.make(i)
    for i in range(20):  # one with the smaller limit keeps to it
        assert small[i] == dataset.make(i)
    assert large.stats().present == 15
    smaller = cached(dataset, 5_000, tmp_path, key="numbers")
    assert smaller.stats().present == 15
    assert [smaller[i] for i in range(20)] == [dataset.make(i) for i in range(20)]


def test_what_lies_beyond_the_limit_of_a_program_is_built_by_it(tmp_path):
    dataset = Numbers(lambda i: b"%04d" % i * 1000)
    small = cached(dataset, 20_000, tmp_path, key="numbers")
    large = cached(dataset, "1MB", tmp_path, key="numbers")
    for kept, numbers in [(large, range(10)), (small, range(20)), (small, range(20)), (large, range(20))]:
        assert [kept[i] for i in numbers] == [dataset.make(i) for i in numbers]
    assert (small.stats().present, large.stats().full) == (20, False)


def test_the_error_of_limits_of_the_process_says_so():
    def work():
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        with pytest.raises(CacheError, match=r"the cache in memory can't be used: .*raise this process's limits"):
            cached([1], "1TB")

    assert in_fork(work) == 0


def test_a_file_can_be_mapped_in_part(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("r+b") as file:
        view = memory_file.map_private(file.fileno(), 5000, 600)
    assert bytes(view) == (bytes(range(256)) * 64)[5000:5600]
    view[:] = bytes(600)
    assert path.read_bytes() == bytes(range(256)) * 64
    with pytest.raises(OSError, match="can't map"):
        memory_file.map_private(-1, 0, 10)
