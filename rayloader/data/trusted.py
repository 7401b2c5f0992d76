"""Files of caches, which are named by what the user says they hold, and used only if nobody else can have written them.

Promise: what is checked is the open file, so nobody can put another one in its place afterwards; use the descriptor,
and not the path again. Without Ray; any thread and any process may call.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import Any

from rayloader.errors import CacheError


def path_in(folder: str | os.PathLike[str], dataset: Any, key: Any) -> Path:
    """The first part of a file's path, for what a user calls by a key.

    Raises:
        ValueError: it is no key.
    """
    if not isinstance(key, str) or not key:
        raise ValueError(
            f"a file in a folder needs key=, a text that you change whenever the samples change, got {key!r}; pass for "
            'instance key="version 1"'
        )
    kind = type(dataset).__name__
    readable = re.sub(r"[^A-Za-z0-9]+", "_", f"{kind} {key}")[:60]
    identity = hashlib.sha256(f"{kind} {key}".encode()).hexdigest()[:16]
    return Path(folder).absolute() / f"{readable}-{len(dataset)}-{identity}"


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Opens a file that this user has written.

    Args:
        path: of the file.
        flags: of `os.open`.
        mode: of a file that is made, with `os.O_CREAT` in `flags`.

    Returns:
        A descriptor of the caller's, which programs that are started do not inherit.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened.
        CacheError: it is a link, not a regular file, of another user, has other names, or others may write to it.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last one: whoever opens a pipe would wait for a writer
    try:
        descriptor = os.open(path, flags, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise _refusal(path, "is a symbolic link") from None
    if what := _what_is_foreign(os.fstat(descriptor)):
        os.close(descriptor)
        raise _refusal(path, what)
    return descriptor


def _what_is_foreign(status: os.stat_result) -> str:
    """Why others than this user may have written a file; empty if they cannot have."""
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    if status.st_nlink > 1:  # none, if another process has put a newer one in its place
        return f"has {status.st_nlink} hard links instead of one"
    if status.st_uid != (own := os.geteuid()):
        return f"belongs to user {status.st_uid}, and this process to user {own}"
    if status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        return f"may be written to by others, with mode {stat.S_IMODE(status.st_mode):o}"
    return ""


def _refusal(path: str | os.PathLike[str], what: str) -> CacheError:
    return CacheError(
        f"the cache file {os.fspath(path)} {what}, so that it may hold what another user has put there; nothing of it "
        "was read. Delete it, or name a folder to which only this user can write"
    )
