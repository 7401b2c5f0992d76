"""Every private name of Hugging Face's `datasets` that rayloader uses: how a stream remembers a loaded position.

NOTE [Loaded positions]. An `IterableDataset` into which a position was loaded (`load_state_dict()`) begins each
iteration there until its epoch changes, and between two iterations reports the position at which the last one ended. A
program that loads a position wants that. Where rayloader loads one, for the rest of one epoch, the next epoch would
begin in its middle, or be empty.
"""

from __future__ import annotations

import sys
from typing import Any

from rayloader.needs import private_names_of


class LoadedPosition(dict[str, Any]):
    """A position that rayloader loads, and, as an attribute, the one that the program had loaded before.

    Attributes:
        before: that position, or None.
    """

    before: Any = None


def loadable(dataset: Any, state: Any) -> Any:
    """What to load into a dataset to bring it to this state, such that `begins` can undo it."""
    if not _is_stream(dataset):
        return state
    own = _own_position(dataset)
    if state is None:  # it was at the start of its iteration
        return own
    if not isinstance(state, dict):
        return state
    position = LoadedPosition(state)
    position.before = own
    return position


def begins(dataset: Any) -> None:
    """Makes a stream begin its next iteration where the program would have it begin, and report that position.

    It then reports None, as a new stream does: any other position belongs to one of the shards that are read, which
    differ by worker and are not known before.
    """
    if _is_stream(dataset):
        dataset._starting_state_dict = _own_position(dataset)
        dataset._state_dict = None


def _own_position(dataset: Any) -> Any:
    with private_names_of("datasets"):
        loaded = dataset._starting_state_dict
    return loaded.before if isinstance(loaded, LoadedPosition) else loaded


def _is_stream(dataset: Any) -> bool:
    module = sys.modules.get("datasets.iterable_dataset")
    return module is not None and isinstance(dataset, module.IterableDataset)
