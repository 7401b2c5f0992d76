"""The pin thread with a source and a pin function put in: no accelerator, no Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rayloader.delivery.pinning import PinThread

HANG_LIMIT_S = 30.0


@pytest.fixture
def pin_threads() -> Iterator[list[PinThread[int]]]:
    """Closes what a test made, and proves that no thread is left."""
    made: list[PinThread[int]] = []
    yield made
    for thread in made:
        thread.close()
    assert not [t for t in threading.enumerate() if t.name == "rayloader-pin"]


def take(thread: PinThread[int]) -> int | None:
    item = thread.get(HANG_LIMIT_S)
    if item is not None:
        thread.taken(item)
    return item


def test_hands_over_in_order_and_ends_with_its_source(pin_threads):
    items = iter(range(5))
    thread = PinThread(lambda: next(items, None), None)
    pin_threads.append(thread)
    assert [take(thread) for _ in range(5)] == [0, 1, 2, 3, 4]
    thread._thread.join(HANG_LIMIT_S)
    assert not thread._thread.is_alive()


def test_holds_at_most_one_item_beyond_the_one_in_work(pin_threads):
    produced = []
    third_wanted = threading.Event()

    def produce() -> int:
        if len(produced) == 2:
            third_wanted.set()
        produced.append(len(produced))
        return produced[-1]

    thread = PinThread(produce, None)
    pin_threads.append(thread)
    # one in the queue, one waiting to be put: the third is not asked for before one is taken
    assert take(thread) == 0
    assert third_wanted.wait(HANG_LIMIT_S)
    assert take(thread) == 1
    assert len(produced) <= 4


def test_an_error_of_the_source_is_raised_in_its_turn_and_again(pin_threads):
    items = iter([1])

    def produce() -> int:
        return next(items)

    thread = PinThread(produce, None)
    pin_threads.append(thread)
    assert take(thread) == 1
    for _ in range(2):
        with pytest.raises(StopIteration):
            thread.get(HANG_LIMIT_S)


def test_close_ends_a_thread_that_waits_to_hand_over(pin_threads):
    thread = PinThread(lambda: 1, None)
    pin_threads.append(thread)
    thread.close()
    assert not thread._thread.is_alive()
    thread.close()


def test_an_item_stays_the_next_until_it_is_taken(pin_threads):
    items = iter([10, 20])
    thread = PinThread(lambda: next(items, None), None)
    pin_threads.append(thread)
    assert thread.get(HANG_LIMIT_S) == thread.get(HANG_LIMIT_S) == 10
    thread.taken(10)
    thread.taken(10)
    assert take(thread) == 20
