"""Files of caches, which are used only if nobody but this user can have written them.

Promise: what is checked is the open file, so nobody can put another one in its place afterwards; use the descriptor,
and not the path again. Without Ray; any thread and any process may call.
"""

from __future__ import annotations

import os
import stat

from rayloader.errors import CacheError


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a file that this user has written; with `os.O_CREAT` in `flags` a new one is for this user alone.

    Returns:
        A descriptor of the caller's, which programs that are started do not inherit.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened.
        CacheError: it is a link, not a regular file, of another user, has other names, or others may write to it.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last one: whoever opens a pipe would wait for a writer
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        if os.path.islink(path):
            raise _refusal(path, "is a symbolic link") from None
        raise
    try:
        if what := what_is_foreign(os.fstat(descriptor)):
            raise _refusal(path, what)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def what_is_foreign(status: os.stat_result) -> str | None:
    """Why others than this user may have written a file; None if they cannot have."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid != (own := os.geteuid()):
        return f"belongs to user {status.st_uid}, and this process is of user {own}"
    if status.st_nlink > 1:  # none, if another process has put a newer one in its place
        return f"has {status.st_nlink} names"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"has mode {stat.S_IMODE(status.st_mode):#o}"
    return None


def _refusal(path: str | os.PathLike[str], what: str) -> CacheError:
    return CacheError(
        "a file of a cache must be a regular file of this user, with one name, to which nobody else may write: "
        f"{os.fspath(path)} {what}; remove it, or name another folder for the cache"
    )
