"""`PackedStream`: a stream of token sequences whose lengths nobody knows beforehand, cut into packs of equal length."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from rayloader.errors import StateError
from rayloader.plans.inputs import check_whole
from rayloader.plans.packs import pack_collate
from rayloader.resume.snapshot import has_state

_FIELDS = ("input_ids", "labels", "position_ids", "seq_ids")


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """An iterable dataset of packs: the sequences of a stream one after the other, cut every `seq_len` tokens.

    Each worker packs what its own part of the stream gives; see `get_shard_info`. The iterator has a `state_dict()` of
    the number of sequences that it has read, the tokens of the open pack, and the state of the stream, or of its
    iterator, where that has one. Otherwise sequences are read again, and left out, when it is loaded.

    Args:
        stream: an iterable of sequences: tensors, arrays or lists of tokens, or dicts with them.
        seq_len: tokens of a pack.
        tokens: the name of the field of tokens, where sequences are dicts.
        drop_last: leave out the tokens after the last full pack; otherwise they are a shorter one, which does not fit
            into a batch with others.

    Yields:
        A dict of `input_ids`, `labels`, `position_ids` and `seq_ids`, each of shape (seq_len,), as `pack_collate` gives
        them: what is left of a sequence that was cut begins the next pack as a sequence of its own.
    """

    def __init__(self, stream: Any, seq_len: int, *, tokens: str = "input_ids", drop_last: bool = True) -> None:
        self.stream, self.seq_len = stream, check_whole("seq_len", seq_len)
        self.tokens, self.drop_last = tokens, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Tells the stream, if it wants to know."""
        if callable(tell := getattr(self.stream, "set_epoch", None)):
            tell(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return _Packs(self)


class _Packs(Iterator[dict[str, Tensor]]):
    """The packs of one reading of the stream."""

    def __init__(self, packed: PackedStream) -> None:
        self._packed = packed
        self._source = iter(packed.stream)
        self._read = 0  # sequences
        self._open: list[Tensor] = []  # the sequences of the open pack
        self._size = 0  # their tokens

    def __next__(self) -> dict[str, Tensor]:
        packed = self._packed
        while self._size < packed.seq_len:
            try:
                sequence = next(self._source)
            except StopIteration:
                if packed.drop_last or not self._size:
                    raise
                break
            self._read += 1
            self._add(sequence[packed.tokens] if isinstance(sequence, Mapping) else sequence)
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

    def _stateful(self) -> Any:
        return next((one for one in (self._source, self._packed.stream) if has_state(one)), None)

    def state_dict(self) -> dict[str, Any]:
        """The position: sequences read, tokens of the open pack, and the stream's own state, if it has one."""
        stateful = self._stateful()
        return {
            "read": self._read,
            "open": [sequence.tolist() for sequence in self._open],
            "stream": None if stateful is None else stateful.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Raises StateError if it is not one."""
        if not isinstance(state, Mapping) or not {"read", "open", "stream"} <= state.keys():
            raise StateError(
                f"this is not a state of a PackedStream's iterator: {state!r:.200}; load what its state_dict() gave"
            )
        self._open, self._size, self._read = [], 0, state["read"]
        for sequence in state["open"]:
            self._add(sequence)
        stateful = self._stateful()
        if (stateful is None) != (state["stream"] is None):
            raise StateError(
                "the state of a PackedStream is of a stream with a state of its own, or without, unlike the one here; "
                "make the stream as the one that was saved"
            )
        if stateful is None:
            next(itertools.islice(self._source, self._read, self._read), None)
            return
        stateful.load_state_dict(state["stream"])
        if stateful is self._packed.stream:
            self._source = iter(self._packed.stream)
