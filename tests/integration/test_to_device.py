"""Batches that are pinned, born page-locked or moved to a device, with workers and a simulated accelerator."""

import functools
import gc
import threading
import time
import types

import pytest
import torch
import torch.utils.data

import rayloader.actors.actors
from probes import Calls, Stream, load
from rayloader import BatchTimeoutError, DataLoader
from rayloader.actors import pool
from rayloader.epoch import ahead, engine
from rayloader.observe.stats import nbytes
from simulated_device import LIMIT_S, SimulatedAccelerator

pytestmark = pytest.mark.usefixtures("ray_session")
LARGE = 50_000  # numbers: more than a small buffer
PIN, MOVE = {"pin_memory": True}, {"device": "cuda"}


@pytest.fixture
def accelerator(monkeypatch):
    accelerator = SimulatedAccelerator().install(monkeypatch)
    yield accelerator
    gc.collect()
    for actor in pool.get_pool().actors:
        actor.lane.close()  # warm workers get other arenas in the next test, without this one's page-locks
    accelerator.advance(accelerator.queued)
    assert (accelerator.torn, accelerator.violations) == ([], [])


def large(index):
    return torch.full((LARGE,), index)


def values(batches):
    assert all(batch.eq(batch[0]).all() for batch in batches)
    return [int(batch[0]) for batch in batches]


def seen(accelerator, loader):
    """Which batches of an epoch lie in page-locked memory of workers, if each is dropped before the next is taken."""
    found, locked = [], []
    for batch in loader:
        found += values([batch])
        locked.append(accelerator.holds(batch))
        del batch
    assert found == list(range(len(loader)))
    return locked


# Page-locked memory


@pytest.mark.parametrize(
    ("options", "local", "least"),
    [({"persistent_workers": True}, True, 30), ({"arenas": False}, True, 20), ({}, False, 20)],
    ids=["arenas, persistent", "Ray's store", "network"],
)
def test_large_tensors_are_born_page_locked_where_others_were_before(accelerator, monkeypatch, options, local, least):
    monkeypatch.setattr(rayloader.actors.actors, "LOCAL_LINES", local)
    loader = load(large, 60, num_workers=2, prefetch_factor=2, **PIN, **options)
    for _ in range(2):
        seen(accelerator, load(large, 4, num_workers=2))  # shares the workers, and pins nothing
        locked = seen(accelerator, loader).count(True)
        assert locked >= least
        assert loader.stats().epoch.page_locked == locked
    total = loader.stats().total
    assert total.page_locked + accelerator.pinned == 120
    assert total.locked_bytes == sum(accelerator.lockings)
    assert f", {locked / 60:.0%} in {nbytes(total.locked_bytes)} page-locked\n" in str(loader.stats())


def test_without_room_for_locked_memory_a_thread_copies_and_a_warning_says_why(accelerator, caplog):
    accelerator.refuses = "out of memory"
    assert seen(accelerator, load(large, 60, num_workers=2, prefetch_factor=2, **PIN)) == [False] * 60
    assert accelerator.pinned == 60
    (record,) = [record for record in caplog.records if "page-locked" in record.message]
    assert "(out of memory)" in record.message
    assert "ulimit -l" in record.message
    assert not accelerator.can_register


# Order, and how far ahead


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned_in_order_in_one_thread_for_the_current_device(monkeypatch, persistent):
    accelerator = SimulatedAccelerator().install(monkeypatch, index=3)
    loader = DataLoader(range(10), 2, num_workers=2, persistent_workers=persistent, **PIN)
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[k, k + 1] for k in range(0, 10, 2)]
    assert (accelerator.threads, accelerator.devices, accelerator.pinned) == ({"rayloader-ahead"}, {3}, 10)
    dataset = Stream(lambda worker: (torch.tensor(10 * worker + k) for k in range(2 + worker)))
    batches = list(DataLoader(dataset, None, num_workers=2, in_order=False, **PIN))
    assert (sorted(map(int, batches)), accelerator.pinned) == ([0, 1, 10, 11, 12], 15)


@pytest.mark.parametrize("arenas", [True, False])
def test_batches_are_copied_in_order_while_graphs_are_captured_and_the_state_is_what_was_taken(accelerator, arenas):
    """The simulated accelerator notes what would make the graphs invalid."""
    loader = load(large, 40, num_workers=2, arenas=arenas, **MOVE)
    assert loader.device == "cuda"
    found = []
    for batch in loader:
        accelerator.captures = True
        found += values([batch])
        accelerator.wait_for(queued=min(40, len(found) + 2))  # the thread ahead goes on meanwhile
        accelerator.captures = False
        if len(found) == 10:
            state = loader.state_dict()
    assert found == list(range(40))
    assert (accelerator.queued, accelerator.waits, accelerator.pinned) == (40, 40, 0)
    again = load(large, 40, num_workers=2)
    again.load_state_dict(state)
    assert values(list(again)) == list(range(10, 40))


@pytest.mark.parametrize(
    ("options", "bound", "count"),
    [(PIN, 2, "pinned"), (MOVE, 2, "queued"), ({**MOVE, "prefetch_to_device": 3}, 3, "queued")],
)
def test_so_many_batches_are_prepared_ahead_and_no_more(accelerator, options, bound, count):
    iterator = iter(load(torch.tensor, 12, num_workers=2, prefetch_factor=6, **options))
    for taken in range(12):
        accelerator.wait_for(**{count: min(12, taken + bound)})
        assert getattr(accelerator, count) <= taken + bound
        assert int(next(iterator)) == taken


def test_page_locking_does_not_count_towards_the_timeout_and_pinning_does_as_in_torchs_loader(accelerator, monkeypatch):
    clock = types.SimpleNamespace(passed=0.0, perf_counter=time.perf_counter)
    clock.monotonic = lambda: time.monotonic() + clock.passed
    asked, pinning = threading.Semaphore(0), threading.Event()
    deadline, register = engine.Engine._deadline, accelerator.register

    def slow(address, nbytes):
        monkeypatch.setattr(accelerator, "register", register)
        clock.passed += 1000.0
        while asked.acquire(blocking=False):
            pass
        for _ in range(4):  # the program looks at the clock again, and waits on
            assert asked.acquire(timeout=LIMIT_S)
        register(address, nbytes)

    def pins(tensor, device=None):
        clock.passed += 1000.0
        assert pinning.wait(LIMIT_S)
        return tensor

    for module in (engine, ahead):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(engine.Engine, "_deadline", lambda *args: asked.release() or deadline(*args))
    monkeypatch.setattr(accelerator, "register", slow)
    assert any(seen(accelerator, load(large, 60, num_workers=1, timeout=500, prefetch_factor=2, **PIN)))
    assert clock.passed == 1000.0
    monkeypatch.setattr(torch.Tensor, "pin_memory", pins)
    iterator = iter(load(torch.tensor, 1, timeout=500, **PIN))
    with pytest.raises(BatchTimeoutError, match="timed out after 500 seconds"):
        next(iterator)
    pinning.set()
    assert int(next(iterator)) == 0


# What is in a batch, and its errors


def within_itself(index):
    batch = [torch.tensor(index)]
    return batch if index != 1 else batch.append(batch) or batch


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [PIN, MOVE])
def test_a_list_that_contains_itself_is_an_error_in_its_turn_as_in_torchs_pinning(accelerator, options, num_workers):
    iterator = iter(load(within_itself, 3, num_workers=num_workers, **options))
    assert next(iterator) == [torch.tensor(0)]
    with pytest.raises(RecursionError):
        next(iterator)
    assert next(iterator) == [torch.tensor(2)]


class Custom:
    """Pins and moves itself; `fails` names the method that raises an error for sample 1."""

    def __init__(self, index, fails="", error=None):
        self.index, self.fails, self.error = index, fails, error

    def _does(self, name):
        if (self.index, self.fails) == (1, name):
            raise self.error
        return self

    def pin_memory(self):
        return self._does("pin_memory")

    def to(self, device):
        return self._does("to")


class Recordable(Custom):
    """Also knows how to record its memory."""

    def record_stream(self, stream):
        self._does("record_stream")


@pytest.mark.parametrize(("error", "text"), [(ValueError, "as planned"), (StopIteration, "StopIteration")])
@pytest.mark.parametrize(
    ("kind", "fails", "options", "where"),
    [
        (Custom, "pin_memory", PIN, r"in pin memory thread for device 0\."),
        (Custom, "to", MOVE, r"while a batch was copied to device cuda:0\."),
        (Recordable, "to", MOVE, r"while a batch was copied to device cuda:0\."),
        (Recordable, "record_stream", MOVE, r"while a batch was copied to device cuda:0\."),
        (Custom, "pin_memory", {**PIN, "num_workers": 0}, ""),
        (Custom, "to", {**MOVE, "num_workers": 0}, ""),
    ],
)
def test_an_error_comes_in_its_turn_and_ends_no_loop(accelerator, error, text, kind, fails, options, where):
    function = functools.partial(kind, fails=fails, error=error("as planned"))
    iterator = iter(load(function, 3, **{"num_workers": 1, **options}))
    assert next(iterator).index == 0
    with pytest.raises(RuntimeError if error is StopIteration else error, match=rf"(?s){where}.*{text}"):
        next(iterator)
    assert next(iterator).index == 2


# Which device


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_device_that_is_not_there_is_an_error_that_says_so(monkeypatch, num_workers):
    assert values(list(load(large, 2, num_workers=num_workers, device="cpu"))) == [0, 1]  # where nothing is done
    accelerator, before = SimulatedAccelerator(), torch.get_rng_state()
    for device, found in [
        ("cuda", "none; leave it out"),
        ("cuda:7", "1 of type 'cuda', with numbers from 0"),
        ("cuda:99999", "1 of type 'cuda'"),
    ]:
        loader = DataLoader(range(4), num_workers=num_workers, device=device)
        with pytest.raises(ValueError, match=f"that torch finds here, got '{device}', and torch finds {found}"):
            iter(loader)
        accelerator.install(monkeypatch)
    assert torch.get_rng_state().equal(before)
    assert [batch.tolist() for batch in DataLoader(range(4), 2, **MOVE)] == [[0, 1], [2, 3]]
    assert accelerator.moved == 2


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"device": "gpu"}, RuntimeError, "device type at start of device string: gpu"),
        ({"prefetch_to_device": 2}, ValueError, "prefetch_to_device=2 needs a device to which batches are moved; pass"),
        ({"prefetch_to_device": 0}, ValueError, "prefetch_to_device must be a whole number >= 1"),
        ({"prefetch_to_device": 2.0}, TypeError, "prefetch_to_device must be a whole number >= 1"),
    ],
)
def test_wrong_arguments_are_errors_when_the_loader_is_made_or_patched(wrong, error, text):
    for takes in (rayloader.patch, lambda **wrong: DataLoader(range(4), **wrong)):
        with pytest.raises(error, match=text):
            takes(**wrong)


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_goes_to_the_device_that_is_set_and_current_then(accelerator, monkeypatch, persistent):
    current, devices, copy = [0], [], accelerator.copy
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(accelerator, "copy", lambda leaf, device: devices.append(device.index) or copy(leaf, device))
    loader = load(torch.tensor, 2, num_workers=1, persistent_workers=persistent, **MOVE)
    for current[0], loader.device, expected in [(0, "cuda", 0), (1, "cuda", 1), (1, "cuda:0", 0), (1, None, None)]:
        assert list(loader) == [torch.tensor(0), torch.tensor(1)]
        assert devices == [expected] * 2 * (expected is not None)
        devices.clear()
    for loader.device, error in ("cuda:2", ValueError), ("gpu", RuntimeError):
        with pytest.raises(error):
            iter(loader)


def test_a_patch_moves_the_batches_of_torchs_loaders(accelerator):
    own = type("OwnLoader", (torch.utils.data.DataLoader,), {"device": "elsewhere"})  # which means something else
    for loader_class, device in (torch.utils.data.DataLoader, "cuda"), (own, "elsewhere"):
        with rayloader.patch(device="cuda"), rayloader.patch(prefetch_to_device=1):
            loader = loader_class(Calls(large, 4), None, num_workers=2)
            assert values(list(loader)) == [0, 1, 2, 3]
        assert loader.device == device
    assert accelerator.waits == 8
