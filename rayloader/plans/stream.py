"""`PackedStream`: a stream of token sequences whose lengths nobody knows beforehand, cut into packs of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from rayloader.plans.inputs import check_whole
from rayloader.plans.packs import pack_collate
from rayloader.resume.wrapped import Source, check_stream, pass_on

_FIELDS = ("input_ids", "labels", "position_ids", "seq_ids")


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
        ValueError: `seq_len` is no whole number, or too small.
        TypeError: `stream` is no iterable: a map-style dataset, for which there is `Packing`.
    """

    def __init__(self, stream: Any, seq_len: int, *, tokens: str = "input_ids", drop_last: bool = True) -> None:
        check_stream("PackedStream", stream)
        self.stream, self.seq_len = stream, check_whole("seq_len", seq_len)
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
        found = sequence if isinstance(sequence, Tensor) else torch.as_tensor(np.asarray(sequence))
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
