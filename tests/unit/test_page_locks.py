"""Page-locked slots, with a simulated accelerator: no slot is written to while a copy from it is pending."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import simulated_device
from rayloader.gpu import page_locks
from rayloader.gpu.device import Marks, Throttle
from rayloader.gpu.page_locks import PageLocks
from rayloader.gpu.to_device import PinOrMove
from rayloader.transport import codec, lanes
from rayloader.transport.arena import PAGE, Arena, ArenaError, ArenaWriter, FreeSlots, rounded
from rayloader.transport.lanes import SMALL_BYTES, ArenaLane, Recycled, WorkerLane
from simulated_device import DEVICE, SimulatedAccelerator

LIMIT_S = 500.0
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _all_is_unlocked_and_unmapped():
    yield
    gc.collect()
    wait_for_unlocking()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in maps if "rayloader-arena" in line or "rayloader-copies" in line] == []


def wait_for_unlocking():
    for thread in threading.enumerate():
        if thread.name == "rayloader-unlock":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


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

    def deliver(self, place, uses=1):
        leases = {}
        view = self.arena.view(place, leases)
        for lease in [*leases.values()] * uses:
            lease.page_lock()
        return torch.frombuffer(view, dtype=torch.int64)

    def batch(self, number, items=4096):
        """Of a slot that is used for the second time, so that it is locked."""
        return self.deliver(self.build(number, items), uses=2)

    def give_back(self):
        """The program asks for a batch, and the worker is sent a task."""
        freed = self.arena.freed()
        PinOrMove(accelerator=self.accelerator).asks()
        freed += self.arena.freed()
        self.writer.lock(self.arena.locked())
        self.writer.free(freed)
        return freed

    def close(self):
        self.arena.close(give_back=True)
        self.arena = self.writer = None


@pytest.fixture
def accelerator():
    return SimulatedAccelerator()


@pytest.fixture
def worker(accelerator):
    worker = Worker(accelerator)
    yield worker
    worker.close()
    gc.collect()  # pytest keeps the test's own names until then
    accelerator.advance(accelerator.queued)
    wait_for_unlocking()
    assert (accelerator.torn, accelerator.violations, accelerator.registered) == ([], [], {})


# Places


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 2 * MIB), st.sampled_from(["take", "free", "lock and free"])), max_size=60))
def test_a_slot_is_a_locked_place_as_a_whole_or_touches_none(steps):
    free, taken, locked = FreeSlots(64 * MIB), [], set()
    for nbytes, step in steps:
        if step == "take":
            start, size = slot = free.take(nbytes)
            assert size >= nbytes
            assert slot in locked or all(start >= low + its or start + size <= low for low, its in locked)
            assert all(start >= low + its or start + size <= low for low, its in taken)
            taken.append(slot)
        elif taken:
            slot = taken.pop(nbytes % len(taken))
            if step == "lock and free":
                free.lock([slot[0]])
                locked.add(slot)
            free.put_back(*slot)


def test_locked_places_are_preferred_for_all_that_fills_half_of_them():
    free = FreeSlots(64 * MIB)
    locked, other = free.take(MIB), free.take(MIB)
    free.lock(locked[:1])
    free.put_back(*locked)
    free.put_back(*other)
    for nbytes in (MIB, MIB * 3 // 4, MIB // 2 + 1):
        assert free.take(nbytes) == locked
        free.put_back(*locked)
    assert free.take(MIB // 3) == (other[0], rounded(MIB // 3))  # cut from what is free
    assert free.take(MIB + 1) not in (locked, other)


def test_a_locked_place_is_never_given_back():
    free = FreeSlots(64 * MIB)
    locked, other = free.take(4 * MIB), free.take(4 * MIB)
    free.lock(locked[:1])
    free.put_back(*locked)
    free.put_back(*other)
    assert free.join() == [(other[0], 64 * MIB)]


# Locks


def test_a_slot_is_locked_when_it_is_used_for_the_second_time(worker, accelerator):
    worker.deliver(worker.build(0))
    assert accelerator.registered == {}
    assert len(worker.give_back()) == 1
    batch = worker.deliver(worker.build(1))
    assert list(accelerator.registered.values()) == [batch.nbytes]
    assert accelerator.is_locked(batch.data_ptr(), batch.nbytes)
    assert [(locking.nbytes, locking.new_pages) for locking in accelerator.lockings] == [(batch.nbytes, 0)]


def test_a_place_whose_slots_get_another_size_counts_as_unused(worker, accelerator):
    for items in (4096, 5000, 4096):
        worker.deliver(worker.build(0, items))
        worker.give_back()
    assert accelerator.registered == {}


def test_a_slot_that_is_too_large_is_never_locked(worker, accelerator, monkeypatch):
    monkeypatch.setattr(page_locks, "MOST_BYTES", MIB)
    batches = [worker.batch(0, MIB // 8), worker.batch(1, MIB // 8 + 1)]
    assert [accelerator.is_locked(batch.data_ptr(), batch.nbytes) for batch in batches] == [True, False]


def test_the_next_slot_is_locked_after_ten_times_as_long_as_the_last_took(accelerator):
    accelerator.takes_time = True
    worker = Worker(accelerator, 512 * MIB)
    batches = []
    for number in range(8):
        batches.append(worker.batch(number, MIB))
        accelerator.train(0.0005)
    took = 8 * MIB * simulated_device.OLD_S / 1e9
    assert [round(locking.ended - locking.began, 9) for locking in accelerator.lockings] == [round(took, 9)]
    accelerator.train(10 * took)
    batches.append(worker.batch(8, MIB))
    assert len(accelerator.lockings) == 2
    accelerator.assert_locked_at_leisure()
    del batches
    accelerator.takes_time = False
    worker.close()


def test_only_one_thread_locks_at_a_time():
    throttle, works, done, results = Throttle(), threading.Event(), threading.Event(), []

    def work():
        works.set()
        assert done.wait(LIMIT_S)

    first = threading.Thread(target=lambda: results.append(throttle.turn(work)))
    first.start()
    assert works.wait(LIMIT_S)
    assert not throttle.turn(lambda: results.append("both"))
    done.set()
    first.join()
    assert results == [True]


def test_a_thread_that_waited_for_another_waits_for_its_pause_too():
    now = [0.0]
    throttle = Throttle(lambda: now[0])

    def patience(seconds):
        waited.append(seconds)
        now[0] += seconds
        return False

    waited, works, acquired, done = [], threading.Event(), threading.Event(), threading.Event()

    class Turn:
        """The throttle's lock, which tells when the second thread is about to wait for the first."""

        def __init__(self, lock):
            self.release, self._acquire = lock.release, lock.acquire

        def acquire(self, blocking):
            if blocking and works.is_set():
                acquired.set()
            return self._acquire(blocking)

    def work():
        works.set()
        assert done.wait(LIMIT_S)
        now[0] += 2.0

    throttle._turn = Turn(throttle._turn)
    first = threading.Thread(target=lambda: throttle.turn(work))
    first.start()
    assert works.wait(LIMIT_S)
    second = threading.Thread(target=lambda: throttle.turn(lambda: waited.append("works"), patience))
    second.start()
    assert acquired.wait(LIMIT_S)
    done.set()
    first.join()
    second.join()
    assert waited == [20.0, "works"]


class Interrupted(BaseException):
    pass


def interrupt_at(number):
    """Raises at the `number`-th call of a function, or return from one of C's, in the arena's module or in ours."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        if event not in ("call", "c_return") or Path(frame.f_code.co_filename).parent.name not in ("transport", "gpu"):
            return
        count += 1
        if count == number:
            sys.setprofile(None)
            raise Interrupted

    sys.setprofile(profile)


@pytest.mark.parametrize("uses", [1, 2], ids=["plain", "locked"])
def test_no_interrupt_while_slots_are_freed_loses_one(accelerator, uses):
    """At whatever point it comes: after `abandon` the worker has the slot again, and after its end all is unlocked."""
    number, was_interrupted = 0, True
    while was_interrupted:
        number += 1
        worker = Worker(accelerator, MIB)
        place = worker.build(1)
        worker.deliver(place, uses)
        try:
            interrupt_at(number)
            for _ in range(3):
                worker.arena.freed()
                accelerator.asks()
            was_interrupted = False
        except Interrupted:
            pass
        finally:
            sys.setprofile(None)
        for _ in range(3):
            worker.give_back()
        worker.writer.lock(worker.arena.locked(all_slots=True))
        worker.writer.abandon(worker.arena.leased())
        worker.writer.begin()
        assert worker.writer.reserve(4096 * 8)[0][1:] == place[0][1:], number
        worker.close()
        wait_for_unlocking()
        assert accelerator.registered == {}, number
    assert number > 10


def test_after_an_interrupt_the_worker_learns_of_all_that_is_locked(accelerator):
    """The news of a message that was never sent."""
    lane, worker = ArenaLane(), WorkerLane()
    lane.accelerator = accelerator
    lent, news = lane.lend()
    writer = worker.open(news)
    writer.begin()
    place = writer.seal(writer.put(codec.encode(torch.full((4096,), 1)).buffers[0]))
    lent.arena.view(place, lent.leases)
    for _ in range(2):
        lent.leases[place[0][0]].page_lock()
    del lent
    lane.lend(worker.address)
    accelerator.asks()
    lane.lend(worker.address)  # lost, with the ticket of the slot
    lane.abandon()
    writer = worker.open(lane.lend(worker.address)[1])
    writer.begin()
    assert writer.reserve(4096 * 8)[0][1:] == place[0][1:]
    assert writer.reserve(20 * MIB)[0][1] >= place[0][1] + place[0][2]
    lane.close()


def test_all_is_unlocked_when_the_worker_has_ended_and_its_batches_have(accelerator):
    worker = Worker(accelerator)
    kept, other = worker.batch(1), worker.batch(2, items=MIB)
    del other
    worker.close()
    while len(accelerator.registered) > 1:  # the slot without a batch
        page_locks.unlocker.ring()
    assert accelerator.is_locked(kept.data_ptr(), kept.nbytes)
    assert kept.eq(1).all()
    del kept
    wait_for_unlocking()
    assert accelerator.registered == {}


def test_memory_that_a_forked_child_may_read_is_unlocked_after_the_copies_from_it(accelerator):
    worker = Worker(accelerator)
    batch = worker.batch(1)
    copied = accelerator.copy(batch, DEVICE)
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    del batch
    worker.close()
    wait_for_unlocking()
    assert (accelerator.done, accelerator.violations, accelerator.registered) == (1, [], {})
    assert copied.eq(1).all()


def test_memory_that_cannot_be_unlocked_stays_mapped_and_the_rest_goes_on(accelerator, monkeypatch, caplog):
    workers = [Worker(accelerator), Worker(accelerator)]
    starts = [worker.arena._mapping.start for worker in workers]  # of their first slots
    unregister, tried = accelerator.unregister, threading.Semaphore(0)

    def fail(address):
        if address == starts[0]:
            tried.release()
            raise ValueError("not now")
        unregister(address)

    monkeypatch.setattr(accelerator, "unregister", fail)
    for number, worker in enumerate(workers):
        worker.batch(number)
        worker.close()
    while len(accelerator.registered) > 1:
        page_locks.unlocker.ring()
    page_locks.unlocker.ring()
    assert all(tried.acquire(timeout=LIMIT_S) for _ in range(2))
    del workers, worker
    assert list(accelerator.registered) == starts[:1]
    assert f"{starts[0]:x}-" in Path("/proc/self/maps").read_text()
    (record,) = caplog.records
    assert "cannot be unlocked now (ValueError('not now'))" in record.message
    monkeypatch.setattr(accelerator, "unregister", unregister)
    page_locks.unlocker.ring()
    wait_for_unlocking()
    assert accelerator.registered == {}


def test_a_result_that_is_received_after_the_end_of_its_worker_keeps_nothing_locked(accelerator):
    worker = Worker(accelerator)
    kept, late, arena = worker.batch(1), worker.build(2), worker.arena
    worker.close()
    with pytest.raises(ArenaError, match="was shut down"):
        arena.view(late, {})
    del kept
    wait_for_unlocking()
    assert accelerator.registered == {}


def test_a_finalizer_may_close_an_arena_while_another_is_being_retired(accelerator, monkeypatch):
    first, cycle = Worker(accelerator), [Worker(accelerator)]
    first.batch(1)
    cycle[0].batch(2)
    cycle.append(cycle)
    del cycle

    class Arriving(list):
        """The collector may run at any allocation."""

        def append(self, arena):
            gc.collect()
            super().append(arena)

    monkeypatch.setattr(page_locks.unlocker, "_retired", Arriving())
    first.close()
    wait_for_unlocking()
    assert accelerator.registered == {}


def test_memory_goes_back_to_the_system_when_it_is_unlocked(accelerator):
    worker = Worker(accelerator)
    file = os.dup(worker.arena._file.fd)
    try:
        batch = worker.batch(1)
        assert os.fstat(file).st_blocks * 512 >= batch.nbytes
        worker.close()
        del batch
        wait_for_unlocking()
        assert os.fstat(file).st_blocks * 512 <= PAGE
    finally:
        os.close(file)


def test_memory_of_batches_that_end_after_all_is_unlocked_goes_back_too(accelerator):
    worker = Worker(accelerator)
    file = os.dup(worker.arena._file.fd)
    try:
        worker.batch(0)
        kept = [worker.deliver(worker.build(number, MIB // 8)) for number in (1, 2, 3)]  # in slots that are not locked
        worker.close()
        wait_for_unlocking()
        assert accelerator.registered == {}
        del kept[1:]
        assert os.fstat(file).st_blocks * 512 <= MIB + PAGE
        assert kept[0].eq(1).all()
    finally:
        os.close(file)


def test_a_batch_that_ends_with_the_interpreter_ends_without_a_word():
    program = (
        "from test_page_locks import *\n"
        "worker = Worker(SimulatedAccelerator())\n"
        "kept = [worker.batch(1)]\n"
        "worker.close()\n"
    )
    folders = os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parents[1], *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": folders},
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    assert done.stderr == b""


def test_no_memory_of_a_locked_arena_goes_back_while_its_worker_lives(worker):
    """The accelerator would go on reading the old pages."""
    worker.arena.rest(True)
    batch = worker.batch(7)
    start = worker.arena._mapping.start
    offset = batch.data_ptr() - start
    del batch
    assert np.all(worker.arena._mapping.bytes[offset : offset + 8].view(np.int64) == 7)
    worker.arena.rest(False)


def test_what_cannot_be_locked_is_not_and_a_warning_says_so_once(caplog):
    accelerator = SimulatedAccelerator(refuses="out of memory")
    worker = Worker(accelerator)
    batches = [worker.batch(number, items) for number, items in enumerate((100, MIB, 100))]
    assert [int(batch[0]) for batch in batches] == [0, 1, 2]
    (record,) = caplog.records
    assert "(out of memory)" in record.message
    assert "ulimit -l" in record.message
    del batches
    assert len(worker.give_back()) == 3  # and nothing is held
    worker.close()
    assert not accelerator.can_register


def test_the_collector_may_finalize_an_arena_while_its_slot_is_being_locked(accelerator, monkeypatch):
    workers = [Worker(accelerator)]
    register = accelerator.register

    def collected(address, nbytes):
        workers.pop().close()
        register(address, nbytes)

    monkeypatch.setattr(accelerator, "register", collected)
    batch = workers[0].batch(1)
    assert accelerator.is_locked(batch.data_ptr(), batch.nbytes)
    del batch
    wait_for_unlocking()
    assert accelerator.registered == {}


def test_in_a_forked_child_the_end_of_an_arena_touches_nothing_of_the_parents(worker, accelerator):
    batch = worker.batch(3)
    child = os.fork()
    if child == 0:
        worker.close()
        os._exit(len(accelerator.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert batch.eq(3).all()


def test_a_forked_child_leaves_the_unlocking_to_its_parent(accelerator):
    """Its end hangs nowhere, although a thread that it does not have may have been at work."""
    worker = Worker(accelerator)
    kept = worker.batch(1)
    worker.close()
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
        page_locks.unlocker.end()
        os._exit(len(accelerator.registered))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    done.set()
    holder.join()
    assert kept.eq(1).all()
    del kept
    wait_for_unlocking()


# Held slots


def test_a_slot_is_held_while_a_copy_from_it_is_pending(worker, accelerator):
    batch = worker.batch(1)
    copied = accelerator.copy(batch, DEVICE)
    address = batch.data_ptr()
    del batch
    assert worker.give_back() == []
    assert worker.batch(2).data_ptr() != address
    accelerator.advance()
    assert worker.give_back() != []
    assert copied.eq(1).all()


def test_no_event_of_all_streams_is_recorded_while_a_graph_is_captured(worker, accelerator):
    batch = worker.batch(1)
    accelerator.copy(batch, DEVICE)
    accelerator.captures = True
    del batch
    assert worker.give_back() == []
    accelerator.advance()
    assert worker.give_back() == []
    accelerator.captures = False
    assert len(worker.give_back()) == 1


def test_events_that_are_made_while_others_are_recorded_wait_for_the_next_record():
    made = []

    class Happened:
        def query(self):
            return True

    def record():
        made.append(marks.event())
        return Happened()

    marks = Marks(record)
    made.append(marks.event())
    marks.record()
    assert [event.query() for event in made] == [True, False]
    marks.record()
    assert [event.query() for event in made] == [True, True, False]


def test_held_slots_are_not_counted_as_the_programs(worker, accelerator):
    batch = worker.batch(1)
    assert worker.arena.leased_bytes >= batch.nbytes
    accelerator.copy(batch, DEVICE)
    del batch
    worker.give_back()
    assert worker.arena.leased_bytes == 0
    assert worker.arena.leased() != frozenset()
    accelerator.advance()


def test_copies_from_memory_that_is_not_locked_hold_nothing():
    accelerator = SimulatedAccelerator()
    worker = Worker(accelerator)
    leases = {}
    batch = torch.frombuffer(worker.arena.view(worker.build(1), leases), dtype=torch.int64)
    copied = accelerator.copy(batch, DEVICE)
    del batch, leases
    assert len(worker.give_back()) == 1
    accelerator.advance()
    assert copied.eq(1).all()
    worker.close()


def test_a_failing_accelerator_ends_no_epoch_and_loses_no_slot_if_it_comes_round(worker, accelerator, monkeypatch):
    batch = worker.batch(1)

    def fail():
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as failing:
        failing.setattr(accelerator, "asks", fail)
        del batch
        assert worker.give_back() == []
        assert worker.arena.leased_bytes == 0
        other = worker.batch(2)
        assert other.eq(2).all()
    del other
    assert len(worker.give_back()) == 2


class Program:
    """A random program: batches are built, given, copied, kept and dropped, and workers killed, in any order."""

    def __init__(self, accelerator, chance, most=64 * MIB):
        self.accelerator, self.chance, self.most = accelerator, chance, most
        self.worker = Worker(accelerator)
        self.built, self.kept, self.copies = [], [], []
        self.number = 0
        self.most_touched = 0

    def build(self):
        self.number += 1
        place = self.worker.build(self.number, self.chance.choice([600, 5_000, 200_000]))
        if place is not None:
            self.built.append((self.number, place))

    def take(self):
        if self.built:
            number, place = self.built.pop(0)
            self.kept.append((number, self.worker.deliver(place, self.chance.choice([1, 2]))))

    def copy(self):
        if self.kept:
            number, batch = self.chance.choice(self.kept)
            self.copies.append((number, self.accelerator.copy(batch, DEVICE)))

    def drop(self):
        if self.kept:
            self.kept.pop(self.chance.randrange(len(self.kept)))

    def advance(self):
        self.accelerator.advance(self.chance.randrange(4))

    def report(self):
        self.worker.give_back()

    def kill(self):
        if self.chance.random() < 0.2:
            self.worker.close()
            self.worker, self.built = Worker(self.accelerator), []

    def run(self, steps):
        actions = [self.build, self.take, self.copy, self.copy, self.drop, self.drop, self.advance, self.report]
        for _ in range(steps):
            self.chance.choice([*actions, *actions, self.kill])()
            assert all(batch.eq(number).all() for number, batch in self.kept)
        self.end()
        return self

    def end(self):
        self.kept.clear()
        self.worker.close()
        wait_for_unlocking()
        self.accelerator.advance(self.accelerator.queued)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
def test_no_slot_is_written_to_while_a_copy_from_it_is_pending(seed):
    accelerator = SimulatedAccelerator()
    program = Program(accelerator, random.Random(seed)).run(400)
    assert (accelerator.torn, accelerator.violations, accelerator.registered) == ([], [], {})
    assert all(copied.eq(number).all() for number, copied in program.copies)
    assert len(program.copies) > 20


def test_without_holding_slots_back_the_same_programs_tear_batches(monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(PageLocks, "is_locked", lambda *_: False)
    accelerator = SimulatedAccelerator()
    Program(accelerator, random.Random(0)).run(400)
    assert accelerator.torn


def test_memory_stays_in_bounds_when_the_program_is_far_ahead_of_the_accelerator(worker, accelerator):
    """A copy is done five batches later: so many slots are in use, and no more."""
    addresses = set()
    for number in range(100):
        batch = worker.batch(number)
        addresses.add(batch.data_ptr())
        accelerator.copy(batch, DEVICE)
        del batch
        if number >= 5:
            accelerator.advance()
        worker.give_back()
    accelerator.advance(5)
    assert len(addresses) <= 8
    assert accelerator.most_registered == len(addresses) * 4096 * 8


# Lanes


def test_loaders_that_pin_and_others_use_the_same_arena(accelerator):
    lane, worker = ArenaLane(), WorkerLane()
    _, plain = lane.lend()
    before = worker.open(plain)
    lane.accelerator = accelerator
    _, room = lane.lend(plain[0])
    assert room[0] is None
    assert worker.open(room) is before
    lane.close()


def test_an_arena_that_forks_have_spoiled_is_unlocked_while_its_worker_lives(accelerator, monkeypatch):
    monkeypatch.setattr(lanes, "SPOILED_BYTES", 0)
    lane, worker = ArenaLane(), WorkerLane()
    lane.accelerator = accelerator
    for number in range(4):
        lent, room = lane.lend()
        writer = worker.open(room)
        writer.begin()
        place = writer.seal(writer.put(codec.encode(torch.full((4096,), number)).buffers[0]))
        batch = torch.frombuffer(lent.arena.view(place, lent.leases), dtype=torch.int64)
        for _ in range(2):
            lent.leases[place[0][0]].page_lock()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        del lent, batch
        while len(accelerator.registered) > 1:
            page_locks.unlocker.ring()
    lane.close()
    wait_for_unlocking()
    assert accelerator.registered == {}


def test_a_lane_of_an_accelerator_that_has_refused_locks_nothing(accelerator):
    accelerator.can_register = False
    lane = ArenaLane()
    lane.accelerator = accelerator
    lent, _ = lane.lend()
    assert lent.arena._mapping.locks is None
    lane.close()


def test_recycled_memory_is_locked_and_held_like_a_workers(accelerator):
    recycled = Recycled(accelerator)
    content = np.arange(SMALL_BYTES, dtype=np.int64)
    addresses = set()
    for _ in range(4):
        copy = recycled.copy(memoryview(content).cast("B"))
        for _ in range(2):
            copy.obj.base.page_lock()
        tensor = torch.frombuffer(copy, dtype=torch.int64)
        copied = accelerator.copy(tensor, DEVICE)
        addresses.add(tensor.data_ptr())
        del copy, tensor
    assert len(addresses) == 4
    accelerator.asks()
    accelerator.advance(4)
    assert copied.eq(torch.from_numpy(content)).all()
    assert recycled.room(content.nbytes).obj.base.slot[1] + recycled._lane._arena._mapping.start in addresses
    recycled.close()
