"""Loaders of sleep-bound batches with 1 to 32 workers on 1 to 4 Ray nodes, beside the ideal rate.

Motive: workers on other machines are to be as good as local ones, and the trainer's share of a batch is not to grow
with their number.
Method: a Ray cluster of several nodes on this machine, each with an object store of its own. A batch is made at once,
and costs its worker 40 ms of sleep, so that two cores can hold many workers. The consumer sleeps 1 ms a batch and
touches nothing. The ideal rate is that of the workers, or of the consumer's step. Three ways of a batch: "local"
(workers on the trainer's node: a line and an arena), "calls" (the same with `arenas=False`: Ray calls, and the
trainer's own object store) and "remote" (on the other nodes: a line by TCP, and batches behind its messages).
One process measures one after the other; its workers stay warm. The first batches, which fill the window, do not count.
CPU time is that of the user's thread, and of the whole process, without the consumer's own, whose sleep costs some
30 us; by steps in an epoch of its own. Ray Data maps the same
work over rows, one a batch, with as many actors. "ray-get" is the bandwidth of one `ray.get` at a time of results of an
actor on another node. At last a node is killed in mid-epoch; its workers find room on another one.
Command: python benchmarks/scale.py [--rounds N] [--cases tiny,medium,large] [--workers MOST] [--quick]
[--peers local,calls,remote,ray-data,ray-get]
Results: benchmarks/results/scale.json, with --quick too, for even that takes minutes; ways that a run leaves out keep
their figures. `scaling.py` goes on from it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

import harness
from harness import Figure, Options
from thread_steps import stepwise

QUESTION = "scale"
RESULTS = harness.RESULTS / "scale.json"
WORK_S = 0.04
STEP_S = 0.001
NBYTES = {"tiny": 50_000, "medium": 1_200_000, "large": 9_600_000}
WAYS = ("local", "calls", "remote", "ray-data", "ray-get")
COUNTS = (1, 2, 4, 8, 16, 32)
RAY_DATA_WORKERS = 4  # its driver takes most of this machine's cores with more
DATA_NODES = 3
RATE, THREAD, PROCESS = "batches/s", "CPU of the user's thread", "CPU of the process"
BANDWIDTH = "bytes/s"
GAP = "longest time between two batches around a node's death"


class Sleeping(Dataset[torch.Tensor]):
    """Whole batches, each of which takes a while and next to no CPU time."""

    def __init__(self, length: int, nbytes: int) -> None:
        self.length = length
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(WORK_S)
        return torch.full((self.nbytes,), index % 256, dtype=torch.uint8)


def ideal(workers: int) -> float:
    """Batches a second."""
    return min(workers / WORK_S, 1 / STEP_S)


class Nodes:
    """The cluster, and this process as its driver."""

    def __init__(self, most: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._folder = tempfile.mkdtemp(prefix="rl", dir="/tmp")  # short: Ray puts sockets below it
        os.environ["RAY_TMPDIR"] = self._folder
        os.environ.pop("RAY_ADDRESS", None)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(harness.ROOT), str(harness.ROOT / "benchmarks")])
        store = {"object_store_memory": 800_000_000}
        head = {"num_cpus": 1, "resources": {"local": most}, "include_dashboard": False, **store}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.data = [self.cluster.add_node(num_cpus=1, resources={"remote": most}, **store) for _ in range(DATA_NODES)]
        ray.init(address=self.cluster.address, log_to_driver=False)

    def kill(self, node: Any) -> None:
        """As when its machine loses power."""
        self.cluster.remove_node(node, allow_graceful=False)
        self.data.remove(node)

    def close(self) -> None:
        """Ends it, with all that it started."""
        import ray

        import rayloader

        rayloader.shutdown()
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)


def loader(way: str, nbytes: int, workers: int, length: int) -> Iterable[Any]:
    """Gives the batches."""
    if way == "ray-data":
        return _RayData(nbytes, workers, length)
    from rayloader import DataLoader

    place = {"resources": {"remote" if way == "remote" else "local": 1}, "num_cpus": 0}
    spread = {"scheduling_strategy": "SPREAD"} if way == "remote" else {}
    return DataLoader(
        Sleeping(length, nbytes),
        batch_size=None,
        num_workers=workers,
        arenas=way != "calls",
        ray_remote_args={**place, **spread},
    )


class _Work:
    """What Ray Data's actors do."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        time.sleep(WORK_S)
        return {"batch": torch.full((1, self.nbytes), int(rows["id"][0]) % 256, dtype=torch.uint8).numpy()}


class _RayData:
    def __init__(self, nbytes: int, workers: int, length: int) -> None:
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = ray.data.range(length, override_num_blocks=length)
        actors = ray.data.ActorPoolStrategy(size=workers)
        self._data = rows.map_batches(
            _Work, fn_constructor_args=(nbytes,), batch_size=1, compute=actors, num_cpus=0, resources={"remote": 1}
        )
        self._ahead = 2 * workers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._data.iter_torch_batches(batch_size=1, prefetch_batches=self._ahead))


def epoch(batches: Iterable[Any], uncounted: int) -> dict[str, float]:
    """Consumes an epoch: batches a second and seconds of CPU a batch, without the first ones."""
    count = 0
    wall = thread = process = own = 0.0
    for _ in batches:
        if count == uncounted:
            wall, thread, process, own = time.perf_counter(), time.thread_time(), time.process_time(), 0.0
        count += 1
        asleep = time.thread_time()
        time.sleep(STEP_S)
        own += time.thread_time() - asleep
    counted = count - uncounted
    return {
        RATE: counted / (time.perf_counter() - wall),
        THREAD: (time.thread_time() - thread - own) / counted,
        PROCESS: (time.process_time() - process - own) / counted,
    }


def measure(options: Options) -> list[Figure]:
    """All rates and costs."""
    nodes = Nodes(options.workers)
    try:
        figures: list[Figure] = []
        for way in options.pick_peers(WAYS):
            for case in options.pick_cases(list(NBYTES)):
                if way == "ray-get":
                    figures.append(_measure_get(case, options))
                    continue
                counts = [count for count in COUNTS if count <= options.workers]
                for workers in counts if way != "ray-data" else [min(RAY_DATA_WORKERS, options.workers)]:
                    figures += _measure_one(way, case, workers, options)
        if "remote" in options.pick_peers(WAYS):
            figures.append(_measure_death(nodes, min(8, options.workers)))
        return figures
    finally:
        nodes.close()


def _measure_one(way: str, case: str, workers: int, options: Options) -> list[Figure]:
    uncounted = 3 * workers
    length = uncounted + int((1.5 if options.quick else 5.0) * ideal(workers))
    batches = loader(way, NBYTES[case], workers, length)
    rounds = []
    for number in range(options.rounds):
        harness.say(f"{QUESTION}: {way}, {case}, {workers} workers, round {number + 1} of {options.rounds}")
        rounds.append(epoch(batches, uncounted))
    named = {"workers": workers, "nbytes": NBYTES[case], "ideal": ideal(workers)}
    units = {RATE: "1/s", THREAD: "s", PROCESS: "s"}
    found = [
        harness.figure(QUESTION, case, way, metric, unit, [one[metric] for one in rounds], **named)
        for metric, unit in units.items()
    ]
    if way != "ray-data":
        found += _measure_steps(batches, uncounted, case, way, named)
    harness.say(f"{way} {case} {workers}: " + ", ".join(f"{f['metric']} {f['median']:g}" for f in found))
    return found


def _measure_steps(batches: Iterable[Any], uncounted: int, case: str, way: str, named: dict[str, Any]) -> list[Figure]:
    """Of the user's thread: seconds a batch by step; how long a batch's bytes keep it waiting; how often it waits."""
    iterator = itertools.islice(batches, uncounted, None)
    next(iterator)
    began = time.thread_time()
    with stepwise() as spent:
        count = sum(1 for _ in iterator)
    values = {f"step {step}": one.seconds for step, one in spent.items()}
    values["open, blocked"] = spent["open"].blocked
    values["steps in all"] = time.thread_time() - began
    found = [
        harness.figure(QUESTION, case, way, metric, "s", [seconds / count], **named)
        for metric, seconds in values.items()
    ]
    return [*found, harness.figure(QUESTION, case, way, "waits a batch", "", [spent["wait"].calls / count], **named)]


class _Gives:
    """An actor that gives a batch's bytes."""

    def give(self, nbytes: int) -> Any:
        return torch.full((nbytes,), 1, dtype=torch.uint8).numpy()


def _measure_get(case: str, options: Options) -> Figure:
    """One batch after the other, each of which is there on the other node when it is asked for."""
    import ray

    actor = ray.remote(_Gives).options(num_cpus=0, resources={"remote": 1}).remote()
    count, rounds = (20 if options.quick else 100), []
    for _ in range(1 + options.rounds):
        spent = 0.0
        for _ in range(count):
            result = actor.give.remote(NBYTES[case])
            ray.wait([result], fetch_local=False)
            began = time.perf_counter()
            ray.get(result)
            spent += time.perf_counter() - began
        rounds.append(count * NBYTES[case] / spent)
    ray.kill(actor)
    return harness.figure(QUESTION, case, "ray-get", BANDWIDTH, "1/s", rounds[1:], workers=1, nbytes=NBYTES[case])


def _measure_death(nodes: Nodes, workers: int) -> Figure:
    """Kills a node when a third of the epoch was taken."""
    length = int(15 * ideal(workers))
    gaps, last = [], 0.0
    for number, _ in enumerate(loader("remote", NBYTES["tiny"], workers, length)):
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
        if number == length // 3:
            nodes.kill(nodes.data[0])
        time.sleep(STEP_S)
    assert len(gaps) == length
    return harness.figure(QUESTION, "tiny", "remote", GAP, "s", [max(gaps[1:])], workers=workers)


def show(figures: list[Figure]) -> None:
    """Prints the tables."""
    counts = sorted({f["workers"] for f in figures if f["metric"] == RATE})
    for metric in (RATE, THREAD, PROCESS):
        scale = 1 if metric == RATE else 1e3
        rows = []
        for way, case in dict.fromkeys((f["implementation"], f["case"]) for f in figures if f["metric"] == metric):
            found = [harness.find(figures, implementation=way, case=case, metric=metric, workers=n) for n in counts]
            rows.append([f"{way}, {case}", *("-" if f is None else f"{scale * f['median']:.3g}" for f in found)])
        title = metric if metric == RATE else f"{metric}, ms a batch"
        harness.print_table(title, ["", *(f"{count} workers" for count in counts)], rows)
    for found in (f for f in figures if f["metric"] == BANDWIDTH):
        print(f"one ray.get at a time, {found['case']}: {found['median'] / 1e9:.3g} GB/s")
    ideals = {count: ideal(count) for count in counts}
    print(f"ideal rates: {ideals}")
    death = harness.find(figures, metric=GAP)
    if death is not None:
        print(f"{GAP}: {death['median']} s")


def known() -> dict[str, Any]:
    """What was measured last of each way: its figures, when and how."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.is_file() else {}


def main() -> None:
    """Measures, prints and writes the results."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # as many as cores: these sleep
    options = harness.options(__doc__, workers=16)
    machine = harness.machine()
    figures = measure(options)
    show(figures)
    settings = {"rounds": options.rounds, "workers": options.workers, "quick": options.quick}
    settings |= {"work_s": WORK_S, "step_s": STEP_S, "data_nodes": DATA_NODES}
    ways = {
        way: {"machine": machine, "settings": settings, "figures": [f for f in figures if f["implementation"] == way]}
        for way in options.pick_peers(WAYS)
    }
    RESULTS.write_text(json.dumps({**known(), **ways}, indent=1) + "\n")
    print(f"wrote {RESULTS.relative_to(harness.ROOT)}")


if __name__ == "__main__":
    with harness.clean_exit():
        main()
