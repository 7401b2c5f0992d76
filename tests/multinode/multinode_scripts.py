"""Programs that the multi-node tests run in processes of their own: `python multinode_scripts.py NAME [ARGUMENT...]`.

The last line that a script prints is what the test gets to know, as JSON.
"""

import json
import os
import signal
import sys

from multinode_data import Calls, as_is, origin
from rayloader import DataLoader, shutdown


def load(num_workers=1, length=6, **options):
    return DataLoader(Calls(lambda _: origin(), length), None, num_workers=num_workers, collate_fn=as_is, **options)


def facts(seen):
    """Where this process is connected, and who worked for it."""
    import ray

    context = ray.get_runtime_context()
    return {
        "address": context.gcs_address,
        "job": context.get_job_id(),
        "nodes": sorted({node_id for node_id, _ in seen}),
        "pids": sorted({pid for _, pid in seen}),
    }


def never_calls_init():
    assert "ray" not in sys.modules
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    loader = load(2)
    seen = [*loader, *loader]
    signal.raise_signal(signal.SIGTERM)
    return {**facts(seen), "heard": heard}


def starts_its_own():
    return facts(list(load(workers="ray")))


def ends_in_mid_epoch():
    iterator = iter(load(2, length=100))
    return facts([next(iterator) for _ in range(3)])


def fails_in_mid_epoch():
    iterator = iter(load(2, length=100))
    print(json.dumps(facts([next(iterator) for _ in range(3)])), flush=True)
    raise LookupError("a bug in the training loop")


def is_killed_in_mid_epoch():
    iterator = iter(load(2, length=100))
    print(json.dumps(facts([next(iterator) for _ in range(3)])), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def calls_init(address):
    import ray

    ray.init(address=address, namespace="training")
    return facts(list(load()))


def shuts_down_and_goes_on():
    """Ray was joined, not started: `rayloader.shutdown()` leaves it. After `ray.shutdown()` it is joined anew."""
    import ray

    loader = load()
    first = facts(list(loader))
    shutdown()
    assert ray.is_initialized()
    second = facts(list(loader))
    iterator = iter(loader)
    next(iterator)
    ray.shutdown()
    try:
        next(iterator)
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    assert not ray.is_initialized(), "a live iterator started Ray again"
    third = facts(list(loader))
    return {**third, "earlier": [first, second], "message": message}


def is_a_client():
    try:
        list(load())
    except Exception as error:  # the test looks at what it is
        return {"error": type(error).__name__, "message": str(error)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
