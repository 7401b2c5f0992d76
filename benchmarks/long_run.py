"""A long run: memory, file descriptors and threads of the trainer and of its actors, over a million batches.

Motive: what leaks a few bytes or a descriptor now and then shows only after days of training.
Method: one loader over several epochs, in this process. At the end of each of twenty equal parts of the run: resident
memory, open descriptors and threads, of this process and of the worker processes together, Ray's own included but not
the threads of gRPC's pools, which come and go; and the size of the loader's state. The first quarter is the warm-up.
After it no count may be above the highest of the warm-up, memory at most by `MEMORY_BOUND`, the state by `STATE_BOUND`.
Command: python benchmarks/long_run.py [--batches N] [--epochs N] [--workers N] [--persistent]; exit status 1 on growth
Last results, two workers on two cores, after 250,000 and after 1,000,000 batches: 334.9 and 335.7 MB in the driver,
653.3 and 653.9 MB in the workers; 45 and 86 descriptors, 21 and 36 threads, a state of 8 KB all the time.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch

import harness
import rayloader.actors.pool
from cases import Stored
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
    def take(cls, batches: int, loader: Any) -> Sample:
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


def _num_threads(process: psutil.Process) -> int:
    names = [(task / "comm").read_text().strip() for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return sum(name not in GRPC_POOLS for name in names)


def watch(batches: int, epochs: int, **options: Any) -> Iterator[Sample]:
    """Runs a loader for so many batches in all, and takes a sample at the end of each part."""
    dataset = Stored(batches // epochs * BATCH_SIZE, (64,), torch.uint8)
    loader: Any = DataLoader(dataset, BATCH_SIZE, workers="ray", **options)
    stream = (batch for _ in range(epochs) for batch in loader)
    seen, length = 0, len(loader) * epochs
    for part in range(1, PARTS + 1):
        seen += sum(1 for _ in islice(stream, part * length // PARTS - seen))
        yield Sample.take(seen, loader)
    if next(stream, None) is not None or seen != length:
        raise RuntimeError(f"{length} batches should have come, {seen} did")


def grown(samples: list[Sample]) -> list[str]:
    """What is above its warm-up after it, in words."""
    found = []
    for name in asdict(samples[0]):
        values = [getattr(sample, name) for sample in samples]
        before, after = max(values[:WARM_UP]), max(values[WARM_UP:])
        if name != "batches" and after > before + BOUNDS.get(name, 0):
            found.append(f"{name} grew from {before:,.0f} to {after:,.0f}; allowed: {BOUNDS.get(name, 0):,.0f}")
    return found


def main() -> None:
    """Prints a line a sample; exit status 1 if something has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--persistent", action="store_true", help="persistent workers")
    arguments = parser.parse_args()
    if arguments.batches < PARTS * arguments.epochs:
        parser.error(f"--batches must be at least {PARTS} an epoch, got {arguments.batches}")

    print(f"{'':>10}  {'memory, MB':^17}  {'descriptors':^15}  {'threads':^15}  {'state':>6}  {'batches':>9}")
    print(
        f"{'batches':>10}  {'driver':>8} {'workers':>8}" + 2 * f"  {'driver':>7} {'workers':>7}" + "      KB  a second"
    )
    samples: list[Sample] = []
    began = time.perf_counter()
    options = {"num_workers": arguments.workers, "persistent_workers": arguments.persistent}
    for sample in watch(arguments.batches, arguments.epochs, **options):
        samples.append(sample)
        print(
            f"{sample.batches:10,}  {sample.driver_rss / 1e6:8.1f} {sample.workers_rss / 1e6:8.1f}  "
            f"{sample.driver_fds:7} {sample.workers_fds:7}  {sample.driver_threads:7} {sample.workers_threads:7}  "
            f"{sample.state_bytes / 1e3:6.1f}  {sample.batches / (time.perf_counter() - began):9,.0f}",
            flush=True,
        )
    if found := grown(samples):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    with harness.clean_exit():
        main()
