"""What a worker was given: where another process goes on, what it builds again, and what is not to come after all."""

import pytest

from rayloader.random.generators import RandomState
from rayloader.resume.digest import Drawn
from rayloader.resume.journal import Journal, Resumed
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport import codec


def tasks_of(*task_ids):
    return [Task(task_id, Drawn(codec.encode([task_id]), 0)) for task_id in task_ids]


def journal_of(*task_ids, answered=(), snapshots=(), **state):
    journal = Journal()
    for task in tasks_of(*task_ids):
        journal.given(task)
    for task_id in answered:
        journal.answered(task_id, 100 + task_id)
    for task_id in snapshots:
        journal.reached(WorkerState(last_task=task_id, **state))
    return journal


def at(journal):
    entries = [entry.task_id if isinstance(entry, Task) else entry for entry in journal.entries]
    return journal.state and journal.state.last_task, entries, [*journal.to_rebuild]


# ---- where to go on


def test_at_least_one_task_that_was_answered_is_built_again():
    journal = journal_of(0, 2, 4, 6)
    assert at(journal) == (None, [0, 2, 4, 6], [])
    journal.answered(0, 7)
    journal.reached(WorkerState(last_task=0))
    assert at(journal) == (None, [0, 2, 4, 6], [])
    journal.answered(2, 8)
    assert at(journal) == (0, [2, 4, 6], [])
    journal.reached(WorkerState(last_task=2))
    assert at(journal) == (0, [2, 4, 6], [])
    assert [entry.digest for entry in journal.entries] == [8, None, None]


def test_at_least_one_task_that_was_taken_is_built_again():
    journal = journal_of(0, 2, 4, 6, answered=(0, 2, 4), snapshots=(0, 2, 4))
    assert journal.base is None
    journal.taken(0)
    assert (journal.base, at(journal)[2]) == (None, [0])
    journal.taken(2)
    assert (journal.base.last_task, at(journal)[2]) == (0, [2])
    assert [entry.digest for entry in journal.to_rebuild.values()] == [102]
    journal.taken(4)
    assert (journal.base.last_task, at(journal)) == (2, (2, [4, 6], [4]))


@pytest.mark.parametrize("state", [{"dataset": b"state"}, {"iterator": b"state"}])
def test_also_where_the_dataset_has_a_state_which_may_leave_something_out(state):
    journal = journal_of(0, 2, 4, answered=(0, 2), snapshots=(0, 2), **state)
    assert at(journal) == (0, [2, 4], [])
    journal.taken(0)
    assert (journal.base.last_task, [*journal.to_rebuild]) == (0, []), (
        "the first one is all that is known of the dataset"
    )
    journal.taken(2)
    assert (journal.base.last_task, [*journal.to_rebuild]) == (0, [2])


def test_but_not_where_there_is_nothing_to_prove():
    journal = journal_of(0, 2, 4, answered=(0, 2), snapshots=(0, 2), exhausted=True)
    assert at(journal) == (2, [4], [])
    journal.taken(0)
    assert journal.base.last_task == 0
    assert journal.to_rebuild == {}


def test_a_snapshot_is_told_as_what_has_changed():
    journal = journal_of(0, 1, 2, answered=(0, 1, 2))
    journal.reached(WorkerState(last_task=0, dataset=b"state"))
    journal.reached(WorkerState(last_task=1))
    assert (journal.state.last_task, journal.state.dataset) == (1, b"state")
    assert journal.newest == journal.state


def test_of_a_stream_that_has_ended_nothing_is_built_any_more():
    journal = journal_of(0, 1, 2, 3, answered=(0, 1), snapshots=(1,), exhausted=True)
    journal.exhausted()
    assert at(journal) == (1, [], [])


def test_the_end_of_a_stream_counts_where_the_last_batch_has_a_snapshot_of_its_own():
    """As with drop_last: what was drawn for the batch that was dropped comes after the last one."""
    journal = journal_of(0, 3, answered=(0,), snapshots=(0,))
    journal.reached(WorkerState(last_task=0, exhausted=True))
    journal.exhausted()
    journal.taken(0)
    assert journal.base == WorkerState(last_task=0, exhausted=True)
    assert at(journal) == (0, [], [])


def test_an_epoch_begins_where_the_one_before_it_was():
    journal = journal_of(0, 1, 2, answered=(0, 1, 2), snapshots=(0, 1))
    resumed = Resumed(1, 5)
    journal.begins(resumed)
    for task in tasks_of(0, 1):
        journal.given(task)
    assert not journal.begun
    assert at(journal) == (1, [2, resumed, 0, 1], [])
    assert journal.shared_seed is None
    journal.reached_begin(WorkerState(epoch=1))
    journal.answered(0, 100)
    assert journal.shared_seed == 5
    assert at(journal) == (-1, [0, 1], [])


def test_the_begin_of_an_epoch_is_proven_by_a_task_of_the_one_before():
    journal = journal_of(0, 1, 2, answered=(0, 1, 2), snapshots=(0, 1))
    resumed = Resumed(1, 5)
    journal.begins(resumed)
    for task in tasks_of(0, 1):
        journal.given(task)
    journal.reached_begin(WorkerState(epoch=1))
    assert journal.begun
    assert journal.shared_seed is None
    assert at(journal) == (1, [2, resumed, 0, 1], [])
    assert journal.before.state.last_task == 1
    journal.answered(0, 100)
    assert at(journal) == (-1, [0, 1], [])
    assert journal.before.state.last_task == 1
    other = Journal()
    other.starts_before(journal.before)
    assert not other.begun
    assert at(other) == (1, [2, resumed], [])
    journal.taken(0)
    assert journal.before is None


@pytest.mark.parametrize("state", [{"dataset": b"state"}, {"iterator": b"state"}, {"exhausted": True}])
def test_but_not_where_the_begin_needs_no_proof(state):
    journal = journal_of(0, 1, answered=(0, 1), snapshots=(0,))
    journal.begins(Resumed(1, None))
    journal.reached_begin(WorkerState(epoch=1, **state))
    assert at(journal) == (-1, [], [])
    assert journal.before is None


# ---- streams with a state, which may be stale when an epoch begins


STREAM = {"dataset": b"state", "begin": RandomState()}


def test_what_may_be_stale_is_reached_by_the_epoch_before_until_a_batch_has_a_snapshot():
    journal = journal_of(0, 1, 2, answered=(0, 1), snapshots=(0, 1), **STREAM)
    resumed = Resumed(1, None)
    journal.begins(resumed)
    journal.reached_begin(WorkerState(epoch=1, **STREAM))
    for task in tasks_of(0, 1):
        journal.given(task)
    journal.answered(0, 100)
    journal.taken(0)
    assert at(journal) == (0, [1, 2, resumed, 0, 1], [0])
    assert journal.before.state.last_task == 0
    journal.reached(WorkerState(epoch=1, tasks=1, last_task=0))
    assert at(journal) == (0, [1, 2, resumed, 0, 1], [0])
    journal.answered(1, 101)
    journal.taken(1)
    assert at(journal) == (0, [1], [1])
    assert journal.before is None


def test_a_stream_builds_something_between_a_snapshot_and_the_next_epoch():
    journal = journal_of(0, 1, answered=(0, 1), snapshots=(0, 1), **STREAM)
    resumed = Resumed(1, None)
    journal.begins(resumed)
    assert at(journal) == (0, [1, resumed], [])


def test_but_not_after_its_end():
    journal = journal_of(0, 1, answered=(0, 1), snapshots=(0,), **STREAM)
    journal.reached(WorkerState(last_task=1, exhausted=True))
    resumed = Resumed(1, None)
    journal.begins(resumed)
    assert at(journal) == (1, [resumed], [])


def test_the_end_of_a_stream_counts_where_nothing_comes_after_the_state_that_was_loaded():
    journal = Journal()
    journal.starts_at(WorkerState(tasks=1, last_task=4, **STREAM), [])
    journal.reached(WorkerState(tasks=1, last_task=4, exhausted=True))
    assert journal.base.exhausted
    assert journal.state.exhausted
