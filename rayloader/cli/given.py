"""What commands are given, the name of a loader or a dataset, and where they print.

The module that a name is of is imported; what it and the user's code print goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from rayloader import __version__
from rayloader.loader import DataLoader
from rayloader.options import OwnArguments, Workers

LoaderKind = Literal["torch", "rayloader"]

_OWN = {*OwnArguments.__annotations__}
# torch's arguments that a loader without workers refuses, and those that say how indices are grouped.
_OF_WORKERS = {"prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"}
_ORDER = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}
# Those that ask for actors, or are refused beside workers="fork".
_OF_ACTORS = {"ray_remote_args", "arenas", "multiprocessing_context", "fresh_processes"}


class CommandError(Exception):
    """What was given is not what a command needs; the text says why."""


def named(name: str) -> Any:
    """The object of a name.

    Args:
        name: "module:name", of a module that may lie in the working directory; or "file.py:name". The module is
            imported, so a script needs `if __name__ == "__main__":` around what it does.

    Raises:
        CommandError: there is none.
    """
    module, _, path = name.rpartition(":")
    if not module or not path:
        raise CommandError(f"an object must be named as module:name or file.py:name, got {name!r}")
    is_file = module.endswith(".py")
    file = Path(module).resolve()
    if is_file and not file.is_file():
        raise CommandError(f"{name} can't be found: there is no file {module}")
    folder, module = (str(file.parent), file.stem) if is_file else (os.getcwd(), module)
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    try:
        target = importlib.import_module(module)
        if is_file and Path(target.__file__ or "").resolve() != file:
            raise CommandError(f"{name} can't be found: there is another module {module}, {target.__file__}")
        for part in path.split("."):
            target = getattr(target, part)
    except (ImportError, AttributeError) as error:
        raise CommandError(f"{name} can't be found: {error}") from error
    return target


def made(name: str, **arguments: int) -> Any:
    """The loader or dataset of this name, or what a function or class of this name returns.

    Args:
        name: see `named`.
        **arguments: of the function.

    Raises:
        CommandError: there is none, or it has raised, perhaps because it takes other arguments.
    """
    found = named(name)
    is_made = not isinstance(found, type) and (hasattr(found, "__getitem__") or hasattr(found, "__iter__"))
    if is_made and not arguments:
        return found
    try:
        return found(**arguments)
    except Exception as error:  # of the user's code
        call = f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
        raise CommandError(f"{call} raised {type(error).__name__}: {error}") from error


class Subject:
    """The loaders that a command tries.

    Args:
        given: a loader, of torch's class or ours; or a dataset, which they load in batches of 32 samples.
    """

    def __init__(self, given: Any) -> None:
        is_loader = isinstance(given, TorchDataLoader)
        self._arguments = _arguments(given) if is_loader else {"dataset": given, "batch_size": 32}

    def loader(self, kind: LoaderKind, num_workers: int, workers: Workers | None = None) -> Any:
        """The loader of so many workers; of rayloader's also what these are, None: as given."""
        arguments, without = self._arguments, set() if num_workers else _OF_WORKERS
        if kind == "torch":
            without = without | _OWN
        elif workers is not None:
            arguments = {**arguments, "workers": workers}
            without = without | _OF_ACTORS if workers == "fork" else without
        loader_class: Any = TorchDataLoader if kind == "torch" else DataLoader
        known = {name: value for name, value in arguments.items() if name not in without}
        return loader_class(num_workers=num_workers, **known)


def _arguments(loader: Any) -> dict[str, Any]:
    """Those with which such a loader is made; but for `num_workers`."""
    names = {*inspect.signature(TorchDataLoader.__init__).parameters} - {"self", "num_workers", *_ORDER}
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if isinstance(loader, DataLoader):
        # What a rank reads of a stream it asks by itself; the samplers are those of the rank already.
        names |= _OWN - {"skip_steps", *(() if is_iterable else ("num_replicas", "rank", "seed"))}
    if is_iterable:
        names |= {"batch_size", "drop_last"}
    elif loader.batch_sampler is not None:
        names.add("batch_sampler")
    else:
        names |= {"batch_size", "sampler"}  # the former is None
    return {name: getattr(loader, name) for name in names}


# ---- where commands print, and how they end

out, err = Console(highlight=False), Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else")]


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        out.print(f"rayloader {__version__}")
        raise typer.Exit


def before_each(
    version: Annotated[
        bool, typer.Option("--version", help="print the version, and end", callback=_tell_version, is_eager=True)
    ] = False,
) -> None:
    """Runs before each command."""


@contextlib.contextmanager
def prints_to_standard_error() -> Iterator[None]:
    """Reserves the standard output, of this process and of its children, for the answers."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(answers, 1)
        os.close(answers)


def shown(text: str) -> str:
    """A text that may come from a file: no part of it moves the terminal's cursor, or is markup of rich's."""
    parts = [char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text]
    return escape("".join(parts))


def print_json(content: Any) -> None:
    """Prints JSON to the standard output."""
    print(json.dumps(content, indent=2))


def in_full(error: Exception) -> str:
    """What an error says, after its type if that is not ours, with the notes that name the sample or the remedy."""
    kind = "" if isinstance(error, (CommandError, RuntimeError)) else f"{type(error).__name__}: "
    return "\n".join([f"{kind}{error}", *getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())])


def fail(error: Exception) -> NoReturn:
    """Says what is wrong, and ends the command with code 2."""
    err.print("[red]rayloader:[/]", shown(in_full(error)))
    raise typer.Exit(2) from error
