"""The samples of an epoch in random order, in windows within which they are sorted by length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from rayloader.plans.inputs import Array, narrow, shuffled

_AT_ONCE = 1 << 20  # samples whose windows are made together, so that NumPy's calls cost little
_LOW = np.uint64((1 << 32) - 1)


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
    begins = [*range(0, whole, max(1, _AT_ONCE // window) * window), whole, count]
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
            f"longer in all); raise {name}, or say what becomes of them by too_long="
            + " or ".join(f'"{choice}"' for choice in choices[1:])
        )
    if too_long == "skip" and count == len(lengths):
        raise ValueError(f"all of {count} samples are longer than {name}={most}, so that none is left; raise it")
    return (np.flatnonzero(~above).astype(narrow(len(lengths))) if too_long == "skip" else None), count
