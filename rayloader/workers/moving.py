"""What the thread `rayloader-takeover` does: starts actors, and lets them rebuild batches of forks, to compare them.

Promise: that of takeover.py.
"""

from __future__ import annotations

import functools
import os
import pickle
import time
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from rayloader.protocol import Answer
from rayloader.replica.image import Image
from rayloader.start import session
from rayloader.task import Task
from rayloader.workers.actor import Actor, RayAnswer
from rayloader.workers.actors import Actors, Inherited
from rayloader.workers.connection import NONE_YET, Mailbox, ProcessLost
from rayloader.workers.process import NeverStarts
from rayloader.workers.ray_channels import RayCalls
from rayloader.workers.takeover import Ended, Stays, Takeover
from rayloader.workers.worker import Worker


def move(actors: Actors, takeover: Takeover, workers: list[Worker], count: int) -> None:
    """Brings actors to where they can take over, and offers them.

    Args:
        actors: of the same loader; none of them is lent.
        takeover: of the fleet.
        workers: of the fleet.
        count: of the actors.

    Raises:
        Ended: the fleet has ended meanwhile.
        Stays: actors do not build the same batches.
    """
    offered = False
    try:
        # Those of a fleet that ends while they start would be ended too, and the next one would start others.
        takeover.until(lambda: actors.are_ready(count))
        lent = actors.lend(count, fresh=False)
        actors.inherited = _inherited(takeover)
        takeover.until(lambda: all(map(_has_started, lent)))
        takeover.until(functools.partial(_can_be_proved, takeover, workers))
        seconds = 0.0
        for number, worker in enumerate(workers):
            seconds = max(seconds, _proved(takeover, actors, lent[number % count], worker))
        for actor in lent:
            if left_behind := _answer(takeover, actor.handle.stop.remote()):
                raise Stays(f"it leaves something behind in its processes: {left_behind}")
        offered = takeover.offer(actors, lent, seconds)
    finally:
        if not offered:
            actors.release(busy=True, reuse=True)


def _has_started(actor: Actor) -> bool:
    try:
        return actor.has_started()
    except NeverStarts as error:
        raise Stays(f"an actor could not be started: {error}") from error


def _inherited(takeover: Takeover) -> Inherited:
    """What actors need of what the forks have."""
    takeover.zygote.prepare()

    def prepared() -> tuple[Any, list[int]] | None:
        found = takeover.zygote.prepared()
        if found is None and not takeover.zygote.lives:
            raise Ended
        return found

    error, descriptors = takeover.until(prepared)
    if error:
        raise Stays(error)
    with os.fdopen(descriptors[0], "rb") as file:
        file.seek(0)
        process, image = pickle.load(file)
    process = replace(process, node_id=session.node_id())
    return Inherited(process, Image.received(image, descriptors[1:]), [])


def _can_be_proved(takeover: Takeover, workers: list[Worker]) -> bool:
    """Whether the workers have begun their epoch, and one has built a batch since its last snapshot."""
    with takeover.lock:
        return all(worker.journal.begun for worker in workers) and any(map(_known, workers))


def _known(worker: Worker) -> list[Task]:
    """The batches that a worker has built since its last snapshot, if nothing else has happened to it since then."""
    entries = worker.journal.entries
    tasks = [entry for entry in entries if isinstance(entry, Task)]
    return [] if len(tasks) < len(entries) else [task for task in tasks if task.digest is not None]


def _proved(takeover: Takeover, actors: Actors, actor: Actor, worker: Worker) -> float:
    """Lets an actor rebuild a worker's last batches, if it has built some; returns how long that took, in seconds.

    Raises:
        Ended: the fleet has ended meanwhile.
        Stays: it has built something else than the fork.
    """
    began = time.monotonic()
    mailbox = Mailbox()
    there = Worker(worker.setup, worker.journal, actor, mailbox)
    mailbox.add(RayCalls(actor, mailbox))
    source = actors.sources([actor])(actor)
    with takeover.lock:
        state, tasks = worker.journal.state, _known(worker)
        if state is not None and state.error:
            raise Stays(f"its state could not be saved: {state.error}")
        if not tasks:
            return 0.0
        there.begin(source)
    done, total = 0, 1
    while done < total:
        there.rebuild(tasks)
        ((_, message),) = takeover.until(functools.partial(mailbox.receive, all_channels=True, was_read=False))
        if isinstance(message, ProcessLost):
            raise Stays(f"an actor was lost: {message}")
        answer = Answer(*message[3])
        if answer.result is not None:
            raise Stays("a batch that an actor was to build again has ended its process")
        (done, total), tasks = answer.replay, []
    if failure := _answer(takeover, actor.handle.failure.remote(worker.worker_id)):
        raise Stays(failure.strip().splitlines()[-1])  # of a traceback, the error
    there.leave()
    return time.monotonic() - began


def _answer(takeover: Takeover, ref: Any) -> Any:
    """Waits for the answer to a call; nothing waits in Ray, whose shutdown would not end that."""
    answer = RayAnswer(ref)
    takeover.until(lambda: answer.value is not NONE_YET)
    if isinstance(answer.value, RayError):
        raise Stays(f"an actor was lost: {answer.value}")
    return answer.value
