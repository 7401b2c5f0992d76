"""Batches that are born page-locked, and batches on a device, with workers and a simulated accelerator."""

import collections
import dataclasses
import gc
import threading
import time

import pytest
import torch
import torch.utils.data

import rayloader.actors.actors
from accelerator import LIMIT
from inside import kill_worker
from probes import Calls, as_is, load
from rayloader import DataLoader
from rayloader.actors import pool
from rayloader.epoch import ahead, engine
from rayloader.observe.stats import nbytes
from simulated_device import DEVICE, SimulatedAccelerator

pytestmark = pytest.mark.usefixtures("ray_session")
LARGE = 50_000  # numbers: more than a small buffer


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
        locked.append(accelerator.is_locked(batch.data_ptr(), batch.nbytes))
        del batch
    assert found == list(range(len(loader)))
    return locked


# pin_memory


@pytest.mark.parametrize("persistent", [False, True])
def test_large_tensors_are_born_page_locked_where_others_were_before(accelerator, persistent):
    loader = load(large, 60, num_workers=2, pin_memory=True, persistent_workers=persistent, prefetch_factor=2)
    for _ in range(2):
        locked = seen(accelerator, loader)
        assert locked.count(True) >= 30
        epoch = loader.stats().epoch
        assert epoch.page_locked == locked.count(True)
    total = loader.stats().total
    assert total.locked_bytes == sum(locking.nbytes for locking in accelerator.lockings) > 0
    assert total.page_locked + accelerator.pinned == 120
    assert f", {locked.count(True) / 60:.0%} in {nbytes(total.locked_bytes)} page-locked\n" in str(loader.stats())
    accelerator.assert_locked_at_leisure()


@pytest.mark.parametrize("option", [{"pin_memory": True}, {"device": "cuda"}], ids=["pin_memory", "device"])
def test_training_stands_still_for_less_than_a_tenth_of_the_time(accelerator, option):
    """By the simulated clock, on which locking a slot takes as long as on a GPU."""
    accelerator.takes_time, accelerator.at_each_query = True, 2
    loader = load(larger, 150, num_workers=2, persistent_workers=True, prefetch_factor=2, **option)
    steps, before = [], 0.0
    for batch in loader:
        del batch
        accelerator.train(0.002)
        steps.append(accelerator.seconds - before)
        before = accelerator.seconds
    accelerator.assert_locked_at_leisure()
    locking = [locking.ended - locking.began for locking in accelerator.lockings]
    assert len(locking) > 4
    assert sum(locking) <= sum(steps) / 10 + max(locking)
    assert max(steps) < 0.002 + 2 * max(locking)
    copied = accelerator.pinned + accelerator.staged
    assert loader.stats().epoch.page_locked + copied == 150
    assert copied < 100
    accelerator.takes_time = False


def larger(index):
    return torch.full((20 * LARGE,), index)


def test_small_tensors_are_copied_to_page_locked_memory(accelerator):
    batches = list(load(torch.tensor, 4, num_workers=2, pin_memory=True))
    assert (batches, accelerator.pinned) == ([torch.tensor(k) for k in range(4)], 4)


def test_batches_of_rays_store_are_received_in_page_locked_memory(accelerator):
    locked = seen(accelerator, load(large, 60, num_workers=2, pin_memory=True, prefetch_factor=2, arenas=False))
    assert locked.count(True) >= 20
    assert accelerator.pinned == locked.count(False)


def test_batches_from_the_network_are_received_in_page_locked_memory(accelerator, monkeypatch):
    monkeypatch.setattr(rayloader.actors.actors, "LOCAL_LINES", False)
    locked = seen(accelerator, load(large, 60, num_workers=2, pin_memory=True, prefetch_factor=2))
    assert locked.count(True) >= 20


def test_without_room_for_locked_memory_a_thread_copies_and_a_warning_says_why(accelerator, caplog):
    accelerator.refuses = "out of memory"
    assert seen(accelerator, load(large, 60, num_workers=2, pin_memory=True, prefetch_factor=2)) == [False] * 60
    assert accelerator.pinned == 60
    (record,) = [record for record in caplog.records if "page-locked" in record.message]
    assert "ulimit -l" in record.message


class Clock:
    """The clock of the engine and of the thread ahead."""

    def __init__(self):
        self.passed = 0.0
        self.perf_counter = time.perf_counter

    def monotonic(self):
        return time.monotonic() + self.passed


def test_page_locking_does_not_count_towards_the_timeout(accelerator, monkeypatch):
    clock, asked = Clock(), threading.Semaphore(0)
    deadline, register = engine.Engine._deadline, accelerator.register

    def noted(*args):
        asked.release()
        return deadline(*args)

    def slow(address, nbytes):
        monkeypatch.setattr(accelerator, "register", register)
        clock.passed += 1000.0
        while asked.acquire(blocking=False):
            pass
        for _ in range(4):  # the program looks at the clock again, and waits on
            assert asked.acquire(timeout=LIMIT)
        register(address, nbytes)

    for module in (engine, ahead):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(engine.Engine, "_deadline", noted)
    monkeypatch.setattr(accelerator, "register", slow)
    assert any(seen(accelerator, load(large, 60, num_workers=1, pin_memory=True, timeout=500, prefetch_factor=2)))
    assert clock.passed == 1000.0


def test_loaders_that_pin_and_others_share_warm_workers(accelerator):
    for pin in (False, True, False, True):
        locked = seen(accelerator, load(large, 60, num_workers=2, pin_memory=pin, prefetch_factor=2))
        assert not pin or locked.count(True) >= 30


def test_a_batch_may_be_dropped_while_the_programs_own_copy_of_it_is_pending(accelerator):
    copies = []
    for batch in load(large, 60, num_workers=2, pin_memory=True):
        copies.append(accelerator.copy(batch, DEVICE))  # as by batch.to("cuda", non_blocking=True)
        del batch
        if len(copies) > 3:
            accelerator.advance()
    accelerator.advance(60)
    assert values(copies) == list(range(60))


def test_a_worker_may_be_killed_while_copies_of_its_batches_are_pending(accelerator):
    copies = []
    iterator = iter(load(large, 20, num_workers=2, pin_memory=True))
    for batch in iterator:
        copies.append(accelerator.copy(batch, DEVICE))
        del batch
        if len(copies) in (6, 12):
            kill_worker(iterator, len(copies) // 12)
    accelerator.advance(20)
    assert values(copies) == list(range(20))


@pytest.mark.parametrize("arenas", [True, False])
def test_graphs_may_be_captured_within_the_loop(accelerator, arenas):
    """The simulated accelerator notes what would make them invalid."""
    found = []
    for batch in load(large, 40, num_workers=2, device="cuda", arenas=arenas):
        accelerator.captures = True
        found += values([batch])
        accelerator.wait_for(min(40, len(found) + 2))  # the thread ahead goes on meanwhile
        accelerator.captures = False
    assert found == list(range(40))


# device


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")])
def test_batches_are_copied_in_order_by_the_thread_ahead(accelerator, device):
    loader = load(large, 8, num_workers=2, device=device)
    assert loader.device == device
    assert values(list(loader)) == list(range(8))
    assert (accelerator.queued, accelerator.waits, accelerator.pinned) == (8, 8, 0)


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    name: str


Pair = collections.namedtuple("Pair", "first second")


class Custom:
    """Moves itself, without a tensor that could be recorded."""

    def __init__(self, index):
        self.index, self.device, self.thread = index, None, None

    def to(self, device):
        self.device, self.thread = device, threading.current_thread().name
        return self


class Recordable(Custom):
    """Also knows how to record its memory."""

    stream = "none"

    def record_stream(self, stream):
        self.stream = stream


def nested(index):
    return {
        "tensors": [torch.tensor(index), (large(index), "text")],
        "pair": Pair(torch.tensor([index]), None),
        "sample": Sample(torch.tensor([1.5]), "name"),
        "custom": Custom(index),
        "recordable": Recordable(index),
        "sparse": torch.eye(2).to_sparse(),
    }


def test_structures_stay_and_what_is_in_them_is_moved(accelerator):
    main = threading.current_thread().name
    for batch in load(nested, 4, num_workers=2, device="cpu"):
        assert batch["custom"].device is None
    accelerator.move_anything(DEVICE)
    for index, batch in enumerate(load(nested, 4, num_workers=2, device="cuda")):
        assert list(batch) == ["tensors", "pair", "sample", "custom", "recordable", "sparse"]
        assert (batch["tensors"][0], batch["tensors"][1][1]) == (torch.tensor(index), "text")
        assert values([batch["tensors"][1][0]]) == [index]
        assert batch["pair"] == Pair(torch.tensor([index]), None)
        assert batch["sample"] == Sample(torch.tensor([1.5]), "name")
        assert (batch["custom"].device, batch["custom"].thread) == (DEVICE, main)
        assert (batch["recordable"].device, batch["recordable"].thread) == (DEVICE, "rayloader-ahead")
        assert batch["recordable"].stream is None  # the simulated accelerator's
        assert batch["sparse"].to_dense().equal(torch.eye(2))


def test_so_many_batches_are_on_the_device_ahead_and_no_more(accelerator):
    iterator = iter(load(large, 12, num_workers=2, prefetch_factor=6, device="cuda", prefetch_to_device=3))
    for taken in range(12):
        assert int(next(iterator)[0]) == taken
        accelerator.wait_for(min(12, taken + 1 + 3))
        assert accelerator.queued <= taken + 1 + 3


def test_the_state_counts_what_was_taken_and_not_what_is_on_the_device(accelerator):
    loader = load(large, 8, num_workers=2, device="cuda")
    iterator = iter(loader)
    assert values([next(iterator), next(iterator)]) == [0, 1]
    accelerator.wait_for(4)
    state = loader.state_dict()
    del iterator
    again = load(large, 8, num_workers=2)
    again.load_state_dict(state)
    assert values(list(again)) == list(range(2, 8))


class Failing(Custom):
    def to(self, device):
        if self.index == 1:
            raise ValueError("as planned")
        return super().to(device)


class FailingAhead(Failing):
    def record_stream(self, stream):
        pass


class FailingToRecord(Custom):
    def record_stream(self, stream):
        if self.index == 1:
            raise ValueError("as planned")


@pytest.mark.parametrize("kind", [Failing, FailingAhead, FailingToRecord])
def test_an_error_arrives_at_the_batch_that_it_belongs_to(accelerator, kind):
    iterator = iter(load(kind, 3, num_workers=1, device="cuda"))
    assert next(iterator).index == 0
    with pytest.raises(ValueError, match=r"(?s)Caught ValueError while a batch was copied to device cuda:0\..*as pla"):
        next(iterator)
    assert next(iterator).index == 2


class Stopping(Custom):
    def to(self, device):
        if self.index == 1:
            raise StopIteration("as planned")
        return super().to(device)


class StoppingAhead(Stopping):
    def record_stream(self, stream):
        pass


class StoppingToRecord(Custom):
    def record_stream(self, stream):
        if self.index == 1:
            raise StopIteration("as planned")


@pytest.mark.parametrize("kind", [Stopping, StoppingAhead, StoppingToRecord])
def test_what_would_end_the_programs_loop_is_an_error_as_out_of_a_generator(accelerator, kind):
    iterator = iter(load(kind, 3, num_workers=1, device="cuda"))
    assert next(iterator).index == 0
    with pytest.raises(RuntimeError, match=r"(?s)copied to device cuda:0\..*StopIteration: as planned"):
        next(iterator)
    assert next(iterator).index == 2


def test_that_holds_without_workers_too(accelerator):
    iterator = iter(load(Stopping, 3, num_workers=0, device="cuda"))
    assert next(iterator).index == 0
    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, StopIteration)
    assert next(iterator).index == 2


def endless_at_1(index):
    batch = [torch.tensor(index)]
    if index == 1:
        batch.append(batch)
    return batch


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("options", [{"device": "cuda"}, {"pin_memory": True}])
def test_a_list_that_contains_itself_is_an_error_in_its_turn_as_in_torchs_pinning(accelerator, options, num_workers):
    accelerator.move_anything(DEVICE)
    iterator = iter(load(endless_at_1, 3, num_workers=num_workers, **options))
    assert next(iterator) == [torch.tensor(0)]
    with pytest.raises(RecursionError):
        next(iterator)
    assert next(iterator) == [torch.tensor(2)]


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"pin_memory": True}])
def test_a_device_that_the_thread_ahead_cannot_use_is_an_error_and_no_hang(accelerator, monkeypatch, options):
    def fail(index):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.accelerator, "set_device_index", fail)
    iterator = iter(load(torch.tensor, 3, num_workers=1, **options))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            next(iterator)


def test_a_workers_error_passes_through(accelerator):
    iterator = iter(load(lambda index: torch.tensor(6 // (index - 1)), 3, num_workers=2, device="cuda"))
    assert next(iterator).item() == -6
    with pytest.raises(ZeroDivisionError, match=r"Caught ZeroDivisionError in DataLoader worker process 1\."):
        next(iterator)
    assert next(iterator).item() == 6


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_leaves_no_thread(accelerator, persistent):
    loader = load(large, 50, num_workers=2, device="cuda", persistent_workers=persistent)
    iterator = iter(loader)
    assert values([next(iterator)]) == [0]
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]
    del iterator, loader
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_on_the_cpu_nothing_is_done(monkeypatch):
    loader = load(large, 4, num_workers=2, device="cpu")
    iterator = iter(loader)
    assert "rayloader-ahead" not in [thread.name for thread in threading.enumerate()]
    assert values(list(iterator)) == [0, 1, 2, 3]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there_is_an_error_that_says_so(num_workers):
    loader = DataLoader(range(4), num_workers=num_workers, device="cuda")
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"that torch finds here, got 'cuda', and torch finds none; leave it out"):
        iter(loader)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("device", ["cuda:7", "cuda:99999"])
def test_an_index_without_a_device_is_an_error_that_says_so(accelerator, num_workers, device):
    with pytest.raises(ValueError, match=rf"got '{device}', and torch finds 1 of type 'cuda', with numbers from 0"):
        iter(DataLoader(range(4), num_workers=num_workers, device=device))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"device": "gpu"}, RuntimeError, "device type at start of device string: gpu"),
        ({"device": 1.5}, TypeError, "device"),
        ({"prefetch_to_device": 2}, ValueError, "prefetch_to_device=2 needs a device to which batches are moved; pass"),
        ({"prefetch_to_device": 0}, ValueError, "prefetch_to_device must be a whole number >= 1"),
        ({"prefetch_to_device": 2.0}, TypeError, "prefetch_to_device must be a whole number >= 1"),
    ],
)
def test_wrong_arguments_are_errors_when_the_loader_is_made(wrong, error, text):
    with pytest.raises(error, match=text):
        DataLoader(range(4), **wrong)


def test_batches_ahead_on_no_device_are_an_error_wherever_the_number_is_set():
    with pytest.raises(ValueError, match="; pass device="):
        rayloader.patch(prefetch_to_device=1)
    with rayloader.patch(device="cpu"), rayloader.patch(prefetch_to_device=1):
        assert torch.utils.data.DataLoader([1]).prefetch_to_device == 1
    loader = DataLoader(range(4), device="cpu", prefetch_to_device=1)
    loader.device = None
    with pytest.raises(ValueError, match="; pass device="):
        iter(loader)


@pytest.mark.parametrize("options", [{}, {"device": "cpu"}, {"device": "cpu", "prefetch_to_device": 3}])
def test_a_loader_may_be_made_anew_from_its_attributes(options):
    loader = DataLoader(range(4), **options)
    given = {name: getattr(loader, name) for name in ("dataset", "device", "prefetch_to_device")}
    assert DataLoader(**given).prefetch_to_device == options.get("prefetch_to_device")


def test_without_workers_batches_are_moved_when_they_are_asked_for(accelerator, monkeypatch):
    moved = []
    accelerator.move_anything(DEVICE, moved)
    loader = DataLoader(Calls(torch.tensor, 4), 2, collate_fn=as_is, device="cuda")
    assert [[int(one) for one in batch] for batch in loader] == [[0, 1], [2, 3]]
    assert moved == [DEVICE] * 4


@pytest.mark.parametrize("persistent", [False, True])
def test_each_epoch_goes_to_the_device_that_is_set_and_current_then(accelerator, monkeypatch, persistent):
    current, devices, copy = [0], [], accelerator.copy
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(accelerator, "copy", lambda leaf, device: devices.append(device.index) or copy(leaf, device))
    loader = load(torch.tensor, 2, num_workers=1, device="cuda", persistent_workers=persistent)
    for current[0], device, expected in [
        (0, "cuda", [0] * 2),
        (1, "cuda", [1] * 2),
        (1, "cuda:0", [0] * 2),
        (1, None, []),
    ]:
        loader.device = device
        assert list(loader) == [torch.tensor(0), torch.tensor(1)]
        assert devices == expected
        devices.clear()
    loader.device = "cuda:2"
    with pytest.raises(ValueError, match="got 'cuda:2', and torch finds 2 of type 'cuda'"):
        iter(loader)
    loader.device = "gpu"
    with pytest.raises(RuntimeError, match="device type at start of device string: gpu"):
        iter(loader)
    loader.device = "cuda"
    assert list(loader) == [torch.tensor(0), torch.tensor(1)]


class OwnLoader(torch.utils.data.DataLoader):
    """A loader of a library's, whose attribute of that name means something else."""

    device = "elsewhere"


@pytest.mark.parametrize("loader_class", [torch.utils.data.DataLoader, OwnLoader])
def test_a_patch_moves_the_batches_of_torchs_loaders(accelerator, loader_class):
    with rayloader.patch(device="cuda", prefetch_to_device=1):
        loader = loader_class(Calls(large, 4), None, num_workers=2)
        assert values(list(loader)) == [0, 1, 2, 3]
    assert accelerator.waits == 4
    assert loader.device == ("cuda" if loader_class is torch.utils.data.DataLoader else "elsewhere")
