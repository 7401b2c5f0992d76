"""The part of a state for each worker: where another process continues, and what it rebuilds.

Promise: from one state to the next only changes are packed, see NOTE [Same parts] in seal.py; the cost does not depend
on the number of batches to rebuild.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from rayloader import plain_state
from rayloader.errors import StateError
from rayloader.plain_state import bytes_of, text_of
from rayloader.random.random_state import RandomState
from rayloader.resume.draws import decoded
from rayloader.resume.journal import Before, Journal, Resumed, Told
from rayloader.resume.local_state import pack_object, unpack_object
from rayloader.resume.seal import Part, are_same, checksum_of_names, checksum_of_values
from rayloader.resume.snapshot import WorkerState
from rayloader.transport import codec

_TASK = struct.Struct("<qI")  # its number, and the digest of the delivered batch
_NAMES = checksum_of_names(("begin", "remembers", "replay"))
_TEXT, _END = zlib.crc32(b"['"), b"']"  # checksums of a list with a text begin and end with these, see seal.py


class WorkerParts:
    """The parts of one worker, for the states of one position."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = (self,) * 4
        self._begin = Part(())  # see `_pack`
        self._replay, self._checksum, self._count = "", _TEXT, 0  # packed tasks, and how many
        self._whole: Part = Part(())

    def of(self, journal: Journal, *, iterable: bool) -> Part:
        """The worker, as part of a state."""
        # Streams are read again from the epoch's start, and compared as a whole.
        before, tasks = None if iterable else journal.before, journal.replay
        made_of, known = (journal.base, before, journal.newest, tasks), self._made_of
        if len(tasks) == self._count and are_same(made_of, known):
            return self._whole
        if not are_same(made_of[:2], known):
            self._begin = _pack_begin(journal.base, before)
        if tasks is not known[3]:
            self._replay, self._checksum, self._count = "", _TEXT, 0
        self._add(tasks)
        self._made_of = made_of
        replay = Part((self._replay,), zlib.crc32(_END, self._checksum))
        self._whole = _pack(self._begin, replay, remembers=journal.remembers)
        return self._whole

    def _add(self, tasks: dict[int, Told]) -> None:
        """Packs the tasks that are new; texts of 12 bytes each can be joined."""
        newest_first = itertools.islice(reversed(tasks.values()), len(tasks) - self._count)
        added = text_of(b"".join([_TASK.pack(told.task_id, told.digest) for told in newest_first][::-1]))
        self._checksum, self._count = zlib.crc32(added.encode(), self._checksum), len(tasks)
        self._replay += added


def new_worker(state: WorkerState | None) -> dict[str, Any]:
    """The part of a worker that begins with this snapshot."""
    worker: dict[str, Any] = _pack(_pack_begin(state, None), Part(("",)), remembers=False).own()
    return worker


def replayed(worker: dict[str, Any]) -> list[tuple[int, int]]:
    """The tasks that a worker of a state rebuilds, with the digests of the delivered batches."""
    return [*_TASK.iter_unpack(bytes_of(worker["replay"][0]))]


def begin(journal: Journal, worker: dict[str, Any], told: dict[int, codec.Encoded | None], next_task: int) -> None:
    """Starts the journal of a new worker where a worker of a state was.

    Args:
        journal: the new worker's.
        worker: as part of a state.
        told: the sampler's indices for each of the tasks that are `replayed`; None: unknown.
        next_task: the first task for which the user has not taken all earlier ones.
    """
    # Without order a worker may be ahead of what was drawn again; then nothing depends on its earlier batches.
    replay = [Told(task_id, encoded, digest) for task_id, digest in replayed(worker) if (encoded := told[task_id])]
    state, before = worker["begin"]
    base = _unpack_state(state)
    if base is not None:  # later tasks come after what it has built, whatever their numbers
        base = base._replace(last_task=min(base.last_task, next_task - 1))
    journal.starts_at(base, replay)
    if before is not None:
        journal.starts_before(_unpack_before(before))


def _pack(begin: Part, replay: Part, *, remembers: bool) -> Part:
    """The part of one worker; it is made for each batch that the user takes, so it looks only at what may be new.

    Args:
        begin: where the worker starts.
        replay: packed tasks that it builds again.
        remembers: see `Journal.remembers`.
    """

    def own() -> dict[str, Any]:
        return {"begin": begin.own(), "remembers": remembers, "replay": replay.own()}

    return Part.made_by(own, checksum_of_values((begin, remembers, replay), _NAMES))


def _pack_begin(state: WorkerState | None, before: Before | None) -> Part:
    """Where the worker starts."""
    return Part((_pack_state(state), None if before is None else _pack_before(before)))


def _pack_state(state: WorkerState | None) -> tuple[Any, ...] | None:
    if state is None:
        return None
    if state.error:
        raise StateError(f"a worker's dataset could not save its state:\n{state.error}")
    packed: Any = state._replace(
        random=state.random.pack(),  # type: ignore[arg-type]
        begin=None if state.begin is None else state.begin.pack(),  # type: ignore[arg-type]
        dataset=pack_object(state.dataset),  # type: ignore[arg-type]
        iterator=pack_object(state.iterator),  # type: ignore[arg-type]
    )
    return tuple(packed)


def _unpack_state(packed: Sequence[Any] | None) -> WorkerState | None:
    if packed is None:
        return None
    state: Any = WorkerState(*packed)
    unpacked: WorkerState = state._replace(
        random=RandomState.unpack(state.random),
        begin=None if state.begin is None else RandomState.unpack(state.begin),
        dataset=unpack_object(state.dataset),
        iterator=unpack_object(state.iterator),
    )
    return unpacked


def _pack_before(before: Before) -> dict[str, Any]:
    entries: list[list[Any]] = [
        [entry.task_id, plain_state.pack(decoded(entry.indices)), entry.digest] if isinstance(entry, Told) else [*entry]
        for entry in before.entries
    ]
    kinds = [type(entry).__name__ for entry in before.entries]
    return {"state": _pack_state(before.state), "kinds": kinds, "entries": entries}


def _unpack_before(packed: dict[str, Any]) -> Before:
    entries: list[Told | Resumed] = []
    for kind, values in zip(packed["kinds"], packed["entries"], strict=True):
        if kind == Resumed.__name__:
            entries.append(Resumed(*values))
        else:
            task_id, indices, digest = values
            entries.append(Told(task_id, codec.encode(plain_state.unpack(indices)), digest))
    return Before(_unpack_state(packed["state"]), tuple(entries))
