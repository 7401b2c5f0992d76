"""What a worker is at the end of a call, so that another process can go on from there.

Promise: a worker that was restored from a snapshot builds the same batches as the one that it was taken of, as far as
they depend on the global random generators, on generators that the dataset holds, on the dataset's own `state_dict`,
and for iterable datasets on how far they were read. What cannot be restored is an error, never a guess.
"""

from __future__ import annotations

import pickle
import traceback
import zlib
from typing import Any, NamedTuple

import cloudpickle

from rayloader.random_state import RandomState, find_generators
from rayloader.transport.codec import Encoded

# How much of a buffer of a batch goes into the digest, at its begin, in its middle and at its end, in bytes.
_SAMPLE = 64


class WorkerState(NamedTuple):
    """A snapshot. Where a worker sends one, None stands for what has not changed since the last.

    Attributes:
        epoch: epochs that this worker began before this one.
        tasks: built in this epoch.
        last_task: the last of them, -1 if there is none.
        exhausted: its iterable dataset has ended.
        ended: it has, in the midst of the last batch.
        digest: checksum of what an iterable dataset without state gave.
        random: the generators; None in it: as seeding left them.
        begin: likewise, before the iterator of this epoch was made.
        dataset: the dataset's `state_dict()`, pickled; None if it has none.
        iterator: likewise of its iterator.
        error: why there is no whole snapshot, if that is so.
    """

    epoch: int = 0
    tasks: int = 0
    last_task: int = -1
    exhausted: bool = False
    ended: bool = False
    digest: int = 0
    random: RandomState = RandomState()
    begin: RandomState | None = None
    dataset: bytes | None = None
    iterator: bytes | None = None
    error: str = ""

    def over(self, before: WorkerState | None) -> WorkerState:
        """The whole snapshot, of one that was sent after `before`."""
        if before is None:
            return self
        return self._replace(
            random=self.random.over(before.random),
            begin=before.begin if self.begin is None else self.begin,
            dataset=before.dataset if self.dataset is None else self.dataset,
            iterator=before.iterator if self.iterator is None else self.iterator,
        )


def has_state(obj: Any) -> bool:
    """Whether the object can tell its state and take it back."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


class Recorder:
    """Takes one worker's snapshots, each as what has changed since the last.

    Args:
        dataset: the worker's own.
        seeded: the global generators as seeding left them.
    """

    def __init__(self, dataset: Any, seeded: RandomState) -> None:
        self._dataset = dataset
        self._seeded = seeded
        self._generators = find_generators(dataset)
        self._looked_again = False  # for generators, after the first tasks
        self._error = ""
        self._random = seeded  # as last told
        self._begin: RandomState | None = None  # not told yet
        self._states: dict[str, bytes] = {}  # as last told

    def capture(self) -> RandomState:
        """The generators as they are."""
        return RandomState.capture(self._generators, self._random)

    def restore(self, random: RandomState) -> None:
        """Puts the generators to what a snapshot says."""
        self._random = random.over(self._seeded)
        self._random.restore(self._generators)

    def is_at(self, random: RandomState) -> bool:
        """Whether the generators are what a snapshot says."""
        return self.capture().since(random.over(self._seeded)) == RandomState()

    def forget(self) -> None:
        """What was told may not have been heard: the next snapshot tells all."""
        self._random = self._seeded
        self._states.clear()

    def iterator_begins(self) -> None:
        """The iterator of an epoch is to be made."""
        self._begin = self.capture().since(self._seeded)

    def snapshot(self, iterator: Any, **position: Any) -> WorkerState:
        """The state at this moment, where it is another than the last."""
        before, self._random = self._random, self.capture()
        if position["tasks"] and not self._looked_again and iterator is None:  # else it is read again from its begin
            self._look_again()
        state = WorkerState(random=self._random.since(before), begin=self._begin, **position)
        self._begin = None
        try:
            return state._replace(
                error="" if has_state(self._dataset) else self._error,
                dataset=self._changed("dataset", self._dataset),
                iterator=self._changed("iterator", iterator) if iterator is not self._dataset else None,
            )
        except Exception:  # the user's state_dict() may raise anything
            return state._replace(error=traceback.format_exc())

    def _look_again(self) -> None:
        self._looked_again = True
        if [id(g) for g in find_generators(self._dataset)] != [id(g) for g in self._generators]:
            self._error = (
                "the dataset has made a random generator of its own while loading, which another process would make "
                "anew; make it in __init__ or in worker_init_fn, or give the dataset state_dict() and load_state_dict()"
            )

    def _changed(self, name: str, obj: Any) -> bytes | None:
        if not has_state(obj):
            return None
        state: bytes = cloudpickle.dumps(obj.state_dict())
        if state == self._states.get(name):
            return None
        self._states[name] = state
        return state


def load_state(obj: Any, state: bytes | None) -> None:
    """Gives an object of the user's its state back."""
    if state is not None:
        obj.load_state_dict(pickle.loads(state))


def digest(encoded: Encoded, before: int) -> int:
    """A checksum of a batch and what came before it: of its structure, and of samples of its buffers."""
    checksum = zlib.crc32(encoded.skeleton, before)
    for buffer in encoded.buffers:
        content = memoryview(buffer).cast("B")
        middle = len(content) // 2
        for begin in (0, middle, max(0, len(content) - _SAMPLE)):
            checksum = zlib.crc32(content[begin : begin + _SAMPLE], checksum)
    return checksum
