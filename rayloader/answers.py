"""The answers to calls of actors, waited for outside of Ray.

Promise: `wait` returns when answers have come, and lets through whatever a signal handler raises meanwhile.

NOTE [waiting]
Python runs signal handlers in the main thread. If that waits in `ray.get` or `ray.wait`, Ray calls them and changes
what they raise: SystemExit loses its code, and any other exception of the program's ends as SystemError, or is printed
and dropped. So Ray is only asked to tell when a call is answered, which it does in a thread of its own, and the wait is
one for a `Bell`. It costs the same. A thread that waits here is not within Ray either while another shuts Ray down.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from rayloader.bell import Bell

# How long an answer that has come already may take to be told, in seconds: another thread has to run for it.
FIRST_LOOK_S = 0.01

_NONE_YET = object()


class Answers:
    """Answers by the reference of the call; an error of Ray's where there will be none. Any thread may wait."""

    def __init__(self) -> None:
        self._answers: dict[Any, Any] = {}  # to the calls that were asked about
        self._waiting: list[Bell] = []  # one of each thread that waits

    def __getitem__(self, ref: Any) -> Any:
        return self._answers[ref]

    def wait(self, refs: Sequence[Any], count: int, timeout: float) -> list[Any]:
        """Those of `refs` that are answered, once `count` of them are or after `timeout` seconds."""
        new = [ref for ref in refs if ref not in self._answers]
        for ref in new:
            ref._on_completed(functools.partial(self._answered, ref))  # Ray has no public name for it
            self._answers.setdefault(ref, _NONE_YET)
        answered = self._among(refs)
        if len(answered) >= count:
            return answered
        give_up = time.monotonic() + (max(timeout, FIRST_LOOK_S) if new else timeout)
        bell = Bell()
        self._waiting.append(bell)
        try:
            while len(answered := self._among(refs)) < count:
                left = give_up - time.monotonic()
                if left <= 0:
                    break
                bell.wait(left)
        finally:
            self._waiting.remove(bell)
        return answered

    def forget(self, ref: Any) -> None:
        """The answer is not needed any more."""
        self._answers.pop(ref, None)

    def _among(self, refs: Sequence[Any]) -> list[Any]:
        return [ref for ref in refs if self._answers[ref] is not _NONE_YET]

    def _answered(self, ref: Any, answer: Any) -> None:
        """Ray's thread."""
        self._answers[ref] = answer
        for bell in list(self._waiting):
            bell.ring()
