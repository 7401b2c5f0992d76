"""Datasets that read another one, and have all by which a loader continues that other one.

Promise: a loader does for the wrapper what it would do for the dataset alone: it saves and loads states, and tells the
epoch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.utils.data import get_worker_info

from rayloader.errors import StateError
from rayloader.resume.snapshot import has_state

_NOTHING = object()


def check_stream(wrapper: str, stream: Any) -> None:
    """Checks that a wrapper can read something as a stream.

    Raises:
        TypeError: it cannot. Python would read a map-style dataset by its indices from 0 on, past its end if need be,
            and each worker all of it.
    """
    if not hasattr(type(stream), "__iter__"):
        raise TypeError(
            f"{wrapper} reads an iterable of samples, got {type(stream).__name__}, which has no __iter__; pass an "
            "IterableDataset, or let a sampler shuffle a map-style dataset"
        )


def pass_on(wrapper: Any, wrapped: Any) -> None:
    """Gives a dataset that reads another one the methods of that by which it has a state, or is told an epoch.

    What the wrapper itself remembers is in its iterator. What a subclass of the user's defines stays. They are
    attributes of the object: libraries ask classes, or objects without running code, for these methods.
    """
    for name in ("state_dict", "load_state_dict", "set_epoch"):
        if not hasattr(type(wrapper), name) and callable(method := getattr(wrapped, name, None)):
            setattr(wrapper, name, method)


def innermost(stream: Any) -> Any:
    """The stream that is read by rayloader's wrappers, if it is one of these."""
    while any(kind.__module__.startswith("rayloader.") for kind in type(stream).__mro__) and hasattr(stream, "stream"):
        stream = stream.stream
    return stream


class Numbered(Iterator[Any]):
    """Samples that can be found again by their numbers, so that a wrapper need not save them."""

    def numbers(self, samples: Any) -> Any:
        """An array of the numbers of samples that this iterator has given."""
        raise NotImplementedError

    def found(self, numbers: Any) -> list[Any]:
        """The samples of these numbers."""
        raise NotImplementedError


class Source(Iterator[Any]):
    """One reading of a stream, for a wrapper whose own iterator tells and loads its state.

    Args:
        stream: whose own state, if it has one, is told and loaded by the wrapper; see `pass_on`.

    Attributes:
        has_state: whether the stream has a state, or this reading of it. Otherwise the wrapper's iterator must have
            none: a loader then reads the stream again from its start.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._iterator = stream, iter(stream)
        self._ended = False
        self._told = getattr(get_worker_info(), "_reader", None)  # of the first samples, in a worker of rayloader's
        self.has_state = has_state(self._iterator) or has_state(stream)

    def __next__(self) -> Any:
        if self._ended:  # a stream is not asked again after its end, where it may begin anew
            raise StopIteration
        try:
            sample = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        if self._told is not None:
            self._told = self._told.note(sample)
        return sample

    def state_dict(self) -> dict[str, Any]:
        """The state of the reading; at its end that of the stream too."""
        return {
            "source": _told_by(self._iterator),
            "ended": self._ended,
            "end": _told_by(self._stream) if self._ended else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], wrapper: str, added: Collection[str]) -> None:
        """Continues from a state; the stream has loaded its own.

        Args:
            state: of the reading, with what the wrapper has added.
            wrapper: the name of its class.
            added: the names of that.

        Raises:
            StateError: it is a state of something else.
        """
        if not isinstance(state, Mapping) or not {"source", "ended", "end", *added} <= state.keys():
            raise StateError(
                f"this is not a state of a {wrapper}'s iterator: {state!r:.200}; load what its state_dict() gave"
            )
        if (state["source"] is None) == has_state(self._iterator):
            raise StateError(
                f"the state of a {wrapper} is of a stream whose iterator has a state, or has none, unlike the one "
                "here; make the stream as the one that was saved"
            )
        self._ended = state["ended"]
        if state["source"] is not None:
            self._iterator.load_state_dict(state["source"])
        # It may take over what it has loaded only when it is asked for a sample.
        if state["end"] is not None and next(self._iterator, _NOTHING) is not _NOTHING:
            self._stream.load_state_dict(state["end"])  # it has begun anew

    def saved(self, samples: list[Any]) -> Any:
        """What is saved of samples that were read, and not given: their numbers, or they themselves."""
        return self._iterator.numbers(samples) if isinstance(self._iterator, Numbered) else [*samples]

    def loaded(self, saved: Any) -> list[Any]:
        """The samples again."""
        return self._iterator.found(saved) if isinstance(self._iterator, Numbered) else [*saved]


def _told_by(obj: Any) -> Any:
    return obj.state_dict() if has_state(obj) else None
