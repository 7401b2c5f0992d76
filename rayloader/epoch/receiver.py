"""Waits for the workers' messages, over any channel, and handles them.

Promise: any thread may receive, one at a time. The loss of an actor is left to the user's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass

from rayloader.epoch.budget import most_ahead
from rayloader.epoch.messages import Paced, WorkerExhausted
from rayloader.epoch.opening import indices_of
from rayloader.epoch.recovery import Recovery
from rayloader.epoch.tables import Tables, changes
from rayloader.observe.spent import Spent
from rayloader.observe.stats import SlowBatch
from rayloader.protocol import ENDS, Answer, Result, ResultKind, Up, result_of
from rayloader.resume.position import Position
from rayloader.resume.snapshot import WorkerState
from rayloader.transport.lanes import received
from rayloader.workers.actor import Actor
from rayloader.workers.channel import ActorLost, LineRefused, Message
from rayloader.workers.worker_slot import Call, WorkerSlot

logger = logging.getLogger("rayloader")

# For how many seconds at most a thread waits before it looks at what nothing wakes it for: a worker that is dead may be
# the one whose batch is next, and the epoch may have ended meanwhile.
TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Lost:
    """An actor that will not answer any more."""

    actor: Actor
    cause: str
    suspect: int | None = None  # the task that ended it, if the actor reported it


class Receiver:
    """The receiver of one epoch.

    Args:
        tables: of the epoch.
        recovery: continues with workers that rebuild batches.
        position: counts the skipped samples.
        max_skipped: how many samples may be skipped.

    Attributes:
        lost: lost actors, for the user's thread.
        last_arrival: when something came last, time.monotonic().
        waited: seconds of the last `wait` in which nothing came.
    """

    def __init__(self, tables: Tables, recovery: Recovery, position: Position, max_skipped: int) -> None:
        self.tables = tables
        self._recovery = recovery
        self._position = position
        self._max_skipped = max_skipped
        self._doubted = False  # whether the warning about a batch of a trusted dataset was logged
        self.lost: deque[Lost] = deque()
        self.last_arrival = 0.0
        self.waited = 0.0

    def wait(self, timeout: float, *, ahead: bool = False) -> bool:
        """Waits for `timeout` seconds at most until something has come, and handles it; returns whether something has.

        Args:
            timeout: in seconds.
            ahead: the caller is a thread that no signal handler interrupts, and the user's must not wait while it
                reads.
        """
        self.tables.flush()
        began = time.perf_counter()
        came = self.tables.crew.wait(timeout)
        self.waited = time.perf_counter() - began
        if came and ahead:
            self.tables.crew.read()
        self.take(all_channels=not came, was_read=came and ahead)
        return came

    @changes
    def take(self, *, all_channels: bool = True, was_read: bool = False) -> None:
        """Handles what has come, except for the loss of actors. The arguments are those of `Crew.receive`."""
        crew = self.tables.crew
        arrived = crew.receive(all_channels=all_channels, was_read=was_read)
        if arrived:
            self.last_arrival = time.monotonic()
        for actor, message in arrived:
            if isinstance(message, ActorLost):
                self.lost.append(Lost(message.actor, str(message)))
            elif isinstance(message, LineRefused):
                self._recovery.have_moved(crew.fall_back(actor, str(message)))
                self._recovery.revive()
            else:
                self._take_message(actor, message)

    def _take_message(self, actor: Actor, message: Message) -> None:
        kind, worker_id, number, content = message
        slot = self.tables.slots[worker_id]
        if kind == Up.BEGUN:
            if not slot.journal.begun and slot.journal.resumed == (actor, number):
                slot.journal.reached_begin(WorkerState(*content))
            return
        call = slot.calls[0] if slot.calls else None
        if call is None or call.actor is not actor or call.number != number:
            return  # the epoch was closed or the worker was abandoned, so a late answer is ignored
        self._take_answer(slot, call, Answer(*content))

    def _take_answer(self, slot: WorkerSlot, call: Call, answer: Answer) -> None:
        result = None if answer.result is None else result_of(answer.result)
        if result is not None and result.kind in ENDS:
            suspect = result.task_id if result.kind == ResultKind.EXITED else None
            self.lost.append(Lost(call.actor, result.text, suspect))
            return
        if result is not None and result.task_id in self.tables.unanswered:
            self._take_result(slot, result, call, answer)
        if answer.state is not None:
            slot.journal.reached(WorkerState(*answer.state))
        slot.calls.popleft()
        if answer.doubt is not None and not self._doubted:
            self._doubted = True
            logger.warning(
                "rayloader: batch %d of worker %d was rebuilt and differs from the original. It is accepted, because "
                "its dataset has state_dict(); if that leaves something out, such as a shuffle buffer, samples are "
                "lost or repeated from here on. If the batch only shows the time or the process, nothing is wrong",
                *(answer.doubt, slot.worker_id),
            )
        if answer.full:
            call.actor.lane.was_full()
        if answer.no_arena:
            call.actor.lane.refused(answer.no_arena)
        if result is None:
            self._recovery.go_on(slot, *answer.replay)
        elif result.kind == ResultKind.EXHAUSTED:  # it writes nothing any more, and has nothing new to report
            slot.drop_calls()
            slot.journal.exhausted()
        elif (pace := slot.pace) is not None:
            if pace.saw(answer.seconds, result.nbytes):
                self.tables.handle(Paced(slot.worker_id, pace.depth, pace.ahead))
            if slot.allowance is not None:
                slot.allowance.ahead = most_ahead(self.tables.crew.ways, pace.ahead)
        self.tables.feed(slot)

    def _record(self, slot: WorkerSlot, call: Call, task_id: int, answer: Answer) -> None:
        """Lets the tally count what the worker did."""
        tally = self.tables.tally
        worker, log = tally.workers[slot.worker_id], tally.answers
        log.append(answer.spent)
        if not worker.settled:
            log[-1] = tally.settle(worker, answer.spent)
        if len(slot.calls) > worker.depth:
            worker.depth = len(slot.calls)
        if (call.lent is not None) is not worker.arena:
            worker.arena = call.lent is not None
            worker.lane = self.tables.crew.lane(call.actor)
        if answer.seconds > tally.slow:
            self._name(call, task_id, worker.lane, Spent.unpack(answer.spent))
        if len(log) >= tally.fold_at:
            tally.fold_answers()

    def _name(self, call: Call, task_id: int, lane: str, spent: Spent) -> None:
        """Notes a batch that may be one of the slowest, or is traced, with its indices."""
        task, tally = self.tables.schedule.task(task_id), self.tables.tally
        indices = "" if task is None else indices_of(task, at_most=64)
        tally.note_slow(SlowBatch(task_id, int(spent.worker_id), spent.build, indices))
        if (trace := tally.trace) is not None:
            trace.built(call.actor.created_at, lane.startswith("line"), task_id, indices, spent)

    def _take_result(self, slot: WorkerSlot, result: Result, call: Call, answer: Answer) -> None:
        """Reports a result to the schedule."""
        tables = self.tables
        if result.kind == ResultKind.EXHAUSTED:
            tables.tally.skipped += len(result.skipped)
            self._position.skip(result.skipped, self._max_skipped)
            tables.handle(WorkerExhausted(result.task_id))
            return
        self._record(slot, call, result.task_id, answer)
        lent = call.lent
        if result.wire is not None and lent is not None:
            result.wire = received(result.wire, lent)
        slot.journal.answered(result.task_id, result.digest)
        tables.answered(slot, result)
