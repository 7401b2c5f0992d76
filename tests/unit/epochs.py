"""An epoch of the engine on the fake fleet, for tests: no Ray, no processes, and time that moves only in waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from fake_fleet import FakeFleet
from rayloader import DataLoader
from rayloader._compat import ExceptionWrapper
from rayloader.epoch.engine import LOOK_S, Engine
from rayloader.epoch.schedule import Schedule
from rayloader.gpu.to_device import PINNED_AHEAD, PinOrMove
from rayloader.observe.recorder import Tally
from rayloader.options import Options
from rayloader.resume.journal import Resumed
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.task import SkipSteps, TaskState
from schedule_rules import check_rules

OPTIONS = Options(
    prefetch_factor=2,
    in_order=True,
    timeout=0.0,
    seeding="worker",
    scheduling="static",
    max_worker_restarts=3,
    on_timeout="raise",
    on_error="raise",
    max_skipped=0,
    arenas=True,
    workers="auto",
    fresh_processes=False,
    ray_remote_args={},
    needs_actors=False,
)


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Workers put their own length in."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("only workers read it")


class Noting(Iterator[Any]):
    """A sampler's iterator; counts what was drawn."""

    def __init__(self, indices: Iterator[Any]) -> None:
        self.indices, self.count = indices, 0

    def __next__(self) -> Any:
        indices = next(self.indices)
        self.count += 1
        return indices


class Epoch:
    """An epoch of `length` batches, and what its user does.

    Args:
        before: the epoch before it, of the same workers.
        meanwhile: called at each moment between that one and this.
        schedule_class: of which its schedule is.
    """

    def __init__(
        self,
        num_workers: int = 2,
        length: int = 12,
        *,
        iterable: bool = False,
        sampler: Any = None,
        pin: Any = None,
        before: Epoch | None = None,
        forks: bool = False,
        skips: tuple[int, ...] = (),
        meanwhile: Callable[[], object] = lambda: None,
        schedule_class: type[Schedule] = Schedule,
        **options: Any,
    ) -> None:
        self.options, self.before = dataclasses.replace(OPTIONS, **options), before
        self.got: list[Any] = []
        if before is None:
            self.loader = DataLoader(Endless() if iterable else range(length), 1)
            self.position = Position(Samplers(self.loader), 7, num_workers, iterable=iterable)
            self.position.begins(False)
            self.fleet = FakeFleet(num_workers, self.position.journals, forks=forks)
        else:
            self.loader, self.position, self.fleet = before.loader, before.position, before.fleet
        self.sampler = Noting(iter(self.loader._index_sampler) if sampler is None else sampler)
        if before is not None:
            self._follow(before, meanwhile)
        self.position.skips = SkipSteps([(self.position.epoch_of_run, step) for step in skips])
        self.schedule = schedule_class(
            num_workers,
            self.options.prefetch_factor,
            in_order=self.options.in_order,
            dynamic=self.options.dynamic,
            max_restarts=self.options.max_worker_restarts,
        )
        self.tally = Tally(num_workers, self.options.prefetch_factor)
        self.engine = Engine(
            self.fleet,  # type: ignore[arg-type]
            self.schedule,
            self.sampler,
            self.options,
            position=self.position,
            delivery=PinOrMove(pin, ahead=PINNED_AHEAD),
            tally=self.tally,
        )

    def _follow(self, before: Epoch, meanwhile: Callable[[], object]) -> None:
        """The workers of an epoch are told that another begins, as by `EpochIterator`."""
        before.engine.close(resuming=True)
        meanwhile()
        self.position.begins(True)
        for worker in self.fleet.workers:
            resumed = Resumed(self.position.begin.epoch, None)
            worker.journal.begins(resumed)
            if not worker.away:
                worker.resume(resumed)
        meanwhile()

    def open(self) -> Epoch:
        self.engine.open(fresh=self.before is None)
        return self

    def take(self) -> Any:
        """The next batch, as `EpochIterator` takes it; `StopIteration` after the last."""
        task = self.engine.next()
        if task is None:
            raise StopIteration
        batch, task.data = task.data, None
        self.position.handed = task
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()
        self.got.append(batch)
        return batch

    def take_all(self) -> list[Any]:
        while True:
            try:
                self.take()
            except StopIteration:
                return self.got

    def work(self, worker_id: int, count: int = 1) -> int:
        """A worker's process sends so many answers, which arrive."""
        sent = self.fleet.process(worker_id).work(count)
        self.hear()
        return sent

    def hear(self) -> None:
        """What was sent arrives."""
        self.engine._take()

    def await_one(self) -> None:
        """As `next` does while there is no batch."""
        self.engine._await(LOOK_S)

    def check(self) -> None:
        """What must hold at any time: the schedule's rules, and that the journals say what the schedule says."""
        check_rules(self.schedule)
        assert not self.engine.broken
        if self.schedule.closed or self.engine.failure is not None:
            return
        for worker in self.fleet.workers:
            owed = [
                task.task_id
                for task in self.schedule.tasks
                if task.worker_id == worker.worker_id and task.state in (TaskState.OUTSTANDING, TaskState.LOST)
            ]
            entries = worker.journal.tasks
            assert [task.task_id for task in entries if task.digest is None] == owed
            assert [task.task_id for task in entries] == sorted(task.task_id for task in entries)

    def close(self) -> None:
        """Twice, which does no harm, and wakes whoever waits."""
        rung = self.fleet.rung
        self.engine.close()
        self.engine.close()
        assert self.fleet.rung == rung + 2


def expected(length: int, num_workers: int = 2, *, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """The batches of an epoch that nothing disturbs; `first`: of each worker's random stream."""
    return [[n % num_workers, epoch, first + n // num_workers, n] for n in range(length)]
