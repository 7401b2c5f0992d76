"""`ParquetStream`: parts, orders, states, errors; types are in test_arrow.py, and loaders in test_columns.py."""

import io
import itertools
import os
import pickle
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import dataset, fs, parquet

import rayloader
from arrow_tables import plain
from rayloader import ParquetStream, RayloaderError, ShuffleBuffer, StateError
from rayloader.data import parquet as module
from rayloader.host.shard_info import Reader
from rayloader.plans import PackedStream
from rayloader.resume.state import from_plain, to_plain

# Row groups of the files that most tests read: 100 rows in 9 groups, of unequal length.
GROUPS = [[7, 20, 1], [30], [5, 5, 11, 20, 1]]
ENDS = np.cumsum([rows for groups in GROUPS for rows in groups])
SCHEMA = pa.schema({"i": pa.int64(), "t": pa.string()})


def write(folder, groups=GROUPS, names="{}.parquet"):
    """Files with these row groups; the column `i` counts the rows of all."""
    begin = 0
    for number, sizes in enumerate(groups):
        path = folder / names.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with parquet.ParquetWriter(path, SCHEMA) as writer:
            for size in sizes:
                rows = range(begin, begin + size)
                writer.write_table(pa.table({"i": rows, "t": [f"text {i}" for i in rows]}, SCHEMA), row_group_size=size)
                begin += size
    return folder


def files(folder, *columns):
    """Files with these columns each, by number."""
    for number, one in enumerate(columns, 1):
        parquet.write_table(pa.table(one), folder / f"{number}.parquet")
    return folder


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


def read(stream):
    """The rows that come, and the texts of errors among them."""
    iterator, rows, errors = iter(stream), [], []
    while True:
        try:
            rows.append(next(iterator))
        except StopIteration:
            return rows, errors
        except (ValueError, RayloaderError) as error:
            errors.append(str(error))


# ---- what it gives, in parts, and from any position


def in_file(state):
    """The state as programs save it."""
    torch.save(to_plain(state), file := io.BytesIO())
    file.seek(0)
    return from_plain(torch.load(file, weights_only=True))


def in_pieces(make, cuts):
    """The rows of an iterator that is replaced at these places, each time by one that goes on from its state."""
    iterator, state = iter(make()), None
    taken = [*map(plain, itertools.islice(iterator, cuts[0]))]
    for more in (*cuts[1:], None):
        state = in_file(iterator.state_dict())
        iterator = iter(make())
        iterator.load_state_dict(state)
        assert in_file(iterator.state_dict()).keys() == state.keys()
        taken += map(plain, itertools.islice(iterator, more))
    iterator.load_state_dict(state)  # which going on has not changed: backwards, in the same iterator
    assert taken[len(taken) - len(again := [*map(plain, iterator)]) :] == again
    iterator.load_state_dict(iterator.state_dict())
    assert list(iterator) == []
    return taken


NAMES = ["day={}/a.parquet", "day={}/h=b/a.parquet", "day=1/{}.parquet", "day=1/h=a%20b/x/{}.parquet"]
FILTERS = [
    None,
    [("i", ">", 20), ("i", "<", 50)],
    (pc.field("i") > 20) & (pc.field("i") < 50),
    [("day", "=", 1)],
    [[("day", ">", 1)], [("i", "<", 9), ("day", "=", 0)]],
    [("day", ">", 10)],
]


@settings(max_examples=60)
@given(
    groups=st.lists(st.lists(st.integers(1, 20), max_size=4), min_size=1, max_size=3),
    names=st.sampled_from(NAMES),
    columns=st.sampled_from([None, ["i"], ["t"], ["day", "t"], ["day"]]),
    filters=st.sampled_from(FILTERS),
    equal_steps=st.sampled_from([None, "cut", "pad"]),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
    count=st.integers(1, 9),
    size=st.sampled_from([0, 0, 4, 15, 1000]),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=2),
)
def test_parts_of_any_files_are_pyarrows_rows_together_and_go_on_from_any_position(
    groups, names, columns, filters, equal_steps, shuffle, epoch, count, size, cuts, tmp_path_factory
):
    folder = write(tmp_path_factory.mktemp("files"), groups, names)
    equal_steps = equal_steps if filters is None else None
    expression = parquet.filters_to_expression(filters) if isinstance(filters, list) else filters
    table = dataset.dataset(folder, partitioning="hive").to_table(columns, filter=expression)
    expected, total = table.to_pylist(), table.num_rows
    stream = ParquetStream(folder, columns=columns, filters=filters, equal_steps=equal_steps, shuffle=shuffle)
    stream.set_epoch(epoch)
    stream, parts = pickle.loads(pickle.dumps(stream)), []
    share = {"cut": total // count, "pad": -(-total // count)}.get(equal_steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", 80)
        for index in range(count):
            with Reader((index, count)).reads():
                if share == 0:
                    with pytest.raises(ValueError, match=f"needs a row for each of the {count} .*there are {total}"):
                        iter(stream)
                    return
                parts.append([*map(plain, buffered(stream, size))])
                if index == count - 1:
                    assert in_pieces(lambda: buffered(stream, size), cuts) == parts[-1]
    rows = [row for part in parts for row in part]
    assert all([*row] == table.column_names for row in rows)
    if share is None:
        assert sorted(rows, key=str) == sorted(expected, key=str)
        assert rows == expected or shuffle or size or count > 1
    else:
        assert {len(part) for part in parts} == {share}
        fewer, more = (rows, expected) if equal_steps == "cut" else (expected, rows)
        assert not Counter(map(str, fewer)) - Counter(map(str, more))


def test_files_may_differ_in_columns_that_nobody_asks_for_and_filters_must_fit_all(tmp_path):
    """Pyarrow would take a column that is missing in a file for one of nulls, and leave out all rows of the file."""
    files(tmp_path, {"ij": [1, 2], "i": [1, 2], "j k": [1, 2]}, {"i": [1.5], "ij": [3]})
    stream = ParquetStream(tmp_path, columns=["ij"], filters=[("ij", ">", 1)])
    assert [row["ij"].item() for row in stream] == [2, 3]
    refused = {
        r"column 'j k' is int64 in .*1\.parquet, and .*2\.parquet has none": {"filters": [("j k", ">", 1)]},
        r"column 'i' is int64 in .*1\.parquet, and .*2\.parquet has double": {"columns": ["ij", "i"]},
    }
    for error, arguments in refused.items():
        with pytest.raises(ValueError, match=error):
            ParquetStream(tmp_path, **{"columns": ["ij"], **arguments})


@pytest.mark.usefixtures("small_chunks")
def test_a_shuffled_order_depends_on_seed_and_epoch_alone_and_a_buffer_mixes_its_row_groups(folder):
    def changes(stream):
        """How often the next row is of another row group."""
        return np.count_nonzero(np.diff(np.searchsorted(ENDS, numbers(stream), "right")))

    stream = ParquetStream(folder, shuffle=True)
    assert changes(stream) == 8
    assert changes(buffered(stream, 50)) > 40
    first = numbers(stream)
    assert first == numbers(stream) == numbers(pickle.loads(pickle.dumps(stream)))
    stream.set_epoch(1)
    orders = [first, numbers(stream), numbers(ParquetStream(folder, shuffle=True, seed=1)), list(range(100))]
    assert len(set(map(tuple, orders))) == 4


# ---- states


def test_a_buffers_state_has_the_numbers_of_its_rows(folder):
    """Also of rows that somebody has looked at, as a worker does at the first ones."""
    iterator = iter(ShuffleBuffer(ParquetStream(folder), 10))
    given = next(iterator)["i"].item()
    for row in iterator._buffer[::2]:
        dict(row)
    buffer = iterator.state_dict()["buffer"]
    assert buffer.dtype == np.int64
    assert sorted([given, *buffer.tolist()]) == list(range(11))


def test_a_state_of_something_else_is_refused(folder, tmp_path):
    def refused(stream, state, error):
        with pytest.raises(StateError, match=error):
            iter(stream).load_state_dict(state)

    state = iter(ParquetStream(folder)).state_dict()
    for wrong in (None, {}, {"epoch": 1}):
        refused(ParquetStream(folder), wrong, "this is not a state of a ParquetStream's iterator")
    for name, other in {"shuffle": True, "seed": 1, "equal_steps": "cut"}.items():
        refused(ParquetStream(folder, **{name: other}), state, f"state of a ParquetStream was saved with {name}=")
    refused(ParquetStream(folder / "0.parquet"), state, "the state of a ParquetStream was saved with files=")
    with Reader((1, 2)).reads():
        refused(ParquetStream(folder), state, r"with part=\[0, 1\], and here it is \[1, 2\]")
    one, same, other = (tmp_path / name for name in ("1", "2", "3"))  # files of the same names, and as many rows
    state = iter(ParquetStream(write(one, [[1], [1]], "day=3{}/a.parquet"))).state_dict()
    iter(ParquetStream(write(same, [[1], [1]], "day=3{}/a.parquet"))).load_state_dict(state)
    refused(ParquetStream(write(other, [[1], [1]], "day=4{}/a.parquet")), state, "saved with files=")
    # The file has as many rows as before, and others: nothing but the rows themselves can tell.
    buffer = ShuffleBuffer(ParquetStream(write(tmp_path / "4", [[30]]), filters=[("i", "<", 50)]), 10)
    iterator = iter(buffer)
    list(itertools.islice(iterator, 20))
    table = pa.table({"i": range(45, 75), "t": ["text"] * 30}, SCHEMA)
    parquet.write_table(table, tmp_path / "4" / "0.parquet")
    buffer = ShuffleBuffer(ParquetStream(tmp_path / "4", filters=[("i", "<", 50)]), 10)
    refused(buffer, iterator.state_dict(), r"rows of row group 0 of .*0\.parquet that the filters let through no more")


READERS = [(0, {}), (4, {}), (9, {"shuffle": True, "equal_steps": "pad"})]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("size", "arguments"), READERS)
@pytest.mark.parametrize("count", [1, 2])
def test_resuming_reads_no_row_group_before_the_position_but_those_of_rows_that_were_not_given(
    folder, size, arguments, count, monkeypatch
):
    loaded, load = [], module._Files.load
    monkeypatch.setattr(
        module._Files, "load", lambda files, group, *more: loaded.append(group) or load(files, group, *more)
    )
    with Reader((count - 1, count)).reads():
        pieces = [group for group, _, _ in iter(ParquetStream(folder, **arguments))._pieces]
        iterator = iter(buffered(ParquetStream(folder, **arguments), size))
        # To the end first: while an iterator lives, its thread loads the next row group at any time.
        states = [iterator.state_dict() for _ in iter(lambda: next(iterator, None), None)]
        for state in states[::5]:
            resumed = iter(buffered(ParquetStream(folder, **arguments), size))
            loaded.clear()
            resumed.load_state_dict(state)
            rows = state["buffer"] if size else []
            kept = sorted({int(np.searchsorted(ENDS, row, "right")) for row in rows})
            assert loaded == kept
            list(resumed)
            assert loaded[len(kept) :] == pieces[(state["source"] if size else state)["piece"] :]


# ---- errors while it reads


def test_a_row_group_that_cannot_be_read_is_named_and_the_rest_comes(tmp_path):
    stream = ParquetStream(write(tmp_path))
    path = tmp_path / "2.parquet"
    column = parquet.read_metadata(path).row_group(1).column(0)
    with open(path, "r+b") as file:
        file.seek(column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset)
        file.write(b"\xff" * column.total_compressed_size)
    rows, (error,) = read(stream)
    assert numbers(rows) == [*range(58 + 5), *range(58 + 10, 100)]
    assert error.startswith(f"row group 1 of {path} cannot be read: ")
    write(tmp_path, [[7, 21, 1], [30], [5, 5, 11, 20, 1]])
    with pytest.raises(RayloaderError, match=r"row group 1 of .*0\.parquet has 21 rows now, and had 20"):
        list(stream)


@pytest.mark.usefixtures("small_chunks")
def test_a_null_is_an_error_of_its_row_alone(tmp_path):
    table = pa.table({"i": [0, 1, 2, None, 4, 5, None]})
    for number in range(2):
        parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=5)
    rows, errors = read(ParquetStream(tmp_path))
    assert numbers(rows) == [0, 1, 2, 4, 5] * 2
    assert len(errors) == 4
    for error, place in (errors[0], "row 3 of row group 0 of {}/0"), (errors[3], "row 1 of row group 1 of {}/1"):
        assert error.startswith(f"column 'i' is null in {place.format(tmp_path)}.parquet, and no tensor")
    assert numbers(ParquetStream(tmp_path, filters=pc.field("i").is_valid())) == [0, 1, 2, 4, 5] * 2
    assert numbers(ParquetStream(tmp_path, fill_null={"i": 9}))[3] == 9
    filtered = ParquetStream(tmp_path, filters=pc.field("i").is_null() | (pc.field("i") > 1))
    assert read(filtered)[1][0].startswith("column 'i' is null in row 1 among those that the filters let through of ")


def replace(folder, size):
    """Puts another file in the place of the first, with row groups of this size."""
    table = pa.table({"i": range(1000, 1100), "t": ["text"] * 100}, SCHEMA)
    parquet.write_table(table, folder / "new", row_group_size=size, compression="zstd")
    os.replace(folder / "new", folder / "0.parquet")


@pytest.mark.parametrize("size", [20, 50, None])
def test_a_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path, monkeypatch, size):
    """Once it has been opened: with the same row groups the new one can be read; or, without a size, after ten rows."""
    stream, opened = ParquetStream(write(tmp_path, [[20] * 5])), module._Files.open

    def open_then_replace(*arguments):
        fragment = opened(*arguments)
        fragment.ensure_complete_metadata()
        replace(tmp_path, size)
        return fragment

    if size:
        monkeypatch.setattr(module, "_OPEN", 0)
        monkeypatch.setattr(module._Files, "open", open_then_replace)
    iterator = iter(stream)
    if not size:
        assert numbers(itertools.islice(iterator, 10)) == list(range(10))
        replace(tmp_path, 20)
    with pytest.raises(RayloaderError, match=r"0\.parquet was replaced while it is read"):
        list(iterator)


# ---- paths and arguments


def test_paths_of_each_kind_are_read_in_another_folder_too(folder, tmp_path, monkeypatch):
    """As an actor reads them; those elsewhere are looked at when they are read."""
    monkeypatch.chdir(folder)
    below = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
    second = list(range(28, 58))
    given = [(paths, None, second) for paths in ("1.parquet", folder / "1.parquet", ["1.parquet"])]
    given += [(f"file://{folder}/1.parquet", None, second), (f"file://{folder}", None, list(range(100)))]
    given += [(["1.parquet", "0.parquet"], files, [*second, *range(28)]) for files in (None, below)]
    given += [(".", None, list(range(100))), ("1.parquet", below, second)]
    streams = [(ParquetStream(paths, filesystem=filesystem), expected) for paths, filesystem, expected in given]
    monkeypatch.chdir(tmp_path)
    for stream, expected in streams:
        assert numbers(stream) == numbers(pickle.loads(pickle.dumps(stream))) == expected
    stream = ParquetStream("mock:///nowhere")
    with pytest.raises(FileNotFoundError, match="there is no file or folder for a ParquetStream at nowhere"):
        iter(stream)
    with pytest.raises(ValueError, match=r"Expected a local filesystem path, got a URI: 'mock:///x'"):
        iter(ParquetStream([folder, "mock:///x"]))


def test_a_filesystem_that_a_fork_would_lose_is_refused_there(folder, monkeypatch):
    monkeypatch.setattr(module, "_LOST_BY_FORK", {"local"})
    streams, here = [ParquetStream(folder), ParquetStream(folder, filesystem=fs.LocalFileSystem())], os.getpid()
    assert len(list(streams[0])) == 100
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    assert len(list(pickle.loads(pickle.dumps(streams[0])))) == 100
    for forked in streams:
        with pytest.raises(RayloaderError, match=rf"a filesystem, local, that was used in process {here} and does not"):
            iter(forked)


PATHS = "a ParquetStream takes a path, or a list of some, of type str or pathlib.Path, got "
FILTERED = r"filters must be as pyarrow.dataset takes them, got "
REFUSED = [
    *((TypeError, PATHS + shown, {"paths": paths}) for shown, paths in (("3", 3), (r"\[3\]", [3]), (r"\[\]", []))),
    (FileNotFoundError, "there is no file or folder for a ParquetStream at .*nowhere", {"paths": "nowhere"}),
    (FileNotFoundError, "a ParquetStream needs at least one file, and there is none in ", {"paths": "empty"}),
    (TypeError, "seed of a ParquetStream must be a whole number >= 0, got None", {"seed": None}),
    (ValueError, 'equal_steps must be "cut", "pad" or None, got True', {"equal_steps": True}),
    (ValueError, "equal_steps='pad' counts rows before", {"equal_steps": "pad", "filters": [("i", ">", 1)]}),
    (ValueError, FILTERED + "'i > 3'", {"filters": "i > 3"}),
    (ValueError, r"got .*No match for FieldRef.Name\(y\) in i: int64", {"filters": [("y", ">", 1)]}),
    (ValueError, FILTERED + r"\[\('t', '>', 1\)\]: Function 'greater' has no kernel", {"filters": [("t", ">", 1)]}),
    (ValueError, r"cannot read the footers of all files of .*cut\.parquet", {"paths": "cut.parquet"}),
    (KeyError, "Column y does not exist in schema", {"columns": ["y"]}),
    (ValueError, 'as_ must be "tensors" or "arrow", got None', {"as_": None}),
]


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSED)
def test_what_is_wrong_is_an_error_that_says_so(folder, error, text, arguments, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.parquet").write_bytes((folder / "1.parquet").read_bytes()[:200])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        ParquetStream(**{"paths": folder, **arguments})
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
