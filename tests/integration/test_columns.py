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
from torch.utils.data import Subset, default_collate

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
KINDS = ["fork", "ray"]
SOURCES = ["table", "mapped"]
STREAMS = ["in order", "groups", "buffer"]
persistent = pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.full)])


def by_turns(first, second):
    """All pairs in a full run of the tests; a sample has each of the second, with one of the first."""
    return [
        pytest.param(one, other, marks=() if place == number % len(first) else pytest.mark.full)
        for number, other in enumerate(second)
        for place, one in enumerate(first)
    ]


@pytest.fixture(scope="module")
def table():
    generator = np.random.default_rng(0)
    return pa.table(
        {
            "i": np.arange(ROWS),
            "x": generator.random(ROWS, np.float32),
            "b": generator.random(ROWS) < 0.5,
            "v": pa.FixedSizeListArray.from_arrays(generator.random(3 * ROWS, np.float32), 3),
            "tokens": [list(range(k % 7)) for k in range(ROWS)],
            "text": [f"text {k}" for k in range(ROWS)],
            "image": [bytes([k % 256] * 4) for k in range(ROWS)],
            "s": [{"a": k, "b": {"c": str(k)}} for k in range(ROWS)],
        }
    )


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    """Four files of four row groups each."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(4):
        parquet.write_table(table.slice(100 * number, 100), folder / f"{number}.parquet", row_group_size=25)
    return folder


@pytest.fixture(scope="module")
def arrow_file(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("arrow") / "table.arrow"
    pyarrow.feather.write_feather(table, path, "uncompressed", chunksize=64)
    return path


@pytest.fixture
def make(request, table, arrow_file, folder):
    """Makes the dataset of a kind: of each source, and streams in order, of shuffled row groups, or from a buffer."""
    match request.param:
        case "table":
            return lambda: ArrowDataset(table)
        case "mapped":
            return lambda: ArrowDataset(arrow_file)
    return lambda: stream_of(folder, request.param)


def stream_of(folder, kind, **arguments):
    stream = ParquetStream(folder, shuffle=kind != "in order", **arguments)
    return ShuffleBuffer(stream, 30) if kind == "buffer" else stream


def taken(batches):
    return [told(batch) for batch in batches]


def numbers(batches):
    return [number for batch in batches for number in batch["i"].tolist()]


def workers_of(kind, count=2):
    return {} if kind is None else {"num_workers": count, "workers": kind}


def ours(dataset, workers, batch_size=16, num_workers=2, **options):
    """Our loader, with these workers; `workers` is None for none."""
    return rayloader.DataLoader(dataset, batch_size, **workers_of(workers, num_workers), **options)


@pytest.mark.parametrize(("workers", "make"), by_turns([None, *KINDS], [*SOURCES, *STREAMS]), indirect=["make"])
def test_batches_are_those_of_torchs_loader_to_the_bit(make, workers):
    def load(kind, **options):
        torch.manual_seed(3)
        dataset = make()
        shuffle = True if isinstance(dataset, ArrowDataset) else None
        return list(kind(dataset, batch_size=24, shuffle=shuffle, **options))

    expected = load(TorchDataLoader, **(FORKED if workers else {}))
    assert sorted(numbers(expected)) == list(range(ROWS))
    assert taken(load(rayloader.DataLoader, **workers_of(workers))) == taken(expected)


def as_samples(rows):
    """A `collate_fn` of the user's, which changes the rows and decodes."""
    assert isinstance(rows, list)
    images = torch.stack([torch.tensor(list(row["image"]), dtype=torch.uint8) for row in rows])
    for row in rows:
        row["length"] = len(row.pop("tokens"))
    return {**default_collate(rows), "image": images}


@pytest.mark.parametrize(("workers", "make"), by_turns(KINDS, SOURCES), indirect=["make"])
def test_a_collate_fn_sees_rows(make, workers, table):
    dataset = make()
    (whole,) = TorchDataLoader(dataset, ROWS, collate_fn=as_samples)
    assert whole.keys() == {*table.column_names, "length"} - {"tokens"}
    assert (whole["image"].shape, whole["x"].tolist()) == ((ROWS, 4), table["x"].to_pylist())
    assert taken(ours(dataset, workers, collate_fn=as_samples)) == taken(
        TorchDataLoader(dataset, 16, collate_fn=as_samples)
    )
    lists = list(ours(Subset(dataset, range(4)), workers, 2, collate_fn=list))
    assert [dict(row)["text"] for rows in lists for row in rows] == [f"text {k}" for k in range(4)]
    assert told(default_collate(lists[1])["tokens"]) == told([torch.arange(2), torch.arange(3)])
    rows = list(ours(dataset, workers, batch_size=None))
    assert [row["i"].item() for row in rows] == list(range(ROWS))
    assert rows[7]["s"]["b"]["c"] == "7"


@pytest.mark.parametrize("workers", KINDS)
def test_a_null_is_skipped_or_named_and_arrow_has_a_form_for_it(workers):
    table = pa.table({"i": [0, 1, None, 3, 4, 5]})
    loader = ours(ArrowDataset(table), workers, 2, on_error="skip")
    assert [batch["i"].tolist() for batch in loader] == [[0, 1], [3], [4, 5]]
    assert loader.skipped == 1
    with pytest.raises(ValueError, match="column 'i' is null in row 2"):
        list(ours(ArrowDataset(table), workers, 2))
    (batch,) = ours(ArrowDataset(table, as_="arrow"), workers)
    assert batch["i"].equals(table["i"].combine_chunks())


def resident(rows):
    """How often the file is mapped in this process, and the KiB of it that are a copy of the process's own."""
    lines = Path("/proc/self/smaps").read_text().split("\n")
    found = [lines[n + 1 :] for n, line in enumerate(lines) if line.endswith("large.arrow")]
    written = [next(line for line in part if line.startswith("Private_Dirty:")) for part in found]
    return torch.tensor([len(found), sum(int(line.split()[1]) for line in written)])


@pytest.mark.parametrize("workers", KINDS)
def test_workers_map_the_file_and_have_no_copy(workers, tmp_path):
    path = tmp_path / "large.arrow"
    pyarrow.feather.write_feather(pa.table({"x": np.random.rand(20_000, 1)[:, 0]}), path, "uncompressed")
    for batch in ours(ArrowDataset(path), workers, 512, collate_fn=resident):
        mapped, private = batch.tolist()
    assert mapped >= 1
    assert private == 0


@pytest.mark.parametrize(("workers", "make"), by_turns(KINDS, [*SOURCES, *STREAMS]), indirect=["make"])
@persistent
def test_a_killed_worker_changes_nothing(make, workers, persistent):
    def load():
        torch.manual_seed(3)
        dataset = make()
        shuffle = True if isinstance(dataset, ArrowDataset) else None
        return ours(dataset, workers, 10, persistent_workers=persistent, shuffle=shuffle)

    loader = load()
    expected = [taken(loader) for _ in range(2)]
    loader = load()
    iterator = iter(loader)
    found = taken(itertools.islice(iterator, 9))
    kill_worker(iterator)
    assert [found + taken(iterator), taken(loader)] == expected


# ---- streams


@pytest.mark.parametrize(("kind", "way"), by_turns(STREAMS, [(None, None), *itertools.product(KINDS, (2, 1))]))
def test_epochs_differ_and_a_state_in_the_middle_of_one_continues_it(folder, kind, way, tmp_path):
    workers, again = way

    def load(num_workers=2):
        return ours(stream_of(folder, kind), workers, 10, num_workers=num_workers)

    loader = load()
    loader.set_epoch(1)
    first = taken(loader)
    loader.set_epoch(2)
    iterator = iter(loader)
    head = taken(itertools.islice(iterator, 17))
    torch.save(loader.state_dict(), tmp_path / "state")
    second = head + taken(iterator)
    assert (second == first) == (kind == "in order")
    resumed = load(again)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert head + taken(resumed) == second
    resumed.set_epoch(1)
    if again == 1 or kind == "buffer":  # which has another order each time
        assert sorted(numbers(resumed)) == list(range(ROWS))
    else:
        assert taken(resumed) == first
    if kind == "groups":
        stream = stream_of(folder, kind)
        stream.set_epoch(2)
        assert taken(TorchDataLoader(stream, 10, **(FORKED if workers else {}))) == second


@pytest.mark.parametrize("workers", [None, *KINDS])
@pytest.mark.parametrize("equal_steps", [None, "cut", "pad"])
def test_ranks_and_workers_divide_the_rows_and_may_have_equal_steps(folder, workers, equal_steps):
    def rank(number):
        stream = stream_of(folder, "buffer", equal_steps=equal_steps)
        return list(ours(stream, workers, 9, num_replicas=3, rank=number))

    ranks = [rank(number) for number in range(3)]
    rows = [number for batches in ranks for number in numbers(batches)]
    if equal_steps is None:
        assert all(ranks)
        assert sorted(rows) == list(range(ROWS))
        return
    assert len({len(batches) for batches in ranks}) == 1
    count = 3 if workers is None else 6
    assert len(rows) == (ROWS // count if equal_steps == "cut" else -(-ROWS // count)) * count
    assert len(set(rows)) == min(len(rows), ROWS)


def test_a_worker_of_torchs_loader_that_does_not_know_its_rank_is_an_error(folder, monkeypatch):
    monkeypatch.setattr("rayloader.data.parquet.trains_in_a_group", lambda: True)
    with pytest.raises(rayloader.RayloaderError, match="does not know the rank of a worker of torch's own DataLoader"):
        list(TorchDataLoader(ParquetStream(folder), 4, **FORKED))


@pytest.mark.parametrize("workers", [None, *KINDS])
def test_a_row_group_that_cannot_be_read(table, workers, tmp_path):
    path = tmp_path / "0.parquet"
    parquet.write_table(table, path, row_group_size=25)
    column = parquet.read_metadata(path).row_group(9).column(0)
    with open(path, "r+b") as file:
        file.seek(column.dictionary_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    with pytest.raises(rayloader.RayloaderError, match=r"row group 9 of .*0\.parquet cannot be read"):
        list(ours(ParquetStream(tmp_path), workers))
    for kind in "groups", "buffer":
        loader = ours(stream_of(tmp_path, kind), workers, on_error="skip")  # the loader counts what it skips
        assert sorted(numbers(loader)) == [*range(225), *range(250, ROWS)]
        assert loader.skipped == 1


@pytest.mark.parametrize("workers", KINDS)
def test_an_epoch_that_is_broken_off_leaves_its_workers_as_they_were(folder, workers, caplog):
    loader = ours(stream_of(folder, "buffer"), workers, 4)
    for _ in range(2):
        assert len(list(itertools.islice(loader, 2))) == 2
    assert sorted(numbers(loader)) == list(range(ROWS))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("count", [0, 2])
def test_torchdatas_loader_continues_too(folder, count):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def load():
        torch.manual_seed(3)
        return stateful(stream_of(folder, "buffer"), 10, num_workers=count)

    loader = load()
    iterator = iter(loader)
    head = taken(itertools.islice(iterator, 13))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    rest = taken(iterator)
    assert head + rest == taken(rayloader.DataLoader(load().dataset, 10, num_workers=count, workers="fork"))
    resumed = load()
    resumed.load_state_dict(state)
    assert taken(resumed) == rest


def test_spawned_workers_of_torchs(folder):
    stream = ParquetStream(folder, columns=["i", "x"])
    spawned = TorchDataLoader(stream, 50, num_workers=1, multiprocessing_context="spawn")
    assert taken(spawned) == taken(TorchDataLoader(stream, 50))
