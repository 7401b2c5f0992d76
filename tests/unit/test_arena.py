"""The arena: memory of one process filled by another, and used again only when nobody can look at it any more."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import itertools
import mmap
import os
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from handlers import interrupted
from rayloader.transport import arena as module
from rayloader.transport import codec
from rayloader.transport.arena import PACKED_ALIGN, PAGE, Arena, ArenaError, ArenaWriter, FreeSlots, rounded

ROOM = 24 * PAGE
NUMBERS = torch.arange(512)  # a page


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
    """A slot that is not free, as the model has it."""

    start: int
    size: int
    content: bytearray  # its first bytes; of several small buffers, which lie side by side, nothing
    memory: memoryview | None = None  # what user code in the worker keeps of it
    state: str = "building"  # where it is, from there to "told"; or "parked", while it was not sent
    forks: int = -1  # how many there had been when it was leased
    seen: bool = False  # whether a child of the worker may see it
    open: bool = False  # whether a later child may, because user code may have it
    ticket: int = 0  # once it is known


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
            module._before_fork()
            self.note_fork()
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
        """What is leased, and what user code of a worker may have, a child may read for ever; it gets no slots."""
        self.note_fork()
        if not self.seldom():
            module._before_fork()
            module._after_fork()
        elif child := os.fork():
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        else:
            status = 1
            try:
                self.held.clear()
                self.arena.rest(True)
                self.arena.close(give_back=True)
                status = int(self.writer.allocate(1) is not None)
            finally:
                os._exit(status)

    def note_fork(self):
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("cold_after", [1, 5, 1024])
def test_memory_is_used_again_only_when_nobody_can_look_at_it_whatever_the_order(cold_after, monkeypatch):
    monkeypatch.setattr(module, "COLD_AFTER", cold_after)
    gc.disable()  # cycles end when they are told to
    try:
        for seed in range(80):
            Program(seed).run(100)
    finally:
        gc.enable()


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


VIEWS = {
    "alias by set_": lambda t: torch.empty(0, dtype=torch.int64).set_(t),
    "parameter": lambda t: torch.nn.Parameter(t.view(2, 256).t()[3:], requires_grad=False),
    "storage": lambda t: t.untyped_storage()[8:16],
    "numpy and back": lambda t: torch.from_numpy(t.numpy()[3:].reshape(-1, 1)),
    "dlpack": lambda t: np.from_dlpack(torch.from_dlpack(t)),
    "saved for backward": lambda t: torch.ones(512, requires_grad=True) * t,
    "out-of-band pickle": lambda t: pickle.PickleBuffer(t.numpy()),
    "decoded again": lambda t: codec.decode((e := codec.encode(t)).skeleton, e.buffers),
    "a view of what was shared": lambda t: (t.numpy(), t.share_memory_())[0],
    "strided": lambda t: np.lib.stride_tricks.as_strided(np.broadcast_to(t.numpy(), (2, 512)), (2,), (8,)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_slot_comes_back_only_when_the_last_view_has_died(kind):
    pair = Pair()
    kept = VIEWS[kind](pair.lend())
    assert not pair.has_room()
    del kept
    assert pair.has_room()


def test_many_threads_drop_views_while_batches_are_made():
    pair, equal = Pair(64), []

    def drop(tensor, number):
        return bool((tensor == number).all())

    with ThreadPoolExecutor(3) as threads:
        for number in range(1000):
            pair.writer.begin()
            place = pair.writer.put(memoryview(bytes([number % 251]) * (1 + number * 7919 % (5 * PAGE))))
            if place is not None:
                tensor = torch.frombuffer(pair.arena.view(place, {}), dtype=torch.uint8)
                equal.append(threads.submit(drop, tensor, number % 251))
            pair.writer.free(pair.arena.freed())
    assert all(one.result() for one in equal)
    del tensor
    assert pair.has_room()


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


# ---- the file


def test_the_file_cannot_be_cut_and_is_nowhere_in_the_file_system():
    address = Arena(1).address
    arena = Arena(1)
    assert (address.nbytes, arena.address.name == address.name) == (PAGE, False)
    assert os.readlink(f"/proc/self/fd/{arena.address.fd}") == f"/memfd:{arena.address.name} (deleted)"
    for size in (0, 2 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.address.fd, size)


def file_in_its_place(arena, fd, nbytes=0):
    """Another file under the same descriptor."""
    if nbytes:
        os.ftruncate(fd, nbytes)
    os.dup2(fd, arena.address.fd, inheritable=False)
    os.close(fd)
    return {}


WRONG = {
    "descriptor": lambda arena, other: {"fd": other.address.fd},
    "name": lambda arena, other: {"name": other.address.name},
    "process": lambda arena, other: {"pid": 2**22 + 1},
    "machine": lambda arena, other: {"machine": "boot of another machine"},
    "a closed one": lambda arena, other: arena.close() or {},
    "a device": lambda arena, _: file_in_its_place(arena, os.open("/dev/null", os.O_RDWR)),
    "another of the same name": lambda arena, _: file_in_its_place(arena, os.memfd_create(arena.address.name)),
    "another of the same size": lambda arena, _: file_in_its_place(arena, os.memfd_create(arena.address.name), PAGE),
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


@pytest.mark.parametrize("broken", [(os, "memfd_create"), (fcntl, "fcntl")])
def test_where_there_are_no_arenas_the_error_says_so_and_nothing_is_left(monkeypatch, broken):
    monkeypatch.setattr(*broken, refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ArenaError, match="memory file") as caught:
        Arena(PAGE)
    assert os.listdir("/proc/self/fd") == before, "the traceback holds the half-made arena"
    del caught


def test_slots_are_little_larger_than_needed_and_the_one_that_came_back_last_is_taken_first():
    assert [rounded(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [PAGE, PAGE, PAGE, 2 * PAGE]
    assert all(nbytes <= rounded(nbytes) < nbytes * 9 / 8 + PAGE for nbytes in range(1, 600 * PAGE, 777))
    free = FreeSlots(100 * PAGE)
    slots = [free.take(3 * PAGE) for _ in range(5)]
    for index in (1, 4, 2):
        free.put_back(*slots[index])
    assert [free.take(3 * PAGE) for _ in range(4)] == [slots[2], slots[4], slots[1], (15 * PAGE, 3 * PAGE)]
