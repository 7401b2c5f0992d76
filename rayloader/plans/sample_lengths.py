"""Lengths of samples: computed once by the workers of a loader, checked, and sorted within windows of a random order.

Promise: lengths that do not make sense are an error that names the rule, the value and a remedy.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from rayloader.loader import DataLoader
from rayloader.plans.plan import Array, shuffled

_AT_ONCE = 256  # samples of a task: the numbers are small, and a task costs as much as a few samples
_MOST = 1 << 32  # samples, and tokens of one: in plans both are 32 bits
_WINDOWED = 1 << 20  # samples whose windows are made together, so that NumPy's calls cost little
_LOW = np.uint64((1 << 32) - 1)


def lengths(dataset: Any, fn: Callable[[Any], int] = len, **options: Any) -> Array:
    """How long each sample of a dataset is, for a plan.

    The samples are built once, by a loader's workers. Where that takes long, keep what comes by `numpy.save`; plans
    take what `numpy.load(path, mmap_mode="r")` reads.

    For instance::

        lengths = rayloader.lengths(texts, count_tokens, num_workers=8)
        plan = rayloader.plans.TokenBudget(lengths, max_tokens=16_384)

    Args:
        dataset: map-style, with `__len__`.
        fn: gives the length of a sample, a whole number.
        options: arguments of the loader, for instance `num_workers`.

    Returns:
        int64 of shape (samples,).

    Raises:
        TypeError: `fn` gives something else than a whole number.
    """
    batches: Any = DataLoader(_Lengths(dataset, fn), batch_size=_AT_ONCE, **options)
    return np.concatenate([np.zeros(0, np.int64), *batches])


class _Lengths(Dataset[int]):
    """The length of each sample."""

    def __init__(self, dataset: Any, fn: Any) -> None:
        self._dataset, self._fn = dataset, fn

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> int:
        found = self._fn(self._dataset[index])
        if not hasattr(found, "__index__"):
            raise TypeError(f"fn must give the length of a sample, a whole number, got {found!r} for sample {index}")
        return operator.index(found)


def lengths_of(lengths: Any) -> Array:
    """Lengths of samples as an array of whole numbers; a memory map stays one.

    Args:
        lengths: of one dimension: an array, a tensor, a list, or a column of Arrow.

    Raises:
        TypeError: they are not whole numbers.
        ValueError: there are none, or some are below 1 or too large.
    """
    found = np.asarray(lengths)
    if found.ndim != 1 or not 0 < found.size < _MOST:
        raise ValueError(f"lengths must be a number for each of 1 to {_MOST - 1} samples, got the shape {found.shape}")
    if found.dtype.kind not in "iu":  # Arrow's columns with nulls become floats, too
        raise TypeError(
            f"lengths must be whole numbers, got the type {found.dtype}; fill in those that are missing, and round "
            "up, times in a finer unit: numpy.ceil(lengths * 100).astype(numpy.int64)"
        )
    if found.min() < 1 or found.max() >= _MOST:
        bad = np.flatnonzero((found < 1) | (found >= _MOST))[0]
        raise ValueError(
            f"lengths must be from 1 to {_MOST - 1}, and sample {bad} has {found[bad]}; leave such samples out, for "
            "instance by torch.utils.data.Subset"
        )
    return found


def narrow(count: int) -> Any:
    """The type of numbers below `count` that takes the least memory."""
    return np.uint32 if count < _MOST else np.uint64


def sorted_windows(
    lengths: Array, kept: Array | None, window: int, key: tuple[int, ...]
) -> Iterator[tuple[int, Array, Array]]:
    """Makes a few windows at a time.

    Args:
        lengths: of all samples.
        kept: the numbers of those that are read; None: of all.
        window: samples of a window; the last one has fewer.
        key: of the random order.

    Yields:
        The place of the first sample in the order; numbers of samples, of shape (windows, samples of a window); and
        their lengths, int64, from the longest of a window on. Samples of one length are in random order.
    """
    count = len(lengths if kept is None else kept)
    whole = count // window * window
    begins = [*range(0, whole, max(1, _WINDOWED // window) * window), whole, count]
    for begin, end in itertools.pairwise(begins):
        if begin == end:
            continue
        order = shuffled(np.arange(begin, end), count, *key)
        order = order if kept is None else kept[order]
        width = min(window, end - begin)
        keys = lengths[order].astype(np.uint64)
        # One sort of numbers is several times as fast as finding an order: the length, and below it the place.
        keys = (~keys << np.uint64(32)) | np.arange(end - begin, dtype=np.uint64)
        keys = keys.reshape(-1, width)
        keys.sort(axis=1)
        places = (keys & _LOW).astype(np.int64)
        yield begin, order.astype(narrow(len(lengths)))[places], (~keys >> np.uint64(32)).astype(np.int64)


def kept(lengths: Array, most: int, name: str, too_long: str, choices: tuple[str, ...]) -> tuple[Array | None, int]:
    """Which samples are in a plan, None if all are, and how many are longer than `most`.

    Raises:
        ValueError: one is, and that is an error; or the choice is none.
    """
    if too_long not in choices:
        raise ValueError(f"too_long must be one of {', '.join(choices)}, got {too_long!r}")
    if int(lengths.max()) <= most:
        return None, 0
    above = lengths > most
    count = int(above.sum())
    if too_long == "error":
        first = int(above.argmax())
        raise ValueError(
            f"each sample must fit into {name}={most}, and sample {first} has the length {lengths[first]} ({count} are "
            f"longer in all); raise {name}, or pass too_long, one of {', '.join(choices[1:])}"
        )
    if too_long == "skip" and count == len(lengths):
        raise ValueError(f"all of {count} samples are longer than {name}={most}, so that none is left; raise it")
    return (np.flatnonzero(~above).astype(narrow(len(lengths))) if too_long == "skip" else None), count
