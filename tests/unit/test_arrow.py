"""`ArrowDataset`: what becomes of each type, of rows and batches; files; loaders are in test_columns.py."""

import copy
import datetime
import decimal
import os
import pickle
import sys

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

import programs
import rayloader
from arrow_tables import CATEGORIES, INDICES, PARTS, categories, plain, source_of
from rayloader import ArrowDataset, ReplicaError
from told import told

ROWS = 4
NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)
MATRIX = [[1, 2], [3, 4], [5, 6]]
VIEW = pa.string_view()


def numbers(*lists):
    return [torch.tensor(one, dtype=torch.int64) for one in lists]


# Columns by name: what is stored, and what a batch has, as tensors.
KINDS = {
    "int32": (pa.array(range(4), pa.int32()), torch.arange(4, dtype=torch.int32)),
    "uint64": (pa.array(range(4), pa.uint64()), torch.tensor([0, 1, 2, 3], dtype=torch.uint64)),
    "half": (pa.array(np.arange(4, dtype="f2")), torch.arange(4, dtype=torch.float16)),
    "bool": (pa.array([True, False, True, True]), torch.tensor([True, False, True, True])),
    "decimal": (pa.array([decimal.Decimal("1.50")] * 4), torch.full((4,), 1.5, dtype=torch.float64)),
    "timestamp": (pa.array([NOON] * 4, pa.timestamp("s", "UTC")), torch.full((4,), 1_577_880_000)),
    "date": (pa.array([NOON.date()] * 4), torch.full((4,), 18_262, dtype=torch.int32)),
    "date64": (pa.array([NOON.date()] * 4, pa.date64()), torch.full((4,), 18_262 * 86_400_000)),
    "time": (pa.array([1, 2, 3, 4], pa.time32("s")), torch.arange(1, 5, dtype=torch.int32)),
    "duration": (pa.array([5] * 4, pa.duration("ns")), torch.full((4,), 5)),
    "text view": (pa.array(["a", "", "ö", "d"], VIEW), ["a", "", "ö", "d"]),
    "lists of views": (pa.array([["a"], ["b", "c"]] * 2, pa.list_(VIEW)), [["a"], ["b", "c"]] * 2),
    "long lists of views": (pa.array([["a"], ["b", "c"]] * 2, pa.large_list(VIEW)), [["a"], ["b", "c"]] * 2),
    "pairs of views": (pa.array([["a", "b"]] * 4, pa.list_(VIEW, 2)), [["a", "b"]] * 4),
    "struct of views": (pa.array([{"b": b"x"}] * 4, pa.struct({"b": pa.binary_view()})), {"b": [b"x"] * 4}),
    "views in a dictionary": (pa.DictionaryArray.from_arrays([1, 0, 1, 0], pa.array(["u", "v"], VIEW)), [*"vuvu"]),
    "binary": (pa.array([b"q", b"", b"\0", b"z"]), [b"q", b"", b"\0", b"z"]),
    "three bytes": (pa.array([b"abc"] * 4, pa.binary(3)), [b"abc"] * 4),
    "dictionary": (pa.array(["x", "y", "x", "y"]).dictionary_encode(), ["x", "y", "x", "y"]),
    "numbers in a dictionary": (pa.array([7, 9, 7, 9]).dictionary_encode(), torch.tensor([7, 9, 7, 9])),
    "fixed": (pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)), torch.tensor([[1.0, 2.0]] * 4)),
    "matrix": (pa.array([MATRIX] * 4, pa.list_(pa.list_(pa.int64(), 2), 3)), torch.tensor([MATRIX] * 4)),
    "pairs of text": (pa.array([["a", "b"]] * 4, pa.list_(pa.string(), 2)), [["a", "b"]] * 4),
    "list": (pa.array([[1], [2, 3], [], [4]]), numbers([1], [2, 3], [], [4])),
    "long list": (pa.array([[1], [2, 3], [], [4]], pa.large_list(pa.int64())), numbers([1], [2, 3], [], [4])),
    "equal lists": (pa.array([[1, 2]] * 4), numbers(*[[1, 2]] * 4)),
    "lists of lists": (
        pa.array([[[1], [2]], [], [[3, 4]], [[5]]]),
        [numbers([1], [2]), [], numbers([3, 4]), numbers([5])],
    ),
    "lists of text": (pa.array([["a"], [], ["b", "c"], []]), [["a"], [], ["b", "c"], []]),
    "struct": (
        pa.array([{"a": k, "b": {"c": str(k)}, "d": [k] * k} for k in range(4)]),
        {"a": torch.arange(4), "b": {"c": ["0", "1", "2", "3"]}, "d": [torch.full((k,), k) for k in range(4)]},
    ),
    "lists of structs": (
        pa.array([[{"a": 1}], [], [{"a": 2}, {"a": 3}], []]),
        [[{"a": torch.tensor(1)}], [], [{"a": torch.tensor(2)}, {"a": torch.tensor(3)}], []],
    ),
    "tensor": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24.0).reshape(4, 3, 2)),
        torch.arange(24, dtype=torch.float64).reshape(4, 3, 2),
    ),
}
TABLE = pa.table({"x": [1, 2], "t": ["a", "b"], "s": [{"a": 1}, {"a": 2}]})


def touched(rows):
    """The rows, with values of their own that are the same."""
    for row in rows:
        row.update(row)
    return rows


def in_chunks(table, rows=1):
    return pa.Table.from_batches(table.to_batches(rows), table.schema)


# ---- what becomes of each type


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [False, True])
def test_a_batch_of_each_type(kind, chunks):
    stored, expected = KINDS[kind]
    table = pa.table({"x": stored})
    dataset = ArrowDataset(in_chunks(table) if chunks else table)
    batch = default_collate(dataset.__getitems__(range(ROWS)))
    assert type(batch) is dict
    assert told(batch) == told({"x": expected})
    assert told(default_collate(touched(dataset.__getitems__(range(ROWS))))) == told(batch)
    assert told(default_collate([dataset[index] for index in range(ROWS)])) == told(batch)
    mixed = default_collate([*dataset.__getitems__([3, 1]), dataset[0]])
    assert told(mixed) == told(default_collate(dataset.__getitems__([3, 1, 0])))


@pytest.mark.parametrize("kind", [*KINDS, "map"])
def test_arrows_own_arrays_are_collated_as_they_are(kind):
    stored = pa.array([[("a", 1)], [], []], pa.map_(pa.string(), pa.int64())) if kind == "map" else KINDS[kind][0]
    dataset = ArrowDataset(pa.table({"x": stored}), as_="arrow")
    for rows in dataset.__getitems__([2, 0]), touched(dataset.__getitems__([2, 0])):
        collated = default_collate(rows)["x"]
        assert collated.to_pylist() == [stored[2].as_py(), stored[0].as_py()]
        assert collated.type == dataset.schema.field("x").type
    assert dataset[2]["x"].as_py() == stored[2].as_py()


def test_a_tensor_whose_dimensions_are_permuted():
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    stored = pa.ExtensionArray.from_storage(kind, pa.array([range(6)] * 2, pa.list_(pa.int64(), 6)))
    assert ArrowDataset(pa.table({"x": stored}))[1]["x"].tolist() == [[0, 3], [1, 4], [2, 5]]


FIELDS = {
    "i": st.integers(-128, 127),
    "f": st.floats(width=32, allow_nan=False),
    "t": st.text(max_size=3),
    "l": st.lists(st.integers(0, 9), max_size=3),
}
SCHEMA = pa.schema({"i": pa.int8(), "f": pa.float32(), "t": pa.string(), "l": pa.list_(pa.int16())})


@given(
    st.lists(st.fixed_dictionaries(FIELDS), min_size=1, max_size=9),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), min_size=1, max_size=12),
)
def test_any_rows_of_any_chunks_are_those_of_the_table(rows, size, drawn):
    dataset = ArrowDataset(in_chunks(pa.Table.from_pylist(rows, SCHEMA), size))
    indices = [index % len(rows) for index in drawn]
    expected = {name: [rows[index][name] for index in indices] for name in FIELDS}
    expected["i"] = torch.tensor(expected["i"], dtype=torch.int8)
    expected["f"] = torch.tensor(expected["f"], dtype=torch.float32)
    expected["l"] = [torch.tensor(one, dtype=torch.int16) for one in expected["l"]]
    for batch in dataset.__getitems__(indices), touched(dataset.__getitems__(indices)):
        assert told(default_collate(batch)) == told(expected)


@pytest.mark.parametrize("how", ["table", "mapped"])
@pytest.mark.parametrize(("kind", "index"), CATEGORIES, ids=str)
def test_dictionaries_that_need_wider_indices_together(kind, index, how, tmp_path):
    """Rows have their values, which several dictionaries have together."""
    columns = [categories(kind, part, index, INDICES[index]) for part in PARTS]
    source = source_of(how, columns, tmp_path)
    stored = [value for column in columns for value in column.to_pylist()]
    places = [len(stored) - 1, 0, *range(5, len(stored), len(stored) // 60), 1]
    expected = [stored[place] for place in places]
    for as_ in ("arrow",) if kind == "map" else ("tensors", "arrow"):
        dataset = ArrowDataset(source, as_=as_)
        for there in (dataset, pickle.loads(pickle.dumps(dataset))):
            assert [plain(row["x"]) for row in there.__getitems__(places)] == expected
            assert plain(there[-2]["x"]) == stored[-2]
    rows, several = dataset.__getitems__(places), dataset.__getitems__(places[:9]) + dataset.__getitems__(places[9:])
    for collated in map(default_collate, (rows, several, touched(dataset.__getitems__(places)))):
        assert collated["x"].to_pylist() == expected
        assert collated["x"].type == dataset.schema.field("x").type == dataset[0]["x"].type


def test_files_whose_dictionaries_have_other_index_types(tmp_path):
    """As pandas writes them, by the number of categories in each file."""
    for index, count in INDICES.items():
        write(tmp_path / f"{count:06}.arrow", "file", pa.table({"x": categories("plain", count, index, count)}))
    dataset = ArrowDataset(tmp_path)
    assert [dataset[place]["x"] for place in (0, 199, -1)] == ["word 100-0", "word 200-198", "word 50000-49500"]


# ---- rows


def test_a_row_is_a_mapping_and_what_is_changed_in_it_stays_changed():
    dataset = ArrowDataset(TABLE, columns=["x", "s"])
    rows = dataset.__getitems__([0, 1])
    assert isinstance(rows, list)
    row = rows[0]
    assert (list(row), len(row), "x" in row, row.get("y")) == (["x", "s"], 2, True, None)
    assert row == {"x": torch.tensor(1), "s": {"a": torch.tensor(1)}}
    assert repr(row) == "Row({'x': tensor(1), 's': {'a': tensor(1)}})"
    with pytest.raises(KeyError):
        row["y"]
    row["x"] = torch.tensor(7)
    rows[1]["s"]["a"] = torch.tensor(9)
    rows[1]["x"] += 10
    assert told(default_collate(rows)) == told({"x": torch.tensor([7, 12]), "s": {"a": torch.tensor([1, 9])}})
    for row in rows:
        row["new"] = row.pop("x")
    assert list(default_collate(rows)) == ["s", "new"]
    doubled = type(row)({name: value * 2 for name, value in dataset[0].items() if name == "x"})  # as libraries map rows
    assert told(default_collate([doubled])) == told({"x": torch.tensor([2])})


def test_a_row_travels_and_is_collated_as_before():
    dataset = ArrowDataset(pa.table({"x": [[1], [2]], "s": ["a", "b"]}))
    dataset.label = "a"
    rows = dataset.__getitems__([0, 1])
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied.label == "a"
    expected = {"x": numbers([1], [2]), "s": ["a", "b"]}
    others = pickle.loads(pickle.dumps(rows)), copy.deepcopy(rows), [*map(copy.copy, rows)]
    for some in rows, *others, copied.__getitems__([0, 1]), [dataset[0], ArrowDataset(dataset._batches[0])[1]]:
        assert told(default_collate(some)) == told(expected)


def test_batches_have_memory_of_their_own_that_can_be_written_to():
    table = pa.table({"x": np.zeros(8), "l": [[1, 2]] * 8, "s": [{"a": 0}] * 8, "t": ["a"] * 8})
    for source in (table, in_chunks(table, 4), in_chunks(table, 1)):
        dataset = ArrowDataset(source)
        for indices in ([3], [0, 1], range(8)):
            rows = dataset.__getitems__(indices)
            expected = told(default_collate(dataset.__getitems__(indices)))
            batch = default_collate(rows)
            for tensor in batch["x"], batch["l"][0], batch["s"]["a"]:
                tensor += 1
            batch["t"][0] = "changed"
            assert told(default_collate(rows)) == told(default_collate(dataset.__getitems__(indices))) == expected
    assert table["l"][0].as_py() == [1, 2]


def test_indices():
    dataset = ArrowDataset(pa.table({"x": range(5)}))
    assert len(dataset) == 5
    assert [dataset[i]["x"].item() for i in (0, -1, np.int64(2), torch.tensor(3))] == [0, 4, 2, 3]
    assert [row["x"].item() for row in dataset.__getitems__(torch.tensor([4, -5]))] == [4, 0]
    assert [row["x"].item() for row in dataset.__getitems__(np.array([4, 1], np.uint64))] == [4, 1]
    assert dataset.__getitems__([]) == []
    for wrong in (5, -6):
        with pytest.raises(IndexError, match=f"ArrowDataset index {wrong} is out of range for 5 rows"):
            dataset[wrong]
    for wrong in ([0.5], ["a"]):
        with pytest.raises(TypeError):
            dataset.__getitems__(wrong)
    with pytest.raises(TypeError):
        dataset["x"]


# ---- nulls, what is refused


@pytest.mark.parametrize(
    ("values", "path", "value"),
    [
        ([1, 2, None], "x", 0),
        ([1.0, 2.0, None], "x", -1.0),
        (["a", "b", None], "x", ""),
        ([[1], [2], None], "x", []),
        ([[1], [2], [3, None]], "x[]", None),
        ([{"a": 1}, {"a": 2}, None], "x", {"a": 0}),
        ([{"a": 1}, {"a": 2}, {"a": None}], "x.a", None),
        ([{"a": [1]}, {"a": [2]}, {"a": [None]}], "x.a[]", None),
        (pa.array(["a", "b", None]).dictionary_encode(), "x", "?"),
        ([b"a", b"b", None], "x", b""),
    ],
)
def test_a_null_is_an_error_that_names_column_row_and_remedy(values, path, value):
    table = pa.table({"x": values})
    dataset = ArrowDataset(table)
    assert len(dataset.__getitems__([0, 1])) == 2
    with pytest.raises(ValueError, match=r"is null in row 2, and no tensor has a null; pass fill_null={'x': ") as found:
        dataset.__getitems__([1, 2, 0])
    assert str(found.value).startswith(f"column {path!r} is null")
    if value is not None:
        filled = ArrowDataset(table, fill_null={"x": value})
        assert plain(filled[2]["x"]) == value
        assert len(default_collate(filled.__getitems__([1, 2, 0]))["x"]) in (1, 3)
    assert ArrowDataset(table, as_="arrow")[2]["x"].as_py() == table["x"][2].as_py()


MAP = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
TWICE = r"a row has each column once, and \['s\.a'\] come more than once; rename"
PATHS = r"an ArrowDataset, if not of a table, takes a path, or a list of some, of type str or pathlib.Path, got "
NAMES = "columns must be a list of at least one name"
REFUSED = [
    (TypeError, PATHS + "3", 3, {}),
    (TypeError, PATHS + r"\[3\]", [3], {}),
    (TypeError, PATHS + r"\[\]", [], {}),
    (FileNotFoundError, "nowhere", "nowhere.parquet", {}),
    (FileNotFoundError, r"has no file that ends in \.arrow or ", ".", {}),
    (ValueError, 'as_ must be "tensors" or "arrow", got 3', TABLE, {"as_": 3}),
    (TypeError, NAMES, TABLE, {"columns": "x"}),
    (TypeError, NAMES, TABLE, {"columns": [1]}),
    (TypeError, NAMES, TABLE, {"columns": []}),
    (KeyError, "Column y does not exist in schema", TABLE, {"columns": ["y"]}),
    (ValueError, r"\['x'\] come more than once", TABLE, {"columns": ["x", "x"]}),
    (TypeError, "'int' object is not iterable", TABLE, {"fill_null": 0}),
    (KeyError, "Column y does not exist in schema", TABLE, {"fill_null": {"y": 0}}),
    (ValueError, "Could not convert 'a' with type str", TABLE, {"fill_null": {"x": "a"}}),
    (KeyError, r"Column l\[\] does", pa.table({"l": [[None, 1]]}), {"fill_null": {"l[]": 0}, "as_": "arrow"}),
    (ValueError, TWICE, pa.table({"s": pa.StructArray.from_arrays([pa.array([1])] * 2, ["a", "a"])}), {}),
    (ValueError, TWICE, pa.table({"s.a": [[1]], "s": [{"a": 1}]}), {}),
    (TypeError, r"column 's\.a' is of type map", pa.table({"s.a": MAP, "s": [{"a": 1}]}), {}),
    (TypeError, "column 'm' is of type map<.*>, which no tensor has", pa.table({"m": MAP}), {}),
    (TypeError, r"column 'm.n\[\]' is of type null", pa.table({"m": [{"n": [None]}]}), {}),
]


@pytest.mark.parametrize(("error", "text", "source", "options"), REFUSED)
def test_what_is_wrong_is_an_error_that_says_so(error, text, source, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").touch()
    with pytest.raises(error, match=text):
        ArrowDataset(source, **options)


# ---- files


LARGE = pa.table({"i": range(1000), "t": [f"text {i}" for i in range(1000)], "l": [[i] * (i % 3) for i in range(1000)]})


def write(path, how, table=LARGE):
    """Writes a file of 250 rows each batch."""
    if how == "stream":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=250)
    else:
        pyarrow.feather.write_feather(table, path, {"file": "uncompressed"}.get(how, "zstd"), chunksize=250)
    return str(path)


@pytest.mark.parametrize("how", ["file", "stream"])
def test_a_file_of_each_kind(how, tmp_path):
    """Also with views, as polars writes them, and without rows."""
    path = write(tmp_path / "x", how)
    dataset = ArrowDataset(path, columns=["t", "i"])
    views = {"t": pa.array(["a", None, "c" * 20]).cast(VIEW), "l": pa.array([["d"], [], ["e"]], pa.list_(VIEW))}
    viewed = ArrowDataset(write(tmp_path / "z", how, pa.table(views)), fill_null={"t": "-"})
    empty = write(tmp_path / "y", how, LARGE.slice(0, 0))
    assert (len(ArrowDataset(empty)), len(ArrowDataset([empty, empty]))) == (0, 0)
    for there in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert len(there) == 1000
        assert there.schema.names == ["t", "i"]
        batch = default_collate(there.__getitems__([999, 3]))
        assert (batch["t"], batch["i"].tolist()) == (["text 999", "text 3"], [999, 3])
    for there in (viewed, pickle.loads(pickle.dumps(viewed))):
        assert default_collate(there.__getitems__([2, 1])) == {"t": ["c" * 20, "-"], "l": [["e"], []]}
    assert len(pickle.loads(pickle.dumps(ArrowDataset([path, empty, path])))) == 2000
    assert len(pickle.dumps(dataset)) < 4000


def test_an_object_that_exports_arrow_data():
    class Frame:
        def __arrow_c_stream__(self, requested_schema=None):
            return TABLE.__arrow_c_stream__(requested_schema)

    for source in Frame(), TABLE.to_batches()[0]:
        assert told(ArrowDataset(source)[1]) == told(ArrowDataset(TABLE)[1])


def test_mapped_files_take_no_memory_of_arrows(tmp_path):
    path = write(tmp_path / "x", "file", pa.table({"x": np.zeros(1_000_000)}))
    before = pa.total_allocated_bytes()
    dataset = ArrowDataset(path)
    assert dataset[5]["x"] == 0
    assert pa.total_allocated_bytes() - before < 100_000


def test_several_files_and_folders_in_the_order_of_their_names(tmp_path):
    for number, how in enumerate(("stream", "file", "file")):
        write(tmp_path / f"{2 - number}.{'feather' if number == 1 else 'arrow'}", how, LARGE.slice(100 * number, 10))
    for name in ("_SUCCESS.arrow", ".hidden.arrow", "readme.txt"):
        (tmp_path / name).touch()
    assert [row["i"].item() for row in ArrowDataset(tmp_path)] == [*range(200, 210), *range(100, 110), *range(10)]
    chosen = ArrowDataset([tmp_path / "2.arrow", str(tmp_path / "0.arrow")])
    assert [chosen[i]["i"].item() for i in (0, 10)] == [0, 200]


def test_files_that_differ_are_an_error_that_names_column_and_file(tmp_path):
    schema = pa.schema([pa.field("y", pa.int64(), nullable=False)])
    one = write(tmp_path / "1.arrow", "file", pa.table({"x": [1], "y": [2]}))
    other = write(tmp_path / "2.arrow", "file", pa.table({"y": [2], "x": [1.5]}))
    lacking = write(tmp_path / "3.arrow", "file", pa.table({"y": [3]}, schema))  # and may have no nulls
    for file, found in (other, "has double"), (lacking, "has none"):
        with pytest.raises(ValueError, match=f"column 'x' is int64 in {one}, and {file} {found}"):
            ArrowDataset([one, file])
    alike = ArrowDataset([one, other, lacking], columns=["y"])
    assert default_collate(alike.__getitems__([2, 0]))["y"].tolist() == [3, 2]


@pytest.mark.parametrize("how", ["file", "compressed", "stream", b"", b"a,b\n1,2\n", b"PAR1" + bytes(100)])
def test_what_is_no_whole_file_is_named(how, tmp_path):
    path = tmp_path / "x.arrow"
    if isinstance(how, bytes):
        path.write_bytes(how)
    else:
        write(path, how)
        os.truncate(path, os.path.getsize(path) - 500)
    with pytest.raises(ValueError, match=f"^{path} must be a whole Arrow file, .*give the table that is read from "):
        ArrowDataset(tmp_path)


def test_a_compressed_file_is_an_error_that_says_how_it_is_read(tmp_path):
    path = write(tmp_path / "x", "compressed")
    with pytest.raises(ValueError, match=f"are mapped, and {path} is compressed; .*pyarrow.feather.read_table"):
        ArrowDataset(path)


def test_a_mapped_file_that_is_gone_or_another_is_an_error(tmp_path):
    path = write(tmp_path / "x", "file")
    sent = pickle.dumps(ArrowDataset(path))
    write(path, "file", LARGE.slice(0, 500))
    with pytest.raises(ReplicaError, match=r"a file of an ArrowDataset, has [0-9]+ bytes here, and had"):
        pickle.loads(sent)
    os.unlink(path)
    with pytest.raises(ReplicaError, match=r"x, a file of an ArrowDataset, has 0 bytes here, and had [0-9]+ when"):
        pickle.loads(sent)


def test_importing_rayloader_leaves_pyarrow_alone():
    program = """
import inspect
import sys
import rayloader
from rayloader import *
inspect.getmembers(rayloader)
assert "pyarrow" not in sys.modules
assert rayloader.ArrowDataset.__name__ == "ArrowDataset" and rayloader.ParquetStream.__name__ == "ParquetStream"
assert "pyarrow" in sys.modules
"""
    done = programs.run(program)
    assert (done.stderr, done.returncode) == ("", 0)


def test_what_needs_pyarrow_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for module in ("arrow", "columns", "parquet"):
        monkeypatch.delitem(sys.modules, f"rayloader.data.{module}", raising=False)
    for name in ("ArrowDataset", "ParquetStream"):
        monkeypatch.delitem(vars(rayloader), name, raising=False)  # it is kept once it was named
        with pytest.raises(ImportError, match=rf"rayloader.{name} needs pyarrow: pip install rayloader\[arrow\]"):
            getattr(rayloader, name)
