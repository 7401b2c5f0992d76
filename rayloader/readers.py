"""Readers of loaders whose habits a state must allow for: a batch ahead of the program, or counting batches.

Promise: a state counts the batches that the program was given. Batches that a framework in between has drawn and
not passed on come again.

NOTE [One batch ahead]
The loader that Ray Train's `prepare_data_loader` returns draws the next batch before it passes on the previous one, to
move it to the device meanwhile. So does Lightning where the length is not known, to notice the last batch. For these, a
state is made before each batch is drawn, and remains valid until the next one is: as Accelerate does, which also draws
ahead. Once the end is found, nothing is ahead, and the state is that of a finished epoch, even while the program has
the last batch.

NOTE [Lightning counts]
Where Lightning knows the length, or has a limit, it never asks for what follows the last batch: a checkpoint that is
saved at that batch holds the state of an epoch of which nothing is left, or nothing that it wants. Resumed from there,
it asks for an iterator and means the next epoch. StopIteration would cost it that epoch, so it is given the next one.
This does not apply to several loaders, because each of them may end at another time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple


class _Habits(NamedTuple):
    """Of a class of readers."""

    is_ahead: Callable[[Any], bool]
    length: Callable[[Any], int | None]  # see NOTE [Lightning counts]


_LIGHTNING = _Habits(
    is_ahead=lambda fetcher: fetcher.length is None,
    length=lambda fetcher: fetcher.length if len(fetcher.combined_loader.flattened) == 1 else None,
)
# Classes of such readers, by module and name.
_READERS: dict[tuple[str, str], _Habits] = {
    ("ray.train.torch.train_loop_utils", "_WrappedDataLoader"): _Habits(lambda _: True, lambda _: None),
    ("lightning.pytorch.loops.fetchers", "_PrefetchDataFetcher"): _LIGHTNING,
    ("pytorch_lightning.loops.fetchers", "_PrefetchDataFetcher"): _LIGHTNING,
}


def callers() -> Iterator[Any]:
    """The objects in whose methods this thread is, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back


class Reader:
    """The code that requests a loader's iterator, if that is a framework with habits."""

    def __init__(self, reader: Any, habits: _Habits) -> None:
        self._reader, self._habits = weakref.ref(reader), habits

    @property
    def is_ahead(self) -> bool:
        """Whether it is one batch ahead, as far as is known when it draws a batch."""
        return (reader := self._reader()) is not None and self._habits.is_ahead(reader)

    @property
    def length(self) -> int | None:
        """After how many batches it ends an epoch, without asking for the end; None if it does not count them."""
        return None if (reader := self._reader()) is None else self._habits.length(reader)


def find_reader() -> Reader | None:
    """The code that requests a loader's iterator in this thread; None if it has no habits."""
    known = [
        (getattr(sys.modules[module], name, ()), habits)
        for (module, name), habits in _READERS.items()
        if module in sys.modules
    ]
    for caller in callers() if known else ():
        for reader_class, habits in known:
            if issubclass(type(caller), reader_class):
                return Reader(caller, habits)
    return None


class Before:
    """The state of a loader from before the last batch was drawn; none if that batch was passed on."""

    def __init__(self) -> None:
        self._told: dict[str, Any] | Exception | None = None

    @property
    def is_known(self) -> bool:
        """Whether this is the state to return."""
        return self._told is not None

    def state(self) -> dict[str, Any]:
        """The state. Raises an error that occurred when it was made: it matters only if the state is requested."""
        if isinstance(self._told, Exception):
            raise self._told
        assert self._told is not None
        return {**self._told}

    def draws(self, iterator: Iterator[Any], tell: Callable[[], dict[str, Any]] | None) -> Any:
        """The next batch of an iterator.

        Args:
            iterator: of the loader.
            tell: makes the state; None: the batch is passed on at once.
        """
        held = self._told
        try:
            self._told = tell() if tell is not None else None
        except Exception as error:  # an error from the dataset's or the sampler's own state
            self._told = error
        try:
            return next(iterator)
        except StopIteration:
            self._told = None
            raise
        except BaseException:  # the batch drawn before has still not been passed on
            self._told = held
            raise


class ReadAhead(Iterator[Any]):
    """The iterator for a reader with habits; see NOTE [One batch ahead] and NOTE [Lightning counts].

    Args:
        iterator: of the loader.
        before: where the state is kept; the loader has it too, until another iterator is requested.
        reader: requests the iterator.
        tell: makes the loader's state as of the last batch that was drawn.
        next_epoch: for an epoch that a state has resumed: makes the iterator of the next one if so many batches of
            this one were taken.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        before: Before,
        reader: Reader,
        tell: Callable[[], dict[str, Any]],
        next_epoch: Callable[[int], Iterator[Any] | None] | None,
    ) -> None:
        self._iterator, self._before, self._reader, self._tell = iterator, before, reader, tell
        self._next_epoch = next_epoch

    def __next__(self) -> Any:
        next_epoch, self._next_epoch = self._next_epoch, None
        if next_epoch is not None and (length := self._reader.length) is not None:
            self._iterator = next_epoch(length) or self._iterator
        return self._before.draws(self._iterator, self._tell if self._reader.is_ahead else None)
