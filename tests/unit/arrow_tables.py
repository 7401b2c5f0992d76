"""Columns of dictionaries that differ from part to part."""

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
    """Columns as batches of a table, a mapped file, or row groups, or files of their own."""
    schema = pa.schema({"x": columns[0].type})
    tables = [pa.table([column], schema) for column in columns]
    match how:
        case "table":
            return pa.concat_tables(tables)
        case "mapped" | "row groups":
            kind, name = (pa.ipc.new_stream, "x.arrow") if how == "mapped" else (parquet.ParquetWriter, "x.parquet")
            with kind(str(folder / name), schema) as writer:
                for table in tables:
                    writer.write_table(table)
        case "files":
            for number, table in enumerate(tables):
                parquet.write_table(table, folder / f"{number}.parquet")
    return folder
