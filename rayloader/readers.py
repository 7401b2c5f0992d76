"""Readers of loaders that are a batch ahead of the program: what such a loader's state contains.

Promise: a state counts the batches that the program was given. Batches that a framework in between has drawn and
not passed on come again.

NOTE [One batch ahead]
The loader that Ray Train's `prepare_data_loader` returns draws the next batch before it passes on the previous one, to
move it to the device meanwhile. So does Lightning where the length is not known, to notice the last batch. For these, a
state is made before each batch is drawn, and remains valid until the next one is: as Accelerate does, which also draws
ahead. Once the end is found, nothing is ahead, and the state is that of a finished epoch, even while the program has
the last batch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# Classes of such readers, by module and name, with a function that says whether an object reads ahead.
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
    """Whether the code that requests a loader's iterator reads ahead, as far as is known when it draws a batch.

    Returns:
        None if no caller ever reads ahead.
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
    """The iterator for a reader that may be a batch ahead; see NOTE [One batch ahead].

    Args:
        iterator: of the loader.
        before: where the state is kept; the loader has it too, until another iterator is requested.
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
