"""The user's position as a part of a state: made of a `Position`, and one moved to where another one was.

Promise: the position continues where the other one was, or an error says that it cannot. Imported only where a state is
saved, or continued.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from dataclasses import replace
from typing import Any

from rayloader.errors import StateError
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.journal import Journal, may_be_stale
from rayloader.resume.position import DrawnAgain, Position
from rayloader.resume.ranks import iterator_of
from rayloader.resume.samplers import OwnState, Start
from rayloader.resume.snapshot import has_state, own_state_of
from rayloader.resume.state import (
    SavedPlace,
    SavedWorker,
    WorkerStart,
    as_saved,
)
from rayloader.task import Task
from rayloader.transport import codec


def _worker_of(journal: Journal, *, is_compared: bool) -> SavedWorker:
    """The worker with this journal; `is_compared`: its stream is read again from the start, and compared."""
    if not journal.begun:
        raise StateError("the iterator was dropped before its workers had reported their state; save while iterating")
    base, before = journal.base, journal.before
    if base is not None and base.error:
        raise StateError(f"a worker's dataset could not save its state:\n{base.error}")
    if is_compared and not may_be_stale(base):
        before = None
    to_rebuild = tuple([(task.task_id, task.digest) for task in journal.to_rebuild.values()])
    return SavedWorker(WorkerStart(base, before), journal.remembers, to_rebuild)  # type: ignore[arg-type]  # taken


def saved_place(position: Position) -> SavedPlace:
    """A position, for a state.

    Raises:
        StateError: it can't be saved.
    """
    position.settle()
    if position.error:
        raise StateError(f"the position in the epoch can't be saved: {position.error}")
    if errors := [start.own.error for start in position.begin.starts if start.own.error]:
        raise StateError(f"the sampler could not save its state:\n{errors[0]}")
    last = max(position._draws, position.next_task) - 1
    while last >= position.next_task and last not in position._checksums:
        last -= 1
    stream = position.stream
    if stream is not None and stream.iterator is not None:
        stream = replace(stream, state=stream.state or own_state_of(stream.iterator))
    return SavedPlace(
        position.begin,
        stream,
        tuple([_worker_of(journal, is_compared=position.iterable) for journal in position.journals]),
        tuple(sorted(position._ahead)),
        next_task=position.next_task,
        next_worker=position.next_worker,
        delivered=position.delivered,
        checksum=position.checksum,
        skipped=position.skipped,
        finished=position.finished,
        draws=position._draws,
        drawn=last + 1,
        drawn_checksum=position._checksums.get(last, position.checksum),
    )


def move_to(position: Position, saved: SavedPlace) -> Any:
    """Moves a position, of a new iterator, to where another one was.

    Returns:
        The sampler's iterator, from there on.

    Raises:
        StateError: the sampler does not reproduce its indices.
    """
    position.begin = saved.begin
    position.epoch_of_run += not saved.finished
    position.next_task, position.next_worker = saved.next_task, saved.next_worker
    position.delivered, position.skipped, position.finished = saved.delivered, saved.skipped, saved.finished
    position._ahead = dict.fromkeys(saved.ahead, saved.checksum)
    position.stateful = any(start.own != OwnState() for start in position.begin.starts)
    indices_of: dict[int, codec.Encoded | None] = {
        id_: None for worker in saved.workers for id_, _ in worker.to_rebuild
    }
    iterator = iter(()) if position.finished and not indices_of else _draw_again(position, saved, indices_of)
    for journal, worker in zip(position.journals, saved.workers, strict=True):
        base = worker.start.state
        if base is not None:  # later tasks come after what it has built, whatever their numbers
            base = base._replace(last_task=min(base.last_task, position.next_task - 1))
        # Without order a worker may be ahead of what was drawn again; then nothing depends on its earlier batches.
        known = [(task_id, indices_of[task_id], digest) for task_id, digest in worker.to_rebuild]
        again = [Task(number, Drawn(indices, 0), digest=digest) for number, indices, digest in known if indices]
        journal.starts_at(base, again)
        if worker.start.before is not None:
            journal.starts_before(worker.start.before)
    return iterator


def _draw_again(position: Position, saved: SavedPlace, indices_of: dict[int, codec.Encoded | None]) -> Any:
    """The sampler's iterator at the position; fills in the indices for the tasks in `indices_of`. See `samplers.py`."""
    known = (position.next_task, saved.checksum), (saved.drawn, saved.drawn_checksum)
    position._draws, position.checksum = saved.draws, saved.checksum
    for start in position.begin.starts:
        theirs = position.samplers.are_of_users  # what they raise is the user's to see
        with position.samplers.at(start.moment), contextlib.nullcontext() if theirs else as_saved():
            iterator = _iterator_at(position, start)
            if start.drawing is not None:
                position.samplers.move_to(start.drawing)
            if position.iterable:  # its indices carry no information, and are all the same
                indices_of.update(dict.fromkeys(indices_of, codec.encode(next(iterator)) if indices_of else None))
                return iterator
            given = iterator if start.first is None else itertools.chain([start.first], iterator)
            count, checksum, found, ahead = 0, 0, {0: 0}, []
            for indices in itertools.islice(given, position._draws):
                encoded, checksum = drawn(indices, checksum)
                if count >= position.next_task:
                    ahead.append(copy.deepcopy(indices))  # the sampler may reuse its list
                elif count in indices_of:
                    indices_of[count] = encoded
                count += 1
                found[count] = checksum
            if all(found.get(number) == expected for number, expected in known):
                ended = count < position._draws  # read again, the sampler might begin its next epoch
                return DrawnAgain(ahead, () if ended else iterator)
    raise StateError(
        f"the sampler did not reproduce its indices: the first {position.next_task} batches, or those drawn ahead, "
        "differ from the saved ones. A sampler must depend on nothing but its arguments, set_epoch and random "
        "generators that it holds, or have state_dict() and "
        "load_state_dict()"
    )


def _iterator_at(position: Position, start: Start) -> Any:
    position.samplers.load(start.own.sampler)
    iterator = iterator_of(position.samplers, position.begin.stages)
    if start.own.iterator is not None and has_state(iterator):
        iterator.load_state_dict(pickle.loads(start.own.iterator))
    return iterator
