"""Packs of the samples of a batch, or of a stream, with the numbers that keep them apart in attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as padded
from torch.utils.data import Dataset, IterableDataset

from rayloader.options import check_whole
from rayloader.resume.wrapped import Source, check_stream, pass_on

IGNORED = -100  # the label that torch's cross entropy leaves out
_FIELDS = ("input_ids", "labels", "position_ids", "seq_ids")  # of a pack of a stream


def pack_collate(
    samples: Sequence[Any],
    *,
    fields: Sequence[str] | None = None,
    tokens: str = "input_ids",
    seq_len: int | None = None,
    pad: bool = False,
    pad_id: int = 0,
) -> dict[str, Any]:
    """Joins samples into one pack. For other arguments than these, use `functools.partial`.

    Args:
        samples: each a tensor, array or list of tokens, of shape (tokens,); or a dict that has them as `tokens`, and
            may have other fields.
        fields: of dicts, also to be joined, on the last dimension, which must be as long as the tokens. By default
            `labels`, and all tensors, arrays, and lists of numbers of that length.
        tokens: the name of the field of tokens.
        seq_len: samples are cut to so many tokens: as `Packing` counts them with too_long="truncate".
        pad: whether the pack is filled up to `seq_len`, by a sequence of `pad_id` whose labels are -100: other fields
            are filled with 0. All packs have one shape then, as compiled models like it.
        pad_id: see `pad`.

    Returns:
        A dict of `input_ids`, int64 of shape (tokens,); `labels`, the field of that name or else the tokens, in which
        the first one of each sequence is -100, since no token of its own sequence precedes it; `position_ids`, int64,
        from 0 in each sequence; `seq_ids`, int32, the number of the sequence in the pack, and -1 for padding;
        `cu_seqlens`, int32 of shape (sequences + 1,), where they begin and the last one ends, as FlashAttention's
        functions for sequences of varying length take it; `max_seqlen`, int; and the other fields.

    Raises:
        ValueError: a field has another length than the tokens; or the pack is longer than `seq_len`, with `pad`.
    """
    rows = [sample if isinstance(sample, Mapping) else {tokens: sample} for sample in samples]
    parts = [_tensor(row[tokens])[..., :seq_len] for row in rows]
    sizes = np.array([part.shape[-1] for part in parts])
    ids = rows[0][tokens]
    if fields is None:  # labels in any case: the tokens must not take their place without a word
        fields = [name for name, value in rows[0].items() if name == "labels" or _is_along(value, ids)]
    joined: dict[str, Any] = {"input_ids": torch.cat(parts, -1).long()}
    for name in fields:
        if name == tokens:
            continue
        along = [_tensor(row[name])[..., :seq_len] for row in rows]
        if (found := [part.shape[-1] for part in along]) != sizes.tolist():
            raise ValueError(
                f"each field must be as long as the tokens, {sizes.tolist()}, and {name!r} is {found} long; name the "
                "fields to be joined by fields="
            )
        joined[name] = torch.cat(along, -1)
    labels = joined.setdefault("labels", joined["input_ids"].clone())
    numbers = np.arange(len(sizes))
    total = int(sizes.sum())
    labels.index_fill_(-1, torch.from_numpy(np.cumsum(sizes) - sizes), IGNORED)
    if pad and (missing := (seq_len or 0) - total):
        if missing < 0:
            raise ValueError(f"a pack that is padded must fit into seq_len, got {total} tokens and seq_len={seq_len}")
        fill = {"input_ids": pad_id, "labels": IGNORED}
        joined = {name: padded(one, (0, missing), value=fill.get(name, 0)) for name, one in joined.items()}
        sizes, numbers, total = np.append(sizes, missing), np.append(numbers, -1), total + missing
    ends = np.cumsum(sizes)
    return {
        **joined,
        "position_ids": torch.from_numpy(np.arange(total) - np.repeat(ends - sizes, sizes)),
        "seq_ids": torch.from_numpy(np.repeat(numbers, sizes).astype(np.int32)),
        "cu_seqlens": torch.from_numpy(np.append(0, ends).astype(np.int32)),
        "max_seqlen": int(sizes.max()),
    }


class Cuts(Dataset[Any]):
    """A dataset that is asked for parts of samples: by `Packing` whose samples are cut.

    Args:
        dataset: map-style; its samples are tensors, arrays or lists of tokens, or dicts with them.
        tokens: the name of the field of tokens, where samples are dicts. Other tensors and arrays whose last dimension
            is as long, and lists of so many numbers, are cut with it.
    """

    def __init__(self, dataset: Any, tokens: str = "input_ids") -> None:
        self.dataset, self.tokens = dataset, tokens
        pass_on(self, dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, part: tuple[int, int, int] | int) -> Any:
        """A part of a sample: its number, and its first token and the one after its last; or a whole sample."""
        if isinstance(part, int):
            return self.dataset[part]
        number, begin, end = part
        sample = self.dataset[number]
        if not isinstance(sample, Mapping):
            return _cut(sample, begin, end)
        ids = sample[self.tokens]
        along = {name for name, value in sample.items() if name == self.tokens or _is_along(value, ids)}
        return {name: _cut(value, begin, end) if name in along else value for name, value in sample.items()}


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """An iterable dataset of packs: the sequences of a stream one after the other, cut every `seq_len` tokens.

    Each worker packs what its own part of the stream gives; see `get_shard_info`. Packs have a state if the stream has
    one, or its iterator; otherwise a loader that resumes reads the stream again from its start, as it would without
    packs.

    Args:
        stream: an iterable of sequences: tensors, arrays or lists of tokens, or dicts with them.
        seq_len: tokens of a pack.
        tokens: the name of the field of tokens, where sequences are dicts.
        drop_last: leave out the tokens after the last full pack; otherwise they are a shorter one, which does not fit
            into a batch with others.

    Yields:
        A dict of `input_ids`, `labels`, `position_ids` and `seq_ids`, each of shape (seq_len,), as `pack_collate` gives
        them: what is left of a sequence that was cut begins the next pack as a sequence of its own.

    Raises:
        ValueError: `seq_len` is too small.
        TypeError: `seq_len` is no whole number, or `stream` is no iterable: a map-style dataset, for which there is
            `Packing`.
    """

    def __init__(self, stream: Any, seq_len: int, *, tokens: str = "input_ids", drop_last: bool = True) -> None:
        check_stream("PackedStream", stream)
        self.stream, self.seq_len = stream, check_whole("seq_len", seq_len, 1)
        self.tokens, self.drop_last = tokens, drop_last
        pass_on(self, stream)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        source = Source(self.stream)
        return (_StatefulPacks if source.has_state else _Packs)(self, source)


class _Packs(Iterator[dict[str, Tensor]]):
    """The packs of one reading of the stream."""

    def __init__(self, packed: PackedStream, source: Source) -> None:
        self._packed, self._source = packed, source
        self._open: list[Tensor] = []  # the sequences of the open pack
        self._size = 0  # their tokens

    def __next__(self) -> dict[str, Tensor]:
        packed = self._packed
        for sequence in self._source if self._size < packed.seq_len else ():
            self._add(sequence[packed.tokens] if isinstance(sequence, Mapping) else sequence)
            if self._size >= packed.seq_len:
                break
        if not self._size or (packed.drop_last and self._size < packed.seq_len):
            raise StopIteration
        pack: list[Tensor] = []
        left = packed.seq_len
        while self._open and left:
            first, rest = self._open[0][:left], self._open[0][left:]
            self._open[:1] = [rest] if len(rest) else []
            pack.append(first)
            left -= len(first)
        self._size -= packed.seq_len - left
        made = pack_collate(pack)
        return {name: made[name] for name in _FIELDS}

    def _add(self, sequence: Any) -> None:
        found = _tensor(sequence)
        if len(found):
            self._open.append(found.long())
            self._size += len(found)


class _StatefulPacks(_Packs):
    """Those of a stream that has a state, or whose iterator has one: a `PackedStream` tells and loads the former."""

    def state_dict(self) -> dict[str, Any]:
        """The tokens of the open pack, and the state of the reading."""
        return {**self._source.state_dict(), "open": [sequence.tolist() for sequence in self._open]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state; the stream has loaded its own. Raises StateError if it is not one."""
        self._source.load_state_dict(state, "PackedStream", ["open"])
        self._open, self._size = [], 0
        for sequence in state["open"]:
            self._add(sequence)


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))


def _is_along(value: Any, tokens: Any) -> bool:
    """Whether a field has a value for each token: tensors and arrays on their last dimension, lists of numbers."""
    if isinstance(value, (list, tuple)):
        return len(value) == len(tokens) and {int, float, bool}.issuperset(map(type, value))
    shape = tuple(getattr(value, "shape", ()))
    return bool(shape) and shape[-1] == len(tokens)


def _cut(value: Any, begin: int, end: int) -> Any:
    return value[..., begin:end] if hasattr(value, "shape") else value[begin:end]
