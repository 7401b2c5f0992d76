"""`share`: one producer, several consumers, most of them here in the test's process."""

import contextlib
import itertools
import os
import subprocess
import sys
import threading

import pytest
import ray
import torch
from torch.utils.data import ChainDataset, DistributedSampler, IterableDataset

from interrupts import Interrupt, no_hang
from rayloader import DataLoader, ShareError, StateError, share, shared

pytestmark = pytest.mark.usefixtures("ray_session")


def full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


class Noisy:
    """Numbers with noise; `width` makes a batch small or large."""

    def __init__(self, length=12, width=2):
        self.length, self.width = length, width

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index + torch.rand(self.width)


class Reusing(Noisy):
    """Builds each sample in the same memory."""

    def __init__(self, width):
        super().__init__()
        self.output = torch.zeros(width)

    def __getitem__(self, index):
        return self.output.fill_(index)


def make(dataset=None, **options):
    return DataLoader(dataset or Noisy(), **{"batch_size": 2, "shuffle": True, **options})


def equal(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def together(*iterables):
    """What each gives, one batch from each in turn."""
    found = [list(batches) for batches in zip(*iterables, strict=True)]
    return [list(batches) for batches in zip(*found, strict=True)]


@contextlib.contextmanager
def two(loader, **options):
    """Both consumers of a share."""
    with share(loader, consumers=2, **options) as shared_loader:
        yield shared_loader.consumer(0), shared_loader.consumer(1)


@pytest.mark.parametrize(("workers", "width"), [(0, 2), (1, 40_000), full(0, 40_000), full(1, 2)])
def test_all_consumers_get_what_the_loader_would_have_given(workers, width):
    """Over two epochs, with random augmentation; each its own memory."""
    torch.manual_seed(1)
    loader = make(Noisy(width=width), num_workers=workers)
    expected = [list(loader) for _ in range(2)]
    torch.manual_seed(1)
    with two(make(Noisy(width=width), num_workers=workers)) as consumers:
        for batches in expected:
            first, second = together(*consumers)
            assert equal(first, batches)
            for batch in first:
                batch.zero_()
            assert equal(second, batches)
        assert [len(consumer) for consumer in consumers] == [len(loader)] * 2
        assert [consumer.epoch for consumer in consumers] == [2, 2]


@pytest.mark.parametrize("width", [2, 40_000])
def test_a_batch_is_not_changed_by_a_dataset_that_uses_its_memory_again(width):
    with share(DataLoader(Reusing(width), batch_size=None), consumers=1) as shared_loader:
        consumer = shared_loader.consumer(0)
        assert [batch.unique().tolist() for batch in consumer] == [[number] for number in range(12)]


@ray.remote(num_cpus=0)
class Trial:
    """As one of Ray Tune: its process lives on after the train function."""

    def train(self, shared_loader):
        return len(next(iter(shared_loader.consumer(1))))

    def fail(self, shared_loader):
        self.error = None
        try:
            with shared_loader.consumer(1) as batches:
                next(iter(batches))
                raise ValueError("stopped early")
        except ValueError as error:
            self.error = error  # its traceback keeps the frame, and with it the consumer
        return 2

    def keep(self, shared_loader):
        self.batches = iter(shared_loader.consumer(1))
        return len(next(self.batches))


@pytest.mark.parametrize("way", ["close", "train", "fail", "keep"])
def test_a_consumer_that_has_ended_is_not_waited_for(way):
    """It was closed, or its train function has returned or raised, though the actor lives; or the actor is dead."""
    trial, options = Trial.remote(), {"restart_timeout": 0.1} if way == "keep" else {}
    with share(make(Noisy(40)), consumers=2, buffer=3, **options) as shared_loader:
        first = shared_loader.consumer(0)
        if way == "close":
            with shared_loader.consumer(1) as second:
                next(iter(second))
            with pytest.raises(ShareError, match="was closed, or another one"):
                next(iter(second))
        else:
            assert ray.get(getattr(trial, way).remote(shared_loader)) == 2
        if way == "keep":
            ray.kill(trial)
        assert [len(list(first)) for _ in range(2)] == [20, 20]
        if way == "keep":
            with pytest.raises(ShareError, match=r"consumer 1 of this share has left"):
                shared_loader.consumer(1)
        ray.kill(trial)


class Raising(Noisy):
    """Its second sample raises an error."""

    def __getitem__(self, index):
        if index == 1:
            raise KeyError("no sample 1")
        return index


def test_an_error_of_the_dataset_comes_to_each_in_its_turn():
    with two(DataLoader(Raising(3), batch_size=1)) as consumers:
        for batches in [iter(consumer) for consumer in consumers]:
            assert next(batches).item() == 0
            with pytest.raises(KeyError, match="no sample 1"):
                next(batches)
            assert next(batches).item() == 2


def test_an_epoch_that_is_broken_off_is_over_for_all_if_all_do():
    with two(DataLoader(Noisy(), batch_size=2)) as consumers:
        for batches in [iter(consumer) for consumer in consumers]:
            next(batches)
        for found in together(*consumers):
            assert [int(batch[0, 0]) for batch in found] == list(range(0, 12, 2))
        assert [consumer.epoch for consumer in consumers] == [2, 2]
        with pytest.raises(ShareError, match="iter\\(\\) was called since"):
            next(batches)


def test_set_epoch_reaches_the_sampler_and_is_the_same_for_all():
    def load():
        return DataLoader(list(range(12)), batch_size=3, sampler=DistributedSampler(range(12), 1, 0))

    plain = load()
    plain.set_epoch(5)
    expected = list(plain)
    with two(load()) as consumers:
        for consumer in consumers:
            consumer.set_epoch(5)
        assert all(equal(found, expected) for found in together(*consumers))
        for epoch, consumer in enumerate(consumers, 1):
            consumer.set_epoch(epoch)
        assert len(list(consumers[0])) == 4
        with pytest.raises(ValueError, match=r"set_epoch\(2\) differs from another consumer's, 1"):
            next(iter(consumers[1]))


@pytest.mark.parametrize("workers", [0, full(1)])
def test_all_go_on_from_a_state_of_one(workers):
    with two(make(num_workers=workers)) as (first, second):
        together(first, second)
        batches, others = iter(first), iter(second)
        for _ in range(2):
            next(batches), next(others)
        state = first.state_dict()
        expected = list(batches)
    with pytest.raises(StateError, match=r"not a state of a rayloader\.Consumer"):
        share(make(), consumers=1, state=state["loader"])
    with two(make(num_workers=workers), state=state) as consumers:
        for found in together(*consumers):
            assert equal(found, expected)
        assert [len(batches) for batches in together(*consumers)] == [6, 6]


def test_a_name_is_of_one_share_which_ends_when_it_is_closed():
    with share(make(), consumers=1, name="one") as shared_loader:
        with pytest.raises(ShareError, match="there is a share 'one' in this Ray already"):
            share(make(), consumers=1, name="one")
        next(iter(shared("one", 0)))
    with pytest.raises(ShareError, match="there is no share 'one'"):
        shared("one", 0, timeout=0)
    shared_loader.close()


def test_an_interrupted_next_loses_nothing_and_hangs_nowhere():
    with share(DataLoader(Noisy(40), batch_size=None), consumers=1) as shared_loader:
        consumer = shared_loader.consumer(0)
        for number in itertools.count(1, 23):
            batches, found = iter(consumer), []
            interrupt = None
            with no_hang(lambda: interrupt and interrupt.where):  # noqa: B023
                found.append(next(batches))
                with contextlib.suppress(KeyboardInterrupt), Interrupt(number) as interrupt:
                    for _ in range(12):
                        found.append(next(batches))
                found += batches
            assert [int(batch[0]) for batch in found] == list(range(40)), interrupt.where
            if not interrupt.fired:
                break
        assert number > 100


class Counting(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def test_a_stream_is_shared_and_its_error_at_iter_is_raised_in_the_consumer():
    with two(DataLoader(Counting(7), batch_size=None)) as consumers:
        assert together(*consumers) == [[*range(7)]] * 2
    stream = DataLoader(Counting("seven"), num_replicas=1, rank=0)
    with share(stream, consumers=1) as shared_loader, pytest.raises(TypeError, match="cannot be interpreted as an int"):
        next(iter(shared_loader.consumer(0)))


def test_the_fastest_is_at_most_a_buffer_ahead():
    with two(DataLoader(range(20), batch_size=None), buffer=4) as (first, second):
        batches = iter(first)
        found = [next(batches) for _ in range(2)]  # half a buffer, at least
        threading.Thread(target=lambda: found.extend(batches), daemon=True).start()
        for number, batch in enumerate(second):
            assert batch == number
            assert len(found) <= number + 1 + 4


PROGRAM = """
import os, signal, rayloader
batches = iter(rayloader.shared("killed", 0))
print([next(batches) for _ in range(3)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_another_program_joins_by_name_and_where_it_is_killed_a_new_consumer_goes_on():
    with share(DataLoader(range(9), batch_size=None), consumers=1, name="killed") as shared_loader:
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        program = [sys.executable, "-c", PROGRAM]
        ended = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=100)
        assert "[0, 1, 2]" in ended.stdout, ended.stderr
        found = list(shared_loader.consumer(0))
        assert found == list(range(9))[-len(found) :]  # what it took in its last 20 ms may come again
        assert len(found) >= 6


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "kind", "error"),
    [
        ({"consumers": 0}, ValueError, "consumers must be a whole number >= 1, got 0"),
        ({"consumers": 1.5}, TypeError, "consumers must be a whole number >= 1, got 1.5"),
        ({"consumers": 1, "buffer": 0}, ValueError, "buffer must be a whole number >= 1, got 0"),
        ({"consumers": 1, "name": ""}, TypeError, "name must be a text"),
        ({"loader": range(3), "consumers": 1}, TypeError, r"takes a rayloader\.DataLoader, got range;"),
    ],
)
def test_arguments_are_checked(options, kind, error):
    with pytest.raises(kind, match=error):
        share(**{"loader": DataLoader(range(3)), **options})
    with pytest.raises(TypeError, match="name must be a text"):
        shared("", 0)


def test_a_stream_of_a_rank_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="needs num_replicas and rank"):
        share(DataLoader(ChainDataset([])), consumers=1)
