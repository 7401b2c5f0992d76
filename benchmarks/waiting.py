"""What it costs the user's thread to be woken by one worker, as the workers that are silent grow more.

Motive: a trainer of hundreds of workers is woken for nearly every batch; whatever it does for each worker then counts.
Method: the library's own `Mailbox.wait` and `Mailbox.receive` over lines, and over Ray calls, without Ray: both ends
of the lines are in this process, and a call counts as answered when this process says so. One worker sends a message,
which is awaited and received; the CPU time of the thread is counted, the sender's left out.
Command: python benchmarks/waiting.py [--rounds N] [--quick]
"""

from __future__ import annotations

import itertools
import pickle
import resource
import time
from collections.abc import Iterator

import harness
from harness import Figure, Options
from rayloader.actors.channels import ActorLine, RayCalls
from rayloader.transport.local_line import connect
from rayloader.workers.connection import NONE_YET, Mailbox

QUESTION = "waiting"
COUNTS = (1, 4, 16, 64, 256, 1024)
WAKES = 200


class SilentActor:
    """Stands for an `Actor`."""

    def has_started(self) -> bool:
        """It has not."""
        return False


class SilentLine:
    """A line whose worker says nothing until `speak`."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.channel = ActorLine(SilentActor(), mailbox)  # type: ignore[arg-type]
        (served,) = self.channel._served
        served.ref = object()
        mailbox._answers[served.ref] = NONE_YET
        self._end = connect(served.line.address)
        served.line.receive()

    def speak(self) -> None:
        self._end.send(pickle.dumps(("message",)))


class SilentCalls:
    """Ray calls of which none is answered until `speak`."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.channel = RayCalls(SilentActor(), mailbox)  # type: ignore[arg-type]
        self._mailbox = mailbox
        self._call()

    def _call(self) -> None:
        ref = object()
        self._mailbox._answers[ref] = NONE_YET
        self.channel._unanswered.append((ref, lambda answer: answer))

    def speak(self) -> None:
        ref, _ = self.channel._unanswered[0]
        self._call()
        self._mailbox._answered(ref, self.channel, ("message",))


WAYS = {"lines": SilentLine, "Ray calls": SilentCalls}


def wakes(way: str, workers: int) -> Iterator[float]:
    """Seconds of CPU time of one wake-up after the other."""
    mailbox = Mailbox()
    silent = [WAYS[way](mailbox) for _ in range(workers)]
    for one in silent:
        mailbox.add(one.channel)
        mailbox.to(one.channel.process)
    mailbox.flush()  # from here on it is known what to wait for
    while True:
        silent[0].speak()
        began = time.thread_time()
        mailbox.wait(10.0)
        arrived = mailbox.receive()
        yield time.thread_time() - began
        assert len(arrived) == 1


def measure(options: Options) -> list[Figure]:
    """Microseconds a wake-up, for each number of workers."""
    # Two descriptors a line, at both ends.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    for way in WAYS:
        for workers in COUNTS[:-1] if options.quick else COUNTS:
            woken = wakes(way, workers)
            next(woken)
            rounds = [1e6 * sum(itertools.islice(woken, WAKES)) / WAKES for _ in range(options.rounds)]
            found.append(harness.figure(QUESTION, way, "rayloader", "CPU a wake-up", "us", rounds, workers=workers))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return found


def show(figures: list[Figure]) -> None:
    """Prints the table."""
    counts = sorted({f["workers"] for f in figures})
    rows = [
        [way, *(harness.show(harness.find(figures, case=way, workers=count)) for count in counts)]
        for way in dict.fromkeys(f["case"] for f in figures)
    ]
    header = ["the workers are driven by", *(f"{count} workers" for count in counts)]
    harness.print_table("Microseconds of the user's thread for a wake-up", header, rows)


if __name__ == "__main__":
    with harness.clean_exit():
        show(measure(harness.options(__doc__, choice=False)))
