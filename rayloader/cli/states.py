"""What a run has saved: `rayloader show` prints a state, and `rayloader replay` builds a batch again.

A state may lie anywhere inside of a checkpoint. Nothing in such a file is run: `torch.load` reads tensors and plain
types only, and the tensors of a large checkpoint stay on disk.
"""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from rayloader.cli.given import AsJson, CommandError, fail, made, out, print_json, shown
from rayloader.errors import RayloaderError, StateError
from rayloader.loader import DataLoader
from rayloader.rebuild import Rebuilt, rebuilt
from rayloader.resume.state import FORMAT, VERSION, State

Source = Annotated[Path, typer.Argument(help="a checkpoint with a state", show_default=False)]
Sources = Annotated[list[Path], typer.Argument(help="states, of which the nearest one counts", show_default=False)]
Key = Annotated[str, typer.Option(help="which state, if there are several: its place in the file, as loaders.train")]
LoaderName = Annotated[
    str,
    typer.Option("--loader", help="the run's, or what returns it: module:name or file.py:name", show_default=False),
]
Step = Annotated[int, typer.Option(help="number of the batch in its epoch, from 0", min=0, show_default=False)]
Epoch = Annotated[int | None, typer.Option(help="of the run, from 0; may be left out if there is only one", min=0)]
Rank = Annotated[int | None, typer.Option(help="passed to the function as rank=", min=0)]
World = Annotated[int | None, typer.Option(help="passed to the function as num_replicas=", min=1)]
Save = Annotated[Path | None, typer.Option(help="write the batch to this file, with torch.save")]

_LONG = 600  # characters of a part of a state that are printed
_WHOLE = 64  # characters of a text, and items of a list, that a description holds; of more a size and a checksum


def show(source: Source, key: Key = "", as_json: AsJson = False) -> None:
    """Print what is in a loader's state: its position, and what it fits."""
    try:
        states = [described(State.load(one)) for one in load(source, key)]
    except (CommandError, RayloaderError) as error:
        fail(error)
    if as_json:
        print_json(states if len(states) > 1 else states[0])
        return
    for name, value in states[0].items():
        if value is not None:
            text = json.dumps(value)
            text = text if len(text) <= _LONG else f"{text[:_LONG]}... (--json tells all)"
            differs = any(other[name] != value for other in states)
            out.print(f"[bold]{name:<12}[/]", shown(text + " (rank 0; --json tells the others)" * differs))


def described(state: State) -> dict[str, Any]:
    """Everything that a state holds, in types that JSON knows, after the epoch and step that it leads to."""
    fields_of_state = {name: _plain(value) for name, value in state._asdict().items()}
    return {"epoch": state.epoch, "step": state.step, **fields_of_state, "version": VERSION}


def _plain(value: Any) -> Any:
    """A part of a state: records by the names of their fields."""
    if value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= _WHOLE):
        return value
    if hasattr(value, "_asdict"):
        return {name: _plain(inner) for name, inner in value._asdict().items()}
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)) and len(value) <= _WHOLE:
        return [_plain(inner) for inner in value]
    content = value if isinstance(value, bytes) else repr(value).encode()
    return f"{len(content)} bytes, checksum {zlib.crc32(content):08x}"


def replay(
    source: Sources,
    loader: LoaderName,
    step: Step,
    epoch: Epoch = None,
    rank: Rank = None,
    world: World = None,
    key: Key = "",
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Build one batch of a run again, alone: bit for bit the one that the run delivered."""
    try:
        if save is not None and not save.parent.is_dir():
            raise CommandError(f"there is no folder {save.parent} for {save.name}; make it first")
        states = [State.load(one) for path in source for one in load(path, key)]
        epochs = {state.epoch for state in states}
        if epoch is None and len(epochs) > 1:
            raise CommandError(f"say which epoch by --epoch: the sources are of epochs {sorted(epochs)}")
        chosen = epochs.pop() if epoch is None else epoch
        given = {name: value for name, value in (("rank", rank), ("num_replicas", world)) if value is not None}
        if not isinstance(the_loader := made(loader, **given), DataLoader):
            raise CommandError(f"{loader} must be or return a rayloader.DataLoader, got {type(the_loader).__name__}")
        batch, indices, worker_id, digest, before = _built(the_loader, states, chosen, step)
        if save is not None:
            torch.save(batch, save)
    except (CommandError, RayloaderError) as error:
        fail(error)
    found = {
        "epoch": chosen,
        "step": step,
        "worker": worker_id,
        "digest": f"{digest:08x}",
        "built before it": before,
        "indices": _in_types_of_json(indices),
    }
    if as_json:
        print_json(found)
        return
    where = "in the program" if worker_id is None else f"of worker {worker_id}"
    out.print(f"Step {step:,} of epoch {chosen}, {where}, digest {digest:08x}")
    if indices is not None:
        out.print("indices:", shown(str(found["indices"])))


def _built(loader: Any, states: list[State], epoch: int, step: int) -> Rebuilt:
    """The batch; an exception of the dataset's is told without the loader's own lines."""
    try:
        return rebuilt(loader, states, epoch, step)
    except RayloaderError:
        raise
    except Exception as error:
        text = f"step {step} raised, and no batch came, as in the run: {type(error).__name__}: {error}"
        raise CommandError(text) from None


def _in_types_of_json(indices: Any) -> Any:
    """The indices of a batch; as text where they are not whole numbers."""
    indices = indices.tolist() if isinstance(indices, torch.Tensor) else indices
    if isinstance(indices, (list, tuple)) and all(isinstance(one, int) for one in indices):
        return [*indices]
    return None if indices is None else repr(indices)


# ---- the state in a file


def load(path: str | Path, key: str = "") -> list[dict[str, Any]]:
    """The state that the file holds, or those of all ranks.

    Args:
        path: of a file that `torch.save` has written.
        key: which one, if it holds several: where in a checkpoint the state lies, as names and numbers with dots in
            between.

    Raises:
        CommandError: there is no such file, or no state in it, or several.
    """
    found = dict(_states(_content(path)))
    # A file that is a state itself needs no key.
    is_chosen = {name: not key or not name or f"{name}.".startswith(f"{key}.") for name in found}
    chosen = [state for name, state in found.items() if is_chosen[name]]
    if len(chosen) == 1:
        return chosen[0] if isinstance(chosen[0], list) else chosen
    if not found:
        raise CommandError(f"{path} holds no state of a rayloader.DataLoader")
    what = f"{len(chosen)} states" if chosen else f"no state at {key}"
    raise CommandError(f"{path} holds {what}; choose one by --key: {', '.join(found)}")


def _content(path: str | Path) -> Any:
    """The object in a file of `torch.save`."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise CommandError(f"{path} can't be read: {error.strerror}; name a file that torch.save has written") from None
    except pickle.UnpicklingError:
        names = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))
        raise CommandError(
            f"{path} holds objects of classes that only a trusted file may load: {names}. If you trust it, load it "
            "with torch.load(..., weights_only=False), and save the loader's state alone"
        ) from None
    except Exception as error:  # whatever a file of another kind makes torch's reader raise
        raise CommandError(f"{path} is not a file of torch.save in its present format, which is a zip file") from error


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
            inner = [(f"{key}.{name}".lstrip("."), one) for name, one in items]
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
