"""The state of a loader without workers, besides its samplers: the objects that do the work in this process.

Promise: independent of Ray. `capture` and `restore` handle the program's own generators and dataset between two
batches; `Stream` is the iterator of an iterable dataset in the middle of an epoch.
"""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rayloader import plain_state
from rayloader._compat_datasets import loading
from rayloader.errors import StateError
from rayloader.random.generator_kinds import distinct, suit
from rayloader.random.generators import find_generators
from rayloader.random.named_generators import NamedGenerators
from rayloader.random.random_state import RandomState
from rayloader.resume.seal import Parts
from rayloader.resume.snapshot import dump_state, has_state, load_state


def generators_of(loader: Any, parts: Parts | None = None) -> list[Any]:
    """The random generators that the user's objects hold, and those that the program's code behind them names.

    Args:
        loader: whose dataset and `collate_fn` they are.
        parts: of earlier states: generators that code names are searched again only after a change.
    """
    objects = loader.dataset, loader.collate_fn
    named = (parts or Parts()).once("named", lambda: NamedGenerators(*objects))
    return distinct([*find_generators(objects), *named.look()])


def capture(loader: Any, parts: Parts) -> dict[str, Any]:
    """The generators, global ones and the dataset's, and the dataset's own state.

    Args:
        loader: whose dataset it is.
        parts: of earlier states.

    Raises:
        StateError: the dataset's state could not be saved.
    """
    random = RandomState.capture(generators_of(loader, parts))
    packed = parts.part("process", random, random.pack, RandomState.equals)
    return {"random": packed, "dataset": pack_object(told_by(loader.dataset))}


def restore(loader: Any, packed: dict[str, Any]) -> None:
    """Restores them.

    Raises:
        StateError: the dataset holds other generators than the one that was saved.
    """
    generators, random = generators_of(loader), RandomState.unpack(packed["random"])
    if random.others is not None and not suit(generators, random.others):
        raise StateError(
            f"the state is of a dataset and collate_fn with {len(random.others)} random generators of their own, these "
            f"have {len(generators)}, or others; create them like those that were saved, with all their generators "
            "(one that a module, class or object creates only on first use does not exist yet: create it before "
            "load_state_dict()), or give the dataset state_dict() and load_state_dict()"
        )
    random.restore(generators)
    with loading(loader.dataset):
        load_state(loader.dataset, unpack_object(packed["dataset"]))


def depends_on_the_past(packed: dict[str, Any]) -> bool:
    """Whether batches that are seeded one by one depend on earlier batches."""
    return packed["dataset"] is not None or bool(RandomState.unpack(packed["random"]).others)


@dataclass(slots=True)
class Stream:
    """The iterator of the dataset, with what a resumption must know about it.

    Attributes:
        begin: the generators before it was created; None if it need not be read again.
        iterator: if it has a state; None if it has none, or if a state was loaded and no iterator created from it yet.
        told: the state of such an iterator when the loader's state was saved.
        digest: of the batches of a stream that must be read again.
        ended: whether it has ended in the middle of the last batch.
    """

    begin: RandomState | None = None
    iterator: Any = None
    told: bytes | None = None
    digest: int = 0
    ended: bool = False

    def pack(self, parts: Parts) -> dict[str, Any]:
        """The stream as part of a state; `parts`: of the states of the same position."""
        told = self.told if self.iterator is None else told_by(self.iterator)
        return {
            "begin": None if self.begin is None else parts.part("begin", self.begin, self.begin.pack),
            "told": pack_object(told),
            "digest": self.digest,
            "ended": self.ended,
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> Stream:
        """The inverse of `pack`."""
        begin = None if packed["begin"] is None else RandomState.unpack(packed["begin"])
        return cls(begin, None, unpack_object(packed["told"]), packed["digest"], packed["ended"])


def told_by(obj: Any) -> bytes | None:
    """The `state_dict` of an object of the user's, pickled; None if it has none."""
    if not has_state(obj):
        return None
    try:
        return dump_state(obj)
    except Exception:  # the user's own
        raise StateError(f"{type(obj).__name__} could not save its state:\n{traceback.format_exc()}") from None


def pack_object(told: bytes | None) -> dict[str, Any] | None:
    """An object's own state, as part of a state."""
    return None if told is None else {"state": plain_state.pack(pickle.loads(told))}


def unpack_object(packed: dict[str, Any] | None) -> bytes | None:
    """The inverse of `pack_object`."""
    return None if packed is None else cloudpickle.dumps(plain_state.unpack(packed["state"]))
