"""Clusters whose autoscaler starts nodes, of either version: they are waited for, however long they take."""

import json
import os
import shlex

import pytest

from autoscaling import HEAD, configuration, environment_of, free_port, head_of, listens, short_folder
from multinode_waiting import START_LIMIT, wait_until

pytestmark = pytest.mark.multinode

IDLE_MINUTES = 0.25  # until a node that has nothing to do is given back; it must not be while it is new
JOB_LIMIT = 400  # seconds; on expiry the test fails
TWO_CPUS = {"resources": {"CPU": 2}, "node_config": {}, "min_workers": 0, "max_workers": 2}


@pytest.fixture
def cluster():
    """The command that starts a head with some CPUs, its port, its folder, and the environment to join it."""
    with short_folder() as folder:
        port = free_port()

        def command(cpus):
            types = {HEAD: {"resources": {"CPU": cpus}, "node_config": {}, "max_workers": 0}, "data": TWO_CPUS}
            held_back = {"type": "external", "module": "autoscaling.HeldBack", "folder": str(folder)}
            config = configuration(port, types, held_back, max_workers=2, idle_timeout_minutes=IDLE_MINUTES)
            (folder / "config.yaml").write_text(json.dumps(config))
            options = f"--head --port={port} --node-ip-address=127.0.0.1 --num-cpus={cpus} --include-dashboard=false"
            return f"exec ray start {options} --block --autoscaling-config={shlex.quote(str(folder / 'config.yaml'))}"

        environment = {**environment_of(folder), "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
        yield command, port, folder, environment


@pytest.mark.parametrize(
    ("version", "cpus", "num_workers"),
    [
        ("2", 0, 2),
        pytest.param("1", 0, 2, marks=pytest.mark.full),
        pytest.param("2", 1, 3, marks=pytest.mark.full),
    ],
    ids=["version 2", "version 1", "room for one"],
)
def test_nodes_that_take_90_s_are_waited_for_and_given_back(cluster, run_script, version, cpus, num_workers):
    command, port, folder, environment = cluster
    environment["RAY_enable_autoscaler_v2"] = "1" if version == "2" else "0"
    with head_of(command(cpus), environment, folder) as process:
        wait_until(lambda: listens(port) or process.poll() is not None, "the head runs", START_LIMIT)
        assert process.poll() is None, (folder / "head.log").read_text()
        result = run_script("waits_for_nodes", f"127.0.0.1:{port}", folder, num_workers, limit=JOB_LIMIT, **environment)
    assert result.waited >= 90
    assert len(result.pids) == num_workers
    assert (result.here in result.nodes) is bool(cpus)
    assert set(result.nodes) - {result.here}, "some work on nodes that came"
    assert os.path.exists(folder / "come")
