"""Many tasks under way: nothing finished is withheld, the depth is bounded, and none of it shows."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler, SubsetRandomSampler

from inside import tasks_of
from latches import HANG_LIMIT, Gate, Mail
from probes import Calls, Stream, as_is, load, oversubscribed
from rayloader import DataLoader
from rayloader.actors.actors import CALLS_AHEAD
from rayloader.epoch.engine import Engine
from rayloader.errors import RayloaderError
from rayloader.transport.memory_file import MemoryFileError
from rayloader.workers.fleet import Worker

# Bytes of a batch that does not fit into a socket's buffer.
LARGE = 2 << 20

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize("arenas", [False, True])
def test_a_dataset_may_wait_for_the_trainer(tmp_path, depth_of, arenas):
    """Batch i is built only when batch i - 1 was taken: as a replay buffer does it, or a live stream."""
    depths = depth_of(24)
    gates = [Gate(tmp_path / str(number)) for number in range(40)]

    def get(index):
        if index:
            gates[index - 1].wait()
        return torch.full((2000,), index)

    for number, batch in enumerate(load(get, 40, num_workers=1, arenas=arenas, timeout=HANG_LIMIT)):
        assert batch.unique().item() == number
        gates[number].open()
    assert number == 39
    assert max(depths) > (16 if arenas else CALLS_AHEAD - 1)


def test_tasks_that_torchs_worker_would_have_been_told_are_sent_at_once(tmp_path, depth_of):
    """The trainer waits for the worker to begin them, however many batches there are to take."""
    depth_of(24)
    mail, begun = Mail(tmp_path / "mail"), set()

    def get(index):
        mail.send(index)
        return index

    for number, _ in enumerate(load(get, 80, num_workers=1)):
        while min(number + 2, 79) not in begun:
            begun.update(map(int, mail.receive()))


@pytest.mark.parametrize(
    ("unsent", "deliverable", "automatic", "waits"),
    [
        ([], 0, True, True),  # there is nothing to send
        ([34], 1, True, False),
        ([34], 2, True, True),
        ([34, 35, 36], 5, True, False),
        ([34, 35, 36], 6, True, True),
        ([36, 13], 30, True, False),  # torch's worker would have been told one of them
        ([36], 30, False, False),  # the user's depth is torch's
    ],
)
def test_tasks_are_held_back_while_the_user_has_far_more_batches_to_take(unsent, deliverable, automatic, waits):
    schedule = SimpleNamespace(torch_draws=14, is_paced=automatic, deliverable=[None] * deliverable)
    engine = SimpleNamespace(_unsent=unsent, schedule=schedule)
    assert Engine._may_wait(engine) is waits


@pytest.mark.parametrize(
    ("changes", "says"), [("batch_size", "batch_size of the BatchSampler is 3, and was 2"), ("indices", "and gave ")]
)
def test_a_sampler_that_is_changed_after_it_was_read_ahead_is_an_error(depth_of, changes, says):
    depth_of(24)
    sampler = SubsetRandomSampler([*range(200)], generator=torch.Generator().manual_seed(0))
    loader = DataLoader(Calls(torch.tensor, 400), batch_size=2, sampler=sampler, num_workers=2, timeout=HANG_LIMIT)
    assert torch.cat([*loader]).sort().values.tolist() == [*range(200)]
    iterator = iter(loader)
    for _ in range(20):
        next(iterator)
    if changes == "batch_size":
        loader.batch_sampler.batch_size = 3
    else:
        sampler.indices[:] = [index + 200 for index in sampler.indices]
    for _ in range(2):  # it is over, and each call says so
        with pytest.raises(RayloaderError, match=f"the sampler was changed during the epoch.*{says}"):
            next(iterator)
    assert len(torch.cat([*loader])) == 200


def test_a_slow_batch_withholds_none_before_it(tmp_path, depth_of):
    depths = depth_of(18)
    slow = 21
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == slow:
            gate.wait()
        return index

    iterator = iter(load(get, 60, num_workers=1, timeout=HANG_LIMIT))
    assert [next(iterator) for _ in range(slow)] == list(range(slow))
    gate.open()
    assert list(iterator) == list(range(slow, 60))
    assert max(depths) > 12


def test_a_slow_worker_withholds_none_before_its_batch(tmp_path, depth_of):
    depth_of(12)
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 31:
            gate.wait()
        return index

    iterator = iter(load(get, 80, num_workers=2))
    assert [next(iterator) for _ in range(31)] == list(range(31))
    gate.open()
    assert list(iterator) == list(range(31, 80))


def test_large_results_are_not_withheld_either(tmp_path, depth_of):
    depth_of(15)
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 13:
            gate.wait()
        return bytes([index]) * LARGE

    iterator = iter(load(get, 25, num_workers=1, arenas=False))
    assert [next(iterator)[0] for _ in range(13)] == list(range(13))
    gate.open()
    assert [batch[0] for batch in iterator] == list(range(13, 25))


def test_batches_of_any_size_come_from_the_deep(depth_of):
    depths = depth_of(21)
    shapes = [(int(n),) for n in np.random.default_rng(0).integers(0, 60_000, 90)]
    loader = load(lambda index: torch.full(shapes[index], index), 90, num_workers=2)
    for number, batch in enumerate(loader):
        assert batch.shape == shapes[number]
        assert (batch == number).all()
    assert number == 89
    assert max(depths) > 14


@pytest.mark.parametrize("where", [3, 9, 20])
def test_an_error_in_the_midst_arrives_in_its_turn(depth_of, where):
    depth_of(18)

    def get(index):
        if index == where:
            raise KeyError(where)
        return index

    iterator, seen = iter(load(get, 30, num_workers=2)), []
    for _ in range(30):
        try:
            seen.append(next(iterator))
        except KeyError:
            seen.append("error")
    assert seen == [*range(where), "error", *range(where + 1, 30)]
    with pytest.raises(StopIteration):
        next(iterator)


@oversubscribed
def test_streams_that_end_while_many_tasks_are_under_way(depth_of):
    depths = depth_of(12)
    lengths = [9, 30, 0]
    loader = DataLoader(Stream(lambda worker: range(100 * worker, 100 * worker + lengths[worker])), None, num_workers=3)
    for _ in range(3):
        batches = list(loader)
        assert sorted(batches) == [*range(9), *range(100, 130)]
        assert batches[:18:2] == list(range(9))
    assert max(depths) > 8


def test_prefetch_factor_is_a_strict_bound(tmp_path, depth_of):
    """Not one task more than torch would have submitted is built, however long one waits."""
    depths = depth_of(192)
    dataset, drawn = Calls(lambda index: index, 40), []

    class Counted(SequentialSampler):
        def __iter__(self):
            for index in super().__iter__():
                drawn.append(index)
                yield index

    loader = DataLoader(dataset, None, sampler=Counted(dataset), num_workers=1, prefetch_factor=6, collate_fn=as_is)
    for number, _ in enumerate(loader):
        assert len(drawn) == min(40, 6 + number + 1)
    assert max(depths) <= 6


def test_a_sampler_of_the_users_is_drawn_from_at_torchs_moments(depth_of):
    depth_of(192)
    drawn = []

    def indices():
        for index in range(50):
            drawn.append(index)
            yield index

    loader = DataLoader(Calls(lambda index: index, 50), None, sampler=indices(), num_workers=2, collate_fn=as_is)
    for number, _ in enumerate(loader):
        assert len(drawn) == min(50, 4 + number + 1)


def test_prefetch_bytes_bounds_what_is_under_way():
    dataset, under_way = Calls(lambda index: torch.zeros(1 << 17, dtype=torch.uint8), 200), []
    iterator = iter(DataLoader(dataset, None, num_workers=2, prefetch_bytes=1 << 20))
    for _ in range(200):
        next(iterator)
        under_way.append(len(tasks_of(iterator)))
    assert 4 <= max(under_way) <= 8


def noisy(_):
    return random.random(), torch.rand(1).item(), np.random.rand()


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("depth", [3, 15])
@pytest.mark.parametrize("taken", [1, pytest.param(6, marks=pytest.mark.full), 17])
def test_persistent_workers_go_on_from_where_torchs_would_be(depth_of, depth, taken, seeding):
    """The strict bound of `prefetch_factor=2` is torch's depth; the automatic one must not show.

    Seeding by batch does not reach the dataset's own generator: that goes on from what the worker has built.
    """

    def epochs(**options):
        torch.manual_seed(3)
        own = np.random.default_rng(5)
        loader = DataLoader(
            Calls(lambda index: (*noisy(index), own.random()), 30),
            None,
            num_workers=2,
            collate_fn=as_is,
            persistent_workers=True,
            seeding=seeding,
            **options,
        )
        found = []
        for _ in range(3):
            iterator = iter(loader)
            found.append([next(iterator) for _ in range(taken)])
        found.append(list(loader))
        return found

    expected = epochs(prefetch_factor=2)
    depths = depth_of(depth)
    assert epochs() == expected
    assert max(depths) <= depth


class SameArray:
    """A map-style dataset that returns one array again and again."""

    def __init__(self, numbers, length=100):
        self.array, self.length = np.zeros(numbers, np.int64), length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.array[:] = index
        return self.array


class SameTensor(SameArray):
    def __getitem__(self, index):
        return torch.from_numpy(super().__getitem__(index))


class SameBuffer(IterableDataset):
    """A stream that yields its output buffer, as readers do that spare themselves allocations."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        buffer = np.zeros(self.numbers, np.int64)
        for index in range(100):
            buffer[:] = index
            yield buffer


@pytest.mark.parametrize("arenas", [True, False])
@pytest.mark.parametrize("numbers", [2, 50_000])
@pytest.mark.parametrize("dataset", [SameArray, SameTensor, SameBuffer])
def test_a_result_is_final_when_its_task_ends(depth_of, dataset, numbers, arenas):
    """A dataset may write to what it returned as soon as it is asked for the next."""
    depths = depth_of(48)
    loader = DataLoader(dataset(numbers), None, num_workers=1, arenas=arenas)
    for number, batch in enumerate(loader):
        assert (batch == number).all()
    assert number == 99
    assert max(depths) > (32 if arenas else CALLS_AHEAD - 1)


def test_a_later_epoch_begins_as_deep_as_the_one_before_it_ended(monkeypatch):
    loader, submitted = DataLoader(range(4000), None, num_workers=1), []
    assert list(loader) == list(range(4000))
    give = Worker.give

    def noted(self, task):
        submitted.append(task)
        return give(self, task)

    monkeypatch.setattr(Worker, "give", noted)
    iterator = iter(loader)
    assert len(submitted) > 2  # torch's depth
    assert list(iterator) == list(range(4000))


def unknown_namespaces():
    raise MemoryFileError("as planned")


@pytest.mark.parametrize(
    ("namespaces", "persistent"),
    [
        pytest.param(unknown_namespaces, True, id="driver-persistent"),
        pytest.param(lambda: "another machine", False, id="worker"),
        pytest.param(unknown_namespaces, False, id="driver", marks=pytest.mark.full),
        pytest.param(lambda: "another machine", True, id="worker-persistent", marks=pytest.mark.full),
    ],
)
def test_where_no_line_is_possible_batches_come_by_ray_calls_and_that_is_said(
    namespaces, persistent, monkeypatch, caplog
):
    """The driver cannot make one, or the worker cannot connect."""
    monkeypatch.setattr("rayloader.transport.local_line._namespaces", namespaces)
    # Fresh processes: what is noted of an actor outlives this test.
    loader = DataLoader(range(60), None, num_workers=1, persistent_workers=persistent, fresh_processes=True)
    assert [list(loader) for _ in range(2)] == [list(range(60))] * 2
    told = [record.getMessage() for record in caplog.records if "by Ray calls" in record.getMessage()]
    assert len(told) == (1 if persistent else 2)  # once a process
