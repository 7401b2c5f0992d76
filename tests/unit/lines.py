"""Lines of both kinds, and what their tests do alike."""

from __future__ import annotations

import select
import threading

from rayloader.actors import tcp_line
from rayloader.actors.tcp_line import TcpDriverLine
from rayloader.transport.line import DriverLine, Line, ListeningLine, connect

HERE = "127.0.0.1"
LIMIT_S = 500.0
KINDS = "local", "tcp"


def new_buffer(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def listening(kind: str) -> ListeningLine:
    """The driver's end of a line."""
    return DriverLine(lambda _: True) if kind == "local" else TcpDriverLine(HERE, new_buffer)


def reach(driver: ListeningLine) -> Line:
    """The worker's end; by TCP the driver must be served meanwhile."""
    if isinstance(driver, DriverLine):
        return connect(driver.address)
    return tcp_line.connect(driver.address, new_buffer, LIMIT_S)


def met(driver: ListeningLine) -> Line:
    """The worker's end of this line, which the driver has let in."""
    found: list[Line] = []
    worker = threading.Thread(target=lambda: found.append(reach(driver)))
    worker.start()
    serve(driver, until=lambda: not worker.is_alive())
    worker.join()
    serve(driver, until=lambda: driver._socket is not None)
    return found[0]


def serve(driver: ListeningLine, until) -> None:
    """Lets in, or turns away, who connects."""
    while not until():
        wait_for(driver, 10)
        driver.read()


def plain(message):
    return message if isinstance(message, bytes) else (message[0], [bytes(buffer) for buffer in message[1]])


def wait_for(line: Line, milliseconds: int | None = None) -> None:
    """Waits until something can be received or sent."""
    poll = select.poll()
    for descriptor, events in line.descriptors:
        poll.register(descriptor, events)
    poll.poll(milliseconds)


def messages(line: Line, count: int) -> list:
    """So many messages, or fewer if the line ends."""
    found: list = line.arrived()
    while len(found) < count and not line.ended:
        wait_for(line)
        line.flush()
        found += line.receive()
    return found
