"""Readers of loaders that are a batch ahead of the program: what such a loader's state tells.

Promise: a state counts the batches that the program was given. What a framework that stands in between has drawn and
not handed on is still to come.

NOTE [One batch ahead]
What Ray Train's `prepare_data_loader` returns draws the next batch before it hands one on, so as to move it to the
device meanwhile. So does Lightning where the length is not known, to notice the last batch. For these, a state is made
before each batch is drawn, and holds until the next one is: as Accelerate does, which has the same habit. Where the end
is found, there is nothing ahead, and the state is that of a finished epoch, also while the program has the last batch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Their classes: in what module, and whether one of them reads ahead.
_AHEAD: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("ray.train.torch.train_loop_utils", "_WrappedDataLoader"): lambda _: True,
    ("lightning.pytorch.loops.fetchers", "_PrefetchDataFetcher"): lambda fetcher: fetcher.length is None,
    ("pytorch_lightning.loops.fetchers", "_PrefetchDataFetcher"): lambda fetcher: fetcher.length is None,
}


def callers() -> Iterator[Any]:
    """The objects in whose methods this thread is, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if "self" in frame.f_code.co_varnames:
            yield frame.f_locals.get("self")
        frame = frame.f_back


def reader_ahead() -> Callable[[], bool] | None:
    """Whether the one who asks a loader for its iterator reads ahead, as far as is known when it draws a batch.

    Returns:
        None if nobody is asking who ever does.
    """
    known = [
        (getattr(sys.modules[module], name, ()), reads_ahead)
        for (module, name), reads_ahead in _AHEAD.items()
        if module in sys.modules
    ]
    for caller in callers() if known else ():
        for reader_class, reads_ahead in known:
            if issubclass(type(caller), reader_class):
                reader = weakref.ref(caller)
                return lambda: (alive := reader()) is not None and reads_ahead(alive)
    return None


class Before:
    """The state of a loader from before the last batch was drawn; none where that batch was handed on."""

    def __init__(self) -> None:
        self._told: dict[str, Any] | Exception | None = None

    @property
    def is_known(self) -> bool:
        """Whether it is the one to be told."""
        return self._told is not None

    def state(self) -> dict[str, Any]:
        """It. Raises what was raised when it was to be made: that is no matter of who never asks."""
        if isinstance(self._told, Exception):
            raise self._told
        assert self._told is not None
        return {**self._told}

    def draws(self, iterator: Iterator[Any], tell: Callable[[], dict[str, Any]] | None) -> Any:
        """The next batch of an iterator.

        Args:
            iterator: of the loader.
            tell: makes the state; None: the batch is handed on at once.
        """
        held = self._told
        try:
            self._told = tell() if tell is not None else None
        except Exception as error:  # whatever the dataset's or the sampler's own state raises
            self._told = error
        try:
            return next(iterator)
        except StopIteration:
            self._told = None
            raise
        except BaseException:  # what was drawn before is still not handed on
            self._told = held
            raise


class ReadAhead(Iterator[Any]):
    """What `iter()` returns to a reader that may be a batch ahead; see NOTE [One batch ahead].

    Args:
        iterator: of the loader.
        before: where the state is kept; the loader has it too, until it is asked for another iterator.
        reads_ahead: see `reader_ahead`.
        tell: makes the loader's state as of the last batch that was drawn.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        before: Before,
        reads_ahead: Callable[[], bool],
        tell: Callable[[], dict[str, Any]],
    ) -> None:
        self._iterator, self._before, self._reads_ahead, self._tell = iterator, before, reads_ahead, tell

    def __next__(self) -> Any:
        return self._before.draws(self._iterator, self._tell if self._reads_ahead() else None)
