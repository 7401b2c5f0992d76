"""What the tests of local lines and of those by TCP do alike."""

from __future__ import annotations

import select

from rayloader.transport.line import Line


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


def exchange(sender: Line, receiver: Line, sent: list) -> list:
    """Sends all of this, and receives as much."""
    for message in sent:
        sender.send(message)
    found: list = []
    while len(found) < len(sent):
        sender.flush()
        found += receiver.receive()
    return found


def check_finished(driver: Line, worker: Line) -> None:
    """The driver has finished and the worker has heard it: that may still answer, and its end is heard too."""
    assert worker.ended
    assert not worker.hung_up
    worker.send(b"still heard")
    assert messages(driver, 1) == [b"still heard"]
    worker.close()
    assert messages(driver, 1) == []
    assert driver.ended
    driver.close()
