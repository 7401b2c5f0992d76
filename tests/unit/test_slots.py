"""The free list of an arena: no overlap, what came back last goes first, and what is cold is known."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader.transport.slots import CHUNK, COLD_AFTER, PAGE, FreeSlots, rounded


def test_sizes_are_whole_pages_and_little_more_than_needed():
    assert [rounded(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [PAGE, PAGE, PAGE, 2 * PAGE]
    for nbytes in range(1, 600 * PAGE, 777):
        size = rounded(nbytes)
        assert size % PAGE == 0
        assert nbytes <= size < nbytes * 9 / 8 + PAGE


def test_the_slot_that_came_back_last_is_taken_first():
    free = FreeSlots(0, 100 * PAGE)
    slots = [free.take(3 * PAGE) for _ in range(5)]
    assert [start for start, _ in slots] == [0, 3 * PAGE, 6 * PAGE, 9 * PAGE, 12 * PAGE]
    for index in (1, 4, 2):
        free.put_back(*slots[index])
    assert [free.take(3 * PAGE) for _ in range(4)] == [slots[2], slots[4], slots[1], (15 * PAGE, 3 * PAGE)]


def test_neighbours_of_other_sizes_are_joined_before_new_room_is_touched():
    free = FreeSlots(0, 100 * PAGE)
    for slot in [free.take(pages * PAGE) for pages in (1, 2, 3, 4)]:
        free.put_back(*slot)
    assert free.take(10 * PAGE) == (0, 10 * PAGE)


def test_without_room_there_is_none_until_something_comes_back():
    free = FreeSlots(0, 4 * PAGE)
    first, second = free.take(2 * PAGE), free.take(2 * PAGE)
    assert free.take(1) is None
    free.put_back(*second)
    assert free.take(3 * PAGE) is None
    free.put_back(*first)
    assert free.take(4 * PAGE) == (0, 4 * PAGE)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9 * PAGE), st.tuples(st.integers(0, 99))), max_size=80))
def test_slots_never_overlap_and_all_room_comes_back(steps):
    """A number takes that many bytes; a tuple says which slot comes back."""
    free, taken = FreeSlots(PAGE, 25 * PAGE), []
    for step in steps:
        if isinstance(step, int):
            slot = free.take(step)
            if slot is not None:
                assert slot[1] == rounded(step)
                assert slot[0] >= PAGE
                assert sum(slot) <= 25 * PAGE
                assert all(slot[0] + slot[1] <= start or start + size <= slot[0] for start, size in taken)
                taken.append(slot)
        elif taken:
            free.put_back(*taken.pop(step[0] % len(taken)))
    for slot in taken:
        free.put_back(*slot)
    assert free.take(24 * PAGE) == (PAGE, 24 * PAGE)


def test_memory_is_cold_when_nothing_has_covered_it_for_long():
    free = FreeSlots(PAGE, 100 * CHUNK)
    held = [free.take(CHUNK) for _ in range(20)]
    for slot in held[3:]:
        free.put_back(*slot)
    assert free.cold(held[:3]) == []
    for _ in range(COLD_AFTER):
        free.put_back(*free.take(CHUNK))
    cold = free.cold(held[:3])
    extents = [range(start, start + size) for start, size in [*held[:3], held[-1]]]
    assert all(start not in extent for start, _ in cold for extent in extents)
    assert len(cold) >= 14
    assert free.cold(held[:3]) == []


def test_memory_that_is_in_use_is_never_cold():
    free = FreeSlots(0, 10 * CHUNK)
    used = [free.take(CHUNK // 2) for _ in range(9)]
    for _ in range(3):
        for _ in range(COLD_AFTER):
            free.put_back(*free.take(PAGE))
        assert free.cold(used) == []
