"""The schedule by transcripts, `schedule/*.txt`, which read as the protocol that they hold it to.

A line that begins in the first column is a comment (#) or a directive: an event, `schedule`, which begins anew, or
`show`. What comes of it is indented below it: the commands in their order, what has become deliverable, and the draws
that are owed, or an error. A directive without such lines must give nothing. With several tasks, workers or indices it
stands for one event each. `check_rules` follows every event.

To write down anew what comes out, after a change that is meant:

    REWRITE_TRANSCRIPTS=1 pytest tests/unit/test_schedule.py

This changes the files, and the tests fail all the same: the difference is to be read as a change of the protocol.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayloader.epoch.messages import (
    BatchTaken,
    Closed,
    Command,
    Event,
    Fail,
    IndicesDrawn,
    IndicesSkipped,
    Opened,
    ReplaceWorker,
    SamplerExhausted,
    SamplerFailed,
    Submit,
    TaskDone,
    WorkerExhausted,
    WorkerLost,
    WorkerReady,
)
from rayloader.epoch.schedule import Schedule
from schedule_rules import check_rules

TRANSCRIPTS = sorted((Path(__file__).parent / "schedule").glob("*.txt"))
INDENT = "    "
EVENTS = {
    "open": Opened,
    "ready": WorkerReady,
    "drawn": IndicesDrawn,
    "skipped": IndicesSkipped,
    "sampler-exhausted": SamplerExhausted,
    "sampler-failed": SamplerFailed,
    "done": TaskDone,
    "exhausted": WorkerExhausted,
    "taken": BatchTaken,
}


def in_words(command: Command) -> str:
    match command:
        case Submit(task):
            return f"submit {task.task_id} ({task.indices}) to worker {task.worker_id}"
        case ReplaceWorker(worker_id, cause):
            return f"replace worker {worker_id} ({cause})"
        case Fail(worker_id, cause, task):
            return f"fail: worker {worker_id} ({cause})" + ("" if task is None else f", at {task.task_id}")
    raise ValueError(command)


def read(words: list[str]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a directive: `i3..i5` is `i3 i4 i5`, `key=3` is an option, and so is a word in letters alone."""
    several, options = [], {}
    for word in words:
        if "=" in word:
            key, value = word.split("=")
            options[key] = int(value)
        elif (span := re.fullmatch(r"(\D*)(\d+)\.\.\1(\d+)", word)) is not None:
            several += [f"{span[1]}{n}" for n in range(int(span[2]), int(span[3]) + 1)]
        elif word[-1].isdigit():
            several.append(word)
        else:
            options[word] = True
    return [int(word) if word.isdigit() else word for word in several], options


class Player:
    """Carries out the directives of a transcript."""

    schedule: Schedule

    def play(self, text: str) -> str:
        """The transcript as it really comes out."""
        lines = []
        for line in text.splitlines():
            if line.startswith(INDENT):
                continue
            lines.append(line)
            if line and not line.startswith("#"):
                name, *words = line.split()
                lines += [INDENT + result for result in self.carry_out(name, words)]
        return "\n".join(lines) + "\n"

    def carry_out(self, name: str, words: list[str]) -> Iterator[str]:
        if name == "show":
            for what in words:
                yield from getattr(self, f"show_{what}")()
        elif name == "schedule":
            self.begin(**{word.replace("-", "_"): value for word, value in read(words)[1].items()})
        else:
            for event in self.events(name, words):
                try:
                    yield from self.outcome(event)
                except RuntimeError as error:
                    yield f"error: {error}"
                check_rules(self.schedule)

    def begin(self, workers, prefetch, restarts=0, task=0, worker=0, without_order=False, dynamic=False):
        """A new schedule; `task` and `worker`: where it goes on."""
        self.schedule = Schedule(
            workers,
            prefetch,
            in_order=not without_order,
            dynamic=dynamic,
            max_restarts=restarts,
            first_task_id=task,
            first_worker_id=worker,
        )

    def events(self, name: str, words: list[str]) -> list[Event]:
        if name == "lost":
            worker_id, cause, *how = words
            return [WorkerLost(int(worker_id), cause, **read(how)[1])]
        numbers, options = read(words)
        if name == "closed":
            return [Closed(**options)]
        return [EVENTS[name](number, **options) for number in numbers] or [EVENTS[name](**options)]

    def outcome(self, event: Event) -> Iterator[str]:
        """The commands, the tasks that have become deliverable, and how many more draws are owed."""
        deliverable, owed = [*self.schedule.deliverable], self.schedule.owed_draws
        yield from map(in_words, self.schedule.handle(event))
        yield from (f"deliver {task.task_id}" for task in self.schedule.deliverable if task not in deliverable)
        owed -= isinstance(event, (IndicesDrawn, IndicesSkipped, SamplerFailed))
        if self.schedule.owed_draws > owed >= 0:
            yield f"draw {self.schedule.owed_draws - owed}"

    def show_tasks(self) -> list[str]:
        return [
            f"{task.task_id} of {f'worker {task.worker_id}' if task.is_assigned else 'any worker'}: {task.state.name}"
            for task in self.schedule.tasks
        ] or ["no tasks"]

    def show_epoch(self) -> list[str]:
        s = self.schedule
        state = ("closed, " if s.closed else "") + ("finished" if s.finished else "not finished")
        return [f"window {s.window}, owed draws {s.owed_draws}, taken {s.taken}, {state}"]

    def show_deliverable(self) -> list[str]:
        return [f"deliverable {' '.join(str(task.task_id) for task in self.schedule.deliverable) or 'nothing'}"]

    def show_head(self) -> list[str]:
        return [f"head {self.schedule.head.task_id}" if self.schedule.head else "no head"]


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_schedule_keeps_to_the_transcript(path: Path) -> None:
    expected = path.read_text()
    found = Player().play(expected)
    if found != expected and os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(found)
        pytest.fail(f"{path.name} was rewritten: read the difference")
    assert found.splitlines() == expected.splitlines()


# ---- what a transcript can't show


def opened(num_workers: int, prefetch_factor: int, **options: bool | int) -> Schedule:
    """An opened schedule whose window is full, and whose workers are ready."""
    schedule = Schedule(num_workers, prefetch_factor, **options)
    for worker_id in range(num_workers):
        schedule.handle(WorkerReady(worker_id))
    schedule.handle(Opened())
    for _ in range(num_workers * prefetch_factor):
        schedule.handle(IndicesDrawn(None))
    return schedule


INTERRUPTED = [
    TaskDone(1),
    TaskDone(4),
    BatchTaken(0),
    IndicesDrawn(None),
    WorkerLost(0, "killed"),
    WorkerReady(0),
    Closed(resuming=True),
]


@pytest.mark.parametrize("resuming", [False, True])
@pytest.mark.parametrize("number", range(len(INTERRUPTED)), ids=lambda number: type(INTERRUPTED[number]).__name__)
def test_a_schedule_that_was_interrupted_at_any_line_can_be_closed(number, resuming):
    """Ctrl-C raises in the user's thread, between any two lines."""
    lines = 0
    while True:
        schedule = opened(2, 3, max_restarts=1)
        schedule.handle(TaskDone(0))
        for event in INTERRUPTED[:number]:
            schedule.handle(event)
        left = lines

        def strike(frame, what, arg):
            nonlocal left
            if what == "line":
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
            return strike

        tracer = sys.gettrace()
        sys.settrace(strike)
        try:
            schedule.handle(INTERRUPTED[number])
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        schedule.handle(Closed(resuming))
        assert schedule.closed
        assert schedule.tasks == ()
        lines += 1
    assert lines > 5


def test_a_batch_is_kept_by_its_task_alone_until_it_is_taken():
    schedule = opened(1, 1)
    task = schedule.tasks[0]
    task.lent = object()
    done = TaskDone(0, "batch", nbytes=7)
    schedule.handle(done)
    assert (task.result, task.nbytes, done.result, task.lent) == ("batch", 7, None, None)
    assert schedule.untaken == [task]
    schedule.handle(BatchTaken(0))
    assert task.result is None
    assert schedule.untaken == []
