"""The keeper of a Ray: starts it, sends its address to each process that connects, and ends it after the last one.

    python rayloader/start/keeper.py DESCRIPTOR SETTINGS

DESCRIPTOR is a listening local socket in whose queue the first process already waits; SETTINGS are the arguments of
`ray.init`, as JSON. Each process is sent one line of JSON, {"address": ...} or {"error": ...}, and counts until its
connection ends, for whatever reason. A keeper that is about to end closes the socket before it ends Ray: a process that
comes too late for this Ray is never sent its address, and begins again; see NOTE [one keeper] in torchrun.py.

It is run by path, and must not import torch, which would take more memory than all the rest: of rayloader it imports
only what starts Ray, without the package's `__init__`.
"""

import contextlib
import json
import os
import select
import socket
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def keep(listener: socket.socket, settings: dict[str, Any]) -> None:
    """Holds a Ray for the processes that connect."""
    listener.setblocking(False)
    with contextlib.suppress(ValueError):  # where it was run by path, Ray must not import what lies beside it
        sys.path.remove(str(Path(__file__).parent))
    try:
        import ray

        starting = import_fork_server()
        server = starting.ForkServer()
        starting.start_ray(ray, server, settings)
    except BaseException as error:  # any error: it is raised in the process that asked for Ray
        disappointed = let_in(listener)
        listener.close()  # a process that tries again finds no trace of this Ray
        for member in disappointed:
            tell(member, {"error": str(error)})
        return
    serve(listener, {"address": ray.get_runtime_context().gcs_address})
    listener.close()
    ray.shutdown()
    server.close()


def import_fork_server() -> ModuleType:
    """The module that starts a Ray."""
    package = sys.modules["rayloader"] = ModuleType("rayloader")
    package.__path__ = [str(Path(__file__).parents[1])]
    from rayloader.start import fork_server

    return fork_server


def serve(listener: socket.socket, answer: dict[str, str]) -> None:
    """Accepts and answers all connections, until none is left."""
    members: dict[int, socket.socket] = {}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for member in let_in(listener):
            tell(member, answer)
            members[member.fileno()] = member
            poll.register(member, select.POLLIN)
        if not members:
            return
        for descriptor, _ in poll.poll():
            if descriptor in members and has_left(members[descriptor]):
                poll.unregister(descriptor)
                members.pop(descriptor).close()


def let_in(listener: socket.socket) -> list[socket.socket]:
    """The connections that wait in the queue."""
    members = []
    with contextlib.suppress(BlockingIOError):
        while True:
            member, _ = listener.accept()
            credentials = member.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            if CREDENTIALS.unpack(credentials)[1] == os.getuid():
                members.append(member)
            else:
                member.close()  # a stranger who has read the name in /proc/net/unix
    return members


def tell(member: socket.socket, answer: dict[str, str]) -> None:
    """Sends a line, which always fits into an empty socket."""
    with contextlib.suppress(OSError):  # it has gone again
        member.sendall(json.dumps(answer).encode() + b"\n")


def has_left(member: socket.socket) -> bool:
    """Whether a readable connection has ended: nothing is ever sent over it."""
    try:
        return not member.recv(1)
    except OSError:
        return True


if __name__ == "__main__":
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.set_inheritable(False)  # Ray's processes outlive this one for a while
    if os.fork():
        os._exit(0)  # the process that started this one continues, and has no child to wait for
    keep(listener, json.loads(sys.argv[2]))
