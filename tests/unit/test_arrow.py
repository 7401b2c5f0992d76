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
from torch.utils.data import ConcatDataset, default_collate
from torch.utils.data import DataLoader as TorchDataLoader

import programs
import rayloader
from arrow_tables import CATEGORIES, INDICES, PARTS, categories, plain, source_of
from rayloader import ArrowDataset, ReplicaError
from rayloader.data.columns import Row

ROWS = 4
NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)
FIXED = pa.list_(pa.list_(pa.int64(), 2), 3)

# Columns by name: what is stored, and what a batch has, as tensors.
KINDS = {
    "int32": (pa.array(range(4), pa.int32()), torch.arange(4, dtype=torch.int32)),
    "uint64": (pa.array(range(4), pa.uint64()), torch.tensor([0, 1, 2, 3], dtype=torch.uint64)),
    "half": (pa.array(np.arange(4, dtype="f2")), torch.arange(4, dtype=torch.float16)),
    "double": (pa.array([0.5] * 4), torch.full((4,), 0.5, dtype=torch.float64)),
    "bool": (pa.array([True, False, True, True]), torch.tensor([True, False, True, True])),
    "decimal": (pa.array([decimal.Decimal("1.50")] * 4), torch.full((4,), 1.5, dtype=torch.float64)),
    "timestamp": (pa.array([NOON] * 4, pa.timestamp("s", "UTC")), torch.full((4,), 1_577_880_000)),
    "date": (pa.array([NOON.date()] * 4), torch.full((4,), 18_262, dtype=torch.int32)),
    "date64": (pa.array([NOON.date()] * 4, pa.date64()), torch.full((4,), 18_262 * 86_400_000)),
    "time": (pa.array([1, 2, 3, 4], pa.time32("s")), torch.arange(1, 5, dtype=torch.int32)),
    "duration": (pa.array([5] * 4, pa.duration("ns")), torch.full((4,), 5)),
    "text": (pa.array(["a", "", "ö", "d"]), ["a", "", "ö", "d"]),
    "text view": (pa.array(["a", "", "ö", "d"], pa.string_view()), ["a", "", "ö", "d"]),
    "binary": (pa.array([b"q", b"", b"\0", b"z"]), [b"q", b"", b"\0", b"z"]),
    "three bytes": (pa.array([b"abc"] * 4, pa.binary(3)), [b"abc"] * 4),
    "dictionary": (pa.array(["x", "y", "x", "y"]).dictionary_encode(), ["x", "y", "x", "y"]),
    "numbers in a dictionary": (pa.array([7, 9, 7, 9]).dictionary_encode(), torch.tensor([7, 9, 7, 9])),
    "fixed": (pa.array([[1.0, 2.0]] * 4, pa.list_(pa.float32(), 2)), torch.tensor([[1.0, 2.0]] * 4)),
    "matrix": (pa.array([[[1, 2], [3, 4], [5, 6]]] * 4, FIXED), torch.tensor([[[1, 2], [3, 4], [5, 6]]] * 4)),
    "pairs of text": (pa.array([["a", "b"]] * 4, pa.list_(pa.string(), 2)), [["a", "b"]] * 4),
    "list": (pa.array([[1], [2, 3], [], [4]]), [torch.tensor(x, dtype=torch.int64) for x in ([1], [2, 3], [], [4])]),
    "long list": (
        pa.array([[1], [2, 3], [], [4]], pa.large_list(pa.int64())),
        [torch.tensor(x, dtype=torch.int64) for x in ([1], [2, 3], [], [4])],
    ),
    "equal lists": (pa.array([[1, 2]] * 4), [torch.tensor([1, 2])] * 4),
    "lists of lists": (
        pa.array([[[1], [2]], [], [[3, 4]], [[5]]]),
        [[torch.tensor([1]), torch.tensor([2])], [], [torch.tensor([3, 4])], [torch.tensor([5])]],
    ),
    "lists of text": (pa.array([["a"], [], ["b", "c"], []]), [["a"], [], ["b", "c"], []]),
    "struct": (
        pa.array([{"a": k, "b": {"c": str(k)}, "d": [k] * k} for k in range(4)]),
        {
            "a": torch.arange(4),
            "b": {"c": ["0", "1", "2", "3"]},
            "d": [torch.full((k,), k) for k in range(4)],
        },
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


def same(one, other):
    """Whether values are equal to the bit, and their types too; rows count as dicts."""
    if isinstance(one, Row):
        one = dict(one)
    if isinstance(other, Row):
        other = dict(other)
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)
        case np.ndarray():
            return (one.dtype, one.shape) == (other.dtype, other.shape) and bool((one == other).all())
        case dict():
            return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(same, one, other))
    return one == other


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
    assert same(batch, {"x": expected})
    assert same(default_collate(touched(dataset.__getitems__(range(ROWS)))), batch)
    assert same(default_collate([dataset[index] for index in range(ROWS)]), batch)
    assert same(
        default_collate([*dataset.__getitems__([3, 1]), dataset[0]]), default_collate(dataset.__getitems__([3, 1, 0]))
    )


@pytest.mark.parametrize("kind", KINDS)
def test_arrows_own_arrays_are_collated_as_they_are(kind):
    table = pa.table({"x": KINDS[kind][0]})
    dataset = ArrowDataset(table, as_="arrow")
    batch = default_collate(dataset.__getitems__([2, 0]))
    expected = [table["x"][index].as_py() for index in (2, 0)]
    for collated in (batch, default_collate(touched(dataset.__getitems__([2, 0])))):
        assert collated["x"].to_pylist() == expected
        assert collated["x"].type == dataset.schema.field("x").type
    assert dataset[2]["x"].as_py() == table["x"][2].as_py()


def test_a_tensor_whose_dimensions_are_permuted():
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    stored = pa.ExtensionArray.from_storage(kind, pa.array([range(6)] * 2, pa.list_(pa.int64(), 6)))
    assert ArrowDataset(pa.table({"x": stored}))[1]["x"].tolist() == [[0, 3], [1, 4], [2, 5]]


VALUES = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.integers(-128, 127),
            "f": st.floats(width=32, allow_nan=False),
            "t": st.text(max_size=3),
            "l": st.lists(st.integers(0, 9), max_size=3),
        }
    ),
    min_size=1,
    max_size=9,
)
SCHEMA = pa.schema({"i": pa.int8(), "f": pa.float32(), "t": pa.string(), "l": pa.list_(pa.int16())})


@given(VALUES, st.integers(1, 4), st.lists(st.integers(0, 8), min_size=1, max_size=12))
def test_any_rows_of_any_chunks_are_those_of_the_table(rows, size, drawn):
    table = pa.Table.from_pylist(rows, SCHEMA)
    dataset = ArrowDataset(in_chunks(table, size))
    indices = [index % len(rows) for index in drawn]
    batch = default_collate(dataset.__getitems__(indices))
    expected = [rows[index] for index in indices]
    assert same(
        batch,
        {
            "i": torch.tensor([row["i"] for row in expected], dtype=torch.int8),
            "f": torch.tensor([row["f"] for row in expected], dtype=torch.float32),
            "t": [row["t"] for row in expected],
            "l": [torch.tensor(row["l"], dtype=torch.int16) for row in expected],
        },
    )
    assert same(default_collate(touched(dataset.__getitems__(indices))), batch)


# ---- rows


def test_a_row_is_a_mapping_and_what_is_changed_in_it_stays_changed():
    dataset = ArrowDataset(pa.table({"x": [1, 2], "s": [{"a": 1}, {"a": 2}]}))
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
    assert same(default_collate(rows), {"x": torch.tensor([7, 12]), "s": {"a": torch.tensor([1, 9])}})
    for row in rows:
        row["new"] = row.pop("x")
    assert list(default_collate(rows)) == ["s", "new"]


def test_a_row_travels_and_is_collated_as_before():
    dataset = ArrowDataset(pa.table({"x": [[1], [2]], "s": ["a", "b"]}))
    rows = dataset.__getitems__([0, 1])
    for copies in (
        pickle.loads(pickle.dumps(rows)),
        copy.copy(rows),
        copy.deepcopy(rows),
        [copy.copy(r) for r in rows],
    ):
        assert same(default_collate(copies), default_collate(rows))
    assert same(default_collate([{**row} for row in dataset.__getitems__([0])])["s"], ["a"])


def test_who_changes_a_batch_does_not_change_the_rows():
    table = pa.table({"x": [1, 2], "t": ["a", "b"], "s": [{"a": 1}, {"a": 2}]})
    rows = ArrowDataset(table).__getitems__([0, 1])
    batch = default_collate(rows)
    batch["x"] += 10
    batch["s"]["a"] += 10
    batch["t"][0] = "changed"
    assert same(default_collate(rows), {"x": torch.tensor([1, 2]), "t": ["a", "b"], "s": {"a": torch.tensor([1, 2])}})


def test_a_row_is_made_of_a_dict_as_libraries_do_that_map_over_samples():
    row = ArrowDataset(pa.table({"x": [1], "t": ["a"]}))[0]
    doubled = type(row)({name: value * 2 for name, value in row.items()})
    assert doubled == {"x": torch.tensor(2), "t": "aa"}
    assert same(default_collate([doubled]), {"x": torch.tensor([2]), "t": ["aa"]})


def test_rows_of_different_datasets_are_stacked():
    one, other = (ArrowDataset(pa.table({"x": pa.array([k], kind)})) for k, kind in enumerate((pa.int64(), pa.int64())))
    (batch,) = TorchDataLoader(ConcatDataset([one, other]), 2)
    assert same(batch, {"x": torch.tensor([0, 1])})


def test_tensors_have_memory_of_their_own_that_can_be_written_to():
    table = pa.table({"x": np.zeros(8), "l": [[1, 2]] * 8})
    for dataset in (ArrowDataset(table), ArrowDataset(in_chunks(table, 4)), ArrowDataset(in_chunks(table, 1))):
        for indices in ([3], [0, 1], range(8)):
            batch = default_collate(dataset.__getitems__(indices))
            batch["x"] += 1
            batch["l"][0] += 1
            assert dataset[indices[0]]["x"] == 0
            assert dataset[indices[0]]["l"].tolist() == [1, 2]
    assert table["l"][0].as_py() == [1, 2]


class Labelled(ArrowDataset):
    label = ""


def test_what_a_subclass_adds_travels_too():
    dataset = Labelled(pa.table({"x": [1]}))
    dataset.label = "a"
    assert pickle.loads(pickle.dumps(dataset)).label == "a"


def test_dictionaries_that_differ_from_batch_to_batch():
    one, other = (pa.record_batch({"x": pa.array(words).dictionary_encode()}) for words in (["a", "b"], ["c", "b"]))
    dataset = ArrowDataset(pa.Table.from_batches([one, other]))
    assert [row["x"] for row in dataset.__getitems__([3, 0, 2, 1])] == ["b", "a", "c", "b"]


@pytest.mark.parametrize("how", ["table", "mapped"])
@pytest.mark.parametrize(("kind", "index"), CATEGORIES, ids=str)
def test_dictionaries_that_need_wider_indices_together(kind, index, how, tmp_path):
    """Rows have their values, which several dictionaries have together."""
    columns = [categories(kind, part, index, INDICES[index]) for part in PARTS]
    source = source_of(how, columns, tmp_path)
    stored = [value for column in columns for value in column.to_pylist()]
    places = [len(stored) - 1, 0, *range(5, len(stored), len(stored) // 60), 1]
    for as_ in ("arrow",) if kind == "map" else ("tensors", "arrow"):
        dataset = ArrowDataset(source, as_=as_)
        for there in (dataset, pickle.loads(pickle.dumps(dataset))):
            rows = there.__getitems__(places)
            assert [plain(row["x"]) for row in rows] == [stored[place] for place in places]
            assert plain(there[-2]["x"]) == stored[-2]
        if as_ == "arrow":
            several = dataset.__getitems__(places[:9]) + dataset.__getitems__(places[9:])
            for collated in (default_collate(rows), default_collate(touched(dataset.__getitems__(places)))):
                assert collated["x"].to_pylist() == [stored[place] for place in places]
                assert collated["x"].type == dataset.schema.field("x").type == dataset[0]["x"].type
            assert default_collate(several)["x"].to_pylist() == [stored[place] for place in places]


def test_files_whose_dictionaries_have_other_index_types(tmp_path):
    """As pandas writes them, by the number of categories in each file."""
    for index, count in INDICES.items():
        write(tmp_path / f"{count:06}.arrow", "file", pa.table({"x": categories("plain", count, index, count)}))
    dataset = ArrowDataset(tmp_path)
    assert [dataset[place]["x"] for place in (0, 199, -1)] == ["word 100-0", "word 200-198", "word 50000-49500"]


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
    ("column", "path", "value"),
    [
        (pa.array([1, 2, None]), "x", 0),
        (pa.array([1.0, 2.0, None]), "x", -1.0),
        (pa.array(["a", "b", None]), "x", ""),
        (pa.array([[1], [2], None]), "x", []),
        (pa.array([[1], [2], [3, None]]), "x[]", None),
        (pa.array([{"a": 1}, {"a": 2}, None]), "x", {"a": 0}),
        (pa.array([{"a": 1}, {"a": 2}, {"a": None}]), "x.a", None),
        (pa.array([{"a": [1]}, {"a": [2]}, {"a": [None]}]), "x.a[]", None),
        (pa.array(["a", "b", None]).dictionary_encode(), "x", "?"),
        (pa.array([b"a", b"b", None]), "x", b""),
    ],
)
def test_a_null_is_an_error_that_names_column_row_and_remedy(column, path, value):
    table = pa.table({"x": column})
    dataset = ArrowDataset(table)
    assert len(dataset.__getitems__([0, 1])) == 2
    with pytest.raises(
        ValueError, match=r"is null in row 2, and no tensor has a null; pass fill_null=\{'x': "
    ) as found:
        dataset.__getitems__([1, 2, 0])
    assert str(found.value).startswith(f"column {path!r} is null")
    if value is not None:
        filled = ArrowDataset(table, fill_null={"x": value})
        assert plain(filled[2]["x"]) == value
        assert len(default_collate(filled.__getitems__([1, 2, 0]))["x"]) in (1, 3)
    assert ArrowDataset(table, as_="arrow")[2]["x"].as_py() == table["x"][2].as_py()


TABLE = pa.table({"x": [1], "s": ["a"]})
REFUSED = [
    (
        TypeError,
        "an ArrowDataset, if not of a table, takes a path, or a list of some, .* got 3",
        lambda: ArrowDataset(3),
    ),
    (TypeError, r"takes a path, or a list of some, of type str or pathlib.Path, got \[3\]", lambda: ArrowDataset([3])),
    (TypeError, r"takes a path, or a list of some, of type str or pathlib.Path, got \[\]", lambda: ArrowDataset([])),
    (FileNotFoundError, "nowhere", lambda: ArrowDataset("nowhere.parquet")),
    (ValueError, 'as_ must be "tensors" or "arrow", got 3', lambda: ArrowDataset(TABLE, as_=3)),
    (TypeError, "columns must be a list of at least one name", lambda: ArrowDataset(TABLE, columns="x")),
    (TypeError, "columns must be a list of at least one name", lambda: ArrowDataset(TABLE, columns=[1])),
    (TypeError, "columns must be a list of at least one name", lambda: ArrowDataset(TABLE, columns=[])),
    (KeyError, "Column y does not exist in schema", lambda: ArrowDataset(TABLE, columns=["y"])),
    (ValueError, r"\['x'\] come more than once", lambda: ArrowDataset(TABLE, columns=["x", "x"])),
    (TypeError, "'int' object is not iterable", lambda: ArrowDataset(TABLE, fill_null=0)),
    (KeyError, "Column y does not exist in schema", lambda: ArrowDataset(TABLE, fill_null={"y": 0})),
    (ValueError, "Could not convert 'a' with type str", lambda: ArrowDataset(TABLE, fill_null={"x": "a"})),
    (
        KeyError,
        r"Column l\[\] does not exist in schema",
        lambda: ArrowDataset(pa.table({"l": [[None, 1]]}), fill_null={"l[]": 0}, as_="arrow"),
    ),
    (
        ValueError,
        r"a row has each column once, and \['s\.a'\] come more than once; rename",
        lambda: ArrowDataset(pa.table({"s": pa.StructArray.from_arrays([pa.array([1])] * 2, ["a", "a"])})),
    ),
    (
        ValueError,
        r"a row has each column once, and \['s\.a'\] come more than once; rename",
        lambda: ArrowDataset(pa.table({"s.a": [[1]], "s": [{"a": 1}]})),
    ),
    (
        TypeError,
        r"column 's\.a' is of type map",
        lambda: ArrowDataset(pa.table({"s.a": pa.array([[]], pa.map_(pa.string(), pa.int8())), "s": [{"a": 1}]})),
    ),
    (
        TypeError,
        "column 'm' is of type map<.*>, which no tensor has",
        lambda: ArrowDataset(pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})),
    ),
    (
        TypeError,
        r"column 'm.n\[\]' is of type null",
        lambda: ArrowDataset(pa.table({"m": [{"n": [None]}]})),
    ),
]


@pytest.mark.parametrize(("error", "text", "make"), REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_is_wrong_is_an_error_that_says_so(error, text, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        make()


def test_arrow_itself_has_a_form_for_each_type():
    table = pa.table({"m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))})
    assert ArrowDataset(table, as_="arrow")[0]["m"].as_py() == [("a", 1)]


# ---- files


LARGE = pa.table({"i": range(1000), "t": [f"text {i}" for i in range(1000)], "l": [[i] * (i % 3) for i in range(1000)]})


def write(path, how, table=LARGE):
    """Writes a file of 250 rows each batch."""
    match how:
        case "file" | "compressed":
            pyarrow.feather.write_feather(table, path, {"file": "uncompressed"}.get(how, "zstd"), chunksize=250)
        case "stream":
            with pa.ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=250)
    return str(path)


@pytest.mark.parametrize("how", ["file", "stream"])
def test_a_file_of_each_kind(how, tmp_path):
    dataset = ArrowDataset(write(tmp_path / "x", how), columns=["t", "i"])
    for there in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert len(there) == 1000
        assert there.schema.names == ["t", "i"]
        assert default_collate(there.__getitems__([999, 3])) == {
            "t": ["text 999", "text 3"],
            "i": pytest.approx([999, 3]),
        }
    assert len(pickle.dumps(dataset)) < 4000


def test_a_compressed_file_is_an_error_that_says_how_it_is_read(tmp_path):
    path = write(tmp_path / "x", "compressed")
    with pytest.raises(ValueError, match=f"are mapped, and {path} is compressed; .*pyarrow.feather.read_table"):
        ArrowDataset(path)
    assert len(ArrowDataset(pyarrow.feather.read_table(path))) == 1000


@pytest.mark.parametrize("how", ["file", "stream"])
def test_files_without_rows(how, tmp_path):
    path = write(tmp_path / "x", how, LARGE.slice(0, 0))
    dataset = ArrowDataset(path)
    assert len(dataset) == 0
    assert len(ArrowDataset([path, path])) == 0
    full = write(tmp_path / "y", how)
    assert len(pickle.loads(pickle.dumps(ArrowDataset([full, path, full])))) == 2000


def test_mapped_files_take_no_memory_of_arrows(tmp_path):
    path = write(tmp_path / "x", "file", pa.table({"x": np.zeros(1_000_000)}))
    before = pa.total_allocated_bytes()
    dataset = ArrowDataset(path)
    assert dataset[5]["x"] == 0
    assert pa.total_allocated_bytes() - before < 100_000


def test_several_files_and_folders_in_the_order_of_their_names(tmp_path):
    for number, how in enumerate(("stream", "file", "file")):
        write(tmp_path / f"{2 - number}.{'feather' if number == 1 else 'arrow'}", how, LARGE.slice(100 * number, 10))
    (tmp_path / "_SUCCESS.arrow").touch()
    (tmp_path / "readme.txt").touch()
    assert [row["i"].item() for row in ArrowDataset(tmp_path)] == [*range(200, 210), *range(100, 110), *range(10)]
    chosen = ArrowDataset([tmp_path / "2.arrow", str(tmp_path / "0.arrow")])
    assert [chosen[i]["i"].item() for i in (0, 10)] == [0, 200]


def test_an_object_that_exports_arrow_data():
    class Frame:
        def __arrow_c_stream__(self, requested_schema=None):
            return TABLE.__arrow_c_stream__(requested_schema)

    assert dict(ArrowDataset(Frame())[0]) == {"x": torch.tensor(1), "s": "a"}
    assert dict(ArrowDataset(TABLE.to_batches()[0])[0]) == {"x": torch.tensor(1), "s": "a"}


def test_views_as_polars_exports_them():
    view = pa.string_view()
    table = pa.table(
        {
            "list": pa.array([["a"], ["b", "c"]], pa.list_(view)),
            "long list": pa.array([["a"], ["b", "c"]], pa.large_list(view)),
            "pair": pa.array([["a", "b"]] * 2, pa.list_(view, 2)),
            "struct": pa.array([{"b": b"x"}] * 2, pa.struct({"b": pa.binary_view()})),
            "category": pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.uint32()), pa.array(["u", "v"], view)),
        }
    )
    assert default_collate(ArrowDataset(table).__getitems__([0, 1])) == {
        "list": [["a"], ["b", "c"]],
        "long list": [["a"], ["b", "c"]],
        "pair": [["a", "b"]] * 2,
        "struct": {"b": [b"x"] * 2},
        "category": ["v", "u"],
    }


@pytest.mark.parametrize("how", ["file", "stream"])
def test_files_with_views_as_polars_writes_them(how, tmp_path):
    view = pa.string_view()
    stored = {"t": pa.array(["a", None, "c" * 20]).cast(view), "l": pa.array([["d"], [], ["e"]], pa.list_(view))}
    dataset = ArrowDataset(write(tmp_path / "x", how, pa.table(stored)), fill_null={"t": "-"})
    for there in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert default_collate(there.__getitems__([2, 1])) == {"t": ["c" * 20, "-"], "l": [["e"], []]}


def test_a_folder_without_files_is_an_error(tmp_path):
    (tmp_path / "x.csv").touch()
    with pytest.raises(FileNotFoundError, match=r"has no file that ends in \.arrow or "):
        ArrowDataset(tmp_path)


def test_files_that_differ_are_an_error_that_names_column_and_file(tmp_path):
    one = write(tmp_path / "1.arrow", "file", pa.table({"x": [1], "y": [2]}))
    other = write(tmp_path / "2.arrow", "file", pa.table({"y": [2], "x": [1.5]}))
    lacking = write(tmp_path / "3.arrow", "file", pa.table({"y": [2]}))
    with pytest.raises(ValueError, match=f"column 'x' is int64 in {one}, and {other} has double"):
        ArrowDataset([one, other])
    with pytest.raises(ValueError, match=f"column 'x' is int64 in {one}, and {lacking} has none"):
        ArrowDataset([one, lacking])
    assert len(ArrowDataset([one, other, lacking], columns=["y"])) == 3


def test_files_that_differ_in_whether_nulls_are_allowed(tmp_path):
    for number, nullable in enumerate((True, False)):
        schema = pa.schema([pa.field("x", pa.int64(), nullable)])
        write(tmp_path / f"{number}.arrow", "file", pa.table({"x": [number]}, schema))
    assert default_collate(ArrowDataset(tmp_path).__getitems__([1, 0]))["x"].tolist() == [1, 0]


@pytest.mark.parametrize("how", ["file", "compressed", "stream"])
def test_a_truncated_file_is_named(how, tmp_path):
    path = write(tmp_path / "x", how)
    os.truncate(path, os.path.getsize(path) - 500)
    with pytest.raises(ValueError, match=f"^{path} must be a whole Arrow file, and cannot be read: "):
        ArrowDataset(path)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"PAR1" + bytes(100)])
def test_what_is_no_such_file_is_named(content, tmp_path):
    (tmp_path / "x.arrow").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"x.arrow must be a whole Arrow file, .*; give the table that is read from another file"
    ):
        ArrowDataset(tmp_path)


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
