"""Datasets over files and databases: each worker opens what it reads, as these libraries ask of forked processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from client_jobs import BATCH_SIZE, EXTENT, Job


class Opened(Dataset[Any]):
    """Samples by number of what a function opens; a process opens it when it first needs it, and copies do so again."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = str(path), count

    def __len__(self) -> int:
        return self.count

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "opened"}

    @functools.cached_property
    def opened(self) -> Any:
        """What holds the samples."""
        raise NotImplementedError


class Environment(Opened):
    """An LMDB environment, with a record for each sample."""

    @functools.cached_property
    def opened(self) -> Any:
        import lmdb

        return lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)

    def __getitem__(self, index: int) -> Any:
        with self.opened.begin() as transaction:
            return torch.frombuffer(bytearray(transaction.get(f"{index:08}".encode())), dtype=torch.uint8), index


def lmdb(job: Job) -> Any:
    """Records by key."""
    import lmdb

    def write(path: Path) -> None:
        with lmdb.open(str(path), map_size=1 << 28) as environment, environment.begin(write=True) as transaction:
            for index, picture in enumerate(job.pixels):
                transaction.put(f"{index:08}".encode(), picture.tobytes())

    return job.load(Environment(job.written("lmdb", write), job.count), shuffle=True)


class File(Opened):
    """An HDF5 file."""

    @functools.cached_property
    def opened(self) -> Any:
        import h5py

        return h5py.File(self.path)

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(self.opened["volumes"][index]), index


def h5py(job: Job) -> Any:
    """Volumes of a file."""
    import h5py

    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("volumes", data=job.volumes, chunks=(1, *job.volumes.shape[1:]))

    return job.load(File(job.written("volumes.h5", write), job.count), shuffle=True)


class Cube(Opened):
    """An xarray Dataset in a zarr store, of which a sample is a window in time."""

    @functools.cached_property
    def opened(self) -> Any:
        import xarray

        return xarray.open_zarr(self.path, chunks=None)

    def __getitem__(self, index: int) -> Any:
        window = self.opened.isel(time=slice(index, index + 4))
        return {name: torch.from_numpy(window[name].to_numpy()) for name in ("temperature", "wind")}


def xarray(job: Job) -> Any:
    """Windows of a cube."""
    import xarray

    def write(path: Path) -> None:
        generator = np.random.default_rng(0)
        shape = (job.count + 4, EXTENT, EXTENT)
        names = ("time", "latitude", "longitude")
        arrays = {name: (names, generator.random(shape, dtype=np.float32)) for name in ("temperature", "wind")}
        xarray.Dataset(arrays).to_zarr(path)

    return job.load(Cube(job.written("cube.zarr", write), job.count), shuffle=True)


class Tensors(Opened):
    """A TensorStore, read a batch at once."""

    @functools.cached_property
    def opened(self) -> Any:
        import tensorstore

        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": self.path}}
        return tensorstore.open(spec, read=True).result()

    def __getitems__(self, indices: list[int]) -> Any:
        return list(zip(self.opened[indices].read().result(), indices, strict=True))


def tensorstore(job: Job) -> Any:
    """An array of volumes."""
    import zarr

    def write(path: Path) -> None:
        zarr.create_array(path, data=job.volumes, chunks=(BATCH_SIZE, *job.volumes.shape[1:]))

    return job.load(Tensors(job.written("tensors.zarr", write), job.count), shuffle=True)


class Query(IterableDataset[Any]):
    """What DuckDB selects for this worker from a Parquet file, in frames of Polars."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __iter__(self) -> Iterator[Any]:
        import duckdb
        import polars

        worker = get_worker_info()
        with duckdb.connect(config={"threads": 1}) as connection:
            rows = connection.execute(
                "SELECT number, value FROM read_parquet(?) WHERE number % ? = ? ORDER BY number",
                [self.path, worker.num_workers, worker.id],
            )
            for batch in rows.to_arrow_reader(BATCH_SIZE):
                frame = polars.from_arrow(batch)
                yield {name: frame[name].to_torch() for name in frame.columns}


def duckdb(job: Job) -> Any:
    """Rows that each worker selects, as batches."""
    import polars

    def write(path: Path) -> None:
        values = np.random.default_rng(0).random(job.count)
        polars.DataFrame({"number": np.arange(job.count), "value": values}).write_parquet(path)

    return job.load(Query(job.written("rows.parquet", write)), batch_size=None)


def lance(job: Job) -> Any:
    """Rows of a Lance dataset, which its own class opens in each worker."""
    import pyarrow as pa
    from lance.torch.data import SafeLanceDataset

    def write(path: Path) -> None:
        import lance

        columns = {"number": np.arange(job.count), "value": np.random.default_rng(0).random(job.count)}
        lance.write_dataset(pa.table(columns), str(path))

    return job.load(SafeLanceDataset(str(job.written("rows.lance", write))), shuffle=True)
