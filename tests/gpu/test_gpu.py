"""The real thing: page-locked arenas, batches on the device, and what nobody may write to while it is copied."""

import gc
import os
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import rayloader
from inside import kill_worker
from rayloader import DataLoader
from rayloader.gpu import device as devices
from rayloader.gpu import page_locks
from rayloader.gpu.page_locks import PageLocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
LARGE = 1 << 20  # numbers: 4 MiB of them


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """So that slots are page-locked within the few batches of these tests."""
    monkeypatch.setattr(devices, "PAUSES", 0)


LIMIT_S = 60.0
CYCLES = 40_000_000  # tens of milliseconds of a device that does nothing


class Numbered:
    """Sample i is large, and consists of the number i; also a small part, and a text."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((LARGE,), float(index)), {"small": torch.tensor(index), "text": str(index)}


def loader(length=48, **options):
    """Its slots are page-locked when they are used for the second time: at most the first dozen batches are not."""
    return DataLoader(Numbered(length), batch_size=None, num_workers=2, prefetch_factor=2, **options)


def same(copies):
    """Whether copy i holds the number i everywhere; once they are done."""
    torch.cuda.synchronize()
    return [bool(copied.eq(number).all()) for number, copied in enumerate(copies)]


def in_an_arena(tensor):
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "rayloader-arena" in line
    return False


def wait_for_unlocking():
    for thread in threading.enumerate():
        if thread.name == "rayloader-unlock":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_large_tensors_are_born_page_locked_from_the_second_use_of_their_memory():
    born = []
    for number, (large, rest) in enumerate(loader(pin_memory=True)):
        assert large.is_pinned()
        assert rest["small"].is_pinned()
        born.append(in_an_arena(large))
        assert (float(large[0]), float(large[-1]), int(rest["small"]), rest["text"]) == (number,) * 3 + (str(number),)
        del large
    assert born[0] is False
    assert born[24:] == [True] * 24


def test_the_pace_bounds_how_long_memory_is_being_locked(monkeypatch):
    monkeypatch.setattr(devices, "PAUSES", 10)
    batches = loader(200, pin_memory=True)
    began = time.perf_counter()
    for large, _ in batches:
        assert large.is_pinned()
        del large
    epoch = batches.stats().epoch
    assert epoch.locked_bytes > 0
    assert epoch.locking <= (time.perf_counter() - began) / 5  # a tenth, and the last time


def test_batches_of_rays_store_are_received_in_page_locked_memory():
    for number, (large, _) in enumerate(loader(8, pin_memory=True, arenas=False)):
        assert large.is_pinned()
        assert large.eq(number).all()


def test_a_batch_may_be_dropped_while_the_programs_own_copy_of_it_is_queued():
    copies = []
    for large, _ in loader(pin_memory=True):
        torch.cuda._sleep(CYCLES)
        copies.append(large.to("cuda", non_blocking=True))
        del large
    assert not torch.cuda.current_stream().query()  # the program is ahead of the device, or this shows nothing
    assert all(same(copies))


def test_without_holding_slots_back_the_same_program_gets_torn_batches(monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(PageLocks, "is_locked", lambda *_: False)
    copies = []
    for large, _ in loader(pin_memory=True):
        torch.cuda._sleep(CYCLES)
        copies.append(large.to("cuda", non_blocking=True))
        del large
    assert not all(same(copies))


def test_the_copy_may_be_queued_on_any_stream():
    side, copies = torch.cuda.Stream(), []
    for large, _ in loader(pin_memory=True):
        with torch.cuda.stream(side):
            torch.cuda._sleep(CYCLES)
            copies.append(large.to("cuda", non_blocking=True))
        del large
    assert not side.query()
    assert all(same(copies))


def test_with_an_older_driver_nothing_is_page_locked(monkeypatch):
    monkeypatch.setattr(devices._Driver, "of_this_machine", lambda: None)
    assert not devices.TorchAccelerator("cuda").can_register


def test_a_graph_may_be_captured_within_the_loop():
    ones = torch.ones(1000, device="cuda")
    for number, (large, _) in enumerate(loader(pin_memory=True)):
        copied = large.to("cuda", non_blocking=True)
        del large
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = ones + 1
            for _ in range(1000):  # meanwhile the thread ahead prepares batches
                result += 1
        graph.replay()
        assert result.eq(1002).all()
        assert copied.eq(number).all()


def test_a_worker_may_be_killed_while_copies_of_its_batches_are_queued():
    iterator, copies = iter(loader(pin_memory=True)), []
    for large, _ in iterator:
        torch.cuda._sleep(CYCLES)
        copies.append(large.to("cuda", non_blocking=True))
        del large
        if len(copies) in (6, 12):
            kill_worker(iterator, len(copies) // 12)
    assert all(same(copies))


@pytest.mark.parametrize("options", [{}, {"pin_memory": True}, {"arenas": False}, {"prefetch_to_device": 4}])
def test_batches_arrive_on_the_device_in_the_order_of_the_current_stream(options):
    sums = []
    for number, (large, rest) in enumerate(loader(device="cuda", **options)):
        assert (large.device, rest["small"].device) == (torch.device("cuda", 0),) * 2
        assert rest["text"] == str(number)
        assert large.to("cuda") is large
        sums.append(large.double().mean() + rest["small"] - number)
        torch.cuda._sleep(CYCLES // 10)
        del large, rest  # while what reads them is queued
    assert torch.stack(sums).tolist() == [float(number) for number in range(48)]


def test_they_may_be_used_on_another_stream_that_is_current():
    sums = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for large, _ in loader(device="cuda"):
            torch.cuda._sleep(CYCLES // 10)
            sums.append(large.double().mean())
            del large
    torch.cuda.synchronize()
    assert torch.stack(sums).tolist() == [float(number) for number in range(48)]


def test_objects_with_a_method_to_are_asked_for_it():
    from torch.nn.utils.rnn import PackedSequence, pack_sequence

    def collate(sample):
        return pack_sequence([sample[0][:5], sample[0][:3]])

    for number, packed in enumerate(loader(4, device="cuda", collate_fn=collate)):
        assert isinstance(packed, PackedSequence)
        assert packed.data.device.type == "cuda"
        assert packed.data.eq(number).all()


def test_without_workers_batches_are_on_the_device_too():
    for number, (large, _) in enumerate(DataLoader(Numbered(3), batch_size=None, device="cuda", pin_memory=True)):
        assert large.device.type == "cuda"
        assert large.eq(number).all()


class Telling(Numbered):
    """Samples that say whether their process has initialized CUDA."""

    def __getitem__(self, index):
        return *super().__getitem__(index), torch.cuda.is_initialized()


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_workers_never_initialize_cuda(workers):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    dataset = Telling(8)
    if workers == "ray":
        assert [told for *_, told in DataLoader(dataset, batch_size=None, num_workers=2, device="cuda")] == [False] * 8
    else:  # what the fork has of the trainer says True, and no fork can use it
        for number, (large, *_) in enumerate(DataLoader(dataset, None, num_workers=2, workers="fork", device="cuda")):
            assert large.eq(number).all()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible  # whatever Ray sets for its actors


def test_forks_write_into_page_locked_arenas_too():
    born = []
    for number, (large, rest) in enumerate(loader(workers="fork", pin_memory=True)):
        assert large.is_pinned()
        born.append(in_an_arena(large))
        assert (float(large[0]), int(rest["small"])) == (number, number)
        del large
    assert born[24:] == [True] * 24


def see_all_devices(_):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # whatever Ray has made of it


class OnDevice(Numbered):
    def __getitem__(self, index):
        return torch.full((4,), index, device="cuda")


def test_a_dataset_that_returns_tensors_on_the_device_is_an_error_that_names_the_remedy():
    with pytest.raises(TypeError, match=r"got a tensor on 'cuda:0'.*DataLoader\(..., device='cuda'\)"):
        next(
            iter(
                DataLoader(
                    OnDevice(4), batch_size=None, num_workers=1, fresh_processes=True, worker_init_fn=see_all_devices
                )
            )
        )


class WithTable(Numbered):
    """Holds tensors on the device, two of which share memory, and which it uses."""

    def __init__(self):
        super().__init__(4)
        self.table = torch.arange(8.0, device="cuda")
        self.tail = self.table[4:]
        self.parameter = torch.nn.Parameter(torch.ones(2, device="cuda"))

    def __getitem__(self, index):
        self.table[4] += 1
        return self.table[index], self.tail[0] - 4, self.parameter.detach().clone(), torch.cuda.is_initialized()


def test_workers_hold_what_the_dataset_has_on_the_device_in_main_memory():
    for index, batch in enumerate(DataLoader(WithTable(), batch_size=None, num_workers=1)):
        assert [part.device.type for part in batch[:3]] == ["cpu"] * 3
        assert (float(batch[0]), float(batch[1]), batch[2].tolist(), batch[3]) == (index, index + 1, [1, 1], False)


def test_large_slots_can_be_locked_unlocked_and_locked_again():
    """Also shows what it takes, with `-s`, for pages that exist and for others."""
    from rayloader.transport.arena import PAGE, Arena

    for _ in range(2):
        arena = Arena(1 << 33)
        arena.page_lock_for(devices.current())
        mapping, offset = arena._mapping, PAGE
        for nbytes in (1 << 20, 1 << 23, 1 << 26, 1 << 28):
            for touched in (True, False):
                if touched:
                    mapping.bytes[offset : offset + nbytes] = 1
                for _ in range(2):
                    began = time.perf_counter()
                    mapping.locks.lock(offset, nbytes)
                kind = "existing" if touched else "new"
                print(f"locked {nbytes >> 20} MiB of {kind} pages in {1e3 * (time.perf_counter() - began):.1f} ms")
                assert mapping.locks.is_locked(offset)
                offset += nbytes
        began = time.perf_counter()
        arena.close(give_back=True)
        del arena, mapping
        wait_for_unlocking()
        print(f"unlocked all in {1e3 * (time.perf_counter() - began):.1f} ms")


def test_what_an_event_of_all_copies_costs():
    """With `-s`."""
    accelerator = devices.current()
    accelerator.event().synchronize()
    began = time.perf_counter()
    events = []
    for _ in range(1000):
        events.append(accelerator.event())
        accelerator.asks()
    recorded = time.perf_counter()
    torch.cuda.synchronize()
    synchronized = time.perf_counter()
    assert all(event.query() for event in events)
    print(
        f"one event takes {1e3 * (recorded - began):.2f} us, "
        f"a query {1e3 * (time.perf_counter() - synchronized):.2f} us"
    )


def test_nothing_is_left_locked_after_the_end_of_the_workers():
    """The last test: it ends the session's workers."""
    kept = [large for number, (large, _) in enumerate(loader(pin_memory=True)) if number >= 40]
    assert all(in_an_arena(large) for large in kept)
    rayloader.shutdown()
    assert all(large.eq(number).all() for number, large in enumerate(kept, start=40))
    assert all(large.is_pinned() for large in kept)
    del kept
    gc.collect()
    wait_for_unlocking()
    assert page_locks.unlocker._retired == []
    assert not [line for line in Path("/proc/self/maps").read_text().splitlines() if "rayloader-arena" in line]
    assert psutil.Process().is_running()
