"""Batches that fill a number of tokens: `TokenBudget` pads samples of similar length, `Packing` joins samples."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from rayloader.options import check_whole
from rayloader.plans.picture import Panel
from rayloader.plans.plan import Array, Batches, BatchPlan, shuffled, taking
from rayloader.plans.sample_lengths import kept, lengths_of, narrow, sorted_windows

Cost = Callable[[Array, Array], Array]
TooLong = Literal["error", "skip", "truncate", "split"]


class TokenBudget(BatchPlan):
    """A batch sampler that pads little: batches of samples of similar length, which fill a budget of tokens.

    The samples are shuffled, all of them, and sorted by length within windows of that order. Each batch takes as many
    of them, from the longest on, as fit into the budget if each is padded to the longest. So a batch of short samples
    has many. Then the batches are shuffled too: in steps, in which each rank has a batch of nearly the same cost. All
    ranks have equally many steps: to fill the last one, batches of the most samples are halved. Batches of so many
    tokens are those of Vaswani et al., Attention Is All You Need, 2017, section 5.1.

    For instance::

        plan = TokenBudget(lengths, max_tokens=16_384)
        loader = rayloader.DataLoader(dataset, batch_sampler=plan, num_workers=8, collate_fn=pad)

    Args:
        lengths: of each sample, in tokens, frames, characters or another unit: whole numbers from 1 on, of shape
            (samples,), in an array, a memory map, a tensor, a list, or a column of Arrow.
        max_tokens: that a batch takes at most: its samples times the length of the longest, in the unit of `lengths`.
        max_samples: of a batch, at most.
        multiple_of: of so many samples is a batch a multiple, unless fewer fit into it, or it is the last of a window.
        window: samples that are sorted together: more of them pad less, and mix less.
        cost: takes the numbers of samples of batches and their longest lengths, int64 of shape (batches,) both, and
            gives how long each batch keeps a rank busy, in any unit. By default that is the padded tokens.
        too_long: what becomes of a sample above `max_tokens`: "error", or "skip" to leave it out; see `left_out`.
        seed: of the random order, together with the epoch.
        num_replicas: for how many ranks the steps are made, where another loader or a framework deals the batches out:
            see `Plan.for_rank`. rayloader's own loader says by itself how many there are.
        drop_last: leave out the last step if it has too few batches, rather than halve some.

    Attributes:
        epoch: that `iter()` gives next.
        left_out: how many samples are above `max_tokens`.

    Raises:
        TypeError: the lengths are not whole numbers.
        ValueError: an argument is out of range, or a sample is above the budget.
    """

    def __init__(
        self,
        lengths: Any,
        max_tokens: int,
        *,
        max_samples: int | None = None,
        multiple_of: int = 1,
        window: int = 1 << 16,
        cost: Cost | None = None,
        too_long: Literal["error", "skip"] = "error",
        seed: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed, num_replicas, drop_last)
        self._lengths = lengths_of(lengths)
        self.max_tokens, self.window = check_whole("max_tokens", max_tokens, 1), check_whole("window", window, 1)
        self.max_samples = None if max_samples is None else check_whole("max_samples", max_samples, 1)
        self.multiple_of = check_whole("multiple_of", multiple_of, 1)
        self._kept, self.left_out = kept(self._lengths, max_tokens, "max_tokens", too_long, ("error", "skip"))
        self._cost = cost

    @property
    def padding(self) -> float:
        """The share of padding in the tokens of this epoch's batches, from 0 to 1."""
        made = self._batches_of(self.epoch)
        return float(1 - made.tokens.sum() / made.room.sum())

    def _batches(self, epoch: int) -> Batches:
        parts: list[tuple[Array, Array, Array, Array]] = []
        for begin, order, lengths in sorted_windows(self._lengths, self._kept, self.window, (self.seed, epoch)):
            begins = np.sort(self._begins(lengths))
            flat = lengths.ravel()
            parts.append((order.ravel(), begin + begins, flat[begins], np.add.reduceat(flat, begins)))
        samples, begins, longest, tokens = map(np.concatenate, zip(*parts, strict=True))
        sizes = np.diff(begins, append=len(samples))
        room = sizes * longest
        costs = room if self._cost is None else np.asarray(self._cost(sizes, longest), np.float64)
        if costs.shape != sizes.shape or not (np.isfinite(costs).all() and (costs > 0).all()):
            raise ValueError(f"cost must give a finite number above 0 for each of {len(sizes)} batches, got {costs!r}")
        return Batches(taking(samples), np.append(begins, len(samples)), costs, tokens, room)

    def _begins(self, lengths: Array) -> Array:
        """Where batches begin, in rows of lengths from the longest on: a step in all rows at once."""
        rows, width = lengths.shape
        at, row, begins = np.zeros(rows, np.int64), np.arange(rows), []
        while len(at):
            begins.append(row * width + at)
            size = self.max_tokens // lengths[row, at]
            size = size if self.max_samples is None else np.minimum(size, self.max_samples)
            at = at + np.where(size < self.multiple_of, size, size - size % self.multiple_of)
            goes_on = at < width
            at, row = at[goes_on], row[goes_on]
        return np.concatenate(begins)

    def _facts(self) -> dict[str, str]:
        made = self._batches_of(self.epoch)
        sizes = np.diff(made.bounds)
        return {
            "samples": f"{sizes.sum():,}" + f", and {self.left_out:,} above the budget left out" * bool(self.left_out),
            "batches": f"{len(sizes):,} of {sizes.min():,} to {sizes.max():,} samples, {sizes.mean():,.1f} on average",
            "padding": f"{self.padding:.2%} of the tokens",
            "budget": f"{made.room.mean() / self.max_tokens:.2%} of {self.max_tokens:,} tokens are used, with padding",
            "steps": self._steps_in_words(),
        }

    def _panels(self) -> list[Panel]:
        made = self._batches_of(self.epoch)
        tokens, samples = {"with padding": made.room, "without": made.tokens}, {"samples": np.diff(made.bounds)}
        of_tokens = Panel("How many tokens a batch has", "tokens of a batch", "batches", tokens)
        of_samples = Panel("How many samples a batch has", "samples of a batch", "batches", samples)
        return [of_tokens, of_samples, *super()._panels()]


class Packing(BatchPlan):
    """A batch sampler of packs: each batch is the samples that together fill `seq_len` tokens.

    With "best-fit", samples stay whole. They are shuffled, all of them, and packed in windows of that order: the
    longest first, each into the fullest pack that has room for it (best-fit decreasing; Johnson, Near-optimal Bin
    Packing Algorithms, 1973; for language models Ding et al., Fewer Truncations Improve Language Modeling, 2024). With
    "concat", samples are joined in random order and cut every `seq_len` tokens: nothing is padded, and many samples are
    cut.

    For instance::

        plan = Packing(lengths, seq_len=4096)
        loader = rayloader.DataLoader(dataset, batch_sampler=plan, num_workers=8, collate_fn=pack_collate)

    Where samples are cut ("concat", or too_long="split") a batch is of parts of samples, so the dataset is
    `Cuts(dataset)`.

    Args:
        lengths: of each sample, in tokens; see `TokenBudget`.
        seq_len: tokens of a pack.
        algorithm: "best-fit" or "concat".
        window: for "best-fit", the samples that are packed together.
        too_long: what becomes of a sample of more than `seq_len` tokens: "error"; "skip" to leave it out; "truncate" to
            cut it off, for which `pack_collate` needs `seq_len` too; or "split" into parts of `seq_len`. "concat"
            splits in any case.
        seed: of the random order, together with the epoch.
        num_replicas: see `TokenBudget`.
        drop_last: leave out the last step if it has too few packs, and with "concat" the last pack if it is not full.

    Attributes:
        epoch: that `iter()` gives next.
        too_many: how many samples are longer than `seq_len`.
        left_out: how many tokens are in no pack, of samples that are left out or truncated.

    Raises:
        TypeError: the lengths are not whole numbers.
        ValueError: an argument is out of range, or a sample is too long.
    """

    def __init__(
        self,
        lengths: Any,
        seq_len: int,
        *,
        algorithm: Literal["best-fit", "concat"] = "best-fit",
        window: int = 1 << 20,
        too_long: TooLong = "error",
        seed: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
    ) -> None:
        super().__init__(seed, num_replicas, drop_last)
        if algorithm not in ("best-fit", "concat"):
            raise ValueError(f'algorithm must be "best-fit" or "concat", got {algorithm!r}')
        self.seq_len, self.window = check_whole("seq_len", seq_len, 1), check_whole("window", window, 1)
        self.algorithm = algorithm
        self.too_long = "split" if algorithm == "concat" else too_long
        given = lengths_of(lengths)
        self._samples = len(given)
        choices = ("error", "skip", "truncate", "split")
        self._kept, self.too_many = kept(given, seq_len, "seq_len", self.too_long, choices)
        self._lengths = given
        self._parts: tuple[Array, Array] | None = None  # where samples are split: of which, and its first token
        if self.too_many and self.too_long == "truncate":
            self._lengths = np.minimum(given, seq_len)
        if self.too_many and self.too_long == "split" and algorithm == "best-fit":
            self._lengths, self._parts = _split(given, seq_len)
        packed = self._lengths if self._kept is None else self._lengths[self._kept]
        self.left_out = int(given.sum(dtype=np.int64) - packed.sum(dtype=np.int64))

    @property
    def efficiency(self) -> float:
        """The tokens of this epoch's packs by their room: 1 without padding."""
        made = self._batches_of(self.epoch)
        return float(made.tokens.sum() / made.room.sum())

    def _batches(self, epoch: int) -> Batches:
        key = self.seed, epoch
        if self.algorithm == "concat":
            return _joined(self._lengths, self.seq_len, key, drop_last=self.drop_last)
        made = []
        for _, order, lengths in sorted_windows(self._lengths, self._kept, self.window, key):
            for numbers, long in zip(order, lengths, strict=True):
                packs = best_fit(long, self.seq_len)
                in_packs = numbers[np.argsort(packs, kind="stable")]
                made.append((in_packs, np.bincount(packs), np.bincount(packs, long).astype(np.int64)))
        samples, sizes, held = map(np.concatenate, zip(*made, strict=True))
        bounds = np.append(0, np.cumsum(sizes))
        take = taking(samples) if self._parts is None else _taking_parts(samples, *self._parts, self._lengths)
        return Batches(take, bounds, held, held, np.broadcast_to(self.seq_len, len(held)))

    def _facts(self) -> dict[str, str]:
        made = self._batches_of(self.epoch)
        long = f"{self.too_many:,} longer than {self.seq_len:,} tokens"
        how = {"skip": "left out", "truncate": "cut off", "split": "split", "error": ""}[self.too_long]
        return {
            "samples": f"{self._samples:,}" + f", {long}: {how}" * bool(self.too_many),
            "packs": f"{len(made.tokens):,} of {self.seq_len:,} tokens",
            "efficiency": f"{self.efficiency:.3%} of the room is used by {made.tokens.sum():,} tokens",
            "left out": f"{self.left_out:,} tokens",
            "steps": self._steps_in_words(),
        }

    def _panels(self) -> list[Panel]:
        tokens = {"tokens": self._batches_of(self.epoch).tokens}
        return [Panel("How full packs are", "tokens of a pack", "packs", tokens), *super()._panels()]


def best_fit(lengths: Array, room: int) -> Array:
    """Packs lengths by best-fit decreasing.

    Args:
        lengths: from the longest on; none above `room`.
        room: of a pack.

    Returns:
        The number of its pack for each, from 0 on.
    """
    rooms: list[int] = []  # those that open packs have left, in order
    open_packs: dict[int, list[int]] = {}  # which packs have that much left
    found = []
    opened = 0
    for length in lengths.tolist():
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            left = rooms[place]
            pack = open_packs[left].pop()
            if not open_packs[left]:
                del open_packs[left], rooms[place]
        else:
            left, pack = room, opened
            opened += 1
        found.append(pack)
        if left := left - length:
            if left not in open_packs:
                bisect.insort(rooms, left)
            open_packs.setdefault(left, []).append(pack)
    return np.array(found)


def _split(lengths: Array, most: int) -> tuple[Array, tuple[Array, Array]]:
    """Parts of at most so many tokens: their lengths, of which sample each is, and its first token."""
    counts = -(-lengths.astype(np.int64) // most)
    numbers = np.repeat(np.arange(len(lengths), dtype=narrow(len(lengths))), counts)
    begins = (np.arange(len(numbers)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return np.minimum(lengths[numbers] - begins, most), (numbers, begins)


def _taking_parts(samples: Array, numbers: Array, begins: Array, lengths: Array) -> Any:
    def take(begin: int, end: int) -> list[Any]:
        parts = samples[begin:end]
        firsts = begins[parts]
        return [*zip(numbers[parts].tolist(), firsts.tolist(), (firsts + lengths[parts]).tolist(), strict=True)]

    return take


def _joined(lengths: Array, seq_len: int, key: tuple[int, ...], *, drop_last: bool) -> Batches:
    """All samples in random order, cut every `seq_len` tokens; the bounds count tokens."""
    order = shuffled(np.arange(len(lengths)), len(lengths), *key).astype(narrow(len(lengths)))
    ends = np.cumsum(lengths[order], dtype=np.int64)  # of the samples in that order, in tokens
    total = int(ends[-1])

    def take(begin: int, end: int) -> list[Any]:
        first, last = np.searchsorted(ends, begin, "right"), np.searchsorted(ends, end, "left")
        numbers = order[first : last + 1]
        stops = ends[first : last + 1]
        starts = stops - lengths[numbers]
        cuts = zip(np.maximum(begin - starts, 0).tolist(), (np.minimum(end, stops) - starts).tolist(), strict=True)
        return [(number, *cut) for number, cut in zip(numbers.tolist(), cuts, strict=True)]

    bounds = np.arange(0, total + 1, seq_len)
    if bounds[-1] < total and not (drop_last and len(bounds) > 1):
        bounds = np.append(bounds, total)
    tokens = np.diff(bounds)
    return Batches(take, bounds, tokens, tokens, np.broadcast_to(seq_len, len(tokens)))
