"""Ray calls: the channel to an actor that no line reaches.

Promise: that of channel.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.exceptions import RayError
from typing_extensions import override

from rayloader.protocol import Up
from rayloader.resume.journal import Resumed
from rayloader.task import Task
from rayloader.transport.lanes import Lent, pack, unpack
from rayloader.workers.actor import Actor
from rayloader.workers.channel import Channel, Message
from rayloader.workers.mailbox import Mailbox
from rayloader.workers.waiting import NONE_YET


class RayCalls(Channel):
    """One Ray call per message, whose answers go to the mailbox; batches travel through Ray's object store."""

    @property
    @override
    def lane(self) -> str:
        return "Ray calls"

    def __init__(self, actor: Actor, mailbox: Mailbox) -> None:
        super().__init__(actor)
        self._mailbox = mailbox
        self._unanswered: deque[tuple[Any, Callable[[Any], Message]]] = deque()  # oldest first

    @override
    def run(self, worker_id: int, task: Task) -> Lent | None:
        message = self._run(worker_id, task, None)
        self._call(self.actor.handle.run, message, [message[3]])
        return None

    @override
    def replay(self, worker_id: int, tasks: Sequence[Task]) -> None:
        message = self._replay(worker_id, tasks)
        self._call(self.actor.handle.replay, message, [wire for _, wire, _ in message[2]])

    def _call(self, method: Any, message: Any, wires: list[tuple[Any, ...]]) -> None:
        worker_id, call, *_ = message
        self._await(method.remote(pack(message, wires)), lambda answer: (Up.ANSWER, worker_id, call, unpack(answer)))

    @override
    def resume(self, worker_id: int, resumed: Resumed) -> None:
        self.actor.calls += 1
        call = self.actor.calls
        ref = self.actor.handle.resume.remote(worker_id, *resumed)
        self._await(ref, lambda answer: (Up.BEGUN, worker_id, call, answer))

    def _await(self, ref: Any, message: Callable[[Any], Message]) -> None:
        self._unanswered.append((ref, message))
        self._mailbox.watch(ref, self)

    @override
    def drop(self, after_call: int, from_task: int) -> None:
        pass  # Ray cannot withdraw calls

    @override
    def pause(self) -> None:
        pass  # Ray keeps the order of an actor's calls

    @override
    def flush(self) -> None:
        pass

    @override
    def descriptors(self) -> Iterator[tuple[int, int]]:
        return iter(())

    @override
    def read(self) -> None:
        pass  # Ray's threads have done it

    @override
    def receive(self) -> list[Message]:
        messages: list[Message] = []
        while self._unanswered and (answer := self._mailbox[self._unanswered[0][0]]) is not NONE_YET:
            ref, message = self._unanswered.popleft()
            self._mailbox.forget(ref)
            if isinstance(answer, RayError):
                return [*messages, self._lost(answer)]
            messages.append(message(answer))
        return messages

    @override
    def close(self) -> None:
        for ref, _ in self._unanswered:
            self._mailbox.forget(ref)
        self._unanswered.clear()
