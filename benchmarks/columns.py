"""Rates of datasets over Arrow and Parquet, beside Hugging Face's `datasets` and Ray Data; and what resuming costs.

Motive: `rayloader.ArrowDataset` and `rayloader.ParquetStream` are to give at least twice the rows of the two libraries
that people load such files with.
Method: each library runs in a process of its own, in an order that changes. A round reads one epoch of the case's files
in each way, with the clock from `iter()` to the end; the first is not measured, so workers (persistent, but for Ray
Data, whose tasks begin with each epoch) and caches are warm. Rows in random order: `ArrowDataset` over the cached
Parquet files, and a `Dataset` of `datasets` over the same with torch's loader. Rows in order: `ParquetStream` with and
without a batch size, a streaming dataset of `datasets` with torch's loader, and Ray Data's `iter_torch_batches`. Each
rate is also told as its ratio to that of `datasets` and of Ray Data in the same round.
Cases: "numbers" has 20 columns of float32; "tokens" a list of 0 to 399 int32, of which a batch is a list; "images" a
JPEG of 96x96 in a binary column, which the workers decode.
Resuming: the seconds from loading a state, of 10%, 50% and 90% of an epoch of `ParquetStream` with a shuffle buffer of
10,000 rows, to the first batch, and the ratio to the first batch of an epoch that begins.
Command: python benchmarks/columns.py [--rounds N] [--workers 2] [--cases numbers,tokens] [--peers datasets] [--quick]
Results, where all is measured: benchmarks/results/columns.json, and the table in docs/howto/columns.md.
"""

from __future__ import annotations

import io
import itertools
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import harness
import tables
from harness import Figure, Options
from processes import Missing, Peer

QUESTION = "columns"
COMMAND = "python benchmarks/columns.py"
RESULTS = harness.RESULTS / "columns.json"
DOCUMENT = harness.ROOT / "docs" / "howto" / "columns.md"
ROWS = {"numbers": 20_000, "tokens": 8_000, "images": 1_600}
BATCH_SIZES = {"numbers": 256, "tokens": 64, "images": 32}
FILES, GROUPS = 4, 4  # row groups of each file
BUFFER = 10_000
# Who reads in which way, and what it is called.
WAYS = {
    "ArrowDataset, shuffled": "rayloader",
    "datasets, shuffled": "datasets",
    "ParquetStream": "rayloader",
    "ParquetStream of batches": "rayloader",
    "datasets, streamed": "datasets",
    "Ray Data": "ray-data",
}
AGAINST = {
    "ArrowDataset, shuffled": ("datasets, shuffled", "Ray Data"),
    "ParquetStream": ("datasets, streamed", "Ray Data"),
    "ParquetStream of batches": ("datasets, streamed", "Ray Data"),
}
SHARES = (10, 50, 90)  # percent of an epoch that was read when the state was saved


# ---- the files


def write(case: str, rows: int, folder: Path) -> None:
    """Writes a case's Parquet files."""
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    generator = np.random.default_rng(0)
    if case == "numbers":
        table = pa.table({f"c{n}": generator.random(rows, np.float32) for n in range(20)})
    elif case == "tokens":
        bounds = np.cumsum([0, *generator.integers(0, 400, rows)]).astype(np.int32)
        values = pa.array(generator.integers(0, 50_000, bounds[-1], dtype=np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(bounds), values)})
    else:
        from PIL import Image

        pool = []
        for _ in range(100):
            small = generator.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((96, 96)).save(file, "JPEG")
            pool.append(file.getvalue())
        table = pa.table({"image": list(itertools.islice(itertools.cycle(pool), rows)), "label": np.arange(rows) % 10})
    size = rows // FILES
    for number in range(FILES):
        path = folder / f"{number}.parquet"
        parquet.write_table(table.slice(number * size, size), path, row_group_size=size // GROUPS)


def pixels(data: bytes) -> Any:
    """A JPEG as a tensor."""
    import numpy as np
    import torch
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


# ---- the implementations, each in its process

_loaders: dict[tuple[str, str], Iterable[Any]] = {}


def epoch(_: str, way: str, case: str, folder: str, workers: int) -> dict[str, float]:
    """Reads an epoch; gives its seconds, and how many rows it had."""
    if (way, case) not in _loaders:
        _loaders.clear()  # workers of the case before end
        _loaders[way, case] = MAKERS[way](case, folder, workers)
    begin, rows = time.perf_counter(), 0
    for batch in _loaders[way, case]:
        first = next(iter(batch.values()))
        rows += len(first)
    return {"seconds": time.perf_counter() - begin, "rows": rows}


def _options(case: str) -> dict[str, Any]:
    return {"decode": {"image": pixels}} if case == "images" else {}


def _arrow(case: str, folder: str, workers: int) -> Iterable[Any]:
    import rayloader

    dataset = rayloader.ArrowDataset(folder, cache=f"{folder}/cache", **_options(case))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "workers": "fork"}
    return rayloader.DataLoader(dataset, BATCH_SIZES[case], shuffle=True, **options)


def _stream(case: str, folder: str, workers: int, batches: bool = False) -> Iterable[Any]:
    import rayloader

    size = BATCH_SIZES[case]
    stream = rayloader.ParquetStream(folder, batch_size=size if batches else None, **_options(case))
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "workers": "fork"}
    return rayloader.DataLoader(stream, None if batches else size, **options)


def _stream_of_batches(case: str, folder: str, workers: int) -> Iterable[Any]:
    return _stream(case, folder, workers, batches=True)


def _in_lists(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tokens": [row["tokens"] for row in rows]}


def _decoded(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    import torch

    return {"image": list(map(pixels, columns["image"])), "label": list(map(torch.tensor, columns["label"]))}


def _hugging_face(case: str, folder: str, workers: int, streams: bool) -> Iterable[Any]:
    from datasets import disable_progress_bars, load_dataset
    from torch.utils.data import DataLoader

    disable_progress_bars()
    files = sorted(map(str, Path(folder).glob("*.parquet")))
    data = load_dataset("parquet", data_files=files, split="train", streaming=streams, cache_dir=f"{folder}/datasets")
    if case != "images":
        data = data.with_format("torch")
    elif streams:
        data = data.map(_decoded, batched=True, batch_size=BATCH_SIZES[case])
    else:
        data = data.with_transform(_decoded)
    collate = {"collate_fn": _in_lists} if case == "tokens" else {}
    order = {} if streams else {"shuffle": True}
    return DataLoader(data, BATCH_SIZES[case], num_workers=workers, persistent_workers=True, **order, **collate)


def _datasets(case: str, folder: str, workers: int) -> Iterable[Any]:
    return _hugging_face(case, folder, workers, streams=False)


def _datasets_streamed(case: str, folder: str, workers: int) -> Iterable[Any]:
    return _hugging_face(case, folder, workers, streams=True)


class _RayData:
    def __init__(self, case: str, folder: str, workers: int) -> None:
        import ray.data

        if not ray.is_initialized():
            ray.init(address="local", num_cpus=workers, log_to_driver=False, include_dashboard=False)
            ray.data.DataContext.get_current().enable_progress_bars = False
        self.data = ray.data.read_parquet(sorted(map(str, Path(folder).glob("*.parquet"))))
        self.case = case
        if case == "images":
            self.data = self.data.map_batches(self._decode, batch_size=BATCH_SIZES[case])

    @staticmethod
    def _decode(columns: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        return {"image": np.stack([pixels(data).numpy() for data in columns["image"]]), "label": columns["label"]}

    def __iter__(self) -> Any:
        import torch

        size = BATCH_SIZES[self.case]
        if self.case != "tokens":
            yield from self.data.iter_torch_batches(batch_size=size)
            return
        for batch in self.data.iter_batches(batch_size=size):  # the other would join the tensors of a list
            yield {"tokens": list(map(torch.tensor, batch["tokens"]))}


MAKERS = {
    "ArrowDataset, shuffled": _arrow,
    "datasets, shuffled": _datasets,
    "ParquetStream": _stream,
    "ParquetStream of batches": _stream_of_batches,
    "datasets, streamed": _datasets_streamed,
    "Ray Data": _RayData,
}


def resumed(_: str, case: str, folder: str, workers: int, percent: int) -> float:
    """Seconds to the first batch of an epoch that begins, with 0 percent, or continues."""
    import rayloader

    def load() -> Any:
        stream = rayloader.ParquetStream(folder, shuffle_buffer=BUFFER, **_options(case))
        return rayloader.DataLoader(stream, BATCH_SIZES[case], num_workers=workers, workers="fork")

    loader = load()
    state = None
    if percent:
        batches = _rows_of(folder) * percent // 100 // BATCH_SIZES[case]
        iterator = iter(loader)
        for _batch in itertools.islice(iterator, batches):
            pass
        state = loader.state_dict()
        del iterator
    loader = load()
    begin = time.perf_counter()
    if state is not None:
        loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - begin


def _rows_of(folder: str) -> int:
    """How many rows the files have."""
    from pyarrow import parquet

    return sum(parquet.read_metadata(path).num_rows for path in Path(folder).glob("*.parquet"))


# ---- the driver


def measure(options: Options) -> list[Figure]:
    """Rates and seconds, for each case."""
    wanted = options.pick_peers([*dict.fromkeys(WAYS.values())])
    peers = {name: Peer(name) for name in wanted}
    try:
        found: list[Figure] = []
        for case in options.pick_cases(list(ROWS)):
            rows = ROWS[case] // (4 if options.quick else 1)
            with tempfile.TemporaryDirectory() as folder:
                write(case, rows, Path(folder))
                found += _rates(case, rows, folder, peers, options)
                if "rayloader" in peers:
                    found += _resuming(case, folder, peers["rayloader"], options)
        return found
    finally:
        for peer in peers.values():
            peer.close()


def _rates(case: str, rows: int, folder: str, peers: dict[str, Peer], options: Options) -> list[Figure]:
    ways = [way for way, name in WAYS.items() if name in peers]
    rates: dict[str, Any] = {way: [] for way in ways}
    for number in range(-1, options.rounds):
        harness.say(f"{QUESTION}: {case}, round {number + 1} of {options.rounds}")
        for way in harness.rotated(ways, max(0, number)):
            if isinstance(rates[way], Missing):
                continue
            arguments = {"way": way, "case": case, "folder": folder, "workers": options.workers}
            answer = peers[WAYS[way]].call("columns:epoch", **arguments)
            if isinstance(answer, Missing):
                rates[way] = answer
            elif answer["rows"] != rows:
                raise RuntimeError(f"{way} gave {answer['rows']} rows of {case} instead of {rows}")
            elif number >= 0:
                rates[way].append(rows / answer["seconds"])
    figures = {way: harness.figure(QUESTION, case, way, "rate", "rows/s", found) for way, found in rates.items()}
    ratios = [
        harness.ratio(figures[way], figures[other], metric=f"to {other}")
        for way, others in AGAINST.items()
        for other in others
        if way in figures and other in figures
    ]
    return [*figures.values(), *(ratio for ratio in ratios if ratio is not None)]


def _resuming(case: str, folder: str, peer: Peer, options: Options) -> list[Figure]:
    seconds: dict[int, list[float]] = {percent: [] for percent in (0, *SHARES)}
    for number in range(options.rounds):
        harness.say(f"{QUESTION}: {case}, resuming, round {number + 1} of {options.rounds}")
        for percent in seconds:
            arguments = {"case": case, "folder": folder, "workers": options.workers, "percent": percent}
            seconds[percent].append(peer.call("columns:resumed", **arguments))
    figures = {p: harness.figure(QUESTION, case, f"at {p}%", "resumed", "s", found) for p, found in seconds.items()}
    ratios = [harness.ratio(figures[percent], figures[0], metric="to 0%") for percent in SHARES]
    return [*figures.values(), *(ratio for ratio in ratios if ratio is not None)]


def table(document: dict[str, Any]) -> str:
    """In Markdown: what was measured on, and a row for each way and case."""
    machine, settings, figures = document["machine"], document["settings"], document["figures"]
    rounds = f"the median of {settings['rounds']} rounds" if settings["rounds"] > 1 else "one round"
    caption = (
        f"How many times the rows of another library, {rounds}, with {settings['workers']} workers on "
        f"{machine['cores']} cores, {machine['date'][:10]}. The last column is the time to the first batch after "
        f"resuming at 10%, 50% and 90% of an epoch, over that of an epoch that begins."
    )
    rows = [["rows", "read by", "to `datasets`", "to Ray Data", "resuming"]]
    for case in dict.fromkeys(figure["case"] for figure in figures):
        for way, (theirs, ray_data) in AGAINST.items():
            ratios = [
                harness.find(figures, case=case, implementation=way, metric=f"to {other}")
                for other in (theirs, ray_data)
            ]
            resumes = [
                harness.find(figures, case=case, implementation=f"at {percent}%", metric="to 0%") for percent in SHARES
            ]
            last = ", ".join(map(harness.show, resumes)) if way == "ParquetStream" else ""
            rows.append([case, way, *map(harness.show, ratios), last])
    return f"{caption}\n\n{tables.markdown(rows)}"


def main() -> None:
    """Measures, prints and writes."""
    options = harness.options(__doc__, needs=("pyarrow",))
    machine = harness.machine()
    figures = measure(options)
    harness.say("")
    settings = {"rounds": options.rounds, "workers": options.workers, "quick": options.quick}
    document = {"machine": machine, "settings": settings, "figures": figures}
    for figure in figures:
        if figure["unit"]:
            print(f"{figure['case']}, {figure['implementation']}: {harness.show(figure)} {figure['unit']}")
    print(made := table(document))
    harness.print_missing(figures)
    if not (options.quick or options.cases or options.peers):
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        tables.put(DOCUMENT, COMMAND, made)


if __name__ == "__main__":
    with harness.clean_exit():
        main()
