"""How fast batches get to the GPU, what that costs the host, and how long a training step waits for them.

Measured for two sizes of batches, each way in a process of its own, all ways in every round:

- GB/s to the device over an epoch without a model, and as a share of one long copy from page-locked memory;
- CPU of the trainer's process, and of the whole machine, for each batch;
- the share of a training step of a small convolutional net that passes waiting for data: against the same steps over a
  batch that is on the device already;
- seconds from `iter()` to the first batch on the device: the first time, when workers start, and later.

The ways: torch with `pin_memory` and `non_blocking`; the same with a prefetcher by hand, which copies the next batch on
a side stream; SPDL's `transfer_tensor` behind torch's loader, if it is installed; rayloader with `pin_memory`; and
rayloader with `device`; its workers are forks, as torch's are.

Command: python benchmarks/gpu.py            under four minutes; writes gpu.json, the table in docs/howto/gpu.md, and a
                                             plot if matplotlib is installed
         python benchmarks/gpu.py --simulate without a GPU, in a minute: shows that everything works; its figures mean
                                             nothing, and go to gpu-simulated.json
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import tables

HERE = Path(__file__).parent
COMMAND = "python benchmarks/gpu.py"
RESULTS = HERE / "results" / "gpu.json"
DOCUMENT = HERE.parent / "docs" / "howto" / "gpu.md"
sys.path += [str(HERE.parent), str(HERE.parent / "tests")]  # the library, and the simulated accelerator

POOL = 256  # samples that exist
WARM_UP = 4  # batches, of those that are not timed


@dataclass(frozen=True)
class Case:
    """Batches of images."""

    batch_size: int
    dtype: torch.dtype
    side: int
    batches: int

    @property
    def nbytes(self) -> int:
        """Of a batch's images."""
        return self.batch_size * 3 * self.side**2 * self.dtype.itemsize


CASES = {
    "medium: 64 x 3 x 224 x 224 uint8, 9.6 MB": Case(64, torch.uint8, 224, 300),
    "large: 128 x 3 x 224 x 224 float32, 77 MB": Case(128, torch.float32, 224, 100),
}
SIMULATED = {
    "medium: 8 x 3 x 64 x 64 uint8": Case(8, torch.uint8, 64, 12),
    "large: 16 x 3 x 128 x 128 float32": Case(16, torch.float32, 128, 8),
}


class Images(Dataset):  # type: ignore[type-arg]
    """Samples that exist already: the loader is all that takes time."""

    def __init__(self, case: Case) -> None:
        self.length = case.batch_size * case.batches
        shape = (POOL, 3, case.side, case.side)
        self.pool = torch.randint(0, 255, shape, dtype=torch.uint8).to(case.dtype)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pool[index % POOL], index % 10


Batches = Iterable[Any]


class Gpu:
    """The real device."""

    device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def move(self, batch: Any) -> Any:
        return [part.to(self.device, non_blocking=True) for part in batch]

    def prefetched(self, batches: Batches) -> Iterator[Any]:
        """The prefetcher that programs write by hand: the next batch is copied on a side stream."""
        side, ready = torch.cuda.Stream(), None
        for batch in batches:
            with torch.cuda.stream(side):
                following = self.move(batch)
            if ready is not None:
                yield ready
            torch.cuda.current_stream().wait_stream(side)
            for part in following:
                part.record_stream(torch.cuda.current_stream())
            ready = following
        if ready is not None:
            yield ready

    def link(self) -> float:
        """GB/s of one long copy from page-locked memory."""
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device=self.device)
        rates = []
        for _ in range(5):
            self.synchronize()
            began = time.perf_counter()
            there.copy_(host, non_blocking=True)
            self.synchronize()
            rates.append(host.nbytes / (time.perf_counter() - began) / 1e9)
        return max(rates)

    def install(self) -> None:
        """Nothing to do: it is there."""


class Simulated(Gpu):
    """Copies to main memory, when somebody asks whether they are done."""

    device = torch.device("cpu")

    def synchronize(self) -> None:
        self.accelerator.advance(self.accelerator.queued)

    def move(self, batch: Any) -> Any:
        return [self.accelerator.copy(part, self.device) for part in batch]

    def prefetched(self, batches: Batches) -> Iterator[Any]:
        return map(self.move, batches)

    def link(self) -> float:
        return 1.0

    def install(self) -> None:
        import pytest

        from simulated_device import SimulatedAccelerator

        self.accelerator = SimulatedAccelerator(at_each_query=1).install(pytest.MonkeyPatch())


@dataclass
class Job:
    gpu: Gpu
    case: Case
    workers: int
    dataset: Images

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "batch_size": self.case.batch_size,
            "num_workers": self.workers,
            "persistent_workers": True,
        }


# Each way makes a loader once, and returns what gives the batches of an epoch, on the device.
Epochs = Callable[[], Batches]


def torch_pinned(job: Job) -> Epochs:
    loader = DataLoader(**job.arguments, pin_memory=True)
    return lambda: map(job.gpu.move, loader)


def torch_prefetched(job: Job) -> Epochs:
    loader = DataLoader(**job.arguments, pin_memory=True)
    return lambda: job.gpu.prefetched(loader)


def spdl(job: Job) -> Epochs:
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    transfer = getattr(spdl.io, "transfer_tensor_h2d", None) or spdl.io.transfer_tensor
    loader = DataLoader(**job.arguments)

    def epoch() -> Iterator[Any]:
        pipeline = PipelineBuilder().add_source(loader).pipe(transfer).add_sink(2).build(num_threads=1)
        with pipeline.auto_stop():
            yield from pipeline

    return epoch


def rayloader_pinned(job: Job) -> Epochs:
    import rayloader

    loader = rayloader.DataLoader(**job.arguments, workers="fork", pin_memory=True)
    return lambda: map(job.gpu.move, loader)


def rayloader_device(job: Job) -> Epochs:
    import rayloader

    loader = rayloader.DataLoader(**job.arguments, workers="fork", device="cuda")
    return lambda: loader


WAYS: dict[str, Callable[[Job], Epochs]] = {
    "torch, pin_memory": torch_pinned,
    "torch, prefetcher by hand": torch_prefetched,
    "SPDL, transfer_tensor": spdl,
    "rayloader, pin_memory": rayloader_pinned,
    "rayloader, device": rayloader_device,
}


class Net(torch.nn.Module):
    """A small convolutional net; a step of it takes some milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(32, 64, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.Conv2d(64, 128, 3, stride=2),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> Any:
        return self.layers(images.float() / 255)


def machine_cpu() -> float:
    """Seconds of all cores' work since the machine started."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def first_batch(gpu: Gpu, epochs: Epochs) -> float:
    """Seconds to the first batch on the device; the rest of the epoch is left."""
    began = time.perf_counter()
    batches = iter(epochs())
    next(batches)
    gpu.synchronize()
    seconds = time.perf_counter() - began
    del batches
    return seconds


def throughput(gpu: Gpu, case: Case, epochs: Epochs) -> dict[str, float]:
    """Rates over the batches of an epoch after the first few; in the epoch before it memory is page-locked."""
    for _ in epochs():
        pass
    seen = 0
    for _ in epochs():
        seen += 1
        if seen == WARM_UP:
            gpu.synchronize()
            began, own, whole = time.perf_counter(), time.process_time(), machine_cpu()
    gpu.synchronize()
    seconds, count = time.perf_counter() - began, seen - WARM_UP
    return {
        "GB/s": count * case.nbytes / seconds / 1e9,
        "trainer CPU, ms": 1e3 * (time.process_time() - own) / count,
        "machine CPU, ms": 1e3 * (machine_cpu() - whole) / count,
    }


def waiting(gpu: Gpu, epochs: Epochs) -> dict[str, float]:
    """The share of a training step that passes waiting: of the time over the loader, what a resident batch saves."""
    net = Net().to(gpu.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        images, labels = batch
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()

    def timed(batches: Batches) -> tuple[float, int, Any]:
        seen, batch = 0, None
        for batch in batches:
            step(batch)
            seen += 1
            if seen == WARM_UP:
                gpu.synchronize()
                began = time.perf_counter()
        gpu.synchronize()
        return time.perf_counter() - began, seen, batch

    loaded, count, resident = timed(epochs())
    alone, _, _ = timed([resident] * count)
    return {"step, ms": 1e3 * alone / (count - WARM_UP), "waiting": max(0.0, 1 - alone / loaded)}


def measure(way: str, rounds: int, workers: int, simulate: bool) -> list[dict[str, Any]]:
    """The figures of one way, of each case and round."""
    gpu = Simulated() if simulate else Gpu()
    gpu.install()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    gpu.move([torch.zeros(1)])  # the context exists before anything is timed
    gpu.synchronize()
    figures = []
    for name, case in (SIMULATED if simulate else CASES).items():
        epochs = WAYS[way](Job(gpu, case, workers, Images(case)))
        cold = first_batch(gpu, epochs)
        for number in range(rounds):
            found = {"first batch, s": first_batch(gpu, epochs), **throughput(gpu, case, epochs)}
            found |= waiting(gpu, epochs)
            found |= {"first batch of all, s": cold} if number == 0 else {}
            figures.append({"case": name, "way": way, **found})
        del epochs
    return figures


def run(way: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one way in a process of its own; says why it could not."""
    command = [sys.executable, __file__, "--one", way, "--rounds", str(arguments.rounds)]
    command += ["--workers", str(arguments.workers), *(["--simulate"] if arguments.simulate else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.limit, check=False)
    except subprocess.TimeoutExpired:
        print(f"{way}: not done after {arguments.limit:.0f} s", file=sys.stderr)
        return []
    if done.returncode:
        print(f"{way}: {done.stderr.strip().splitlines()[-1:]}\n{done.stderr[-1500:]}", file=sys.stderr)
        return []
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


COLUMNS = {  # with their formats in the document
    "GB/s": ".1f",
    "of one long copy": ".0%",
    "trainer CPU, ms": ".1f",
    "machine CPU, ms": ".0f",
    "waiting": ".0%",
    "step, ms": ".1f",
    "first batch, s": ".2f",
    "first batch of all, s": ".2f",
}


def summary(figures: list[dict[str, Any]], link: float) -> list[dict[str, Any]]:
    """Medians over the rounds, a row for each case and way."""
    rows = []
    pairs = dict.fromkeys((figure["case"], figure["way"]) for figure in figures)
    for case, way in sorted(pairs, key=lambda pair: (not pair[0].startswith("medium"), list(WAYS).index(pair[1]))):
        of_both = [figure for figure in figures if (figure["case"], figure["way"]) == (case, way)]
        row = {"case": case, "way": way}
        for column in COLUMNS:
            values = [figure[column] for figure in of_both if column in figure]
            if values:
                row[column] = statistics.median(values)
        row["of one long copy"] = row["GB/s"] / link
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], title: str) -> None:
    """The table."""
    print(title)
    print(f"{'':28}" + "".join(f"{column:>22}" for column in COLUMNS))
    case = None
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            print(case)
        percent = {"of one long copy", "waiting"}
        cells = [f"{row[column]:.1%}" if column in percent else f"{row[column]:.3g}" for column in COLUMNS]
        print(f"  {row['way']:26}" + "".join(f"{cell:>22}" for cell in cells))


def table(results: dict[str, Any]) -> str:
    """The table of the document; besides the medians it has the rate of each round, because the first may differ."""
    rates: dict[tuple[str, str], list[str]] = {}
    for figure in results["figures"]:
        rates.setdefault((figure["case"], figure["way"]), []).append(format(figure["GB/s"], COLUMNS["GB/s"]))
    cells = [["batches", "way", *COLUMNS, "GB/s in each round"]]
    for row in results["rows"]:
        figures = [format(row[column], of) for column, of in COLUMNS.items()]
        cells.append([row["case"], row["way"], *figures, ", ".join(rates[row["case"], row["way"]])])
    return f"{results['title']} (medians of {results['rounds']} rounds).\n\n{tables.markdown(cells)}"


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """The plot: a bar for each way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("case", "way"))
    shown = ["GB/s", "trainer CPU, ms", "waiting", "first batch, s"]
    canvas, axes = pyplot.subplots(1, len(shown), figsize=(5 * len(shown), 5), layout="constrained")
    for column, axis in zip(shown, axes, strict=True):
        for number, way in enumerate(ways):
            heights = [row[column] for row in rows if row["way"] == way]
            places = [cases.index(row["case"]) + 0.16 * number for row in rows if row["way"] == way]
            axis.bar(places, heights, 0.15, label=way)
        axis.set_xticks([place + 0.32 for place in range(len(cases))], [case.split(":")[0] for case in cases])
        axis.set_title(column)
    axes[0].legend(fontsize=8)
    canvas.suptitle(title)
    canvas.savefig(path, dpi=110)


def main() -> None:
    """Measures all, or with `--one` one way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="without a GPU")
    parser.add_argument("--rounds", type=int, default=2, help="how often each way is measured; 2 by default")
    most = max(1, min(12, len(os.sched_getaffinity(0)) - 4))
    parser.add_argument("--workers", type=int, default=most, help="of each loader; four less than cores, at most 12")
    parser.add_argument("--limit", type=float, default=55.0, help="seconds for each way, at most")
    parser.add_argument("--ways", nargs="+", default=[""], help="parts of the names of the ways to measure")
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder for gpu.json and gpu.png")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.simulate and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --simulate runs everything without one")
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.rounds, arguments.workers, arguments.simulate)))
        return
    link = (Simulated() if arguments.simulate else Gpu()).link()
    figures: list[dict[str, Any]] = []
    for way in WAYS:
        if not any(part in way for part in arguments.ways):
            continue
        if way.startswith("SPDL") and importlib.util.find_spec("spdl") is None:
            continue
        figures += run(way, arguments)
    name = "simulated, so the figures mean nothing" if arguments.simulate else torch.cuda.get_device_name()
    title = f"{name}; {os.cpu_count()} cores, {arguments.workers} workers; one long copy: {link:.1f} GB/s"
    rows = summary(figures, link)
    show(rows, title)
    arguments.out.mkdir(parents=True, exist_ok=True)
    stem = "gpu-simulated" if arguments.simulate else "gpu"
    document = {"title": title, "link": link, "rounds": arguments.rounds, "rows": rows, "figures": figures}
    path = arguments.out / f"{stem}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    if path.resolve() == RESULTS.resolve():
        tables.put(DOCUMENT, COMMAND, table(document))
    with contextlib.suppress(ImportError):
        draw(rows, title, arguments.out / f"{stem}.png")


if __name__ == "__main__":
    main()
