"""What a worker was told, and how far it must go back when some of that was not to come."""

from rayloader.journal import Journal, Told
from rayloader.snapshot import WorkerState
from rayloader.transport import codec


def told(*task_ids):
    return [Told(task_id, codec.encode([task_id])) for task_id in task_ids]


def at(journal):
    return journal.state and journal.state.last_task, [entry.task_id for entry in journal.entries], journal.replay


def test_untelling_goes_back_to_the_newest_snapshot_before_the_task():
    journal = Journal()
    journal.told(told(0, 2, 4, 6, 8, 10))
    for task_id in (2, 6):
        journal.reached(WorkerState(last_task=task_id))
    journal.taken(0)
    assert at(journal) == (6, [8, 10], [0])
    assert not journal.untell(11)
    assert at(journal) == (6, [8, 10], [0])
    assert journal.untell(5)
    assert at(journal) == (2, [4], [0])
    journal.told(told(5, 7))
    journal.reached(WorkerState(last_task=5))
    for task_id in (2, 4, 5):
        journal.taken(task_id)
    assert journal.base.last_task == 5
    assert at(journal) == (5, [7], [])


def test_without_a_snapshot_before_the_task_it_starts_anew_and_what_is_taken_is_built_again():
    journal = Journal()
    journal.told(told(0, 1, 2, 3))
    journal.reached(WorkerState(last_task=3))
    journal.taken(0)
    assert journal.untell(2)
    assert at(journal) == (None, [0, 1], [0])


def test_a_resumed_worker_goes_back_to_where_it_was_resumed():
    journal = Journal()
    journal.starts_at(WorkerState(last_task=3), told(4, 5))
    journal.told(told(6, 7, 8))
    journal.reached(WorkerState(last_task=8))
    assert journal.untell(7)
    assert at(journal) == (3, [4, 5, 6], [4, 5])
