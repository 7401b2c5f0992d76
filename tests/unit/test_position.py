"""How far the user is, by what was drawn and taken; and the way through a state."""

from __future__ import annotations

import pytest
import torch

from rayloader import DataLoader, SkipLimitError, StateError
from rayloader.resume.draws import drawn
from rayloader.resume.position import Position
from rayloader.resume.samplers import Samplers
from rayloader.resume.seal import owned

NUM_WORKERS = 2


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
    packed = owned(position.pack())
    again, _ = begun(seed=99)
    found = list(again.unpack(packed))
    assert (again.next_task, again.next_worker, again.delivered) == (3, 1, 3)
    assert found[3:] == rest  # the first three were drawn ahead and not taken
    assert len(found) == 7


def test_what_is_done_to_one_state_does_not_show_in_the_next():
    position, iterator = begun()
    take(position, draw(position, iterator, 6), 0, 1)
    before = repr(owned(position.pack()))
    packed = owned(position.pack())
    for part in (*packed["workers"], packed["begin"], packed["ahead"], packed):
        part.clear()
    assert repr(owned(position.pack())) == before


def test_a_sampler_that_gives_others_is_refused():
    position, iterator = begun()
    take(position, draw(position, iterator, 6), 0, 1)
    packed = owned(position.pack())
    packed["checksum"] ^= 1
    with pytest.raises(StateError, match="did not reproduce its indices"):
        begun()[0].unpack(packed)


def test_nothing_can_be_told_before_the_workers_have_begun():
    position, _ = begun()
    position.journals[1].begun = False
    with pytest.raises(StateError, match="before its workers had reported their state"):
        position.pack()
