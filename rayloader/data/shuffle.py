"""`ShuffleBuffer`: the samples of any stream in a random order, drawn from some that were read beforehand.

Promise: each sample comes once. The order depends on the stream, on the size, and on a number that the loader's seed
gives for each worker and epoch. The state of an iterator holds the samples of the buffer, so it is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rayloader.errors import StateError
from rayloader.options import check_whole
from rayloader.resume.wrapped import Source, check_stream, pass_on

_T = TypeVar("_T")


class ShuffleBuffer(IterableDataset[_T]):
    """The samples of a stream in a random order: each is drawn from `size` of them, which the worker has read.

    Each worker has a buffer for its own part of the stream; see `get_shard_info`. It holds `size` samples, and so does
    a state: shuffle before samples become large, paths before they are images. If the stream has a state, or its
    iterator, a loader that resumes reads on where reading had stopped; otherwise it reads the stream again from its
    start, as it would without the buffer.

    The order is another one in each epoch. It is drawn from torch's global generator when an epoch begins, which
    loaders seed for each worker and epoch: `torch.manual_seed`, or the loader's `generator`, fixes it.

    Args:
        stream: an iterable of samples.
        size: how many samples the buffer holds, at least 1.

    Raises:
        ValueError: `size` is too small.
        TypeError: `size` is no whole number, or `stream` is no iterable: a map-style dataset.
    """

    def __init__(self, stream: Iterable[_T], size: int) -> None:
        check_stream("ShuffleBuffer", stream)
        self.stream, self.size = stream, check_whole("size of a ShuffleBuffer", size, 1)
        pass_on(self, stream)

    def __iter__(self) -> Iterator[_T]:
        source = Source(self.stream)
        return (_StatefulSamples if source.has_state else _Samples)(self, source)


class _Samples(Iterator[Any]):
    """The samples of one reading of the stream."""

    def __init__(self, shuffled: ShuffleBuffer[Any], source: Source) -> None:
        self._size, self._source = shuffled.size, source
        self._buffer: list[Any] = []
        self._generator = np.random.default_rng(int(torch.empty((), dtype=torch.int64).random_()))

    def __next__(self) -> Any:
        for sample in self._source:  # until there is one more than the buffer holds
            self._buffer.append(sample)
            if len(self._buffer) > self._size:
                break
        if not self._buffer:
            raise StopIteration
        place = self._generator.integers(min(self._size, len(self._buffer)))
        self._buffer[place], self._buffer[-1] = self._buffer[-1], self._buffer[place]
        return self._buffer.pop()


class _StatefulSamples(_Samples):
    """Those of a stream that has a state, or whose iterator has one."""

    def state_dict(self) -> dict[str, Any]:
        """The samples of the buffer, and the states of its generator and of the reading."""
        generator = self._generator.bit_generator.state
        buffer = self._source.saved(self._buffer)
        return {**self._source.state_dict(), "buffer": buffer, "size": self._size, "generator": generator}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state. Raises StateError if it is not one, or of a buffer of another size."""
        self._source.load_state_dict(state, "ShuffleBuffer", ["buffer", "size", "generator"])
        if state["size"] != self._size:
            raise StateError(
                f"the state of a ShuffleBuffer was saved with size={state['size']!r}, and here it is {self._size}; "
                "make the buffer as the one that was saved"
            )
        self._buffer = self._source.loaded(state["buffer"])
        self._generator.bit_generator.state = state["generator"]
