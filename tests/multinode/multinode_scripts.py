"""Programs that the multi-node tests run in processes of their own: `python multinode_scripts.py NAME [ARGUMENT...]`.

The last line that a script prints is what the test gets to know, as JSON.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import ray

from multinode_data import calls, origin
from multinode_waiting import wait_until
from rayloader import shutdown

GCS_LIMIT = 45  # seconds for which Ray's GCS is away; if the loader waits for it, it goes on then, and the test fails


def load(num_workers=2, length=6, **options):
    return calls(origin, length, num_workers, **options)


def facts(seen):
    """Where this process is connected, and who worked for it."""
    context = ray.get_runtime_context()
    return {
        "address": context.gcs_address,
        "job": context.get_job_id(),
        "nodes": sorted({node_id for node_id, _ in seen}),
        "pids": sorted({pid for _, pid in seen}),
    }


def never_calls_init():
    return facts(list(load()))


def calls_init():
    ray.init(address=os.environ["RAY_ADDRESS"], namespace="training")
    return never_calls_init()


def is_killed_in_mid_epoch():
    iterator = iter(load(length=100))
    print(json.dumps(facts([next(iterator) for _ in range(4)])), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def waits_for_nodes(address, folder, num_workers):
    """The nodes come when this program's clock says that they have taken 90 s, and go a minute after its epoch."""
    from rayloader.actors.placement import Placement
    from rayloader.actors.pool import GRACE_S

    ray.init(address=address, log_to_driver=False)
    come = Path(folder) / "come"
    monotonic, check = time.monotonic, Placement.check
    later, longest = 0.0, 0.0
    time.monotonic = lambda: monotonic() + later

    def look(placement, pending, of, waited):
        nonlocal later, longest
        longest = max(longest, waited)
        check(placement, pending, of, waited)
        if placement.status is not None and placement.status.coming:
            if waited >= 90:
                come.touch()
            else:
                later += 30.0  # in steps: between two reports the autoscaler may tell of no node for a moment

    Placement.check = look
    loader = load(int(num_workers), length=20)
    found = facts(list(loader))
    later += GRACE_S  # the loader lives, and its idle workers' time is over
    here = ray.get_runtime_context().get_node_id()
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1, "the nodes are given back", limit=300)
    return {**found, "here": here, "waited": longest}


def works_without_the_gcs():
    """Ray's GCS is stopped while epochs end, are broken off and begin, on this node and on another one."""
    import psutil
    from ray.cluster_utils import Cluster

    import rayloader.actors.placement

    rayloader.actors.placement.INTERVAL_S = 0.0  # whoever may ask, asks
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    (gcs,) = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("gcs_server")]
    loader = load(2, length=20)
    seen = facts(list(loader))
    iterator = iter(loader)
    taken = [next(iterator) for _ in range(19)]
    late = threading.Timer(GCS_LIMIT, gcs.resume)
    late.start()
    gcs.suspend()
    try:
        taken += list(iterator)  # the last batch, and the end
        taken += list(loader)
        for _ in loader:
            break
        iterator = iter(loader)
        next(iterator)
        del iterator
        without = gcs.status() == psutil.STATUS_STOPPED
    finally:
        late.cancel()
        gcs.resume()
    shutdown()
    ray.shutdown()
    cluster.shutdown()
    return {**seen, "number": len(taken), "same": {*map(tuple, taken)} <= {*map(tuple, taken[:2])}, "without": without}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
