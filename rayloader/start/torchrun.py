"""One Ray for all ranks of one job on a machine: found, started if there is none yet, and released.

The ranks are those of torchrun, or of a launcher that sets the same variables (Lightning's, Accelerate's, DeepSpeed's).

Promise: Ray runs while any of the ranks is a member, and ends after the last, whichever ranks come late, leave early or
are killed, and in whatever order. A rank that cannot become a member gets an error with the reason. This module does
not import Ray.

NOTE [one keeper]
Ray's daemons die with the thread that started them (NOTE [who starts Ray] in session.py), and any rank may be the first
to end. So a separate process, the keeper (`rayloader/start/keeper.py`), starts Ray, and ends it when no rank is
connected to it any more. If a rank dies, the kernel ends its connection.

The ranks meet at an abstract socket, whose name is derived from the launcher's environment variables. The rank that
succeeds in binding the name starts the keeper and passes it the listening socket. It has connected before, so that the
keeper finds it in the socket's queue. All others wait in the queue too while Ray starts, and then receive its address.
A keeper that is about to end closes the socket first. That frees the name, and ends the connections in the queue: those
ranks begin again, with a new keeper. Nothing is written to the file system, and nothing polls.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from rayloader.errors import RaySessionError
from rayloader.transport.local_line import LocalSocket, peer

KEEPER = Path(__file__).parent / "keeper.py"
# Environment variables that tell jobs apart, and the machines of one job. Two jobs that run at the same time differ in
# the port; the rank of a machine has one name in torchrun and another in Lightning. The launcher's process id would not
# do, because a rank may have been started through a script of the user's.
VARIABLES = "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "NODE_RANK"
_NEEDED = {"MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"}  # set by every launcher


def meeting_point() -> str | None:
    """The abstract name where the ranks of this machine meet; None unless a launcher has started several.

    Lightning sets the number of ranks during the first `fit()` only.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE"))
    if ranks == "1" or not os.environ.keys() >= _NEEDED or sys.platform != "linux":
        return None
    values = [os.environ.get(variable) for variable in VARIABLES]
    return "rayloader-ray-" + hashlib.sha256(repr((os.getuid(), values)).encode()).hexdigest()[:32]


class Membership:
    """One rank's membership in the shared Ray, which lives at least as long.

    Args:
        name: of the meeting point.
    """

    def __init__(self, name: str) -> None:
        self._name = f"\0{name}"
        self._connection = LocalSocket()
        self._listener = LocalSocket()  # for the keeper, if this rank starts it
        self._left = False

    def begin(self, settings: dict[str, Any]) -> str:
        """Waits until Ray runs.

        Args:
            settings: the arguments of `ray.init`, for a Ray that has to be started.

        Returns:
            Ray's address.

        Raises:
            RaySessionError: it does not start: with Ray's reason, or what has happened.
        """
        try:
            while True:
                is_first = self._connect(settings)
                if peer(self._connection)[1] != os.getuid():
                    raise RaySessionError(f"another user's process has the local socket {self._name[1:]}")
                answer = self._hear()
                if "address" in answer:
                    return answer["address"]
                if "error" in answer or is_first:
                    raise RaySessionError(answer.get("error", "the process that was to start it has ended"))
        finally:
            self._listener.close()

    def wait(self) -> bool:
        """Waits until the keeper has died, and Ray with it (True), or until this rank leaves (False)."""
        with contextlib.suppress(OSError):
            self._connection.recv(1)  # nothing is ever sent
        self._connection.end()
        return not self._left

    def leave(self) -> None:
        """Ends the membership; Ray must not be used any more. It wakes `wait`, which closes the connection itself."""
        self._left = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """To be called in a forked child, which is no member but would look like one."""
        self._connection.end()
        self._listener.end()

    def _connect(self, settings: dict[str, Any]) -> bool:
        """Connects to the keeper; returns whether the keeper was started for that."""
        while True:
            self._connection.end()
            self._connection = LocalSocket()
            self._connection.settimeout(None)  # independent of the program's default
            with contextlib.suppress(ConnectionRefusedError):
                self._connection.connect(self._name)
                return False
            try:
                self._listener.bind(self._name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # another rank was faster, and is about to listen
            self._listener.listen()
            self._connection.connect(self._name)
            _start_keeper(self._listener.fileno(), settings)
            self._listener.close()  # otherwise the queue would outlive the keeper
            return True

    def _hear(self) -> dict[str, str]:
        """The keeper's message; empty if it has ended."""
        said = b""
        with contextlib.suppress(ConnectionError):
            while not said.endswith(b"\n") and (part := self._connection.recv(1 << 16)):
                said += part
        answer: dict[str, str] = json.loads(said) if said.endswith(b"\n") else {}
        return answer


def _start_keeper(listener: int, settings: dict[str, Any]) -> None:
    """Returns once it runs independently. Ctrl-C in the terminal must not reach it: the ranks may continue."""
    subprocess.run(
        [sys.executable, str(KEEPER), str(listener), json.dumps(settings)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[listener],
        start_new_session=True,
        check=False,
    )
