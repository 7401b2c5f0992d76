"""How far the user is, by what was drawn and taken; and where another position goes on."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloader import DataLoader, SkipLimitError, StateError
from rayloader.random.generators import RandomState
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.resume.saved import move_to, saved_place
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport import codec

NUM_WORKERS, TASKS = 2, 6
DATASET = b"\x80\x05]K\x07a."  # [7]


def begun(seed=0):
    """The position at the start of an epoch of a shuffled loader, and the sampler's iterator."""
    torch.manual_seed(seed)
    loader = DataLoader(range(20), 2, shuffle=True)
    position = Position(Samplers(loader), 7, NUM_WORKERS, iterable=False)
    position.begins(again=False)
    iterator = iter(loader.batch_sampler)
    position.sampler_begins(iterator)
    return position, iterator


def draw(position, iterator):
    """Draws the first tasks, whose workers have built them; the checksums."""
    checksums = [0]
    for task_id in range(TASKS):
        indices = next(iterator)
        checksums.append(drawn(indices, checksums[-1]).checksum)
        position.drawn(task_id, iterator, indices, checksums[-1])
        journal = position.journals[task_id % NUM_WORKERS]
        journal.given(Task(task_id, Drawn(codec.encode(indices), 0)))
        journal.answered(task_id, 100 + task_id)
    return checksums[1:]


def take(position, checksums, *task_ids):
    for task_id in task_ids:
        position.taken(task_id % NUM_WORKERS, task_id, checksums[task_id])


@given(st.permutations(range(TASKS)), st.integers(0, TASKS), st.sets(st.integers(0, TASKS - 1)))
def test_what_is_taken_counts_once_and_what_is_taken_ahead_waits(order, count, told_twice):
    position, iterator = begun()
    checksums = draw(position, iterator)
    for task_id in order[:count]:
        take(position, checksums, *[task_id] * (1 + (task_id in told_twice)))
    taken = {*order[:count]}
    first = min({*range(TASKS + 1)} - taken)
    assert (position.next_task, position.delivered) == (first, count)
    assert position.checksum == [0, *checksums][first]
    ahead = {task_id for task_id in taken if task_id > first}
    assert {task_id for task_id in range(TASKS) if position.has(task_id)} == ahead
    rest = [indices for task_id, indices in enumerate(iterator, TASKS)]
    drawn_ahead = move_to(again := begun(seed=99)[0], saved_place(position))
    assert (again.next_task, again.delivered, again.has(TASKS - 1)) == (first, count, TASKS - 1 in ahead)
    found = list(drawn_ahead)
    assert (len(found), found[TASKS - first :]) == (10 - first, rest)
    again, told = ([*worker.to_rebuild] for place in (again, position) for worker in saved_place(place).workers[:1])
    assert again == [task for task in told if task[0] < first]  # what is ahead was not drawn again


def test_the_next_batch_is_the_next_workers():
    position, iterator = begun()
    checksums = draw(position, iterator)
    for count in range(TASKS):
        again = begun(seed=99)[0]
        move_to(again, saved_place(position))
        assert again.next_worker == position.next_worker == count % NUM_WORKERS
        take(position, checksums, count)


def test_too_many_skipped_samples_end_it():
    position, _ = begun()
    position.skip([("3", "ValueError: x")], 2)
    position.skip([("4", "ValueError: x")], 2)
    with pytest.raises(SkipLimitError, match="3 samples have raised in this epoch, max_skipped=2"):
        position.skip([("5", "ValueError: x")], 2)
    assert position.skipped == 3


def test_a_sampler_that_gives_others_is_refused():
    position, iterator = begun()
    take(position, draw(position, iterator), 0, 1)
    saved = saved_place(position)
    with pytest.raises(StateError, match="did not reproduce its indices"):
        move_to(begun()[0], saved._replace(checksum=saved.checksum ^ 1))


def test_nothing_can_be_told_before_the_workers_have_begun():
    position, _ = begun()
    position.journals[1].begun = False
    with pytest.raises(StateError, match="before its workers had reported their state"):
        saved_place(position)


@pytest.mark.parametrize("dataset", [None, DATASET])
def test_another_journal_begins_where_this_one_is(dataset):
    position, iterator = begun()
    checksums = draw(position, iterator)
    take(position, checksums, 0, 1)
    position.journals[0].reached(WorkerState(last_task=0, random=RandomState.capture([]), dataset=dataset))
    take(position, checksums, 2, 3)
    again, _ = begun(seed=99)
    move_to(again, saved_place(position))
    journal = again.journals[0]
    assert [(told.task_id, told.digest) for told in journal.to_rebuild.values()] == [(2, 102)]
    assert journal.base.last_task == 0


def test_a_workers_error_is_raised_until_it_has_a_state():
    position, iterator = begun()
    checksums = draw(position, iterator)
    take(position, checksums, 0)
    position.journals[0].reached(WorkerState(last_task=0, dataset=DATASET, error="KeyError: no state"))
    take(position, checksums, 1, 2)
    for _ in range(2):
        with pytest.raises(StateError, match="KeyError: no state"):
            saved_place(position)
