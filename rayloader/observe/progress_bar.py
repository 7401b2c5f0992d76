"""A progress bar around a loader: its rate, and how long the trainer waits for it.

Promise: batches pass through unchanged, and none is kept; the loader's position stays right under interrupts. The
bar is tqdm's, which the extra `progress` installs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from rayloader.loader import DataLoader

_T_co = TypeVar("_T_co", covariant=True)


def progress(loader: DataLoader[_T_co], **options: Any) -> Progress[_T_co]:
    """The loader with a tqdm bar, which shows the rate, the share of the time that the trainer waits, and restarts.

    For instance::

        for batch in rayloader.progress(loader, desc="epoch 3"): ...

    Each `iter()` has a bar of its own, in a terminal or a notebook; where standard error is neither, there is none.
    The bar is closed with the last batch, or when the loop ends before that.

    Args:
        loader: of rayloader's class.
        options: of tqdm, for instance `desc`, `file`, `leave`, `position`; `disable=False` shows a bar in any case.

    Raises:
        ImportError: tqdm is not installed.
        TypeError: the loader is of another class.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"progress() takes a rayloader.DataLoader, got {type(loader).__name__}; put tqdm around others")
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("rayloader.progress needs tqdm: pip install rayloader[progress]") from error
    return Progress(loader, tqdm, {"unit": "batch", "disable": None, **options})


class Progress(Generic[_T_co]):
    """What `progress` returns."""

    def __init__(self, loader: DataLoader[_T_co], tqdm: Any, options: dict[str, Any]) -> None:
        self._loader = loader
        self._tqdm = tqdm
        self._options = options

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[_T_co]:
        return _Bar(self._loader, self._tqdm, self._options)


class _Bar(Iterator[_T_co]):
    """The bar of one epoch."""

    def __init__(self, loader: DataLoader[_T_co], tqdm: Any, options: dict[str, Any]) -> None:
        self._bar: Any = None  # first: `__del__` may run after an error in the next lines
        self._loader = loader
        self._iterator: Iterator[_T_co] = iter(loader)
        self._begun = False
        # After `iter()`: output while workers start comes before the bar.
        with contextlib.suppress(TypeError):  # a stream need not know its length
            options = {"total": len(loader), **options}
        self._bar = tqdm(**{"initial": loader._position.delivered, **options})

    def __next__(self) -> _T_co:
        try:
            if self._begun:
                self._bar.update()
            self._begun = True
            self._bar.set_postfix_str(_said(self._loader), refresh=False)
            # Nothing may be called after this, and `next()` would be: see NOTE [interrupts] in interrupts.py.
            return self._iterator.__next__()
        except BaseException:  # the last batch, an error or Ctrl-C: the bar ends with the loop
            self._bar.close()
            raise

    def __del__(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _said(loader: DataLoader[Any]) -> str:
    tally = loader._recorder.latest
    wait, step = tally.wait.total, tally.step.total
    waits = f"wait {wait / (wait + step):.0%}" if wait + step else ""
    return f"{waits}, restarts {tally.restarts}" if tally.restarts else waits
