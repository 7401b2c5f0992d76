"""Batches in memory that driver and worker share: whose they are, for how long, and what goes around them.

Batches of two samples are large enough to lie in an arena; one sample by itself is a small buffer. Tests that change
what an actor knows for good have actors of their own (`OWN`).
"""

import collections
import dataclasses
import logging
import os
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from inside import live_memory_files
from latches import Gate, Mail
from probes import Calls, load
from rayloader import DataLoader
from rayloader.actors import pool
from rayloader.actors.actor import ActorState
from rayloader.actors.pool import get_pool
from rayloader.transport import arena, lanes
from rayloader.transport.memory_file import MemoryFile, MemoryFileError

pytestmark = pytest.mark.usefixtures("ray_session")

SAMPLE = lanes.SMALL_BYTES // 8  # int64 numbers
EXIT_LIMIT = 500  # seconds for a process that ends; on expiry the test fails
OWN = {"ray_remote_args": {"num_cpus": 0, "memory": 1}}  # actors that serve no other test


def numbers(index):
    return torch.arange(SAMPLE) + index


def expected(batch, size=2):
    return torch.stack([numbers(index) for index in range(size * batch, size * batch + size)])


def same(mine, torchs):
    return mine.dtype == torchs.dtype and torch.equal(mine, torchs)


def batches_of(count, function=numbers, size=2, **options):
    """A loader of `count` batches, at torch's depth, so that it is known how many are under way."""
    return DataLoader(Calls(function, size * count), size, **{"num_workers": 2, "prefetch_factor": 2, **options})


def mappings():
    """Address range and name of each mapping of an arena in this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "rayloader-arena-" in line:
            extent, *_, name, _ = line.split()  # the last word is "(deleted)"
            found.append((range(*(int(end, 16) for end in extent.split("-"))), name))
    return found


def in_arena(tensor):
    return any(tensor.data_ptr() in extent for extent, _ in mappings())


def orphans():
    """Arenas mapped here that no actor of the pool uses any more."""
    used = live_memory_files()
    return {name for _, name in mappings() if not any(arena_name in name for arena_name in used)}


def arena_rss(name="rayloader-arena-"):
    """Memory of arenas that this process has looked at and that was not given back, in bytes."""
    total, is_arena = 0, False
    with open("/proc/self/smaps") as file:  # psutil would parse all that it says of a thousand mappings
        for line in file:
            if line.startswith("Rss:"):
                total += is_arena * 1024 * int(line.split()[1])
            elif not line[0].isupper():  # the line that begins the next mapping
                is_arena = name in line
    return total


@pytest.fixture
def warnings_logged(caplog):
    """What the library has logged as a warning in this test."""
    caplog.set_level(logging.WARNING, "rayloader")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "rayloader"]


# ---- in the arena, and the user's own


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
def test_batches_are_not_copied_are_used_again_and_outlive_each_other(persistent):
    loader, held, addresses = batches_of(120, prefetch_factor=9, persistent_workers=persistent), {}, set()
    for epoch in range(2):
        for number, batch in enumerate(loader):
            assert same(batch, expected(number))
            assert in_arena(batch)
            addresses.add(batch.data_ptr())
            if number % 48 == 5:
                held[epoch, number] = batch.neg_()  # shows nowhere else
            batch = None
        assert number == 119
    assert len(addresses) < 120
    while held:
        assert all(same(batch, -expected(number)) for (_, number), batch in held.items())
        held.pop(max(held) if len(held) % 2 else min(held))


def test_who_keeps_more_than_an_arena_has_room_for_gets_all_intact_and_one_warning(warnings_logged, monkeypatch):
    monkeypatch.setattr(lanes, "_warned_of_full", False)
    monkeypatch.setattr(lanes, "ARENA_BYTES", 20 * 16 * SAMPLE)
    loader, batches = batches_of(60, num_workers=1, **OWN), []
    for _ in range(2):
        batches.clear()
        batches.extend(loader)
        placed = [in_arena(batch) for batch in batches]
        assert sum(placed) >= 19
        assert not any(placed[30:])
        assert all(same(batch, expected(number)) for number, batch in enumerate(batches))
    (message,) = warnings_logged()
    assert "held at once" in message
    batches.clear()
    assert sum(in_arena(batch) for batch in loader) >= 40  # dropped one by one: the arena serves again


LABEL = 2000  # int64 numbers, 16 KB a batch


def test_who_keeps_the_labels_keeps_only_the_labels():
    """As every loop does that evaluates a model."""

    def get(index):
        return torch.full((1 << 19,), index % 251, dtype=torch.uint8), torch.full((LABEL,), index)

    kept, process = [], psutil.Process()
    for number, (image, label) in enumerate(batches_of(300, get)):
        assert image[1, -1] == (2 * number + 1) % 251
        kept.append(label)
        if number == 40:
            arenas, private = arena_rss(), process.memory_full_info().uss
    assert arena_rss() <= arenas + (8 << 20)
    assert process.memory_full_info().uss - private < 3 * 260 * 16 * LABEL
    assert all((label[:, 0] == torch.tensor([2 * number, 2 * number + 1])).all() for number, label in enumerate(kept))
    assert not any(map(in_arena, kept))


def test_a_tensor_that_is_kept_keeps_only_its_memory_when_the_workers_have_ended():
    def get(index):
        return torch.full((1 << 18,), index), torch.full((1 << 18,), -index)

    batches = list(batches_of(8, get, num_workers=1, fresh_processes=True))
    (ended,) = {name for extent, name in mappings() if batches[3][1].data_ptr() in extent}
    ending = [
        actor.address.pid for actor in get_pool().actors if actor.state is ActorState.ENDING
    ]  # they finish what they have to, and end
    processes = [psutil.Process(pid) for pid in ending if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(processes, EXIT_LIMIT)[1]
    assert ended in orphans()
    assert all((batch + negative == 0).all() for batch, negative in batches)
    kept = batches[3][1]
    assert arena_rss(ended) >= 8 * kept.nbytes
    del batches
    assert arena_rss(ended) <= 9 / 8 * kept.nbytes
    assert same(kept, torch.stack([torch.full((1 << 18,), -6), torch.full((1 << 18,), -7)]))


# ---- what the worker keeps

kept_by_worker = []


def keep(batch):
    """Keeps a batch and a copy of it; whether all that was kept so far is unchanged."""
    kept_by_worker.append((batch, batch.clone()))
    return all(torch.equal(*pair) for pair in kept_by_worker)


def keeping_collate(samples):
    batch = default_collate(samples)
    return batch, keep(batch)


class Keeping(collections.UserDict):
    """Torch collates it by way of `update`, with batches that it has stacked."""

    def update(self, collated):
        super().update(collated, intact=keep(collated["numbers"]))


class Point:
    def __init__(self, index):
        self.index = index


def collate_points(points, *, collate_fn_map):
    batch = default_collate([numbers(point.index) for point in points])
    again = collate_fn_map[torch.Tensor](list(batch), collate_fn_map=collate_fn_map)
    return again, keep(batch) and keep(again)


KEEPERS = {
    "collate_fn": (numbers, {"collate_fn": keeping_collate}, lambda batch: batch),
    "the samples' class": (
        lambda index: Keeping(numbers=numbers(index)),
        {},
        lambda batch: (batch["numbers"], batch["intact"]),
    ),
    "an entry in the collate map": (lambda index: {"point": Point(index)}, {}, lambda batch: batch["point"]),
}


@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_user_code_of_the_worker_keeps_is_its_own(keeper, monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Point, collate_points)
    function, options, parts = KEEPERS[keeper]
    loader = batches_of(24, function, persistent_workers=True, **options)
    for _ in range(2):
        for number, batch in enumerate(loader):
            mine, intact = parts(batch)
            assert intact
            assert same(mine, expected(number))
            mine.fill_(-1)


# ---- errors


def test_errors_in_mid_epoch_do_not_use_the_arena_up(warnings_logged, monkeypatch):
    """One field was collated before the next one failed."""
    monkeypatch.setattr(lanes, "_warned_of_full", False)
    monkeypatch.setattr(lanes, "ARENA_BYTES", 20 * 16 * SAMPLE)
    loader = batches_of(120, lambda index: (numbers(index), numbers(index)[: SAMPLE - (index % 4 == 3)]), **OWN)
    iterator = iter(loader)
    for number in range(120):
        if number % 2:
            with pytest.raises(RuntimeError, match="Caught RuntimeError in DataLoader worker process"):
                next(iterator)
        else:
            batch, _ = next(iterator)
            assert same(batch, expected(number))
            assert in_arena(batch)
    assert warnings_logged() == []


# ---- switched off, or not possible


def refuse(nbytes, kind="arena"):
    assert kind == "copies", "an arena was used"  # in which the driver alone writes and reads
    return arena.Arena(nbytes, kind)


@pytest.mark.parametrize("by", ["the argument", "the environment"])
def test_arenas_can_be_switched_off(by, monkeypatch):
    monkeypatch.setattr(lanes, "Arena", refuse)
    if by == "the environment":
        monkeypatch.setenv(lanes.ARENAS_VARIABLE, "0")
    for number, batch in enumerate(batches_of(12, **({"arenas": False} if by == "the argument" else {}))):
        assert same(batch, expected(number))
        assert not in_arena(batch)


def test_small_batches_take_no_memory_of_an_arena():
    loader = load(torch.tensor, 12, num_workers=1, **OWN)
    assert [batch.item() for batch in loader] == list(range(12))
    (own,) = [actor for actor in pool.get_pool().actors if actor.options.get("memory") == 1]
    assert os.fstat(own.lane._arena.address.fd).st_blocks == 0


class Elsewhere(MemoryFile):
    def __init__(self, *args):
        super().__init__(*args)
        self.address = dataclasses.replace(self.address, machine="elsewhere")


def no_memory_file(*_):
    raise MemoryFileError("as planned")


OBSTACLES = {
    "the driver is elsewhere": (arena, "MemoryFile", Elsewhere),
    "no memory files": (arena, "MemoryFile", no_memory_file),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_no_arena_is_possible_batches_come_all_the_same(obstacle, monkeypatch):
    monkeypatch.setattr(*OBSTACLES[obstacle])
    loader = batches_of(12, num_workers=1, **OWN)
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert same(batch, expected(number))
            assert not in_arena(batch)


# ---- epochs that end early, late and unevenly


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
def test_breaking_off_again_and_again_takes_no_more_memory(persistent):
    loader, kept = batches_of(40, persistent_workers=persistent), []
    before = arena_rss()
    for epoch in range(25):
        for number, batch in enumerate(loader):
            assert same(batch, expected(number))
            if number == 5 + epoch % 3:
                break
        del batch
        if epoch % 5 == 0:
            kept.append(next(iter(loader)))
        # What is held, and twice what may be under way: of an epoch that was broken off, and of the next.
        assert arena_rss() - before <= (len(kept) + 2 * 2 * 4) * 16 * SAMPLE
        assert len(orphans()) <= len(kept)  # of workers that did not stop in time
    assert all(same(batch, expected(0)) for batch in kept)


def test_calls_of_an_epoch_that_was_broken_off_do_not_write_to_later_batches(tmp_path):
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        if index == 2 * 8:  # under way when the user breaks off
            mail.send("here")
            gate.wait()
        return numbers(index)

    loader = batches_of(12, get, persistent_workers=True)
    held = []
    for number, batch in enumerate(loader):
        held.append(batch)
        if number == 7:
            break
    mail.receive()
    iterator = iter(loader)
    gate.open()
    held += iterator
    assert all(same(batch, expected(number)) for number, batch in enumerate(held[:8]))
    assert all(same(batch, expected(number)) for number, batch in enumerate(held[8:]))
    assert len(held) == 20
    mail.close()


def test_what_the_environment_says_is_checked(monkeypatch):
    monkeypatch.setenv(lanes.ARENAS_VARIABLE, "false")
    with pytest.raises(ValueError, match="RAYLOADER_ARENAS must be 0 or 1, got 'false'"):
        iter(batches_of(4))
