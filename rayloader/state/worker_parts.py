"""The part of a state for each worker: where another process continues, and what it rebuilds.

Promise: from one state to the next only changes are packed, see NOTE [Same parts] in seal.py; the cost does not depend
on the number of batches to rebuild.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from typing import Any

import torch

from rayloader.errors import StateError
from rayloader.state import plain_state
from rayloader.state.draws import decoded
from rayloader.state.journal import Before, Journal, Resumed, Told
from rayloader.state.local_state import pack_object, unpack_object
from rayloader.state.random_state import RandomState
from rayloader.state.seal import Part, are_same, checksum, checksum_of_names, checksum_of_values
from rayloader.state.snapshot import WorkerState
from rayloader.transport import codec

_TASK = struct.Struct("<qI")  # its number, and the digest of the delivered batch
_NAMES = checksum_of_names(("begin", "content", "remembers", "replay"))


class WorkerParts:
    """The parts of one worker, for the states of one position."""

    def __init__(self) -> None:
        self._made_of: tuple[Any, ...] = (self,) * 4
        self._begin: tuple[Part, Part | None] = Part(()), None  # see `_pack`
        self._replay, self._checksum, self._count = b"", checksum(b""), 0  # packed tasks, and how many
        self._whole: Part = Part(())

    def of(self, journal: Journal, *, iterable: bool) -> Part:
        """The worker, as part of a state."""
        # Streams are read again from the epoch's start, and compared as a whole.
        before, replay = None if iterable else journal.before, journal.replay
        made_of, known = (journal.base, before, journal.newest, replay), self._made_of
        if len(replay) == self._count and are_same(made_of, known):
            return self._whole
        if not are_same(made_of[:2], known):
            self._begin = _pack_begin(journal.base, before)
        if replay is not known[3]:
            self._replay, self._checksum, self._count = b"", checksum(b""), 0
        self._add(replay)
        self._made_of = made_of
        packed = Part(self._replay, self._checksum) if self._replay else None  # see random_state.py: never empty
        self._whole = _pack(*self._begin, packed, remembers=journal.remembers)
        return self._whole

    def _add(self, replay: dict[int, Told]) -> None:
        """Packs the tasks that are new."""
        newest_first = itertools.islice(reversed(replay.values()), len(replay) - self._count)
        added = b"".join([_TASK.pack(told.task_id, told.digest) for told in newest_first][::-1])
        self._checksum, self._count = zlib.crc32(added, self._checksum), len(replay)
        self._replay += added


def new_worker(state: WorkerState | None) -> dict[str, Any]:
    """The part of a worker that begins with this snapshot."""
    worker: dict[str, Any] = _pack(*_pack_begin(state, None), None, remembers=False).own()
    return worker


def replayed(worker: dict[str, Any]) -> list[tuple[int, int]]:
    """The tasks that a worker of a state rebuilds, with the digests of the delivered batches."""
    return [*_TASK.iter_unpack(worker["replay"] or b"")]


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
    content = b"" if worker["content"] is None else worker["content"].cpu().numpy().tobytes()
    base = _unpack_state(state, content)
    if base is not None:  # later tasks come after what it has built, whatever their numbers
        base = base._replace(last_task=min(base.last_task, next_task - 1))
    journal.starts_at(base, replay)
    if before is not None:
        journal.starts_before(_unpack_before(before, content))


def _pack(begin: Part, content: Part | None, replay: Part | None, *, remembers: bool) -> Part:
    """The part of one worker; it is made for each batch that the user takes, so it looks only at what may be new.

    Args:
        begin: where the worker starts.
        content: bytes of its generators there.
        replay: packed tasks that it builds again.
        remembers: see `Journal.remembers`.
    """

    def own() -> dict[str, Any]:
        return {
            "begin": begin.own(),
            "content": None if content is None else content.own(),
            "replay": None if replay is None else replay.own(),
            "remembers": remembers,
        }

    return Part.made_by(own, checksum_of_values((begin, content, remembers, replay), _NAMES))


def _pack_begin(state: WorkerState | None, before: Before | None) -> tuple[Part, Part | None]:
    """Where the worker starts; its generators as one tensor, because torch saves bytes half as long again."""
    content = bytearray()
    begin = Part((_pack_state(state, content), None if before is None else _pack_before(before, content)))
    return begin, Part(torch.frombuffer(content, dtype=torch.uint8)) if content else None


def _pack_state(state: WorkerState | None, content: bytearray) -> tuple[Any, ...] | None:
    if state is None:
        return None
    if state.error:
        raise StateError(f"a worker's dataset could not save its state:\n{state.error}")
    packed: Any = state._replace(
        random=state.random.pack(content),  # type: ignore[arg-type]
        begin=None if state.begin is None else state.begin.pack(content),  # type: ignore[arg-type]
        dataset=pack_object(state.dataset),  # type: ignore[arg-type]
        iterator=pack_object(state.iterator),  # type: ignore[arg-type]
    )
    return tuple(packed)


def _unpack_state(packed: tuple[Any, ...] | None, content: bytes) -> WorkerState | None:
    if packed is None:
        return None
    state: Any = WorkerState(*packed)
    unpacked: WorkerState = state._replace(
        random=RandomState.unpack(state.random, content),
        begin=None if state.begin is None else RandomState.unpack(state.begin, content),
        dataset=unpack_object(state.dataset),
        iterator=unpack_object(state.iterator),
    )
    return unpacked


def _pack_before(before: Before, content: bytearray) -> dict[str, Any]:
    entries: list[list[Any]] = [
        [entry.task_id, plain_state.pack(decoded(entry.indices)), entry.digest] if isinstance(entry, Told) else [*entry]
        for entry in before.entries
    ]
    kinds = [type(entry).__name__ for entry in before.entries]
    return {"state": _pack_state(before.state, content), "kinds": kinds, "entries": entries}


def _unpack_before(packed: dict[str, Any], content: bytes) -> Before:
    entries: list[Told | Resumed] = []
    for kind, values in zip(packed["kinds"], packed["entries"], strict=True):
        if kind == Resumed.__name__:
            entries.append(Resumed(*values))
        else:
            task_id, indices, digest = values
            entries.append(Told(task_id, codec.encode(plain_state.unpack(indices)), digest))
    return Before(_unpack_state(packed["state"], content), tuple(entries))
