"""A script that has Ray and its workers started while it does something else.

    python script_init.py

It prints its steps, and nothing that Ray says of the Ray that it starts.
"""

import os
import random
import signal

import psutil
import ray

import rayloader


class Pids:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return os.getpid()


def started():
    return {actor["Name"] for actor in ray._private.state.actors().values() if actor["State"] != "DEAD"}


def main():
    try:
        rayloader.init(num_workers=2, object_store_memory=1)
    except rayloader.RaySessionError as error:
        print("refused:", "object_store_memory" in str(error) or "memory" in str(error))

    random.seed(0)
    rayloader.init(num_workers=2, num_cpus=7, resources={"data": 1})
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append("signal"))
    signal.signal(signal.SIGTERM, lambda *_: heard.append("end"))
    loader = rayloader.DataLoader(Pids(), None, num_workers=2)
    pids = {*loader, *loader}
    other = random.Random(0)
    print("random:", random.random() == other.random())
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGTERM)
    print("heard:", heard)
    print("workers:", len(pids), sorted(started()))
    print("cpus:", ray.cluster_resources()["CPU"], ray.cluster_resources()["data"])
    rayloader.init(num_workers=1)  # one more, beside those that are at work
    both = [iter(loader), iter(rayloader.DataLoader(Pids(), None, num_workers=1))]
    pids.update(next(both[1]) for _ in range(2))
    print("workers:", len(pids), sorted(started()))
    try:
        rayloader.init(num_cpus=3)
    except rayloader.RaySessionError as error:
        print(error)
    everything = psutil.Process().children(recursive=True)
    rayloader.shutdown()
    print("left:", len(psutil.wait_procs(everything, 60)[1]))


if __name__ == "__main__":
    main()
