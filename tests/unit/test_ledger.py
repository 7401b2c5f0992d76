"""Who has read how far: what is produced, kept and forgotten. No Ray, no clock."""

import random

import pytest

from rayloader.sharing.ledger import END, Ledger, Place, Step


def ledger(consumers=2, buffer=3, buffer_bytes=100):
    return Ledger(consumers, buffer, buffer_bytes)


def validate(found):
    """Its invariants."""
    assert len(found._kept) <= found._buffer
    assert found._nbytes == sum(nbytes for _, nbytes in found._kept.values())
    assert list(found._kept) == sorted(found._kept)
    assert all(found.lowest <= place < found.front for place in found._kept)
    for consumer in found._reading():
        for number in range(consumer.place.number, found._lengths.get(consumer.place.epoch, found.front.number)):
            if consumer.place.epoch <= found.front.epoch:
                assert Place(consumer.place.epoch, number) in found._kept


def begun(**options):
    """One whose first epoch consumer 0 has begun."""
    found = ledger(**options)
    found.ask(0, Place(0, 0))
    found.begin()
    return found


def produce(found, nbytes=1):
    """As many batches as may be produced; a batch is its place."""
    number = 0
    while found.step() is Step.PRODUCE:
        found.add(found.front, nbytes)
        validate(found)
        number += 1
    return number


def test_nothing_begins_before_somebody_asks():
    found = ledger()
    assert found.step() is Step.WAIT
    found.ask(1, Place(0, 0))
    assert found.step() is Step.BEGIN


def test_so_many_batches_are_kept_as_the_buffer_holds_until_all_have_taken_them():
    found = begun()
    assert produce(found) == 3
    found.reach(0, Place(0, 3))
    assert produce(found) == 0
    found.reach(1, Place(0, 1))
    assert produce(found) == 1
    assert found.find(Place(0, 3)) == Place(0, 3)
    assert found.find(Place(0, 4)) is None


def test_bytes_bound_it_too_but_two_batches_are_kept_whatever_their_size():
    assert produce(begun(buffer=9, buffer_bytes=100), nbytes=30) == 4
    assert produce(begun(buffer=9, buffer_bytes=100), nbytes=1000) == 2
    assert produce(begun(buffer=1, buffer_bytes=100), nbytes=1) == 1


def test_the_end_of_an_epoch_is_found_behind_its_last_batch():
    found = begun()
    produce(found)
    found.end()
    assert found.step() is Step.WAIT
    assert found.find(Place(0, 2)) == Place(0, 2)
    assert found.find(Place(0, 3)) is END
    assert found.find(Place(0, 9)) is END
    assert found.find(Place(1, 0)) is None


def test_the_next_epoch_begins_for_the_first_that_asks_and_counts_to_the_same_buffer():
    found = begun()
    produce(found)
    found.end()
    found.reach(0, Place(1, 0))
    assert found.step() is Step.WAIT
    found.ask(0, Place(1, 0))
    assert found.step() is Step.BEGIN
    found.begin()
    assert found.step() is Step.WAIT  # consumer 1 has taken nothing yet
    found.reach(1, Place(0, 2))
    assert produce(found) == 2
    assert found.find(Place(1, 0)) == Place(1, 0)
    assert found.find(Place(0, 2)) == Place(0, 2)
    assert found.find(Place(0, 3)) is END


def test_who_breaks_off_waits_for_the_others_epoch():
    found = begun()
    produce(found)
    found.reach(0, Place(1, 0))
    found.ask(0, Place(1, 0))
    assert found.step() is Step.WAIT
    found.reach(1, Place(0, 3))
    assert found.step() is Step.PRODUCE
    found.end()
    assert found.step() is Step.BEGIN


def test_an_epoch_that_all_have_broken_off_is_not_finished():
    found = begun()
    produce(found)
    for rank in range(2):
        found.reach(rank, Place(1, 0))
    assert found.step() is Step.WAIT
    found.ask(1, Place(1, 0))
    assert found.step() is Step.BEGIN
    found.begin()
    validate(found)
    assert found.front == (1, 0)
    assert found.find(Place(0, 2)) is END  # who asks late reads no more of it


def test_who_holds_up_whom():
    found = begun(consumers=3)
    produce(found)
    assert found.held_up_by() == []  # nobody has asked for what is not there
    found.reach(0, Place(0, 3))
    found.ask(0, Place(0, 3))
    assert found.held_up_by() == [1, 2]
    found.reach(1, Place(0, 1))
    assert found.held_up_by() == [2]
    found.leave(2, "it was closed")
    assert found.held_up_by() == []
    assert found.step() is Step.PRODUCE
    assert [found.gone(rank) for rank in range(3)] == ["", "", "it was closed"]


def test_who_waits_for_the_next_epoch_may_be_held_up_in_this_one():
    found = begun()
    produce(found)
    found.reach(0, Place(1, 0))
    found.ask(0, Place(1, 0))
    assert found.held_up_by() == [1]


def test_when_all_have_left_nothing_is_produced():
    found = begun()
    produce(found)
    for rank in range(2):
        found.leave(rank, "it was closed")
    assert found.step() is Step.WAIT
    assert found.held_up_by() == []
    validate(found)


def test_a_consumer_goes_on_where_it_was_and_in_the_next_epoch_after_the_last_batch():
    found = begun()
    produce(found)
    found.reach(0, Place(0, 2))
    found.reach(0, Place(0, 1))  # late news
    assert found.place_of(0) == (0, 2)
    found.reach(0, Place(0, 3))
    assert found.place_of(0) == (0, 3)
    found.end()
    assert found.place_of(0) == (1, 0)


def test_a_consumer_may_go_back_as_far_as_batches_are_kept():
    found = begun()
    produce(found)
    found.reach(0, Place(0, 3))
    found.seek(0, Place(0, 0))
    assert found.place_of(0) == (0, 0)
    for rank in range(2):
        found.reach(rank, Place(0, 2))
    produce(found)
    found.seek(1, Place(0, 2))
    assert not found.seek(1, Place(0, 1))
    assert found.place_of(1) == (0, 2)


def test_what_all_have_gone_past_is_produced_and_not_kept():
    found = ledger()
    for rank in range(2):
        found.seek(rank, Place(0, 5))
    found.ask(0, Place(0, 5))
    assert found.step() is Step.BEGIN
    found.begin()
    assert produce(found) == 8
    assert found.find(Place(0, 4)) is END
    assert found.find(Place(0, 5)) == Place(0, 5)


@pytest.mark.parametrize("seed", [*range(50), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(50, 200))])
def test_whatever_happens_everybody_gets_everything_in_order(seed):
    """Consumers take, break off, go back, leave; a model of each says what it must find."""
    draw = random.Random(seed)
    consumers, length = draw.randint(1, 4), draw.randint(0, 6)
    found = Ledger(consumers, draw.randint(1, 4), draw.choice([3, 100]))
    places = dict.fromkeys(range(consumers), Place(0, 0))
    finished = 0
    while finished < 3 * consumers and places:
        rank = draw.choice(list(places))
        place = places[rank]
        found.reach(rank, place)
        found.ask(rank, place)
        while (step := found.step()) is not Step.WAIT:
            if step is Step.BEGIN:
                found.begin()
            elif found.front.number == length:
                found.end()
            else:
                found.add(found.front, draw.randint(1, 2))
            validate(found)
        batch = found.find(place)
        if batch is END:
            assert place.number >= length
            places[rank], finished = Place(place.epoch + 1, 0), finished + 1
        elif batch is None:
            assert any(other < place for other in places.values())  # somebody else is to take first
        else:
            assert batch == place
            places[rank] = place._replace(number=place.number + 1)
        event = draw.random()
        found.reach(rank, places[rank])
        if event < 0.05:
            places[rank] = Place(place.epoch + 1, 0)
            finished += 1
            found.reach(rank, places[rank])
        elif event < 0.08:
            found.leave(rank, "it was closed")
            del places[rank]
        elif event < 0.15 and batch is not None and batch is not END:
            assert found.seek(rank, place) == (place >= min(places.values()))
            if place >= min(places.values()):
                places[rank] = place
        validate(found)
