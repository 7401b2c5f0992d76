"""Batches in memory that driver and worker share: whose they are, for how long, and what goes around them.

Batches of two samples are large enough to lie in an arena; one sample by itself is a small buffer. Tests that change
what an actor knows for good have actors of their own (`OWN`).
"""

import collections
import dataclasses
import logging
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from inside import live_memory_files
from latches import Gate, Mail
from pretended import pretend_accelerator
from probes import Calls, Stream, load
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


def same(mine, torchs):
    """Equal in types, dtypes, shapes, strides and values."""
    if type(mine) is not type(torchs):
        return False
    if isinstance(mine, torch.Tensor):
        layout = (mine.dtype, mine.shape, mine.stride())
        return layout == (torchs.dtype, torchs.shape, torchs.stride()) and torch.equal(mine, torchs)
    if isinstance(mine, dict):
        return list(mine) == list(torchs) and all(same(mine[key], torchs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(torchs) and all(same(*pair) for pair in zip(mine, torchs, strict=True))
    return mine == torchs


@pytest.fixture
def warnings_logged(caplog):
    """What the library has logged as a warning in this test."""
    caplog.set_level(logging.WARNING, "rayloader")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "rayloader"]


# ---- in the arena, and the user's own


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
def test_batches_are_torchs_and_not_copied_epoch_after_epoch(persistent):
    loader = batches_of(12, persistent_workers=persistent)
    for _ in range(3):
        placed = []
        for number, batch in enumerate(loader):
            assert same(batch, expected(number))
            placed.append(in_arena(batch))
        assert number == 11
        assert all(placed)


def test_batches_of_one_worker_outlive_each_other():
    held, addresses = {}, set()
    for number, batch in enumerate(batches_of(240, prefetch_factor=18)):
        assert same(batch, expected(number))
        if number % 48 == 5:
            held[number] = batch
        addresses.add(batch.data_ptr())
        batch = None
    assert number == 239
    assert len(addresses) < 120
    assert all(map(in_arena, held.values()))
    while held:
        assert all(same(batch, expected(number)) for number, batch in held.items())
        held.pop(max(held) if len(held) % 2 else min(held))


def test_a_change_in_place_shows_nowhere_else():
    kept = []
    for number, batch in enumerate(batches_of(12)):
        assert same(batch, expected(number))
        batch.neg_()
        kept.append(batch)
    assert any(map(in_arena, kept))
    assert all(same(batch, -expected(number)) for number, batch in enumerate(kept))


def test_a_batch_that_is_kept_stays_while_hundreds_pass():
    iterator = iter(batches_of(210))
    kept = next(iterator)
    assert in_arena(kept)
    for number, batch in enumerate(iterator, 1):
        assert same(batch, expected(number))
    assert number == 209
    assert same(kept, expected(0))


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


def test_gradients_flow_into_batches():
    for batch in batches_of(8, lambda index: torch.full((SAMPLE,), float(index))):
        weight = batch.requires_grad_()
        (weight * 2).sum().backward()
        assert (batch.grad == 2).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_keeps_what_it_saw_and_the_parent_goes_on():
    iterator = iter(batches_of(80))
    held = next(iterator)
    assert in_arena(held)
    wanted = expected(0).numpy()
    later, go = os.pipe()
    child = os.fork()
    if child == 0:  # no torch: its threads are not here
        os.close(go)
        os.read(later, 1)  # the parent closes it
        os._exit(0 if np.array_equal(held.numpy(), wanted) else 1)
    assert same(held, expected(0))
    del held
    for number, batch in enumerate(iterator, 1):
        assert same(batch, expected(number))
        batch.fill_(-1)
    for number, batch in enumerate(batches_of(80)):
        assert same(batch, expected(number))
    os.close(go)
    os.close(later)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_in_every_batch_do_not_use_the_arena_up(warnings_logged, monkeypatch):
    monkeypatch.setattr(lanes, "_warned_of_full", False)
    monkeypatch.setattr(lanes, "SPOILED_BYTES", 20 * 16 * SAMPLE)
    placed = []
    for number, batch in enumerate(batches_of(90)):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert same(batch, expected(number))
        placed.append(in_arena(batch))
    assert all(placed)
    assert warnings_logged() == []


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


def kept_sample(index):
    nested = default_collate([numbers(2 * index), numbers(2 * index + 1)])
    return nested, keep(nested)


class Point:
    def __init__(self, index):
        self.index = index


def collate_points(points, *, collate_fn_map):
    batch = default_collate([numbers(point.index) for point in points])
    again = collate_fn_map[torch.Tensor](list(batch), collate_fn_map=collate_fn_map)
    keep(batch)
    return again, keep(again)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_custom_collate_fn_may_keep_what_it_returns(persistent):
    loader = batches_of(24, collate_fn=keeping_collate, persistent_workers=persistent)
    for _ in range(2):
        placed = []
        for number, (batch, intact) in enumerate(loader):
            assert intact
            assert same(batch, expected(number))
            placed.append(in_arena(batch))
            batch.fill_(-1)
        assert all(placed)


def test_a_class_of_the_samples_may_keep_what_was_collated_into_it():
    loader = batches_of(60, lambda index: Keeping(numbers=numbers(index)), persistent_workers=True)
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert batch["intact"]
            assert same(batch["numbers"], expected(number))
            batch["numbers"].fill_(-1)


def test_a_dataset_may_keep_what_it_collates_itself():
    for number, (batch, intact) in enumerate(batches_of(24, kept_sample)):
        assert intact.all()
        assert same(batch.flatten(0, 1), expected(number, 4))


def test_the_users_entry_in_the_collate_map_may_keep_what_it_makes(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Point, collate_points)
    loader = batches_of(24, lambda index: {"point": Point(index), "plain": numbers(index)})
    for number, batch in enumerate(loader):
        again, intact = batch["point"]
        assert intact
        assert same(again, expected(number))
        assert same(batch["plain"], expected(number))


# ---- batches of all kinds

Pair = collections.namedtuple("Pair", ["left", "right"])

KINDS = {
    "dict": lambda index: {"a": numbers(index), "b": torch.tensor(index), "c": "text", "d": 0.5 * index},
    "tuple": lambda index: (numbers(index), index, numbers(index) * 2),
    "namedtuple": lambda index: Pair(numbers(index), {"deep": [numbers(-index), (index,)]}),
    "one tensor twice": lambda index: [numbers(index)] * 2,
    "array": lambda index: np.arange(SAMPLE) + index,
    "bfloat16": lambda index: numbers(index).bfloat16(),
    "float64": lambda index: numbers(index).double(),
    "complex64": lambda index: numbers(index) * 1j,
    "bool": lambda index: numbers(index).repeat(8) % 3 == 0,
    "uint16": lambda index: numbers(index).repeat(2).to(torch.uint16),
    "empty": lambda index: (torch.empty(0, 3), numbers(index), torch.empty(2, 0)),
    "scalar tensors": lambda index: (torch.tensor(index), numbers(index), torch.tensor(True)),
    "strided": lambda index: numbers(index).view(4, -1).T,
    "expanded": lambda index: torch.tensor([index]).expand(SAMPLE),
    "odd sizes": lambda index: (torch.full((33,), index, dtype=torch.uint8), numbers(index), torch.ones(7)),
}


def test_what_arrives_is_what_torch_makes():
    kinds = list(KINDS.values())
    arguments = {"dataset": Calls(lambda index: kinds[index // 2 % len(kinds)](index), 4 * len(kinds)), "batch_size": 2}
    mine, torchs = DataLoader(**arguments, num_workers=2), DataLoader(**arguments)
    for number, (batch, other) in enumerate(zip(mine, torchs, strict=True)):
        assert same(batch, other), number


def test_fields_that_shared_memory_share_it_again():
    def collate(samples):
        batch = default_collate(samples)
        return batch, batch[1:], batch.numpy()

    for number, (batch, tail, array) in enumerate(batches_of(12, collate_fn=collate)):
        assert same(batch, expected(number))
        tail.fill_(7)
        assert (batch[1] == 7).all()
        assert same(torch.from_numpy(array)[:1], expected(number)[:1])


def padded(samples):
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


LENGTHS = {
    "growing": lambda index: 8 << (index // 8),
    "shrinking": lambda index: 200_000 >> (index // 8),
    "random": lambda index: random.Random(index).choice([1, 300, 700, 5000, 40_000]),
}


@pytest.mark.parametrize(
    ("lengths", "hold"),
    [
        ("growing", 0),
        ("shrinking", 0),
        ("random", 5),
        pytest.param("growing", 5, marks=pytest.mark.full),
        pytest.param("shrinking", 5, marks=pytest.mark.full),
        pytest.param("random", 0, marks=pytest.mark.full),
    ],
)
def test_batches_of_varying_size(lengths, hold):
    length = LENGTHS[lengths]

    def get(index):
        return torch.full((length(index),), index + 1, dtype=torch.int32)

    held = collections.deque(maxlen=hold)
    for _ in range(2):
        for number, batch in enumerate(batches_of(56, get, collate_fn=padded)):
            held.append((number, batch))
            for past, kept in [*held, (number, batch)]:
                assert same(kept, padded([get(2 * past), get(2 * past + 1)]))
        assert number == 55


def test_a_batch_larger_than_its_slot_comes_all_the_same():
    def get(index):
        return {"big": torch.full((2_000_000 if index == 20 else 600,), index), "small": numbers(index)}

    for number, batch in enumerate(batches_of(40, get, size=1)):
        assert same(batch["small"], expected(number, 1))
        assert (batch["big"] == number).all()
        assert batch["big"].numel() == (2_000_000 if number == 20 else 600)


# ---- errors


def test_samples_of_unequal_shape_raise_torchs_error_and_it_goes_on():
    def get(index):
        return numbers(index)[: SAMPLE - (index == 21)]

    iterator = iter(batches_of(16, get))
    for number in range(16):
        if number == 10:
            with pytest.raises(RuntimeError, match=r"Caught RuntimeError in DataLoader worker process 0\."):
                next(iterator)
        else:
            assert same(next(iterator), expected(number))
    assert list(iterator) == []


def test_errors_in_mid_epoch_do_not_use_the_arena_up(warnings_logged, monkeypatch):
    monkeypatch.setattr(lanes, "_warned_of_full", False)

    def get(index):
        if index % 4 == 1:
            raise ValueError(f"sample {index}")
        return numbers(index), [numbers(index)[: SAMPLE - (index % 8 == 7)]]

    iterator = iter(batches_of(80, get))
    placed = []
    for number in range(80):
        if number % 2 == 0:
            with pytest.raises(ValueError, match=f"(?s)Caught ValueError in .*sample {2 * number + 1}"):
                next(iterator)
        elif number % 4 == 1:
            batch, _ = next(iterator)
            assert same(batch, expected(number))
            placed.append(in_arena(batch))
        else:  # the first field was collated before the second one failed
            with pytest.raises(RuntimeError, match="Caught RuntimeError in DataLoader worker process"):
                next(iterator)
    assert all(placed)
    assert warnings_logged() == []


# ---- switched off, or not possible


def refuse(nbytes, kind="arena"):
    assert kind == "copies", "an arena was used"  # in which the driver alone writes and reads
    return arena.Arena(nbytes, kind)


def test_the_argument_switches_arenas_off(monkeypatch):
    monkeypatch.setattr(lanes, "Arena", refuse)
    for number, batch in enumerate(batches_of(12, arenas=False)):
        assert same(batch, expected(number))
        assert not in_arena(batch)


def test_the_environment_switches_arenas_off(monkeypatch):
    monkeypatch.setenv(lanes.ARENAS_VARIABLE, "0")
    monkeypatch.setattr(lanes, "Arena", refuse)
    for number, batch in enumerate(batches_of(12)):
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


def test_iterable_datasets_that_end_unevenly():
    dataset = Stream(lambda worker: (torch.full((SAMPLE,), 100 * worker + k) for k in range(10 + 30 * worker)))
    for persistent in (False, True):
        loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent)
        for _ in range(3):
            seen = collections.defaultdict(list)
            for batch in loader:
                assert (batch == batch[:, :1]).all()
                seen[batch[0, 0].item() // 100].extend(batch[:, 0].tolist())
                batch.fill_(-1)
            assert seen == {worker: [100 * worker + k for k in range(10 + 30 * worker)] for worker in range(2)}


def test_a_persistent_iterable_dataset_keeps_its_arenas_from_epoch_to_epoch():
    dataset = Stream(lambda worker: (torch.full((SAMPLE,), k) for k in range(20)))
    loader, names = DataLoader(dataset, 2, num_workers=2, persistent_workers=True), []
    for _ in range(4):
        assert len(list(loader)) == 20
        names.append({name for _, name in mappings()})
    assert names[1] == names[2] == names[3] != set()


def test_out_of_order(tmp_path):
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 0:
            gate.wait()
        return numbers(index)

    first = []
    for batch in batches_of(24, get, in_order=False):
        if len(first) == 20:
            gate.open()
        first.append(batch[0, 0].item())
        assert same(batch, torch.stack([numbers(first[-1]), numbers(first[-1] + 1)]))
        batch.fill_(-1)
    assert sorted(first) == list(range(0, 48, 2))
    assert first[0] != 0


def test_a_killed_worker_leaves_held_batches_intact(tmp_path):
    request = tmp_path / "request"
    request.touch()

    def get(index):
        if index == 2 * 9 and request.exists():
            request.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return numbers(index)

    loader = batches_of(16, get)
    held = list(loader)
    assert not request.exists()
    assert any(map(in_arena, held))
    later = list(loader)
    for batches in (held, later):
        assert all(same(batch, expected(number)) for number, batch in enumerate(batches))
        assert len(batches) == 16


def test_loaders_of_different_batches_take_turns_on_the_same_actors():
    loaders, held = [batches_of(10, size=size) for size in (2, 16, 3, 5)], []
    for _ in range(3):
        for loader in loaders:
            for number, batch in enumerate(loader):
                assert same(batch, expected(number, loader.batch_size))
            held.append(batch)
    assert all(same(batch, expected(9, batch.shape[0])) for batch in held)
    assert all(map(in_arena, held))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_loaders_at_the_same_time():
    loaders = [batches_of(20, size=size, num_workers=1, persistent_workers=True) for size in (1, 16)]
    for _ in range(2):
        for number, batches in enumerate(zip(*loaders, strict=True)):
            for loader, batch in zip(loaders, batches, strict=True):
                assert same(batch, expected(number, loader.batch_size))
                batch.fill_(-1)


@pytest.mark.full
def test_many_short_epochs_leave_nothing_behind():
    loader, process = batches_of(6), psutil.Process()
    counts = []
    for _ in range(50):
        for batch in loader:
            batch.fill_(0)
        del batch
        mapped = len(Path("/proc/self/maps").read_text().splitlines())
        counts.append((process.num_fds(), mapped, threading.active_count()))
    assert not orphans()
    ours = sorted(thread.name for thread in threading.enumerate() if "rayloader" in thread.name)
    assert ours == ["rayloader-janitor", "rayloader-session"]
    for early, late in zip(counts[14], counts[-1], strict=True):
        assert late - early < 18  # half of what one an epoch would be: Ray and the allocator have their own


# ---- pinning


class Pinned(torch.Tensor):
    """What the accelerator's pinned memory looks like here."""


@pytest.fixture
def accelerator(monkeypatch):
    pretend_accelerator(monkeypatch, lambda tensor: tensor.clone().as_subclass(Pinned))


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("persistent", [False, True])
def test_pinned_copies_leave_the_arena_free(persistent, warnings_logged, monkeypatch):
    monkeypatch.setattr(lanes, "_warned_of_full", False)
    loader = batches_of(80, pin_memory=True, persistent_workers=persistent)
    for _ in range(2):
        batches = list(loader)
        assert {type(batch) for batch in batches} == {Pinned}
        assert all(torch.equal(batch, expected(number)) for number, batch in enumerate(batches))
        assert not any(map(in_arena, batches))
    assert warnings_logged() == []


@pytest.mark.usefixtures("accelerator")
def test_breaking_off_while_pinning():
    loader = batches_of(40, pin_memory=True)
    for _ in range(6):
        for number, batch in enumerate(loader):
            assert torch.equal(batch, expected(number))
            if number == 7:
                break


def test_what_the_environment_says_is_checked(monkeypatch):
    monkeypatch.setenv(lanes.ARENAS_VARIABLE, "false")
    with pytest.raises(ValueError, match="RAYLOADER_ARENAS must be 0 or 1, got 'false'"):
        iter(batches_of(4))
