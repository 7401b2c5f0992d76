"""Copies in memory that is used again: never while anybody can look at it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from rayloader.transport import codec, lanes
from rayloader.transport.arena import ArenaError
from rayloader.transport.lanes import SMALL_BYTES, Recycled, from_wire, owned, read_only_bytes, to_wire

LARGE = SMALL_BYTES + 1


def mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rayloader-copies" in line]


@pytest.fixture
def copies():
    copies = Recycled()
    yield copies
    copies.close()
    del copies
    gc.collect()
    assert not mappings()


def source(number: int, nbytes: int = LARGE) -> memoryview:
    return memoryview(bytes([number % 256]) * nbytes)


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize("nbytes", [0, 1, SMALL_BYTES, LARGE])
def test_a_copy_is_writable_and_nobody_elses(copies, nbytes):
    given = source(7, nbytes)
    one, two = copies.copy(given), copies.copy(given)
    one[:] = bytes(nbytes)
    assert bytes(two) == bytes(given)


def test_memory_is_used_again_once_the_last_view_has_died(copies):
    copy = copies.copy(source(1))
    where, tensor = address(copy), torch.frombuffer(copy, dtype=torch.uint8)[5:]
    del copy
    other = copies.copy(source(2))
    assert address(other) != where
    assert (tensor == 1).all()
    del tensor
    assert address(copies.copy(source(3))) == where
    assert bytes(other) == bytes(source(2))


def test_after_close_what_is_kept_stays_and_new_copies_have_memory_of_their_own(copies):
    kept = copies.copy(source(5))
    for _ in range(2):
        copies.close()
    assert (bytes(kept), bytes(copies.copy(source(6)))) == (bytes(source(5)), bytes(source(6)))
    assert copies.leased_bytes == 0


@pytest.mark.parametrize("lacks", ["arenas", "room"])
def test_without_arenas_or_room_copies_are_made_all_the_same(copies, monkeypatch, lacks):
    def refuse(*_):
        raise ArenaError("no memory files here")

    monkeypatch.setattr(lanes, *(("Arena", refuse) if lacks == "arenas" else ("ARENA_BYTES", 1 << 17)))
    kept = [copies.copy(source(number)) for number in range(5)]
    assert [copy[-1] for copy in kept] == list(range(5))
    assert bool(mappings()) is (lacks == "room")


def test_where_forks_have_spoiled_much_the_memory_is_replaced(copies, monkeypatch):
    monkeypatch.setattr(lanes, "SPOILED_BYTES", 0)
    kept = copies.copy(source(1))
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        os._exit(0)
    os.waitpid(pid, 0)
    del kept
    before = mappings()
    after = [copies.copy(source(number)) for number in range(3)]
    gc.collect()
    assert mappings() != before
    assert [copy[0] for copy in after] == [0, 1, 2]


def test_of_a_wire_only_what_is_read_only_is_copied(copies):
    batch = {"image": torch.arange(LARGE), "label": torch.arange(4), "name": "seven"}
    wire = to_wire(codec.encode(batch))
    writable = bytearray(memoryview(wire.buffers[0]))
    wire = wire._replace(buffers=[writable, bytes(memoryview(wire.buffers[1]))])
    assert read_only_bytes(wire) == batch["label"].nbytes
    mine = owned(wire, copies.copy)
    assert read_only_bytes(mine) == 0
    got = from_wire(mine)
    assert torch.equal(got["image"], batch["image"])
    assert torch.equal(got["label"], batch["label"])
    assert got["name"] == "seven"
    assert got["image"].data_ptr() == address(memoryview(writable))
