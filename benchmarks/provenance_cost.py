"""What a provenance log costs.

Motive: a log of what each batch was is for long runs, so it must take at most 1% of the time where batches are the
cheapest, and 20 bytes a batch besides the indices.
Method: two loaders of the tiny case with persistent workers, one with a log and one without, run epoch after epoch in
one process, in turn; which comes first changes from round to round. Compared are the time that passes and the CPU time
of the driver, both for a batch: the medians over the epochs of either loader, and the median of the ratios of
neighbours. Then the log's own work for a batch is timed alone, in a loop. The bytes are those of the rows in full
messages, with and without the two columns of the indices.
Command: python benchmarks/provenance_cost.py [--rounds N] [--batches N] [--workers N]
Last results: docs/decisions.md, "The provenance log is an Arrow stream without an end".
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from cases import CASES
from harness import report_compared
from rayloader import DataLoader, shutdown
from rayloader.replay import log_writer, provenance


def epoch(loader: Any) -> tuple[float, float]:
    """Seconds of time and of CPU time for a batch, without the first one."""
    iterator = iter(loader)
    next(iterator)
    began, cpu_began = time.perf_counter(), time.process_time()
    count = sum(1 for _ in iterator)
    return (time.perf_counter() - began) / count, (time.process_time() - cpu_began) / count


def alone(folder: str, batch_size: int) -> float:
    """Microseconds of CPU time of the log for a batch."""
    owner: Any = SimpleNamespace(provenance=f"{folder}/alone.arrows")
    rows = log_writer.opened(owner)
    rows._iteration, rows._epoch = "0", 0
    random, count, took = np.random.default_rng(0), 20 * log_writer.ROWS, []
    batches = random.integers(230_400, size=(count, batch_size)).tolist()
    for _ in range(9):
        rows.forget()
        began = time.process_time()
        for step, indices in enumerate(batches):
            rows.drawn(step, indices, skipped=False)
            rows.add(step, step % 2, 123456789 * step % 2**32, 0, 0)
        took.append((time.process_time() - began) / count)
    return min(took) * 1e6


def bytes_of(path: Path) -> tuple[float, float]:
    """Bytes for a batch in full messages: besides the columns of the indices, and of these."""
    log = provenance.read(path)
    others = ("worker", "digest", "outcome", "skipped", "restarts")
    messages = indices = 0
    rows = pa.concat_tables([iteration.rows for iteration in log.iterations]).combine_chunks()
    for place in range(0, len(rows), log_writer.ROWS):
        some = rows.slice(place, log_writer.ROWS)
        kept = [
            (row["step"], *log_writer._packed(row["indices"]), *(row[name] for name in others))
            for row in some.to_pylist()
        ]
        messages += len(log_writer._message(kept, {"iteration": "0" * 12}))
        indices += some["indices"].nbytes + some["indices_other"].nbytes
    return (messages - indices) / len(rows), indices / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, default=3600)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    case = CASES["tiny"]
    dataset = case.make(arguments.batches * case.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        loaders: dict[bool, Any] = {
            logs: DataLoader(
                dataset,
                batch_size=case.batch_size,
                shuffle=True,
                num_workers=arguments.workers,
                persistent_workers=True,
                workers="fork",  # Ray does not start meanwhile
                provenance=f"{folder}/log.arrows" if logs else None,
            )
            for logs in (True, False)
        }
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for loader in loaders.values():
            epoch(loader)
        for number in range(arguments.rounds):
            for logs in (True, False) if number % 2 else (False, True):
                found[logs].append(epoch(loaders[logs]))
        report_compared(found, ("time", "CPU time of the driver"))
        shutdown()
        print(f"alone: {alone(folder, case.batch_size):.2f} us of CPU time for a batch")
        others, indices = bytes_of(Path(folder, "log.arrows"))
        print(f"{others:.1f} bytes for a batch, and {indices:.1f} for its indices")


if __name__ == "__main__":
    main()
