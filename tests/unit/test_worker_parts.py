"""What a state holds of a worker: packed bit by bit it is the same as packed at once, and goes back into a journal."""

import pytest

from rayloader.random.random_state import RandomState
from rayloader.resume.journal import Journal, Told
from rayloader.resume.seal import checksum, owned
from rayloader.resume.snapshot import WorkerState
from rayloader.resume.worker_parts import WorkerParts, begin, replayed
from rayloader.transport import codec


def journal_of(count: int) -> Journal:
    """Of a worker that has answered so many tasks; none is taken."""
    journal = Journal()
    for task_id in range(count):
        journal.told(Told(task_id, codec.encode([task_id])))
        journal.answered(task_id, 100 + task_id)
    return journal


def at_once(journal: Journal) -> object:
    return owned(WorkerParts().of(journal, iterable=False))


def test_what_is_packed_bit_by_bit_is_what_is_packed_at_once():
    journal, parts = journal_of(9), WorkerParts()
    part = parts.of(journal, iterable=False)
    assert part.checksum == checksum(owned(part))
    for task_id in range(9):
        if task_id == 5:
            journal.reached(WorkerState(last_task=3, random=RandomState.capture([])))
        if task_id == 7:
            journal.reached(WorkerState(last_task=6, dataset=b"\x80\x05K\x07."))
        journal.taken(task_id)
        if task_id % 3:  # otherwise two come at once
            part = parts.of(journal, iterable=False)
            assert part.checksum == checksum(owned(part)) == checksum(at_once(journal))
    assert replayed(owned(part)) == [(7, 107), (8, 108)]


def test_a_worker_that_stays_the_same_is_not_packed_again():
    journal, parts = journal_of(4), WorkerParts()
    journal.taken(0)
    first = parts.of(journal, iterable=False)
    journal.told(Told(4, codec.encode([4])))
    assert parts.of(journal, iterable=False) is first
    journal.taken(1)
    assert parts.of(journal, iterable=False) is not first


@pytest.mark.parametrize("dataset", [None, b"\x80\x05K\x07."])
def test_another_journal_begins_where_this_one_is(dataset):
    journal = journal_of(4)
    journal.taken(0)
    journal.reached(WorkerState(last_task=1, random=RandomState.capture([]), dataset=dataset))
    for task_id in (1, 2):
        journal.taken(task_id)
    other = Journal()
    begin(other, at_once(journal), {1: codec.encode([1]), 2: codec.encode([2])}, next_task=3)
    assert [(told.task_id, told.digest) for told in other.replay.values()] == [(2, 102)]
    assert other.base.last_task == 1
    assert checksum(at_once(other)) == checksum(at_once(journal))


def test_what_is_done_to_one_state_does_not_show_in_the_next():
    journal, parts = journal_of(1), WorkerParts()
    journal.reached(WorkerState(last_task=0, dataset=b"\x80\x05]K\x07a."))  # [7]
    journal.taken(0)
    state, _ = owned(parts.of(journal, iterable=False))["begin"]
    told = next(part for part in state if isinstance(part, dict))
    assert told == {"state": [7]}
    told["state"].clear()
    assert checksum(owned(parts.of(journal, iterable=False))) == checksum(at_once(journal))
