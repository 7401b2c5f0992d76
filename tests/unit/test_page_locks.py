"""Page-locked slots, with a simulated accelerator: no slot is written to while a copy from it is pending."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from rayloader.gpu import page_locks
from rayloader.gpu.page_locks import PageLocks
from rayloader.gpu.to_device import PinOrMove
from rayloader.transport import codec
from rayloader.transport.arena import Arena, ArenaWriter
from simulated_device import DEVICE, LIMIT_S, SimulatedAccelerator, wait_for_unlocking

MIB = 1 << 20


class Worker:
    """Both sides of a page-locked arena: builds batches of equal numbers, each another one."""

    def __init__(self, accelerator, nbytes=64 * MIB):
        self.accelerator = accelerator
        self.arena = Arena(nbytes)
        self.arena.page_lock_for(accelerator)
        self.writer = ArenaWriter(self.arena.address)

    def build(self, number, items=4096):
        self.writer.begin()
        place = self.writer.put(codec.encode(torch.full((items,), number)).buffers[0])
        return None if place is None else self.writer.seal(place)

    def deliver(self, place, uses=2):
        """As a batch of a slot that was used so often: at the second time it is locked."""
        leases = {}
        view = self.arena.view(place, leases)
        for lease in [*leases.values()] * uses:
            lease.page_lock()
        return torch.frombuffer(view, dtype=torch.int64)

    def batch(self, number, items=4096, uses=2):
        return self.deliver(self.build(number, items), uses)

    def give_back(self):
        """The program asks for a batch, and the worker is sent a task."""
        freed = self.arena.freed()
        PinOrMove(accelerator=self.accelerator).asks()
        freed += self.arena.freed()
        self.writer.lock(self.arena.locked())
        self.writer.free(freed)
        return freed

    def close(self):
        if self.arena is not None:
            self.arena.close(give_back=True)
        self.arena = self.writer = None


@pytest.fixture
def accelerator():
    """Proves that after a test all is unlocked and unmapped, and that nothing was torn."""
    accelerator = SimulatedAccelerator()
    yield accelerator
    gc.collect()
    accelerator.advance(accelerator.queued)
    wait_for_unlocking()
    assert (accelerator.torn, accelerator.violations, accelerator.registered) == ([], [], {})
    assert "rayloader-arena" not in Path("/proc/self/maps").read_text()


@pytest.fixture
def worker(accelerator):
    worker = Worker(accelerator)
    yield worker
    worker.close()


# When slots are locked


@pytest.mark.parametrize(
    ("sizes", "locked"),
    [
        ((4096, 5000, 4096), [False] * 3),  # a place whose slots get another size
        ((MIB // 8 + 1,) * 3, [False] * 3),
        ((MIB // 8,) * 2, [False, True]),
    ],
)
def test_a_slot_is_locked_when_it_is_used_for_the_second_time(worker, accelerator, monkeypatch, sizes, locked):
    monkeypatch.setattr(page_locks, "MOST_BYTES", MIB)
    for items, expected in zip(sizes, locked, strict=True):
        batch = worker.batch(0, items, uses=1)
        assert accelerator.holds(batch) is expected
        del batch
        assert len(worker.give_back()) == 1
    assert accelerator.lockings == [8 * sizes[0]] * any(locked)


def test_the_next_slot_is_locked_after_ten_times_as_long_as_the_last_took(worker, accelerator):
    accelerator.s_per_gb = 0.15
    batches = [worker.batch(number, MIB // 8) for number in range(3)]
    took = accelerator.seconds
    assert len(accelerator.lockings) == 1
    for passes, count in ((9.9 * took, 1), (0.2 * took, 2)):
        accelerator.seconds += passes
        batches.append(worker.batch(3, MIB // 8))
        assert len(accelerator.lockings) == count
    accelerator.s_per_gb, accelerator.seconds = 0.0, 1e9


def test_a_resting_worker_gives_no_locked_memory_back(worker):
    """The accelerator would go on reading the old pages."""
    worker.arena.rest(True)
    batch = worker.batch(7)
    offset = batch.data_ptr() - worker.arena._mapping.start
    del batch
    assert np.all(worker.arena._mapping.bytes[offset : offset + 8].view(np.int64) == 7)


# When they are unlocked


def test_a_forked_child_leaves_the_unlocking_to_its_parent(worker, accelerator):
    """Its end hangs nowhere, although a thread that it does not have may have been at work."""
    other = Worker(accelerator)
    kept = [worker.batch(1), other.batch(1)]
    other.close()
    held, done = threading.Event(), threading.Event()

    def hold():
        with page_locks.unlocker._lock:
            held.set()
            assert done.wait(LIMIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(LIMIT_S)
    if (child := os.fork()) == 0:
        signal.alarm(int(LIMIT_S))  # ends it if it hangs
        worker.close()
        page_locks.unlocker.end()
        os._exit(len(accelerator.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    done.set()
    holder.join()
    assert all(batch.eq(1).all() for batch in kept)


# Held slots


@pytest.mark.parametrize("uses", [1, 2], ids=["plain", "locked"])
def test_a_locked_slot_is_held_while_a_copy_is_pending_and_no_event_is_recorded_in_a_capture(
    worker, accelerator, monkeypatch, uses
):
    batch = worker.batch(1, uses=uses)
    address, copied = batch.data_ptr(), accelerator.copy(batch, DEVICE)
    assert worker.arena.leased_bytes >= batch.nbytes
    accelerator.captures = True
    del batch
    assert len(worker.give_back()) == (uses == 1)  # a source that is not locked has been read
    assert worker.arena.leased_bytes == 0  # it is not counted as the program's
    assert (worker.arena.leased() == frozenset()) is (uses == 1)
    if uses == 2:
        assert worker.batch(2).data_ptr() != address
        accelerator.advance()
        assert worker.give_back() == []
        accelerator.captures = False
        with monkeypatch.context() as failing:  # it ends no epoch, and loses no slot if it comes round
            failing.setattr(accelerator, "asks", lambda: torch.zeros(-1))  # a RuntimeError
            assert worker.give_back() == []
        assert len(worker.give_back()) == 2
    accelerator.advance()
    assert copied.eq(1).all()


STEPS = ["build", "take", "copy", "copy", "drop", "drop", "advance", "report"] * 8 + ["kill", "fork"]


def random_program(accelerator, seed):
    """Builds, gives, copies, keeps and drops batches, forks, kills workers, in any order; the numbers and copies."""
    chance, worker, built, kept, copies = random.Random(seed), Worker(accelerator), [], [], []
    for number in range(500):
        step = chance.choice(STEPS)
        if step == "build" and (place := worker.build(number, chance.choice([600, 5_000, 200_000]))) is not None:
            built.append((number, place))
        elif step == "take" and built:
            number, place = built.pop(0)
            kept.append((number, worker.deliver(place, chance.choice([1, 2]))))
        elif step == "copy" and kept:
            number, batch = chance.choice(kept)
            copies.append((number, accelerator.copy(batch, DEVICE)))
        elif step == "drop" and kept:
            kept.pop(chance.randrange(len(kept)))
        elif step == "advance":
            accelerator.advance(chance.randrange(4))
        elif step == "report":
            worker.give_back()
        elif step == "fork":  # the child may read the memory, which is not given back then
            if (child := os.fork()) == 0:
                os._exit(0)
            os.waitpid(child, 0)
        elif step == "kill":
            worker.close()
            worker, built = Worker(accelerator), []
        batch = None
        assert all(batch.eq(number).all() for number, batch in kept)
    kept.clear()
    worker.close()
    wait_for_unlocking()
    accelerator.advance(accelerator.queued)
    return copies


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_no_slot_is_written_to_while_a_copy_from_it_is_pending(accelerator, seed):
    copies = random_program(accelerator, seed)
    assert all(copied.eq(number).all() for number, copied in copies)
    assert len(copies) > 20


def test_memory_stays_in_bounds_when_the_program_is_far_ahead_of_the_accelerator(worker, accelerator):
    """A copy is done five batches later: so many slots are in use, and no more."""
    for number in range(100):
        accelerator.copy(worker.batch(number), DEVICE)
        accelerator.advance(number >= 5)
        worker.give_back()
    assert len(accelerator.registered) <= 8


def test_without_holding_slots_back_the_same_programs_tear_batches(monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(PageLocks, "is_locked", lambda *_: False)
    accelerator = SimulatedAccelerator()
    random_program(accelerator, 0)
    assert accelerator.torn
