"""What is done for a consumer's large batches ahead: no Ray, objects come when a test says so."""

import numpy as np
import pytest
import torch

import rayloader.sharing.copying
from rayloader import RaySessionError
from rayloader.sharing.copying import Copying
from rayloader.transport import codec
from rayloader.transport.lanes import SMALL_BYTES, to_wire

HANG_LIMIT_S = 60.0
SIZE = 2 * SMALL_BYTES


def stored(value):
    """A batch as Ray's object store gives it: nobody may write to it."""
    skeleton, buffers, carried, packed = to_wire(codec.encode(torch.full((SIZE,), value, dtype=torch.uint8)))
    return skeleton, [bytes(buffer) for buffer in buffers], carried, packed


class Link:
    """Objects come when `bring` is called."""

    def __init__(self):
        self.fetches = {}
        self.alive = True

    def fetch(self, call, came):
        self.fetches[call] = came

    def bring(self, call, wire):
        self.fetches.pop(call)(wire)

    def check_session(self):
        if not self.alive:
            raise RaySessionError("gone")


class Made(Copying):
    """Tells which batches were copied, as they are."""

    def __init__(self, link):
        super().__init__(link.fetch, link.check_session)
        self.order = []

    def _work(self):
        before = set(self._copied)
        worked = super()._work()
        self.order += sorted(set(self._copied) - before)
        return worked

    def wait_until_copied(self, *numbers):
        self._thread.start()
        while self.order != list(numbers):
            assert self._thread.wait(HANG_LIMIT_S), f"only {self.order} are copied"


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def copying(link):
    copying = Made(link)
    yield copying
    copying.close(wait=True)


def first_byte(wire):
    return wire[1][0][0]


def test_batches_behind_the_first_are_copied_before_they_are_asked_for(copying, link):
    for number in (1, 2):
        copying.expect(number, f"call {number}")
        link.bring(f"call {number}", stored(number))
    copying.wait_until_copied(1, 2)
    copied = copying.copied(1, None)  # it is there, so what is given in its place is not looked at
    assert first_byte(copied) == 1
    assert not copied[1][0].readonly


def test_no_more_is_copied_ahead_than_was_agreed_but_what_is_needed_always_is(copying, link, monkeypatch):
    monkeypatch.setattr(rayloader.sharing.copying, "COPIED_AHEAD_BYTES", SIZE)
    for number in (1, 2):
        copying.expect(number, number)
        link.bring(number, stored(number))
    assert first_byte(copying.copied(0, stored(0))) == 0
    assert 2 not in copying.order
    for number in (1, 2):
        copying.taken(number)
        assert first_byte(copying.copied(number, stored(number))) == number


def test_memory_is_used_again_once_nobody_can_look_at_it(copying):
    addresses = set()
    for number in range(20):
        copied = copying.copied(number, stored(number))
        copied[1][0][0] = 255  # the user's to write to
        addresses.add(address_of(copied))
        copying.taken(number + 1)
    assert len(addresses) < 20


def address_of(wire):
    return np.frombuffer(wire[1][0], np.uint8).ctypes.data


def test_errors_of_ray_are_left_to_who_asks(copying, link):
    copying.expect(1, "call")
    link.bring("call", OSError("lost"))
    assert first_byte(copying.copied(1, stored(1))) == 1


def test_an_interrupted_batch_is_copied_again(copying):
    copying.copied(3, stored(3))
    copying.taken(4)  # and then the interrupt, before the user has it
    assert first_byte(copying.copied(3, stored(3))) == 3


def test_an_error_in_the_thread_is_raised_where_the_batch_is_needed(copying, monkeypatch):
    def fails(wire, copy):
        raise MemoryError("no room")

    monkeypatch.setattr(rayloader.sharing.copying, "owned", fails)
    with pytest.raises(MemoryError, match="no room"):
        copying.copied(0, stored(0))


def test_who_waits_while_it_is_closed_gets_the_batch_as_it_is_or_why_there_is_none(copying, link):
    wire = stored(0)
    copying.close(wait=True)
    assert copying.copied(0, wire) is wire
    link.alive = False
    with pytest.raises(RaySessionError):
        copying.copied(0, wire)


def test_what_comes_once_it_is_closed_is_let_go_of(copying, link):
    copying.expect(0, "call")
    copying.close(wait=True)
    link.bring("call", stored(0))
    assert not copying._fetched


def test_shutdown_ends_all_threads(copying):
    copying.copied(0, stored(0))
    rayloader.sharing.copying.close_all()
    assert not copying._thread._thread.is_alive()
