"""A short run of benchmarks/long_run.py, which watches descriptors, threads and memory."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_run


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
def test_descriptors_threads_and_memory_do_not_grow(ray_session, persistent):
    samples = list(long_run.watch(3000, 6, num_workers=2, persistent_workers=persistent))
    assert [sample.batches for sample in samples] == list(range(150, 3001, 150))
    assert long_run.grown(samples) == []


FLAT = [long_run.Sample(number, 3e8, 4e8, 90, 80, 70, 60, 5000) for number in range(long_run.PARTS)]


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
    assert long_run.grown(FLAT) == []
    last = dataclasses.replace(FLAT[-1], **{name: getattr(FLAT[-1], name) + by})
    (found,) = long_run.grown([*FLAT[:-1], last])
    assert found.startswith(f"{name} grew")
