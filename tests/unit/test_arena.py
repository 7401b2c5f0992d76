"""The arena: memory of one process filled by another, and used again only when nobody can look at it any more."""

from __future__ import annotations

import copy
import dataclasses
import fcntl
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import random
import sys
import threading
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import programs
from rayloader.transport import arena as module
from rayloader.transport import codec
from rayloader.transport.arena import COLD_AFTER, PAGE, Arena, ArenaError, ArenaWriter, FreeSlots, rounded
from rayloader.transport.codec import no_collection
from rayloader.transport.memory_file import MemoryFile

HANG_LIMIT_S = 500.0
MIB = 1 << 20
NUMBERS = torch.arange(512)  # a page


def mappings():
    """Lines of the process's memory map that show an arena."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "rayloader-arena" in line]


def descriptors():
    """Open descriptors of arenas."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the listing's own
            continue
        if "rayloader-arena" in target:
            found.append(target)
    return found


@pytest.fixture(autouse=True)
def _nothing_left():
    yield
    if mappings() or descriptors():
        gc.collect()
    assert (mappings(), descriptors()) == ([], [])


class Pair:
    """Both sides of an arena, in one process; `leases` are those of the message that is being taken in."""

    def __init__(self, pages=4):
        self.arena = Arena(pages * PAGE)
        self.writer = ArenaWriter(self.arena.address)
        self.leases = {}

    def put(self, content=NUMBERS):
        """Where the worker has put a batch."""
        self.writer.begin()
        return self.writer.seal(self.writer.put(codec.encode(content).buffers[0]))

    def view(self, place):
        return self.arena.view(place, self.leases)

    def lend(self, content=NUMBERS):
        """A batch as the driver gets it."""
        encoded = codec.encode(content)
        return codec.decode(encoded.skeleton, [self.view(self.put(content))])

    def fill(self):
        """Takes all that there is, in one slot; None without that much room."""
        self.writer.begin()
        return self.writer.allocate(self.arena.address.nbytes)

    def done(self):
        """The message was taken in; what is free by now goes back to the worker. Its tickets."""
        self.leases = {}
        freed = self.arena.freed()
        self.writer.free(freed)
        return freed

    @property
    def empty(self):
        """Whether all room is free, as far as the driver knows."""
        self.done()
        memory = self.fill()
        found = memory is not None
        del memory
        self.writer.begin()
        return found


def touched(arena):
    """Bytes of memory that the arena takes."""
    return os.fstat(arena._file.fd).st_blocks * 512


# Two processes


def batch_of(seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(8, 3, 5, 7, generator=generator)
    return {
        "image": image,
        "view": image[2:4].permute(0, 2, 3, 1),
        "label": torch.randint(0, 9, (8,), generator=generator),
        "array": np.arange(seed, seed + 600, dtype=np.float32).reshape(20, 30),
        "names": [f"{seed}-{i}" for i in range(8)],
        "empty": torch.empty(0, 3),
        "half": torch.randn(8, generator=generator).bfloat16(),
    }


def serve(connection):
    """A worker: opens the arena it is told to, puts batches into it, answers where they are."""
    opened = None
    while (message := connection.recv()) is not None:
        match message:
            case "open", address:
                try:
                    opened, answer = ArenaWriter(address), None
                except ArenaError as error:
                    answer = error
            case "fill", freed, seeds:
                opened.free(freed)
                answer = []
                for seed in seeds:
                    opened.begin()
                    encoded = codec.encode(batch_of(seed))
                    places = [opened.put(buffer) for buffer in encoded.buffers if buffer.nbytes]
                    skeleton = encoded.skeleton
                    del encoded
                    answer.append((skeleton, [opened.seal(place) for place in places]))
            case "add", tensor:
                answer = tensor.sum().item()
                tensor += 1
            case "close", None:
                opened = None
                answer = mappings(), descriptors()
        connection.send(answer)


@pytest.fixture(scope="module")
def worker():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()

    def ask(*message):
        ours.send(message)
        assert ours.poll(HANG_LIMIT_S)
        return ours.recv()

    yield ask
    ours.send(None)
    process.join(HANG_LIMIT_S)
    assert process.exitcode == 0


def test_another_process_fills_slots_and_the_batches_are_views_of_them(worker):
    arena = Arena(1 << 18)
    assert worker("open", arena.address) is None
    start, size = arena._mapping.start, arena.address.nbytes
    freed = []
    for number in range(3):
        seeds = [10 * number, 10 * number + 1]
        batches, leases = [], {}
        for skeleton, places in worker("fill", freed, seeds):
            batches.append(codec.decode(skeleton, [arena.view(place, leases) for place in places]))
        for seed, batch in zip(seeds, batches, strict=True):
            want = batch_of(seed)
            for key in ("image", "view", "label", "half"):
                assert torch.equal(batch[key], want[key])
                assert batch[key].stride() == want[key].stride()
                assert start <= batch[key].data_ptr() < start + size
            assert batch["view"].data_ptr() - batch["image"].data_ptr() == 2 * 3 * 5 * 7 * 4
            assert batch["names"] == want["names"]
            assert np.array_equal(batch["array"], want["array"])
            batch["image"].zero_()
            batch["array"][:] = 0
            assert not batch["view"].any()
        del batch, batches, leases
        freed = arena.freed()
        assert len(freed) == 8
    assert worker("close", None) == ([], [])


def test_another_process_refuses_what_is_not_the_arena(worker):
    arena, other = Arena(PAGE), Arena(PAGE)
    right = arena.address
    wrong = [
        dataclasses.replace(right, fd=other.address.fd),
        dataclasses.replace(right, name=other.address.name),
        dataclasses.replace(right, pid=2**22 + 1),
        dataclasses.replace(right, machine="boot of another machine"),
    ]
    assert all(isinstance(worker("open", address), ArenaError) for address in wrong)
    arena.close()
    assert isinstance(worker("open", right), ArenaError)
    other.close()


@pytest.mark.parametrize("nbytes", [800, 1 << 20])
def test_a_batch_that_is_shared_or_sent_to_another_process_leaves_views_of_it_alone(worker, nbytes):
    """Torch moves it to other memory, under the NumPy views that there are."""
    pair = Pair(1024)
    given = torch.arange(nbytes // 8)
    for batch in (pair.lend(given), codec.decode((e := codec.encode(given)).skeleton, [bytearray(e.buffers[0])])):
        del pair.leases
        pair.leases = {}
        views = [batch.numpy()[1:], batch[2:].numpy(), memoryview(batch.numpy())]
        assert batch.share_memory_() is batch
        assert batch.is_shared()
        assert worker("add", batch) == given.sum()
        assert torch.equal(batch, given + 1)  # shared with that process, as torch's batches are
        batch.fill_(-1)
        pair.done()
        for _ in range(3):
            pair.lend(torch.zeros_like(given))
            pair.done()
        assert [view[-1] for view in views] == [given[-1]] * 3
        del batch, views
    assert pair.empty


# Opening


def test_the_file_is_named_sealed_and_nowhere_in_the_file_system():
    arena, another = Arena(1), Arena(1)
    address = arena.address
    assert address.name != another.address.name
    assert os.readlink(f"/proc/self/fd/{address.fd}") == f"/memfd:{address.name} (deleted)"
    assert not os.get_inheritable(address.fd)
    assert os.fstat(address.fd).st_nlink == 0
    assert not [name for name in os.listdir("/dev/shm") if "rayloader" in name]
    for size in (0, 2 * address.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(address.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(address.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def same_name(address):
    return os.memfd_create(address.name)


def same_name_and_size(address):
    fd = os.memfd_create(address.name)
    os.ftruncate(fd, address.nbytes)
    return fd


def device_file(address):
    return os.open("/dev/null", os.O_RDWR)


@pytest.mark.parametrize("impostor", [same_name, same_name_and_size, device_file])
def test_another_file_under_the_same_descriptor_is_refused(impostor):
    arena = Arena(PAGE)
    fd = impostor(arena.address)
    os.dup2(fd, arena.address.fd, inheritable=False)
    os.close(fd)
    with pytest.raises(ArenaError, match=arena.address.name):
        ArenaWriter(arena.address)


def test_what_has_not_our_name_is_not_even_opened(monkeypatch):
    """Opening a stranger's device or pipe can have effects."""
    arena = Arena(PAGE)
    address = dataclasses.replace(arena.address, name=Arena(PAGE).address.name)
    opened: list[str] = []
    monkeypatch.setattr(os, "open", lambda path, *_: opened.append(path))
    with pytest.raises(ArenaError, match="must be rayloader-arena-"):
        ArenaWriter(address)
    assert opened == []


def no_memory_files(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")


def refused_memory_files(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)


def refused_seals(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.mark.parametrize("breakage", [no_memory_files, refused_memory_files, refused_seals])
def test_where_there_are_no_arenas_the_error_says_so_and_nothing_is_left(monkeypatch, breakage):
    breakage(monkeypatch)
    with pytest.raises(ArenaError, match="memory file") as caught:
        Arena(PAGE)
    assert descriptors() == []  # though the traceback holds the half-made arena
    del caught


# Slots


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(1, 9 * PAGE), st.tuples(st.integers(0, 99), st.booleans())), max_size=60))
def test_what_is_held_never_changes_and_all_room_comes_back(steps):
    """A number makes a batch of that many bytes; a tuple drops one, and says whether a message goes to the worker."""
    pair, held = Pair(24), {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            pair.writer.begin()
            place = pair.writer.put(memoryview(bytes([number]) * step))
            if place is not None:
                held[number] = pair.view(place)
                pair.leases = {}
        else:
            which, message = step
            if held:
                del held[sorted(held)[which % len(held)]]
            if message:
                pair.done()
        assert all((np.frombuffer(view, np.uint8) == number).all() for number, view in held.items())
    held.clear()
    assert pair.empty
    assert pair.arena.spoiled == 0


def test_small_buffers_share_a_slot_and_get_memory_of_their_own():
    pair = Pair()
    buffers = [memoryview(bytes([number]) * size) for number, size in enumerate((1, 64, 100, 0, 3000))]
    pair.writer.begin()
    slot = pair.writer.pack(buffers)
    copies = pair.arena.unpack(slot, [buffer.nbytes for buffer in buffers], pair.leases)
    assert copies == [bytearray(buffer) for buffer in buffers]
    assert pair.done() == [slot[0]]
    assert pair.empty
    assert copies == [bytearray(buffer) for buffer in buffers]


def test_what_is_copied_of_a_message_that_is_taken_in_twice_is_what_it_was():
    """As after a Ctrl-C: the slot was free after the first time, and another batch may lie in it."""
    pair, leases = Pair(), {}
    pair.writer.begin()
    slot = pair.writer.pack([memoryview(b"first")])
    copies = pair.arena.unpack(slot, [5], leases)
    assert pair.done() == [slot[0]]
    pair.writer.begin()
    again = pair.writer.pack([memoryview(b"other")])
    assert again[1:] == slot[1:]
    assert pair.arena.unpack(slot, [5], leases) == copies == [bytearray(b"first")]
    assert pair.arena.freed() == []
    assert pair.arena.unpack(again, [5], {}) == [bytearray(b"other")]


def test_an_interrupt_while_bytes_are_copied_loses_no_slot_for_good():
    code, interrupted = Arena.unpack.__code__, 0
    for stop in itertools.count(1):
        pair, lines = Pair(8), itertools.count(1)
        pair.writer.begin()
        slot = pair.writer.pack([memoryview(bytes(5000))] * 2)

        def trace(frame, event, _, lines=lines, stop=stop):
            if event == "line" and next(lines) == stop:
                raise KeyboardInterrupt
            return trace if frame.f_code is code else None

        sys.settrace(trace)
        try:
            pair.arena.unpack(slot, [5000, 5000], pair.leases)
            break
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        pair.done()
        pair.writer.abandon(pair.arena.leased())
        assert pair.empty
    assert interrupted > 5


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_lease_whose_making_was_interrupted_dies_in_silence():
    module.SlotLease.__new__(module.SlotLease)
    gc.collect()


def test_nothing_is_copied_once_the_worker_has_gone():
    pair = Pair()
    pair.writer.begin()
    slot = pair.writer.pack([memoryview(b"first")])
    pair.arena.close(give_back=True)
    with pytest.raises(ArenaError, match="the worker of this batch was shut down"):
        pair.arena.unpack(slot, [5], pair.leases)


def test_a_message_that_is_taken_in_twice_names_the_same_leases():
    """As after a Ctrl-C: what was made of it the first time may be the user's already, or gone."""
    pair = Pair()
    place = pair.put()
    kept = pair.view(place)
    del kept
    assert pair.arena.freed() == []
    first, second = pair.view(place), pair.view(place)
    assert torch.equal(torch.frombuffer(first, dtype=torch.int64), NUMBERS)
    del first
    pair.leases = {}
    assert pair.arena.freed() == []
    del second
    assert pair.arena.freed() == [place[0][0]]


def test_results_that_are_nobodys_leave_their_slots():
    pair = Pair(8)
    held = pair.lend()
    place = pair.put()
    pair.done()
    pair.writer.abandon(pair.arena.leased())
    pair.writer.begin()
    assert pair.put(torch.zeros_like(NUMBERS))[0][1:] == place[0][1:]
    assert torch.equal(held, NUMBERS)
    del held, place
    pair.done()
    pair.writer.abandon(pair.arena.leased())
    assert pair.empty


def test_freeing_a_slot_twice_does_not_free_the_next_batch():
    pair = Pair(1)
    first = pair.put()
    pair.writer.free([first[0][0]])
    second = pair.put()
    assert second[0][1:] == first[0][1:]
    pair.writer.free([first[0][0]])
    assert pair.fill() is None


# Leases


class Cycle:
    def __init__(self, held):
        self.held, self.me = held, self


class Interface:
    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


KEEPING = {
    "the tensor": lambda t: t,
    "slice": lambda t: t[500:],
    "transposed": lambda t: t.view(2, 256).t(),
    "other dtype": lambda t: t.view(torch.uint8),
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "alias by set_": lambda t: torch.empty(0, dtype=torch.int64).set_(t),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "untyped storage": lambda t: t.untyped_storage(),
    "storage slice": lambda t: t.untyped_storage()[8:16],
    "numpy": lambda t: t.numpy(),
    "numpy slice": lambda t: t.numpy()[3:5],
    "numpy reshaped": lambda t: t.numpy().reshape(2, 256).T,
    "memoryview": lambda t: memoryview(t.numpy()),
    "numpy and back": lambda t: torch.from_numpy(t.numpy()),
    "dlpack to torch": lambda t: torch.from_dlpack(t),
    "dlpack to numpy": lambda t: np.from_dlpack(t),
    "frombuffer": lambda t: torch.frombuffer(t.numpy(), dtype=torch.int32),
    "saved for backward": lambda t: torch.ones(512, requires_grad=True) * t,
    "reference cycle": lambda t: Cycle(t),
    "cycle of numpy": lambda t: Cycle(t.numpy()[1:]),
    "out-of-band pickle": lambda t: pickle.PickleBuffer(t.numpy()),
    "encoded": lambda t: codec.encode(t),
    "share_memory_": lambda t: t.share_memory_(),
    "a view of what was shared": lambda t: (t.numpy(), t.share_memory_())[0],
    "decoded": lambda t: codec.decode((e := codec.encode(t)).skeleton, e.buffers),
}


ARRAYS = {
    "the array": lambda a: a,
    "slice": lambda a: a[500:],
    "view": lambda a: a.view(np.uint8),
    "transposed": lambda a: a.reshape(2, 256).T,
    "subclass": lambda a: a.view(np.recarray),
    "slice of a subclass": lambda a: a.view(np.recarray)[1:],
    "asarray of a subclass": lambda a: np.asarray(a.view(np.recarray)),
    "ndarray over it": lambda a: np.ndarray(3, np.int64, a),
    "memoryview": lambda a: memoryview(a)[3:],
    "frombuffer": lambda a: np.frombuffer(a, np.uint8),
    "tensor": lambda a: torch.from_numpy(a),
    "tensor's storage": lambda a: torch.from_numpy(a[2:]).untyped_storage(),
    "interface": lambda a: np.asarray(Interface(a)),
    "broadcast": lambda a: np.broadcast_to(a, (2, 512)),
    "strided": lambda a: np.lib.stride_tricks.as_strided(a, (2,), (8,)),
    "flat iterator": lambda a: a.flat,
}


@pytest.mark.parametrize(
    ("numbers", "keep"),
    [
        *(pytest.param(NUMBERS, keep, id=name) for name, keep in KEEPING.items()),
        *(pytest.param(NUMBERS.numpy(), keep, id=f"array: {name}") for name, keep in ARRAYS.items()),
    ],
)
def test_a_slot_comes_back_only_when_the_last_view_has_died(numbers, keep):
    pair = Pair(1)
    kept = keep(pair.lend(numbers))
    assert pair.done() == []
    assert pair.fill() is None
    cycle = isinstance(kept, Cycle)
    del kept
    if cycle:
        assert pair.done() == []
        gc.collect()
    assert pair.empty


def saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


COPYING = {
    "clone": torch.clone,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "storage's clone": lambda t: t.untyped_storage().clone(),
    "arithmetic": lambda t: t + 0,
}


def leaves_a_cycle(convert):
    """Whether torch leaves any tensor to the collector of cycles then, as `torch.save` of torch 2.6 and 2.9 does."""
    numbers = np.arange(512)
    alive = weakref.ref(numbers)
    with no_collection():
        convert(torch.from_numpy(numbers))
        del numbers
        return alive() is not None


@pytest.mark.parametrize("convert", COPYING.values(), ids=COPYING)
def test_a_copy_keeps_no_slot(convert):
    pair = Pair(1)
    kept = convert(pair.lend())
    if leaves_a_cycle(convert):
        gc.collect()
    assert pair.empty
    content = kept if isinstance(kept, torch.Tensor) else torch.empty(0, dtype=torch.int64).set_(kept)
    assert torch.equal(content, NUMBERS)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_views_may_die_in_any_order(order):
    pair = Pair(1)
    tensor = pair.lend()
    holders = [tensor, tensor.numpy()[3:], tensor.untyped_storage(), pair.leases]
    pair.leases = None
    del tensor
    for index in order:
        assert pair.arena.freed() == []
        holders[index] = None
    assert len(pair.arena.freed()) == 1


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
    sizes = random.Random(0)
    for number in range(2000):
        pair.writer.begin()
        place = pair.writer.put(memoryview(bytes([number % 251]) * sizes.randrange(1, 5 * PAGE)))
        if place is not None:
            handed.append((torch.frombuffer(pair.view(place), dtype=torch.uint8), number % 251))
        pair.done()
    done.set()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert pair.empty


def test_making_and_dropping_batches_keeps_no_memory():
    pair = Pair()

    def once():
        pair.lend()
        pair.done()

    once()
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(200):  # until Python's own lists of free objects, which count as memory, are as long as they get
            once()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            once()
        assert tracemalloc.get_traced_memory()[0] - before < 4096
    finally:
        tracemalloc.stop()


def test_leases_that_live_to_the_end_of_the_process_are_quiet():
    program = """
import torch
from rayloader.transport.arena import Arena, ArenaWriter
arena = Arena(1 << 20)
writer = ArenaWriter(arena.address)
leases = {}
kept = [torch.frombuffer(arena.view(writer.put(memoryview(bytes(64))), leases), dtype=torch.uint8) for _ in range(3)]
kept.append(kept)
torch.kept = kept[1].numpy()
"""
    done = programs.run(program)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# Memory that is given back


def test_the_same_memory_serves_again_and_again():
    pair = Pair(10_000)
    for number in range(100):
        batch = pair.lend(torch.full((40_000,), number))
        assert (batch == number).all()
        del batch
        pair.done()
    assert touched(pair.arena) <= 2 * 40_000 * 8


def test_memory_that_is_cold_is_given_back():
    pair = Pair(20_000)
    held = [pair.lend(torch.full((MIB // 8,), number)) for number in range(40)]
    assert touched(pair.arena) >= 40 * MIB
    del held[1:]
    for _ in range(COLD_AFTER):
        pair.lend()
        pair.done()
    assert touched(pair.arena) <= 2 * MIB
    assert (held[0] == 0).all()


def test_while_it_rests_what_is_dropped_is_given_back():
    pair = Pair(1024)
    one, two = pair.lend(torch.ones(1 << 17)), pair.lend(torch.zeros(1 << 17))
    pair.done()
    pair.arena.rest(True)
    assert touched(pair.arena) >= 2 << 19
    del two
    assert touched(pair.arena) < 3 << 18
    pair.arena.rest(False)
    del one
    assert touched(pair.arena) >= 1 << 19
    assert pair.empty


def test_after_the_worker_has_ended_what_is_kept_is_all_that_takes_memory():
    pair = Pair(1000)
    kept = [pair.lend(torch.full((1 << 16,), number)) for number in range(6)]
    late = pair.put()
    pair.done()
    del kept[::2]
    file = os.dup(pair.arena._file.fd)
    pair.arena.close(give_back=True)
    pair.arena.close(give_back=True)
    assert os.fstat(file).st_blocks * 512 == 3 << 19
    assert all((batch == 2 * number + 1).all() for number, batch in enumerate(kept))
    with pytest.raises(ArenaError, match="shut down"):
        pair.view(late)
    kept.pop()
    assert os.fstat(file).st_blocks * 512 == 2 << 19
    os.close(file)


def test_a_lease_that_dies_while_the_arena_is_closed_is_given_back(monkeypatch):
    """Its thread has found the worker alive, and posts it when `close` has looked already."""
    pair = Pair(100)
    held = pair.lend(torch.ones(1 << 14))
    pair.done()
    file = os.dup(pair.arena._file.fd)

    class Late(type(pair.arena._dead)):
        def append(self, item):
            pair.arena.close(give_back=True)
            super().append(item)

    held.untyped_storage().rayloader_memory.obj.base.dead = Late()
    del held
    assert os.fstat(file).st_blocks == 0
    os.close(file)


# Closing


def test_an_arena_that_is_closed_lives_as_long_as_what_was_cut_from_it():
    pair = Pair()
    tensor = pair.lend()
    array = pair.lend().numpy()
    pair.arena.close()
    pair.arena.close()
    del pair
    assert len(mappings()) == 1
    assert torch.equal(tensor, NUMBERS)
    del tensor
    assert len(mappings()) == 1
    assert array[511] == 511
    del array
    assert (mappings(), descriptors()) == ([], [])


# Forks


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_was_leased_at_a_fork_is_never_reused_and_the_child_gets_no_slots():
    pair = Pair(4)
    tensor = pair.lend()
    in_flight = pair.put()
    go, ready = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:  # the child has the tensor and looks at it when the parent has done its worst
        status = 1
        try:
            no_slots = pair.writer.allocate(1) is None
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            unchanged = torch.equal(tensor, NUMBERS)
            pair.arena.rest(True)
            pair.leases = {}
            del tensor
            gc.collect()
            status = 0 if no_slots and unchanged and pair.arena.freed() == [] else 2
        finally:
            os._exit(status)
    try:
        os.read(ready[0], 1)
        address = tensor.data_ptr()
        pair.arena.rest(True)
        del tensor
        assert pair.done() == []
        pair.arena.rest(False)
        assert pair.arena.spoiled == PAGE
        pair.view(in_flight)
        assert pair.done() == [in_flight[0][0]]
        pair.writer.abandon(pair.arena.leased())
        for _ in range(3):  # what was free at the fork, and leased after it, goes round as ever
            batches = [pair.lend(torch.zeros_like(NUMBERS)) for _ in range(3)]
            assert pair.fill() is None
            assert address not in [batch.data_ptr() for batch in batches]
            del batches
            pair.done()
    finally:
        os.write(go[1], b"x")
        _, status = os.waitpid(pid, 0)
        for fd in (*go, *ready):
            os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 0


def test_what_is_leased_while_a_thread_forks_is_never_reused():
    pair = Pair(2)
    module._before_fork()
    try:
        held = pair.lend()
    finally:
        module._after_fork()
    del held
    assert pair.done() == []
    assert pair.arena.spoiled == PAGE


def test_a_slot_that_a_child_of_the_worker_may_look_at_is_never_reused():
    pair = Pair(3)
    pair.writer.begin()
    seen, dropped = pair.writer.allocate(PAGE), pair.writer.allocate(PAGE)
    place = pair.writer.put(seen)
    module._before_fork()
    module._after_fork()
    del seen, dropped
    place = pair.writer.seal(place)
    pair.view(place)
    assert pair.done() == [place[0][0]]
    pair.writer.begin()
    assert pair.writer.allocate(PAGE) is not None
    assert pair.writer.allocate(PAGE) is None
    assert pair.writer.full


def test_what_the_worker_forks_after_a_batch_spoils_nothing():
    pair = Pair(1)
    for _ in range(5):
        held = pair.lend()
        module._before_fork()
        module._after_fork()
        place = held.data_ptr()
        del held
        assert place
        pair.leases = {}
        pair.writer.free([pair.writer._last_ticket])  # the driver did not fork
        pair.arena.freed()
    assert pair.put() is not None


# Writing


def test_what_is_in_a_slot_of_the_batch_stays_there_and_what_is_not_is_copied_once():
    pair = Pair(16)
    pair.writer.begin()
    inner = torch.frombuffer(pair.writer.allocate(6400), dtype=torch.float32).copy_(torch.arange(1600.0))
    batch = [inner.view(160, 10), inner[600:1000], torch.arange(300), torch.arange(600)[::7], np.arange(700)]
    encoded = codec.encode(batch)
    places = [pair.writer.put(buffer) for buffer in encoded.buffers]
    assert places[0] == ((1, 0, 2 * PAGE), 0, 6400)
    assert len({slot for slot, *_ in places}) == 4
    got = codec.decode(encoded.skeleton, [pair.view(place) for place in places])
    assert all(torch.equal(g, w) for g, w in zip(got[:4], batch, strict=False))
    assert np.array_equal(got[4], batch[4])
    inner[0] = -1  # the very same memory
    assert got[0][0, 0] == -1


def test_a_part_of_what_was_stacked_for_the_batch_is_not_copied():
    pair = Pair()
    pair.writer.begin()
    stacked = torch.frombuffer(pair.writer.allocate(400), dtype=torch.float32)
    assert pair.writer.put(codec.encode(stacked[40:60]).buffers[0]) == ((1, 0, PAGE), 128, 112)


def test_what_was_stacked_for_an_earlier_batch_is_copied():
    """A class of the user's may keep it, and give it again after it has written to it."""
    pair = Pair()
    pair.writer.begin()
    kept = torch.frombuffer(pair.writer.allocate(PAGE), dtype=torch.int64).copy_(NUMBERS)
    first = pair.lend(kept)
    kept.zero_()
    second = pair.lend(kept)
    kept.fill_(-1)
    assert torch.equal(first, NUMBERS)
    assert not second.any()


def test_what_user_code_keeps_of_a_batch_is_copied_when_its_task_ends():
    pair = Pair()
    pair.writer.begin()
    kept = torch.frombuffer(pair.writer.allocate(PAGE), dtype=torch.int64).copy_(NUMBERS)
    encoded = codec.encode(kept)
    place = pair.writer.put(encoded.buffers[0])
    skeleton = encoded.skeleton
    del encoded
    sealed = pair.writer.seal(place)
    assert sealed[0] != place[0]
    got = codec.decode(skeleton, [pair.view(sealed)])
    kept.zero_()
    assert torch.equal(got, NUMBERS)
    got.fill_(7)
    assert not kept.any()
    pair.writer.begin()
    held = [pair.lend() for _ in range(2)]
    assert pair.put is not None
    assert not kept.any()
    del got, held, kept
    assert pair.empty


def test_a_slot_of_several_arrays_is_sent_for_all_of_them_or_for_none():
    """Another thread may let go of it between two of them."""
    pair = Pair(8)
    pair.writer.begin()
    whole = torch.frombuffer(pair.writer.allocate(PAGE), dtype=torch.uint8).numpy()
    places = [pair.writer.put(buffer) for buffer in codec.encode([whole[: PAGE // 2], whole[PAGE // 2 :]]).buffers]
    first = pair.writer.seal(places[0])
    del whole
    second = pair.writer.seal(places[1])
    assert places[0][0] == places[1][0]
    assert first[0] != places[0][0] != second[0]


def test_without_room_what_user_code_keeps_travels_with_the_message():
    pair = Pair(1)
    pair.writer.begin()
    kept = torch.frombuffer(pair.writer.allocate(PAGE), dtype=torch.int64).copy_(NUMBERS)
    sealed = pair.writer.seal(pair.writer.put(codec.encode(kept).buffers[0]))
    assert isinstance(sealed, bytearray)
    kept.zero_()
    assert torch.equal(torch.frombuffer(sealed, dtype=torch.int64), NUMBERS)


def test_what_came_to_nothing_is_free_again():
    """`default_collate` has stacked one field, and the next one raised."""
    pair = Pair(1)
    for _ in range(5):
        pair.writer.begin()
        memory = pair.writer.allocate(PAGE)
        assert memory is not None
        del memory
    pair.writer.begin()
    kept = pair.writer.allocate(PAGE)
    pair.writer.begin()
    assert pair.writer.allocate(PAGE) is None
    del kept
    assert pair.writer.allocate(PAGE) is not None


def test_without_room_there_is_none_and_it_is_known():
    pair = Pair()
    held = pair.lend(torch.zeros(2 * PAGE, dtype=torch.uint8))
    assert not pair.writer.full
    pair.writer.begin()
    assert pair.writer.put(memoryview(bytes(3 * PAGE))) is None
    assert pair.writer.pack([memoryview(bytes(3 * PAGE))]) is None
    assert pair.writer.full
    del held
    assert pair.empty


def test_a_memory_file_whose_constructor_was_interrupted_at_once_is_dropped_without_an_error():
    MemoryFile.__new__(MemoryFile, "arena", 1).close()


# ---- the free list


def test_sizes_are_whole_pages_and_little_more_than_needed():
    assert [rounded(nbytes) for nbytes in (0, 1, PAGE, PAGE + 1)] == [PAGE, PAGE, PAGE, 2 * PAGE]
    for nbytes in range(1, 600 * PAGE, 777):
        size = rounded(nbytes)
        assert size % PAGE == 0
        assert nbytes <= size < nbytes * 9 / 8 + PAGE


def test_the_slot_that_came_back_last_is_taken_first():
    free = FreeSlots(100 * PAGE)
    slots = [free.take(3 * PAGE) for _ in range(5)]
    assert [start for start, _ in slots] == [0, 3 * PAGE, 6 * PAGE, 9 * PAGE, 12 * PAGE]
    for index in (1, 4, 2):
        free.put_back(*slots[index])
    assert [free.take(3 * PAGE) for _ in range(4)] == [slots[2], slots[4], slots[1], (15 * PAGE, 3 * PAGE)]


def test_neighbours_of_other_sizes_are_joined_before_new_room_is_touched():
    free = FreeSlots(100 * PAGE)
    for slot in [free.take(pages * PAGE) for pages in (1, 2, 3, 4)]:
        free.put_back(*slot)
    assert free.take(10 * PAGE) == (0, 10 * PAGE)


def test_without_room_there_is_none_until_something_comes_back():
    free = FreeSlots(4 * PAGE)
    first, second = free.take(2 * PAGE), free.take(2 * PAGE)
    assert free.take(1) is None
    free.put_back(*second)
    assert free.take(3 * PAGE) is None
    free.put_back(*first)
    assert free.take(4 * PAGE) == (0, 4 * PAGE)


@settings(max_examples=60)
@given(st.lists(st.one_of(st.integers(1, 9 * PAGE), st.tuples(st.integers(0, 99))), max_size=80))
def test_slots_never_overlap_and_all_room_comes_back(steps):
    """A number takes that many bytes; a tuple says which slot comes back."""
    free, taken = FreeSlots(24 * PAGE), []
    for step in steps:
        if isinstance(step, int):
            slot = free.take(step)
            if slot is not None:
                assert slot[1] == rounded(step)
                assert slot[0] >= 0
                assert sum(slot) <= 24 * PAGE
                assert all(slot[0] + slot[1] <= start or start + size <= slot[0] for start, size in taken)
                taken.append(slot)
        elif taken:
            free.put_back(*taken.pop(step[0] % len(taken)))
    for slot in taken:
        free.put_back(*slot)
    assert free.take(24 * PAGE) == (0, 24 * PAGE)


def test_what_is_joined_is_what_is_free():
    free = FreeSlots(100 * PAGE)
    held = [free.take(PAGE) for _ in range(20)]
    for slot in held[3:]:
        free.put_back(*slot)
    assert free.join() == [(3 * PAGE, 100 * PAGE)]
    free.put_back(*held[1])
    assert free.join() == [(PAGE, 2 * PAGE), (3 * PAGE, 100 * PAGE)]
