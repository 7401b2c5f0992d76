"""How much a producer builds in one go: no Ray, the loader is an iterator, and the clock is the test's."""

from types import SimpleNamespace

import pytest
import torch

import rayloader.sharing.producer
from rayloader.sharing.ledger import Place, PlacesLeft
from rayloader.sharing.producer import HostedLoader

NBYTES = 80
START = Place(0, 0)
LENGTH = 12


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def produced(monkeypatch):
    """What one call produces of batches that take so many seconds each: True for a batch, None for the end."""

    def produce(room, *seconds):
        clock = Clock()
        monkeypatch.setattr(rayloader.sharing.producer, "time", clock)

        def batches():
            for number in range(LENGTH):
                clock.now += seconds[number % len(seconds)]
                yield torch.zeros(NBYTES // 8)

        hosted = HostedLoader("share", 0)
        hosted._loader = SimpleNamespace(num_workers=1, state_dict=dict)
        hosted._iterator = batches()
        given = []
        hosted.produce(START, START, room, given.append)
        return [found if found is None else True for found in given]

    return produce


def test_as_many_as_there_is_room_for_if_they_come_at_once(produced):
    assert produced(PlacesLeft(8, 1 << 20), 0.0) == [True] * 8


def test_the_last_is_followed_by_the_end(produced):
    assert produced(PlacesLeft(100, 1 << 20), 0.0) == [*[True] * LENGTH, None]


def test_no_more_than_one_that_is_slow(produced):
    """Meanwhile a state would wait, and an epoch that everybody has left would go on."""
    assert produced(PlacesLeft(8, 1 << 20), 0.3) == [True]
    assert produced(PlacesLeft(8, 1 << 20), 0.0, 0.3) == [True] * 2


def test_bytes_bound_small_batches_too(produced):
    assert produced(PlacesLeft(8, 4 * NBYTES), 0.0) == [True] * 4
    assert produced(PlacesLeft(8, 0), 0.0) == [True]
