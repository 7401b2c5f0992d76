"""Files of caches, which are named by what the user says they hold, and used only if nobody else can have written them.

Promise: what is checked is the open file, so nobody can put another one in its place afterwards; use the descriptor,
and not the path again. Without Ray; any thread and any process may call.
"""

from __future__ import annotations

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


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Opens a file that this user has written, and nobody else can have written.

    Args:
        path: of the file.
        flags: of `os.open`. With `os.O_CREAT` a file that is made is for this user alone.

    Returns:
        A descriptor of the caller's, which programs that are started do not inherit.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be opened, for instance because it is a symbolic link.
        CacheError: it is not a regular file, or of another user, or has other names, or others may write to it.
    """
    # The last flag: whoever opens a pipe would wait for a writer.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    status = os.fstat(descriptor)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    # It has no name if another process has put a newer file in its place.
    if not is_own or status.st_nlink > 1 or status.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        os.close(descriptor)
        raise CacheError(
            f"the cache file {path} must be a regular file of this user's, with one name, to which nobody else may "
            f"write; it has mode {status.st_mode:o}, user {status.st_uid} and {status.st_nlink} names, so nothing of "
            "it was read. Delete it, or name a folder to which only this user can write"
        )
    return descriptor
