"""Columns of generated types, what becomes of their values, and dictionaries that differ from part to part."""

import numpy as np
import pyarrow as pa
import pyarrow.feather
import torch
from hypothesis import strategies as st
from pyarrow import parquet, types

from rayloader.data.columns import Row

# By type: a value for a number, and the type of the tensor that it becomes; None: none.
LEAVES = {
    pa.int8(): (int, torch.int8),
    pa.int64(): (lambda number: number << 40, torch.int64),
    pa.uint64(): (int, torch.uint64),
    pa.float16(): (lambda number: number / 2, torch.float16),
    pa.float32(): (lambda number: -number / 4, torch.float32),
    pa.bool_(): (lambda number: number % 2 == 1, torch.bool),
    pa.timestamp("ms", "UTC"): (lambda number: 10**12 + number, torch.int64),
    pa.date32(): (lambda number: 18_262 + number, torch.int32),
    pa.time32("ms"): (int, torch.int32),
    pa.duration("ns"): (int, torch.int64),
    pa.string(): (lambda number: f"ö{number}"[: number % 4], None),
    pa.string_view(): (lambda number: "a" * (number % 20), None),
    pa.binary(): (lambda number: b"\0q"[: number % 3], None),
    pa.binary_view(): (lambda number: bytes([number] * (number % 20)), None),
    pa.binary(3): (lambda number: bytes([number] * 3), None),
    pa.dictionary(pa.int8(), pa.string()): (str, None),
    pa.dictionary(pa.int8(), pa.int32()): (int, torch.int32),
}
TYPES = st.recursive(
    st.sampled_from([*LEAVES]),
    lambda within: st.one_of(
        within.map(pa.list_),
        within.map(pa.large_list),
        within.map(lambda kind: pa.list_(kind, 2)),
        within.map(lambda kind: pa.struct({"a": kind, "b": pa.string()})),
    ),
    max_leaves=3,
)


def is_list(kind):
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def value_of(kind, number):
    """A value of a type."""
    if types.is_struct(kind):
        return {field.name: value_of(field.type, number + place) for place, field in enumerate(kind)}
    if is_list(kind):
        size = kind.list_size if types.is_fixed_size_list(kind) else number % 3
        return [value_of(kind.value_type, number + place) for place in range(size)]
    return LEAVES[kind][0](number)


def tensors_of(kind):
    """The type and the shape of the tensors that values become; None if they become none."""
    if types.is_fixed_size_list(kind):
        dtype, shape = tensors_of(kind.value_type)
        return dtype, (kind.list_size, *shape)
    return LEAVES.get(kind, (None, None))[1], ()


def single(value, kind):
    """What a row has."""
    if types.is_struct(kind):
        return {field.name: single(value[field.name], field.type) for field in kind}
    return several(value, kind.value_type) if is_list(kind) else several([value], kind)[0]


def several(values, kind):
    """What a list of values becomes."""
    dtype, shape = tensors_of(kind)
    if dtype is not None:
        return torch.tensor(values, dtype=dtype).reshape(len(values), *shape)
    return [single(value, kind) for value in values] if types.is_struct(kind) or is_list(kind) else values


def collated(values, kind):
    """What a column of these values becomes in a batch."""
    if types.is_struct(kind):
        return {field.name: collated([value[field.name] for value in values], field.type) for field in kind}
    return several(values, kind)


INDICES = {pa.int8(): 100, pa.uint8(): 200, pa.int16(): 25_000, pa.uint16(): 50_000}


def categories(kind, part, index=None, count=100):
    """A hundred values of a dictionary of `count`, within lists or structs, which differ from part to part."""
    words = pa.array([f"word {part}-{number}" for number in range(count)])
    places = pa.array(range(0, count, count // 100), index or pa.int8())
    stored = pa.DictionaryArray.from_arrays(places, words, ordered=kind == "ordered")
    pairs = range(0, 101, 2)
    match kind:
        case "plain" | "ordered":
            return stored
        case "list":
            return pa.ListArray.from_arrays(pairs, stored)
        case "struct":
            return pa.StructArray.from_arrays([stored, pa.array(range(100))], ["word", "number"])
        case "map":
            return pa.MapArray.from_arrays(pairs, pa.array(range(100)), stored)


CATEGORIES = [
    *((kind, pa.int8()) for kind in ("ordered", "list", "struct", "map")),
    *(("plain", index) for index in INDICES),
]
PARTS = range(3)  # of a column, each of which has other values


def plain(value):
    """A row's value of whatever form, as Arrow gives it to Python."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Row | dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else getattr(value, "as_py", lambda: value)()


def source_of(how, tables, folder, size=None):
    """Tables in batches of `size` rows: in memory, in a mapped file, as row groups, or in files of their own."""
    schema = tables[0].schema
    batches = [batch for table in tables for batch in table.to_batches(size)]
    match how:
        case "table":
            return pa.Table.from_batches(batches, schema)
        case "file":
            pyarrow.feather.write_feather(pa.concat_tables(tables), folder / "x.arrow", "uncompressed", chunksize=size)
        case "stream":
            with pa.ipc.new_stream(str(folder / "x.arrow"), schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        case "row groups":
            with parquet.ParquetWriter(folder / "x.parquet", schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        case "files":
            for number, batch in enumerate(batches):
                parquet.write_table(pa.Table.from_batches([batch]), folder / f"{number}.parquet")
    return folder
