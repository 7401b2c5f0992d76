"""Many tasks under way: nothing finished is withheld, and `prefetch_factor` is a strict bound."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from latches import HANG_LIMIT, Gate, Mail
from probes import Calls, Stream, as_is, load, oversubscribed
from rayloader import DataLoader
from rayloader.transport.memory_file import MemoryFileError

# Bytes of a batch that does not fit into a socket's buffer.
LARGE = 2 << 20

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.parametrize("arenas", [False, True])
def test_a_dataset_may_wait_for_the_trainer(tmp_path, arenas):
    """Batch i is built only when batch i - 1 was taken: as a replay buffer does it, or a live stream."""
    gates = [Gate(tmp_path / str(number)) for number in range(40)]

    def get(index):
        if index:
            gates[index - 1].wait()
        return torch.full((2000,), index)

    for number, batch in enumerate(load(get, 40, num_workers=1, prefetch_factor=24, arenas=arenas, timeout=HANG_LIMIT)):
        assert batch.unique().item() == number
        gates[number].open()
    assert number == 39


def test_tasks_that_torchs_worker_would_have_been_told_are_sent_at_once(tmp_path):
    """The trainer waits for the worker to begin them, however many batches there are to take."""
    mail, begun = Mail(tmp_path / "mail"), set()

    def get(index):
        mail.send(index)
        return index

    for number, _ in enumerate(load(get, 80, num_workers=1)):
        while min(number + 2, 79) not in begun:
            begun.update(map(int, mail.receive()))


def test_a_slow_batch_withholds_none_before_it(tmp_path):
    slow = 21
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == slow:
            gate.wait()
        return index

    iterator = iter(load(get, 60, num_workers=1, prefetch_factor=18, timeout=HANG_LIMIT))
    assert [next(iterator) for _ in range(slow)] == list(range(slow))
    gate.open()
    assert list(iterator) == list(range(slow, 60))


def test_a_slow_worker_withholds_none_before_its_batch(tmp_path):
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 31:
            gate.wait()
        return index

    iterator = iter(load(get, 80, num_workers=2, prefetch_factor=12))
    assert [next(iterator) for _ in range(31)] == list(range(31))
    gate.open()
    assert list(iterator) == list(range(31, 80))


def test_large_results_are_not_withheld_either(tmp_path):
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 13:
            gate.wait()
        return bytes([index]) * LARGE

    iterator = iter(load(get, 25, num_workers=1, prefetch_factor=15, arenas=False))
    assert [next(iterator)[0] for _ in range(13)] == list(range(13))
    gate.open()
    assert [batch[0] for batch in iterator] == list(range(13, 25))


def test_batches_of_any_size_come_from_the_deep():
    shapes = [(int(n),) for n in np.random.default_rng(0).integers(0, 60_000, 90)]
    loader = load(lambda index: torch.full(shapes[index], index), 90, num_workers=2, prefetch_factor=21)
    for number, batch in enumerate(loader):
        assert batch.shape == shapes[number]
        assert (batch == number).all()
    assert number == 89


@pytest.mark.parametrize("where", [3, 9, 20])
def test_an_error_in_the_midst_arrives_in_its_turn(where):
    def get(index):
        if index == where:
            raise KeyError(where)
        return index

    iterator, seen = iter(load(get, 30, num_workers=2, prefetch_factor=18)), []
    for _ in range(30):
        try:
            seen.append(next(iterator))
        except KeyError:
            seen.append("error")
    assert seen == [*range(where), "error", *range(where + 1, 30)]
    with pytest.raises(StopIteration):
        next(iterator)


@oversubscribed
def test_streams_that_end_while_many_tasks_are_under_way():
    lengths = [9, 30, 0]
    loader = DataLoader(
        Stream(lambda worker: range(100 * worker, 100 * worker + lengths[worker])),
        None,
        num_workers=3,
        prefetch_factor=12,
    )
    for _ in range(3):
        batches = list(loader)
        assert sorted(batches) == [*range(9), *range(100, 130)]
        assert batches[:18:2] == list(range(9))


def test_prefetch_factor_is_a_strict_bound(tmp_path):
    """Not one task more than torch would have submitted is built, however long one waits."""
    dataset, drawn = Calls(lambda index: index, 40), []

    class Counted(SequentialSampler):
        def __iter__(self):
            for index in super().__iter__():
                drawn.append(index)
                yield index

    loader = DataLoader(dataset, None, sampler=Counted(dataset), num_workers=1, prefetch_factor=6, collate_fn=as_is)
    for number, _ in enumerate(loader):
        assert len(drawn) == min(40, 6 + number + 1)


def test_a_sampler_of_the_users_is_drawn_from_at_torchs_moments():
    drawn = []

    def indices():
        for index in range(50):
            drawn.append(index)
            yield index

    loader = DataLoader(Calls(lambda index: index, 50), None, sampler=indices(), num_workers=2, collate_fn=as_is)
    for number, _ in enumerate(loader):
        assert len(drawn) == min(50, 4 + number + 1)


def noisy(_):
    return random.random(), torch.rand(1).item(), np.random.rand()


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("taken", [1, pytest.param(6, marks=pytest.mark.full), 17])
def test_persistent_workers_go_on_from_where_torchs_would_be(taken, seeding):
    """They have built what torch's would have been given by the end of an epoch that was broken off, and no more.

    Seeding by batch does not reach the dataset's own generator: that goes on from what the worker has built.
    """
    torch.manual_seed(3)
    dataset = Calls(lambda index: (*noisy(index), own.random()), 30)
    own = np.random.default_rng(5)
    loader = DataLoader(
        dataset, None, num_workers=2, collate_fn=as_is, persistent_workers=True, seeding=seeding, prefetch_factor=2
    )
    expected, numbers = [np.random.default_rng(5) for _ in range(2)], []
    for _ in range(3):
        iterator = iter(loader)
        numbers.append([next(iterator)[-1] for _ in range(taken)])
        built = [
            [generator.random() for _ in range(len(range(worker, min(30, taken + 4), 2)))]
            for worker, generator in enumerate(expected)
        ]
        assert numbers[-1] == [built[step % 2][step // 2] for step in range(taken)]


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
def test_a_result_is_final_when_its_task_ends(dataset, numbers, arenas):
    """A dataset may write to what it returned as soon as it is asked for the next."""
    loader = DataLoader(dataset(numbers), None, num_workers=1, prefetch_factor=48, arenas=arenas)
    for number, batch in enumerate(loader):
        assert (batch == number).all()
    assert number == 99


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
    monkeypatch.setattr("rayloader.transport.line._namespaces", namespaces)
    # Fresh processes: what is noted of an actor outlives this test.
    loader = DataLoader(range(60), None, num_workers=1, persistent_workers=persistent, fresh_processes=True)
    assert [list(loader) for _ in range(2)] == [list(range(60))] * 2
    told = [record.getMessage() for record in caplog.records if "by Ray calls" in record.getMessage()]
    assert len(told) == (1 if persistent else 2)  # once a process
