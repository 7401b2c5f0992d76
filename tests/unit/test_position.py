"""How far the user is, by what was drawn and taken; and where another position goes on."""

import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rayloader import DataLoader, SkipLimitError, StateError
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.resume.saved import move_to, saved_place
from rayloader.task import Task
from rayloader.transport import codec

NUM_WORKERS, TASKS = 2, 6


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


@settings(max_examples=30, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # the examples are small as they are
@given(st.permutations(range(TASKS)), st.integers(0, TASKS), st.sets(st.integers(0, TASKS - 1)))
def test_what_is_taken_counts_once_and_what_is_taken_ahead_waits(order, count, told_twice):
    position, iterator = begun()
    checksums = draw(position, iterator)
    for task_id in order[:count]:
        for _ in range(1 + (task_id in told_twice)):
            position.taken(task_id % NUM_WORKERS, task_id, checksums[task_id])
    taken = {*order[:count]}
    first = min({*range(TASKS + 1)} - taken)
    assert (position.next_task, position.delivered) == (first, count)
    assert position.checksum == [0, *checksums][first]
    ahead = {task_id for task_id in taken if task_id > first}
    assert {task_id for task_id in range(TASKS) if position.has(task_id)} == ahead
    rest = [indices for task_id, indices in enumerate(iterator, TASKS)]
    drawn_ahead = move_to(again := begun(seed=99)[0], saved_place(position))
    assert (again.next_task, again.delivered, again.has(TASKS - 1)) == (first, count, TASKS - 1 in ahead)
    found = list(itertools.islice(drawn_ahead, 20))
    assert (len(found), found[TASKS - first :]) == (10 - first, rest)
    again, told = ([*worker.to_rebuild] for place in (again, position) for worker in saved_place(place).workers[:1])
    assert again == [task for task in told if task[0] < first]  # what is ahead was not drawn again


def test_too_many_skipped_samples_end_it():
    position, _ = begun()
    position.skip([("3", "ValueError: x"), ("4", "ValueError: x")], 2)
    with pytest.raises(SkipLimitError, match="3 samples have raised in this epoch, max_skipped=2"):
        position.skip([("5", "ValueError: x")], 2)
    assert position.skipped == 3


def test_nothing_can_be_told_before_the_workers_have_begun():
    position, _ = begun()
    position.journals[1].begun = False
    with pytest.raises(StateError, match="before its workers had reported their state"):
        saved_place(position)
