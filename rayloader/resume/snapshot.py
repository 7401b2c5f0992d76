"""The state of a worker at the end of a call, so that another process can continue from there.

Promise: a worker that was restored from a snapshot builds the same batches as the original, as far as they depend on
random generators (the global ones, and those that the replica's objects hold when it starts), on the dataset's own
`state_dict`, and for iterable datasets on how far they were read. State that cannot be restored is an error, never a
guess.

NOTE [Late positions]. A dataset may take over what it has loaded only when it is asked for its first sample: a
generator function runs no earlier. Until then its `state_dict()` tells where it was before. So between loading and that
sample the loaded state is the snapshot, and the dataset is not asked. In the same way a stream that was broken off may
still tell its old position after `__iter__`, and one that loads the state of its end may begin its next epoch there.
See `WorkerState.may_be_stale`, and `end_again`.

NOTE [One percent]. A snapshot costs the user's `state_dict`. So the next one is taken only when the worker has worked a
hundred times as long as the last one took. Batches built in between are rebuilt when another process continues. So
programs that never save a state pay for one in each epoch of a worker.

NOTE [Held at the start]. Followed are the generators that the replica's objects hold, and the globals that their code
names, after `worker_init_fn` has run. What comes later is not known here: where it changes the batches, a rebuilt one
differs from the delivered one, which is an error.
"""

from __future__ import annotations

import inspect
import pickle
import time
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from rayloader.errors import ReplayError, StateError, too_deep
from rayloader.random.generators import RandomState
from rayloader.random.search import search
from rayloader.transport.pickler import ByIdPickler, dumped

# A snapshot may cost this share of the time that a worker works, see NOTE [One percent].
SHARE = 0.01


class WorkerState(NamedTuple):
    """A snapshot. When a worker sends one, None stands for parts that are unchanged since the last.

    Attributes:
        epoch: epochs that this worker began before this one.
        tasks: built in this epoch.
        last_task: the last of them, -1 if there is none.
        exhausted: its iterable dataset has ended.
        ended: whether it ended in the middle of the last batch.
        digest: checksum of an iterable dataset's batches.
        random: the generators; None in it: as seeding left them.
        begin: the generators before the iterator of this epoch was created.
        dataset: the dataset's `state_dict()`, pickled; None if it has none, or is its own iterator.
        iterator: the `state_dict()` of its iterator, pickled.
        dataset_epoch: the last argument of the dataset's `set_epoch`, if it is known.
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
    dataset_epoch: int | None = None
    error: str = ""

    @property
    def is_to_be_proven(self) -> bool:
        """Whether only rebuilding a batch can show that it is complete, see NOTE [Proof] in journal.py."""
        return not self.exhausted and not self.has_own

    @property
    def has_own(self) -> bool:
        """Whether the dataset, or its iterator, has a state of its own."""
        return self.dataset is not None or self.iterator is not None

    @property
    def may_be_stale(self) -> bool:
        """Whether a stream with a state of its own has begun another epoch, and was asked for nothing since.

        See NOTE [Late positions].
        """
        is_of_stream = self.begin is not None and not self.exhausted
        return self.has_own and is_of_stream and self.epoch > 0 and self.tasks == 0

    def over(self, before: WorkerState | None) -> WorkerState:
        """The complete snapshot, from one that was sent after `before`."""
        if before is None:
            return self
        return self._replace(
            random=self.random.over(before.random),
            begin=before.begin if self.begin is None else self.begin,
            dataset=before.dataset if self.dataset is None else self.dataset,
            iterator=before.iterator if self.iterator is None else self.iterator,
        )


def has_state(obj: Any) -> bool:
    """Whether the object can save its state without being told anything, and load it."""
    return _takes(getattr(obj, "state_dict", None)) and _takes(getattr(obj, "load_state_dict", None), None)


def _takes(method: Any, *arguments: Any) -> bool:
    """Whether it can be called with so many arguments."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it is written in C, and does not say
        pass
    return True


class SnapshotTaker:
    """Takes one worker's snapshots, each as the difference from the last.

    Args:
        dataset: the worker's own.
        objects: of the replica, by name: what they hold now, and the globals that their code names, is followed.
        seeded: the global generators as seeding left them.

    Attributes:
        loaded: the snapshot whose states dataset and iterator have loaded, until they are asked for a sample.
    """

    def __init__(self, dataset: Any, objects: Mapping[str, Any], seeded: RandomState) -> None:
        self._dataset = dataset
        self._objects = objects
        self._held = search(objects)
        self._seeded = self._random = seeded._replace(held={})  # as last sent
        self.loaded: WorkerState | None = None
        self._begin: RandomState | None = None  # not sent yet
        self._states: dict[str, bytes] = {}  # as last sent
        self._cost = 0.0  # seconds that the last snapshot took
        self._worked = 0.0  # seconds since then

    def worked(self, seconds: float) -> None:
        """Adds the worker's working time."""
        self._worked += seconds

    @property
    def is_due(self) -> bool:
        """Whether it is time for a snapshot, see NOTE [One percent]."""
        return self._worked * SHARE >= self._cost

    def renew(self) -> None:
        """`set_epoch` of the dataset was called, which may have made its generators anew."""
        here = search(self._objects)
        self._held = {name: here.get(name, generator) for name, generator in self._held.items()}

    def capture(self) -> RandomState:
        """The current states of the generators."""
        return RandomState.capture((), self._random, held=self._held)

    def restore(self, random: RandomState) -> None:
        """Restores the generators from a snapshot.

        Raises:
            ReplayError: one is missing.
        """
        random = random.over(self._seeded)
        if missing := random.unlike(self._held):
            raise ReplayError(
                f"the snapshot has the random generator {missing[0]}, which is missing here, or of another kind; "
                "create dataset, collate_fn and worker_init_fn like those that were saved, with all their generators"
            )
        self._random = random
        random.restore((), self._held)

    def is_at(self, random: RandomState) -> bool:
        """Whether the generators are in a snapshot's state."""
        return self.capture().equals(random.over(self._seeded))

    def forget(self) -> None:
        """Earlier snapshots may not have arrived: the next one is complete."""
        self._random = self._seeded
        self._states.clear()

    def iterator_begins(self) -> None:
        """The iterator of an epoch is about to be created."""
        self._begin = self.capture().since(self._seeded)

    def snapshot(self, iterator: Any, **position: Any) -> WorkerState:
        """The current state, as the difference from the last one."""
        began = time.perf_counter()
        before, self._random = self._random, self.capture()
        state = WorkerState(random=self._random.since(before), begin=self._begin, **position)
        self._begin = None
        dataset = None if iterator is self._dataset else self._dataset
        try:
            state = state._replace(
                dataset=self._changed("dataset", dataset), iterator=self._changed("iterator", iterator)
            )
        except Exception:  # the user's state_dict() may raise anything
            state = state._replace(error=traceback.format_exc())
        self._cost = time.perf_counter() - began
        if not state.may_be_stale:  # otherwise one of this epoch is as urgent as before
            self._worked = 0.0
        return state

    def _changed(self, name: str, obj: Any) -> bytes | None:
        if not has_state(obj):
            return None
        state = dump_state(obj) if self.loaded is None else getattr(self.loaded, name)
        if state is None or state == self._states.get(name):
            return None
        self._states[name] = state
        return state


def dump_state(obj: Any) -> bytes:
    """The state of an object of the user's, pickled.

    Raises:
        StateError: it is nested too deep for that; the object and pickling may raise anything else.
    """
    state = obj.state_dict()
    try:
        return dumped(state, ByIdPickler)
    except (RecursionError, pickle.PicklingError) as error:
        if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
            raise too_deep() from None
        raise


def own_state_of(obj: Any) -> bytes | None:
    """The same, in this process; None if the object has no state.

    Raises:
        StateError: it could not be saved.
    """
    if not has_state(obj):
        return None
    try:
        return dump_state(obj)
    except Exception:  # the user's own
        raise StateError(f"{type(obj).__name__} could not save its state:\n{traceback.format_exc()}") from None


def end_again(fetcher: Any, dataset: bytes | None, iterator: bytes | None) -> bool:
    """Lets a stream that has loaded the state of its end take that over, see NOTE [Late positions].

    Args:
        fetcher: with its iterator, which is dropped.
        dataset: the state that the dataset has loaded.
        iterator: the state that its iterator has loaded.

    Returns:
        Whether it has. Otherwise it gave a sample: that state is where its next epoch begins, and is loaded again.
    """
    nothing = object()
    if next(fetcher.dataset_iter, nothing) is nothing:
        return True
    load_state(fetcher.dataset_iter, iterator)
    fetcher.dataset_iter = None  # what a generator does when it is dropped comes before loading
    load_state(fetcher.dataset, dataset)
    return False


def load_state(obj: Any, state: bytes | None) -> None:
    """Loads the state of an object of the user's."""
    if state is not None:
        obj.load_state_dict(pickle.loads(state))
