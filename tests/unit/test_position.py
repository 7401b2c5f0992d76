"""How far the user is, by what was drawn and taken; and where another position goes on."""

from __future__ import annotations

import pytest
import torch

from rayloader import DataLoader, SkipLimitError, StateError
from rayloader.random.generators import RandomState
from rayloader.resume.digest import Drawn, drawn
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.resume.saved import move_to, saved_place
from rayloader.resume.snapshot import WorkerState
from rayloader.task import Task
from rayloader.transport import codec

NUM_WORKERS = 2
DATASET = b"\x80\x05]K\x07a."  # [7]


def begun(seed: int = 0) -> tuple[Position, object]:
    """The position at the start of an epoch of a shuffled loader, and the sampler's iterator."""
    torch.manual_seed(seed)
    loader = DataLoader(range(20), 2, shuffle=True)
    position = Position(Samplers(loader), 7, NUM_WORKERS, iterable=False)
    position.begins(again=False)
    iterator = iter(loader.batch_sampler)
    position.sampler_begins(iterator)
    return position, iterator


def draw(position: Position, iterator, count: int) -> list[int]:
    """Draws so many; the checksums."""
    checksums = [0]
    for task_id in range(count):
        indices = next(iterator)
        checksums.append(drawn(indices, checksums[-1]).checksum)
        position.drawn(task_id, iterator, indices, checksums[-1])
    return checksums[1:]


def take(position: Position, checksums: list[int], *task_ids: int) -> None:
    for task_id in task_ids:
        position.taken(task_id % NUM_WORKERS, task_id, checksums[task_id])


def test_what_is_taken_in_order_counts():
    position, iterator = begun()
    checksums = draw(position, iterator, 6)
    take(position, checksums, 0, 1, 2)
    assert (position.next_task, position.next_worker, position.delivered) == (3, 1, 3)
    assert position.checksum == checksums[2]


def test_what_is_taken_ahead_waits_for_those_before_it():
    position, iterator = begun()
    checksums = draw(position, iterator, 6)
    take(position, checksums, 0, 3, 2)
    assert (position.next_task, position.delivered) == (1, 3)
    assert [position.has(task_id) for task_id in range(5)] == [False, False, True, True, False]
    take(position, checksums, 1)
    assert (position.next_task, position.checksum) == (4, checksums[3])
    assert not position.has(2)


def test_a_batch_that_is_told_twice_counts_once():
    position, iterator = begun()
    checksums = draw(position, iterator, 3)
    take(position, checksums, 0, 0, 1, 1)
    assert (position.next_task, position.delivered) == (2, 2)


def test_too_many_skipped_samples_end_it():
    position, _ = begun()
    position.skip([("3", "ValueError: x")], 2)
    position.skip([("4", "ValueError: x")], 2)
    with pytest.raises(SkipLimitError, match="3 samples have raised in this epoch, max_skipped=2"):
        position.skip([("5", "ValueError: x")], 2)
    assert position.skipped == 3


def test_another_position_goes_on_where_this_one_is():
    position, iterator = begun()
    checksums = draw(position, iterator, 6)
    take(position, checksums, 0, 1, 2)
    rest = [next(iterator) for _ in range(4)]
    again, _ = begun(seed=99)
    found = list(move_to(again, saved_place(position)))
    assert (again.next_task, again.next_worker, again.delivered) == (3, 1, 3)
    assert found[3:] == rest  # the first three were drawn ahead and not taken
    assert len(found) == 7


def test_a_sampler_that_gives_others_is_refused():
    position, iterator = begun()
    take(position, draw(position, iterator, 6), 0, 1)
    saved = saved_place(position)
    with pytest.raises(StateError, match="did not reproduce its indices"):
        move_to(begun()[0], saved._replace(checksum=saved.checksum ^ 1))


def test_nothing_can_be_told_before_the_workers_have_begun():
    position, _ = begun()
    position.journals[1].begun = False
    with pytest.raises(StateError, match="before its workers had reported their state"):
        saved_place(position)


# ---- the workers of a state


def worked(position: Position, count: int) -> None:
    """The first worker has answered so many tasks; none is taken."""
    journal = position.journals[0]
    for task_id in range(count):
        journal.given(Task(task_id, Drawn(codec.encode([task_id]), 0)))
        journal.answered(task_id, 100 + task_id)


def test_what_is_packed_bit_by_bit_is_what_is_packed_at_once():
    position, _ = begun()
    worked(position, 9)
    journal = position.journals[0]
    for task_id in range(9):
        if task_id == 5:
            journal.reached(WorkerState(last_task=3, random=RandomState.capture([])))
        if task_id == 7:
            journal.reached(WorkerState(last_task=6, dataset=DATASET))
        journal.taken(task_id)
        if task_id % 3:  # otherwise two come at once
            worker, again = saved_place(position).workers[0], begun()[0]
            again.journals[0] = journal
            assert worker.to_rebuild == saved_place(again).workers[0].to_rebuild
    assert worker.to_rebuild == ((7, 107), (8, 108))
    assert worker.start.state.last_task == 6


@pytest.mark.parametrize("dataset", [None, DATASET])
def test_another_journal_begins_where_this_one_is(dataset):
    position, iterator = begun()
    checksums = draw(position, iterator, 3)
    worked(position, 4)
    position.taken(0, 0, checksums[0])
    position.journals[0].reached(WorkerState(last_task=1, random=RandomState.capture([]), dataset=dataset))
    for task_id in (1, 2):
        position.taken(0, task_id, checksums[task_id])
    again, _ = begun(seed=99)
    move_to(again, saved_place(position))
    journal = again.journals[0]
    assert [(told.task_id, told.digest) for told in journal.to_rebuild.values()] == [(2, 102)]
    assert journal.base.last_task == 1
    assert saved_place(again).workers[0].to_rebuild == saved_place(position).workers[0].to_rebuild


def test_a_workers_error_is_raised_until_it_has_a_state():
    position, _ = begun()
    worked(position, 2)
    position.journals[0].taken(0)
    position.journals[0].reached(WorkerState(last_task=0, dataset=DATASET, error="KeyError: no state"))
    position.journals[0].taken(1)
    for _ in range(2):
        with pytest.raises(StateError, match="KeyError: no state"):
            saved_place(position)
