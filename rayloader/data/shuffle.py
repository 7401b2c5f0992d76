"""`ShuffleBuffer`: the samples of any stream in a random order, drawn from some that were read beforehand.

Promise: the order depends on the stream, the size, the seed, the epoch and the number of the worker alone, on no
generator of the program. Each sample is drawn from at least `size`, until the stream ends. States are exact.

NOTE [The pool]. A pool holds samples, and two lists of places among them: the samples that come next, in their order,
and the buffer. When nothing comes next, a block of samples is read and joins the buffer, all of these are permuted, and
as many as the buffer cannot hold come next. So each sample is drawn from those of the buffer and a block, and a
permutation of NumPy's takes the place of a draw for each sample. Samples may be rows of a table; see parquet.py.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from rayloader.errors import RayloaderError, StateError
from rayloader.host.shard_info import get_shard_info
from rayloader.resume.snapshot import pass_on
from rayloader.resume.wrapped import Source

_T = TypeVar("_T")
_Array = np.ndarray[Any, Any]
if TYPE_CHECKING:
    _DatasetOf = IterableDataset
else:  # as in loader.py: what parameters torch's classes have may change
    _DatasetOf = {_T: IterableDataset}

# A block is this share of the buffer: permuting all of it then takes less than a microsecond for each sample, and the
# samples of a block are no more than a trainer can wait for.
_SHARE = 64


class Pool:
    """Samples, and which of them come next; see NOTE [The pool].

    Args:
        size: of the buffer; 0: samples come in the order in which they were read.
        key: of the random numbers.
        samples: none: an empty list, or an empty table.
        take: gives those at some places.
        join: puts two of them together.

    Attributes:
        samples: those that were read and not given, and perhaps some that were.
        generator: of the random numbers.
    """

    def __init__(
        self,
        size: int,
        key: list[int],
        samples: Any,
        take: Callable[[Any, _Array], Any],
        join: Callable[[Any, Any], Any],
    ) -> None:
        self._size, self.samples, self._take, self._join = size, samples, take, join
        self.generator = np.random.default_rng(key)
        self._next = self._buffer = np.empty(0, np.int64)  # places
        self._at = 0  # in `_next`

    @property
    def coming(self) -> _Array:
        """The places of those that come next."""
        return self._next[self._at :]

    @property
    def waiting(self) -> _Array:
        """The places of those in the buffer."""
        return self._buffer

    def give(self, count: int) -> _Array:
        """The places of the next samples, which are given now."""
        self._at += count  # whatever is raised later: the next ones are others
        return self._next[self._at - count : self._at]

    def add(self, block: Any, count: int) -> None:
        """Adds samples; with none, the stream has ended, and the buffer comes next."""
        kept = np.concatenate([self.coming, self._buffer])
        first = len(self.coming)
        self.samples = self._join(self._take(self.samples, kept), block)
        drawn = np.arange(first, len(kept) + count)
        if self._size:
            drawn = self.generator.permutation(drawn)
        given = max(0, len(drawn) - self._size) if count else len(drawn)
        self._next, self._at = np.concatenate([np.arange(first), drawn[:given]]), 0
        self._buffer = np.sort(drawn[given:])

    def fill(self, samples: Any, coming: int, count: int) -> None:
        """Holds these, of which so many come next, and the others are in the buffer."""
        self.samples = samples
        self._next, self._buffer = np.split(np.arange(count), [coming])
        self._at = 0


class ShuffleBuffer(_DatasetOf[_T], Generic[_T]):
    """The samples of a stream in a random order: each is drawn from at least `size` that the worker has read.

    Each worker has a buffer of what its own part of the stream gives; see `get_shard_info`. Put it before what makes
    samples large, such as decoding: the worker holds `size` samples, and so does a state. If the stream has a state, or
    its iterator, resuming reads on where reading had stopped; otherwise a loader that resumes reads the stream again
    from its start, as it would without the buffer::

        stream = rayloader.ShuffleBuffer(Lines(paths), 10_000)
        loader = rayloader.DataLoader(stream, batch_size=32, num_workers=2)
        for epoch in range(3):
            loader.set_epoch(epoch)  # each epoch has another order

    Args:
        stream: an iterable of samples.
        size: how many samples the buffer holds, at least 1.
        seed: of the order.

    Attributes:
        epoch: of which `iter()` gives the order; see `set_epoch`.

    Raises:
        ValueError: a number that is none, or is too small.
    """

    def __init__(self, stream: Any, size: int, *, seed: int = 0) -> None:
        self.stream = stream
        self.size, self.seed = whole("size of a ShuffleBuffer", size, 1), whole("seed of a ShuffleBuffer", seed, 0)
        self.epoch = 0
        pass_on(self, stream)
        self.set_epoch = self._set_epoch

    def _set_epoch(self, epoch: int) -> None:
        """Sets the epoch, on which the order depends, also for the stream; `DataLoader.set_epoch` calls it."""
        self.epoch = whole("epoch of a ShuffleBuffer", epoch, 0)
        if callable(told := getattr(self.stream, "set_epoch", None)):
            told(epoch)
