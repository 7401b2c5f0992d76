"""`Mixture`: samples of several sources in given shares, which hold at every step and not only on average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rayloader.options import is_whole
from rayloader.plans.inputs import Array, check_whole, shuffled, weights_of
from rayloader.plans.plan import Facts, Latest, Order, Panel, Plan
from rayloader.plans.shares import NEAR, Shares, Stream, block_of, rounded

_RUN = 32  # samples that one rank takes in a row, see `Mixture._order`
_AT_ONCE = 1 << 20  # samples that are made together, so that NumPy's calls cost little


class Mixture(Plan):
    """A sampler over several sources, of which each has its share of every stretch of the epoch.

    It gives indices of a `torch.utils.data.ConcatDataset` of the sources. At every step the number of samples of each
    source is within one of its weight times the number of all: not by chance, as when sources are drawn. Each source
    is shuffled by itself, and begins again, in another order, when it is used up. An epoch goes on where the one before
    has ended. As Megatron's blended dataset and Mosaic's proportions; here without an index in memory.

    For instance::

        mixture = Mixture([web, books], [0.7, 0.3])
        loader = rayloader.DataLoader(ConcatDataset([web, books]), batch_size=64, sampler=mixture)

    or by names, which `describe`, errors and states have too::

        sources = {"web": web, "books": books}
        mixture = Mixture(sources, {"web": 0.7, "books": 0.3})
        loader = rayloader.DataLoader(ConcatDataset(sources.values()), batch_size=64, sampler=mixture)

    Args:
        sources: how many samples each has, or datasets with a length; or a dict with these by their names, which are
            numbered in its order.
        weights: of the sources, in any unit, or a dict with these by the same names; or, for weights that change, pairs
            of the number of samples after which they hold, counted over all epochs and beginning with 0, and weights,
            of which some may then be 0.
        seed: of the random order; from 0 on.
        epoch_size: samples of an epoch. It is rounded up to a multiple of the number of ranks.
        stop: where an epoch ends without `epoch_size`: "first", when the first source is used up, "all", when all have
            been read once, or a number of samples. It is told by the first epoch, and the same for all.
        shuffle: otherwise each source is read in its order.
        num_replicas: see `Plan.for_rank`.

    Attributes:
        epoch: that `iter()` gives next.
        size: samples of an epoch.
        sources: the names of the sources, in their order, separated by commas; empty if they have none. A state has
            them, and a warning tells of others when it is loaded.

    Raises:
        TypeError: a source has no length.
        ValueError: an argument is out of range, or a source is empty; or weights and sources have other names.
    """

    def __init__(
        self,
        sources: Sequence[Any] | Mapping[str, Any],
        weights: Any,
        *,
        seed: int = 0,
        epoch_size: int | None = None,
        stop: Literal["first", "all"] | int = "first",
        shuffle: bool = True,
        num_replicas: int = 1,
    ) -> None:
        super().__init__(seed, num_replicas, drop_last=False)
        names = [*sources] if isinstance(sources, Mapping) else None
        self.sources = ", ".join(map(str, names or ()))
        self._names = [f"source {one}" for one in names or range(len(sources))]
        given = sources.values() if isinstance(sources, Mapping) else sources
        self._sizes = np.array([*map(_size_of, self._names, given)], np.int64)
        if not len(self._sizes):
            raise ValueError("a mixture must have at least one source, got none; pass their datasets or lengths")
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._shares = _shares_of(weights, names, self._names)
        self.shuffle = shuffle
        self.size = check_whole("epoch_size", self._end(stop) if epoch_size is None else epoch_size)
        self._streams: Latest[int, Stream] = Latest()
        self._known: dict[int, Array] = {}  # what `_before` gave: the same, whoever asks first

    def counts(self, step: int) -> Array:
        """How often each source has been read after so many samples, counted over all epochs.

        Returns:
            int64 of shape (sources,), whose sum is `step`.
        """
        epoch, place = divmod(check_whole("step", step, 0), self.size)
        return np.asarray(self._stream(epoch).counts(np.array([place]))[0])

    def _end(self, stop: Any) -> int:
        if stop not in ("first", "all") and not is_whole(stop):
            raise ValueError(f'stop must be "first", "all" or a number of samples, got {stop!r}')
        if is_whole(stop):
            return check_whole("stop", stop)
        ends = [self._shares.when(source, size) for source, size in enumerate(self._sizes.tolist())]
        if stop == "all" and not math.isfinite(max(ends)):
            raise ValueError(
                f"{self._names[ends.index(math.inf)]} is never used up, since its last weight is 0; pass epoch_size"
            )
        return max(1, math.floor(min(ends) + NEAR) if stop == "first" else math.ceil(max(ends) - NEAR))

    def _stream(self, epoch: int) -> Stream:
        return self._streams.of(epoch, self._new_stream)

    def _new_stream(self, epoch: int) -> Stream:
        bounds = epoch * self.size, (epoch + 1) * self.size
        return Stream(self._shares, *bounds, self._before(epoch), self._before(epoch + 1))

    def _before(self, epoch: int) -> Array:
        """How often each source has been read before an epoch: never less than before an earlier one.

        Where each is read in the epoch before, that follows from the shares; otherwise from the counts before that one.
        """
        first, shares, size = epoch, self._shares, self.size
        while (
            first and first not in self._known and (shares.at(first * size) - shares.at((first - 1) * size)).min() < 1
        ):
            first -= 1
        counts = self._known.get(first)
        if counts is None:
            counts = rounded(shares, first * size)
        for number in range(first + 1, epoch + 1):
            counts = rounded(shares, number * size, counts)
        self._known[epoch] = counts
        return counts

    def _order(self, key: tuple[int, int]) -> Order:
        """The order, in which each rank takes runs of samples, and not the first run of each round again.

        Shares have periods: if ranks took samples in turns, one of two might get all samples of a source. A round is a
        run of each rank. It has the same places in the order as in the stream, so that a part of whole rounds can be
        made of the samples at its own places.
        """
        epoch, num_replicas = key
        stream, size, round_size = self._stream(epoch), self.size, _RUN * num_replicas
        steps = -(-size // num_replicas)
        total, in_rounds = steps * num_replicas, steps // _RUN * round_size
        part_size = round_size * max(1, _AT_ONCE // round_size)

        def part(number: int) -> list[int]:
            begin, end = number * part_size, min((number + 1) * part_size, total)
            samples = self._samples(*stream.read(begin, min(end, size)))
            if end > size:  # those that fill the last step are the first ones
                first = self._samples(*stream.read(0, min(end - size, size)))
                samples = np.append(samples, np.resize(first, end - size))
            places = np.arange(begin, end)
            step, rank = np.divmod(places, num_replicas)
            turn, run = np.divmod(step, _RUN)
            exchanged = (turn * num_replicas + (rank + turn) % num_replicas) * _RUN + run
            return samples[np.where(places < in_rounds, exchanged, places) - begin].tolist()  # type: ignore[no-any-return]

        def reader() -> Any:
            parts: Latest[int, list[int]] = Latest()
            return lambda place: parts.of(place // part_size, part)[place % part_size]

        return Order(reader, range(total))

    def _samples(self, sources: Array, numbers: Array) -> Array:
        """The indices of samples, each the number so and so that is read of its source."""
        found = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            mine = np.flatnonzero(sources == source)
            size = int(self._sizes[source])
            turns, places = np.divmod(numbers[mine], size)
            for turn in np.unique(turns).tolist() if self.shuffle else ():
                now = np.flatnonzero(turns == turn)
                places[now] = shuffled(places[now], size, self.seed, source, turn)
            found[mine] = self._offsets[source] + places
        return found

    def _facts(self) -> Facts:
        epoch, at = self.epoch, np.unique(np.linspace(0, self.size, 101).astype(np.int64))
        counts = self._stream(epoch).counts(at)
        read = counts[-1] - counts[0]
        lines = {"samples": f"{self.size:,} in an epoch, of {self._sizes.sum():,} in {len(self._sizes)} sources"}
        for name, count, size in zip(self._names, read.tolist(), self._sizes.tolist(), strict=True):
            lines[name] = (
                f"{count:,} samples, {count / self.size:.3%} of the epoch; {count / size:.3f} times its {size:,}"
            )
        wanted = np.array([self._shares.at(step) for step in (epoch * self.size + at).tolist()])
        shares, targets = (100 * (of[1:] - of[0]).T / at[1:] for of in (counts, wanted))

        def by_name(rows: Array) -> dict[str, Array]:
            return {self._names[source]: rows[source] for source in np.argsort(-read, kind="stable").tolist()}

        across, passes = "samples of the epoch that have been read", by_name((counts / self._sizes).T)
        panels = [
            Panel("Share of each source so far", across, "% of the samples", by_name(shares), at[1:], by_name(targets)),
            Panel("How often each source has been read, in all epochs", across, "times all its samples", passes, at),
        ]
        return Facts(lines, panels)


def _size_of(name: str, source: Any) -> int:
    if isinstance(source, (int, np.integer)) and not isinstance(source, bool):
        size = int(source)
    elif hasattr(source, "__len__"):
        size = len(source)
    else:
        raise TypeError(
            f"a source must be a number of samples or a dataset with a length, and {name} is a "
            f"{type(source).__name__}; mix streams by a dataset that reads from them"
        )
    if size < 1:
        raise ValueError(f"a source must have samples, and {name} has {size}; leave it out")
    return size


def _shares_of(weights: Any, keys: list[str] | None, names: list[str]) -> Shares:
    """Checks weights, or pairs of steps and weights.

    Args:
        weights: what the user has given.
        keys: by which weights are given; None: in the order of the sources.
        names: of the sources, for errors.
    """
    given = list(weights)
    changes = bool(given) and all(isinstance(one, (tuple, list)) and len(one) == 2 for one in given)
    changes = changes and all(hasattr(one[1], "__len__") for one in given)
    pairs = given if changes else [(0, weights if isinstance(weights, Mapping) else given)]
    begins = [check_whole("the step of weights", step, 0) for step, _ in pairs]
    if begins[0] != 0 or begins != sorted({*begins}):
        raise ValueError(f"weights that change must be for steps that begin with 0 and increase, got {begins}")
    ordered = [_in_order(row, keys) for _, row in pairs]
    rows = np.array([weights_of(row, names, zeros=changes) for row in ordered])
    if not rows.any(axis=0).all():
        source = int(np.flatnonzero(~rows.any(axis=0))[0])
        raise ValueError(
            f"each source must have a weight above 0 at some step, and {names[source]} has none; leave it out"
        )
    return Shares(begins, rows, [*map(block_of, ordered)])


def _in_order(weights: Any, keys: list[str] | None) -> Any:
    """The weights of sources in their order, of weights by name."""
    named = isinstance(weights, Mapping)
    if named != (keys is not None) or (named and {*weights} != {*(keys or ())}):
        raise ValueError(
            f"weights must have the names of the sources, {keys if keys is not None else 'which have none'}, got "
            f"{weights!r}; pass both as dicts with the same keys, or both as lists"
        )
    return [weights[key] for key in keys] if keys is not None else weights
