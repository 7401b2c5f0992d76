"""What is given to a command: a file with a state, or the states of all ranks; or the name of a loader.

A state may lie anywhere inside of a checkpoint. Nothing in such a file is run: `torch.load` reads tensors and plain
types only, and the tensors of a large checkpoint stay on disk. The module that a name is of is imported.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rayloader.errors import StateError
from rayloader.resume.state import FORMAT, State

_SHOWN = 20  # keys that an error lists


class SourceError(Exception):
    """What was given is not what a command needs; the text says why."""


def named(name: str) -> Any:
    """The object of a name.

    Args:
        name: "module:name", of a module that may lie in the working directory; or "file.py:name". The module is
            imported, so a script needs `if __name__ == "__main__":` around what it does.

    Raises:
        SourceError: there is none.
    """
    module, _, path = name.rpartition(":")
    if not module or not path:
        raise SourceError(f"an object must be named as module:name or file.py:name, got {name!r}")
    is_file = module.endswith(".py")
    file = Path(module).resolve()
    if is_file and not file.is_file():
        raise SourceError(f"{name} can't be found: there is no file {module}")
    folder, module = (str(file.parent), file.stem) if is_file else (os.getcwd(), module)
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    try:
        target = importlib.import_module(module)
        if is_file and Path(target.__file__ or "").resolve() != file:
            raise SourceError(f"{name} can't be found: there is another module {module}, {target.__file__}")
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise SourceError(f"{name} can't be found: {error}") from error
    return target


def made(name: str, **told: int) -> Any:
    """The loader or dataset of this name, or what a function or class of this name returns.

    Args:
        name: see `named`.
        **told: what the function is called with.

    Raises:
        SourceError: there is none, or no function with these arguments, or it has raised.
    """
    found = named(name)
    if not isinstance(found, type) and (hasattr(found, "__getitem__") or hasattr(found, "__iter__")):
        if told:
            raise SourceError(
                f"--rank and --world are for a function with the arguments rank and num_replicas, not {name}"
            )
        return found
    try:
        inspect.signature(found).bind(**told)
    except TypeError as error:
        raise SourceError(
            f"{name} must be a function that takes {' and '.join(told) or 'no arguments'}: {error}"
        ) from None
    try:
        return found(**told)
    except Exception as error:  # of the user's code
        raise SourceError(f"{name} raised {type(error).__name__}: {error}") from error


def load(path: str | Path, key: str = "") -> list[dict[str, Any]]:
    """The state that the file holds, or those of all ranks.

    Args:
        path: of a file that `torch.save` has written.
        key: which one, if it holds several: where in a checkpoint the state lies, as names and numbers with dots in
            between.

    Raises:
        SourceError: there is no such file, or no state in it, or several.
    """
    path = Path(path)
    try:
        path.open("rb").close()
    except IsADirectoryError:
        raise SourceError(
            f"{path} is a folder; name a file in it (Accelerate saves a loader's state as dl_state_dict.bin)"
        ) from None
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}") from None
    found = _chosen(dict(_states(_content(path))), path, key)
    return found if isinstance(found, list) else [found]


def _content(path: Path) -> Any:
    """The object in a file of `torch.save`."""
    is_zip = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if is_zip and (names := torch.serialization.get_unsafe_globals_in_checkpoint(path)):
            raise SourceError(
                f"{path} holds objects of classes that only a trusted file may load: {', '.join(sorted(names))}. If "
                "you trust it, load it with torch.load(..., weights_only=False), and save the loader's state alone"
            ) from None
        raise _unknown(path) from error
    except Exception as error:  # whatever a file of another kind makes torch's reader raise
        raise _unknown(path) from error


def _unknown(path: Path) -> SourceError:
    return SourceError(f"{path} is not a file of torch.save")


def _states(content: Any) -> Iterator[tuple[str, Any]]:
    """All states in a checkpoint, and the lists of those of all ranks, with their keys."""
    waiting, seen = [("", content)], set()
    while waiting:
        key, obj = waiting.pop()
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if _is_state(obj):
            yield key, obj
        elif _are_ranks(obj):
            yield key, [*obj]
        elif isinstance(obj, (dict, list, tuple)):
            items = obj.items() if isinstance(obj, dict) else enumerate(obj)
            inner = [(f"{key}.{name}".lstrip("."), one) for name, one in items if isinstance(one, (dict, list, tuple))]
            waiting += inner[::-1]  # so that they are found in their order


def _is_state(obj: Any) -> bool:
    return isinstance(obj, dict) and obj.get("format") == FORMAT


def _are_ranks(obj: Any) -> bool:
    """Whether these are the states of the ranks of one loader, rather than of several loaders."""
    if not isinstance(obj, (list, tuple)) or len(obj) < 2 or not all(map(_is_state, obj)):
        return False
    try:
        ranks = [State.load(one).fits for one in obj]
    except StateError:  # each of them is shown, or refused, by itself
        return False
    return {(fits.num_replicas, fits.rank) for fits in ranks} == {(len(obj), rank) for rank in range(len(obj))}


def _chosen(found: dict[str, Any], path: Path, key: str) -> Any:
    """The state that a key names, or the only one."""
    within = {name: state for name, state in found.items() if name == key or name.startswith(f"{key}.")}
    if not key or "" in found:  # a file that is a state itself needs no key
        within = found
    if len(within) == 1:
        return next(iter(within.values()))
    if not found:
        raise SourceError(f"{path} holds no state of a rayloader.DataLoader")
    keys = ", ".join([*found][:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
    what = f"{len(within)} states" if within else f"no state at {key}"
    raise SourceError(f"{path} holds {what}; choose one by --key: {keys}")
