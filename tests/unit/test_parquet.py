"""`ParquetStream`: parts, orders, states, errors; loaders are in test_columns.py."""

import io
import itertools
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import dataset, fs, parquet
from torch.utils.data import default_collate

import rayloader
from arrow_tables import CATEGORIES, INDICES, PARTS, TREES, categories, plain, source_of, tree
from rayloader import ParquetStream, RayloaderError, ShuffleBuffer, StateError
from rayloader.data import parquet as module
from rayloader.host.shard_info import Reader
from rayloader.plans import PackedStream
from rayloader.resume.state import from_plain, to_plain

# Row groups of the files that most tests read: 100 rows in 9 groups, of unequal length.
GROUPS = [[7, 20, 1], [30], [5, 5, 11, 20, 1]]


def write(folder, groups=GROUPS):
    """Files with these row groups; the column `i` counts the rows of all."""
    begin = 0
    for number, sizes in enumerate(groups):
        with parquet.ParquetWriter(folder / f"{number}.parquet", SCHEMA) as writer:
            for size in sizes:
                rows = range(begin, begin + size)
                writer.write_table(pa.table({"i": rows, "t": [f"text {i}" for i in rows]}, SCHEMA), row_group_size=size)
                begin += size
    return folder


SCHEMA = pa.schema({"i": pa.int64(), "t": pa.string()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("files"))


@pytest.fixture
def small_chunks(monkeypatch):
    """Rows are converted four at a time, so that a hundred of them are many."""
    monkeypatch.setattr(module, "_CHUNK_BYTES", 80)


def numbers(rows):
    return [row["i"].item() for row in rows]


def buffered(stream, size):
    """The stream, shuffled if there is a size; orders are the same in each epoch."""
    torch.manual_seed(0)
    return ShuffleBuffer(stream, size) if size else stream


def parts(stream, count):
    """What each of so many workers reads."""
    found = []
    for index in range(count):
        with Reader((index, count)).reads():
            found.append(numbers(stream))
    return found


# ---- what it gives


def test_the_rows_of_all_files_in_their_order(folder):
    rows = list(ParquetStream(folder))
    assert numbers(rows) == list(range(100))
    assert dict(rows[42]) == {"i": torch.tensor(42), "t": "text 42"}
    batch = default_collate(rows[5:8])
    assert batch["i"].tolist() == [5, 6, 7]
    assert batch["t"] == ["text 5", "text 6", "text 7"]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("first", [0, 2, 3, 97])
@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_batch_of_rows_from_several_chunks_is_what_stacking_gives(folder, first, size):
    rows = list(itertools.islice(ParquetStream(folder), first, first + size))
    batch = default_collate(rows)
    for row in rows:
        row.update(row)
    stacked = default_collate(rows)
    assert torch.equal(batch["i"], stacked["i"])
    assert batch["t"] == stacked["t"]
    assert batch["i"].untyped_storage().nbytes() == batch["i"].nbytes or first % 4 == 0


@pytest.mark.usefixtures("small_chunks")
def test_arrows_own_arrays(folder):
    batch = default_collate(list(ParquetStream(folder / "1.parquet", as_="arrow")))
    assert batch["t"].type == pa.string()
    assert batch["i"].to_pylist() == list(range(28, 58))


def test_filters_leave_rows_out(folder):
    expected = [i for i in range(100) if 20 < i < 50]
    for filters in ([("i", ">", 20), ("i", "<", 50)], (pc.field("i") > 20) & (pc.field("i") < 50)):
        assert numbers(ParquetStream(folder, filters=filters)) == expected
        assert numbers(pickle.loads(pickle.dumps(ParquetStream(folder, filters=filters)))) == expected
        stream = ParquetStream(folder, columns=["t"], filters=filters)  # of a column that is not given
        assert [row["t"] for row in stream] == [f"text {i}" for i in expected]
        assert sorted(itertools.chain(*parts(ParquetStream(folder, filters=filters, shuffle=True), 3))) == expected


def test_filters_must_fit_all_files(tmp_path):
    """Pyarrow would take a column that is missing in a file for one of nulls, and leave out all rows of the file."""
    parquet.write_table(pa.table({"i": [1], "y": [1]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table({"i": [2]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"column 'y' is int64 in .*, and .*2\.parquet has none"):
        ParquetStream(tmp_path, columns=["i"], filters=[("y", ">", 0)])


def test_files_may_differ_in_columns_that_nobody_asks_for(tmp_path):
    parquet.write_table(pa.table({"ij": [1, 2], "i": [1, 2], "j k": [1, 2]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table({"ij": [3]}), tmp_path / "2.parquet")
    stream = ParquetStream(tmp_path, columns=["ij"], filters=[("ij", ">", 1)])
    assert [row["ij"].item() for row in stream] == [2, 3]
    with pytest.raises(ValueError, match=r"column 'j k' is int64 in .*, and .*2\.parquet has none"):
        ParquetStream(tmp_path, columns=["ij"], filters=[("j k", ">", 1)])


def test_a_row_among_those_that_filters_let_through_is_named_as_such(tmp_path):
    parquet.write_table(pa.table({"i": [0, 1, None], "y": [0, 1, 2]}), tmp_path / "1.parquet")
    iterator = iter(ParquetStream(tmp_path, filters=[("y", ">", 0)]))
    assert next(iterator)["i"] == 1
    with pytest.raises(ValueError, match="in row 1 among those that the filters let through of row group 0 of "):
        next(iterator)


# ---- dictionaries


@pytest.mark.parametrize("how", ["row groups", "files"])
@pytest.mark.parametrize("size", [0, 50])
@pytest.mark.parametrize("as_", ["tensors", "arrow"])
@pytest.mark.parametrize(("kind", "index"), CATEGORIES, ids=str)
def test_dictionaries_that_need_wider_indices_together(kind, index, as_, size, how, tmp_path):
    columns = [categories(kind, part, index, INDICES[index]) for part in PARTS]
    stored = [value for column in columns for value in column.to_pylist()]
    stream = ParquetStream(source_of(how, columns, tmp_path), as_="arrow" if kind == "map" else as_)
    given = list(buffered(stream, size))
    assert sorted([plain(row["x"]) for row in given], key=str) == sorted(stored, key=str)
    if not size:
        assert [plain(row["x"]) for row in given] == stored
    batch = default_collate([given[0], given[-1], given[1]])
    assert len(plain(batch["x"])["number"] if kind == "struct" and as_ == "tensors" else batch["x"]) == 3


def test_a_state_with_rows_of_several_dictionaries(tmp_path):
    stream = ParquetStream(source_of("files", [categories("plain", part) for part in PARTS], tmp_path))
    iterator = iter(ShuffleBuffer(stream, 150))
    for _ in range(20):
        next(iterator)
    again = iter(ShuffleBuffer(stream, 150))
    again.load_state_dict(iterator.state_dict())
    assert [row["x"] for row in again] == [row["x"] for row in iterator]


# ---- hive's folders


@pytest.mark.parametrize("names", TREES.values(), ids=TREES)
def test_hives_folders_are_columns_as_pyarrow_has_them(names, tmp_path):
    tree(tmp_path, names)
    expected = dataset.dataset(tmp_path, partitioning="hive").to_table()
    of_folders = [name for name in expected.column_names if name not in ("i", "t")]
    for columns in (None, of_folders, ["i"], [of_folders[0], "t"]):
        stream = ParquetStream(tmp_path, columns=columns, as_="arrow")
        for there in (stream, pickle.loads(pickle.dumps(stream))):
            assert pa.table(default_collate(list(there))).equals(
                expected if columns is None else expected.select(columns)
            )
    memory = fs._MockFileSystem()
    memory.create_dir("files")
    fs.copy_files(str(tmp_path), "files", fs.LocalFileSystem(), memory)
    batch = default_collate(list(ParquetStream("files", filesystem=memory, as_="arrow")))
    assert pa.table(batch).equals(expected)


def test_filters_of_hives_folders(tmp_path):
    tree(tmp_path, ["day=3/h=a/x.parquet", "day=3/h=b/x.parquet", "day=10/h=a/x.parquet"])
    for filters in (
        [("day", ">", 3)],
        [("day", "=", 3), ("h", "=", "a")],
        [("h", "=", "a"), ("i", "<", 2)],
        [("day", ">", 10)],
    ):
        expected = parquet.read_table(tmp_path, filters=filters)["i"].to_pylist()
        assert sorted(numbers(ParquetStream(tmp_path, filters=filters))) == sorted(expected)
        assert sorted(numbers(ParquetStream(tmp_path, columns=["i"], filters=filters))) == sorted(expected)
    with pytest.raises(ValueError, match=r"filters must be as pyarrow.dataset takes them, got \[\('day', "):
        ParquetStream(tmp_path, filters=[("day", ">", "a")])


def test_a_state_of_other_folders_is_refused(tmp_path):
    """Their files have the same names, and as many rows."""
    state = iter(ParquetStream(tree(tmp_path / "1", ["day=3/a.parquet", "day=4/a.parquet"]))).state_dict()
    iter(ParquetStream(tree(tmp_path / "2", ["day=3/a.parquet", "day=4/a.parquet"]))).load_state_dict(state)
    with pytest.raises(StateError, match="saved with files="):
        iter(ParquetStream(tree(tmp_path / "3", ["day=4/a.parquet", "day=5/a.parquet"]))).load_state_dict(state)


# ---- shuffling


@pytest.mark.usefixtures("small_chunks")
def test_a_shuffled_order_depends_on_seed_and_epoch_alone(folder):
    stream = ParquetStream(folder, shuffle=True)
    first = numbers(stream)
    assert sorted(first) == list(range(100))
    assert first == numbers(stream) == numbers(pickle.loads(pickle.dumps(stream)))
    stream.set_epoch(1)
    second = numbers(stream)
    third = numbers(ParquetStream(folder, shuffle=True, seed=1))
    assert sorted(second) == sorted(third) == list(range(100))
    assert len({tuple(order) for order in (first, second, third, sorted(first))}) == 4


@pytest.mark.usefixtures("small_chunks")
def test_row_groups_are_shuffled_and_a_buffer_mixes_their_rows(folder):
    def changes(stream):
        """How often the next row is of another row group."""
        return np.count_nonzero(np.diff(np.searchsorted(ENDS, numbers(stream), "right")))

    stream = ParquetStream(folder, shuffle=True)
    assert numbers(stream) != list(range(100))
    assert changes(stream) == 8
    assert changes(buffered(stream, 50)) > 40


# ---- parts


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 9, 12])
def test_all_parts_together_are_the_whole(folder, shuffle, count):
    found = parts(ParquetStream(folder, shuffle=shuffle), count)
    assert sorted(itertools.chain(*found)) == list(range(100))


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 12),
    st.sampled_from(["cut", "pad"]),
    st.integers(0, 3),
)
def test_equal_steps_of_any_row_groups(groups, count, equal_steps, seed):
    rows = np.array([size for sizes in groups for size in sizes])
    files = object.__new__(module._Files)
    files.rows = rows
    order = np.random.default_rng(seed).permutation(len(rows))
    total = int(rows.sum())
    share = total // count if equal_steps == "cut" else -(-total // count)
    infos = [Reader((index, count)).info() for index in range(count)]
    if not share:
        with pytest.raises(ValueError, match="needs a row for each of the"):
            files.pieces(order, infos[0], equal_steps)
        return
    seen = []
    for info in infos:
        pieces = files.pieces(order, info, equal_steps)
        given = [(group, row) for group, first, end in pieces for row in range(first, end)]
        assert all(0 <= first < end <= rows[group] for group, first, end in pieces)
        assert len(given) == share
        seen += given
    if equal_steps == "cut":
        assert len(set(seen)) == len(seen) > total - count
    else:
        assert len(set(seen)) == total
        assert len(seen) < total + count


@pytest.mark.parametrize("equal_steps", ["cut", "pad"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_equal_steps(folder, equal_steps, shuffle):
    stream = ParquetStream(folder, equal_steps=equal_steps, shuffle=shuffle)
    found = parts(stream, 7)
    assert {len(part) for part in found} == {14 if equal_steps == "cut" else 15}
    together = list(itertools.chain(*found))
    assert len(set(together)) == (98 if equal_steps == "cut" else 100)
    assert parts(ParquetStream(folder, equal_steps="cut"), 1) == [list(range(100))]


# ---- states


def states_of(kind, state):
    """The state as programs save it."""
    match kind:
        case "plain":
            return state
        case "pickle":
            return pickle.loads(pickle.dumps(state))
        case "file":
            torch.save(to_plain(state), file := io.BytesIO())
            file.seek(0)
            return from_plain(torch.load(file, weights_only=True))


STREAMS = [
    (0, {}),
    (4, {"shuffle": True}),
    (15, {}),
    (1000, {"shuffle": True}),
    (9, {"filters": [("i", ">", 30)]}),
    (9, {"equal_steps": "pad", "shuffle": True}),
    (0, {"equal_steps": "cut"}),
]


@settings(max_examples=60)
@given(st.sampled_from(STREAMS), st.integers(0, 110), st.integers(0, 20), st.integers(0, 2), st.integers(1, 2))
def test_a_state_continues_exactly(folder, kind, first, second, epoch, count):
    """Twice: from a state of an iterator that has itself continued from one."""
    size, arguments = kind

    def stream():
        made = ParquetStream(folder, **arguments)
        made.set_epoch(epoch)
        return made

    with pytest.MonkeyPatch.context() as patch, Reader((count - 1, count)).reads():
        patch.setattr(module, "_CHUNK_BYTES", 80)
        whole = numbers(buffered(stream(), size))
        iterator = iter(buffered(stream(), size))
        taken = numbers(itertools.islice(iterator, first))
        for how, more in (("pickle", second), ("file", 1000)):
            state = states_of(how, iterator.state_dict())
            iterator = iter(buffered(ParquetStream(folder, **arguments), size))  # which has not been told the epoch
            iterator.load_state_dict(state)
            assert states_of("file", iterator.state_dict()).keys() == state.keys()
            taken += numbers(itertools.islice(iterator, more))
        assert taken == whole


def test_a_state_is_not_changed_by_going_on(folder):
    iterator = iter(ShuffleBuffer(ParquetStream(folder, shuffle=True), 10))
    numbers(itertools.islice(iterator, 30))
    state = iterator.state_dict()
    before = repr(state)
    rest = numbers(iterator)
    assert repr(state) == before
    iterator.load_state_dict(state)  # backwards, in the same iterator
    assert numbers(iterator) == rest


def noted_loads(monkeypatch):
    """A list to which each row group is added that is read from now on."""
    loaded = []
    load = module._Files.load
    monkeypatch.setattr(
        module._Files, "load", lambda files, group, *more: loaded.append(group) or load(files, group, *more)
    )
    return loaded


@pytest.mark.usefixtures("small_chunks")
def test_only_the_row_groups_that_are_needed_are_read_again(folder, monkeypatch):
    loaded = noted_loads(monkeypatch)
    iterator = iter(ParquetStream(folder))
    numbers(itertools.islice(iterator, 80))
    state = iterator.state_dict()
    iterator = iter(ParquetStream(folder))
    loaded.clear()
    iterator.load_state_dict(state)
    assert not loaded
    assert numbers(iterator) == list(range(80, 100))
    assert loaded == [7, 8]


def test_the_state_of_the_end_is_the_end(folder):
    stream = ShuffleBuffer(ParquetStream(folder, shuffle=True), 10)
    iterator, again = iter(stream), iter(stream)
    numbers(iterator)
    again.load_state_dict(iterator.state_dict())
    assert list(again) == list(iterator) == []


def test_the_state_of_a_buffer_has_the_numbers_of_its_rows(folder):
    """Also of rows that somebody has looked at, as a worker does at the first ones."""
    iterator = iter(ShuffleBuffer(ParquetStream(folder), 10))
    given = next(iterator)["i"].item()
    for row in iterator._buffer[::2]:
        dict(row)
    buffer = iterator.state_dict()["buffer"]
    assert buffer.dtype == np.int64
    assert sorted([given, *buffer.tolist()]) == list(range(11))


def test_a_state_of_something_else_is_refused(folder, tmp_path):
    state = iter(ParquetStream(folder)).state_dict()
    for wrong in (None, {}, {"epoch": 1}):
        with pytest.raises(StateError, match="this is not a state of a ParquetStream's iterator"):
            iter(ParquetStream(folder)).load_state_dict(wrong)
    others = {
        "shuffle": ParquetStream(folder, shuffle=True),
        "seed": ParquetStream(folder, seed=1),
        "equal_steps": ParquetStream(folder, equal_steps="cut"),
        "files": ParquetStream(write(tmp_path, [[7, 20]])),
    }
    for name, other in others.items():
        with pytest.raises(StateError, match=f"the state of a ParquetStream was saved with {name}="):
            iter(other).load_state_dict(state)
    with Reader((1, 2)).reads(), pytest.raises(StateError, match=r"with part=\[0, 1\], and here it is \[1, 2\]"):
        iter(ParquetStream(folder)).load_state_dict(state)


def test_a_state_whose_rows_the_filters_let_through_no_more_is_refused(tmp_path):
    """The file has as many rows as before, and others: nothing but the rows themselves can tell."""

    def stream():
        return ShuffleBuffer(ParquetStream(tmp_path, filters=[("i", "<", 50)]), 10)

    write(tmp_path, [[30]])
    iterator = iter(stream())
    list(itertools.islice(iterator, 20))
    state = iterator.state_dict()
    table = pa.table({"i": range(45, 75), "t": ["text"] * 30}, SCHEMA)
    parquet.write_table(table, tmp_path / "0.parquet")
    with pytest.raises(
        StateError, match=r"has rows of row group 0 of .*0\.parquet that the filters let through no more"
    ):
        iter(stream()).load_state_dict(state)


ENDS = np.cumsum([rows for groups in GROUPS for rows in groups])
READERS = [(0, {}), (4, {}), (15, {"shuffle": True}), (9, {"shuffle": True, "equal_steps": "pad"})]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("size", "arguments"), READERS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.full)])
def test_resuming_reads_no_row_group_before_the_position_but_those_of_rows_that_were_not_given(
    folder, size, arguments, count, step, monkeypatch
):
    loaded = noted_loads(monkeypatch)
    with Reader((count - 1, count)).reads():
        pieces = [group for group, _, _ in iter(ParquetStream(folder, **arguments))._pieces]
        iterator = iter(buffered(ParquetStream(folder, **arguments), size))
        # To the end first: while an iterator lives, its thread loads the next row group at any time.
        states = [iterator.state_dict() for _ in iter(lambda: next(iterator, None), None)]
        for state in states[::step]:
            resumed = iter(buffered(ParquetStream(folder, **arguments), size))
            loaded.clear()
            resumed.load_state_dict(state)
            rows = state["buffer"] if size else []
            kept = sorted({int(np.searchsorted(ENDS, row, "right")) for row in rows})
            assert loaded == kept
            list(resumed)
            assert loaded[len(kept) :] == pieces[(state["source"] if size else state)["piece"] :]


# ---- errors while it reads


def damaged(folder, row_group):
    """Overwrites the data of a row group of the last file."""
    path = folder / "2.parquet"
    column = parquet.read_metadata(path).row_group(row_group).column(0)
    with open(path, "r+b") as file:
        file.seek(column.data_page_offset if not column.has_dictionary_page else column.dictionary_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    return path


LOST = set(range(58 + 5, 58 + 10))  # of row group 1 of the last file


def test_a_row_group_that_cannot_be_read_is_named_and_the_rest_comes(tmp_path):
    stream = ParquetStream(write(tmp_path))
    path = damaged(tmp_path, 1)
    iterator, found, errors = iter(stream), [], []
    while True:
        try:
            found.append(next(iterator))
        except StopIteration:
            break
        except RayloaderError as error:
            errors.append(str(error))
    assert numbers(found) == [i for i in range(100) if i not in LOST]
    (error,) = errors
    assert error.startswith(f"row group 1 of {path} cannot be read: ")


def test_a_file_that_is_another_one_now_is_an_error(tmp_path):
    stream = ParquetStream(write(tmp_path))
    write(tmp_path, [[7, 21, 1], [30], [5, 5, 11, 20, 1]])
    with pytest.raises(RayloaderError, match=r"row group 1 of .*0\.parquet has 21 rows now, and had 20"):
        list(stream)


@pytest.mark.usefixtures("small_chunks")
def test_a_null_is_an_error_of_its_row_alone(tmp_path):
    for number in range(2):
        parquet.write_table(
            pa.table({"i": [0, 1, 2, None, 4, 5, None]}), tmp_path / f"{number}.parquet", row_group_size=5
        )
    iterator, found, errors = iter(ParquetStream(tmp_path)), [], []
    while True:
        try:
            found.append(next(iterator)["i"].item())
        except StopIteration:
            break
        except ValueError as error:
            errors.append(str(error))
    assert found == [0, 1, 2, 4, 5] * 2
    assert len(errors) == 4
    assert errors[0].startswith(f"column 'i' is null in row 3 of row group 0 of {tmp_path}/0.parquet, and no tensor")
    assert errors[3].startswith(f"column 'i' is null in row 1 of row group 1 of {tmp_path}/1.parquet, and no tensor")
    assert [row["i"].item() for row in ParquetStream(tmp_path, filters=pc.field("i").is_valid())] == found
    assert numbers(ParquetStream(tmp_path, fill_null={"i": 9}))[3] == 9


# ---- paths


def test_paths_of_each_kind(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    for paths in ("1.parquet", folder / "1.parquet", ["1.parquet"], f"file://{folder}/1.parquet"):
        assert numbers(ParquetStream(paths)) == list(range(28, 58))
    assert numbers(ParquetStream(f"file://{folder}")) == list(range(100))
    below = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    assert numbers(ParquetStream(["2.parquet", "0.parquet"], filesystem=below)) == [*range(58, 100), *range(28)]
    assert numbers(pickle.loads(pickle.dumps(ParquetStream("1.parquet", filesystem=below)))) == list(range(28, 58))


def test_a_stream_of_relative_paths_is_read_in_another_folder(folder, tmp_path, monkeypatch):
    """As an actor's is."""
    monkeypatch.chdir(folder)
    streams = ParquetStream("1.parquet"), ParquetStream(["1.parquet", "0.parquet"]), ParquetStream(".")
    monkeypatch.chdir(tmp_path)
    found = [numbers(pickle.loads(pickle.dumps(stream))) for stream in streams]
    assert found == [list(range(28, 58)), [*range(28, 58), *range(28)], list(range(100))]


HIDDEN = ("_temporary/0/x.parquet", "a/.checkpoints/x.parquet")


def test_a_folder_is_read_with_the_folders_in_it(tmp_path):
    for name in ("b/x.parquet", "a/x.parquet", "a/_x.parquet", "a/.x.parquet", "c.parquet", *HIDDEN):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"p": [name]}), tmp_path / name)
    assert [row["p"] for row in ParquetStream(tmp_path)] == ["a/x.parquet", "b/x.parquet", "c.parquet"]


def test_paths_elsewhere_are_looked_at_when_they_are_read(folder):
    """By pyarrow's filesystem for tests, in memory."""
    stream = ParquetStream("mock:///nowhere")
    with pytest.raises(FileNotFoundError, match="there is no file or folder for a ParquetStream at nowhere"):
        iter(stream)
    memory = fs._MockFileSystem()
    memory.create_dir("files")
    fs.copy_files(str(folder), "files", fs.LocalFileSystem(), memory)
    assert numbers(ParquetStream("files", filesystem=memory)) == list(range(100))
    with pytest.raises(ValueError, match=r"Expected a local filesystem path, got a URI: 'mock:///x'"):
        iter(ParquetStream([folder, "mock:///x"]))


def test_a_filesystem_that_a_fork_would_lose_is_refused_there(folder, monkeypatch):
    monkeypatch.setattr(module, "_LOST_BY_FORK", {"local"})
    stream, given = ParquetStream(folder), ParquetStream(folder, filesystem=fs.LocalFileSystem())
    assert len(list(stream)) == 100
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert len(list(pickle.loads(pickle.dumps(stream)))) == 100
    for forked in (stream, given):
        with pytest.raises(RayloaderError, match=rf"a filesystem, local, that was used in process {here} and does not"):
            iter(forked)


@pytest.mark.parametrize("size", [4, 200])
def test_a_truncated_file_is_named(tmp_path, size):
    write(tmp_path)
    os.truncate(tmp_path / "1.parquet", size)
    with pytest.raises(ValueError, match=r"cannot read the footers of all files of .*1\.parquet"):
        ParquetStream(tmp_path)


def test_files_that_differ_are_an_error_that_names_column_and_file(tmp_path):
    parquet.write_table(pa.table({"x": [1], "y": [2]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table({"x": [1.5], "y": [2]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"column 'x' is int64 in .*1.parquet, and .*2.parquet has double"):
        ParquetStream(tmp_path)
    assert len(list(ParquetStream(tmp_path, columns=["y"]))) == 2
    parquet.write_table(pa.table({"x": [1.5]}), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=r"column 'y' is int64 in .*1.parquet, and .*2.parquet has none"):
        ParquetStream(tmp_path, columns=["y"])


# ---- arguments


REFUSED = [
    (TypeError, "a ParquetStream takes a path, or a list of some, of type str or pathlib.Path, got 3", {"paths": 3}),
    (TypeError, "a ParquetStream takes a path, or a list of some, of type str", {"paths": [3]}),
    (TypeError, "a ParquetStream takes a path, or a list of some, of type str", {"paths": []}),
    (FileNotFoundError, "there is no file or folder for a ParquetStream at .*nowhere", {"paths": "nowhere"}),
    (FileNotFoundError, "a ParquetStream needs at least one file, and there is none in ", {"paths": "."}),
    (TypeError, "seed of a ParquetStream must be a whole number >= 0, got None", {"seed": None}),
    (ValueError, 'equal_steps must be "cut", "pad" or None, got True', {"equal_steps": True}),
    (ValueError, "equal_steps='pad' counts rows before", {"equal_steps": "pad", "filters": [("i", ">", 1)]}),
    (ValueError, "filters must be as pyarrow.dataset takes them, got 'i > 3'", {"filters": "i > 3"}),
    (ValueError, r"got .*No match for FieldRef.Name\(y\) in i: int64", {"filters": [("y", ">", 1)]}),
    (ValueError, r"got \[\('t', '>', 1\)\]: Function 'greater' has no kernel", {"filters": [("t", ">", 1)]}),
    (KeyError, "Column y does not exist in schema", {"columns": ["y"]}),
    (ValueError, 'as_ must be "tensors" or "arrow", got None', {"as_": None}),
]


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_is_wrong_is_an_error_that_says_so(folder, error, text, arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        ParquetStream(**{"paths": folder, **arguments})


def test_an_epoch_that_is_none_is_an_error(folder):
    with pytest.raises(TypeError, match=r"epoch of a ParquetStream must be a whole number >= 0, got 1\.5"):
        ParquetStream(folder).set_epoch(1.5)


class Mixed(ShuffleBuffer):
    """Of a program."""


def test_a_loader_that_skips_is_refused_with_equal_steps(folder):
    stream = ParquetStream(folder, equal_steps="cut")
    for wrapped in (stream, ShuffleBuffer(stream, 3), ShuffleBuffer(Mixed(stream, 3), 3), PackedStream(stream, 9)):
        with pytest.raises(ValueError, match="leaves out rows that equal_steps of the dataset counts"):
            rayloader.DataLoader(wrapped, on_error="skip")
        rayloader.DataLoader(wrapped)
    rayloader.DataLoader(ShuffleBuffer(ParquetStream(folder), 3), on_error="skip")


def test_views_of_text_become_text(tmp_path):
    table = pa.table({"i": [0, 1, 2], "t": pa.array(["a", "b" * 20, "c"], pa.string_view())})
    parquet.write_table(table, tmp_path / "x.parquet")
    parquet.write_table(table.slice(1), tmp_path / "y.parquet")
    stream = ShuffleBuffer(ParquetStream(tmp_path, filters=[("i", "<", 2)]), 2)
    assert sorted(row["t"] for row in stream) == ["a", *["b" * 20] * 2]


def test_files_without_rows(tmp_path):
    parquet.write_table(pa.table({"i": pa.array([], pa.int64())}), tmp_path / "x.parquet")
    assert list(ParquetStream(tmp_path)) == list(ShuffleBuffer(ParquetStream(tmp_path, shuffle=True), 3)) == []
    with pytest.raises(ValueError, match="needs a row for each of the 1 workers of all ranks, and there are 0"):
        iter(ParquetStream(tmp_path, equal_steps="cut"))


def test_it_is_found_in_the_package():
    assert rayloader.ParquetStream is ParquetStream
    with pytest.raises(AttributeError, match="has no attribute 'ParquetStreams'"):
        rayloader.ParquetStreams  # noqa: B018


def replace(folder, size):
    """Puts another file in the place of the first, with row groups of this size."""
    table = pa.table({"i": range(1000, 1100), "t": ["text"] * 100}, SCHEMA)
    parquet.write_table(table, folder / "new", row_group_size=size, compression="zstd")
    os.replace(folder / "new", folder / "0.parquet")


@pytest.mark.parametrize("size", [20, 50])
def test_a_file_that_is_replaced_once_it_has_been_opened_is_an_error(tmp_path, monkeypatch, size):
    """With the same row groups the file that has taken its place can be read, with others it cannot."""
    stream = ParquetStream(write(tmp_path, [[20] * 5]))
    opened = module._Files.open

    def open_then_replace(*arguments):
        fragment = opened(*arguments)
        fragment.ensure_complete_metadata()
        replace(tmp_path, size)
        return fragment

    monkeypatch.setattr(module, "_OPEN", 0)
    monkeypatch.setattr(module._Files, "open", open_then_replace)
    with pytest.raises(RayloaderError, match=r"0\.parquet was replaced while it is read"):
        list(stream)


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path):
    """Its row groups have as many rows, so that only its size and time tell."""
    iterator = iter(ParquetStream(write(tmp_path, [[20] * 5])))
    assert numbers(itertools.islice(iterator, 10)) == list(range(10))
    replace(tmp_path, 20)
    with pytest.raises(RayloaderError, match=r"0\.parquet was replaced while it is read"):
        list(iterator)
