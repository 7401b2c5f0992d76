"""`share`: one producer, several consumers, most of them here in the test's process."""

import collections
import contextlib
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import ray
import torch
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset

from accelerator import Pinned
from interrupts import interrupted_at, no_hang
from rayloader import ConsumerDroppedError, DataLoader, RaySessionError, ShareError, StateError, share, shared
from rayloader.errors import own_notes
from rayloader.sharing.link import MOST_AHEAD

pytestmark = pytest.mark.usefixtures("ray_session")
HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises


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


class Raising(Noisy):
    def __getitem__(self, index):
        if index == 1:
            raise KeyError("no sample 1")
        return index


class Witness(Noisy):
    """Tells with each sample how many batches the slow consumer had been given when it was produced."""

    def __init__(self, path):
        super().__init__(length=30)
        self.path = path

    def __getitem__(self, index):
        return index, int(self.path.read_text())


class Reusing(Noisy):
    """Builds each sample in the same memory."""

    def __init__(self, width):
        super().__init__()
        self.output = torch.zeros(width)

    def __getitem__(self, index):
        return self.output.fill_(index)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


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


@pytest.mark.parametrize(
    ("workers", "width", "arenas"),
    [(0, 2, True), (1, 40_000, True), (1, 40_000, False), full(0, 40_000, True), full(1, 2, True), full(0, 2, False)],
)
def test_all_consumers_get_what_the_loader_would_have_given(workers, width, arenas):
    """Over two epochs, with random augmentation; each its own memory."""
    torch.manual_seed(1)
    loader = make(Noisy(width=width), num_workers=workers)
    expected = [list(loader) for _ in range(2)]
    torch.manual_seed(1)
    with two(make(Noisy(width=width), num_workers=workers, arenas=arenas)) as consumers:
        for batches in expected:
            first, second = together(*consumers)
            assert equal(first, batches)
            for batch in first:
                batch.zero_()
            assert equal(second, batches)
        assert [len(consumer) for consumer in consumers] == [len(loader)] * 2
        assert [consumer.epoch for consumer in consumers] == [2, 2]


@pytest.mark.parametrize("width", [2, 5_000, 40_000])
def test_a_batch_is_not_changed_by_a_dataset_that_uses_its_memory_again(width):
    with share(DataLoader(Reusing(width), batch_size=None), consumers=1) as shared_loader:
        assert [batch.unique().tolist() for batch in shared_loader.consumer(0)] == [[number] for number in range(12)]


def put(samples):
    return {"ref": ray.put(samples[0]), "noise": torch.ones(50_000)}


def test_references_to_rays_objects_are_an_error_in_place_of_their_batch():
    with share(DataLoader(range(2), collate_fn=put), consumers=1) as shared_loader:
        batches = iter(shared_loader.consumer(0))
        for _ in range(2):
            with pytest.raises(TypeError, match=r"must not refer to Ray's objects; call ray\.get\(\) in collate_fn"):
                next(batches)
        assert list(batches) == []


def test_where_there_can_be_no_line_an_error_says_so(monkeypatch):
    monkeypatch.setattr("rayloader.actors.session.node_ip", lambda: "192.0.2.77")  # no address of this machine
    with (
        share(make(), consumers=1, name="lineless") as shared_loader,
        pytest.raises(ShareError, match=r"the share 'lineless' cannot connect to this consumer.*: can't listen"),
    ):
        iter(shared_loader.consumer(0))


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


def test_large_batches_are_copied_ahead_and_small_ones_need_no_thread():
    with two(make(Noisy(width=40_000))) as (large, other), share(make(), consumers=1) as small:
        batches = iter(large)
        begun = [next(batches) for _ in range(2)]
        assert len(threads()) == 1
        assert not [thread for thread in threads() if not thread.daemon]  # it keeps no program from ending
        assert len([*begun, *batches]) == 6
        assert threads() == []
        next(iter(large))
        large.close()
        assert threads() == []
        assert len(list(other)) == 6
        assert len(list(small.consumer(0))) == 6
        assert threads() == []


def test_nobody_is_farther_ahead_of_the_slowest_than_the_buffer_holds(tmp_path):
    given = tmp_path / "given"
    given.write_text("0")
    with two(DataLoader(Witness(given), batch_size=None), buffer=4) as (fast, slow):
        fast, slow = iter(fast), iter(slow)
        found = [next(fast) for _ in range(4)]
        for number in range(26):
            given.write_text(str(number + 1))
            next(slow)
            found.append(next(fast))
    assert [index for index, _ in found] == list(range(30))
    assert all(index < given + 4 for index, given in found)


def test_who_is_dropped_is_told_so_and_the_others_go_on():
    with two(make(), name="drop", buffer=2, consumer_timeout=0.1) as (first, second):
        next(iter(second))
        assert len(list(first)) == 6
        with pytest.raises(
            ConsumerDroppedError,
            match=r"the others had waited for it for 0\.1 s.*had taken 1 batches of epoch 0\..*longer consumer_timeout",
        ):
            list(second)
        with pytest.raises(ConsumerDroppedError):
            shared("drop", 1)
        assert len(list(first)) == 6


def test_who_has_closed_is_not_waited_for():
    with two(make(), buffer=2) as (first, second):
        second.close()
        assert len(list(first)) == 6
        with pytest.raises(ConsumerDroppedError, match="it was closed"):
            iter(second).__next__()


def test_a_consumer_whose_process_has_ended_is_not_waited_for(monkeypatch):
    """As a trial of Ray Tune that is stopped early."""
    monkeypatch.setattr("rayloader.sharing.shares.ABSENCE_S", 0.1)

    @ray.remote(num_cpus=0)
    class Trial:
        def train(self, shared_loader):
            self.batches = iter(shared_loader.consumer(1))
            return next(self.batches)[0].item()

    with share(DataLoader(range(40), 2), consumers=2, buffer=3) as shared_loader:
        trial = Trial.remote()
        assert ray.get(trial.train.remote(shared_loader)) == 0
        ray.kill(trial)
        first = shared_loader.consumer(0)
        assert [len(list(first)) for _ in range(2)] == [20, 20]
        with pytest.raises(ConsumerDroppedError, match="its process ended"):
            shared_loader.consumer(1)


def test_a_consumer_whose_process_was_killed_goes_on_in_another():
    @ray.remote(num_cpus=0)
    class Trainer:
        def __init__(self, shared_loader):
            self.consumer = shared_loader.consumer(1)
            self.batches = iter(self.consumer)

        def take(self, count):
            found = [next(self.batches) for _ in range(count)]
            self.consumer.state_dict()  # by its answer the producer knows of them
            return found

    with share(make(), consumers=2, name="restart", buffer=3) as shared_loader:
        trainer = Trainer.remote(shared_loader)
        before = ray.get(trainer.take.remote(2))
        ray.kill(trainer)
        first = iter(shared_loader.consumer(0))
        expected = [next(first) for _ in range(5)]  # as many as the buffer lets it have
        again = shared("restart", 1)
        rest = [next(batches) for batches in [iter(again)] for _ in range(3)]
        assert equal([*before, *rest], expected)
        assert again.epoch == 0


def test_a_rank_belongs_to_the_last_that_has_connected():
    with share(make(Noisy(40)), consumers=1) as shared_loader:
        old = iter(shared_loader.consumer(0))
        first = next(old)
        new = shared_loader.consumer(0)
        with pytest.raises(ShareError, match="has connected with the same rank"):
            [next(old) for _ in range(MOST_AHEAD + 1)]  # it has some of them already
        rest = list(new)
        # Nothing is lost; the batch of which nobody has said yet that it was taken may come once more.
        assert len(rest) in (19, 20)
        assert equal(rest[-19:], list(make(Noisy(40)))[1:])
        assert len(first) == 2
        for rank in (1, -1, "0", True):
            with pytest.raises(ValueError, match=f"from 0 to 0, got {rank!r}: this share has 1 consumers"):
                shared_loader.consumer(rank)


@pytest.mark.parametrize("workers", [0, full(1)])
def test_an_error_of_the_dataset_comes_to_each_in_its_turn(workers):
    with two(DataLoader(Raising(), batch_size=1, num_workers=workers)) as consumers:
        for batches in [iter(consumer) for consumer in consumers]:
            assert next(batches).item() == 0
            with pytest.raises(KeyError, match="no sample 1"):
                next(batches)
            assert next(batches).item() == 2


def test_an_error_at_iter_is_that_of_the_epoch():
    class Sampler:
        def __len__(self):
            return 3

        def __iter__(self):
            raise ValueError("no order")

    with two(DataLoader(Noisy(), sampler=Sampler())) as consumers:
        for consumer in consumers:
            batches = iter(consumer)
            with pytest.raises(ValueError, match="no order"):
                next(batches)
            assert list(batches) == []


def test_a_stream_has_no_length_and_is_read_by_each():
    with two(DataLoader(Stream(), batch_size=2)) as consumers:
        with pytest.raises(TypeError, match="Stream"):
            len(consumers[0])
        for _ in range(2):
            assert [[batch.tolist() for batch in found] for found in together(*consumers)] == [
                [[0, 1], [2, 3], [4]]
            ] * 2


def warned(iterable):
    """What is warned of when an iterator is made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iter(iterable)
    return [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("pinning", [{}, {"pin_memory": True}, {"pin_memory": True, "pin_memory_device": "cuda"}])
def test_a_consumer_that_cannot_pin_warns_as_torchs_loader_does(pinning):
    state = torch.get_rng_state()
    with share(DataLoader(range(4), **pinning), consumers=1) as shared_loader:
        told = warned(shared_loader.consumer(0))
    assert state.equal(torch.get_rng_state())
    assert told == warned(torch.utils.data.DataLoader(range(4), **pinning))


def test_batches_are_pinned_in_each_consumer(accelerator):
    with two(DataLoader(range(2), pin_memory=True)) as consumers:
        for found in map(list, consumers):
            assert [type(batch) for batch in found] == [Pinned] * 2


def test_an_epoch_that_is_broken_off_is_over_for_who_does_it_and_for_all_if_all_do():
    with two(DataLoader(Noisy(), batch_size=2), buffer=3) as (first, second):
        next(iter(first))
        anew = iter(first)  # from here on the other is not held up by it in this epoch
        slow = iter(second)
        assert len([next(slow) for _ in range(6)]) == 6
        assert int(next(anew)[0, 0]) == 0
        assert first.epoch == 1
        with pytest.raises(StopIteration):
            next(slow)
        next(iter(second))
        for consumer in (first, second):
            iter(consumer)
        assert [[int(batch[0, 0]) for batch in found] for found in together(first, second)] == [
            list(range(0, 12, 2))
        ] * 2
        assert (first.epoch, second.epoch) == (3, 3)
        with pytest.raises(ShareError, match="this iterator is of epoch 1"):
            next(anew)


def test_an_iterator_from_which_nothing_is_taken_is_no_epoch():
    """Lightning's `fit` makes one only to look at it."""
    with two(DataLoader(Noisy(), batch_size=2), buffer=30) as (first, second):
        iter(first)
        assert [int(batch[0, 0]) for batch in first] == list(range(0, 12, 2))
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        list(batches)
        first.load_state_dict(state)
        iter(first)
        assert [int(batch[0, 0]) for batch in first] == list(range(2, 12, 2))
        assert first.epoch == 2
        assert [len(list(second)) for _ in range(2)] == [6, 6]


def test_a_consumer_may_be_closed_after_its_share():
    with share(make(), consumers=2) as shared_loader:
        one, other = (shared_loader.consumer(rank) for rank in range(2))
        next(iter(one))
    one.close()
    other.close()


@pytest.mark.full
def test_set_epoch_reaches_whatever_the_loaders_own_does():
    class Wraps:
        def __init__(self):
            self.sampler = DistributedSampler(range(8), 1, 0)

        def __iter__(self):
            return iter(BatchSampler(self.sampler, 4, drop_last=False))

        def __len__(self):
            return 2

    def epochs(told, batches):
        found = []
        for epoch in range(3):
            told.set_epoch(epoch)
            found.append([batch.tolist() for batch in batches])
        return found

    loader = DataLoader(range(8), batch_sampler=Wraps())
    expected = epochs(loader, loader)
    assert len({str(epoch) for epoch in expected}) == 3
    with share(DataLoader(range(8), batch_sampler=Wraps()), consumers=1) as shared_loader:
        consumer = shared_loader.consumer(0)
        assert epochs(consumer, consumer) == expected


def test_set_epoch_reaches_the_sampler_and_must_be_one_number():
    dataset = list(range(12))
    sampler = DistributedSampler(dataset, 1, 0)
    plain = DataLoader(dataset, batch_size=3, sampler=sampler)
    with two(DataLoader(dataset, batch_size=3, sampler=DistributedSampler(dataset, 1, 0))) as consumers:
        for epoch in (5, 2):
            for consumer in consumers:
                consumer.set_epoch(epoch)
            sampler.set_epoch(epoch)
            expected = list(plain)
            assert all(equal(found, expected) for found in together(*consumers))
        consumers[0].set_epoch(3)
        next(iter(consumers[0]))
        consumers[1].set_epoch(4)
        with pytest.raises(ValueError, match=r"set_epoch\(4\) differs from .* which is 3"):
            next(iter(consumers[1]))
        consumers[1].set_epoch(3)
        assert len(list(consumers[1])) == 4
        assert consumers[1].epoch == 3


@pytest.mark.parametrize("workers", [0, full(1)])
def test_all_go_on_from_a_state_of_one(workers):
    """In the middle of the second epoch, in another share; and in the same one, as long as that keeps the batches."""
    with two(make(num_workers=workers)) as (first, second):
        together(first, second)
        batches, others = iter(first), iter(second)
        for _ in range(2):
            next(batches), next(others)
        state = first.state_dict()
        expected = list(batches)
        first.load_state_dict(state)
        assert equal(list(first), expected)
        list(others)
        with pytest.raises(StateError, match="no longer keeps"):
            first.load_state_dict(state)
        with pytest.raises(StateError, match=r"not a state of a rayloader\.Consumer"):
            first.load_state_dict(state["loader"])
        with pytest.raises(StateError, match="another share"):
            first.load_state_dict({**state, "share": "another"})
    loader = make(num_workers=workers)
    loader.load_state_dict(state["loader"])
    with two(loader) as consumers:
        for consumer in consumers:
            consumer.load_state_dict(state)
        for found in together(*consumers):
            assert equal(found, expected)
        assert [len(batches) for batches in together(*consumers)] == [6, 6]


def test_a_name_is_of_one_share_which_ends_when_it_is_closed():
    with share(make(), consumers=1, name="one") as shared_loader:
        with pytest.raises(ShareError, match="there is a share 'one' in this Ray already"):
            share(make(), consumers=1, name="one")
        consumer = shared("one", 0)
        next(iter(consumer))
    endless = itertools.chain.from_iterable(itertools.repeat(consumer))
    with pytest.raises(ShareError, match="the producer of the share 'one' is gone"):
        collections.deque(endless, maxlen=0)  # Ray ends the producer soon, but not at once: it may serve some more
    with pytest.raises(ShareError, match="there is no share 'one'"):
        shared("one", 0, timeout=0)
    shared_loader.close()


class Stubborn(Exception):
    def __reduce__(self):
        raise TypeError("not me")


class RaisingStubborn(Noisy):
    def __getitem__(self, index):
        raise Stubborn("no sample")


def lock(samples):
    return {"samples": samples, "lock": threading.Lock()}


def test_what_cannot_travel_is_named(tmp_path):
    with open(tmp_path / "log", "w") as file, pytest.raises(TypeError) as caught:
        share(DataLoader([file]), consumers=1)
    assert "It cannot be sent to the producer: loader" in own_notes(caught.value)[-1]
    with (
        two(DataLoader(RaisingStubborn())) as consumers,
        pytest.raises(RuntimeError, match=r"(?s)Caught Stubborn in the producer of the share .*Stubborn: no sample"),
    ):
        next(iter(consumers[0]))
    with two(DataLoader(range(4), collate_fn=lock)) as consumers, pytest.raises(TypeError) as caught:
        next(iter(consumers[0]))
    assert "cannot be sent to the trainer: batch['lock']: _thread.lock" in caught.value.__notes__[0]


@pytest.mark.parametrize("width", [2, full(40_000)])
@pytest.mark.parametrize("stride", [23, full(1)])
def test_an_interrupted_next_loses_nothing_and_hangs_nowhere(width, stride):
    with share(DataLoader(Noisy(40, width), batch_size=None), consumers=1) as shared_loader:
        consumer = shared_loader.consumer(0)
        for number in itertools.count(1, stride):
            batches, found = iter(consumer), []
            interrupt = None
            with no_hang(lambda: interrupt and interrupt.where):  # noqa: B023
                for _ in range(3):
                    found.append(next(batches))
                with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as interrupt:
                    for _ in range(12):
                        found.append(next(batches))
                found += batches
            assert [int(batch[0]) for batch in found] == list(range(40)), interrupt.where
            if not interrupt.fired:
                break
        assert number > 100


@pytest.mark.full
def test_a_program_that_has_joined_the_same_ray_reads_by_name():
    torch.manual_seed(1)
    expected = [batch.sum().item() for batch in make()]
    torch.manual_seed(1)
    with share(make(), consumers=1, name="programs"):
        program = "import rayloader\nfor batch in rayloader.shared('programs', 0): print(batch.sum().item())"
        address = ray.get_runtime_context().gcs_address
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=HANG_LIMIT,
        )
    assert [float(line) for line in done.stdout.splitlines()] == expected, done.stderr


@pytest.mark.parametrize("width", [2, 100_000])
def test_a_forked_child_cannot_read_on(width):
    with share(DataLoader(Noisy(width=width), 2, num_workers=1), consumers=1) as shared_loader:
        iterator = iter(shared_loader.consumer(0))
        next(iterator)
        child = os.fork()
        if not child:
            with contextlib.suppress(RaySessionError):
                next(iterator)
                os._exit(1)
            os._exit(0)
        with os.fdopen(os.pidfd_open(child)) as end:
            has_ended = bool(select.select([end], [], [], HANG_LIMIT)[0])
        if not has_ended:
            os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len([*iterator]) == 5
