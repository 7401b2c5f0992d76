"""The state of a loader without workers, besides its samplers: the objects that do the work in this process.

Promise: independent of Ray. `capture` and `restore` handle the program's own generators and dataset between two
batches.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from typing import Any

from rayloader._compat_datasets import loading
from rayloader.errors import StateError
from rayloader.namespaces import is_own_module, namespace_of, own_modules
from rayloader.random.generator_kinds import set_state
from rayloader.random.placing import Located, import_modules, located
from rayloader.random.random_state import RandomState
from rayloader.random.search import Found, in_words, search
from rayloader.resume.snapshot import dump_state, has_state, load_state
from rayloader.resume.state import Process


def held_in(loader: Any) -> list[Found]:
    """The random generators that a loader's dataset and `collate_fn` hold, and those of the program's modules."""
    main = sys.modules.get("__main__")
    own = [("__main__", namespace_of(main))] if main is not None and is_own_module(main) else []
    return search(_objects_of(loader), [*own_modules(), *own])


def _objects_of(loader: Any) -> dict[str, Any]:
    return {"dataset": loader.dataset, "collate_fn": loader.collate_fn}


def generators_of(loader: Any) -> list[Any]:
    """These generators, without the paths to them."""
    return [one.generator for one in held_in(loader)]


def capture_random(loader: Any) -> RandomState:
    """The states of the global generators, and of these."""
    return RandomState.capture([])._replace(located=located(held_in(loader)))


def restore_random(loader: Any, random: RandomState) -> None:
    """Restores them, as far as they are there."""
    random.restore([])
    for one, generator in _here(loader, random):
        if one.is_like(generator):
            set_state(generator, one.state)


def _here(loader: Any, random: RandomState) -> list[tuple[Located, Any]]:
    """The saved generators, each with the one at its place; None if there is none."""
    import_modules(random.located or ())
    here = {path: one.generator for one in held_in(loader) for path in one.paths}
    return [(one, next((here[path] for path in one.paths if path in here), None)) for one in random.located or ()]


def _check(loader: Any, random: RandomState) -> None:
    """Raises StateError if the dataset and `collate_fn` hold other generators than those that were saved."""
    unlike = [one.paths[0] for one, generator in _here(loader, random) if not one.is_like(generator)]
    saved = {path for one in random.located or () for path in one.paths}
    new = [path for found in held_in(loader) for path in found.paths if path not in saved]
    if held := [path for path in (*unlike, *new) if path[0][0] == "object"]:
        raise StateError(
            f"the state does not fit the random generators of dataset and collate_fn: {in_words(held[0])} is missing "
            "here or in the state, or of another kind; create both like those that were saved, with all their "
            "generators (one that an object creates only on first use does not exist yet: create it before "
            "load_state_dict()), or give the dataset state_dict() and load_state_dict()"
        )
    if unlike:
        warnings.warn(
            f"the state has the random generator {in_words(unlike[0])}, which is missing here, or of another kind: if "
            "batches depend on it, they are others than those of the saved run; create it before load_state_dict()",
            stacklevel=5,
        )


def capture(loader: Any) -> Process:
    """The generators, global ones and the dataset's, and the dataset's own state.

    Raises:
        StateError: the dataset's state could not be saved.
    """
    return Process(capture_random(loader), told_by(loader.dataset))


def restore(loader: Any, saved: Process) -> None:
    """Restores them.

    Raises:
        StateError: the dataset and `collate_fn` hold other generators than those that were saved.
    """
    _check(loader, saved.random)
    restore_random(loader, saved.random)
    with loading(loader.dataset):
        load_state(loader.dataset, saved.dataset)


def told_by(obj: Any) -> bytes | None:
    """The `state_dict` of an object of the user's, pickled; None if it has none."""
    if not has_state(obj):
        return None
    try:
        return dump_state(obj)
    except Exception:  # the user's own
        raise StateError(f"{type(obj).__name__} could not save its state:\n{traceback.format_exc()}") from None
