"""What each step of a plain batch's way costs, in microseconds, beside a bare loop of socket and pickle.

Motive: with small batches the loader's own work is what a user waits for. This says which step to look at.
Method: both ends of a line and of an arena in one process, without Ray and without a dataset: a batch of 64 samples
(1x28x28 uint8, label), and the library's own functions, called as epoch, channel and worker call them. One batch is
under way at a time, so that nothing is packed together; the processes would share the steps, and pay a wake-up in
addition. The bare loop sends pickled indices and brings back the pickled bytes of the same batch, opened by
`torch.frombuffer`. The two alternate; the median of the rounds counts.
Command: python benchmarks/way_of_a_batch.py [rounds]. Needs the extra `dev` only.
"""

from __future__ import annotations

import pickle
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rayloader.epoch.messages import (
    BatchTaken,
    Deliver,
    IndicesDrawn,
    Opened,
    SamplerExhausted,
    Submit,
    TaskDone,
    WorkerReady,
)
from rayloader.epoch.schedule import Schedule
from rayloader.protocol import Answer, Down, ResultKind, Up, carried, pack_spent
from rayloader.resume.digest import digest, drawn
from rayloader.resume.journal import Journal
from rayloader.task import Task
from rayloader.transport import codec
from rayloader.transport.codec import Fresh
from rayloader.transport.lanes import ArenaLane, Wire, WorkerLane, from_wire, in_message, received, sealed, to_wire
from rayloader.transport.local_line import DriverLine, connect

BATCHES = 2000  # a round
DRIVER = "draw", "journal", "schedule", "send", "receive", "lend", "open", "release"
WORKER = "receive task", "encode", "place", "send result"


def new_batch() -> list[torch.Tensor]:
    """A batch as `default_collate` gives it."""
    return [torch.zeros(64, 1, 28, 28, dtype=torch.uint8), torch.arange(64)]


class Way:
    """The way of a batch through the library, each step timed."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._driver = DriverLine(lambda _: True)
        self._worker = connect(self._driver.address)
        self._driver.receive()
        self._lane, self._worker_lane = ArenaLane(), WorkerLane()
        self._arena: Any = None

    def epoch(self) -> None:
        """Sends the batches of an epoch, one at a time."""
        schedule, journal, checksum = Schedule(1, 1), Journal(), 0
        schedule.handle(WorkerReady(0))
        schedule.handle(Opened())
        for task_id in range(BATCHES):
            checksum = self._batch(task_id, schedule, journal, checksum)
        schedule.handle(SamplerExhausted())

    def _batch(self, task_id: int, schedule: Schedule, journal: Journal, checksum: int) -> int:
        timed = self._timed
        indices = list(range(64 * task_id, 64 * task_id + 64))
        draw = timed("draw", lambda: drawn(indices, checksum, carried()))
        commands = timed("schedule", lambda: schedule.handle(IndicesDrawn(draw)))
        assert isinstance(commands[0], Submit)
        task = commands[0].task
        timed("journal", lambda: journal.given(task))
        lent: Any = timed("send", lambda: self._submit(task))
        message = timed("receive task", lambda: pickle.loads(self._worker.receive()[0]))
        arena = timed("receive task", lambda: self._worker_lane.open(message[5]))
        assert timed("receive task", lambda: from_wire(Wire(*message[4]))) == indices
        batch: Any = new_batch()
        fresh = {id(t): Fresh(t, memoryview(t.numpy().reshape(-1).view(np.uint8))) for t in batch}  # as collate has it
        encoded: Any = timed("encode", lambda: codec.encode(batch, known_classes=True, carry=carried(), fresh=fresh))
        checked = timed("encode", lambda: digest(batch, encoded))
        timed("place", lambda: arena.begin(0))
        wire = timed("place", lambda: to_wire(encoded, arena))
        nbytes = sum(buffer.nbytes for buffer in encoded.buffers)
        batch = encoded = fresh = None
        wire = timed("place", lambda: sealed(wire, arena))
        answer: Any = Answer(task_id, ResultKind.BATCH, tuple(wire), nbytes=nbytes, digest=checked)
        timed("send result", lambda: self._answer(answer))
        answer = timed("receive", lambda: Answer(*pickle.loads(self._driver.receive()[0])[3]))
        answer.wire = timed("lend", lambda: received(answer.wire, lent))
        timed("journal", lambda: journal.answered(task_id, answer.digest))
        commands = timed("schedule", lambda: schedule.handle(TaskDone(task_id, answer, nbytes)))
        assert isinstance(commands[0], Deliver)
        opened = [timed("open", lambda: from_wire(answer.wire))]
        assert opened[0][1][5] == 5
        lent = None
        timed("release", opened.clear)
        answer = None
        timed("schedule", lambda: schedule.handle(BatchTaken(task_id)))
        timed("journal", lambda: journal.taken(task_id))
        return draw.checksum

    def _submit(self, task: Task) -> Any:
        lent, room = self._lane.lend(self._arena)
        self._arena = lent.arena.address
        message = (Down.RUN, 0, task.task_id, task.task_id, in_message(task.indices.encoded), room)
        self._driver.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        return lent

    def _answer(self, answer: Answer) -> None:
        answer.spent = pack_spent(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._worker.send(pickle.dumps((Up.ANSWER, 0, answer.task_id, answer.fields), pickle.HIGHEST_PROTOCOL))

    def _timed(self, step: str, function: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = function()
        self.seconds[step] += time.perf_counter() - began
        return result


def bare() -> float:
    """Seconds that a bare loop takes for the same batches."""
    here, there = socket.socketpair()
    batch, total = new_batch(), 0.0
    for number in range(BATCHES):
        indices = list(range(64 * number, 64 * number + 64))
        began = time.perf_counter()
        here.sendall(pickle.dumps((number, indices), 5))
        pickle.loads(there.recv(1 << 16))
        there.sendall(pickle.dumps((number, [(t.dtype, t.shape, t.numpy().tobytes()) for t in batch]), 5))
        answer = pickle.loads(here.recv(1 << 18))
        opened = [torch.frombuffer(bytearray(data), dtype=dtype).view(shape) for dtype, shape, data in answer[1]]
        total += time.perf_counter() - began
        assert opened[1][5] == 5
    here.close()
    there.close()
    return total


def main() -> None:
    """Measures and prints a line a step."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    torch.set_num_threads(1)
    ways, loops = [], []
    for _ in range(rounds + 1):
        way = Way()
        way.epoch()
        ways.append(way.seconds)
        loops.append(bare())

    def median(values: list[float]) -> float:
        return 1e6 * statistics.median(values[1:]) / BATCHES  # without the first round, which warms up

    for side, steps in (("driver", DRIVER), ("worker", WORKER)):
        for step in steps:
            print(f"{side:8}{step:14}{median([seconds[step] for seconds in ways]):7.1f} us")
        print(f"{side:8}{'in all':14}{median([sum(seconds[step] for step in steps) for seconds in ways]):7.1f} us")
    whole, loop = median([sum(seconds.values()) for seconds in ways]), median(loops)
    print(f"both    {'in all':14}{whole:7.1f} us, the bare loop {loop:.1f} us: {whole / loop:.2f} times")


if __name__ == "__main__":
    main()
