"""Columns as rows and batches, of `ArrowDataset` and `ParquetStream`; files; loaders are in test_columns.py."""

import copy
import datetime
import decimal
import os
import pickle
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pyarrow import feather
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

import rayloader
from arrow_tables import CATEGORIES, INDICES, PARTS, TYPES, categories, collated, plain, source_of, value_of
from rayloader import ArrowDataset, ParquetStream, ReplicaError
from rayloader.data import parquet as streams
from told import told

DATE = datetime.date(2020, 1, 1)
VIEW = pa.string_view()
TABLE = pa.table({"x": [1, 2], "t": ["a", "b"], "s": [{"a": 1}, {"a": 2}]})
SOURCES = ["table", "file", "stream", "row groups"]


def touched(rows):
    """The rows, with values of their own that are the same."""
    for row in rows:
        row.update(row)
    return rows


def reader_of(how, source, **options):
    """Takes rows by their indices; and the schema."""
    if how in ("row groups", "files"):
        stream = ParquetStream(source, **options)
        return lambda indices: [rows[index] for rows in [list(stream)] for index in indices]
    return ArrowDataset(source, **options).__getitems__


# ---- what becomes of each type


@settings(max_examples=150)
@given(
    kinds=st.lists(TYPES, min_size=1, max_size=2),
    numbers=st.lists(st.integers(0, 90), min_size=1, max_size=9),
    size=st.integers(1, 9),
    drawn=st.lists(st.integers(-9, 8), min_size=1, max_size=9),
    how=st.sampled_from(SOURCES),
)
@example(kinds=[pa.list_(pa.list_(pa.int8(), 2), 2)], numbers=[1, 20, 33], size=2, drawn=[2, 0], how="table")
def test_rows_and_batches_of_any_types_and_chunks_have_what_was_stored(
    kinds, numbers, size, drawn, how, tmp_path_factory
):
    if how == "row groups":  # pyarrow writes no views within lists
        assume(not any(kind.num_fields and "view" in str(kind) for kind in kinds))
    stored = {f"c{n}": [value_of(kind, number + n) for number in numbers] for n, kind in enumerate(kinds)}
    table = pa.table({name: pa.array(stored[name], kind) for name, kind in zip(stored, kinds, strict=True)})
    source = source_of(how, [table], tmp_path_factory.mktemp("tables"), size)
    indices = [max(-len(numbers), min(index, len(numbers) - 1)) for index in drawn]
    expected = told(
        {
            name: collated([values[index] for index in indices], kind)
            for (name, values), kind in zip(stored.items(), kinds, strict=True)
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_CHUNK_BYTES", 80)
        read, read_arrow = reader_of(how, source), reader_of(how, source, as_="arrow")
        rows = read(indices)
        batch = default_collate(rows)
        assert told(batch) == expected
        for leaf in tree_leaves(batch):  # batches have memory of their own, which can be written to
            if isinstance(leaf, torch.Tensor):
                leaf.zero_()
        assert told(default_collate(rows)) == told(default_collate(read(indices))) == expected
        others = touched(read(indices)), copy.deepcopy(rows), [copy.copy(row) for row in rows]
        for some in (*others, [row for index in indices for row in read([index])], read(indices[:3]) + rows[3:]):
            assert told(default_collate(some)) == expected
        as_python = {name: [table[name][index].as_py() for index in indices] for name in stored}
        for some in read_arrow(indices), touched(read_arrow(indices)):
            assert {name: column.to_pylist() for name, column in default_collate(some).items()} == as_python


# Columns that are not generated: what is stored, and what a batch has.
TENSOR = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
KINDS = {
    "decimal": (pa.array([decimal.Decimal("1.50")] * 2), torch.full((2,), 1.5, dtype=torch.float64)),
    "date64": (pa.array([DATE] * 2, pa.date64()), torch.full((2,), 18_262 * 86_400_000)),
    "views in a dictionary": (pa.DictionaryArray.from_arrays([1, 0], pa.array(["u", "v"], VIEW)), ["v", "u"]),
    "tensor": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12.0).reshape(2, 3, 2)),
        torch.arange(12, dtype=torch.float64).reshape(2, 3, 2),
    ),
    "permuted": (
        pa.ExtensionArray.from_storage(TENSOR, pa.array([range(6)] * 2, pa.list_(pa.int64(), 6))),
        torch.arange(6).reshape(2, 3).T.expand(2, 3, 2),
    ),
    "map": (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_other_types(kind):
    stored, expected = KINDS[kind]
    arrow = ArrowDataset(pa.table({"x": stored}), as_="arrow")
    for rows in arrow.__getitems__([0, 1]), touched(arrow.__getitems__([0, 1])):
        column = default_collate(rows)["x"]
        assert (column.to_pylist(), column.type) == (stored.to_pylist(), arrow.schema.field("x").type)
    if kind != "map":
        dataset = ArrowDataset(pa.table({"x": stored}))
        for rows in dataset.__getitems__([0, 1]), touched(dataset.__getitems__([0, 1])), [dataset[0], dataset[1]]:
            batch = default_collate(rows)["x"]
            assert batch == expected if isinstance(expected, list) else batch.equal(expected)
            assert isinstance(expected, list) or batch.dtype == expected.dtype


@pytest.mark.parametrize("how", ["table", "stream", "row groups", "files"])
@pytest.mark.parametrize(("kind", "index"), CATEGORIES, ids=str)
def test_dictionaries_that_need_wider_indices_together(kind, index, how, tmp_path):
    """Rows have their values, which several dictionaries have together."""
    columns = [categories(kind, part, index, INDICES[index]) for part in PARTS]
    source = source_of(how, [pa.table({"x": column}) for column in columns], tmp_path)
    stored = [value for column in columns for value in column.to_pylist()]
    places = [len(stored) - 1, 0, *range(5, len(stored), len(stored) // 60), 1]
    expected = [stored[place] for place in places]
    for as_ in ("arrow",) if kind == "map" else ("tensors", "arrow"):
        rows = reader_of(how, source, as_=as_)(places)
        batch = default_collate(rows)["x"]
        assert [plain(row["x"]) for row in rows] == expected
        assert as_ == "tensors" or batch.to_pylist() == default_collate(touched(rows))["x"].to_pylist() == expected


# ---- rows


def test_a_row_is_a_mapping_and_what_is_changed_in_it_stays_changed():
    dataset = ArrowDataset(TABLE, columns=["x", "s"])
    rows = dataset.__getitems__([0, 1])
    assert isinstance(rows, list)
    row = rows[0]
    assert (list(row), len(row), "x" in row, row.get("y")) == (["x", "s"], 2, True, None)
    assert row == {"x": torch.tensor(1), "s": {"a": torch.tensor(1)}}
    assert told(default_collate(pickle.loads(pickle.dumps(rows)))) == told(default_collate(rows))
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


def test_indices_also_of_an_object_that_exports_arrow_data():
    class Frame:
        __arrow_c_stream__ = pa.table({"x": range(5)}).__arrow_c_stream__

    dataset = ArrowDataset(Frame())
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


MAP = KINDS["map"][0]
TWICE = r"a row has each column once, and \['s\.a'\] come more than once; rename"
PATHS = r"an ArrowDataset, if not of a table, takes a path, or a list of some, of type str or pathlib.Path, got "
NAMES = "columns must be a list of at least one name"
REFUSED = [
    *((TypeError, f"{PATHS}{shown}", source, {}) for shown, source in (("3", 3), (r"\[3\]", [3]), (r"\[\]", []))),
    (FileNotFoundError, "nowhere", "nowhere.parquet", {}),
    (FileNotFoundError, r"has no file that ends in \.arrow or ", ".", {}),
    (ValueError, 'as_ must be "tensors" or "arrow", got 3', TABLE, {"as_": 3}),
    *((TypeError, NAMES, TABLE, {"columns": columns}) for columns in ("x", [1], [])),
    (KeyError, "Column y does not exist in schema", TABLE, {"columns": ["y"]}),
    (ValueError, r"\['x'\] come more than once", TABLE, {"columns": ["x", "x"]}),
    (TypeError, "'int' object is not iterable", TABLE, {"fill_null": 0}),
    (KeyError, "Column y does not exist in schema", TABLE, {"fill_null": {"y": 0}}),
    (ValueError, "Could not convert 'a' with type str", TABLE, {"fill_null": {"x": "a"}}),
    (KeyError, r"Column l\[\] does", pa.table({"l": [[None, 1]]}), {"fill_null": {"l[]": 0}, "as_": "arrow"}),
    (ValueError, TWICE, pa.table({"s": pa.StructArray.from_arrays([pa.array([1])] * 2, ["a", "a"])}), {}),
    (ValueError, TWICE, pa.table({"s.a": [[1]], "s": [{"a": 1}]}), {}),
    (TypeError, r"column 's\.a' is of type map", pa.table({"s.a": MAP, "s": [{"a": 1}] * 2}), {}),
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

LARGE = pa.table({"i": range(1000), "t": [f"text {i}" for i in range(1000)]})


def write(path, how="file", table=LARGE):
    """Writes a file."""
    if how == "stream":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        feather.write_feather(table, path, {"file": "uncompressed"}.get(how, "zstd"), chunksize=250)
    return str(path)


def test_mapped_files_are_opened_again_where_the_dataset_arrives_and_take_no_memory_of_arrows(tmp_path):
    """Also without rows, and with views of text, as polars writes them."""
    path, empty = write(tmp_path / "x"), write(tmp_path / "y", table=LARGE.slice(0, 0))
    views = pa.table({"t": pa.array(["a", None]).cast(VIEW), "l": pa.array([["d"], []], pa.list_(VIEW))})
    assert (len(ArrowDataset(empty)), len(ArrowDataset([empty, empty]))) == (0, 0)
    before = pa.total_allocated_bytes()
    dataset = ArrowDataset(path, columns=["t", "i"])
    assert pa.total_allocated_bytes() - before < 10_000
    dataset.label = "a"
    sent = pickle.dumps(dataset)
    assert len(sent) < 4000
    copied = pickle.loads(sent)
    assert (copied.label, len(copied), plain(copied[999])) == ("a", 1000, {"t": "text 999", "i": 999})
    viewed = pickle.loads(pickle.dumps(ArrowDataset(write(tmp_path / "z", table=views), fill_null={"t": "-"})))
    assert default_collate(viewed.__getitems__([1, 0])) == {"t": ["-", "a"], "l": [[], ["d"]]}
    write(path, table=LARGE.slice(0, 500))
    with pytest.raises(ReplicaError, match=r"x, a file of an ArrowDataset, has [0-9]+ bytes here, and had [0-9]+ when"):
        pickle.loads(sent)


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
    one = write(tmp_path / "1.arrow", table=pa.table({"x": [1], "y": [2]}))
    other = write(tmp_path / "2.arrow", table=pa.table({"y": [2], "x": [1.5]}))
    lacking = write(tmp_path / "3.arrow", table=pa.table({"y": [3]}, schema))  # and may have no nulls
    for file, found in (other, "has double"), (lacking, "has none"):
        with pytest.raises(ValueError, match=f"column 'x' is int64 in {one}, and {file} {found}"):
            ArrowDataset([one, file])
    alike = ArrowDataset([one, other, lacking], columns=["y"])
    assert default_collate(alike.__getitems__([2, 0]))["y"].tolist() == [3, 2]


@pytest.mark.parametrize("how", ["file", "compressed", "stream", b"", b"a,b\n1,2\n", b"PAR1" + bytes(100)])
def test_what_is_no_whole_file_or_compressed_is_named(how, tmp_path):
    path = tmp_path / "x.arrow"
    if isinstance(how, bytes):
        path.write_bytes(how)
    else:
        write(path, how)
        if how == "compressed":
            with pytest.raises(ValueError, match=f"are mapped, and {path} is compressed; .*pyarrow.feather.read_table"):
                ArrowDataset(path)
        os.truncate(path, os.path.getsize(path) - 500)
    with pytest.raises(ValueError, match=f"^{path} must be a whole Arrow file, .*give the table that is read from "):
        ArrowDataset(tmp_path)


def test_what_needs_pyarrow_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for module in ("arrow", "columns", "parquet"):
        monkeypatch.delitem(sys.modules, f"rayloader.data.{module}", raising=False)
    for name in ("ArrowDataset", "ParquetStream"):
        monkeypatch.delitem(vars(rayloader), name, raising=False)  # it is kept once it was named
        with pytest.raises(ImportError, match=rf"rayloader.{name} needs pyarrow: pip install rayloader\[arrow\]"):
            getattr(rayloader, name)
