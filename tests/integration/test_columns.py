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
from torch.utils.data import Subset

import rayloader
from inside import kill_worker
from probes import oversubscribed
from rayloader import ArrowDataset, ParquetStream, ShuffleBuffer, StateError

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


def as_pixels(rows):
    """A `collate_fn` that decodes."""
    images = [torch.tensor(list(row["image"]), dtype=torch.uint8) for row in rows]
    return {**torch.utils.data.default_collate(rows), "image": torch.stack(images)}


def plain(value):
    """A batch without tensors, for comparisons to the bit."""
    match value:
        case torch.Tensor():
            return value.dtype, tuple(value.shape), value.numpy().tobytes()
        case dict():
            return {key: plain(part) for key, part in value.items()}
        case list():
            return [plain(part) for part in value]
    return value


def taken(batches):
    return [plain(batch) for batch in batches]


def numbers(batches):
    return [number for batch in batches for number in batch["i"].tolist()]


def ours(dataset, workers, batch_size=16, num_workers=2, **options):
    """Our loader, with these workers; `workers` is None for none."""
    if workers is None:
        return rayloader.DataLoader(dataset, batch_size, **options)
    return rayloader.DataLoader(dataset, batch_size, num_workers=num_workers, workers=workers, **options)


# ---- ArrowDataset


@pytest.fixture(scope="module")
def arrow_file(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("arrow") / "table.arrow"
    pyarrow.feather.write_feather(table, path, "uncompressed", chunksize=64)
    return path


@pytest.fixture
def dataset(request, table, arrow_file):
    """From each kind of source, with all kinds of columns."""
    return ArrowDataset({"table": table, "mapped": arrow_file}[request.param])


@pytest.mark.parametrize(("workers", "dataset"), by_turns([None, *KINDS], SOURCES), indirect=["dataset"])
def test_batches_are_those_of_torchs_loader_to_the_bit(dataset, workers, table):
    def load(kind, **options):
        torch.manual_seed(3)
        return taken(kind(dataset, batch_size=24, shuffle=True, **options))

    expected = load(TorchDataLoader)
    assert sorted(np.frombuffer(expected[0]["i"][2], np.int64).tolist()) != list(range(24))
    assert load(TorchDataLoader, **({} if workers is None else FORKED)) == expected
    ours_too = {} if workers is None else {"num_workers": 2, "workers": workers}
    assert load(rayloader.DataLoader, **ours_too) == expected
    (whole,) = taken(TorchDataLoader(dataset, batch_size=ROWS, collate_fn=as_pixels))
    assert whole["i"] == plain(torch.arange(ROWS))
    assert whole["x"][2] == table["x"].to_numpy().tobytes()
    assert whole["image"][:2] == (torch.uint8, (ROWS, 4))


def as_samples(rows):
    """A `collate_fn` of the user's, which changes the rows."""
    assert isinstance(rows, list)
    for row in rows:
        row["x"] = row["x"] + 1
        row["length"] = len(row.pop("tokens"))
    return torch.utils.data.default_collate(rows)


@pytest.mark.parametrize(("workers", "dataset"), by_turns(KINDS, SOURCES), indirect=["dataset"])
def test_a_collate_fn_sees_rows(dataset, workers):
    expected = taken(TorchDataLoader(dataset, 16, collate_fn=as_samples))
    assert taken(ours(dataset, workers, collate_fn=as_samples)) == expected
    assert "length" in expected[0]
    assert "tokens" not in expected[0]
    lists = list(ours(Subset(dataset, range(4)), workers, 2, collate_fn=list))
    assert [dict(row)["text"] for rows in lists for row in rows] == [f"text {k}" for k in range(4)]
    assert plain(torch.utils.data.default_collate(lists[1])["tokens"]) == plain([torch.arange(2), torch.arange(3)])


@pytest.mark.parametrize(("workers", "dataset"), by_turns(KINDS, SOURCES), indirect=["dataset"])
def test_single_rows(dataset, workers):
    rows = list(ours(dataset, workers, batch_size=None))
    assert [row["i"].item() for row in rows] == list(range(ROWS))
    assert rows[7]["s"]["b"]["c"] == "7"


@pytest.mark.parametrize("workers", KINDS)
def test_a_null_is_skipped_or_named(workers):
    nulls = ArrowDataset(pa.table({"i": [0, 1, None, 3, 4, 5]}))
    loader = ours(nulls, workers, 2, on_error="skip")
    assert [batch["i"].tolist() for batch in loader] == [[0, 1], [3], [4, 5]]
    assert loader.skipped == 1
    with pytest.raises(ValueError, match="column 'i' is null in row 2"):
        list(ours(nulls, workers, 2))


@pytest.mark.parametrize("workers", KINDS)
def test_arrows_own_arrays(table, workers):
    loader = ours(ArrowDataset(table, columns=["i", "tokens"], as_="arrow"), workers)
    batch = next(iter(loader))
    assert batch["tokens"].equals(table["tokens"].combine_chunks().slice(0, 16))


@pytest.mark.parametrize(("workers", "dataset"), by_turns(KINDS, SOURCES), indirect=["dataset"])
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_worker_changes_no_batch_of_a_dataset(dataset, workers, persistent):
    def load():
        torch.manual_seed(3)
        return ours(dataset, workers, shuffle=True, persistent_workers=persistent)

    loader = load()
    expected = [taken(loader) for _ in range(2)]
    loader = load()
    iterator = iter(loader)
    found = taken(itertools.islice(iterator, 9))
    kill_worker(iterator)
    assert [found + taken(iterator), taken(loader)] == expected


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


# ---- ParquetStream


STREAMS = ["in order", "groups", "buffer"]


def stream_of(folder, kind, **arguments):
    """A stream whose rows come in order, in the order of shuffled row groups, or from a buffer."""
    stream = ParquetStream(folder, shuffle=kind != "in order", **arguments)
    return ShuffleBuffer(stream, 30) if kind == "buffer" else stream


@pytest.mark.parametrize(("workers", "kind"), by_turns([None, *KINDS], STREAMS))
def test_streams_are_those_of_torchs_loader_to_the_bit(folder, kind, workers):
    def load(loader, **options):
        torch.manual_seed(3)
        return loader(stream_of(folder, kind), 10, collate_fn=as_pixels, **options)

    expected = list(load(TorchDataLoader, **({} if workers is None else FORKED)))
    assert sorted(numbers(expected)) == list(range(ROWS))
    options = {} if workers is None else {"num_workers": 2, "workers": workers}
    assert taken(load(rayloader.DataLoader, **options)) == taken(expected)


@pytest.mark.parametrize("workers", [None, *KINDS])
def test_each_epoch_has_another_order_that_is_the_same_everywhere(folder, workers):
    loader = ours(ParquetStream(folder, shuffle=True), workers)
    epochs = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        epochs.append(numbers(loader))
    loader.set_epoch(1)
    assert numbers(loader) == epochs[1]
    assert len({tuple(order) for order in epochs}) == 3
    assert all(sorted(order) == list(range(ROWS)) for order in epochs)
    stream = ParquetStream(folder, shuffle=True)
    stream.set_epoch(2)
    assert numbers(TorchDataLoader(stream, 16, **({} if workers is None else FORKED))) == epochs[2]


@pytest.mark.parametrize(("workers", "kind"), by_turns(KINDS, STREAMS))
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_worker_changes_nothing(folder, kind, workers, persistent):
    def load():
        torch.manual_seed(3)
        return ours(stream_of(folder, kind), workers, 10, persistent_workers=persistent)

    loader = load()
    expected = [taken(loader) for _ in range(2)]
    loader = load()
    iterator = iter(loader)
    found = taken(itertools.islice(iterator, 9))
    kill_worker(iterator)
    assert [found + taken(iterator), taken(loader)] == expected


@pytest.mark.parametrize(("kind", "way"), by_turns(STREAMS, [(None, None), *itertools.product(KINDS, (2, 1))]))
def test_a_state_in_the_middle_of_an_epoch_continues_it(folder, kind, way):
    workers, again = way

    def load(num_workers=2):
        return ours(stream_of(folder, kind), workers, 10, num_workers=num_workers)

    loader = load()
    loader.set_epoch(1)
    first = taken(loader)
    loader.set_epoch(2)
    iterator = iter(loader)
    head = taken(itertools.islice(iterator, 17))
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    second = head + taken(iterator)
    assert (second == first) == (kind == "in order")
    resumed = load(again)
    resumed.load_state_dict(state)
    assert head + taken(resumed) == second
    resumed.set_epoch(1)
    if again == 1 or kind == "buffer":  # which has another order each time
        assert sorted(numbers(resumed)) == list(range(ROWS))
    else:
        assert taken(resumed) == first


def test_a_state_survives_torchs_files(folder, tmp_path):
    loader = ours(stream_of(folder, "buffer"), None)
    iterator = iter(loader)
    next(iterator)
    torch.save(loader.state_dict(), tmp_path / "state")
    rest = taken(iterator)
    resumed = ours(stream_of(folder, "buffer"), None)
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert taken(resumed) == rest


def test_a_state_of_other_files_is_an_error(folder, tmp_path):
    loader = ours(ParquetStream(folder), None)
    next(iter(loader))
    state = loader.state_dict()
    other = ours(ParquetStream(folder / "0.parquet"), None)
    other.load_state_dict(state)
    with pytest.raises(StateError, match="the state of a ParquetStream was saved with files="):
        next(iter(other))


@pytest.mark.parametrize("workers", [None, "fork"])
@pytest.mark.parametrize("equal_steps", ["cut", "pad"])
def test_all_ranks_have_equal_steps(folder, workers, equal_steps):
    def rank(number):
        stream = stream_of(folder, "buffer", equal_steps=equal_steps)
        return taken(ours(stream, workers, 9, num_replicas=3, rank=number))

    steps = [rank(number) for number in range(3)]
    assert len({len(batches) for batches in steps}) == 1
    rows = [number for batches in steps for batch in batches for number in np.frombuffer(batch["i"][2], np.int64)]
    count = 3 if workers is None else 6
    assert len(rows) == (ROWS // count if equal_steps == "cut" else -(-ROWS // count)) * count
    assert len(set(rows)) == min(len(rows), ROWS)


@pytest.mark.parametrize("workers", KINDS)
def test_ranks_and_workers_divide_the_row_groups(folder, workers):
    ranks = [numbers(ours(ParquetStream(folder), workers, num_replicas=3, rank=rank)) for rank in range(3)]
    assert sorted(itertools.chain(*ranks)) == list(range(ROWS))
    assert all(ranks)


def test_a_worker_of_torchs_loader_that_does_not_know_its_rank_is_an_error(folder, monkeypatch):
    monkeypatch.setattr("rayloader.data.parquet.trains_in_a_group", lambda: True)
    with pytest.raises(rayloader.RayloaderError, match="does not know the rank of a worker of torch's own DataLoader"):
        list(TorchDataLoader(ParquetStream(folder), 4, **FORKED))


@pytest.fixture
def damaged(folder, tmp_path):
    """A copy of the files in which row group 1 of the third file cannot be read, after a stream was made of it."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "2.parquet"
    column = parquet.read_metadata(path).row_group(1).column(0)
    with open(path, "r+b") as file:
        file.seek(column.dictionary_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    return tmp_path


LOST = set(range(225, 250))


@pytest.mark.parametrize("workers", [None, *KINDS])
def test_a_row_group_that_cannot_be_read(damaged, workers):
    with pytest.raises(rayloader.RayloaderError, match=r"row group 1 of .*2\.parquet cannot be read"):
        list(ours(ParquetStream(damaged), workers))
    kept = sorted(set(range(ROWS)) - LOST)
    for kind in "groups", "buffer":
        loader = ours(stream_of(damaged, kind), workers, on_error="skip")  # the loader counts what it skips
        assert sorted(numbers(loader)) == kept
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


@pytest.mark.parametrize("workers", [None, *KINDS])
def test_dictionaries_and_hives_folders(workers, tmp_path):
    """Of 300 values together, in indices of 8 bits; the day is in the names of the folders alone."""
    for day in range(3):
        (tmp_path / f"day={day}").mkdir()
        words = pa.array([f"user {day}-{k}" for k in range(100)])
        stored = pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), words)
        columns = {"user": stored, "friends": pa.ListArray.from_arrays(range(101), stored)}
        parquet.write_table(pa.table(columns), tmp_path / f"day={day}" / "x.parquet", row_group_size=40)
    expected = {(f"user {day}-{k}", day) for day in range(3) for k in range(100)}
    torch.manual_seed(3)
    dataset = ArrowDataset(parquet.read_table(tmp_path))
    for loader in ours(dataset, workers, 30, shuffle=True), ours(stream_of(tmp_path, "buffer"), workers, 30):
        batches = list(loader)
        assert {
            pair for batch in batches for pair in zip(batch["user"], batch["day"].tolist(), strict=True)
        } == expected
        assert all(batch["friends"] == [[user] for user in batch["user"]] for batch in batches)


def test_spawned_workers_of_torchs(folder):
    stream = ParquetStream(folder, columns=["i", "x"])
    spawned = TorchDataLoader(stream, 50, num_workers=1, multiprocessing_context="spawn")
    assert taken(spawned) == taken(TorchDataLoader(stream, 50))
