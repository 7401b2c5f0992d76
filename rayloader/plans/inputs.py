"""What plans are made of: lengths, weights, numbers; checked, shuffled, and sorted within windows.

Promise: what does not make sense is an error that names the rule, the value and a remedy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rayloader.options import is_whole

Array = npt.NDArray[Any]

_MOST = 1 << 32  # samples, and tokens of one: in plans both are 32 bits
_SMALL = 1 << 12  # orders of so many places are drawn at once
_BLOCK = 1 << 16  # places that are shuffled together: they fit into the processor's cache


def lengths_of(lengths: Any, unit: str = "tokens") -> Array:
    """Lengths of samples as an array of whole numbers; a memory map stays one.

    Args:
        lengths: of one dimension: an array, a tensor, a list, or a column of Arrow.
        unit: what is counted, for errors.

    Raises:
        TypeError: they are not whole numbers.
        ValueError: there are none, or some are missing, below 1 or too large.
    """
    if missing := int(getattr(lengths, "null_count", 0)):  # of a column
        raise ValueError(
            f"each sample must have a length, and {missing} of {len(lengths)} in the column are missing (null); fill "
            "them in, or leave these samples out"
        )
    found = np.asarray(lengths)
    if found.ndim != 1 or not found.size or found.size >= _MOST:
        raise ValueError(
            f"lengths must be one number for each of at least one sample, and of fewer than {_MOST}, got the shape "
            f"{found.shape}; leave an empty source out"
        )
    if found.dtype.kind == "f" and (bad := np.flatnonzero(~np.isfinite(found))).size:
        raise ValueError(
            f"each sample must have a length, and sample {bad[0]} has {found[bad[0]]}; fill it in, or leave it out"
        )
    if found.dtype.kind not in "iu":
        raise TypeError(
            f"lengths must be whole numbers of {unit}, got the type {found.dtype}; round them up, in a finer unit "
            "where they are times: numpy.ceil(lengths * 100).astype(numpy.int64)"
        )
    if found.min() < 1 or found.max() >= _MOST:
        bad = np.flatnonzero((found < 1) | (found >= _MOST))
        raise ValueError(
            f"lengths must be from 1 to {_MOST - 1} {unit}, and sample {bad[0]} has {found[bad[0]]}; leave such "
            "samples out, for instance by torch.utils.data.Subset"
        )
    return found


def weights_of(weights: Any, names: Sequence[str], *, zeros: bool = False) -> Array:
    """Weights of sources, divided by their sum.

    Args:
        weights: a number for each source.
        names: of the sources, for errors.
        zeros: whether some may be 0.

    Raises:
        ValueError: there are others than that.
    """
    found = np.asarray(weights, np.float64)
    if found.shape != (len(names),):
        raise ValueError(f"there must be one weight for each of the {len(names)} sources, got {weights!r}")
    is_right = np.isfinite(found) & ((found >= 0) if zeros else (found > 0))
    if not is_right.all():
        at = int(np.flatnonzero(~is_right)[0])
        raise ValueError(
            f"weights must be finite numbers above 0, and {names[at]} has {found[at]}; leave out a source that is not "
            "to be read"
        )
    if not found.any():
        raise ValueError(f"at least one weight must be above 0 at any step, got {weights!r}")
    return np.asarray(found / found.sum())


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """A whole number from `least` on; otherwise raises ValueError."""
    value = int(value) if isinstance(value, np.integer) else value
    if not is_whole(value) or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return int(value)


def shuffled(places: Array, count: int, *key: int) -> Array:
    """What is at these places of a random order of `range(count)`: each time the same, in any part and any process.

    It takes no memory for the order: a place becomes the number at it by steps that can be undone, multiplication by
    an odd number, addition, and `x ^ (x >> half)`, within the next power of two; who falls outside of `count` takes
    the same steps again (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    Args:
        places: from 0 on, below `count`.
        count: of what is ordered.
        key: which order: seed, epoch and so on, from 0 on.

    Returns:
        Numbers below `count`, as unsigned 64 bits.
    """
    if count <= _SMALL:
        return np.random.default_rng(key).permutation(count)[places.astype(np.int64)].astype(np.uint64)
    bits = (count - 1).bit_length()
    constants = np.random.SeedSequence(key).generate_state(8, np.uint64).reshape(4, 2)
    found = places.astype(np.uint64)
    for begin in range(0, len(found), _BLOCK):
        part = found[begin : begin + _BLOCK]
        _mix(part, bits, constants)
        while (outside := np.flatnonzero(part >= count)).size:
            again = part[outside]
            _mix(again, bits, constants)
            part[outside] = again
    return found


def _mix(numbers: Array, bits: int, constants: Array) -> None:
    mask, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for factor, term in constants:
        numbers *= factor | np.uint64(1)
        numbers += term
        numbers &= mask
        numbers ^= numbers >> half


def narrow(count: int) -> Any:
    """The type of numbers below `count` that takes the least memory."""
    return np.uint32 if count < _MOST else np.uint64


# ---- windows of the random order


_WINDOWED = 1 << 20  # samples whose windows are made together, so that NumPy's calls cost little
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
            f"longer in all); raise {name}, or say what becomes of them by too_long="
            + " or ".join(f'"{choice}"' for choice in choices[1:])
        )
    if too_long == "skip" and count == len(lengths):
        raise ValueError(f"all of {count} samples are longer than {name}={most}, so that none is left; raise it")
    return (np.flatnonzero(~above).astype(narrow(len(lengths))) if too_long == "skip" else None), count
