"""What a worker was told, and how far it must go back when some of that was not to come."""

from rayloader.journal import Journal, Told
from rayloader.snapshot import WorkerState
from rayloader.transport import codec


def told(*task_ids):
    return [Told(task_id, codec.encode([task_id])) for task_id in task_ids]


def believed(task_id):
    """A snapshot of a dataset that tells its own state: nothing need be built again to prove it."""
    return WorkerState(last_task=task_id, dataset=b"state")


def answer(journal, *task_ids):
    for task_id in task_ids:
        journal.answered(task_id, task_id)


def at(journal):
    """The last task of the snapshot to start from, what is told after it, and what of that the user has."""
    last = None if journal.state is None else journal.state.last_task
    return last, [entry.task_id for entry in journal.entries], [entry.task_id for entry in journal.replay]


def test_untelling_goes_back_to_the_newest_snapshot_before_the_task():
    journal = Journal()
    journal.told(told(0, 2, 4, 6, 8, 10))
    answer(journal, 0, 2)
    journal.reached(believed(2))
    answer(journal, 4, 6)
    journal.reached(believed(6))
    journal.taken(0)
    assert at(journal) == (6, [8, 10], [0])
    assert not journal.untell(11)
    assert at(journal) == (6, [8, 10], [0])
    assert journal.untell(5)
    assert at(journal) == (2, [4], [0])
    journal.told(told(5, 7))
    answer(journal, 5)
    journal.reached(believed(5))
    for task_id in (2, 4, 5):
        journal.taken(task_id)
    assert journal.base.last_task == 5
    assert at(journal) == (5, [7], [])


def test_what_is_told_again_is_not_held_to_what_was_answered_before():
    journal = Journal()
    journal.told(told(0, 1))
    answer(journal, 0, 1)
    assert journal.untell(1)
    journal.told(told(1))
    assert [entry.digest for entry in journal.entries] == [0, None]


def test_without_a_snapshot_before_the_task_it_starts_anew_and_what_is_taken_is_built_again():
    journal = Journal()
    journal.told(told(0, 1, 2, 3))
    answer(journal, 0, 1, 2, 3)
    journal.reached(believed(3))
    journal.taken(0)
    assert journal.untell(2)
    assert at(journal) == (None, [0, 1], [0])


def test_a_resumed_worker_goes_back_to_where_it_was_resumed():
    journal = Journal()
    journal.starts_at(believed(3), told(4, 5))
    journal.told(told(6, 7, 8))
    answer(journal, 6, 7, 8)
    journal.reached(believed(8))
    assert journal.untell(7)
    assert at(journal) == (3, [4, 5, 6], [4, 5])
