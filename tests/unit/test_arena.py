"""The arena: memory of one process filled by another, and used again only when nobody can look at it any more."""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import gc
import itertools
import mmap
import os
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import programs
from handlers import interrupted
from rayloader.transport import arena as module
from rayloader.transport import codec
from rayloader.transport.arena import PACKED_ALIGN, PAGE, Arena, ArenaError, ArenaWriter, FreeSlots, rounded
from rayloader.transport.memory_file import MemoryFile

HANG_LIMIT_S = 500.0
ROOM = 24 * PAGE
NUMBERS = torch.arange(512)  # a page


def left():
    """What of an arena this process has mapped, or has open."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rayloader-arena" in line]
    for fd in os.listdir("/proc/self/fd"):
        name = f"/proc/self/fd/{fd}"
        if os.path.lexists(name) and "rayloader-arena" in os.readlink(name):  # the listing's own is closed by now
            found.append(name)
    return found


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    if left():
        gc.collect()
    assert left() == []


# ---- any order of what driver, worker and their users do


class Cycle:
    def __init__(self, held):
        self.held, self.me = held, self

    def __array__(self, dtype=None, copy=None):
        return self.held


FORMS = [
    lambda view: view,
    lambda view: torch.frombuffer(view, dtype=torch.uint8).view(1, -1),
    lambda view: torch.frombuffer(view, dtype=torch.uint8).numpy()[:],
    lambda view: np.frombuffer(view, np.uint8)[None],
    lambda view: Cycle(np.frombuffer(view, np.uint8)),
]


KINDS = ["plain", "stacked", "stacked", "again", "small", "fork"]


def different(number, nbytes):
    """Bytes that are nowhere zero, and others for each number."""
    return bytearray((np.arange(number, number + nbytes) % 251 + 1).astype(np.uint8))


@dataclasses.dataclass(eq=False)
class Place:
    """A slot that is not free, as the model has it.

    Attributes:
        content: its first bytes; of several small buffers, which lie side by side, nothing.
        memory: what user code in the worker keeps of it.
        state: where it is, from "building" to "told"; or "parked", while it was not sent.
        forks: how many there had been when it was leased.
        seen: whether a child of the worker may see it.
        open: whether a later child may, because user code may have it.
        ticket: once it is known.
    """

    start: int
    size: int
    content: bytearray
    memory: memoryview | None = None
    state: str = "building"
    forks: int = -1
    seen: bool = False
    open: bool = False
    ticket: int = 0


@dataclasses.dataclass(eq=False)
class Held:
    """What the driver's user has of a slot, and which of its bytes that is."""

    place: Place
    extent: slice
    object: Any


class Program:
    """Both sides of an arena, and a model that knows what each slot must hold.

    Args:
        seed: of the steps, which come in any order; after each one all that is known is compared, in the file too.
    """

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.arena = Arena(ROOM)
        self.writer = ArenaWriter(self.arena.address)
        self.base = self.writer._mapping.start
        self.file = mmap.mmap(self.arena.address.fd, ROOM)  # as a forked child has it
        self.array = np.frombuffer(self.file, np.uint8)
        self.places: list[Place] = []
        self.messages: list[list[Any]] = []  # not received yet
        self.leases: dict[int, Any] = {}  # of the last message
        self.held: list[Held] = []
        self.passed: list[int] = []  # tickets of which the worker was told
        self.number = self.taken = self.forks = 0
        self.resting = self.gone = False

    def run(self, steps):
        often = [self.build, self.build, self.receive, self.receive, self.user_of_the_worker, self.tell]
        often += [self.user_of_the_driver] * 4
        seldom = [self.abandon, self.fork, self.rest, self.collect, self.close]
        for _ in range(steps):
            self.chance.choice(often if self.chance.random() < 0.85 else seldom)()
            self.check()
        self.end()

    def seldom(self):
        return self.chance.random() < 0.1

    # the worker

    def gap(self, nbytes):
        """Whether a slot for so many bytes fits anywhere."""
        ends = sorted([(0, 0), (ROOM, ROOM), *((place.start, place.start + place.size) for place in self.places)])
        return any(after[0] - before[1] >= rounded(nbytes) for before, after in itertools.pairwise(ends))

    def look_again(self):
        self.places = [p for p in self.places if p.state != "parked" or p.memory is not None or p.seen]

    def took(self, start, nbytes, content, **known):
        """The worker has taken a slot there; None if it found no room. It does only if there is none."""
        if not self.gap(nbytes):
            self.look_again()
        assert (start is not None) is self.gap(nbytes)
        assert self.writer.full is (start is None)
        self.writer.full = False
        if start is None:
            return None
        size = rounded(nbytes)
        assert start % PAGE == 0
        assert 0 <= start <= ROOM - size
        assert all(start + size <= p.start or p.start + p.size <= start for p in self.places)
        self.places.append(place := Place(start, size, content, **known))
        self.taken += 1
        if self.taken % module.COLD_AFTER == 0:
            self.look_again()
            self.check_cold()
        return place

    def check_cold(self):
        """All memory that is free was given back."""
        free = np.ones(ROOM, bool)
        for place in self.places:
            free[place.start : place.start + place.size] = False
        assert not self.array[free].any()

    def new(self, nbytes):
        self.number += 7
        return different(self.number, nbytes)

    def begin(self):
        self.writer.begin()
        for place in self.places:
            if place.state == "building":
                place.state = "parked" if place.memory is not None or place.seen else "dropped"
        self.places = [place for place in self.places if place.state != "dropped"]

    def build(self):
        """A batch is built, and sent if building it does not fail; of stacked fields user code may keep some."""
        if self.gone:
            return
        fails = self.seldom()
        self.begin()
        put, message = [], []
        for _ in range(self.chance.randrange(1, 4)):
            kind, nbytes = self.chance.choice(KINDS), int(1.05 ** self.chance.randrange(215))
            nbytes = PAGE * self.chance.randrange(1, 10) if self.seldom() else nbytes
            if kind == "fork":
                if self.seldom():
                    self.fork()
            elif kind == "stacked":
                self.stack(nbytes, self.chance.random() < 0.2, None if fails else put)
            elif kind == "small":
                contents = [self.new(size) for size in (nbytes // 9, 0, nbytes // 99)]
                slot = self.writer.pack(list(map(memoryview, contents)))
                place = self.took(
                    slot and slot[1], sum(-(-len(c) // PACKED_ALIGN) for c in contents) * PACKED_ALIGN, b""
                )
                if place is not None:
                    place.state, place.ticket = "sent", slot[0]
                    message.append((place, slot, contents))
            else:
                kept = [place for place in self.places if place.state == "parked" and place.memory is not None]
                content = kept[0].content.copy() if kept and kind == "again" else self.new(nbytes)
                where = self.writer.put(kept[0].memory if kept and kind == "again" else memoryview(content))
                place = self.took(where and where[0][1], len(content), content, state="sent")
                if place is not None:
                    put.append((place, where))
        for place, where in put:
            self.seal(place, where, message)
        if not fails:
            self.messages.append(message)
        # Otherwise slots that were filled are lost until `abandon`, as with any message that never comes.

    def stack(self, nbytes, keeps, put):
        """Stacks a field in a slot, and puts it and a part of it in, unless `put` is None: then what follows fails."""
        memory, content = self.writer.allocate(nbytes), self.new(nbytes)
        array = None if memory is None else np.frombuffer(memory, np.uint8)
        start = None if array is None else array.__array_interface__["data"][0] - self.base
        place = self.took(start, nbytes, content, open=True)
        if place is None:
            return
        array[:] = content
        for offset in () if put is None else (0, nbytes // 3):
            where = self.writer.put(memoryview(array)[offset:])
            assert where[0][1:] == (start, place.size), "it was copied"
            assert where[1:] == (offset, nbytes - offset)
            put.append((place, where))
            place.state = "sent"
        if keeps:
            place.memory = memory

    def seal(self, place, where, message):
        sealed = self.writer.seal(where)
        extent = slice(where[1], where[1] + where[2])
        content = place.content[extent]
        if place.memory is None:
            assert sealed == where
            place.ticket = where[0][0]
            place.open &= place.seen
        else:  # user code could write to it
            place.state = "parked" if place.state == "parked" else "building"
            start = None if isinstance(sealed, bytearray) else sealed[0][1]
            if (place := self.took(start, len(content), content, state="sent")) is None:
                assert sealed == content
                return
            place.ticket, extent = sealed[0][0], slice(0, len(content))
        message.append((place, sealed, extent))

    def user_of_the_worker(self):
        """Writes to what it has kept, or drops it."""
        kept = [place for place in self.places if place.memory is not None]
        if kept:
            place = self.chance.choice(kept)
            place.content[:] = self.new(len(place.content))
            place.memory[:] = place.content
            if self.chance.random() < 0.5:
                place.memory = None

    # the driver

    def receive(self):
        """A message is taken in, perhaps twice, as after an interrupt, and perhaps while another thread forks."""
        if not self.messages:
            return
        form, forks = self.chance.choice(FORMS), self.seldom() and self.seldom()
        self.leases, leases = {}, {}
        self.end_leases()
        message = self.messages.pop(0)
        if forks:
            self.begin_fork()
        if self.seldom():
            self.take_in(message, leases, FORMS[0])
        held = self.take_in(message, leases, form)
        if forks:
            module._after_fork()
        self.leases = leases
        for place, _, _ in message:
            if place.state == "sent" and not self.gone:
                place.state, place.forks = "leased", -1 if forks else self.forks
        self.held += [one for one in held if isinstance(one.object, Cycle) or not self.seldom()]
        self.end_leases()

    def take_in(self, message, leases, form):
        found = []
        for place, where, what in message:
            packed = isinstance(what, list)
            if self.gone:
                with pytest.raises(ArenaError, match="the worker of this batch was shut down"):
                    self.arena.unpack(where, [1], {}) if packed else self.arena.view(where, leases)
            elif packed:
                assert self.arena.unpack(where, list(map(len, what)), leases) == what
                place.state = "dead"
            else:
                found.append(Held(place, what, form(self.arena.view(where, leases))))
        return found

    def end_leases(self):
        """Notes which slots nobody has any more, and what of them is never to be used again."""
        for place in self.places:
            has_users = place.ticket in self.leases or any(one.place is place for one in self.held)
            if place.state == "leased" and not has_users:
                place.state = "dead" if place.forks == self.forks else "spoiled"
                if place.state == "dead" and (self.resting or self.gone):
                    place.content[:] = bytes(len(place.content))

    def user_of_the_driver(self):
        """Writes to what it holds, or drops it; a cycle ends later."""
        if not self.held:
            return
        one = self.chance.choice(self.held)
        if self.seldom():
            one.place.content[one.extent] = self.new(len(one.place.content[one.extent]))
            array = one.object.numpy() if isinstance(one.object, torch.Tensor) else np.asarray(one.object)
            array.ravel()[:] = one.place.content[one.extent]
        elif not isinstance(one.object, Cycle):
            self.held.remove(one)
        del one
        self.end_leases()

    def collect(self):
        before, self.held = self.held, [one for one in self.held if not isinstance(one.object, Cycle)]
        if len(self.held) < len(before):
            del before
            gc.collect()
        self.end_leases()

    def tell(self, arrives=None):
        """The worker is told what is free, of old slots too, in a message that may be lost."""
        arrives = not self.seldom() if arrives is None else arrives
        self.leases = {}
        self.end_leases()
        freed = self.arena.freed()
        assert sorted(freed) == sorted(place.ticket for place in self.places if place.state == "dead")
        assert self.arena.freed() == []
        assert self.arena.spoiled == sum(place.size for place in self.places if place.state == "spoiled")
        for place in self.places:
            if place.state == "dead":
                place.state = "told"
        if arrives:
            self.passed += freed
            self.writer.free(self.passed)
            self.free([place for place in self.places if place.ticket in freed])

    def free(self, places):
        for place in places:
            place.state = "lost"
        self.places = [place for place in self.places if place.state != "lost" or place.seen]

    def abandon(self):
        """Nothing that was sent so far will be received."""
        self.tell(True)
        self.messages.clear()
        self.writer.abandon(self.arena.leased())
        self.free([place for place in self.places if place.state in ("sent", "told")])

    def fork(self):
        """What is leased, and what user code of a worker may have, a child may read for ever."""
        self.begin_fork()
        module._after_fork()

    def begin_fork(self):
        module._before_fork()
        self.forks += 1
        for place in self.places:
            place.seen |= place.open

    def rest(self):
        self.resting = not self.resting
        self.arena.rest(self.resting)

    def close(self):
        """The worker has ended, or the arena is only closed: then it is used as before."""
        ended = self.chance.random() < 0.3
        first = self.arena._file is not None
        self.arena.close(give_back=ended)
        with pytest.raises(ArenaError):
            ArenaWriter(self.arena.address)
        if not (ended and first):
            return
        self.gone = True
        for place in self.places:
            place.memory = None
            if place.state == "dead":
                place.state = "told"
        self.places = [place for place in self.places if place.state in ("leased", "spoiled")]
        self.check_cold()

    # what always holds

    def check(self):
        for place in self.places:
            assert self.file[place.start : place.start + len(place.content)] == place.content
        for one in self.held:
            assert np.asarray(one.object).tobytes() == one.place.content[one.extent]
        leased, spoiled = (sum(p.size for p in self.places if p.state == state) for state in ("leased", "spoiled"))
        assert leased <= self.arena.leased_bytes <= leased + spoiled

    def end(self):
        """Everything is dropped: all room comes back, and nothing is left."""
        self.collect()
        self.held.clear()
        for place in self.places:
            place.memory = None
        self.abandon()
        self.begin()
        self.look_again()
        assert not [place for place in self.places if not place.seen and place.state != "spoiled"]
        assert self.gone or (self.writer.allocate(ROOM) is None) is bool(self.places)
        del self.arena, self.writer, self.array
        self.file.close()


@pytest.fixture
def _cycles_end_when_told():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_cycles_end_when_told")
@pytest.mark.parametrize("cold_after", [1, 5, 1024])
def test_memory_is_used_again_only_when_nobody_can_look_at_it_whatever_the_order(cold_after, monkeypatch):
    monkeypatch.setattr(module, "COLD_AFTER", cold_after)
    for seed in range(80):
        Program(seed).run(100)
        assert left() == [], seed


# ---- what counts as looking at it


class Pair:
    """Both sides of an arena, in one process."""

    def __init__(self, pages=1):
        self.arena = Arena(pages * PAGE)
        self.writer = ArenaWriter(self.arena.address)

    def put(self, content=NUMBERS):
        self.writer.begin()
        return self.writer.seal(self.writer.put(codec.encode(content).buffers[0]))

    def lend(self, content=NUMBERS):
        """A batch as the driver gets it."""
        return codec.decode(codec.encode(content).skeleton, [self.arena.view(self.put(content), {})])

    def has_room(self):
        """Whether the next batch has, when the worker has been told what is free."""
        self.writer.free(self.arena.freed())
        self.writer.begin()
        return self.writer.allocate(self.arena.address.nbytes) is not None


class Interface:
    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


TENSORS = {
    "strided": lambda t: t.view(2, 256).t()[3:],
    "other dtype": lambda t: t.view(torch.uint8),
    "detached": lambda t: t.detach().data,
    "alias by set_": lambda t: torch.empty(0, dtype=torch.int64).set_(t),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "storage": lambda t: t.untyped_storage()[8:16],
    "numpy and back": lambda t: torch.from_numpy(t.numpy()[3:].reshape(-1, 1)),
    "memoryview": lambda t: memoryview(t.numpy()),
    "dlpack": lambda t: np.from_dlpack(torch.from_dlpack(t)),
    "saved for backward": lambda t: torch.ones(512, requires_grad=True) * t,
    "reference cycle": Cycle,
    "out-of-band pickle": lambda t: pickle.PickleBuffer(t.numpy()),
    "decoded again": lambda t: codec.decode((e := codec.encode(t)).skeleton, e.buffers),
    "share_memory_": lambda t: t.share_memory_(),
    "a view of what was shared": lambda t: (t.numpy(), t.share_memory_())[0],
}
ARRAYS = {
    "subclass": lambda a: np.asarray(a.view(np.recarray)[1:]),
    "ndarray over it": lambda a: np.ndarray(3, np.int64, a),
    "interface": lambda a: np.asarray(Interface(a)),
    "strided": lambda a: np.lib.stride_tricks.as_strided(np.broadcast_to(a, (2, 512)), (2,), (8,)),
    "flat iterator": lambda a: a.flat,
}


@pytest.mark.parametrize(
    ("numbers", "keep"),
    [
        *(pytest.param(NUMBERS, keep, id=name) for name, keep in TENSORS.items()),
        *(pytest.param(NUMBERS.numpy(), keep, id=f"array: {name}") for name, keep in ARRAYS.items()),
    ],
)
def test_a_slot_comes_back_only_when_the_last_view_has_died(numbers, keep):
    pair = Pair()
    kept = keep(pair.lend(numbers))
    assert not pair.has_room()
    cycle = isinstance(kept, Cycle)
    del kept
    if cycle:
        assert not pair.has_room()
        gc.collect()
    assert pair.has_room()


def test_many_threads_drop_views_while_batches_are_made():
    pair, handed, done = Pair(64), [], threading.Event()

    def drop():
        while not done.is_set() or handed:
            try:
                tensor, number = handed.pop()
            except IndexError:
                continue
            assert (tensor == number).all()

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1000):
        pair.writer.begin()
        place = pair.writer.put(memoryview(bytes([number % 251]) * (1 + number * 7919 % (5 * PAGE))))
        if place is not None:
            handed.append((torch.frombuffer(pair.arena.view(place, {}), dtype=torch.uint8), number % 251))
        pair.writer.free(pair.arena.freed())
    done.set()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert pair.has_room()


def test_leases_that_live_to_the_end_of_the_process_are_quiet():
    program = """
import torch
from rayloader.transport.arena import Arena, ArenaWriter
arena = Arena(1 << 20)
writer = ArenaWriter(arena.address)
kept = [torch.frombuffer(arena.view(writer.put(memoryview(bytes(64))), {}), dtype=torch.uint8) for _ in range(3)]
kept.append(kept)
torch.kept = kept[1].numpy()
"""
    done = programs.run(program)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_keeps_what_it_saw_and_gets_no_slots():
    pair = Pair(2)
    tensor = pair.lend()
    (go, told), (ready, tell) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:  # the child looks at the tensor when the parent has done its worst
        status = 1
        try:
            no_slots = pair.writer.allocate(1) is None
            os.write(tell, b"x")
            os.read(go, 1)
            unchanged = torch.equal(tensor, NUMBERS)
            pair.arena.rest(True)
            del tensor
            status = 0 if no_slots and unchanged and pair.arena.freed() == [] else 2
        finally:
            os._exit(status)
    os.read(ready, 1)
    pair.arena.rest(True)
    del tensor
    assert pair.arena.freed() == []
    for _ in range(3):
        pair.lend(torch.zeros_like(NUMBERS))
        freed = pair.arena.freed()
        assert len(freed) == 1
        pair.writer.free(freed)
    pair.arena.close()
    os.write(told, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for fd in (go, told, ready, tell):
        os.close(fd)


def test_what_is_in_a_slot_of_the_batch_stays_there_and_what_is_not_is_copied_once():
    pair = Pair(16)
    pair.writer.begin()
    inner = torch.frombuffer(pair.writer.allocate(6400), dtype=torch.float32).copy_(torch.arange(1600.0))
    batch = [inner.view(160, 10), inner[600:1000], torch.arange(300), torch.arange(600)[::7], np.arange(700)]
    encoded = codec.encode(batch)
    places = [pair.writer.put(buffer) for buffer in encoded.buffers]
    assert places[0] == ((1, 0, 2 * PAGE), 0, 6400)
    assert len({slot for slot, *_ in places}) == 4
    got = codec.decode(encoded.skeleton, [pair.arena.view(place, {}) for place in places])
    assert all(np.array_equal(*both) for both in zip(got, batch, strict=True))
    inner[0] = -1  # the very same memory
    assert got[0][0, 0] == -1


# ---- interrupts


def test_an_interrupt_while_a_message_is_taken_in_loses_no_slot_for_good():
    for number in itertools.count():
        pair, leases = Pair(8), {}
        slot, place = pair.writer.pack([memoryview(bytes(5000))] * 2), pair.put()

        def take_in(pair=pair, leases=leases, slot=slot, place=place):
            pair.arena.unpack(slot, [5000, 5000], leases)
            pair.arena.view(place, leases)
            pair.arena.freed()

        fired = interrupted({module.__file__}, number, take_in)
        del leases, take_in
        pair.arena.freed()
        pair.writer.abandon(pair.arena.leased())
        assert pair.has_room(), number
        if not fired:
            break
    assert number > 5


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_what_was_interrupted_while_it_was_made_dies_in_silence():
    module.SlotLease.__new__(module.SlotLease)
    MemoryFile.__new__(MemoryFile, "arena", 1).close()
    gc.collect()


def test_a_lease_that_dies_while_the_arena_is_closed_is_given_back():
    """Its thread has found the worker alive, and posts it when `close` has looked already."""
    pair = Pair(100)
    held = pair.lend(torch.ones(1 << 14))
    file = os.dup(pair.arena._file.fd)

    class Late(type(pair.arena._dead)):
        def append(self, item):
            pair.arena.close(give_back=True)
            super().append(item)

    held.untyped_storage().rayloader_memory.obj.base.dead = Late()
    del held
    assert os.fstat(file).st_blocks == 0
    os.close(file)


# ---- the file


def test_the_file_is_named_sealed_and_nowhere_in_the_file_system():
    address = Arena(1).address
    arena = Arena(1)
    assert address.name != arena.address.name
    address = arena.address
    assert address.nbytes == PAGE
    assert os.readlink(f"/proc/self/fd/{address.fd}") == f"/memfd:{address.name} (deleted)"
    assert not os.get_inheritable(address.fd)
    assert not [name for name in os.listdir("/dev/shm") if "rayloader" in name]
    for size in (0, 2 * address.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(address.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(address.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def file_in_its_place(arena, other, make):
    """Another file under the same descriptor."""
    fd = make(arena.address)
    os.dup2(fd, arena.address.fd, inheritable=False)
    os.close(fd)
    return {}


def of_that_size(address):
    fd = os.memfd_create(address.name)
    os.ftruncate(fd, address.nbytes)
    return fd


WRONG = {
    "descriptor": lambda arena, other: {"fd": other.address.fd},
    "name": lambda arena, other: {"name": other.address.name},
    "process": lambda arena, other: {"pid": 2**22 + 1},
    "machine": lambda arena, other: {"machine": "boot of another machine"},
    "a closed one": lambda arena, other: arena.close() or {},
    "a device": functools.partial(file_in_its_place, make=lambda _: os.open("/dev/null", os.O_RDWR)),
    "another of the same name": functools.partial(file_in_its_place, make=lambda its: os.memfd_create(its.name)),
    "another of the same name and size": functools.partial(file_in_its_place, make=of_that_size),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_not_the_arena_is_refused_and_not_even_opened_unless_it_has_our_name(wrong, monkeypatch):
    """Opening a stranger's device or pipe can have effects."""
    arena, other = Arena(PAGE), Arena(PAGE)
    address = dataclasses.replace(arena.address, **WRONG[wrong](arena, other))
    opened, own = [], os.open
    monkeypatch.setattr(os, "open", lambda *args: opened.append(args) or own(*args))
    with pytest.raises(ArenaError, match=address.name):
        ArenaWriter(address)
    assert bool(opened) is wrong.startswith("another")


def refuse(*_):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("breaks", ["no memory files", "refused", "refused seals"])
def test_where_there_are_no_arenas_the_error_says_so_and_nothing_is_left(monkeypatch, breaks):
    if breaks == "no memory files":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(*((os, "memfd_create") if breaks == "refused" else (fcntl, "fcntl")), refuse)
    with pytest.raises(ArenaError, match="memory file") as caught:
        Arena(PAGE)
    assert left() == []  # though the traceback holds the half-made arena
    del caught


# ---- the free list


def test_sizes_are_whole_pages_and_little_more_than_needed():
    assert [rounded(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [PAGE, PAGE, PAGE, 2 * PAGE]
    for nbytes in range(1, 600 * PAGE, 777):
        assert rounded(nbytes) % PAGE == 0
        assert nbytes <= rounded(nbytes) < nbytes * 9 / 8 + PAGE


def test_the_slot_that_came_back_last_is_taken_first_and_neighbours_are_joined_before_new_room_is_touched():
    free = FreeSlots(100 * PAGE)
    slots = [free.take(3 * PAGE) for _ in range(5)]
    assert [start for start, _ in slots] == [0, 3 * PAGE, 6 * PAGE, 9 * PAGE, 12 * PAGE]
    for index in (1, 4, 2):
        free.put_back(*slots[index])
    assert [free.take(3 * PAGE) for _ in range(4)] == [slots[2], slots[4], slots[1], (15 * PAGE, 3 * PAGE)]
    for slot in slots[1:4]:
        free.put_back(*slot)
    assert free.take(8 * PAGE) == (3 * PAGE, 8 * PAGE)
    assert free.join() == [(11 * PAGE, 12 * PAGE), (18 * PAGE, 100 * PAGE)]
