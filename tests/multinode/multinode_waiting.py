"""Waiting for what the tests have caused: on processes themselves, or by asking Ray; bounded."""

import contextlib
import threading
import time

import psutil
import ray

HANG_LIMIT = 500.0  # seconds; on expiry the test fails
START_LIMIT = 500.0  # seconds for a task that starts a loader; on expiry the test fails


def wait_until(condition, what, limit=HANG_LIMIT):
    """Asks until the answer is yes: for facts that Ray tells only when asked."""
    deadline = time.monotonic() + limit
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
        pause.wait(0.05)


def get(reference):
    """What a task or an actor gives that has to start first, perhaps with a loader."""
    return ray.get(reference, timeout=START_LIMIT)


def free(name="CPU"):
    return ray.available_resources().get(name, 0)


def wait_for_free(expected, name="CPU"):
    wait_until(lambda: free(name) == expected, f"{expected} {name} are free; now {free(name)}")


def wait_for_exit(pids):
    """Waits for the end of processes that need not be children of ours."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(processes, timeout=HANG_LIMIT)
    assert not alive, f"processes left: {alive}"


def remove_nodes(nodes, added, *, graceful=True):
    """Takes nodes out of the cluster, and waits until Ray knows."""
    for node in added:
        if node in nodes.cluster.worker_nodes:
            nodes.cluster.remove_node(node, allow_graceful=graceful)
    gone = {node.node_id for node in added}
    wait_until(
        lambda: not any(known["Alive"] and known["NodeID"] in gone for known in ray.nodes()),
        "Ray knows that the nodes are gone",
    )
