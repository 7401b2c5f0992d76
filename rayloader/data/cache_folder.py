"""Where a cache in a folder is: a file for each node, which is opened only if nobody else could have written it.

Promise: what lies under the name that everybody can compute is looked at before any of it is read: a link, the file of
another user and one that others may write to are errors. Folders and files that are made here are this user's alone.

With `shared=True` others of a group may write to the file; so nothing in it is unpickled: see plain_samples.py.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import secrets
from pathlib import Path
from typing import Any

from rayloader.data.fingerprint import WithoutContent
from rayloader.data.sample_store import SampleStore
from rayloader.data.trusted import open_own
from rayloader.errors import CacheError
from rayloader.observe.stats import nbytes

logger = logging.getLogger("rayloader")


class InFolder(WithoutContent):
    """Where a cache in a folder is.

    Args:
        folder: in which each node has a file of its own.
        kind: the name of the dataset's class.
        identity: what the samples are, 32 bytes.
        shared: others of a group may write to the file.
        run: a number that all copies have, in whatever process; None: a new one.
    """

    remedy = (
        "name another folder, delete a file that is not one of this version, make room, or raise this process's "
        "limits of memory and open files (ulimit)"
    )
    _fd = -1

    def __init__(self, folder: Path, kind: str, identity: bytes, shared: bool, run: int | None = None) -> None:
        self._folder, self._kind, self._identity, self._shared = folder, kind, identity, shared
        self._run = run or secrets.randbits(62) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder, self._kind, self._identity, self._shared, self._run)

    def __str__(self) -> str:
        return f"in {self._folder}"

    @property
    def anew(self) -> str:
        """How to make a new cache."""
        return f"delete {self._path} to make a new cache, and let fingerprint= say what has changed"

    def open(self, count: int, max_bytes: int) -> SampleStore:
        """Opens this node's file.

        Raises:
            OSError: it can't be opened.
            ValueError: it is of another format, or of other samples.
            CacheError: another user could have put it there.
        """
        if not self._shared:
            _make(self._folder)
        kind = f"{re.sub(r'[^A-Za-z0-9_]', '_', self._kind)[:40]}-{count}"
        name, node = f"{self._identity.hex()[:32]}", f"{os.uname().nodename}.rayloader-cache"
        self._path = self._folder / f"{kind}-{name}-{node}"
        self._fd = _opened(self._path, self._shared)
        shm = Path("/dev/shm")
        in_memory = shm.exists() and os.fstat(self._fd).st_dev == shm.stat().st_dev
        options: dict[str, Any] = {"in_memory": in_memory, "identity": self._identity, "run": self._run}
        store = SampleStore(self._fd, count, max_bytes, plain=self._shared, **options)
        if store.is_new:
            pattern = f"{kind}-{'?' * len(name)}-{glob.escape(node)}"
            _tell_of_older(sorted(path for path in self._folder.glob(pattern) if path != self._path))
        return store

    def __del__(self, close: Any = os.close) -> None:
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1


def _make(folder: Path) -> None:
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(0o700, exist_ok=True)


def _opened(path: Path, shared: bool) -> int:
    """Opens a file, which is made if there is none."""
    while True:
        try:
            return open_own(path, os.O_RDWR, shared=shared)
        except FileNotFoundError:
            if shared and not path.parent.exists():
                raise CacheError(
                    f"shared=True needs a folder to which the group can write, and there is no {path.parent}; make it, "
                    "for instance by mkdir -m 2770"
                ) from None
        with contextlib.suppress(FileExistsError):  # another process is faster
            mode = 0o660 if shared else 0o600
            fd = open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode, shared=shared)
            os.fchmod(fd, mode)  # whatever the umask is
            return fd


def _tell_of_older(files: list[Path]) -> None:
    """Says, when a file was begun, which others there are of a dataset of this class and length."""
    if not files:
        return
    taken = 0
    for file in files:
        with contextlib.suppress(OSError):  # it was deleted meanwhile
            taken += file.lstat().st_blocks * 512
    logger.warning(
        "rayloader: beside the new cache, its folder holds %d other ones of a dataset of this class and length, %s in "
        "all: the dataset, its code or its files were different. Delete those that no program uses: %s",
        len(files),
        nbytes(taken),
        " ".join(map(str, files)),
    )
