"""Columns of dictionaries that differ from part to part, and folders as Hive names them."""

import numpy as np
import pyarrow as pa
import torch
from pyarrow import parquet

from rayloader.data.columns import Row

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
        case "long list":
            return pa.LargeListArray.from_arrays(pairs, stored)
        case "fixed":
            return pa.FixedSizeListArray.from_arrays(stored, 2)
        case "struct":
            return pa.StructArray.from_arrays([stored, pa.array(range(100))], ["word", "number"])
        case "list of structs":
            return pa.ListArray.from_arrays(pairs, pa.StructArray.from_arrays([stored], ["word"]))
        case "map":
            return pa.MapArray.from_arrays(pairs, pa.array(range(100)), stored)


CATEGORIES = [
    *((kind, pa.int8()) for kind in ("ordered", "list", "long list", "fixed", "struct", "list of structs", "map")),
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


def source_of(how, columns, folder):
    """Columns as batches of a table, a mapped file, one that is converted, or row groups, or files of their own."""
    schema = pa.schema({"x": columns[0].type})
    tables = [pa.table([column], schema) for column in columns]
    match how:
        case "table":
            return pa.concat_tables(tables)
        case "mapped" | "compressed":
            options = pa.ipc.IpcWriteOptions(compression="zstd" if how == "compressed" else None)
            with pa.ipc.new_stream(str(folder / "x.arrow"), schema, options=options) as writer:
                for table in tables:
                    writer.write_table(table)
        case "row groups":
            with parquet.ParquetWriter(folder / "x.parquet", schema) as writer:
                for table in tables:
                    writer.write_table(table)
        case "files":
            for number, table in enumerate(tables):
                parquet.write_table(table, folder / f"{number}.parquet")
    return folder


def tree(folder, names, table=None):
    """Files with these names, each with a row of its own."""
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table({"i": [number], "t": [name]}) if table is None else table, folder / name)
    return folder


TREES = {
    "numbers": ["day=3/a.parquet", "day=10/a.parquet", "day=10/b.parquet"],
    "text": ["day=3/a.parquet", "day=x/a.parquet"],
    "dates": ["day=2020-01-02/a.parquet"],
    "too large": ["day=3000000000/a.parquet", "day=1/a.parquet"],
    "several": ["day=3/h=1/a.parquet", "day=3/h=b/a.parquet"],
    "null": ["day=3/a.parquet", "day=__HIVE_DEFAULT_PARTITION__/a.parquet"],
    "quoted": ["a%20day=a%20b%2Fc/a.parquet"],
    "lacking": ["day=3/a.parquet", "b.parquet", "x=a/c.parquet"],
    "other folders": ["day=3/sub/a.parquet", "day=4/sub/h=1/a.parquet"],
    "not data": ["day=3/a.parquet", "day=3/_b.parquet", "day=4/.tmp/a.parquet", "_day=5/a.parquet"],
}
