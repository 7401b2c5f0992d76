"""Waits for the answers to Ray calls.

Promise: no thread waits inside Ray (NOTE [waiting] in mailbox.py), so exceptions of signal handlers pass through
unchanged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from rayloader._compat_ray import on_completed
from rayloader.bell import Bell

NONE_YET: Any = object()


class RayAnswer:
    """The answer to a Ray call, once it comes; no thread waits inside Ray to find out.

    Attributes:
        ref: of the call.
        value: the answer, or an error of Ray's; NONE_YET before.
    """

    __slots__ = ("ref", "value")

    def __init__(self, ref: Any) -> None:
        self.ref = ref
        self.value: Any = NONE_YET
        on_completed(ref, self._note)

    @property
    def succeeded(self) -> bool:
        """Whether an answer came, and no error."""
        return self.value is not NONE_YET and not isinstance(self.value, Exception)

    def _note(self, value: Any) -> None:  # in one of Ray's threads
        self.value = value


def wait_for(refs: Sequence[Any], count: int, timeout: float) -> list[Any]:
    """Waits until `count` of these calls are answered, for `timeout` seconds at most.

    Returns:
        The answer to each of them: an error of Ray's if there will be none, NONE_YET if there is none so far.
    """
    bell = Bell()
    answers = [NONE_YET] * len(refs)

    def note(index: int, answer: Any) -> None:  # in one of Ray's threads
        answers[index] = answer
        bell.ring()

    for index, ref in enumerate(refs):
        on_completed(ref, functools.partial(note, index))
    until = time.monotonic() + timeout
    while sum(answer is not NONE_YET for answer in answers) < count and (left := until - time.monotonic()) > 0:
        bell.wait(left)
    return list(answers)
