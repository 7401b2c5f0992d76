"""`Mixture`: samples of several sources in given shares, which hold at every step and not only on average.

NOTE [Shares]. A source of weight w should have been read w * t times after t samples. A sample of it may come as soon
as the number read stays below that plus 1, and has to come before the number falls 1 behind. Of those that may come,
the one whose time is up first does: in this way every share is within one sample of its weight, always (Tijdeman, The
chairman assignment problem, 1980; it is the rule of the earliest deadline). Time is cut into blocks, so that all are
filled at once, one sample of each at a time, each from rounded counts to rounded counts. If the weights are fractions
of a common denominator up to 65,536, blocks are multiples of it, and nothing has to be rounded. Otherwise it is not
proved that a block can always be filled within one; where it could not, the source that is furthest behind would come
too early. Of 270 mixtures of 2 to 100 sources of random weights, in one a share was off by 1.08.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np

from rayloader.options import check_whole
from rayloader.plans.picture import Panel
from rayloader.plans.plan import Array, Latest, Order, Plan, shuffled

_RUN = 32  # samples that one rank takes in a row, see `Mixture._order`
_AT_ONCE = 1 << 20  # samples that are made together, so that NumPy's calls cost little
_NEAR = 1e-6  # counts that differ by less are equal: sums of floating-point numbers up to some billions
_BLOCK = 1 << 12  # samples of a block, about
_PERIOD = 1 << 16  # the largest common denominator that is kept
_SHOWN = 8  # sources in a picture, those that are read most
_LATE = 1e18  # added to the deadline of a sample that may not come yet: it comes only if no other may


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
        stop: where an epoch ends without `epoch_size`: "first", when the first source is used up, or "all", when all
            have been read once. It is told by the first epoch, and the same for all.
        shuffle: otherwise each source is read in its order.
        num_replicas: see `Plan.for_rank`.

    Attributes:
        epoch: that `iter()` gives next.
        size: samples of an epoch.
        sources: the names of the sources, in their order, separated by commas; empty if they have none. A state has
            them, and a warning tells of others when it is loaded.

    Raises:
        ValueError: an argument is out of range, or a source is empty, or has no length; or weights and sources have
            other names.
    """

    def __init__(
        self,
        sources: Sequence[Any] | Mapping[str, Any],
        weights: Any,
        *,
        seed: int = 0,
        epoch_size: int | None = None,
        stop: Literal["first", "all"] = "first",
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
        self.size = check_whole("epoch_size", self._end(stop) if epoch_size is None else epoch_size, 1)
        self._streams: Latest[int, Stream] = Latest()
        self._known = 0, np.zeros(len(self._sizes), np.int64)  # an epoch, and what `_before` gave for it

    def counts(self, step: int) -> Array:
        """How often each source has been read after so many samples, counted over all epochs.

        Returns:
            int64 of shape (sources,), whose sum is `step`.
        """
        epoch, place = divmod(check_whole("step", step, 0), self.size)
        return np.asarray(self._stream(epoch).counts(np.array([place]))[0])

    def _end(self, stop: Any) -> int:
        if stop not in ("first", "all"):
            raise ValueError(f'stop must be "first" or "all", got {stop!r}; a number of samples is epoch_size')
        ends = [self._shares.when(source, size) for source, size in enumerate(self._sizes.tolist())]
        if stop == "all" and not math.isfinite(max(ends)):
            source = self._names[ends.index(math.inf)]
            raise ValueError(f"{source} is never used up, since its last weight is 0; pass epoch_size")
        return max(1, math.floor(min(ends) + _NEAR) if stop == "first" else math.ceil(max(ends) - _NEAR))

    def _stream(self, epoch: int) -> Stream:
        return self._streams.of(epoch, lambda _: Stream(self._shares, self._before(epoch), self._before(epoch + 1)))

    def _before(self, epoch: int) -> Array:
        """How often each source has been read before an epoch: never less than before an earlier one."""
        number, counts = self._known
        if number > epoch:
            number, counts = 0, np.zeros_like(counts)
        for later in range(number + 1, epoch + 1):
            counts = _rounded(self._shares, later * self.size, counts)
        self._known = epoch, counts
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

    def _facts(self) -> dict[str, str]:
        before, after = self._before(self.epoch), self._before(self.epoch + 1)
        lines = {"samples": f"{self.size:,} in an epoch, of {self._sizes.sum():,} in {len(self._sizes)} sources"}
        for name, count, size in zip(self._names, (after - before).tolist(), self._sizes.tolist(), strict=True):
            share = f"{count / self.size:.3%} of the epoch"
            lines[name] = f"{count:,} samples, {share}; {count / size:.3f} times its {size:,}"
        return lines

    def _panels(self) -> list[Panel]:
        epoch, at = self.epoch, np.unique(np.linspace(0, self.size, 101).astype(np.int64))
        counts = self._stream(epoch).counts(at)
        wanted = np.array([self._shares.at(step) for step in (epoch * self.size + at).tolist()])
        shares, targets = (100 * (of[1:] - of[0]).T / at[1:] for of in (counts, wanted))
        most = np.argsort(counts[0] - counts[-1], kind="stable")[:_SHOWN].tolist()
        values = {self._names[source]: shares[source] for source in most}
        across, up = "samples of the epoch that have been read", "% of the samples"
        return [Panel("Share of each source so far", across, up, values, at[1:], targets[most])]


def _size_of(name: str, source: Any) -> int:
    size = len(source) if hasattr(source, "__len__") else source
    if not hasattr(size, "__index__") or size < 1:
        raise ValueError(
            f"a source must be a dataset with a length, or a number of samples, of at least 1, and {name} is "
            f"{source!r:.100}; leave it out, or mix streams by a dataset that reads from them"
        )
    return int(size)


def _shares_of(weights: Any, keys: list[str] | None, names: list[str]) -> Shares:
    """Checks weights, or pairs of steps and weights.

    Args:
        weights: what the user has given.
        keys: by which weights are given; None: in the order of the sources.
        names: of the sources, for errors.
    """
    given = list(weights)
    is_pair = [isinstance(one, (tuple, list)) and len(one) == 2 and hasattr(one[1], "__len__") for one in given]
    changes = bool(given) and all(is_pair)
    pairs = given if changes else [(0, weights if isinstance(weights, Mapping) else given)]
    begins = [check_whole("the step of weights", step, 0) for step, _ in pairs]
    if begins[0] != 0 or begins != sorted({*begins}):
        raise ValueError(f"weights that change must be for steps that begin with 0 and increase, got {begins}")
    rows = np.array([_in_order(row, keys) for _, row in pairs], np.float64)
    if rows.shape != (len(pairs), len(names)):
        raise ValueError(f"there must be one weight for each of the {len(names)} sources, got {weights!r}")
    fit = (np.isfinite(rows) & (rows >= 0)).all()
    if not (fit and rows.any(axis=0).all() and rows.any(axis=1).all()):
        raise ValueError(
            "weights must be finite, from 0 on, and above 0 for each source at some step and for some source at each "
            f"step, got {weights!r}; leave a source out that is not to be read"
        )
    return Shares(begins, rows / rows.sum(axis=1, keepdims=True), [*map(_block_size, rows)])


def _in_order(weights: Any, keys: list[str] | None) -> Any:
    """The weights of sources in their order, of weights by name."""
    names = [*weights] if isinstance(weights, Mapping) else None
    if (names and {*names}) != (keys and {*keys}):
        raise ValueError(
            f"weights must have the names of the sources, {keys or 'which have none'}, got {weights!r}; pass two dicts "
            "with the same keys, or two lists"
        )
    return weights if keys is None else [weights[key] for key in keys]


class Shares:
    """Weights in time.

    Args:
        begins: the numbers of samples from which weights hold, the first one 0.
        weights: of shape (begins, sources), each row with the sum 1.
        blocks: samples of a block, for each row.
    """

    def __init__(self, begins: list[int], weights: Array, blocks: list[int]) -> None:
        self.begins, self.weights, self.blocks = begins, weights, blocks
        taken = np.diff(begins)[:, None] * weights[:-1]
        self._before = np.concatenate([np.zeros((1, weights.shape[1])), np.cumsum(taken, axis=0)])

    def row(self, step: int) -> int:
        """Which weights hold after so many samples."""
        return bisect.bisect_right(self.begins, step) - 1

    def at(self, step: int) -> Array:
        """How often each source should have been read after so many samples, a fraction."""
        row = self.row(step)
        return np.asarray(self._before[row] + (step - self.begins[row]) * self.weights[row])

    def when(self, source: int, count: int) -> float:
        """After how many samples a source should have been read so often; infinity: never."""
        before, weights = self._before[:, source], self.weights[:, source]
        row = max(int(np.searchsorted(before, count, "left")) - 1, 0)
        left = count - before[row]
        return self.begins[row] + float(left / weights[row]) if weights[row] else math.inf


class Stream:
    """One epoch of a mixture: of which source each sample is, and which of that source's.

    Args:
        shares: of the sources.
        before: how often each source was read in all epochs before.
        after: and with this one.
    """

    def __init__(self, shares: Shares, before: Array, after: Array) -> None:
        begin, end = int(before.sum()), int(after.sum())
        self._shares, self._begin = shares, begin
        bounds = []
        for row, (first, block) in enumerate(zip(shares.begins, shares.blocks, strict=True)):
            last = min(end, shares.begins[row + 1]) if row + 1 < len(shares.begins) else end
            if last > (start := max(begin, first)):
                bounds += [start, *range(first + ((start - first) // block + 1) * block, last, block)]
        self._bounds = np.array([*bounds, end])
        counts = [before]  # when a block begins
        for step in self._bounds[1:-1].tolist():
            counts.append(_rounded(shares, step, counts[-1], after))
        self._counts = np.array([*counts, after])

    def counts(self, places: Array) -> Array:
        """How often each source has been read, after so many samples of this epoch, and before it: a row for each."""
        blocks = self._block_of(places)
        sizes = self._begin + places - self._bounds[blocks]
        rows = self._fill(blocks, sizes)
        inside = [np.bincount(row, minlength=self._counts.shape[1]) for row in rows]
        return np.asarray(self._counts[blocks] + inside)

    def read(self, begin: int, end: int) -> tuple[Array, Array]:
        """The samples between two places, at least one: the source of each, and which of that source's it is."""
        first, last = self._block_of(np.array([begin, end - 1])).tolist()
        blocks = np.arange(first, last + 1)
        bounds = np.append(self._bounds[blocks], self._begin + end)
        sources = np.concatenate(self._fill(blocks, np.diff(bounds)))
        numbers = np.empty(len(sources), np.int64)
        for source, count in enumerate(self._counts[first].tolist()):
            mine = np.flatnonzero(sources == source)
            numbers[mine] = np.arange(count, count + len(mine))
        left_out = self._begin + begin - int(bounds[0])
        return sources[left_out:], numbers[left_out:]

    def _block_of(self, places: Array) -> Array:
        return np.searchsorted(self._bounds, self._begin + places, "right") - 1

    def _fill(self, blocks: Array, sizes: Array) -> list[Array]:
        """The sources of the first samples of each of these blocks, so many of each: one of each block at a time.

        See NOTE [Shares].
        """
        order = np.argsort(-sizes, kind="stable")  # the longest first: those that go on stay in front
        blocks, sizes = blocks[order], sizes[order]
        begins = self._bounds[blocks]
        weights = self._shares.weights[np.searchsorted(self._shares.begins, begins, "right") - 1]
        wanted = np.array([self._shares.at(int(step)) for step in begins])
        read = self._counts[blocks].astype(np.float64)
        ends = self._counts[np.minimum(blocks + 1, len(self._counts) - 1)]
        with np.errstate(divide="ignore", over="ignore"):  # of weights that are zero, or nearly
            pace = np.minimum(1 / weights, _LATE / 2)
            deadlines = np.where(weights > 0, (read + 1 - wanted) * pace, _LATE / 2)
        found = np.empty((len(blocks), int(sizes[0])), np.uint32)
        many = np.arange(len(blocks))
        limits = wanted - _NEAR
        for step in range(int(sizes[0])):
            if (active := int(np.searchsorted(-sizes, -step, "left"))) < len(read):
                read, ends, weights, deadlines = read[:active], ends[:active], weights[:active], deadlines[:active]
                pace, limits, many = pace[:active], limits[:active], many[:active]
            limits = limits + weights
            late = np.where(read < limits, deadlines, deadlines + _LATE)
            source = np.where(read < ends, late, np.inf).argmin(axis=1)
            found[:active, step] = source
            read[many, source] += 1
            deadlines[many, source] += pace[many, source]
        return [found[row, : sizes[row]] for row in np.argsort(order)]


def _rounded(shares: Shares, step: int, least: Array | int = 0, most: Array | int | None = None) -> Array:
    """How often each source has been read after so many samples: whole numbers of this sum, within bounds.

    Fractions are added up from the largest weight on, and where their sum passes a half, a source is rounded up. So
    of the sources that will soon be read, as many as are due have been read already, and no more.
    """
    wanted = shares.at(step)
    low = np.floor(wanted + _NEAR).astype(np.int64)
    most = step if most is None else most
    found = np.clip(low, least, most)
    order = np.argsort(-shares.weights[shares.row(step)], kind="stable")
    order = order[(found == low)[order] & (low < most)[order]]
    rest = np.maximum(wanted - low, 0)[order]
    if (missing := step - int(found.sum())) > 0 and rest.any():
        ends = np.floor(np.cumsum(np.minimum(rest * (missing / rest.sum()), 1)) + 0.5).astype(np.int64)
        found[order] += np.diff(ends, prepend=0)
    while missing := step - int(found.sum()):  # where bounds are in the way: the furthest off
        sign = 1 if missing > 0 else -1
        may = found < most if sign > 0 else found > least
        furthest = np.argsort(np.where(may, sign * (found - wanted), np.inf), kind="stable")
        found[furthest[: min(abs(missing), may.sum())]] += sign
    return found


def _block_size(weights: Any) -> int:
    """Samples of a block: a multiple of the common denominator of the shares, if it is small."""
    fractions = [Fraction(float(weight)).limit_denominator(_PERIOD) for weight in weights]
    total = sum(fractions)
    period = math.lcm(*((one / total).denominator for one in fractions)) if total else 1
    if period > _PERIOD or not np.allclose([float(one) for one in fractions], weights, rtol=1e-12, atol=0):
        return _BLOCK
    return period * max(1, _BLOCK // period)
