"""Leaves lines out of tracebacks that tell the user nothing: those of this package, and of torch's loader."""

from __future__ import annotations

from types import TracebackType

_OURS = ("rayloader.", "torch.utils.data.")


def shorten(error: BaseException, says_all: bool) -> None:
    """Shortens the traceback of an error that passes through this package; it then holds none of our objects.

    Args:
        error: that is being raised; the function that calls this stays in its traceback.
        says_all: it needs no line of where it was raised. If it does, only those between the user's lines are left out:
            one that was raised in this package is a fault of it, and keeps all.
    """
    first = error.__traceback__
    if first is None or (lines := first.tb_next) is None:
        return
    theirs: TracebackType | None = lines
    while theirs is not None and theirs.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
        theirs = theirs.tb_next
    if theirs is not None or says_all:
        first.tb_next = theirs
