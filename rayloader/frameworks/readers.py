"""What frameworks do with a loader of ours: they rebuild it as one of another class, or read it in a way of their own.

Promise: of what would go wrong in a rebuilt loader some is refused, and the rest is warned of. A state counts the
batches that the program was given; batches that a framework in between has drawn and not passed on come again.

NOTE [One batch ahead]
The loader that Ray Train's `prepare_data_loader` returns draws the next batch before it passes on the previous one, to
move it to the device meanwhile. So does Lightning where the length is not known, to notice the last batch. For these, a
state is made before each batch is drawn, and remains valid until the next one is: as Accelerate does, which also draws
ahead. Once the end is found, nothing is ahead, and the state is that of a finished epoch, even while the program has
the last batch.

NOTE [Lightning counts]
Where Lightning knows the length, or has a limit, it never asks for what follows the last batch: a checkpoint that is
saved at that batch holds the state of an epoch of which nothing is left, or nothing that it wants. Resumed from there,
it asks for an iterator and means the next epoch, so that is what it is given. Of several loaders in a `CombinedLoader`
the epoch is over for all once it is for the one that has given the most. Before that, one that has come to its end
gives nothing, instead of its next epoch. Which of these it is shows only when the states of all have been loaded: an
iterator that continues from a state is created when the first batch is drawn.

NOTE [States that Lightning drops]
Lightning loads a checkpoint's states only where it sets up the loaders. If `configure_optimizers` reads
`trainer.estimated_stepping_batches`, it sets them up before it has the states (its issue 20550), and after a checkpoint
from between two epochs it does not load them at all: either way they stay in its loop. They are loaded here before the
first batch. Where the length is not known, Lightning may have drawn that batch already: then the rest is refused.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rayloader.errors import StateError, level_outside
from rayloader.frameworks._compat_lightning import (
    ended_an_epoch,
    fetcher_classes,
    has_states,
    loop_classes,
    take_states,
)
from rayloader.resume.ranks import check_once

ADOPTED = "_rayloader_adopted"  # an attribute of loaders that get our iterators, see `patching.py`

# The iterators that each of Lightning's fetchers was given and has not begun to read, by their loaders' identities.
_given: weakref.WeakKeyDictionary[Any, dict[int, weakref.ref[ReadAhead]]] = weakref.WeakKeyDictionary()


def callers() -> Iterator[Any]:
    """The objects in whose methods this thread is, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back


# ---- loaders that are rebuilt


def note_rebuilt(loader: Any, source: Any, same: Any) -> None:
    """A loader of another class is being made whose `num_workers` was read from a loader of ours.

    Args:
        loader: that one.
        source: the loader of ours; None: it is gone.
        same: likewise, if it has the same dataset.
    """
    if source is not None and source._ranks is not None:
        check_once(loader._index_sampler)
        check_dispatch(source)
    if same is not None:
        same._read_anew = True
    if not is_adopted(loader):
        _warn_of_rebuilt(loader.__class__)


def is_adopted(loader: Any) -> bool:
    """Whether a loader gets our iterators."""
    return ADOPTED in getattr(loader, "__dict__", ())


def check_dispatch(source: Any) -> None:
    """Raises ValueError if one rank's part of the data would be read by one process, and distributed to all.

    That is what Accelerate does with `dispatch_batches`, its default for iterable datasets. Neither the arguments nor
    the class of the loader that it creates show it; only the calling code does.
    """
    module = sys.modules.get("accelerate.data_loader")
    if module is None or source._ranks is None or source._ranks.num_replicas == 1:
        return
    for caller in callers():
        if issubclass(type(caller), module.DataLoaderDispatcher):
            if module.PartialState().num_processes == 1:
                return
            raise ValueError(
                "with dispatch_batches, Accelerate's default for iterable datasets, one process reads the batches of "
                f"all ranks, and this loader has those of rank {source._ranks.rank}; leave num_replicas and rank out"
            )


@functools.cache  # says it once
def _warn_of_rebuilt(loader_class: type) -> None:
    framework = {loader_class.__module__.partition(".")[0]} - {"__main__"}
    warnings.warn(
        f"a rayloader.DataLoader was rebuilt as {loader_class.__module__}.{loader_class.__qualname__}, "
        "whose batches come from torch's workers; call rayloader.patch() at the start of the program",
        stacklevel=level_outside("rayloader", "torch", *framework),
    )


# ---- who reads it


class FrameworkReader:
    """The code that requests a loader's iterator, if that is a framework with habits; here, Ray Train's loader."""

    def __init__(self, reader: Any) -> None:
        self._reader = weakref.ref(reader)

    @property
    def is_ahead(self) -> bool:
        """Whether it is one batch ahead, as far as is known when it draws a batch."""
        return self._reader() is not None

    @property
    def drops_states(self) -> bool:
        """Whether it has states for its loaders that it should have loaded by now."""
        return False

    def reads(self, iterator: ReadAhead) -> None:
        """It is given this iterator."""

    def begin(self, iterator: ReadAhead) -> None:
        """It is about to draw the first batch of this iterator."""
        iterator.begin()


class LightningReader(FrameworkReader):
    """Lightning's fetcher, which reads a `CombinedLoader`, perhaps of only one loader.

    Args:
        fetcher: that one.
        loop: of the training that it works for; None: it works for something else.
    """

    def __init__(self, fetcher: Any, loop: Any) -> None:
        super().__init__(fetcher)
        self._loop: Callable[[], Any] = weakref.ref(loop) if loop is not None else lambda: None

    @property
    def trains(self) -> bool:
        """Whether it works for a training that still runs."""
        return self._loop() is not None

    @property
    def is_ahead(self) -> bool:
        """Whether it does not know the length."""
        return (fetcher := self._reader()) is not None and fetcher.length is None

    @property
    def drops_states(self) -> bool:
        """See NOTE [States that Lightning drops]."""
        return (loop := self._loop()) is not None and has_states(loop)

    def reads(self, iterator: ReadAhead) -> None:
        """It is given this iterator, of one of its loaders."""
        if (fetcher := self._reader()) is not None:
            _given.setdefault(fetcher, {})[id(iterator.loader)] = weakref.ref(iterator)

    def begin(self, iterator: ReadAhead) -> None:
        """It is about to draw the first batch of this iterator: those of its other loaders begin too, in order."""
        fetcher = self._reader()
        references = {} if fetcher is None else _given.get(fetcher, {})
        given = [one for reference in references.values() if (one := reference()) is not None]
        if fetcher is None or iterator not in given:  # it was given another one of this loader since
            iterator.begin()
            return
        del _given[fetcher]
        loop = self._loop()
        if self.drops_states:
            for loader, state in take_states(loop, fetcher.combined_loader):
                if any(loader is one.loader for one in given):  # loaders of other classes have their iterators already
                    loader.load_state_dict(state)
        most = max((one.taken for one in given), default=0)
        had_ended = loop is not None and ended_an_epoch(loop)
        is_over = had_ended if fetcher.length is None else 0 < fetcher.length <= most
        for one in given:
            one.begin(is_over=is_over, in_middle=most > 0 and not is_over)


def _wrapped_by_train() -> tuple[type, ...]:
    if "ray.train.torch.train_loop_utils" not in sys.modules:
        return ()
    from rayloader.actors._compat_ray import wrapped_loader_classes

    return wrapped_loader_classes()


def find_reader() -> FrameworkReader | None:
    """The code that requests a loader's iterator in this thread; None if it has no habits."""
    wrapped, fetchers, loops = _wrapped_by_train(), fetcher_classes(), loop_classes()
    fetcher = None
    for caller in callers() if wrapped or fetchers else ():
        kind = type(caller)
        if fetcher is None and issubclass(kind, wrapped):
            return FrameworkReader(caller)
        if fetcher is None and issubclass(kind, fetchers):
            fetcher = caller
        elif fetcher is not None and issubclass(kind, loops):
            return LightningReader(fetcher, caller)
    return None if fetcher is None else LightningReader(fetcher, None)


def read(loader: Any) -> Iterator[Any]:
    """A new iterator of a loader, for whoever requests it."""
    reader = find_reader()
    if reader is None:
        return loader._new_iterator()  # type: ignore[no-any-return]
    if loader.skip_steps is not None and isinstance(reader, LightningReader) and reader.trains:
        warnings.warn(
            "Lightning counts the batches of an epoch, and one that skip_steps makes shorter has no end for it; "
            "return None from training_step() for such a batch in place of skip_steps",
            stacklevel=3,
        )
    loader._before = EarlierState()
    return ReadAhead(loader, loader._before, reader)


class EarlierState:
    """The state of a loader from before the last batch was drawn; none if that batch was passed on."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | Exception | None = None

    @property
    def is_known(self) -> bool:
        """Whether this is the state to return."""
        return self._state is not None

    def state(self) -> dict[str, Any]:
        """The state. Raises an error that occurred when it was made: it matters only if the state is requested."""
        if isinstance(self._state, Exception):
            raise self._state
        assert self._state is not None
        return {**self._state}

    def draws(self, iterator: Iterator[Any], tell: Callable[[], dict[str, Any]] | None) -> Any:
        """The next batch of an iterator.

        Args:
            iterator: of the loader.
            tell: makes the state; None: the batch is passed on at once.
        """
        held = self._state
        try:
            self._state = tell() if tell is not None else None
        except Exception as error:  # an error from the dataset's or the sampler's own state
            self._state = error
        try:
            return next(iterator)
        except StopIteration:
            self._state = None
            raise
        except BaseException:  # the batch drawn before has still not been passed on
            self._state = held
            raise


class ReadAhead(Iterator[Any]):
    """The iterator for a reader with habits; see NOTE [One batch ahead] and NOTE [Lightning counts].

    Args:
        loader: whose iterator it is.
        before: where the state is kept; the loader has it too, until another iterator is requested.
        reader: requests the iterator.
    """

    def __init__(self, loader: Any, before: EarlierState, reader: FrameworkReader) -> None:
        self.loader, self._before, self._reader = loader, before, reader
        self._begun = False
        self._iterator: Iterator[Any] | None = None if loader._state is not None else loader._new_iterator()
        reader.reads(self)

    @property
    def taken(self) -> int:
        """Batches that were taken of the epoch that it will continue."""
        return 0 if self.loader._state is None else self.loader._state.taken

    def begin(self, *, is_over: bool = False, in_middle: bool = False) -> None:
        """Begins, or continues from a state that was loaded.

        Args:
            is_over: the reader begins its next epoch.
            in_middle: the reader continues in the middle of an epoch.
        """
        self._begun = True
        state = self.loader._state
        if state is None:
            return
        self.loader._before = self._before  # the state may have been loaded since the iterator was requested
        if state.is_between_epochs and in_middle:
            self._iterator = iter(())  # the state is for the next one
            return
        self._iterator = self.loader._new_iterator()
        if is_over and not state.is_between_epochs:
            self._iterator = self.loader._new_iterator()

    def __next__(self) -> Any:
        if not self._begun:
            self._reader.begin(self)
        elif self._reader.drops_states:
            raise StateError(
                "the checkpoint has a state for this loader, but Lightning has drawn a batch before it loaded the "
                "checkpoint; read trainer.max_steps in place of trainer.estimated_stepping_batches"
            )
        assert self._iterator is not None
        return self._before.draws(self._iterator, self.loader._tell_state if self._reader.is_ahead else None)
