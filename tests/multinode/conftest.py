"""One Ray cluster of two nodes on this machine, with the driver on one of them, for all tests of this folder.

The head node is the driver's: 1 CPU, resource `here`. The other has 2 CPUs, the resources `away` and `spare`, and
the label `place=away`. Each has one of the resource `single`. Scenarios that need a Ray session of their own run in
subprocesses (`multinode_scripts.py`), which join this cluster by its address.
"""

import gc
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.cluster_utils import Cluster

import rayloader.actors.actors
import rayloader.actors.placement
import rayloader.actors.pool
from inside import end_idle_actors_but
from multinode_data import AWAY, ON_EACH
from multinode_waiting import free, remove_nodes, wait_until
from rayloader import DataLoader
from rayloader.actors.pool import _key

HERE = Path(__file__).parent
SCRIPT_LIMIT = 120.0  # seconds; on expiry subprocess.run kills the script and raises


@pytest.fixture(scope="session")
def nodes():
    """The running cluster, its address, and the ids of its nodes."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray notes the "current cluster" under its temporary directory, where any other `ray.init()` would find it.
        folder = tempfile.mkdtemp(prefix="rl", dir="/tmp")  # short: Ray puts sockets below it
        patch.setenv("RAY_TMPDIR", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_raylet_start_wait_time_s", "300")
        patch.setenv("RAY_worker_niceness", "0")  # else other tests that run beside these leave their workers no time
        # For Ray's own workers: the tests send them tasks of these modules, which use the package that is tested here.
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, [HERE, HERE.parent, HERE.parents[1]])))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 1,
                "resources": {"here": 4, "single": 1},
                "include_dashboard": False,
                "no_monitor": True,  # nothing is to be scaled
            },
        )
        resources = {"away": 4, "spare": 2, "single": 1}
        away = cluster.add_node(num_cpus=2, resources=resources, labels={"place": "away"})
        ray.init(address=cluster.address, log_to_driver=False)
        patch.setattr(rayloader.actors.actors, "NOTICE_S", math.inf)  # the log is not to depend on the machine
        patch.setattr(rayloader.actors.pool, "LATE_NOTICE_S", math.inf)
        patch.setattr(rayloader.actors.pool, "GRACE_S", math.inf)  # nor which epochs find their workers warm
        here = cluster.head_node.node_id
        yield SimpleNamespace(cluster=cluster, address=cluster.address, here=here, away=away.node_id)
        rayloader.shutdown()
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def warm(nodes, keepers):
    """Keeps two actors of the options `AWAY` warm, and two of `ON_EACH`, which hold no CPU."""
    loaders = [DataLoader(range(2), num_workers=2, ray_remote_args=options) for options in (AWAY, ON_EACH)]
    for loader in loaders:
        list(loader)
        keepers.append(loader)
    yield
    for loader in loaders:
        keepers.remove(loader)
    del loader, loaders


@pytest.fixture
def add_node(nodes):
    """Adds a node with some resources, and gives it; they leave when the test ends, if they have not yet."""
    added = []

    def add(*, num_cpus=1, **resources):
        added.append(nodes.cluster.add_node(num_cpus=num_cpus, resources=resources))
        return added[-1]

    yield add
    gc.collect()  # workers of loaders that an iterator refers to
    remove_nodes(nodes, added)


@pytest.fixture
def run_script(nodes, tmp_path):
    """Runs a function of `multinode_scripts.py` in a process of its own; gives what it printed, as an object."""

    def run(name, *arguments, returncode=0, limit=SCRIPT_LIMIT, **environment):
        result = subprocess.run(
            [sys.executable, HERE / "multinode_scripts.py", name, *map(str, arguments)],
            env={**os.environ, **environment},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=limit,
        )
        assert result.returncode == returncode, result.stderr
        return SimpleNamespace(**json.loads(result.stdout.splitlines()[-1]), stderr=result.stderr)

    return run


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def short_limit(monkeypatch):
    """For workers that have no place; those that have one may take their time."""
    monkeypatch.setattr(rayloader.actors.placement, "START_TIMEOUT_S", 1.0)


@pytest.fixture
def grace_ends(keepers):
    """To be called when idle workers have been kept for long enough; a fixture's stay."""
    return lambda: end_idle_actors_but({_key(loader.ray_remote_args or {}) for loader in keepers})


@pytest.fixture(autouse=True)
def all_cpus_free(nodes, nothing_left, grace_ends, request):
    """Every test begins with all CPUs free but those of warm actors that a fixture keeps."""
    before = free()
    yield
    if request.node.stash.get(FAILED, False):
        rayloader.shutdown()  # its traceback keeps loaders alive: the next test shall not suffer for it
    gc.collect()
    grace_ends()
    wait_until(lambda: free() >= before, "the test's actors have given up their CPUs")
