"""Programs that find a cluster: they join it, work, and leave nothing of theirs in it."""

import signal

import pytest
import ray
import ray.util.client

from multinode_data import calls
from multinode_waiting import wait_for_exit, wait_until
from rayloader import RaySessionError

pytestmark = pytest.mark.multinode
full = pytest.mark.full


def living_actors(job):
    """From the table behind the public way, which needs the dashboard."""
    actors = ray._private.state.actors().values()
    return [actor for actor in actors if actor["JobID"] == job and actor["State"] != "DEAD"]


@pytest.mark.parametrize(
    ("name", "returncode"),
    [
        ("calls_init", 0),
        pytest.param("never_calls_init", 0, marks=full),
        pytest.param("is_killed_in_mid_epoch", -signal.SIGKILL, marks=full),
    ],
)
def test_a_program_with_ray_address_joins_the_cluster_and_leaves_nothing_there(name, returncode, nodes, run_script):
    result = run_script(name, returncode=returncode, RAY_ADDRESS=nodes.address)
    assert result.address == nodes.address
    assert len(result.pids) == 2
    assert set(result.nodes) <= {nodes.here, nodes.away}
    wait_for_exit(result.pids)
    wait_until(lambda: not living_actors(result.job), "the program's actors are dead")


def test_nothing_that_a_program_waits_for_asks_the_gcs(run_script):
    """Whose processes run, on two nodes: it goes on while the GCS is away."""
    result = run_script("works_without_the_gcs")
    assert len(result.nodes) == 2
    assert result.number == 40
    assert result.same, "the same two processes"
    assert result.without, "it has waited for the GCS"


def test_ray_client_is_refused(monkeypatch):
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    with pytest.raises(RaySessionError, match=r"Ray Client \(ray://\).*ray job submit"):
        iter(calls(int))
