"""`Packing`: samples joined into packs of a fixed number of tokens, so that next to nothing is padded."""

from __future__ import annotations

import bisect
from typing import Any, Literal

import numpy as np

from rayloader.options import check_whole
from rayloader.plans.plan import Array, Batches, BatchPlan, Facts, Panel, shuffled, taking
from rayloader.plans.sample_lengths import kept, lengths_of, narrow, sorted_windows

TooLong = Literal["error", "skip", "truncate", "split"]


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

    def _facts(self) -> Facts:
        made, (steps, panels) = self._batches_of(self.epoch), self._facts_of_steps()
        long = f"{self.too_many:,} longer than {self.seq_len:,} tokens"
        how = {"skip": "left out", "truncate": "cut off", "split": "split", "error": ""}[self.too_long]
        lines = {
            "samples": f"{self._samples:,}" + f", {long}: {how}" * bool(self.too_many),
            "packs": f"{len(made.tokens):,} of {self.seq_len:,} tokens",
            "efficiency": f"{self.efficiency:.3%} of the room is used by {made.tokens.sum():,} tokens",
            "left out": f"{self.left_out:,} tokens",
            "steps": steps,
        }
        tokens = {"tokens": made.tokens}
        return lines, [Panel("How full packs are", "tokens of a pack", "packs", tokens), *panels]


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
