"""The files of a Ray that is started here, which only this user may read."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from rayloader.errors import RaySessionError

# Characters of the folder for temporary files: Ray adds some 90, and the name of a socket may have 107.
MOST_CHARACTERS = 12


def new_folder() -> str:
    """A folder that only this user enters, for the caller to remove: for one with the files and sockets of that Ray.

    Ray lets all users write to the folders that it uses.
    """
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="rayloader-", dir=base if len(base) <= MOST_CHARACTERS else "/tmp")


def keep_token_private() -> None:
    """Makes the file of the token that a local Ray asks for, and restricts it: Ray leaves its mode to the umask.

    Where the program has its token elsewhere, or wants none, nothing is done.
    """
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}.isdisjoint(os.environ):
        return
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 0600
                file.write(secrets.token_hex(32))  # as Ray makes it
                file.flush()
                with contextlib.suppress(FileExistsError):  # another program has made it meanwhile
                    os.link(file.name, path)
        if path.stat().st_uid == os.getuid():
            path.chmod(0o600)
    except OSError as error:
        raise RaySessionError(
            f"the token of a Ray that is started here can't be kept in {path}: {error}. Set HOME to a folder that this "
            "user can write to, or RAY_AUTH_TOKEN_PATH to a file with a token"
        ) from error
