"""`rayloader.cached`: the same samples as without it, from memory or a folder, or an error; here without workers."""

import dataclasses
import functools
import gc
import io
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import resource
import secrets
import signal
import stat
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import rayloader
from rayloader import CacheError, cached
from rayloader.data import cached as module
from rayloader.data import sample_store
from rayloader.random.generators import global_generators
from rayloader.transport.pickler import ByValuePickler, dumped
from told import told

HANG_LIMIT = 500.0  # seconds; on expiry the test fails
Pair = namedtuple("Pair", "image label")


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


def large(index):
    """With its head, just as large as is mapped."""
    return torch.full((1 << 18,), index, dtype=torch.int32)


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


def limited(nbytes, work):
    """Does it in a fork that can make no file of more bytes, which is like a full disk: a write ends in the middle."""

    def limits():
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes))
        work()

    assert in_fork(limits) == 0


KINDS = {
    "labelled": labelled,
    "tensors": lambda i: (torch.arange(i + 1.0), torch.tensor(i)),
    "dict": lambda i: {"ids": np.arange(i), "text": f"sample {i}", "none": None, "nested": [{"x": torch.ones(i, 2)}]},
    "strided": lambda i: torch.arange(24).reshape(4, 6)[:, i % 6],
    "named tuple": lambda i: Pair(torch.tensor([i]), str(i)),
    "large": large,
    "large and small": lambda i: (np.full(1 << 21, i, np.uint8), torch.tensor(i), b"x"),
    "empty": lambda i: (torch.empty(0, 3), np.empty((0,)), "", [], {}),
    "structured": lambda i: np.array([(i, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    "sparse": lambda i: torch.eye(3).mul(i).to_sparse(),
}


@pytest.fixture(params=["memory", "folder"])
def place(request, tmp_path):
    return {} if request.param == "memory" else {"where": tmp_path / "cache", "key": "samples"}


def check(kept, numbers, make):
    """The samples of these numbers are those that `make` makes."""
    for number in numbers:
        assert told(kept[number]) == told(make(number))


# ---- the same samples


def sample(key, number):
    return torch.full((3, 4), number, dtype=torch.uint8), f"{key}{number}"


def damage(kept, number, how):
    """Changes a record, as if not all of it had reached the disk, or where the index says that it is."""
    index, row = kept._store._index, 2 + 2 * number
    if not index[row]:
        return
    if how < 3:  # the checksum, the place of the pickle, and what follows
        place = (index[row] >> 30) * 64 + (0, 4, 64)[how]
        kept._store._bytes[place] ^= 7
    else:  # beyond the end, another place, another size
        index[row] += (1 << 50, 1 << 30, -1)[how - 3]


class Killed(io.FileIO):
    """Writes a part, and dies."""

    def write(self, data):
        super().write(data[:100])
        os.kill(os.getpid(), signal.SIGKILL)


def read_and_die(kept, number):
    """As a worker that is killed while it keeps a sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "open", lambda path, *_: Killed(path, "ab"), raising=False)
        kept[number]


STEPS = ["read", "read", "batch", "fork", "killed", "copy", "reopen", "key", "damage"]


@settings(max_examples=40)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 5)), max_size=15),
    in_memory=st.booleans(),
)
def test_any_order_of_reads_processes_damage_and_keys_gives_the_samples_and_builds_each_once(
    steps, in_memory, tmp_path_factory
):
    folder, boot = tmp_path_factory.mktemp("caches"), 1

    def opened(key):
        dataset = Numbers(functools.partial(sample, key), 10)
        return cached(dataset) if in_memory else cached(dataset, where=folder, key=key)

    key, have, built = "a", {"a": set(), "b": set()}, Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "_boot", lambda: boot)
        first = {key: opened(key) for key in have}  # it lives as long as its copies do
        caches = dict(first)
        for step, number, more in [*steps, *(("read", number, 0) for number in range(10))]:
            kept = caches[key]
            numbers = [number, (number + more) % 10, number] if step == "batch" else [number]
            if step in ("read", "batch", "fork"):
                built[key] += len([one for one in numbers if one not in have[key]])
                have[key].update(numbers)
            match step:
                case "read" | "batch":
                    assert told(kept.__getitems__(numbers)) == told([sample(key, one) for one in numbers])
                case "fork":
                    assert in_fork(functools.partial(check, kept, numbers, functools.partial(sample, key))) == 0
                case "killed":
                    is_there = number in have[key]
                    built[key] += not is_there
                    expected = 0 if is_there else -signal.SIGKILL
                    assert in_fork(functools.partial(read_and_die, kept, number)) == expected
                case "copy":
                    caches[key] = another(kept)
                case "key":
                    key = "b" if key == "a" else "a"
                case "reopen" | "damage" if not in_memory:
                    if step == "damage":  # it is noticed once the machine has started again
                        damage(kept, number, more)
                        have[key].discard(number)
                        boot += 1
                    caches[key] = opened(key)
        stats = caches[key].stats()
        assert (stats.present, stats.built) == (10, built[key])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_dataset(kind, place):
    dataset = Numbers(KINDS[kind])
    kept = cached(dataset, **place)
    for _ in range(3):
        check(kept, random.Random(0).sample(range(20), 20), KINDS[kind])
    stats = kept.stats()
    assert (stats.samples, stats.present, stats.built, stats.hits) == (20, 20, 20, 40)
    assert dataset.asked == 20 + 2 + 1  # the first two that were built, and the first that was read, are compared


def test_a_sample_is_the_reader_s_own_and_outlives_the_cache(place):
    make = KINDS["large and small"]
    kept = cached(Numbers(make), **place)
    for _ in range(3):
        array, number, _ = kept[7]
        assert array[5] == 7
        array[:], number[...] = 99, 99
    samples = [kept[3], kept[3], another(kept)[7]]
    del kept
    gc.collect()
    assert told(samples) == told([make(3), make(3), make(7)])


def test_a_copy_of_a_copy_reads_what_was_built_before_both_though_these_are_gone():
    kept = cached(Numbers(labelled))
    built = kept[3]
    for _ in range(2):
        kept = pickle.loads(pickle.dumps(kept))
        assert str(kept.stats()).startswith("1 of 20 samples")
    assert kept[3][1] == built[1]


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


# ---- or an error

HELD = np.random.default_rng(0)


class Noisy(Numbers):
    """Draws from a generator of its own, which it has from a sample on."""

    first, draws = 0, range(20)

    def __getitem__(self, index):
        if index >= self.first and not hasattr(self, "generator"):
            self.generator = np.random.default_rng(0)
        return self.generator.random() if index in self.draws else index


DRAWS = [random.random, lambda: torch.rand(1), np.random.rand, HELD.random, lambda: random.seed(3)]


@pytest.mark.parametrize("dataset", [Noisy(None), *(Numbers(lambda _, draw=draw: draw()) for draw in DRAWS)])
def test_a_sample_that_draws_is_refused(dataset):
    kept = cached(dataset)
    with pytest.raises(CacheError, match=r"sample 4 of the cached \w+ draws from a random generator, or a thread does"):
        kept[4]
    assert kept.stats().present == 0


def test_a_generator_that_comes_late_and_is_rarely_drawn_from_is_found():
    class Late(Noisy):
        first, draws = 10, [13]

    for read in (
        lambda kept: [*kept],
        lambda kept: [kept.__getitems__([*range(begin, begin + 10)]) for begin in (0, 10)],
    ):
        kept = cached(Late(None))
        with pytest.raises(CacheError, match=r"sample 13 of the cached Late draws"):
            read(kept)
        assert kept._store.read(13) is sample_store.ABSENT


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


COMPARED = {
    "sparse tensors": lambda n: torch.tensor([n, 1]).to_sparse(),
    "subclasses": lambda n: torch.nn.Parameter(torch.tensor([1.0, n])),
    "one number of many": lambda n: np.r_[np.zeros(100_003), n],
    "of a generator of their own": lambda n: np.random.default_rng(n).random(3),
    "conjugates": lambda n: torch.tensor([n + 2j]).conj(),
    "negative views": lambda n: torch.tensor([1 + n * 1j]).conj().imag,
    "other bytes": lambda n: np.array([n], ">f4"),
    "restored": Restored,
    "sets": lambda n: {"words": {"a", "b", str(n)}, "same": [str(n)] * 2},
    "functions": lambda n: [lambda x: x + n, Pair, n],
}


@pytest.mark.parametrize("kind", COMPARED)
def test_samples_of_all_kinds_are_compared_in_whole(kind):
    make, numbers = COMPARED[kind], itertools.count(10)
    with pytest.raises(CacheError, match="sample 4 of the cached Numbers differs when it is built again"):
        cached(Numbers(lambda _: make(next(numbers))))[4]
    kept = cached(Numbers(make))
    for _ in range(2):
        kept[4]
    assert kept.stats().hits == 1


def test_samples_of_a_dataset_that_has_changed_are_not_given(place, monkeypatch):
    """They are compared in another process, in this one if an attribute was set, and a share of all others."""
    dataset = Numbers(functools.partial(torch.full, (4,)))
    kept = cached(dataset, **place)
    kept[2], kept[5]
    dataset.make = functools.partial(torch.full, (5,))
    for changed, number in (another(kept), 2), (kept, 5):
        with pytest.raises(
            CacheError, match=rf"sample {number} .* differs .* make a new cache, in a folder by another"
        ):
            changed[number]
    monkeypatch.setattr(module, "_READ", 10)
    monkeypatch.setattr(module, "_BUILT", 10)
    dataset = Numbers(labelled, 31)
    kept = cached(dataset)
    for number in range(31):
        kept[number]
    assert dataset.asked == 31 + 2 + 3
    for _ in range(31):
        kept[0]
    assert dataset.asked == 31 + 2 + 3 + 4


class Read(IterableDataset):
    def __init__(self, kept):
        self.kept = kept

    def __iter__(self):
        return map(self.kept.__getitem__, range(20))


@pytest.mark.parametrize("around", [lambda kept: kept, lambda kept: Numbers(kept.__getitem__), Read])
def test_errors_of_samples_are_skipped_and_what_may_not_be_cached_is_not(around):
    kept = cached(Numbers(lambda index: {0: 0, 1: 1, 3: torch.rand(1)}[index]))
    with pytest.raises(CacheError, match="draws from a random generator"):
        list(rayloader.DataLoader(around(kept), batch_size=4, on_error="skip"))


NO_SIZE = "max_bytes must be a whole number of bytes >= 1, or such as '500MB' or '20GiB', got "
NO_KEY = "where= must have key=, a text that you change whenever the samples change, got "
WRONG = [
    *((ValueError, NO_SIZE, [[], size], {}) for size in (0, "5 apples", True, 1e9, 10**30, np.int64(0))),
    *((ValueError, NO_KEY, [[1]], {"where": "folder", "key": key}) for key in (None, "", b"1", 1)),
    (ValueError, "key= is of a folder: a cache in memory ends with the program; leave it out", [[1]], {"key": "1"}),
    (TypeError, "needs a map-style dataset, with __getitem__ and __len__, got Read", [Read(None)], {}),
    (TypeError, "needs a map-style dataset, with __getitem__ and __len__, got object", [object()], {}),
]


@pytest.mark.parametrize(("error", "words", "arguments", "options"), WRONG)
def test_arguments_are_checked(error, words, arguments, options):
    with pytest.raises(error, match=words):
        cached(*arguments, **options)


def test_sizes_have_units_and_indices_are_those_of_a_sequence():
    sizes = (4096, np.uint32(4096), "4096", "8.192kB", "1MB", "2 MiB", "20GB")
    sizes = [cached([1], size).stats().max_bytes for size in sizes]
    assert sizes == [4096, 4096, 4096, 8192, 1_000_000, 2 << 20, 20_000_000_000]
    kept = cached(Numbers(labelled))
    assert kept[np.int64(4)][1] == kept[torch.tensor(4)][1] == 4
    assert [label for _, label in kept] == list(range(20))
    for wrong in (20, -1):
        with pytest.raises(IndexError, match=f"index {wrong} is out of range for 20 samples, which are counted from 0"):
            kept[wrong]
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        kept["a"]
    kept.dataset.count = 21
    with pytest.raises(CacheError, match="had 20 samples and has 21 now; make a new cache"):
        len(kept)


# ---- room


def test_what_finds_no_room_is_built_each_time(place, caplog):
    dataset = Numbers(lambda i: torch.full((10_000,), i, dtype=torch.uint8))
    kept = cached(dataset, 55_000, **place)
    with caplog.at_level(logging.WARNING, "rayloader"):
        for _ in range(2):
            check(kept, range(20), dataset.make)
    stats = kept.stats()
    assert (stats.present, stats.built, stats.hits, stats.full) == (5, 35, 5, True)
    assert stats.missing == 15
    assert stats.nbytes <= stats.max_bytes == 55_000
    (said,) = [record.getMessage() for record in caplog.records]
    assert "is full: 5 of 20 samples in 51.2 kB, full; 0 were read and 6 built: 0%. The others are built each" in said


def test_memory_is_left_for_others(monkeypatch, caplog):
    """Copies leave a full cache full, or the workers of each epoch would ask for memory again, and warn again."""
    monkeypatch.setattr(sample_store, "available", lambda: 1 << 30)
    kept = cached(Numbers(large))
    kept[0]
    monkeypatch.setattr(sample_store, "available", lambda: 1 << 28)
    for cache in (kept, another(kept), another(kept)):
        check(cache, range(20), large)
    assert kept.stats().full
    assert kept.stats().nbytes <= sample_store._CHUNK + (1 << 21)  # with the last one
    assert caplog.text.count("is full: 16 of 20 samples") == caplog.text.count("is full") == 1


def test_a_full_disk_ends_the_cache_and_no_more_and_there_may_be_room_later(place, caplog):
    """The append that failed in the middle has left a part of a record."""

    def make(i):
        return b"%04d" % i * 2000

    def work():
        kept = cached(Numbers(make), **place)
        for _ in range(2):
            check(kept, range(20), make)
        stats = kept.stats()
        assert (stats.full, stats.present, stats.hits) == (True, 12, 12)
        assert caplog.text.count("is full: 12 of 20 samples") == 1

    limited(100_000, work)
    if place:
        kept = cached(Numbers(make), **place)
        assert (kept.stats().present, kept.stats().full) == (12, False)
        for _ in range(2):
            check(kept, range(20), make)
        assert kept.stats().present == 20


def test_no_room_for_the_tables_is_an_error(place):
    def work():
        with pytest.raises(CacheError, match=r"the cache in .* can't be used: .*File too large.*make room"):
            cached(Numbers(labelled, 10_000), **place)

    limited(100_000, work)


# ---- processes and threads


def test_all_processes_and_threads_share_the_samples(place):
    make = KINDS["tensors"]
    kept = cached(Numbers(make, 200), **place)

    def read(seed):
        check(kept, random.Random(seed).sample(range(200), 200), make)

    def work(seed):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(read, (10 * seed, 10 * seed + 1)))

    pids = [fork(functools.partial(work, seed)) for seed in range(4)]
    assert list(map(end_of, pids)) == [0] * 4
    stats = kept.stats()
    assert stats.present == 200
    assert stats.hits + stats.built <= 4 * 2 * 200  # two that read one sample at the same moment may count once
    check(kept, range(200), make)
    assert kept.stats().built == stats.built


def test_the_processes_of_another_node_share_a_file_of_their_own():
    """They have imported the library and have nothing of this process: forks of one that is started for them."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["rayloader.data.cached"])

    def begin(*lines):
        """A process that runs these lines, and this end of the pipe which is its `pipe`."""
        mine, pipe = processes.Pipe()
        text = "\n".join(["import pickle", "from rayloader import CachedDataset", made, *lines])
        process = processes.Process(target=exec, args=(text, {"pipe": pipe}))
        process.start()
        pipe.close()
        return process, mine

    def end(process, pipe):
        process.join(HANG_LIMIT)
        assert process.exitcode == 0
        pipe.close()

    kept = cached(torch.arange(10))
    kept[3]
    name = f"rayloader-cache-{secrets.token_hex(8)}-another"  # of this test alone, whoever runs it at the same time
    there = dataclasses.replace(kept._place, name=name, machine="another one")
    made = f"kept = CachedDataset(*pickle.loads({pickle.dumps((kept.dataset, there, 10, 10_000))!r}))"
    first, pipe = begin(
        "assert [int(kept[i]) for i in range(10)] == list(range(10))",
        "assert pickle.loads(pickle.dumps(kept)).stats().present == 10",
        "pipe.send('ready')",
        "assert pipe.recv() == 'end'",
    )
    assert pipe.recv() == "ready"
    end(*begin("assert kept[3] == 3 and kept.stats().present == kept.stats().built == 10, kept.stats()"))
    pipe.send("end")
    end(first, pipe)
    assert kept.stats().present == 1
    end(*begin("assert kept.stats().present == 0"))  # it has ended with its last process


# ---- folders: later runs find the samples; what others may have put there is neither read nor written over

WHOLE = [0, 1, 2, 3, 4]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "caches"


def opened(folder, make=int, count=5, max_bytes="100MB", key="files"):
    return cached(Numbers(make, count), max_bytes, folder, key=key)


def file_in(folder):
    (file,) = folder.glob("*.rayloader-cache")
    return file


def test_a_later_run_finds_the_samples_of_the_same_key_class_and_length(folder):
    """Any order of runs, and the death of the machine, are in the random program above."""

    class Others(Numbers):
        pass

    assert [*opened(folder)] == [*opened(folder)] == WHOLE
    assert file_in(folder).name.startswith("Numbers_files-5-")
    assert np.load(file_in(folder), mmap_mode="r").shape == (6, 2)
    index = opened(folder)._store._index
    index[6] = index[10]  # another sample's record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_store, "_boot", lambda: 7)
        assert [*opened(folder)] == WHOLE
    assert [*opened(folder, repr, key="files!")] == [*"01234"]
    assert [*opened(folder, repr, 3)] == [*"012"]
    assert [*cached(Others(repr, 5), where=folder, key="files")] == [*"01234"]
    assert len([*folder.iterdir()]) == 4


@pytest.mark.parametrize("call", ["pwrite", "fsync", "posix_fallocate"])
def test_a_process_that_is_killed_while_it_makes_a_file_leaves_no_damaged_one(folder, monkeypatch, call):
    def work():
        monkeypatch.setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        opened(folder)

    assert in_fork(work) == -signal.SIGKILL
    assert [*opened(folder)] == WHOLE
    assert opened(folder).stats().present == 5


def test_a_cache_may_grow_and_each_program_keeps_to_its_limit(folder):
    def make(i):
        return b"%04d" % i * 1000

    small, large = opened(folder, make, 20, 20_000), opened(folder, make, 20, "1MB")
    for kept, numbers in (small, range(20)), (large, range(15)), (small, range(20)), (large, range(20)):
        assert [kept[i] for i in numbers] == [make(i) for i in numbers]
        assert kept.stats().full == (kept is small)
    smaller = opened(folder, make, 20, 5_000)
    assert smaller.stats().present == 20
    assert [*smaller] == [make(i) for i in range(20)]


# ---- what others could have put there


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture
def bomb(tmp_path):
    yield tmp_path / "bomb"
    assert not (tmp_path / "bomb").exists()


def planted(folder, bomb):
    """A cache whose samples are bombs, under the name that everybody can compute."""
    kept = opened(folder)
    for number in range(3):
        kept._store.write(number, Bomb(bomb))
    return file_in(folder)


def replaced(file, change):
    """It has been moved elsewhere, and `change` has put something in its place."""
    elsewhere = file.rename(file.with_name("elsewhere"))
    change(file, elsewhere)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file: replaced(file, Path.symlink_to), "symbolic links"),
        (lambda file: replaced(file, lambda new, _: new.symlink_to("nothing")), "symbolic links"),
        (lambda file: replaced(file, Path.hardlink_to), "and 2 names; delete it"),
        (lambda file: replaced(file, lambda new, _: os.mkfifo(new, 0o600)), "got mode 10600,"),
        (lambda file: file.chmod(0o606), "got mode 100606,"),
        (lambda file: file.chmod(0o660), "got mode 100660,"),
    ],
)
def test_a_file_that_others_could_have_written_is_not_read(change, why, folder, bomb):
    def files():
        return [(file.lstat().st_size, file.lstat().st_mtime_ns) for file in sorted(folder.iterdir())]

    file = planted(folder, bomb)
    copied = dumped(opened(folder), ByValuePickler)
    change(file)
    before = files()
    with pytest.raises(CacheError, match=f"the cache .*{why}"):
        opened(folder)
    with pytest.raises(CacheError, match=f"the cache .*{why}"):
        pickle.loads(copied)
    assert files() == before


def test_a_file_of_another_user_is_not_read(folder, bomb, monkeypatch):
    """Nor taken for the node's: the name of one in memory can be seen in /proc."""
    planted(folder, bomb)
    user, fd = os.geteuid(), os.memfd_create("rayloader-cache-planted-0")
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with open(fd, "rb"):
        with pytest.raises(CacheError, match=rf"Numbers_fi\S* must be .*, user {user} and 1 names; delete it"):
            opened(folder)
        assert module._oldest("rayloader-cache-planted-") is None


@pytest.mark.parametrize("content", [bytes(100), bytes(1 << 20), b"important", bytes(4096) + b"important" * 10_000])
def test_a_victim_s_file_is_neither_emptied_nor_written_to(content, folder):
    opened(folder)
    file = file_in(folder)
    file.write_bytes(content)
    with pytest.raises(CacheError, match="it is of another format"):
        opened(folder)
    assert file.read_bytes() == content


def test_what_is_made_is_this_user_s_alone_and_moves_no_generator(folder):
    def generators():
        own = global_generators()[0][0].getstate()
        return torch.get_rng_state().tolist(), own, np.random.get_state()[1].tolist()

    states, mask = generators(), os.umask(0)
    try:
        opened(folder / "below")
    finally:
        os.umask(mask)
    assert generators() == states
    made = [folder / "below", file_in(folder / "below")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700, 0o600]
