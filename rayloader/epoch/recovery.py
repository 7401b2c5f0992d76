"""Continues an epoch after the loss of a process: what is lost, what is to blame, and what is rebuilt.

Promise: a worker's tasks move with it to its next process, in order; batches that the driver already has are rebuilt
there for their effect on the worker. See NOTE [Proof] in journal.py and NOTE [blame] in schedule.py.
"""

from __future__ import annotations

import logging
import time

from rayloader.epoch.messages import WorkerLost, WorkerReady
from rayloader.epoch.tables import Tables, changes
from rayloader.resume.journal import Resumed
from rayloader.workers.actor import Actor
from rayloader.workers.channel import ActorLost
from rayloader.workers.worker_slot import Replay, WorkerSlot

logger = logging.getLogger("rayloader")

# Rebuilding is reported after this many seconds, and again each time the elapsed time has doubled.
REPLAY_PATIENCE_S = 10.0


class Recovery:
    """The recovery of one epoch."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._crew = tables.crew

    @changes
    def give_up(self, actor: Actor, cause: str, suspect: int | None = None) -> None:
        """Continues without an actor, whose messages were all handled. `suspect`: the task that it said ended it."""
        if actor.lost:
            return
        slots = self._crew.moving.hosted_by(actor)
        # An actor carries out one call after the other.
        at_work = min((slot for slot in slots if slot.calls), key=_oldest_call, default=None)
        admitted = suspect is not None
        if suspect is None and at_work is not None and self._crew.has_begun(at_work):
            suspect = at_work.calls[0].task_id
        self._crew.moving.lose(actor)
        for slot in slots:
            slot.drop_calls()
            blameless = at_work not in (None, slot)
            if blameless:
                self.tables.handle(WorkerLost(slot.worker_id, cause, blameless=True))
            else:
                self.tables.handle(WorkerLost(slot.worker_id, cause, suspect, admitted))

    @changes
    def have_moved(self, slots: list[WorkerSlot]) -> None:
        """These workers will continue in other processes."""
        for slot in slots:
            slot.drop_calls()
            self.tables.handle(WorkerLost(slot.worker_id, "it moves to another process", blameless=True))

    @changes
    def revive(self) -> None:
        """Sends lost tasks again, if there is a process for them."""
        self.have_moved(self._crew.moving.spread())
        while self.tables.failure is None:
            try:
                ready = self._crew.revive()
            except ActorLost as lost:  # another one is lost
                self.give_up(lost.actor, str(lost))
                continue
            for slot in ready:
                self.tell_again(slot)
            break

    def tell_again(self, slot: WorkerSlot) -> None:
        """Brings a worker that was started from its last snapshot to its position."""
        entries, tasks = slot.journal.entries, slot.journal.tasks
        for entry in entries[: len(entries) - len(tasks)]:
            if isinstance(entry, Resumed):
                self._crew.resume(slot, entry)
            else:
                self._crew.replay(slot, [entry])
        known = [task for task in tasks if task.task_id not in self.tables.unanswered]
        slot.replay = Replay()
        self.tables.replay(slot, known)

    def go_on(self, slot: WorkerSlot, done: int, total: int) -> None:
        """The worker has rebuilt a part of its batches."""
        replay, now = slot.replay, time.monotonic()
        assert replay is not None
        if replay.began is None:  # the process runs by now, however long it took to start
            replay.began, replay.news_at, replay.first = now, now + REPLAY_PATIENCE_S, done
        if done < total:
            if now >= replay.news_at:
                seconds = now - replay.began
                replay.news_at = now + max(REPLAY_PATIENCE_S, seconds)
                logger.warning(
                    "rayloader: worker %d is rebuilding earlier batches: %d of %d in %.0f s, %.1f a second; a dataset "
                    "with state_dict() and load_state_dict() need not be read again",
                    *(slot.worker_id, done, total, seconds, (done - replay.first) / max(seconds, 1e-9)),
                )
            self.tables.replay(slot, [])
            return
        slot.replay = None
        self.tables.run_unanswered(slot)
        self.tables.handle(WorkerReady(slot.worker_id))

    @changes
    def move_homeless(self) -> bool:
        """Moves workers whose actor found no place to the other actors."""
        try:
            moved = self._crew.moving.check_started()
        except ActorLost as lost:
            self.give_up(lost.actor, str(lost))
            return True
        self.have_moved(moved)
        return bool(moved)

    @changes
    def tell_what_waits(self) -> None:
        """Workers that are still rebuilding are sent at once all that torch's have been given by now."""
        for slot in self._crew.slots:
            if slot.replay is not None:
                slot.replay = None
                self.tables.run_unanswered(slot)
        self._crew.flush()


def _oldest_call(slot: WorkerSlot) -> int:
    return slot.calls[0].number
