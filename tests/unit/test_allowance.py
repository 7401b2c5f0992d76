"""How much of a worker's work may be under way: the arithmetic, and the real schedule while its batches come."""

from __future__ import annotations

import math
import random

import pytest

from paces import StubPace
from rayloader.epoch.depth import GROWTH, Allowance
from rayloader.epoch.messages import (
    BatchTaken,
    DrawIndices,
    IndicesDrawn,
    Limited,
    Opened,
    SamplerExhausted,
    TaskDone,
    WorkerReady,
)
from rayloader.epoch.schedule import Schedule

PREFETCH_FACTOR = 2
MB = 1 << 20


def test_the_first_tasks_never_wait():
    allowance = Allowance(2, 0)
    assert allowance.allows(0)
    assert allowance.allows(1)
    assert not Allowance(2, -1).allows(2)
    allowance.answered(10 * MB)
    assert allowance.allows(0)
    assert not allowance.allows(1)
    allowance.answered(10 * MB)
    assert not allowance.allows(0)
    allowance.gone(10 * MB)
    assert allowance.allows(0)


def test_what_is_ready_counts_and_what_is_under_way_counts_as_growing():
    allowance = Allowance(1, 10 * MB)
    allowance.answered(MB)
    fitting = next(n for n in range(1, 99) if not allowance.allows(n))
    assert MB + fitting * GROWTH * MB <= 10 * MB < MB + (fitting + 1) * GROWTH * MB
    allowance.answered(7 * MB)
    assert not allowance.allows(1)


def test_no_more_than_so_many_are_unanswered():
    allowance = Allowance(2, MB, 1000)
    allowance.ahead = 5
    assert [allowance.allows(unanswered) for unanswered in (1, 4, 5)] == [True, True, False]


def test_before_any_size_is_known_only_the_first_tasks_are_given():
    assert not Allowance(2, MB).allows(2)
    assert Allowance(2, MB, 1000).allows(2)
    allowance = Allowance(2, MB)
    allowance.answered(0)
    assert allowance.allows(7)


def test_small_batches_after_a_large_one_are_allowed_again():
    allowance = Allowance(1, 10 * MB)
    allowance.answered(8 * MB)
    allowance.gone(8 * MB)
    assert not allowance.allows(1)
    for _ in range(1, 200):
        allowance.answered(1000)
        allowance.gone(1000)
    assert allowance.allows(1)


class Epoch:
    """An epoch of `length` batches, whose sizes are `size(task_id)`; workers build what they have, when asked to."""

    def __init__(
        self, num_workers: int, size, nbytes: float, *, depth: int, length: int = 1_000, dynamic=False
    ) -> None:
        paces = [StubPace(nbytes / num_workers, depth=depth, ahead=depth) for _ in range(num_workers)]
        self.schedule = Schedule(num_workers, PREFETCH_FACTOR, elastic=True, dynamic=dynamic, paces=paces)
        self.workers = range(num_workers)
        self.size, self.length, self.peak, self.got = size, length, 0, []
        for worker_id in self.workers:
            self.schedule.handle(WorkerReady(worker_id))
        self.schedule.handle(Opened())
        self.drawn = 0
        self.draw()

    def draw(self) -> None:
        while self.schedule.owed_draws:
            self.schedule.handle(IndicesDrawn(None) if self.drawn < self.length else SamplerExhausted())
            self.drawn += 1

    def untaken(self, worker_id: int) -> int:
        """Tasks of a worker that it was given and that were not taken."""
        ready = [task for task in self.schedule.untaken if task.worker_id == worker_id]
        return len(ready) + len(self.schedule.unanswered(worker_id))

    def build(self, worker_id: int) -> bool:
        """The worker builds one batch; False if it has been given none."""
        unanswered = self.schedule.unanswered(worker_id)
        if not unanswered:
            return False
        task_id = unanswered[0].task_id
        self.schedule.handle(TaskDone(task_id, nbytes=self.size(task_id)))
        self.peak = max(self.peak, sum(task.nbytes for task in self.schedule.untaken))
        return True

    def build_all(self) -> None:
        """While the consumer sleeps, until the workers are idle."""
        while [worker_id for worker_id in self.workers if self.build(worker_id)]:
            pass
        self.schedule.validate()

    def take(self) -> None:
        task_id = self.schedule.deliverable[0].task_id
        self.schedule.handle(BatchTaken(task_id))
        self.draw()
        self.got.append(task_id)


@pytest.mark.parametrize("dynamic", [False, True])
def test_while_the_consumer_sleeps_what_is_ready_stays_within_the_bytes(dynamic):
    epoch = Epoch(4, lambda task_id: MB, 32 * MB, depth=30, dynamic=dynamic)
    epoch.build_all()
    assert 16 * MB <= epoch.peak <= 32 * MB
    for _ in range(50):
        epoch.take()
        epoch.build_all()
    assert epoch.peak <= 32 * MB
    assert epoch.got == list(range(50))


@pytest.mark.parametrize("growth", [2, 5, 100])
def test_batches_that_grow_in_mid_epoch_stay_within_the_bytes(growth):
    """Beyond them there is at most what had been given before, and torch's own depth."""
    grow_from = 150
    epoch = Epoch(4, lambda task_id: MB * growth if task_id >= grow_from else MB, 64 * MB, depth=30)
    epoch.schedule.handle(Limited(16 * MB, 3))
    while len(epoch.got) < grow_from + 100:
        for worker_id in epoch.workers:
            epoch.build(worker_id)
        while epoch.schedule.deliverable and len(epoch.got) < grow_from - 50:
            epoch.take()
        if len(epoch.got) >= grow_from - 50:
            epoch.build_all()
            epoch.take()
    assert epoch.peak <= 64 * MB + 4 * 3 * growth * MB
    assert epoch.got == list(range(grow_from + 100))


def test_gradual_growth_stays_within_the_bytes():
    epoch = Epoch(4, lambda task_id: int(MB * 1.01**task_id), 32 * MB, depth=30)
    for _ in range(100):
        epoch.build_all()
        epoch.take()
    assert epoch.peak <= 32 * MB


def test_batches_larger_than_all_bytes_come_as_with_torch():
    epoch = Epoch(4, lambda task_id: 100 * MB, MB, depth=100)
    for _ in range(50):
        epoch.build_all()
        assert [epoch.untaken(worker_id) for worker_id in epoch.workers] == [PREFETCH_FACTOR] * 4
        epoch.take()
    assert epoch.got == list(range(50))


def test_small_batches_do_not_wait_at_all():
    epoch = Epoch(4, lambda task_id: 1000, 64 * MB, depth=100)
    for worker_id in epoch.workers:
        epoch.build(worker_id)
    assert [epoch.untaken(worker_id) for worker_id in epoch.workers] == [100] * 4, "none of them waits"
    epoch.build_all()
    assert len(epoch.schedule.tasks) == 400


def test_the_sizes_of_an_earlier_epoch_are_known_from_the_start():
    large, small = StubPace(5 * MB, nbytes=MB, depth=10), StubPace(5 * MB, nbytes=1000.0, depth=10)
    schedule = Schedule(2, PREFETCH_FACTOR, elastic=True, paces=[large, small])
    draws = schedule.handle(Opened())
    assert draws == [DrawIndices(4), DrawIndices(16)]
    for _ in range(20):
        schedule.handle(IndicesDrawn(None))
    for worker_id in range(2):
        schedule.handle(WorkerReady(worker_id))
    assert [len(schedule.unanswered(worker_id)) for worker_id in range(2)] == [2, 10]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dynamic", [False, True])
def test_whatever_the_sizes_and_the_order_of_events_every_batch_comes_in_its_turn(seed, dynamic):
    rng = random.Random(seed)
    sizes = [int(10 ** rng.uniform(0, 8)) for _ in range(200)]
    epoch = Epoch(3, sizes.__getitem__, 20 * MB, depth=20, length=200, dynamic=dynamic)
    while len(epoch.got) < 200:
        worker_id = rng.choice(epoch.workers)
        # The user keeps batches, or drops them.
        epoch.schedule.handle(Limited(rng.choice([0, MB, 20 * MB / 3]), rng.choice([2, 10, math.inf])))
        if rng.random() < 0.5 and epoch.schedule.deliverable:
            epoch.take()
        elif not epoch.build(worker_id):
            epoch.build_all()
            assert epoch.schedule.deliverable, "a standstill"
    assert epoch.got == list(range(200))
    assert epoch.schedule.finished or epoch.schedule.owed_draws
