"""`rayloader.cached`: the same samples as without it, from memory or a folder, or an error; here without workers."""

import collections
import contextlib
import copy
import dataclasses
import datetime
import errno
import fcntl
import fractions
import functools
import gc
import importlib
import importlib.metadata
import io
import logging
import multiprocessing
import os
import pickle
import random
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import programs
import rayloader
from rayloader import CacheError, CacheStats, cached
from rayloader.data import cached as module
from rayloader.data import fingerprint, sample_store
from rayloader.observe.stats import LoaderStats, Period, Times
from rayloader.observe.verdict import verdict
from rayloader.transport import memory_file
from rayloader.transport.pickler import dumps_by_value

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
def where(request, tmp_path):
    return "memory" if request.param == "memory" else tmp_path / "cache"


def another(kept):
    """The same cache, as another process gets it."""
    return pickle.loads(dumps_by_value(kept))


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
def test_samples_are_those_of_the_dataset(kind, where):
    dataset = Numbers(KINDS[kind])
    kept = cached(dataset, where=where)
    for _ in range(3):
        for index in random.Random(0).sample(range(20), 20):
            assert same(kept[index], KINDS[kind](index))
    stats = kept.stats()
    assert (stats.samples, stats.present, stats.built, stats.hits) == (20, 20, 20, 40)
    assert dataset.asked == 20 + 2 + 1  # the first two that were built, and the first that was read, are compared


def test_what_is_written_to_a_sample_stays_there(where):
    kept = cached(Numbers(KINDS["large and small"]), where=where)
    for _ in range(3):
        array, number, _ = kept[7]
        assert array[5] == 7
        array[:], number[...] = 99, 99
    again = another(kept)
    assert same(again[7], KINDS["large and small"](7))


def test_a_sample_outlives_the_cache(where):
    kept = cached(Numbers(KINDS["large"]), where=where)
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
    with pytest.raises(IndexError, match="whole numbers from 0 on, got -1"):
        kept[-1]
    with pytest.raises(TypeError, match="whole numbers from 0 on, got 'a'"):
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
def test_a_sample_that_draws_is_refused(draw, where):
    kept = cached(Numbers(lambda index: (index, draw())), where=where, **named(where))
    with pytest.raises(CacheError, match=r"sample 4 of the cached Numbers draws from a random generator"):
        kept[4]
    assert kept.stats().present == 0


def test_the_error_names_another_thread_as_a_possible_cause_where_there_is_one(monkeypatch):
    drawn, ends = threading.Event(), threading.Event()

    def make(index):
        threading.Thread(target=lambda: (random.random(), drawn.set(), ends.wait(HANG_LIMIT))).start()
        assert drawn.wait(HANG_LIMIT)
        return index

    with pytest.raises(CacheError, match=r"draws from a random generator.*Or another thread of this process has drawn"):
        cached(Numbers(make))[4]
    ends.set()
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with pytest.raises(CacheError, match=r"apply that to the samples of the cache$"):
        cached(Numbers(lambda index: random.random()))[4]


def named(where):
    """A folder's fingerprint for a dataset that holds a generator, which has no value that lasts."""
    return {} if where == "memory" else {"fingerprint": "samples that draw"}


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
    assert 13 not in [index for index in range(20) if kept._store._index[index]]


def test_a_generator_of_a_main_module_is_found_where_that_came_with_the_dataset():
    names = {"__name__": "__main__", "Numbers": Numbers, "GENERATOR": random.Random(0)}
    source = "class Rare(Numbers):\n def __getitem__(s, i): return GENERATOR.random() if i == 13 else i"
    exec(source, names)
    kept = cached(names["Rare"](None))
    assert [kept[index] for index in range(10)] == list(range(10))
    with pytest.raises(CacheError, match=r"sample 13 of the cached Rare draws"):
        kept[13]


def test_a_generator_of_a_sample_s_own_is_no_draw():
    kept = cached(Numbers(lambda index: np.random.default_rng(index).random(3)))
    assert all(same(kept[i], np.random.default_rng(i).random(3)) for i in (1, 2, 1, 2))


def test_a_sample_that_differs_each_time_is_refused():
    calls = iter(range(100))
    kept = cached(Numbers(lambda index: next(calls)))
    with pytest.raises(CacheError, match=r"sample 4 of the cached Numbers differs when it is built again"):
        kept[4]


def test_samples_of_a_dataset_that_has_changed_are_not_given(where):
    dataset = Numbers(functools.partial(torch.full, (4,)))
    kept = cached(dataset, where=where)
    kept[2]
    dataset.make = functools.partial(torch.full, (5,))
    with pytest.raises(CacheError, match=r"sample 2 .* differs .* make a new cache"):
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


def test_a_comparison_that_fails_says_that_it_was_one():
    def make(index):
        if asked:
            raise FileNotFoundError("gone")
        asked.append(index)
        return index

    asked = []
    with pytest.raises(FileNotFoundError, match="gone") as caught:
        cached(Numbers(make))[3]
    assert "to be compared; this was sample 3" in str(caught.value.__notes__)


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
    assert sizes == [4096, 4096, 4096, 8192, 1_003_520, 2 << 20, 20_000_002_048]


# ---- room


def test_what_finds_no_room_is_built_each_time(where, caplog):
    dataset = Numbers(lambda i: torch.full((10_000,), i, dtype=torch.uint8))
    kept = cached(dataset, 50_000, where)
    with caplog.at_level(logging.WARNING, "rayloader"):
        for _ in range(2):
            assert all(same(kept[i], dataset.make(i)) for i in range(20))
    stats = kept.stats()
    assert (stats.present, stats.built, stats.hits, stats.full) == (5, 35, 5, True)
    assert stats.missing == 15
    assert stats.nbytes <= stats.max_bytes == 53_248
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is full with 5 of 20 samples, 50.6 kB; the others are built each time. Raise max_bytes" in said


def test_memory_is_left_for_others(monkeypatch, caplog):
    monkeypatch.setattr(sample_store, "available", lambda: 1 << 30)
    kept = cached(Numbers(KINDS["large"]))
    kept[0]
    monkeypatch.setattr(sample_store, "available", lambda: 1 << 28)
    assert all(same(kept[i], KINDS["large"](i)) for i in range(20))
    stats = kept.stats()
    assert stats.full
    assert stats.nbytes <= stats.max_bytes == sample_store._CHUNK
    assert caplog.text.count("is full with 15 of 20 samples") == 1


def test_a_full_disk_ends_the_cache_and_no_more(tmp_path, monkeypatch):
    allocate, room = os.posix_fallocate, 1 << 16

    def on_a_small_disk(fd, start, nbytes):
        if start + nbytes > room:
            raise OSError(errno.ENOSPC, "no space left on device")
        allocate(fd, start, nbytes)

    monkeypatch.setattr(sample_store, "_CHUNK", 1 << 12)
    monkeypatch.setattr(os, "posix_fallocate", on_a_small_disk)
    kept = cached(Numbers(lambda i: b"%04d" % i * 2000), where=tmp_path)
    for _ in range(2):
        assert [bytes(kept[i]) for i in range(20)] == [b"%04d" % i * 2000 for i in range(20)]
    assert kept.stats().full
    assert 0 < kept.stats().present < 20
    room = 0
    with pytest.raises(CacheError, match=r"the cache in .* can't be used: .*no space left"):
        cached(Numbers(labelled), where=tmp_path / "other")


def test_a_sample_that_can_t_be_written_ends_the_cache_and_no_more(where, monkeypatch, caplog):
    """As in a folder in memory of limited size."""
    kept = cached(Numbers(labelled), where=where)
    assert same(kept[0], labelled(0))

    def refused(*_):
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "pwritev", refused)
    for _ in range(2):
        assert all(same(kept[i], labelled(i)) for i in range(20))
    assert (kept.stats().full, kept.stats().present) == (True, 1)
    assert caplog.text.count("is full with 1 of 20 samples") == 1


@pytest.mark.parametrize("most", [1, 100])
def test_records_that_the_kernel_writes_in_pieces_are_whole(where, most, monkeypatch):
    write = os.pwritev

    def some(fd, parts, at):
        for part in filter(None, parts):
            return write(fd, [part[:most]], at)
        return 0

    monkeypatch.setattr(os, "pwritev", some)
    monkeypatch.setattr(sample_store, "_PARTS", 2)
    kept = cached(Numbers(KINDS["tensors"]), where=where)
    for _ in range(2):
        assert all(same(kept[i], KINDS["tensors"](i)) for i in range(20))


def test_a_limit_of_the_size_of_files_is_like_a_full_disk(tmp_path):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(CacheError, match=r"can't be used: .*File too large"):
            cached(Numbers(labelled), where=tmp_path)
        kept = cached(Numbers(labelled), 900_000, tmp_path)
        assert all(same(kept[i], labelled(i)) for i in range(20))

    assert in_fork(work) == 0


def test_a_copy_leaves_a_full_cache_full(where, monkeypatch, caplog):
    """Otherwise the workers of each epoch would ask for memory again, and say again that there is none."""
    kept = cached(Numbers(KINDS["large"]), where=where)
    allocate = os.posix_fallocate

    def only_the_tables(fd, start, nbytes):
        if start:
            raise OSError(errno.ENOSPC, "no space left on device")
        allocate(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", only_the_tables)
    monkeypatch.setattr(sample_store, "available", lambda: 0)
    for cache in (kept, another(kept), another(kept)):
        assert [same(cache[i], KINDS["large"](i)) for i in range(20)] == [True] * 20
    assert kept.stats().full
    assert caplog.text.count("is full with 0 of 20 samples") == 1


def test_room_is_not_lost_where_two_build_the_same_sample(where, monkeypatch):
    kept = cached(Numbers(KINDS["large"]), where=where)
    used = kept._store._header[sample_store._USED]
    assert same(kept[1], KINDS["large"](1))
    one = kept._store._header[sample_store._USED] - used
    reserve = kept._store._reserve

    def reserved(number, nbytes):
        at = reserve(number, nbytes)
        monkeypatch.undo()
        kept._store._index[number] = kept._store._index[1]  # another process has been faster
        return at

    monkeypatch.setattr(kept._store, "_reserve", reserved)
    kept._store.write(2, KINDS["large"](2))
    assert kept._store._header[sample_store._USED] - used == one


def test_memory_files_may_be_refused(monkeypatch):
    def refused(*_):
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "memfd_create", refused)
    with pytest.raises(CacheError, match=r"there is no room for a cache of 20 samples: .*too many open files"):
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


def test_all_processes_share_the_samples(where):
    kept = cached(Numbers(labelled, 200), where=where)

    def work(seed):
        for _ in range(2):
            for index in random.Random(seed).sample(range(200), 200):
                assert same(kept[index], labelled(index))

    pids = [fork(functools.partial(work, seed)) for seed in range(4)]
    assert list(map(end_of, pids)) == [0] * 4
    stats = kept.stats()
    assert stats.present == 200
    assert stats.hits + stats.built == 4 * 2 * 200
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


def test_a_writer_that_is_killed_leaves_nothing_half(where, monkeypatch):
    kept = cached(Numbers(KINDS["large"]), where=where)
    kept[0]

    def killed(fd, parts, at):  # only the first bytes of the record are there
        os.pwrite(fd, parts[0], at)
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        monkeypatch.setattr(os, "pwritev", killed)
        kept[1]

    assert in_fork(work) == -signal.SIGKILL
    assert (kept.stats().present, kept.stats().built) == (1, 2)
    assert same(kept[1], KINDS["large"](1))
    assert kept.stats().built == 3


def test_a_writer_that_is_killed_with_the_lock_stops_nobody(where):
    kept = cached(Numbers(labelled), where=where)

    def work():
        kept._store._alone(lambda: os.kill(os.getpid(), signal.SIGKILL))

    assert in_fork(work) == -signal.SIGKILL
    assert same(kept[1], labelled(1))


class Interrupts:
    """Raises at the `left`-th place of the store where Python handles signals: at a function's entry, after a call."""

    FILES = sample_store.__file__, contextlib.__file__

    def __init__(self, left):
        self.left = left

    def __enter__(self):
        sys.setprofile(self.event)

    def __exit__(self, *_):
        sys.setprofile(None)

    def event(self, frame, event, argument):
        if event in ("call", "return", "c_return") and frame.f_code.co_filename in self.FILES and self.left:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


def test_an_interrupt_at_any_place_leaves_no_lock_held(where):
    kept = cached(Numbers(labelled, 1000), where=where)
    kept[0], kept[1], kept[2]  # the first ones are compared
    interrupts = []
    for number in range(3, 1000):
        try:
            with Interrupts(number - 2):
                kept[number]
            break
        except KeyboardInterrupt as error:
            interrupts.append(error)  # with its traceback, as an interpreter keeps the last one
        assert not kept._store._lock._mutex.release.__self__.locked()  # the bare one, see `new_lock`
        own = os.open(f"/proc/self/fd/{kept._store._fd}", os.O_RDWR)
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(own)
    assert len(interrupts) > 20
    stats = kept.stats()
    assert stats.present == sum(map(bool, kept._store._index))
    assert all(same(kept[i], labelled(i)) for i in range(number + 1))


def test_threads_of_a_fork_that_take_the_lock_at_once_exclude_each_other(monkeypatch):
    """Each may make the lock of the new process."""
    kept = cached(Numbers(labelled))

    def work():
        both, inside = threading.Barrier(2), []
        pid = os.getpid()

        def getpid():
            if threading.current_thread().name == "racer" and both.n_waiting < 2 and not inside:
                both.wait(HANG_LIMIT)
            return pid

        def alone():
            inside.append(threading.get_ident())
            other = os.open(f"/proc/self/fd/{kept._store._fd}", os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(other)
            done.append(1)

        done = []
        monkeypatch.setattr(sample_store.os, "getpid", getpid)
        racers = [threading.Thread(target=kept._store._alone, args=(alone,), name="racer") for _ in range(2)]
        for racer in racers:
            racer.start()
        for racer in racers:
            racer.join(HANG_LIMIT)
        assert len(done) == 2

    assert in_fork(work) == 0


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
    there = dataclasses.replace(kept._place._address, name=name, machine="another one")
    made = f"kept = CachedDataset(*pickle.loads({pickle.dumps((kept.dataset, module._InMemory(there), 10, 1000))!r}))"
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


def test_a_name_that_a_fork_keeps_stops_nobody(monkeypatch):
    kept = cached(torch.arange(10))
    kind = kept._place._address.name.split("-")[2]
    there = module._InMemory(dataclasses.replace(kept._place._address, machine="another one"))
    monkeypatch.setattr(module, "_here", {})
    with socket.socket(socket.AF_UNIX) as turn:
        turn.bind(f"\0rayloader-cache-{kind}")
        copied = module.CachedDataset(kept.dataset, there, 10, 1000)
    kept[3]
    assert copied.stats().present == 1


def test_a_number_that_has_become_another_file_s_is_not_taken(monkeypatch, tmp_path):
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    fd = os.memfd_create("rayloader-cache-raced-0")
    opened = os.open

    def raced(path, *options):
        os.dup2(victim, fd)
        return opened(path, *options)

    monkeypatch.setattr(os, "open", raced)
    try:
        assert module._found("rayloader-cache-raced-") is None
    finally:
        os.close(fd)
        os.close(victim)


def test_nothing_is_left_of_a_cache_that_is_dropped(where):
    def files():
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("rayloader-cache")

    gc.collect()
    before = files()
    kept = cached(Numbers(KINDS["large"]), where=where)
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
    assert [*cached(Files(paths), where=folder, fingerprint=paths)] == [0, 1, 2, 3, 4]
    again = cached(Files(paths), where=folder, fingerprint=paths)
    assert [*again] == [0, 1, 2, 3, 4]
    assert (again.stats().built, again.stats().hits) == (5, 5)
    assert len(caches_in(folder)) == 1


def test_samples_of_something_else_are_not_used(paths, tmp_path):
    folder = tmp_path / "cache"
    first = [*cached(Files(paths), where=folder, fingerprint=paths)]
    assert [*cached(Files(paths, plus=1), where=folder, fingerprint=paths)] == [1, 2, 3, 4, 5]
    paths[2].write_text("22")
    assert [*cached(Files(paths), where=folder, fingerprint=paths)] == [0, 1, 22, 3, 4]
    assert [*cached(Files(paths[:3]), where=folder, fingerprint=paths)] == [0, 1, 22]
    assert [*cached(Files(paths), where=folder, fingerprint="by hand")] == [0, 1, 22, 3, 4]
    assert first == [0, 1, 2, 3, 4]
    assert len(caches_in(folder)) == 5


class Numbered(Dataset):
    """Sample `i` is `i`, but that of `changed` is another; the code of both is the same."""

    def __init__(self, count, changed=-1):
        self.count, self.changed, self.asked = count, changed, 0

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.asked += 1
        return index + (index == self.changed)


def in_epochs(kept, count, by):
    for _ in range(count):
        order = random.Random().sample(range(len(kept)), len(kept))
        if by == "one":
            yield [kept[index] for index in order]
        else:
            yield [sample for at in range(0, len(order), 8) for sample in kept.__getitems__(order[at : at + 8])]


@pytest.mark.parametrize("by", ["one", "batch"])
@pytest.mark.parametrize("changed", [0, 31, 63])
def test_one_stale_sample_of_64_is_found_within_ten_epochs(changed, by, tmp_path):
    kept = cached(Numbered(64), where=tmp_path, fingerprint="numbers")
    assert sorted(kept) == list(range(64))
    for _ in range(2):  # it stays an error
        stale = cached(Numbered(64, changed), where=tmp_path, fingerprint="numbers")
        with pytest.raises(CacheError, match=f"sample {changed} of .* delete /.* to make a new cache, and let finger"):
            list(in_epochs(stale, 10, by))
        with pytest.raises(CacheError, match=f"sample {changed} of"):
            stale[changed]


def test_each_run_compares_what_it_has_found_once(tmp_path):
    [*cached(Numbered(64), where=tmp_path, fingerprint="numbers")]
    for _ in range(2):
        kept = cached(Numbered(64), where=tmp_path, fingerprint="numbers")
        copied = another(kept)
        for epoch in zip(in_epochs(kept, 4, "one"), in_epochs(copied, 4, "one"), strict=True):
            assert sorted(epoch[0]) == sorted(epoch[1]) == list(range(64))
        # Each compares the first that it reads in any case.
        assert kept.dataset.asked + copied.dataset.asked - 64 <= 1
        assert all(sorted(epoch) == list(range(64)) for epoch in in_epochs(another(kept), 8, "one"))
        assert not any(kept._store.is_due(index) for index in range(64))


def test_what_this_run_has_built_itself_is_not_compared_so_often(tmp_path):
    kept = cached(Numbered(64), where=tmp_path, fingerprint="numbers")
    for _ in in_epochs(kept, 10, "one"):
        pass
    assert kept.dataset.asked == 64 + 2 + 1


def test_of_many_samples_that_are_found_some_are_compared(tmp_path):
    [*cached(Numbered(1000), where=tmp_path, fingerprint="numbers")]
    kept = cached(Numbered(1000), where=tmp_path, fingerprint="numbers")
    assert sum(bool(entry & sample_store._LEFT) for entry in kept._store._index) == sample_store._COMPARED
    for _ in in_epochs(kept, 10, "one"):
        pass
    assert kept.dataset.asked - sample_store._COMPARED in range(11)


def test_counts_outlast_a_crash_of_the_machine(tmp_path, monkeypatch):
    [*cached(Numbered(64), where=tmp_path, fingerprint="numbers")]
    cached(Numbered(64), where=tmp_path, fingerprint="numbers")
    monkeypatch.setattr(sample_store, "_boot", lambda: b"x" * 36)
    kept = cached(Numbered(64), where=tmp_path, fingerprint="numbers")
    assert all(sorted(epoch) == list(range(64)) for epoch in in_epochs(kept, 10, "one"))
    assert (kept.stats().present, kept.stats().built, kept.dataset.asked) == (64, 64, 64)


def test_samples_that_do_not_fit_the_dataset_any_more_are_an_error(paths, tmp_path):
    first = cached(Files(paths), where=tmp_path)
    assert [*first] == [0, 1, 2, 3, 4]
    for path in paths:
        path.write_text("7")
    with pytest.raises(CacheError, match="sample 1 of the cached Files differs when it is built again"):
        cached(Files(paths), where=tmp_path)[1]


def test_the_machine_may_die(paths, tmp_path, monkeypatch):
    """The index of a file may have reached the disk, and a record not."""
    kept = cached(Files(paths), where=tmp_path)
    assert [*kept] == [0, 1, 2, 3, 4]
    kept._store._bytes[kept._store._index[3] + sample_store._RECORD.size + 2] ^= 1
    kept._store._bytes[kept._store._index[4] :][:64] = bytes(64)
    del kept
    monkeypatch.setattr(sample_store, "_boot", lambda: b"x" * 36)
    for built in (7, 7):
        again = cached(Files(paths), where=tmp_path)
        assert [*again] == [0, 1, 2, 3, 4]
        assert (again.stats().built, again.stats().present) == (built, 5)


def test_a_header_is_on_the_disk_before_its_file_grows(paths, tmp_path, monkeypatch):
    """So the machine may die at any time, and no file of ours begins with zeros."""
    done = []
    for name in ("pwrite", "fsync", "ftruncate", "posix_fallocate"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, call=call, name=name: (done.append(name), call(*given))[1])
    cached(Files(paths), where=tmp_path)
    assert done == ["pwrite", "fsync", "ftruncate", "posix_fallocate"]


@pytest.mark.parametrize("field", [8, 16, 20, 24])
def test_damage_to_a_record_s_own_fields_is_seen(paths, tmp_path, monkeypatch, field):
    kept = cached(Files(paths), where=tmp_path)
    assert [*kept] == [0, 1, 2, 3, 4]
    kept._store._bytes[kept._store._index[3] + field] ^= 1
    del kept
    monkeypatch.setattr(sample_store, "_boot", lambda: b"x" * 36)
    assert [*cached(Files(paths), where=tmp_path)] == [0, 1, 2, 3, 4]


def test_room_that_a_file_only_says_to_have_is_allocated(paths, tmp_path, monkeypatch):
    """As in a copy that has left out what was zeros: writing there would crash on a full disk."""
    kept = cached(Files(paths), where=tmp_path)
    assert kept[0] == 0
    used = kept._store._header[sample_store._USED]
    del kept
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, start, nbytes: asked.append(range(start, start + nbytes)))
    again = cached(Files(paths), where=tmp_path)
    assert again[1] == 1
    assert 0 in asked[0]
    assert used in asked[1]


@pytest.mark.parametrize("used", [0, 4096, (1 << 64) - 64])
def test_a_damaged_header_is_an_error(paths, tmp_path, used):
    kept = cached(Files(paths), where=tmp_path)
    kept._store._header[sample_store._USED] = used
    del kept
    with pytest.raises(CacheError, match="its header is damaged"):
        cached(Files(paths), where=tmp_path)


def test_a_record_that_is_beyond_the_header_s_end_is_not_used(paths, tmp_path, monkeypatch):
    kept = cached(Files(paths), where=tmp_path)
    assert [*kept] == [0, 1, 2, 3, 4]
    kept._store._header[sample_store._USED] = kept._store._index[3]
    del kept
    monkeypatch.setattr(sample_store, "_boot", lambda: b"x" * 36)
    again = cached(Files(paths), where=tmp_path)
    assert again.stats().present == 3
    assert [*again] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "ftruncate", "posix_fallocate"])
def test_a_process_that_is_killed_while_it_makes_a_file_leaves_no_damaged_one(paths, tmp_path, monkeypatch, call):
    def work():
        monkeypatch.setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        cached(Files(paths), where=tmp_path)

    assert in_fork(work) == -signal.SIGKILL
    assert [*cached(Files(paths), where=tmp_path)] == [0, 1, 2, 3, 4]
    assert cached(Files(paths), where=tmp_path).stats().present == 5


def test_a_file_of_another_kind_is_not_written_over(paths, tmp_path):
    cached(Files(paths), where=tmp_path)
    (file,) = caches_in(tmp_path)
    for content in (b"important " * times for times in (1, 10_000)):
        for start in (b"", bytes(8), bytes(4096)):
            file.write_bytes(start + content)
            with pytest.raises(CacheError, match="can't be used: it is of another format"):
                cached(Files(paths), where=tmp_path)
            assert file.read_bytes() == start + content


def test_a_cache_may_grow(tmp_path):
    dataset = Numbers(lambda i: b"%04d" % i * 1000)
    small = cached(dataset, 20_000, tmp_path, fingerprint="numbers")
    for i in range(20):
        assert small[i] == dataset.make(i)
    assert small.stats().full
    large = cached(dataset, "1MB", tmp_path, fingerprint="numbers")
    assert not large.stats().full
    for i in range(15):
        assert large[i] == dataset.make(i)
    for i in range(20):  # one that has the small file goes on
        assert small[i] == dataset.make(i)
    assert large.stats().present == 20
    smaller = cached(dataset, 5_000, tmp_path, fingerprint="numbers")
    assert smaller.stats().present == 20
    assert [smaller[i] for i in range(20)] == [dataset.make(i) for i in range(20)]


def test_one_that_has_the_small_file_fills_the_larger_one_too(tmp_path):
    dataset = Numbers(lambda i: b"%04d" % i * 1000)
    small = cached(dataset, 20_000, tmp_path, fingerprint="numbers")
    large = cached(dataset, "1MB", tmp_path, fingerprint="numbers")
    for kept, numbers in [(large, range(10)), (small, range(20)), (small, range(20)), (large, range(20))]:
        assert [kept[i] for i in numbers] == [dataset.make(i) for i in numbers]
    assert (small.stats().present, small.stats().full) == (20, False)


def test_fingerprints_are_of_memory_no_matter():
    with pytest.raises(ValueError, match="fingerprint= is of a folder"):
        cached([1], fingerprint="x")


def test_one_path_is_a_fingerprint_too(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"1")
    before = fingerprint.fingerprint_of(range(3), path)
    assert before == fingerprint.fingerprint_of(range(3), [path]) == fingerprint.fingerprint_of(range(3), iter([path]))
    path.write_bytes(b"12")
    assert fingerprint.fingerprint_of(range(3), path) != before


@pytest.mark.parametrize("given", [b"version 3", [3], 3])
def test_a_fingerprint_is_a_text_or_paths(given, tmp_path):
    with pytest.raises(TypeError, match=r"fingerprint= must be a text, or paths of files, got "):
        cached([1], where=tmp_path, fingerprint=given)


def test_the_error_of_limits_of_the_process_says_so():
    def work():
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        with pytest.raises(
            CacheError, match=r"the cache in memory can't be used: .*raise this process's limits"
        ) as error:
            cached([1], "1TB")
        assert "folder" not in str(error.value)

    assert in_fork(work) == 0


def test_a_dataset_that_can_t_be_described_needs_a_fingerprint(tmp_path):
    dataset = Numbers(labelled)
    dataset.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"can't be described .* pass fingerprint='a text"):
        cached(dataset, where=tmp_path)
    assert same(cached(dataset, where=tmp_path, fingerprint="1")[2], labelled(2))


SIZE = 3


def sized(index):
    return index * SIZE


def test_fingerprints_see_values_code_and_what_the_code_uses(monkeypatch):
    def of(dataset):
        return fingerprint.fingerprint_of(dataset, None)

    def made(body, **globals_):
        names = {"Dataset": Dataset, "__name__": "__main__", **globals_}
        exec(f"class Made(Dataset):\n def __getitem__(self, i):\n  {body}", names)
        return names["Made"]()

    different = [
        of(dataset)
        for dataset in [
            Numbers(sized),
            Numbers(sized, 21),
            Numbers(lambda i: i),
            Numbers(lambda i: i + 1),
            Numbers(functools.partial(sized)),
            torch.arange(5),
            torch.arange(6),
            torch.arange(5.0),
            np.arange(5),
            np.arange(5)[::-1],
            ["a", "b"],
            [{"a"}, "b"],
            made("return i"),
            made("return i + 1"),
            made("return i + LIMIT", LIMIT=1),
            made("return i + LIMIT", LIMIT=2),
        ]
    ]
    assert len(set(different)) == len(different)
    before = of(Numbers(sized))
    assert of(Numbers(sized)) == before
    monkeypatch.setattr(sys.modules[__name__], "SIZE", 4)
    assert of(Numbers(sized)) != before


MADE = "class Made:\n def __len__(s): return 3\n def __getitem__(s, i): return s.m\n"
OBJECT = "class T:\n def __init__(s): {}\nt = T()\nclass Made:\n def __getitem__(s, i): return t.k"
# Programs with a class `Made`, in which `A` is replaced by 1 and by 2.
PROGRAMS = {
    "a cached property": MADE + " @functools.cached_property\n def m(s): return A",
    "a method with a cache": MADE + " @functools.lru_cache\n def m(s): return A",
    "a function with a cache": "@functools.cache\ndef m(): return A\nclass Made:\n def __getitem__(s, i): return m()",
    "a partial method": MADE + " def n(s, k): return k\n m = functools.partialmethod(n, A)",
    "a generic function": "@functools.singledispatch\ndef m(i): return A\nclass Made:\n m = m",
    "which of two functions": MADE + " a, b = (lambda s: 1), (lambda s: 2)\n m = (a, b)[A - 1]",
    "a metaclass": "class M(type):\n def k(c): return A\nclass Made(metaclass=M):\n pass",
    "a function's attribute": "def m(): return m.k\nm.k = A\nclass Made:\n def __getitem__(s, i): return m()",
    "a global beside a lock": "G = {0: A, 1: threading.Lock()}\nclass Made:\n def __getitem__(s, i): return G[i]",
    "an object with a lock": (
        "class T:\n def __init__(s): s.lock = threading.Lock()\n def __call__(s, i): return A\n"
        "t = T()\nclass Made:\n def __getitem__(s, i): return t(i)"
    ),
    "what a bound method is bound to": (
        "class T:\n def __init__(s, k): s.k = k\n def at(s, i): return s.k\nat = T(A).at\n"
        "class Made:\n def __getitem__(s, i): return at(i)"
    ),
    "what a class method is bound to": (
        "class T:\n @classmethod\n def at(c, i): return c.k\nclass U(T): k = 1\nclass V(T): k = 2\n"
        "at = (U, V)[A - 1].at\nclass Made:\n def __getitem__(s, i): return at(i)"
    ),
    "a property's setter": MADE + " @property\n def m(s): return 0\n @m.setter\n def m(s, k): s.k = k * A",
    "a class of properties": "class P(property): pass\nclass Made:\n m = P(lambda s: A)",
    "a kind of method": MADE + " @staticmethod\n def m(): return A\n @classmethod\n def n(c): return A",
    "which kind of method": MADE + " m = (staticmethod, classmethod)[A - 1](lambda *a: a)",
    "an object with a function": OBJECT.format("s.__func__, s.k = len, A"),
    "an object with a getter": OBJECT.format("s.fget, s.k = len, A"),
    "an object that can't be pickled": OBJECT.format("s.k, s.s = A, s") + "\nT.__reduce_ex__ = None",
    "what the class of one does": (
        "class T:\n __reduce_ex__ = None\n def k(s): return A\nt = T()\nclass Made:\n def m(s): return t"
    ),
    "a weak dictionary": "k = T()\nk.k = A\nt = weakref.WeakValueDictionary({0: k})\nclass Made:\n def m(s): return t",
    "weak keys": "k = T()\nk.k = A\nt = weakref.WeakKeyDictionary({k: 0})\nclass Made:\n def m(s): return t",
    "a weak set": "k = T()\nk.k = A\nt = weakref.WeakSet([k])\nclass Made:\n def m(s): return t",
    "a name in a text": "def n(): return A\nclass Made:\n def m(s): return globals()['n']()",
    "a name in a text within": "def n(): return A\nclass Made:\n def m(s): return lambda: globals()['n']()",
    "what an exception leads to": (
        "class Made:\n def __getitem__(s, i):\n  try: return i / 0\n  except (ValueError, KeyError)[A - 1]: return 0"
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_fingerprints_see_code_however_it_is_wrapped(program):
    found = []
    for number in ("1", "2", "2"):
        names = {"__name__": "__main__", "functools": functools, "threading": threading, "weakref": weakref}
        names["T"] = type("T", (), {"__module__": "__main__"})
        exec(PROGRAMS[program].replace("A", number), names)
        found.append(fingerprint.fingerprint_of(names["Made"](), None))
    assert found[0] != found[1] == found[2]


HELPER = types.ModuleType("a_helper")


def helped(index):
    return HELPER.decode(index)


def helped_by_an_import(index):
    from a_helper import decode

    return decode(index)


def helped_by_a_name(index):
    return getattr(HELPER, "decode")(index)  # noqa: B009


def helped_by_the_table_of_modules(index):
    return sys.modules["a_helper"].decode(index)


def helped_by_importlib(index):
    return importlib.import_module("a_helper").decode(index)


@pytest.mark.parametrize(
    "make", [helped, helped_by_an_import, helped_by_a_name, helped_by_the_table_of_modules, helped_by_importlib]
)
def test_fingerprints_see_what_code_uses_of_modules_of_the_program(make, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "a_helper", HELPER)
    monkeypatch.setattr(HELPER, "__file__", str(tmp_path / "a_helper.py"), raising=False)
    found = []
    for source in ("SIZE = 1", "SIZE = 2", "def decode(i): return i", "SIZE = 2\ndef decode(i): return i * SIZE"):
        exec("def decode(i): return i * SIZE\n" + source, vars(HELPER))
        found.append(fingerprint.fingerprint_of(Numbers(make), None))
    assert len({*found[:3]}) == 3
    assert found[3] == found[1]
    HELPER.unused = 1
    assert fingerprint.fingerprint_of(Numbers(make), None) == found[1]


def test_fingerprints_do_not_see_where_a_cache_within_the_dataset_is(tmp_path):
    found = [fingerprint.fingerprint_of(cached(Numbers(labelled), where=where), None) for where in ("memory", tmp_path)]
    assert found == [fingerprint.fingerprint_of(cached(Numbers(labelled)), None)] * 2
    assert found[0] != fingerprint.fingerprint_of(cached(Numbers(labelled, 19)), None)


def test_fingerprints_see_code_of_modules_that_are_not_entered():
    def loaded(source):
        names = {"__name__": "loaded_by_a_path"}
        exec(source, names)
        return fingerprint.fingerprint_of(Numbers(names["make"]), None)

    assert loaded("def make(i): return 1") != loaded("def make(i): return 2")


def test_fingerprints_see_what_a_function_of_a_package_holds():
    def of(number):
        made = {"__name__": "torch.utils.data"}
        exec("def resizing(n):\n def resize(i): return i * n\n return resize", made)
        return fingerprint.fingerprint_of(Numbers(made["resizing"](number)), None)

    assert of(1) != of(2)


def test_fingerprints_see_the_versions_of_packages_that_are_named_otherwise(monkeypatch):
    monkeypatch.setattr(fingerprint, "_distributions", lambda: {"a_package": ["pytest"]})
    fingerprint._version.cache_clear()
    assert fingerprint._version("a_package") == importlib.metadata.version("pytest")
    assert fingerprint._version("json") == ""
    fingerprint._version.cache_clear()


class Held(np.ndarray):
    pass


def held(number):
    array = np.zeros(3).view(Held)
    array.number = number
    return array


def marked(number):
    tensor = torch.zeros(3)
    tensor.number = number
    return tensor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
        (held(1), held(2)),
        (marked(1), marked(2)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (torch.tensor([1 + 2j]).imag, torch.tensor([1 + 2j]).conj().imag),
    ],
)
def test_fingerprints_see_all_of_an_array(one, other):
    assert fingerprint.fingerprint_of([one], None) != fingerprint.fingerprint_of([other], None)


def test_fingerprints_are_the_same_in_each_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import abc, enum, sys, typing, weakref, torch, numpy as np\nColor = enum.Enum('Color', 'red green blue')\n"
        "from os import environ\nfrom random import randint, random\nfrom numpy.random import rand\n"
        "T, P = typing.TypeVar('T'), typing.ParamSpec('P')\nnow, weak = environ.get, weakref.WeakSet(Color)\n"
        "class Base(abc.ABC, typing.Generic[T, P]):\n"
        "    def draw(self): return rand(), random(), randint(0, 1), environ, now, weak, typing.List[T]\n"
        + "\n"
        * int("3")
        + "LIMIT = {'b', 'a', 'c'}\n"
        "class Photos(Base[T, P], torch.utils.data.Dataset[T]):\n"
        "    size, colors = {'x', 'y', 'z'}, set(Color)\n"
        "    def __init__(self): self.names, self.t, self.f = {'p', 'q', 'r'}, torch.arange(9), lambda i: i in LIMIT\n"
        "    def __getitem__(self, i): return i in {'k', 'l', 'm'}\n"
        "from rayloader.data.fingerprint import fingerprint_of\n"
        "print(fingerprint_of(Photos(), None).hex())\n"
    )
    seeded = subprocess.run([sys.executable, program], env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True)
    assert seeded.stdout.decode() == programs.run(program).stdout != ""


def test_fingerprints_see_when_a_mapped_file_was_written(tmp_path):
    path = tmp_path / "rows.arrow"
    found = []
    for last, time in [(3, 1), (4, 2), (4, 2)]:
        table = pa.table({"x": [1, 2, last]})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
        os.utime(path, ns=(time, time))
        found.append(fingerprint.fingerprint_of(rayloader.ArrowDataset(path), None))
    assert found[0] != found[1] == found[2]


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
