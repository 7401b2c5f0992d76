"""Memory, file descriptors and threads of the trainer and of its actors do not grow over many batches.

What leaks a few bytes or a descriptor now and then shows only after days of training. So one loader runs over several
epochs. At the end of each of twenty equal parts of the run: resident memory, open descriptors and threads, of this
process and of the worker processes together, Ray's own included but not the threads of gRPC's pools, which come and go;
and the size of the loader's state. The first quarter is the warm-up. After it no count may be above the highest of the
warm-up, memory at most by `MEMORY_BOUND`, the state by `STATE_BOUND`. On two cores, after 250,000 and after 1,000,000
batches: 334.9 and 335.7 MB in the driver, 653.3 and 653.9 MB in two workers; 45 and 86 descriptors, 21 and 36 threads.
"""

import dataclasses
import io
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import Dataset

import rayloader.actors.pool
from rayloader import DataLoader

PARTS = 20  # of a run; each ends with a sample
WARM_UP = PARTS // 4
BATCH_SIZE = 4
# Allocators keep what they had to ask for once: a few MB are noise. A leak of 16 bytes a batch is 12 MB.
MEMORY_BOUND = 8e6  # bytes, of the trainer, and of all workers
# A worker has one snapshot in the state or none, as the machine's speed has it; of two they take up to so much.
STATE_BOUND = 20_000  # bytes
# gRPC starts and ends these as it likes: two timer threads within minutes, others under load.
GRPC_POOLS = {"event_engine", "grpc_global_tim", "grpcpp_sync_ser"}
BOUNDS = {"driver_rss": MEMORY_BOUND, "workers_rss": MEMORY_BOUND, "state_bytes": STATE_BOUND}


class Rows(Dataset):
    """Small samples, each with its number."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((64,), index % 256, dtype=torch.uint8), index


@dataclass(frozen=True)
class Sample:
    """The processes at one moment; sizes in bytes, `workers_...` of all workers together."""

    batches: int
    driver_rss: float
    workers_rss: float
    driver_fds: int
    workers_fds: int
    driver_threads: int
    workers_threads: int
    state_bytes: int

    @classmethod
    def take(cls, batches, loader):
        """As it is now."""
        driver = psutil.Process()
        actors = rayloader.actors.pool.get_pool().actors
        workers = [psutil.Process(actor.address.pid) for actor in actors if actor.address is not None]
        state = io.BytesIO()
        torch.save(loader.state_dict(), state)
        return cls(
            batches,
            driver.memory_info().rss,
            sum(worker.memory_info().rss for worker in workers),
            driver.num_fds(),
            sum(worker.num_fds() for worker in workers),
            _num_threads(driver),
            sum(_num_threads(worker) for worker in workers),
            len(state.getvalue()),
        )


def _num_threads(process):
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return sum(name not in GRPC_POOLS for name in names)


def watch(batches, epochs, **options):
    """Runs a loader for so many batches in all, and takes a sample at the end of each part."""
    dataset = Rows(batches // epochs * BATCH_SIZE)
    loader = DataLoader(dataset, BATCH_SIZE, workers="ray", **options)
    stream = (batch for _ in range(epochs) for batch in loader)
    seen, length = 0, len(loader) * epochs
    for part in range(1, PARTS + 1):
        seen += sum(1 for _ in islice(stream, part * length // PARTS - seen))
        yield Sample.take(seen, loader)
    if next(stream, None) is not None or seen != length:
        raise RuntimeError(f"{length} batches should have come, {seen} did")


def grown(samples):
    """What is above its warm-up after it, in words."""
    found = []
    for name in asdict(samples[0]):
        values = [getattr(sample, name) for sample in samples]
        before, after = max(values[:WARM_UP]), max(values[WARM_UP:])
        if name != "batches" and after > before + BOUNDS.get(name, 0):
            found.append(f"{name} grew from {before:,.0f} to {after:,.0f}; allowed: {BOUNDS.get(name, 0):,.0f}")
    return found


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
def test_descriptors_threads_and_memory_do_not_grow(ray_session, persistent):
    samples = list(watch(3000, 6, num_workers=2, persistent_workers=persistent))
    assert [sample.batches for sample in samples] == list(range(150, 3001, 150))
    assert grown(samples) == []


FLAT = [Sample(number, 3e8, 4e8, 90, 80, 70, 60, 5000) for number in range(PARTS)]


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("driver_fds", 1),
        ("workers_fds", 1),
        ("driver_threads", 1),
        ("workers_threads", 1),
        ("driver_rss", 9e6),
        ("workers_rss", 9e6),
        ("state_bytes", 20_001),
    ],
)
def test_growth_is_seen(name, by):
    assert grown(FLAT) == []
    last = dataclasses.replace(FLAT[-1], **{name: getattr(FLAT[-1], name) + by})
    (found,) = grown([*FLAT[:-1], last])
    assert found.startswith(f"{name} grew")
