"""Loaders with default arguments in trainers and trials whose placement groups hold all CPUs: they share them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.util import placement_group, remove_placement_group

from multinode_waiting import START_LIMIT

pytestmark = [pytest.mark.multinode, pytest.mark.full]


@pytest.fixture
def no_other_cpu():
    """The driver's node has none: what remains are the two that trainers or trials take."""
    group = placement_group([{"CPU": 1, "here": 0.1}])
    ray.get(group.ready(), timeout=START_LIMIT)
    yield
    remove_placement_group(group)


@pytest.mark.usefixtures("no_other_cpu")
@pytest.mark.parametrize(("kind", "step"), [("train", 2), ("tune", 1)])
def test_workers_start_and_neither_wait_for_cpus_nor_take_those_of_a_group(kind, step, nodes, tmp_path):
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "script_trainers.py", kind, tmp_path],
        env={**os.environ, "RAY_ADDRESS": nodes.address},
        capture_output=True,
        text=True,
        timeout=2 * START_LIMIT,  # Ray Train and Ray Tune are imported by several processes
    )
    assert "the end" in done.stdout.splitlines(), done.stdout + done.stderr
    for rank in (0, 1):
        in_group, indices, cpus, captured = json.loads((tmp_path / f"{rank}.json").read_text())
        assert in_group, "nothing is tried"
        assert indices == 2 * list(range(rank % step, 24, step)), "of each epoch, every batch once and in order"
        assert (cpus, captured) == (0, False)
