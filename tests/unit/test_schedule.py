"""The schedule by transcripts, `schedule/*.txt`, which read as the protocol that they hold it to.

A line that begins in the first column is a comment (#) or a directive: an event, `schedule`, which begins anew, or
`show`. What comes of it is indented below it: the commands in their order, what has become deliverable, and the draws
that are owed. A directive without such lines must give nothing. With several tasks, workers or indices it stands for
one event each. `check_rules` follows every event.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_fleet import check_rules
from handlers import interrupted
from rayloader.epoch import schedule as schedule_module
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
    "lost": lambda worker_id: WorkerLost(worker_id, "killed"),
    "closed": Closed,
    "closed-resuming": lambda: Closed(resuming=True),
}


def in_words(command: Command) -> str:
    match command:
        case Submit(task):
            return f"submit {task.task_id} ({task.indices}) to worker {task.worker_id}"
        case ReplaceWorker(worker_id, cause):
            return f"replace worker {worker_id} ({cause})"
        case Fail(worker_id, cause, task):
            return f"fail: worker {worker_id} ({cause}), at {task.task_id}"


def begun(words: list[str]) -> Schedule:
    """A schedule; `task` and `worker`: where it goes on."""
    given: dict[str, Any] = {key: int(value or 1) for key, _, value in (word.partition("=") for word in words)}
    return Schedule(
        given["workers"],
        given["prefetch"],
        in_order="without-order" not in given,
        dynamic="dynamic" in given,
        max_restarts=given.get("restarts", 0),
        first_task_id=given.get("task", 0),
        first_worker_id=given.get("worker", 0),
    )


def outcome(schedule: Schedule, event: Event) -> Iterator[str]:
    """The commands, the tasks that have become deliverable, and how many more draws are owed."""
    deliverable, owed = [*schedule.deliverable], schedule.owed_draws
    yield from map(in_words, schedule.handle(event))
    yield from (f"deliver {task.task_id}" for task in schedule.deliverable if task not in deliverable)
    owed -= isinstance(event, (IndicesDrawn, IndicesSkipped, SamplerFailed))
    if schedule.owed_draws > owed >= 0:
        yield f"draw {schedule.owed_draws - owed}"
    check_rules(schedule)


def shown(schedule: Schedule) -> Iterator[str]:
    for task in schedule.tasks:
        yield f"{task.task_id} of {f'worker {task.worker_id}' if task.is_assigned else 'any'}: {task.state.name}"
    state = ("closed, " if schedule.closed else "") + ("finished" if schedule.finished else "not finished")
    yield f"owed draws {schedule.owed_draws}, taken {schedule.taken}, {state}"


def played(lines: list[str]) -> Iterator[str]:
    """The lines of a transcript as they really come out."""
    for line in lines:
        if line.startswith(INDENT):
            continue
        yield line
        name, *words = re.sub("#.*", "#", line).split() or ["#"]
        if name == "schedule":
            schedule = begun(words)
        elif name == "show":
            yield from (INDENT + what for what in shown(schedule))
        elif name != "#":
            arguments = [[int(word) if word.isdigit() else word] for word in words] or [[]]
            events = [EVENTS[name](*one) for one in arguments]
            yield from (INDENT + what for event in events for what in outcome(schedule, event))


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "schedule").glob("*.txt")), ids=lambda path: path.stem)
def test_the_schedule_keeps_to_the_transcript(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [*played(lines)] == lines


# ---- what a transcript can't show


def opened(num_workers: int, prefetch_factor: int, **options: int) -> Schedule:
    """An opened schedule whose window is full, and whose workers are ready."""
    schedule = Schedule(num_workers, prefetch_factor, **options)
    for worker_id in range(num_workers):
        schedule.handle(WorkerReady(worker_id))
    schedule.handle(Opened())
    for _ in range(num_workers * prefetch_factor):
        schedule.handle(IndicesDrawn(None))
    return schedule


def test_one_worker_alone_may_be_given_every_task():
    assert {task.worker_id for task in opened(3, 2, only_worker_id=1).tasks} == {1}


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (BatchTaken(0), r"BatchTaken cannot happen to Task\(task_id=0, .* what has happened to it: Submit; the last"),
        (BatchTaken(7), r"BatchTaken\(task_id=7\) names a task that is not in the table; the last events: WorkerReady"),
        *(
            (event, r" reports a draw that was not asked for; the last events: WorkerReady")
            for event in (IndicesDrawn(None), IndicesSkipped(), SamplerFailed())
        ),
    ],
)
def test_an_event_that_contradicts_the_state_is_refused_and_leaves_it_as_it_was(event, error):
    schedule = opened(1, 1)
    before = [*shown(schedule)]
    with pytest.raises(RuntimeError, match=error):
        schedule.handle(event)
    assert [*shown(schedule)] == before


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
def test_a_schedule_that_was_interrupted_at_any_moment_can_be_closed(number, resuming):
    for moment in itertools.count():
        schedule = opened(2, 3, max_restarts=1)
        for event in (TaskDone(0), *INTERRUPTED[:number]):
            schedule.handle(event)
        if not interrupted({schedule_module.__file__}, moment, lambda: schedule.handle(INTERRUPTED[number])):  # noqa: B023
            break
        schedule.handle(Closed(resuming))
        assert schedule.closed
        assert schedule.tasks == ()
    assert moment > 2


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
