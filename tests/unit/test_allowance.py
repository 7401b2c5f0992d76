"""How much of a worker's work may be under way: the arithmetic, with the real schedule and tables."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest

from rayloader.epoch import budget as module
from rayloader.epoch.budget import CALLS_AHEAD, TASKS_AHEAD, Budget
from rayloader.epoch.messages import IndicesDrawn, Opened, Paced, SamplerExhausted
from rayloader.epoch.schedule import Schedule
from rayloader.epoch.tables import Tables
from rayloader.protocol import Result, ResultKind
from rayloader.resume.journal import Journal
from rayloader.workers.allowance import GROWTH, Allowance
from rayloader.workers.worker_slot import WorkerSlot

PREFETCH_FACTOR = 2
MB = 1 << 20


def test_the_first_tasks_never_wait():
    allowance = Allowance(2, 0)
    assert allowance.allows(0)
    assert allowance.allows(1)
    assert not Allowance(2, -1).allows(2)
    allowance.answered(0, 10 * MB)
    assert allowance.allows(0)
    assert not allowance.allows(1)
    allowance.answered(1, 10 * MB)
    assert not allowance.allows(0)
    allowance.gone(0)
    assert allowance.allows(0)


def test_what_is_ready_counts_and_what_is_under_way_counts_as_growing():
    allowance = Allowance(1, 10 * MB)
    allowance.answered(0, MB)
    fitting = next(n for n in range(1, 99) if not allowance.allows(n))
    assert MB + fitting * GROWTH * MB <= 10 * MB < MB + (fitting + 1) * GROWTH * MB
    allowance.answered(1, 7 * MB)
    assert not allowance.allows(1)


def test_no_more_than_so_many_are_unanswered():
    allowance = Allowance(2, MB, 1000)
    allowance.ahead = 5
    assert [allowance.allows(unanswered) for unanswered in (1, 4, 5)] == [True, True, False]


def test_before_any_size_is_known_only_the_first_tasks_are_given():
    assert not Allowance(2, MB).allows(2)
    assert Allowance(2, MB, 1000).allows(2)
    allowance = Allowance(2, MB)
    allowance.answered(0, 0)
    assert allowance.allows(7)


def test_small_batches_after_a_large_one_are_allowed_again():
    allowance = Allowance(1, 10 * MB)
    allowance.answered(0, 8 * MB)
    allowance.gone(0)
    assert not allowance.allows(1)
    for number in range(1, 200):
        allowance.answered(number, 1000)
        allowance.gone(number)
    assert allowance.allows(1)


def test_telling_it_twice_does_no_harm():
    allowance = Allowance(1, 10 * MB)
    for _ in range(3):
        allowance.answered(0, MB)
        allowance.answered(1, MB)
        allowance.gone(1)
    assert allowance.allows(1)
    allowance.gone(0)
    allowance.gone(0)
    assert allowance._ready_bytes == 0


class Crew:
    """Workers that build what they were told when they are asked to, in order."""

    def __init__(self, num_workers: int) -> None:
        host = SimpleNamespace(calls=0)
        setup: object = None
        self.slots = [WorkerSlot(n, setup, Journal(), host, away=False) for n in range(num_workers)]
        self.awaited: list[object] = []

    def check_session(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def run(self, slot, told) -> None:
        slot.host.calls += 1


class Epoch:
    """The schedule and the tables of an epoch of `length` batches, whose sizes are `size(task_id)`."""

    def __init__(
        self, num_workers: int, size, budget: float, *, depth: int, length: int = 1_000, dynamic=False
    ) -> None:
        self.crew = Crew(num_workers)
        self.schedule = Schedule(num_workers, PREFETCH_FACTOR, elastic=True, dynamic=dynamic)
        self.tables = Tables(self.crew, self.schedule, threading.RLock(), SimpleNamespace())
        for slot in self.crew.slots:
            slot.allowance = Allowance(PREFETCH_FACTOR, budget / num_workers)
        self.size, self.length, self.drawn, self.peak, self.got = size, length, 0, 0, []
        self.tables.handle(Opened())
        self.tables.handle(Paced(0, depth, depth))
        self.draw()

    def draw(self) -> None:
        while self.schedule.owed_draws:
            self.tables.handle(
                IndicesDrawn(SimpleNamespace(encoded=None)) if self.drawn < self.length else SamplerExhausted()
            )
            self.drawn += 1

    @property
    def ready_bytes(self) -> int:
        ready = [*self.tables.results.values(), *(result for _, result in self.tables.deliverable)]
        return sum(result.nbytes for result in ready)

    @property
    def untaken(self) -> dict[int, int]:
        tasks = [task.worker_id for task in self.schedule.tasks if not task.is_anybodys]
        waiting = {slot.worker_id: len(slot.waiting) for slot in self.crew.slots}
        return {worker_id: tasks.count(worker_id) - waiting[worker_id] for worker_id in waiting}

    def build(self, slot) -> bool:
        """The worker builds one batch; False if it has been told none."""
        if not slot.calls:
            return False
        task_id = slot.calls[0].task_id
        self.tables.answered(slot, Result(task_id, ResultKind.BATCH, nbytes=self.size(task_id)))
        slot.calls.popleft()
        self.tables.feed(slot)
        self.peak = max(self.peak, self.ready_bytes)
        return True

    def build_all(self) -> None:
        """While the consumer sleeps, until the workers are idle."""
        while [slot for slot in self.crew.slots if self.build(slot)]:
            pass
        self.schedule.validate()

    def take(self) -> int:
        task, _ = self.tables.deliverable.popleft()
        self.tables.taken(task)
        self.draw()
        self.got.append(task.task_id)
        return task.task_id


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
    """Beyond them there is at most what had been told before, and torch's own depth."""
    grow_from = 150
    epoch = Epoch(4, lambda task_id: MB * growth if task_id >= grow_from else MB, 64 * MB, depth=30)
    for slot in epoch.crew.slots:
        slot.allowance.ahead = 3
    while len(epoch.got) < grow_from + 100:
        for slot in epoch.crew.slots:
            epoch.build(slot)
        while epoch.tables.deliverable and len(epoch.got) < grow_from - 50:
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
        assert set(epoch.untaken.values()) <= {PREFETCH_FACTOR}
        epoch.take()
    assert epoch.got == list(range(50))


def test_small_batches_do_not_wait_at_all():
    epoch = Epoch(4, lambda task_id: 1000, 64 * MB, depth=100)
    for slot in epoch.crew.slots:
        epoch.build(slot)
    assert not [slot for slot in epoch.crew.slots if slot.waiting]
    epoch.build_all()
    assert len(epoch.schedule.tasks) == 400


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dynamic", [False, True])
def test_whatever_the_sizes_and_the_order_of_events_every_batch_comes_in_its_turn(seed, dynamic):
    rng = random.Random(seed)
    sizes = [int(10 ** rng.uniform(0, 8)) for _ in range(200)]
    epoch = Epoch(3, sizes.__getitem__, 20 * MB, depth=20, length=200, dynamic=dynamic)
    while len(epoch.got) < 200:
        slot = rng.choice(epoch.crew.slots)
        slot.allowance.nbytes = rng.choice([0, MB, 20 * MB / 3])  # the user keeps batches, or drops them
        slot.allowance.ahead = rng.choice([2, 10, float("inf")])
        if rng.random() < 0.5 and epoch.tables.deliverable:
            epoch.take()
        elif not epoch.build(slot):
            epoch.build_all()
            assert epoch.tables.deliverable, "a standstill"
    assert epoch.got == list(range(200))
    assert epoch.schedule.finished or epoch.schedule.owed_draws


def budget_of(
    nbytes, pace_bytes=(0.0, 0.0), *, held=lambda: 0, copies=False, reaches_far=False, paced=True, nodes=("one", "one")
):
    """Of two workers; the second has two tasks to answer."""
    slots = [
        SimpleNamespace(
            worker_id=n,
            pace=SimpleNamespace(nbytes=pace_bytes[n]) if paced else None,
            allowance=None,
            unanswered=2 * n,
            node=node,
        )
        for n, node in enumerate(nodes)
    ]
    crew = SimpleNamespace(
        slots=slots,
        ways=SimpleNamespace(copies=copies, reaches_far=reaches_far),
        address=lambda slot: SimpleNamespace(node_id=slot.node, hostname="host"),
    )
    tables = SimpleNamespace(
        crew=crew,
        slots=slots,
        deliverable=[],
        results={},
        schedule=SimpleNamespace(is_paced=paced, task=lambda task_id: SimpleNamespace(worker_id=task_id % 2)),
    )
    budget = Budget(tables, nbytes, PREFETCH_FACTOR, held)
    return budget, [slot.allowance for slot in slots], tables


def test_every_worker_has_a_share_and_knows_the_sizes_of_the_epoch_before():
    _, (one, two), _ = budget_of(10 * MB, (MB, 1000.0))
    assert (one.nbytes, two.nbytes) == (5 * MB, 5 * MB)
    assert not one.allows(3)
    assert two.allows(3)
    for far, most in (({"copies": True}, CALLS_AHEAD), ({"reaches_far": True}, TASKS_AHEAD)):
        _, (one, _), _ = budget_of(10 * MB, (1.0, 1.0), **far)
        assert one.allows(most - 1)
        assert not one.allows(most)
    _, (near, _), _ = budget_of(10 * MB, (1.0, 1.0))
    assert near.allows(100)


def test_where_the_depth_is_the_users_there_are_no_allowances():
    budget, allowances, _ = budget_of(10 * MB, paced=False)
    budget.gave(MB)
    assert allowances == [None, None]


@pytest.fixture
def silent(monkeypatch):
    """As if nothing had been said so far."""
    monkeypatch.setattr(module, "_told", False)


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("nodes", "holder"),
    [(("one", "one"), "6 MB, is of worker 1"), (("one", "two"), "6 MB, is of the workers of node two (host)")],
)
def test_where_the_depth_is_the_users_it_is_said_once_who_holds_more_than_was_agreed(nodes, holder, caplog):
    held = [3 * MB]
    budget, _, tables = budget_of(20 * MB, paced=False, held=lambda: held[0], nodes=nodes)
    tables.deliverable = [(SimpleNamespace(worker_id=0), Result(4, ResultKind.BATCH, nbytes=5 * MB))]
    tables.results = {7: Result(7, ResultKind.BATCH, nbytes=2 * MB)}  # of the second worker
    budget.gave(2 * MB)
    assert not caplog.records, "14 MB in all are less than was agreed"
    held[0] = 9 * MB
    for _ in range(2):
        budget.gave(2 * MB)
    (record,) = caplog.records
    assert "keeps 9 MB of batches, 7 MB are ready, and about 4 MB are under way" in record.getMessage()
    assert holder in record.getMessage()
    assert "as prefetch_factor says" in record.getMessage()


@pytest.mark.usefixtures("silent")
def test_what_the_program_keeps_is_taken_off_and_given_back(caplog):
    held = [4 * MB]
    budget, (one, two), tables = budget_of(10 * MB, held=lambda: held[0])
    tables.results = {0: Result(0, ResultKind.BATCH, nbytes=2 * MB)}
    budget.gave(1000)
    assert one.nbytes == 5 * MB, "it is not looked at each batch"
    budget.gave(MB)
    assert one.nbytes == two.nbytes == 3 * MB
    for kept in (10 * MB, 28 * MB):
        held[0] = kept
        budget.gave(MB)
        assert one.nbytes == 0
    (record,) = caplog.records
    assert "keeps 10 MB of batches, 2 MB are ready, and about 2 MB are under way" in record.getMessage()
    held[0] = 0
    budget.gave(MB)
    assert one.nbytes == 5 * MB
