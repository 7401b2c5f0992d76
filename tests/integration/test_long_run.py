"""Memory, file descriptors and threads of the trainer and of its actors do not grow over many batches.

What leaks a few bytes or a descriptor now and then shows only after days of training. So one loader runs over several
epochs. At the end of each of twenty equal parts of the run: resident memory, open descriptors and threads, of this
process and of the worker processes together, Ray's own included but not the threads of gRPC's pools, which come and go;
and the size of the loader's state. The first quarter is the warm-up. After it no count may be above the highest of the
warm-up, memory at most by `MEMORY_BOUND`, the state by `STATE_BOUND`. On two cores, after 250,000 and after 1,000,000
batches: 334.9 and 335.7 MB in the driver, 653.3 and 653.9 MB in two workers; 45 and 86 descriptors, 21 and 36 threads.
"""

import gc
import io
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
BOUNDS = {"driver's memory": MEMORY_BOUND, "workers' memory": MEMORY_BOUND, "state": STATE_BOUND}


class Rows(Dataset):
    """Small samples, each with its number."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((64,), index % 256, dtype=torch.uint8), index


def counts(loader):
    """Of the processes at one moment; sizes in bytes, `workers'` of all workers together."""
    gc.collect()  # an epoch that has ended is in a cycle, with two descriptors
    driver = psutil.Process()
    actors = rayloader.actors.pool.get_pool().actors
    workers = [psutil.Process(actor.address.pid) for actor in actors if actor.address is not None]
    state = io.BytesIO()
    torch.save(loader.state_dict(), state)
    return {
        "driver's memory": driver.memory_info().rss,
        "workers' memory": sum(worker.memory_info().rss for worker in workers),
        "driver's descriptors": driver.num_fds(),
        "workers' descriptors": sum(worker.num_fds() for worker in workers),
        "driver's threads": _num_threads(driver),
        "workers' threads": sum(_num_threads(worker) for worker in workers),
        "state": len(state.getvalue()),
    }


def _num_threads(process):
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return sum(name not in GRPC_POOLS for name in names)


def grown(samples):
    """What is above its warm-up after it, and by how much."""
    peaks = {
        name: [max(s[name] for s in part) for part in (samples[:WARM_UP], samples[WARM_UP:])] for name in samples[0]
    }
    return {name: after - before for name, (before, after) in peaks.items() if after > before + BOUNDS.get(name, 0)}


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
def test_descriptors_threads_and_memory_do_not_grow(ray_session, persistent):
    batches, epochs, samples = 3000, 6, []
    loader = DataLoader(
        Rows(batches // epochs * BATCH_SIZE), BATCH_SIZE, workers="ray", num_workers=2, persistent_workers=persistent
    )
    stream = (batch for _ in range(epochs) for batch in loader)
    for _ in range(PARTS):
        assert sum(1 for _ in islice(stream, batches // PARTS)) == batches // PARTS
        samples.append(counts(loader))
    assert next(stream, None) is None
    assert grown(samples) == {}


@pytest.mark.parametrize(("name", "by"), [("driver's descriptors", 1), ("workers' threads", 1), ("state", 20_001)])
def test_growth_is_seen(name, by):
    flat = {"driver's descriptors": 90, "workers' threads": 60, "state": 5000}
    assert grown([flat] * PARTS) == {}
    assert grown([flat] * (PARTS - 1) + [{**flat, name: flat[name] + by}]) == {name: by}
