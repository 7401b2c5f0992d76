"""Every private name of Hugging Face's `datasets` that rayloader uses: how a stream remembers a loaded position.

NOTE [Loaded positions]. An `IterableDataset` into which a position was loaded (`load_state_dict()`) begins each
iteration there until its epoch changes, and between two iterations reports the position at which the last one ended. A
program that loads a position wants that. Where rayloader loads one, for the rest of one epoch, the next epoch would
begin in its middle, or be empty. The same holds if the loader's dataset is of the user's own class, holds such streams,
and passes its own `state_dict()` and `load_state_dict()` on to them, at once or when it is iterated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from rayloader.errors import private_names_of
from rayloader.namespaces import attributes_in
from rayloader.random.search import ATOMS

# How many objects of a dataset are looked at, and how many may be in one container: larger ones hold samples.
_MOST, _MOST_IN_ONE = 1000, 100
# The position of the start: a stream begins there, because its own epoch is a number. What any other position contains
# belongs to the shards that a worker reads, which are not known before.
_START = {"examples_iterable": None, "epoch": None}


class LoadedPosition(dict[str, Any]):
    """A position that rayloader loads, and, as an attribute, the one that the program had loaded before.

    Attributes:
        before: that position, or None.
    """

    before: Any = None


@contextlib.contextmanager
def loading(dataset: Any) -> Iterator[None]:
    """The positions that its streams load meanwhile are rayloader's: `begins` will undo that."""
    before = [(stream, _own_position(stream)) for stream in _streams_in(dataset)]
    try:
        yield
    finally:
        for stream, own in before:
            loaded = stream._starting_state_dict
            if loaded == _START:
                stream._starting_state_dict = own
            elif loaded is not own and isinstance(loaded, dict) and not isinstance(loaded, LoadedPosition):
                stream._starting_state_dict = LoadedPosition(loaded)
                stream._starting_state_dict.before = own


def begins(dataset: Any) -> None:
    """Makes its streams begin their next iteration where the program would have it begin, and report that position."""
    for stream in _streams_in(dataset):
        stream._starting_state_dict = _own_position(stream)
        stream._state_dict = _START


def _own_position(stream: Any) -> Any:
    with private_names_of("datasets"):
        loaded = stream._starting_state_dict
    return loaded.before if isinstance(loaded, LoadedPosition) else loaded


def _streams_in(dataset: Any) -> list[Any]:
    """The streams of `datasets` that a stream is, or holds."""
    module = sys.modules.get("datasets.iterable_dataset")
    if module is None or not isinstance(dataset, IterableDataset):
        return []
    if isinstance(dataset, module.IterableDataset):
        return [dataset]
    found, objects = [], [dataset]
    seen = {id(dataset)}
    for obj in objects:  # the list grows meanwhile
        if issubclass(type(obj), module.IterableDataset):
            found.append(obj)
            continue
        held = [one for one in _held_by(obj) if type(one) not in ATOMS and id(one) not in seen]
        objects += held[: _MOST - len(objects)]
        seen.update(map(id, held))
    return found


def _held_by(obj: Any) -> Collection[Any]:
    """The contents of a container, or the attributes of anything else; calls no code of the user's."""
    if type(obj) in (list, tuple):
        held: Collection[Any] = obj
    else:
        held = dict.values(obj if issubclass(type(obj), dict) else attributes_in(obj) or {})
    return held if len(held) <= _MOST_IN_ONE else ()
