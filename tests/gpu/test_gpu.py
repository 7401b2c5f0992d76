"""What a real device alone tells: its driver's locks and events, streams, graphs, and processes that use it.

What follows from these is tested without one, on a simulated accelerator.
"""

import gc
import os
from pathlib import Path

import pytest
import torch

import rayloader
from inside import kill_worker
from rayloader import DataLoader
from rayloader.gpu import device as devices
from rayloader.gpu import page_locks
from rayloader.gpu.page_locks import PageLocks
from simulated_device import wait_for_unlocking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
LARGE = 1 << 20  # numbers: 4 MiB of them
CYCLES = 40_000_000  # tens of milliseconds of a device that does nothing
PIN, MOVE = {"pin_memory": True}, {"device": "cuda"}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    """So that slots are page-locked within the few batches of these tests."""
    monkeypatch.setattr(devices, "PAUSES", 0)


class Numbered:
    """Sample i is large, and consists of the number i; also a small part, and whether the process has a CUDA."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((LARGE,), float(index)), torch.tensor(index), torch.cuda.is_initialized()


def loader(length=48, **options):
    """Its slots are page-locked when they are used for the second time: at most the first dozen batches are not."""
    return DataLoader(Numbered(length), batch_size=None, num_workers=2, prefetch_factor=2, **options)


def copied(batches, stream=None, killed=()):
    """Whether copy i of a program that runs ahead of the device holds the number i everywhere."""
    iterator, copies = iter(batches), []
    stream = stream or torch.cuda.current_stream()
    for large, *_ in iterator:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            copies.append(large.to("cuda", non_blocking=True))
        del large
        if len(copies) in killed:
            kill_worker(iterator, killed.index(len(copies)))
    assert killed or not stream.query()  # or this shows nothing
    torch.cuda.synchronize()
    return all(bool(one.eq(number).all()) for number, one in enumerate(copies))


def in_an_arena(tensor):
    address = tensor.untyped_storage().data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return "rayloader-arena" in line
    return False


@pytest.mark.parametrize(
    "options", [{}, {"workers": "fork"}, {"arenas": False}], ids=["arenas", "forks", "Ray's store"]
)
def test_large_tensors_are_born_page_locked_from_the_second_use_of_their_memory(options):
    born = []
    for number, (large, small, _) in enumerate(loader(**PIN, **options)):
        assert (large.is_pinned(), small.is_pinned()) == (True, True)
        assert large.eq(number).all()
        born.append(in_an_arena(large))
        del large
    assert options == {"arenas": False} or (born[0], born[24:]) == (False, [True] * 24)


def test_copies_on_any_stream_may_be_queued_when_a_batch_is_dropped_or_its_worker_killed():
    assert copied(loader(**PIN))
    assert copied(loader(**PIN), torch.cuda.Stream())
    assert copied(loader(**PIN), killed=(6, 12))


def test_without_holding_slots_back_the_same_program_gets_torn_batches(monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr(PageLocks, "is_locked", lambda *_: False)
    assert not copied(loader(**PIN))


def test_a_graph_may_be_captured_within_the_loop():
    ones = torch.ones(1000, device="cuda")
    for number, (large, *_) in enumerate(loader(**PIN)):
        there = large.to("cuda", non_blocking=True)
        del large
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = ones + 1
            for _ in range(1000):  # meanwhile the thread ahead prepares batches
                result += 1
        graph.replay()
        assert result.eq(1002).all()
        assert there.eq(number).all()


@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("options", [{}, PIN, {"arenas": False}, {"prefetch_to_device": 4}])
def test_batches_arrive_on_the_device_in_the_order_of_the_current_stream(options, own_stream):
    sums = []
    with torch.cuda.stream(torch.cuda.Stream() if own_stream else None):
        for number, (large, small, _) in enumerate(loader(**MOVE, **options)):
            assert (large.device, small.device) == (torch.device("cuda", 0),) * 2
            assert large.to("cuda") is large
            sums.append(large.double().mean() + small - number)
            torch.cuda._sleep(CYCLES // 10)
            del large, small  # while what reads them is queued
    torch.cuda.synchronize()
    assert torch.stack(sums).tolist() == [float(number) for number in range(48)]


def test_workers_never_initialize_cuda():
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert [told for *_, told in loader(8, **MOVE)] == [False] * 8
    # What a fork has of the trainer says True, and no fork can use it.
    assert all(large.eq(number).all() for number, (large, *_) in enumerate(loader(8, workers="fork", **MOVE)))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible  # whatever Ray sets for its actors


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


def test_nothing_is_left_locked_after_the_end_of_the_workers():
    """The last test: it ends the session's workers."""
    kept = [large for number, (large, *_) in enumerate(loader(**PIN)) if number >= 40]
    assert all(in_an_arena(large) for large in kept)
    rayloader.shutdown()
    assert all(large.eq(number).all() for number, large in enumerate(kept, start=40))
    assert all(large.is_pinned() for large in kept)
    del kept
    gc.collect()
    wait_for_unlocking()
    assert page_locks.unlocker._retired == []
    assert "rayloader-arena" not in Path("/proc/self/maps").read_text()
