"""Batches in memory that driver and worker share: whose they are, for how long, and what goes around them.

Batches of two samples are large enough to lie in an arena; one sample by itself is a small buffer. Tests that change
what an actor knows for good have actors of their own (`OWN`).
"""

import dataclasses
import logging
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import default_collate

from probes import Calls
from rayloader import DataLoader
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


# ---- in the arena, and the user's own


def test_batches_are_not_copied_are_used_again_and_outlive_each_other():
    loader, held, addresses = batches_of(120, prefetch_factor=9, persistent_workers=True), {}, set()
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


def test_who_keeps_more_than_an_arena_has_room_for_gets_all_intact_and_one_warning(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "rayloader")
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
    (record,) = [record for record in caplog.records if record.name == "rayloader"]
    assert "held at once" in record.getMessage()
    batches.clear()
    assert sum(in_arena(batch) for batch in loader) >= 40  # dropped one by one: the arena serves again


LABEL = 2000  # int64 numbers, 16 KB a batch


def test_who_keeps_the_labels_keeps_only_the_labels():
    """As every loop does that evaluates a model."""

    def get(index):
        return torch.full((1 << 19,), index % 251, dtype=torch.uint8), torch.full((LABEL,), index)

    kept = []
    for number, (image, label) in enumerate(batches_of(200, get)):
        assert image[1, -1] == (2 * number + 1) % 251
        kept.append(label)
        if number == 40:
            arenas = arena_rss()
    assert arena_rss() <= arenas + (8 << 20)
    assert all((label[:, 0] == torch.tensor([2 * number, 2 * number + 1])).all() for number, label in enumerate(kept))
    assert not any(map(in_arena, kept))


def test_a_tensor_that_is_kept_keeps_only_its_memory_when_the_workers_have_ended():
    batches = list(batches_of(8, lambda index: torch.full((1 << 18,), index), num_workers=1, fresh_processes=True))
    (ended,) = {name for extent, name in mappings() if batches[3].data_ptr() in extent}
    pids = [actor.address.pid for actor in get_pool().actors if actor.state is ActorState.ENDING]
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(processes, EXIT_LIMIT)[1]
    assert all((batch == torch.tensor([[2 * number], [2 * number + 1]])).all() for number, batch in enumerate(batches))
    kept = batches[3]
    assert arena_rss(ended) >= 8 * kept.nbytes
    del batches
    assert arena_rss(ended) <= 9 / 8 * kept.nbytes
    assert same(kept, torch.stack([torch.full((1 << 18,), 6), torch.full((1 << 18,), 7)]))


kept_by_worker = []


def keeping_collate(samples):
    """A batch, and whether all that was kept so far is unchanged."""
    batch = default_collate(samples)
    kept_by_worker.append((batch, batch.clone()))
    return batch, all(torch.equal(*pair) for pair in kept_by_worker)


def test_what_user_code_of_the_worker_keeps_is_its_own():
    loader = batches_of(24, collate_fn=keeping_collate, persistent_workers=True)
    for _ in range(2):
        for number, (mine, intact) in enumerate(loader):
            assert intact
            assert same(mine, expected(number))
            mine.fill_(-1)


# ---- switched off, or not possible


class Elsewhere(MemoryFile):
    def __init__(self, *args):
        super().__init__(*args)
        self.address = dataclasses.replace(self.address, machine="elsewhere")


def refuse(nbytes, kind="arena"):
    assert kind == "copies", "an arena was used"  # in which the driver alone writes and reads
    return arena.Arena(nbytes, kind)


def no_memory_file(*_):
    raise MemoryFileError("as planned")


OBSTACLES = {
    "the argument": (lanes, "Arena", refuse),
    "the environment": (lanes, "Arena", refuse),
    "the driver is elsewhere": (arena, "MemoryFile", Elsewhere),
    "no memory files": (arena, "MemoryFile", no_memory_file),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_arenas_are_switched_off_or_not_possible_batches_come_all_the_same(obstacle, monkeypatch):
    monkeypatch.setattr(*OBSTACLES[obstacle])
    if obstacle == "the environment":
        monkeypatch.setenv(lanes.ARENAS_VARIABLE, "false")
        with pytest.raises(ValueError, match="RAYLOADER_ARENAS must be 0 or 1, got 'false'"):
            iter(batches_of(4))
        monkeypatch.setenv(lanes.ARENAS_VARIABLE, "0")
    options = {"arenas": False} if obstacle == "the argument" else {}
    loader = batches_of(12, num_workers=1, **OWN, **options)
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert same(batch, expected(number))
            assert not in_arena(batch)


# ---- epochs that end early, late and unevenly


def test_breaking_off_again_and_again_takes_no_more_memory():
    """Nor do calls of an epoch that was broken off write to batches of later ones, or to those that are kept."""
    loader, kept = batches_of(40, persistent_workers=True), []
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
    assert all(same(batch, expected(0)) for batch in kept)
