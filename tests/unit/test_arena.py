"""The arena: memory of one process filled by another, and handed out again only when nobody can look at it any more."""

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
import subprocess
import sys
import threading
import tracemalloc
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from rayloader.collate import collate_into
from rayloader.transport import arena as module
from rayloader.transport import codec, raw
from rayloader.transport.arena import Arena, ArenaError, ArenaWriter

ROOT = Path(__file__).parents[2]
HANG_LIMIT_S = 60.0
PAGE = module._PAGE
DTYPES = list(raw.NAMES)


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


def new_arena():
    return Arena(4 * PAGE)


def new_writer():
    """A writer of a slot of four pages (no fixture: pytest would hold it longer than the test does)."""
    arena = new_arena()
    return ArenaWriter.open(arena.address).writer(whole(arena))


def whole(arena):
    """Leases all that an arena has."""
    return arena.take(arena.address.nbytes - PAGE)


def leased_tensor(arena, slot):
    """A tensor over a slot, as the driver gets it from a descriptor."""
    encoded = codec.encode(torch.arange(512))
    memory = arena.view(slot, 0, encoded.buffers[0].nbytes)
    memory[:] = encoded.buffers[0]
    return codec.decode(encoded.skeleton, [memory])


def leased_array(arena, slot):
    encoded = codec.encode(np.arange(512))
    memory = arena.view(slot, 0, encoded.buffers[0].nbytes)
    memory[:] = encoded.buffers[0]
    return codec.decode(encoded.skeleton, [memory])


def inside(arena, address, nbytes):
    start = arena._mapping.start
    return start + PAGE <= address and address + nbytes <= start + arena.address.nbytes


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
    """A worker: opens the arena it is told to, fills slots, answers descriptors."""
    opened = None
    while (message := connection.recv()) is not None:
        match message:
            case "open", address:
                try:
                    opened, answer = ArenaWriter.open(address), None
                except ArenaError as error:
                    answer = error
            case "fill", slot, seeds:
                writer, answer = opened.writer(slot), []
                for seed in seeds:
                    encoded = codec.encode(batch_of(seed))
                    answer.append((encoded.skeleton, [writer.place(buffer) for buffer in encoded.buffers]))
                del encoded
                assert writer.close()
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
    slots = [arena.take(1 << 16) for _ in range(3)]
    for number, slot in enumerate(slots):
        seeds = [10 * number, 10 * number + 1]
        batches = []
        for skeleton, places in worker("fill", slot, seeds):
            assert all(offset % 64 == 0 for offset, _ in places)
            batches.append(codec.decode(skeleton, [arena.view(slot, *place) for place in places]))
        arena.release_call(slot)
        for seed, batch in zip(seeds, batches, strict=True):
            want = batch_of(seed)
            for key in ("image", "view", "label", "half", "empty"):
                assert torch.equal(batch[key], want[key])
                assert batch[key].stride() == want[key].stride()
            for key in ("image", "label", "half"):
                assert inside(arena, batch[key].data_ptr(), batch[key].nbytes)
            assert batch["view"].data_ptr() - batch["image"].data_ptr() == 2 * 3 * 5 * 7 * 4
            assert batch["names"] == want["names"]
            assert np.array_equal(batch["array"], want["array"])
            assert inside(arena, batch["array"].ctypes.data, batch["array"].nbytes)
            batch["image"].zero_()
            batch["array"][:] = 0
            assert not batch["view"].any()
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


# Opening


def test_the_file_is_named_sealed_and_nowhere_in_the_file_system():
    before = set(os.listdir("/dev/shm"))
    arena, another = Arena(1), Arena(1)
    address = arena.address
    assert address.name != another.address.name
    assert os.readlink(f"/proc/self/fd/{address.fd}") == f"/memfd:{address.name} (deleted)"
    assert not os.get_inheritable(address.fd)
    assert os.fstat(address.fd).st_nlink == 0
    assert set(os.listdir("/dev/shm")) <= before
    for size in (0, 2 * address.nbytes):
        with pytest.raises(PermissionError):
            os.ftruncate(address.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(address.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_address_travels():
    arena = new_arena()
    assert pickle.loads(pickle.dumps(arena.address)) == arena.address
    ArenaWriter.open(pickle.loads(pickle.dumps(arena.address))).close()


def same_name(address):
    return os.memfd_create(address.name)


def same_name_and_content(address):
    fd = os.memfd_create(address.name)
    os.ftruncate(fd, address.nbytes)
    os.pwrite(fd, address.header, 0)
    return fd


def device_file(address):
    return os.open("/dev/null", os.O_RDWR)


@pytest.mark.parametrize("impostor", [same_name, same_name_and_content, device_file])
def test_another_file_under_the_same_descriptor_is_refused(impostor):
    arena = Arena(PAGE)
    fd = impostor(arena.address)
    os.dup2(fd, arena.address.fd, inheritable=False)
    os.close(fd)
    with pytest.raises(ArenaError, match=arena.address.name):
        ArenaWriter.open(arena.address)


def test_what_has_not_our_name_is_not_even_opened(monkeypatch):
    """Opening a stranger's device or pipe can have effects."""
    arena = Arena(PAGE)
    address = dataclasses.replace(arena.address, name=Arena(PAGE).address.name)
    opened: list[str] = []
    monkeypatch.setattr(os, "open", lambda path, *_: opened.append(path))
    with pytest.raises(ArenaError, match="must be rayloader-arena-"):
        ArenaWriter.open(address)
    assert opened == []


def test_a_file_whose_header_was_overwritten_is_refused():
    arena = Arena(PAGE)
    os.pwrite(arena.address.fd, b"something", 0)
    with pytest.raises(ArenaError):
        ArenaWriter.open(arena.address)


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


def test_slots_are_whole_pages_and_disjoint_and_run_out():
    arena = Arena(3 * PAGE)
    slots = [arena.take(nbytes) for nbytes in (1, PAGE, 0)]
    assert [(slot.offset, slot.nbytes) for slot in slots] == [(PAGE, PAGE), (2 * PAGE, PAGE), (3 * PAGE, PAGE)]
    assert arena.take(1) is None
    arena.release_call(slots[1])
    assert arena.take(2 * PAGE) is None
    again = arena.take(PAGE)
    assert again[:2] == slots[1][:2]
    assert again.ticket != slots[1].ticket


def test_the_lowest_stretch_that_fits_is_taken():
    arena = Arena(8 * PAGE)
    slots = [arena.take(nbytes * PAGE) for nbytes in (1, 2, 1, 2, 1)]
    for index in (3, 1):
        arena.release_call(slots[index])
    assert arena.take(2 * PAGE).offset == slots[1].offset
    assert arena.take(PAGE).offset == slots[3].offset


def test_a_view_must_lie_in_its_slot():
    arena = new_arena()
    slot = arena.take(PAGE)
    assert arena.view(slot, PAGE - 8, 8).nbytes == 8
    for place in [(0, PAGE + 1), (PAGE, 1), (-1, 1), (8, -1)]:
        with pytest.raises(ValueError, match="must lie in"):
            arena.view(slot, *place)
    arena.release_call(slot)
    with pytest.raises(KeyError):
        arena.view(slot, 0, 8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 9 * PAGE), st.tuples(st.integers(0, 99), st.booleans())), max_size=60))
def test_slots_never_overlap_and_all_room_comes_back(steps):
    """A number takes that many bytes; a tuple says which slot's call is released and whether its view is dropped."""
    arena = Arena(24 * PAGE)
    unanswered, views, owners = {}, {}, {}
    for number, step in enumerate(steps):
        if isinstance(step, int):
            slot = arena.take(step)
            if slot is None:
                continue
            assert slot.nbytes >= step
            pages = set(range(slot.offset // PAGE, (slot.offset + slot.nbytes) // PAGE))
            assert min(pages) >= 1
            assert max(pages) <= 24
            in_use = {page for key in unanswered.keys() | views.keys() for page in owners[key]}
            assert not pages & in_use
            owners[number] = pages
            unanswered[number] = slot
            views[number] = arena.view(slot, 0, slot.nbytes)
            np.frombuffer(views[number], np.uint8)[:] = number
        else:
            which, drop_view = step
            table = views if drop_view else unanswered
            if table:
                dropped = table.pop(sorted(table)[which % len(table)])
                if not drop_view:
                    arena.release_call(dropped)
                del dropped
        assert all((np.frombuffer(views[key], np.uint8) == key).all() for key in views)
    views.clear()
    for slot in unanswered.values():
        arena.release_call(slot)
    assert whole(arena) is not None
    assert arena.spoiled == 0


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
    "decoded": lambda t: codec.decode((e := codec.encode(t)).skeleton, e.buffers),
}


@pytest.mark.parametrize("keep", KEEPING.values(), ids=KEEPING)
def test_a_slot_is_free_only_when_the_last_view_died(keep):
    arena = new_arena()
    slot = whole(arena)
    kept = keep(leased_tensor(arena, slot))
    arena.release_call(slot)
    assert arena.take(1) is None
    cycle = isinstance(kept, Cycle)
    del kept
    if cycle:
        assert arena.take(1) is None
        gc.collect()
    assert whole(arena) is not None


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


@pytest.mark.parametrize("keep", ARRAYS.values(), ids=ARRAYS)
def test_the_same_for_arrays(keep):
    arena = new_arena()
    slot = whole(arena)
    kept = keep(leased_array(arena, slot))
    arena.release_call(slot)
    assert arena.take(1) is None
    cycle = isinstance(kept, Cycle)
    del kept
    if cycle:
        assert arena.take(1) is None
        gc.collect()
    assert whole(arena) is not None


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
    "share_memory_": lambda t: t.share_memory_(),
    "storage's clone": lambda t: t.untyped_storage().clone(),
    "arithmetic": lambda t: t + 0,
}


@pytest.mark.parametrize("convert", COPYING.values(), ids=COPYING)
def test_a_copy_keeps_no_slot(convert):
    arena = new_arena()
    slot = whole(arena)
    kept = convert(leased_tensor(arena, slot))
    arena.release_call(slot)
    assert whole(arena) is not None
    content = kept if isinstance(kept, torch.Tensor) else torch.empty(0, dtype=torch.int64).set_(kept)
    assert torch.equal(content, torch.arange(512))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_views_may_die_in_any_order(order):
    arena = new_arena()
    slot = whole(arena)
    tensor = leased_tensor(arena, slot)
    holders = [tensor, tensor.numpy()[3:], tensor.untyped_storage(), None]
    del tensor
    for index in order:
        assert arena.take(1) is None
        if index == 3:
            arena.release_call(slot)
        holders[index] = None
    assert whole(arena) is not None


def test_one_tensor_of_many_keeps_the_whole_slot():
    arena = new_arena()
    slot = whole(arena)
    tensors = [torch.frombuffer(arena.view(slot, 64 * i, 64), dtype=torch.uint8) for i in range(20)]
    arena.release_call(slot)
    while tensors:
        assert arena.take(1) is None
        tensors.pop(len(tensors) // 2)
    assert whole(arena) is not None


def test_a_view_kept_in_another_thread_keeps_the_slot():
    arena = new_arena()
    slot = whole(arena)
    holding, let_go = threading.Event(), threading.Event()

    def hold(box):
        held = box.pop().numpy()
        holding.set()
        assert let_go.wait(HANG_LIMIT_S)
        assert held[511] == 511

    thread = threading.Thread(target=hold, args=([leased_tensor(arena, slot)],))
    thread.start()
    arena.release_call(slot)
    assert holding.wait(HANG_LIMIT_S)
    assert arena.take(1) is None
    let_go.set()
    thread.join(HANG_LIMIT_S)
    assert whole(arena) is not None


def test_many_threads_drop_views_while_slots_are_taken():
    arena = Arena(64 * PAGE)
    handed: list = []
    done = threading.Event()

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
    for number in range(2000):
        if (slot := arena.take(1 + number % 5 * PAGE)) is not None:
            tensor = torch.frombuffer(arena.view(slot, 0, slot.nbytes), dtype=torch.uint8).fill_(number % 251)
            handed.append((tensor, number % 251))
            arena.release_call(slot)
            del tensor
    done.set()
    for thread in threads:
        thread.join(HANG_LIMIT_S)
    assert whole(arena) is not None


def test_an_unanswered_call_keeps_its_slot():
    arena = new_arena()
    slot = whole(arena)
    del slot
    gc.collect()
    assert arena.take(1) is None
    arena = Arena(PAGE)
    slot = whole(arena)
    tensor = torch.frombuffer(arena.view(slot, 0, 64), dtype=torch.uint8)
    del tensor
    assert arena.take(1) is None
    arena.release_call(slot)
    assert whole(arena) is not None


def test_releasing_twice_does_not_free_the_next_calls_slot():
    arena = new_arena()
    first = whole(arena)
    arena.release_call(first)
    second = whole(arena)
    arena.release_call(first)
    assert arena.take(1) is None
    arena.release_call(second)
    assert whole(arena) is not None


def test_a_slot_that_the_worker_still_holds_is_never_reused():
    arena = Arena(2 * PAGE)
    slot = arena.take(PAGE)
    arena.release_call(slot, reuse=False)
    assert arena.take(PAGE).offset != slot.offset
    assert arena.take(1) is None
    assert arena.spoiled == PAGE


def test_taking_and_releasing_keeps_no_memory():
    arena = new_arena()

    def once():
        slot = whole(arena)
        tensor = leased_tensor(arena, slot)
        arena.release_call(slot)
        del tensor

    once()
    gc.collect()
    tracemalloc.start()
    try:
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
from rayloader.transport.arena import Arena
arena = Arena(1 << 20)
slots = [arena.take(1) for _ in range(3)]
kept = [torch.frombuffer(arena.view(slot, 0, 64), dtype=torch.uint8) for slot in slots]
kept.append(kept)
arena.release_call(slots[0])
torch.kept = kept[1].numpy()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


# Closing


def test_after_close_there_are_no_slots_but_leases_live_on():
    arena = Arena(4 * PAGE)
    slot, late = arena.take(PAGE), arena.take(PAGE)
    tensor = leased_tensor(arena, slot)
    arena.release_call(slot)
    arena.close()
    arena.close()
    assert arena.take(1) is None
    array = leased_tensor(arena, late).numpy()  # that call was on its way
    arena.release_call(late)
    del arena
    assert len(mappings()) == 1
    assert torch.equal(tensor, torch.arange(512))
    del tensor
    assert len(mappings()) == 1
    assert array[511] == 511
    del array
    assert (mappings(), descriptors()) == ([], [])


def test_an_arena_that_is_dropped_leaves_nothing():
    arena = Arena(4 * PAGE)
    arena.take(PAGE)
    del arena
    assert (mappings(), descriptors()) == ([], [])


def test_a_writer_that_is_closed_lives_as_long_as_its_tensors():
    arena = new_arena()
    opened = ArenaWriter.open(arena.address)
    slot_writer = opened.writer(arena.take(PAGE))
    tensor = slot_writer.empty((8,), torch.float32)
    assert len(mappings()) == 2
    opened.close()
    opened.close()
    with pytest.raises(ArenaError):
        opened.writer(arena.take(PAGE))
    assert not slot_writer.close()
    tensor.fill_(1)
    del tensor
    assert slot_writer.close()
    assert len(mappings()) == 1


# Forks


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_was_leased_at_a_fork_is_never_reused_and_the_child_gets_no_slots():
    arena = Arena(4 * PAGE)
    slot, unanswered = arena.take(PAGE), arena.take(PAGE)
    tensor = leased_tensor(arena, slot)
    arena.release_call(slot)
    go, ready = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:  # the child has the tensor and looks at it when the parent has done its worst
        status = 1
        try:
            no_slots = arena.take(1) is None
            arena.release_call(unanswered)
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            unchanged = torch.equal(tensor, torch.arange(512))
            del tensor
            gc.collect()
            status = 0 if no_slots and unchanged and arena.take(1) is None else 2
        finally:
            os._exit(status)
    try:
        os.read(ready[0], 1)
        del tensor
        arena.release_call(unanswered)
        for _ in range(3):  # what was free at the fork, and leased after it, goes round as ever
            slots = [arena.take(PAGE), arena.take(PAGE)]
            assert arena.take(1) is None
            assert {taken.offset for taken in slots} == {3 * PAGE, 4 * PAGE}
            for taken in slots:
                np.frombuffer(arena.view(taken, 0, PAGE), np.uint8)[:] = 255
                arena.release_call(taken)
        assert arena.take(3 * PAGE) is None
        assert arena.spoiled == 2 * PAGE
    finally:
        os.write(go[1], b"x")
        _, status = os.waitpid(pid, 0)
        for fd in (*go, *ready):
            os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 0


def test_while_a_thread_forks_nothing_is_leased():
    arena = new_arena()
    module._before_fork()
    try:
        assert arena.take(1) is None
    finally:
        module._after_fork()
    assert arena.take(1) is not None


def test_a_lease_that_a_fork_may_have_seen_half_made_is_not_reused(monkeypatch):
    """The process forks on another thread while this one is inside `take`."""
    arena = new_arena()

    class Lease(module._Lease):
        def __init__(self, *args):
            module._before_fork()
            module._after_fork()
            super().__init__(*args)

    monkeypatch.setattr(module, "_Lease", Lease)
    arena.release_call(arena.take(PAGE))
    assert arena.take(4 * PAGE) is None
    assert arena.spoiled == PAGE


# Writing


def test_room_is_given_out_aligned_and_once():
    writer = new_writer()
    first, second = writer.allocate(3), writer.allocate(64)
    first[:], second[:] = b"abc", bytes(range(64))
    assert writer.used == 128
    third = writer.allocate(4 * PAGE - 128)
    assert writer.used == third.nbytes + 128
    third[:] = bytes(third.nbytes)
    assert (bytes(first), bytes(second)) == (b"abc", bytes(range(64)))
    assert writer.allocate(1) is None
    assert writer.empty((1,), torch.uint8) is None
    assert writer.place(memoryview(b"x")) is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_in_the_slot_of_any_dtype(dtype):
    writer = new_writer()
    writer.allocate(1)
    tensor = writer.empty((3, 2), dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 2), dtype, True)
    assert tensor.data_ptr() % 64 == 0
    encoded = codec.encode(tensor)
    assert writer.place(encoded.buffers[0]) == (64, 6 * dtype.itemsize)


def test_a_scalar_and_no_elements():
    writer = new_writer()
    assert writer.empty((), torch.float64).shape == ()
    assert writer.empty((0, 3), torch.float64) is None


def test_what_is_in_the_slot_stays_there_and_what_is_not_is_copied_once():
    arena = new_arena()
    slot = arena.take(4 * PAGE)
    writer = ArenaWriter.open(arena.address).writer(slot)
    inner = writer.empty((16, 10), torch.float32).copy_(torch.arange(160.0).view(16, 10))
    outer = torch.arange(300)
    batch = [inner, inner[3:5], outer, outer[::7], np.arange(700)]
    encoded = codec.encode(batch)
    places = [writer.place(buffer) for buffer in encoded.buffers]
    assert places == [(0, 640), (640, 2400), (3072, 5600)]
    assert writer.used == 3072 + 5632
    got = codec.decode(encoded.skeleton, [arena.view(slot, *place) for place in places])
    assert all(torch.equal(g, w) for g, w in zip(got[:4], batch, strict=False))
    assert np.array_equal(got[4], batch[4])
    inner[0, 0] = -1  # the very same memory
    assert got[0][0, 0] == -1


def test_a_part_of_what_is_in_the_slot_is_not_copied():
    writer = new_writer()
    tensor = writer.empty((100,), torch.float32)
    used = writer.used
    assert writer.place(codec.encode(tensor[40:60]).buffers[0]) == (128, 112)
    assert writer.used == used


def test_read_only_and_empty_buffers():
    arena = new_arena()
    slot = arena.take(PAGE)
    writer = ArenaWriter.open(arena.address).writer(slot)
    assert writer.place(memoryview(b"")) == (0, 0)
    assert bytes(arena.view(slot, 0, 0)) == b""
    assert writer.place(memoryview(b"abc")) == (0, 3)
    assert bytes(arena.view(slot, 0, 3)) == b"abc"


def test_what_lies_elsewhere_or_only_in_part_in_the_slot_is_not_in_it():
    arena = new_arena()
    opened = ArenaWriter.open(arena.address)
    one, two = arena.take(PAGE), arena.take(PAGE)
    tensor = torch.frombuffer(arena.view(one, 0, PAGE), dtype=torch.uint8)
    writer = opened.writer(two)
    assert writer.place(codec.encode(tensor).buffers[0]) == (0, PAGE)  # copied: it is in another mapping
    lower = opened.writer(one).empty((PAGE,), torch.uint8)
    assert opened.writer(two).place(codec.encode(lower).buffers[0]) == (0, PAGE)
    both = module._Region(opened._mapping, one.offset, 2 * PAGE).memory()
    assert opened.writer(one).place(both) is None
    assert opened.writer(two).place(both) is None
    assert opened.writer(one).place(both[PAGE - 64 : PAGE]) == (PAGE - 64, 64)


def test_closing_tells_whether_something_still_looks_at_the_slot():
    arena = new_arena()
    opened = ArenaWriter.open(arena.address)
    writer = opened.writer(arena.take(PAGE))
    kept = writer.empty((8,), torch.float32).numpy()[2:]
    assert not writer.close()
    assert writer.allocate(1) is None
    assert kept.shape == (6,)
    writer = opened.writer(arena.take(PAGE))
    batch = writer.empty((8,), torch.float32)
    encoded = codec.encode(batch)
    writer.place(encoded.buffers[0])
    del batch, encoded
    assert writer.close()


# Collating


def cl(*size):
    return torch.randn(*size).contiguous(memory_format=torch.channels_last)


def sliced(tensor):
    return torch.cat([tensor, tensor])[: len(tensor)]


# name: (an element, whether it is stacked into the slot)
KINDS = {
    **{str(d): (lambda d=d: torch.randint(0, 2, (3, 4)).to(d), True) for d in (torch.uint8, torch.bool, torch.int64)},
    **{str(d): (lambda d=d: torch.randn(3, 4).to(d), True) for d in (torch.float16, torch.bfloat16, torch.complex64)},
    "fp8": (lambda: torch.randn(3, 4).to(torch.float8_e4m3fn), True),
    "0-d": (lambda: torch.randn(()), True),
    "1-d": (lambda: torch.randn(7), True),
    "3-d": (lambda: torch.randn(3, 8, 9), True),
    "4-d": (lambda: torch.randn(2, 3, 4, 5), True),
    "5-d": (lambda: torch.randn(2, 3, 4, 5, 2), True),
    "6-d": (lambda: torch.randn(1, 2, 3, 1, 2, 2), True),
    "4-d of ones": (lambda: torch.randn(2, 1, 1, 5), True),
    "4-d one channel": (lambda: torch.randn(2, 1, 4, 5), True),
    "channels-last of one channel": (lambda: cl(2, 1, 4, 5), True),
    "channels-last of one pixel": (lambda: cl(2, 3, 1, 1), True),
    "not a number": (lambda: torch.full((3,), torch.nan), True),
    "image as HWC": (lambda: torch.randn(8, 9, 3).permute(2, 0, 1), True),
    "transposed": (lambda: torch.randn(3, 4).t(), True),
    "expanded": (lambda: torch.randn(1).expand(4), True),
    "sliced": (lambda: sliced(torch.randn(4, 5)), True),
    "strided": (lambda: torch.randn(8)[::2], True),
    "conj": (lambda: torch.randn(3, dtype=torch.complex64).conj(), True),
    "neg": (lambda: torch.randn(3, dtype=torch.complex64).conj().imag, True),
    "channels-last": (lambda: cl(2, 3, 8, 9), False),
    "channels-last of a column": (lambda: cl(2, 3, 4, 1), False),
    "channels-last 3-d": (lambda: torch.randn(2, 3, 2, 3, 4).to(memory_format=torch.channels_last_3d), False),
    "no elements": (lambda: torch.empty(0, 3), False),
    "parameter": (lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False), False),
    "grad": (lambda: torch.randn(3, requires_grad=True), False),
    "sparse": (lambda: torch.randn(3, 3).to_sparse(), False),
    "meta": (lambda: torch.empty(3, device="meta"), False),
    "mkldnn": (lambda: torch.randn(3, 3).to_mkldnn(), False),
}


def bits(tensor):
    if tensor.is_meta:
        return b""
    return codec.encode(tensor.detach().resolve_conj().resolve_neg().clone().contiguous()).buffers


def outcome(function, *args, **kwargs):
    """What a call gives, or raises, as something to compare."""
    try:
        tensor = function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    properties = type(tensor), tensor.dtype, tensor.shape, tensor.layout, tensor.device, tensor.requires_grad
    content = [bytes(b) for b in bits(tensor)]
    return (*properties, tensor.stride(), tensor.is_conj(), tensor.is_neg(), content)


def stacks_like_torch(writer, elements):
    """Compares with torch's collate; returns whether the result lies in the slot."""
    stacking = collate_into(writer, default_collate_fn_map)
    assert outcome(collate, elements, collate_fn_map=stacking) == outcome(default_collate, elements)
    try:
        tensor = collate(elements, collate_fn_map=stacking)
    except Exception:
        return False
    start = writer._start
    return tensor.layout is torch.strided and start <= tensor.data_ptr() < start + writer._memory.nbytes


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*deprecated.*:UserWarning")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_stacking_is_torchs_bit_for_bit(kind, count):
    writer = new_writer()
    make, in_slot = KINDS[kind]
    assert stacks_like_torch(writer, [make() for _ in range(count)]) == in_slot


def nested():
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])


def quantized():
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


PLAIN = torch.arange(6.0)
MIXED = {
    "shapes": lambda: [PLAIN, PLAIN[:5]],
    "shapes of one size": lambda: [PLAIN.view(2, 3), PLAIN.view(3, 2)],
    "dims": lambda: [PLAIN, PLAIN[:1], torch.tensor(1.0)],
    "dtypes": lambda: [PLAIN, PLAIN.double()],
    "dtypes, wide one first": lambda: [PLAIN.double(), PLAIN],
    "devices": lambda: [PLAIN, PLAIN.to("meta")],
    "devices, meta first": lambda: [PLAIN.to("meta"), PLAIN],
    "layouts": lambda: [PLAIN.view(2, 3), PLAIN.view(2, 3).to_sparse()],
    "grad in the last": lambda: [PLAIN, PLAIN.clone().requires_grad_()],
    "parameter in the last": lambda: [PLAIN, torch.nn.Parameter(PLAIN.clone())],
    "subclass": lambda: [PLAIN, PLAIN.as_subclass(type("Marked", (torch.Tensor,), {}))],
    "memory formats": lambda: [cl(2, 3, 4, 5), torch.randn(2, 3, 4, 5)],
    "nested": lambda: [nested(), nested()],
    "nested in the last": lambda: [PLAIN, nested()],
    "quantized": lambda: [quantized(), quantized()],
    "an array": lambda: [PLAIN, PLAIN.numpy()],
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*deprecated.*:UserWarning")
@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_what_is_not_plain_and_alike_goes_to_torchs_entry(make):
    writer = new_writer()
    assert not stacks_like_torch(writer, make())


def test_grad_under_no_grad_stacks_as_torch_does():
    writer = new_writer()
    with torch.no_grad():
        stacks_like_torch(writer, [torch.randn(3, requires_grad=True) for _ in range(2)])


def test_inference_tensors_stack_as_torch_does():
    writer = new_writer()
    with torch.inference_mode():
        elements = [torch.randn(3) for _ in range(2)]
    stacks_like_torch(writer, elements)


def test_another_default_device_changes_nothing():
    writer = new_writer()
    elements = [torch.randn(3) for _ in range(2)]
    with torch.device("meta"):
        assert stacks_like_torch(writer, elements)


def test_without_room_torchs_entry_is_called():
    writer = new_writer()
    elements = [torch.zeros(PAGE // 4) for _ in range(5)]
    assert not stacks_like_torch(writer, elements)
    assert stacks_like_torch(writer, elements[:2])  # takes half
    writer.allocate(2 * PAGE - writer.used % PAGE - 64)
    assert not stacks_like_torch(writer, elements[:3])


Pair = namedtuple("Pair", "left right")


def test_structures_and_arrays_are_collated_into_the_slot_and_not_copied_again():
    writer = new_writer()

    def sample(i):
        return {
            "pair": Pair(torch.full((3,), i), np.full((2, 2), i, np.int16)),
            "scalars": (i, float(i), np.float32(i), f"{i}"),
            "list": [torch.tensor(i)],
        }

    samples = [sample(i) for i in range(5)]
    got = collate(samples, collate_fn_map=collate_into(writer, default_collate_fn_map))
    want = default_collate(samples)
    assert type(got["pair"]) is Pair
    assert got["scalars"][3] == want["scalars"][3]
    tensors = [*got["pair"], *got["scalars"][:3], *got["list"]]
    wanted = [*want["pair"], *want["scalars"][:3], *want["list"]]
    assert all(outcome(lambda g=g: g) == outcome(lambda w=w: w) for g, w in zip(tensors, wanted, strict=True))
    used = writer.used
    for tensor in (*got["pair"], *got["list"]):
        offset, nbytes = writer.place(codec.encode(tensor).buffers[0])
        assert offset + nbytes <= used
    assert writer.used == used


def test_a_tensor_entry_of_the_users_stays():
    writer = new_writer()

    def mine(batch, *, collate_fn_map=None):
        return "mine"

    given_map = {**default_collate_fn_map, torch.Tensor: mine}
    assert collate([PLAIN], collate_fn_map=collate_into(writer, given_map)) == "mine"
    assert collate([PLAIN.numpy()], collate_fn_map=collate_into(writer, given_map)) == "mine"
    assert collate_into(writer, {}) == {}
    assert writer.used == 0


def test_the_users_entries_never_see_slot_memory():
    writer = new_writer()

    class Sample:
        def __init__(self, tensor):
            self.tensor = tensor

    kept, maps = [], []

    def collate_samples(batch, *, collate_fn_map=None):
        maps.append(collate_fn_map)
        kept.append(collate([sample.tensor for sample in batch], collate_fn_map=collate_fn_map))
        return kept[-1]

    given_map = {**default_collate_fn_map, Sample: collate_samples}
    got = collate([[Sample(PLAIN), PLAIN]] * 2, collate_fn_map=collate_into(writer, given_map))
    assert maps == [given_map]
    assert maps[0] is given_map
    assert torch.equal(kept[0], torch.stack([PLAIN] * 2))
    assert writer.used == 64  # the other one
    del got
    assert writer.close()


def test_the_given_map_is_left_alone_and_keeps_its_order():
    writer = new_writer()
    before = dict(default_collate_fn_map)
    stacking = collate_into(writer, default_collate_fn_map)
    assert default_collate_fn_map == before
    assert list(stacking) == list(before)
    assert [key for key in before if stacking[key] is not before[key]] == [torch.Tensor]


def test_the_fallback_is_the_given_maps_entry():
    writer = new_writer()

    def entry(batch, *, collate_fn_map=None):
        return batch

    entry.__module__ = "rayloader.worker"
    stacking = collate_into(writer, {torch.Tensor: entry})
    elements = [PLAIN, PLAIN[:2]]
    assert collate(elements, collate_fn_map=stacking) is elements
