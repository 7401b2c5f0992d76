"""`lengths`: how long each sample of a dataset is, computed once by the workers of a loader and kept in a file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from rayloader.data.trusted import open_own, path_in
from rayloader.loader import DataLoader
from rayloader.plans.inputs import Array

_AT_ONCE = 256  # samples of a task: the numbers are small, and a task costs as much as a few samples


def lengths(
    dataset: Any,
    fn: Callable[[Any], int] = len,
    *,
    where: str | os.PathLike[str] | None = None,
    key: str | None = None,
    num_workers: int = 0,
    bar: bool = True,
    **options: Any,
) -> Array:
    """How long each sample of a dataset is, for a plan.

    The samples are built once, by a loader's workers. With a folder, later runs with the same key read the result from
    a file there; ranks of one machine should let one of them compute it first.

    For instance::

        lengths = rayloader.lengths(texts, count_tokens, where="/data/cache", key="texts of May", num_workers=8)
        plan = rayloader.plans.TokenBudget(lengths, max_tokens=16_384)

    Args:
        dataset: map-style, with `__len__`.
        fn: gives the length of a sample, a whole number.
        where: a folder on a local disk, such as that of `rayloader.cached`.
        key: for a folder, which needs it: a text that says what the lengths are. As in `rayloader.cached`, nothing else
            tells old ones from new ones: change it whenever the samples or `fn` change.
        num_workers: of the loader.
        bar: whether a bar shows the progress in a terminal, where tqdm is installed.
        options: other arguments of the loader, for instance `workers`.

    Returns:
        int64 of shape (samples,); from a file it is a memory map that can't be written.

    Raises:
        TypeError: `fn` gives something else than a whole number.
        ValueError: a folder without a key, or a key without a folder.
        CacheError: others could have written the file.
    """
    if where is None:
        if key is not None:
            raise ValueError("key= is of a folder: without one nothing is kept; leave it out, or pass where=")
        return _computed(dataset, fn, num_workers, bar, options)
    path = path_in(where, dataset, key)
    path = path.with_name(f"{path.name}.rayloader-lengths.npy")
    with contextlib.suppress(FileNotFoundError):
        return _read(path)
    found = _computed(dataset, fn, num_workers, bar, options)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")  # so that no process sees a part of it
    with os.fdopen(open_own(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
        np.save(file, found)
    os.replace(unfinished, path)
    return _read(path)


def _read(path: Path) -> Array:
    """The file's content, mapped. Raises FileNotFoundError, and CacheError if others could have written it."""
    with os.fdopen(open_own(path), "rb") as file:
        version = np.lib.format.read_magic(file)
        assert version == (1, 0)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return np.memmap(file, dtype, "r", file.tell(), shape)


def _computed(dataset: Any, fn: Any, num_workers: int, bar: bool, options: dict[str, Any]) -> Array:
    loader: Any = DataLoader(
        _Lengths(dataset, fn), batch_size=_AT_ONCE, num_workers=num_workers, collate_fn=_as_array, **options
    )
    shown = loader
    if bar:
        with contextlib.suppress(ImportError):
            from tqdm.auto import tqdm

            shown = tqdm(loader, desc="lengths", unit="batch", disable=None)
    return np.concatenate([np.zeros(0, np.int64), *shown])


def _as_array(numbers: list[int]) -> Array:
    return np.array(numbers, np.int64)


class _Lengths(Dataset[int]):
    """The length of each sample."""

    def __init__(self, dataset: Any, fn: Any) -> None:
        self._dataset, self._fn = dataset, fn

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        found = self._fn(self._dataset[index])
        try:
            return int(found.__index__())
        except AttributeError:
            raise TypeError(
                f"fn must give a whole number, the length of a sample, and gave {found!r} for sample {index}; round it"
            ) from None
