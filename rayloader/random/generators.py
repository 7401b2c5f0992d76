"""The random generators of a replica, as its pickler sends them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from rayloader.random.generator_kinds import KINDS, global_generators
from rayloader.transport.pickler import Special


def reduce_generator(obj: Any, reduced: Callable[[Any], Any]) -> Any:
    """How a replica's pickler reduces a generator: as usual (`reduced`), but for the global ones.

    These are pickled by name: a reference to one of them in the driver becomes one to the worker's, as after a fork.
    """
    for one, owner, name in global_generators():
        if obj is one:
            return getattr, (owner, name)
    if isinstance(obj, random.SystemRandom) and type(obj).__reduce__ is random.Random.__reduce__:
        return _without_state, (type(obj), vars(obj))
    return reduced(obj)


# For the pickler of a replica.
GENERATORS = Special(KINDS, reduce_generator)


def _without_state(kind: Any, attributes: dict[str, Any]) -> Any:
    generator = kind.__new__(kind)
    vars(generator).update(attributes)
    return generator
