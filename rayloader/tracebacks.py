"""Which lines tell the user something: not those of this package, and of torch's loader."""

from __future__ import annotations

import inspect
from types import TracebackType

_OURS = ("rayloader.", "torch.utils.data.")


def shorten(error: BaseException, says_all: bool) -> None:
    """Shortens the traceback of an error that passes through this package; it then holds none of our objects.

    Args:
        error: the one that is being raised; the function that calls this stays in its traceback.
        says_all: it does not need the line where it was raised. Otherwise only the lines between the user's are
            removed: an error that was raised in this package is a fault of it, and keeps all lines.
    """
    first = error.__traceback__
    if first is None or (lines := first.tb_next) is None:
        return
    theirs: TracebackType | None = lines
    while theirs is not None and theirs.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        theirs = theirs.tb_next
    if theirs is not None or says_all:
        first.tb_next = theirs


def level_outside(*packages: str) -> int:
    """The `stacklevel` for `warnings.warn` at which the caller's warning names the first line outside of packages."""
    level, frame = 0, inspect.currentframe()  # this function's, in this package
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in packages:
        level, frame = level + 1, frame.f_back
    return level
