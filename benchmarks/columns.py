"""Rates of datasets over Arrow and Parquet, beside Hugging Face's `datasets` and Ray Data; and what resuming costs.

Motive: `rayloader.ArrowDataset` and `rayloader.ParquetStream` are to give at least twice the rows of the two libraries
that people load such files with.
Method: each library runs in a process of its own, in an order that changes. A round reads one epoch of the case's files
in each way, with the clock from `iter()` to the end; the first is not measured, so workers (persistent, but for Ray
Data, whose tasks begin with each epoch) and caches are warm. Rows in random order: `ArrowDataset` over the cached
Parquet files, and a `Dataset` of `datasets` over the same with torch's loader. Rows in order: `ParquetStream` with and
without a batch size, a streaming dataset of `datasets` with torch's loader, and Ray Data's `iter_torch_batches`. Each
rate is also told as its ratio to that of `datasets` and of Ray Data in the same round. The processor time of the
process and its workers is told too, since it depends less on what else the machine does.
Cases: "numbers" has 20 columns of float32; "tokens" a list of 0 to 399 int32, of which a batch is a list; "images" a
JPEG of 96x96 in a binary column, which all of them decode by the same function. There "decoding alone" is as many
processes that read the files, decode each image and drop it: no loader with so many workers can give more.
Resuming: the seconds from loading a state, of 10%, 50% and 90% of an epoch of `ParquetStream` with a shuffle buffer of
1,000 rows, to the first row, or in a loader with workers, whose processes begin then, to the first batch; and the ratio
to an epoch that begins. Also how many row groups the stream asks for until then. The files have ten times the rows and
row groups. Each state is made once; then the four are measured by turns, five times in each round.
Command: python benchmarks/columns.py [--rounds N] [--workers 2] [--cases numbers,tokens] [--peers datasets] [--quick]
Results, where all is measured: benchmarks/results/columns.json, and the table in docs/howto/columns.md.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
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
ROWS = {"numbers": 20_000, "tokens": 8_000, "images": 4_800}
BATCH_SIZES = {"numbers": 256, "tokens": 64, "images": 32}
FILES, GROUPS = 4, 4  # row groups of each file
# For resuming: how many times the rows and row groups, rows of the buffer, and measurements in each round.
LONGER, BUFFER, TURNS = 10, 1_000, 5
# Who reads in which way, and what it is called.
WAYS = {
    "ArrowDataset, shuffled": "rayloader",
    "datasets, shuffled": "datasets",
    "ParquetStream": "rayloader",
    "ParquetStream of batches": "rayloader",
    "datasets, streamed": "datasets",
    "Ray Data": "ray-data",
    "decoding alone": "torch",
}
AGAINST = {
    "ArrowDataset, shuffled": ("datasets, shuffled", "Ray Data"),
    "ParquetStream": ("datasets, streamed", "Ray Data"),
    "ParquetStream of batches": ("datasets, streamed", "Ray Data"),
    "decoding alone": ("datasets, streamed", "Ray Data"),
}
NOT_THERE = {("decoding alone", "numbers"), ("decoding alone", "tokens")}
STREAM, LOADER = "the stream alone", "a loader"  # what resumes
SHARES = (10, 50, 90)  # percent of an epoch that was read when the state was saved


# ---- the files


def write(case: str, rows: int, folder: Path, groups: int = GROUPS) -> None:
    """Writes a case's Parquet files, each of so many row groups."""
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
        parquet.write_table(table.slice(number * size, size), path, row_group_size=size // groups)


def pixels(data: bytes) -> Any:
    """A JPEG as a tensor."""
    import numpy as np
    import torch
    from PIL import Image

    return torch.from_numpy(np.array(Image.open(io.BytesIO(data))))


# ---- the implementations, each in its process

_loaders: dict[tuple[str, str], Iterable[Any]] = {}


def epoch(_: str, way: str, case: str, folder: str, workers: int) -> dict[str, float]:
    """Reads an epoch; gives its seconds, those of processors, and how many rows it had."""
    if (way, case) not in _loaders:
        _loaders.clear()  # workers of the case before end
        _loaders[way, case] = MAKERS[way](case, folder, workers)
    begin, before, rows = time.perf_counter(), _processor_seconds(), 0
    for batch in _loaders[way, case]:
        first = next(iter(batch.values()))
        rows += len(first)
    seconds = time.perf_counter() - begin
    after = _processor_seconds()
    used = sum(after[process] - before.get(process, 0.0) for process in after)
    return {"seconds": seconds, "processors": used, "rows": rows}


def _processor_seconds() -> dict[int, float]:
    """By this process and those below it, the seconds for which each has run."""
    import psutil

    found = {}
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


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


class _Decoding:
    def __init__(self, _: str, folder: str, workers: int) -> None:
        paths = sorted(map(str, Path(folder).glob("*.parquet")))
        self._parts = [paths[worker::workers] for worker in range(workers)]
        self._processes = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"))

    @staticmethod
    def _decode(paths: list[str]) -> int:
        from pyarrow import parquet

        data = [image for path in paths for image in parquet.read_table(path, columns=["image"])["image"].to_pylist()]
        for image in data:
            pixels(image)
        return len(data)

    def __iter__(self) -> Any:
        for count in self._processes.map(self._decode, self._parts):
            yield {"image": range(count)}


MAKERS = {
    "ArrowDataset, shuffled": _arrow,
    "datasets, shuffled": _datasets,
    "ParquetStream": _stream,
    "ParquetStream of batches": _stream_of_batches,
    "datasets, streamed": _datasets_streamed,
    "Ray Data": _RayData,
    "decoding alone": _Decoding,
}
_states: dict[tuple[str, int, int], Any] = {}


def resumed(_: str, case: str, folder: str, workers: int, percent: int) -> dict[str, float]:
    """Seconds to the first row or batch, with 0 percent of an epoch that begins; without workers also row groups."""
    import rayloader
    from rayloader.data.parquet import _Ahead

    stream = rayloader.ParquetStream(folder, shuffle_buffer=BUFFER, **_options(case))
    asked_for = 0
    begin_to_read = _Ahead._begin

    def counted(ahead: Any, group: int) -> Any:
        nonlocal asked_for
        asked_for += 1
        return begin_to_read(ahead, group)

    def load() -> Any:
        return rayloader.DataLoader(stream, BATCH_SIZES[case], num_workers=workers, workers="fork")

    if (case, workers, percent) not in _states:
        _loaders.clear()
        taken = _rows_of(folder) * percent // 100
        reading = load() if workers else iter(stream)
        for _item in itertools.islice(reading, taken // BATCH_SIZES[case] if workers else taken):
            pass
        _states[case, workers, percent] = reading.state_dict() if percent else None
        del reading
    state = _states[case, workers, percent]
    resuming = load() if workers else iter(stream)
    _Ahead._begin = counted
    try:
        begin = time.perf_counter()
        if state is not None:
            resuming.load_state_dict(state)
        next(iter(resuming))
        seconds = time.perf_counter() - begin
    finally:
        _Ahead._begin = begin_to_read
    return {"seconds": seconds, "row groups": asked_for}


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
                with tempfile.TemporaryDirectory() as folder:
                    write(case, LONGER * rows, Path(folder), LONGER * GROUPS)
                    found += _resuming(case, folder, peers["rayloader"], options)
        return found
    finally:
        for peer in peers.values():
            peer.close()


def _rates(case: str, rows: int, folder: str, peers: dict[str, Peer], options: Options) -> list[Figure]:
    ways = [way for way, name in WAYS.items() if name in peers and (way, case) not in NOT_THERE]
    rates: dict[str, Any] = {way: [] for way in ways}
    used: dict[str, Any] = {way: [] for way in ways}
    for number in range(-1, options.rounds):
        harness.say(f"{QUESTION}: {case}, round {number + 1} of {options.rounds}")
        for way in harness.rotated(ways, max(0, number)):
            if isinstance(rates[way], Missing):
                continue
            arguments = {"way": way, "case": case, "folder": folder, "workers": options.workers}
            answer = peers[WAYS[way]].call("columns:epoch", **arguments)
            if isinstance(answer, Missing):
                rates[way] = used[way] = answer
            elif answer["rows"] != rows:
                raise RuntimeError(f"{way} gave {answer['rows']} rows of {case} instead of {rows}")
            elif number >= 0:
                rates[way].append(rows / answer["seconds"])
                used[way].append(1e6 * answer["processors"] / rows)
    figures = {way: harness.figure(QUESTION, case, way, "rate", "rows/s", found) for way, found in rates.items()}
    times = {way: harness.figure(QUESTION, case, way, "processors", "us/row", found) for way, found in used.items()}
    ratios = []
    for way, others in AGAINST.items():
        for other in others:
            if way in figures and other in figures:
                ratios.append(harness.ratio(figures[way], figures[other], metric=f"to {other}"))
                names = {"metric": f"processors of {other}", "implementation": way}
                ratios.append(harness.ratio(times[other], times[way], **names))
    return [*figures.values(), *times.values(), *(ratio for ratio in ratios if ratio is not None)]


def _resuming(case: str, folder: str, peer: Peer, options: Options) -> list[Figure]:
    found: list[Figure] = []
    for who, workers in ((STREAM, 0), (LOADER, options.workers)):
        answers: dict[int, list[dict[str, float]]] = {percent: [] for percent in (0, *SHARES)}
        for number in range(options.rounds):
            harness.say(f"{QUESTION}: {case}, resuming, {who}, round {number + 1} of {options.rounds}")
            for turn in range(TURNS):
                for percent in harness.rotated(list(answers), turn):
                    arguments = {"case": case, "folder": folder, "workers": workers, "percent": percent}
                    answers[percent].append(peer.call("columns:resumed", **arguments))
        figures = {
            percent: harness.figure(QUESTION, case, who, f"at {percent}%", "s", [one["seconds"] for one in all_of])
            for percent, all_of in answers.items()
        }
        found += figures.values()
        for percent in SHARES:
            ratio = harness.ratio(figures[percent], figures[0], metric=f"at {percent}% to 0%")
            found += [ratio] if ratio is not None else []
        for percent, all_of in answers.items() if not workers else ():
            groups = [one["row groups"] for one in all_of]
            found.append(harness.figure(QUESTION, case, who, f"at {percent}%, asked for", "row groups", groups))
    return found


def table(document: dict[str, Any]) -> str:
    """In Markdown: what was measured on, and a row for each way and case."""
    machine, settings, figures = document["machine"], document["settings"], document["figures"]
    rounds = f"the median of {settings['rounds']} rounds" if settings["rounds"] > 1 else "one round"
    caption = (
        f"How many times the rows of another library, {rounds}, with {settings['workers']} workers on "
        f"{machine['cores']} cores, {machine['date'][:10]}. In parentheses, the processor time of the other library "
        f"over that of the row. pyarrow {machine['pyarrow']}, `datasets` {machine['datasets']}, Ray {machine['ray']}, "
        f"torch {machine['torch']}."
    )
    rows = [["rows", "read by", "to `datasets`", "to Ray Data"]]
    for case in dict.fromkeys(figure["case"] for figure in figures):
        for way, others in AGAINST.items():
            if (way, case) in NOT_THERE:
                continue
            cells = []
            for other in others:
                names = {"case": case, "implementation": way}
                rate, time_used = (
                    harness.find(figures, metric=metric, **names)
                    for metric in (f"to {other}", f"processors of {other}")
                )
                cells.append(f"{harness.show(rate)} ({harness.show(time_used)})")
            rows.append([case, way, *cells])
    return f"{caption}\n\n{tables.markdown(rows)}\n\n{_table_of_resuming(figures, settings)}"


def _table_of_resuming(figures: list[Figure], settings: dict[str, Any]) -> str:
    caption = (
        "The time to the first row, or batch of the loader, of an epoch that begins, and how many times that it takes "
        f"to resume at 10%, 50% and 90% of it: medians of {TURNS * settings['rounds']} turns. In parentheses, how many "
        "row groups the stream asks for until then."
    )
    rows = [["rows", "who resumes", "begins", *(f"at {percent}%" for percent in SHARES)]]
    for case in dict.fromkeys(figure["case"] for figure in figures):
        for who in (STREAM, LOADER):
            cells = []
            for percent in (0, *SHARES):
                names = {"case": case, "implementation": who}
                time_taken = harness.find(figures, metric=f"at {percent}%", **names)
                ratio = harness.find(figures, metric=f"at {percent}% to 0%", **names)
                groups = harness.find(figures, metric=f"at {percent}%, asked for", **names)
                text = harness.show(ratio) if time_taken is None or percent else f"{1e3 * time_taken['median']:.0f} ms"
                cells.append(text if groups is None else f"{text} ({harness.show(groups)})")
            rows.append([case, who, *cells])
    return f"{caption}\n\n{tables.markdown(rows)}"


def main() -> None:
    """Measures, prints and writes."""
    options = harness.options(__doc__, needs=("psutil", "pyarrow"))
    machine = harness.machine()
    figures = measure(options)
    harness.say("")
    settings = {"rounds": options.rounds, "workers": options.workers, "quick": options.quick}
    document = {"machine": machine, "settings": settings, "figures": figures}
    for figure in figures:
        if figure["unit"]:
            names = f"{figure['case']}, {figure['implementation']}, {figure['metric']}"
            print(f"{names}: {harness.show(figure)} {figure['unit']}")
    print(made := table(document))
    harness.print_missing(figures)
    if not (options.quick or options.cases or options.peers):
        RESULTS.write_text(json.dumps(document, indent=1) + "\n")
        tables.put(DOCUMENT, COMMAND, made)


if __name__ == "__main__":
    with harness.clean_exit():
        main()
