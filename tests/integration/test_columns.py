"""`ArrowDataset` and `ParquetStream` in loaders: torch's, torchdata's, and ours with forks and with actors."""

import itertools
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import default_collate

import rayloader
from inside import kill_worker
from probes import oversubscribed
from rayloader import ArrowDataset, ParquetStream, ShuffleBuffer
from told import told

TorchDataLoader = torch.utils.data.DataLoader
FORKED = {"num_workers": 2, "multiprocessing_context": "fork"}  # torch's own, which ours are compared with

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    oversubscribed,
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]
ROWS = 400


@pytest.fixture(scope="module")
def table():
    generator = np.random.default_rng(0)
    return pa.table(
        {
            "i": np.arange(ROWS),
            "v": pa.FixedSizeListArray.from_arrays(generator.random(3 * ROWS, np.float32), 3),
            "tokens": [list(range(k % 7)) for k in range(ROWS)],
            "image": [bytes([k % 256] * 4) for k in range(ROWS)],
            "s": [{"a": k, "b": {"c": str(k)}} for k in range(ROWS)],
        }
    )


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    """Four files of four row groups each, and all in one of Arrow's."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(4):
        parquet.write_table(table.slice(100 * number, 100), folder / f"{number}.parquet", row_group_size=25)
    pyarrow.feather.write_feather(table, folder / "_table.arrow", "uncompressed", chunksize=64)
    return folder


@pytest.fixture
def make(request, table, folder):
    """Makes the dataset of a kind: of each source, and streams in order, of shuffled row groups, or from a buffer."""
    match request.param:
        case "table":
            return lambda: ArrowDataset(table)
        case "mapped":
            return lambda: ArrowDataset(folder / "_table.arrow")
    return lambda: stream_of(folder, request.param)


def stream_of(folder, kind):
    stream = ParquetStream(folder, shuffle=kind != "in order")
    return ShuffleBuffer(stream, 30) if kind == "buffer" else stream


def taken(batches):
    return [told(batch) for batch in batches]


def ours(dataset, workers, batch_size=16, num_workers=2, **options):
    """Our loader, with these workers; `workers` is None for none."""
    chosen = {} if workers is None else {"num_workers": num_workers, "workers": workers}
    return rayloader.DataLoader(dataset, batch_size, **chosen, **options)


def shuffled(loader_class, dataset, *arguments, **options):
    """A loader of it, in random order if it is no stream."""
    torch.manual_seed(3)
    return loader_class(dataset, *arguments, shuffle=True if isinstance(dataset, ArrowDataset) else None, **options)


@pytest.mark.parametrize(
    ("workers", "make"),
    [(None, "table"), ("fork", "mapped"), ("ray", "in order"), ("fork", "groups"), ("ray", "buffer")],
    indirect=["make"],
)
def test_batches_are_those_of_torchs_loader_to_the_bit_and_a_killed_worker_changes_nothing(make, workers):
    expected = list(shuffled(TorchDataLoader, make(), 10, **(FORKED if workers else {})))
    assert sorted(number for batch in expected for number in batch["i"].tolist()) == list(range(ROWS))
    iterator = iter(shuffled(ours, make(), workers, 10))
    found = taken(itertools.islice(iterator, 9))
    if workers:
        kill_worker(iterator)
    assert found + taken(iterator) == taken(expected)


def as_samples(rows):
    """A `collate_fn` of the user's, which changes the rows and decodes."""
    assert isinstance(rows, list)
    images = torch.stack([torch.tensor(list(row["image"]), dtype=torch.uint8) for row in rows])
    for row in rows:
        row["length"] = len(row.pop("tokens"))
    return {**default_collate(rows), "image": images}


@pytest.mark.parametrize(("workers", "make"), [("fork", "table"), ("ray", "mapped")], indirect=["make"])
def test_a_collate_fn_sees_rows_and_workers_map_the_file(make, workers, table):
    dataset = make()
    expected = TorchDataLoader(dataset, 16, collate_fn=as_samples)
    assert taken(ours(dataset, workers, collate_fn=as_samples)) == taken(expected)
    rows = list(ours(dataset, workers, batch_size=None))
    assert [row["i"].item() for row in rows] == list(range(ROWS))
    assert rows[7]["s"]["b"]["c"] == "7"
    if dataset._files:
        *_, (mapped, private) = ours(dataset, workers, collate_fn=resident)
        assert (mapped >= 1, private) == (True, 0)


def resident(rows):
    """How often the file is mapped in this process, and the KiB of it that are a copy of the process's own."""
    lines = Path("/proc/self/smaps").read_text().split("\n")
    found = [lines[n + 1 :] for n, line in enumerate(lines) if line.endswith("_table.arrow")]
    written = [next(line for line in part if line.startswith("Private_Dirty:")) for part in found]
    return len(found), sum(int(line.split()[1]) for line in written)


# ---- streams


def test_a_worker_of_torchs_loader_that_does_not_know_its_rank_is_an_error(folder, monkeypatch):
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    stream = ParquetStream(folder, columns=["i"])
    assert taken(TorchDataLoader(stream, 50, **spawned)) == taken(TorchDataLoader(stream, 50))
    monkeypatch.setattr("rayloader.data.parquet.trains_in_a_group", lambda: True)
    with pytest.raises(rayloader.RayloaderError, match="does not know the rank of a worker of torch's own DataLoader"):
        list(TorchDataLoader(ParquetStream(folder), 4, **FORKED))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("count", [0, 2])
def test_torchdatas_loader_continues_too(folder, count):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader, resumed = (shuffled(stateful, stream_of(folder, "buffer"), 10, num_workers=count) for _ in range(2))
    iterator = iter(loader)
    list(itertools.islice(iterator, 13))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = taken(iterator)
    resumed.load_state_dict(state)
    assert taken(resumed) == rest
