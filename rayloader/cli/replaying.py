"""The command that builds a batch of a run again: `rayloader replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from rayloader.cli import sources
from rayloader.cli.inspecting import Key
from rayloader.cli.sources import AsJson, SourceError, err, fail, out, print_json, shown
from rayloader.errors import RayloaderError
from rayloader.loader import DataLoader
from rayloader.replay.rebuild import Rebuilt, Reconstruction
from rayloader.resume.state import State

Sources = Annotated[
    list[Path],
    typer.Argument(help="states, of which the nearest one before the step counts", show_default=False),
]
LoaderName = Annotated[
    str,
    typer.Option(
        "--loader",
        help="the run's loader, or a function that returns it: module:name or file.py:name",
        show_default=False,
    ),
]
Step = Annotated[int, typer.Option(help="number of the batch in its epoch, from 0", min=0, show_default=False)]
Epoch = Annotated[int | None, typer.Option(help="of the run, from 0; may be left out if there is only one", min=0)]
Rank = Annotated[int | None, typer.Option(help="passed to the function as rank=", min=0)]
World = Annotated[int | None, typer.Option(help="passed to the function as num_replicas=", min=1)]
Save = Annotated[Path | None, typer.Option(help="write the batch to this file, with torch.save")]


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
            raise SourceError(f"there is no folder {save.parent} for {save.name}; make it first")
        states = [State.load(one) for path in source for one in sources.load(path, key)]
        chosen = _epoch(states) if epoch is None else epoch
        _check_sources(states, chosen, rank)
        rebuilding = Reconstruction(_made(loader, rank, world), states, chosen, step)
        if rebuilding.before:
            err.print(f"Built before step {step:,}: {rebuilding.before:,} of its worker's batches.")
        rebuilt = _built(rebuilding, step)
        found = _outcome(rebuilt, chosen, step, rebuilding.before)
        if save is not None:
            torch.save(rebuilt.batch, save)
    except (SourceError, RayloaderError) as error:
        fail(error)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _check_sources(states: list[State], epoch: int, rank: int | None) -> None:
    """Raises SourceError unless there is a state of this epoch and rank."""
    if epoch not in (epochs := {state.epoch for state in states}):
        raise SourceError(f"the sources have no state of epoch {epoch}, but of epochs {sorted(epochs)}")
    ranks = {state.fits.rank for state in states if state.fits.rank is not None}
    if ranks and rank is not None and rank not in ranks:
        raise SourceError(f"the sources are of ranks {sorted(ranks)}, and not of rank {rank}")


def _epoch(states: list[State]) -> int:
    """The only epoch that the sources are of."""
    if len(epochs := {state.epoch for state in states}) != 1:
        raise SourceError(f"say which epoch by --epoch: the sources are of epochs {sorted(epochs)}")
    return epochs.pop()


def _made(name: str, rank: int | None, world: int | None) -> Any:
    """The loader of this name, or the one that a function of this name returns."""
    made = sources.made(
        name, **{key: value for key, value in (("rank", rank), ("num_replicas", world)) if value is not None}
    )
    if not isinstance(made, DataLoader):
        raise SourceError(f"{name} must be or return a rayloader.DataLoader, got {type(made).__name__}")
    return made


def _built(rebuilding: Reconstruction, step: int) -> Rebuilt:
    """The batch; an exception of the dataset's is told without the loader's own lines."""
    try:
        return rebuilding.run()
    except RayloaderError:
        raise
    except Exception as error:
        raise SourceError(
            f"step {step} raised, and no batch came, as in the run: {type(error).__name__}: {error}"
        ) from None


def _outcome(rebuilt: Rebuilt, epoch: int, step: int, before: int) -> dict[str, Any]:
    """What is told of the batch, in types that JSON knows."""
    indices = rebuilt.indices.tolist() if isinstance(rebuilt.indices, torch.Tensor) else rebuilt.indices
    plain = isinstance(indices, (list, tuple)) and all(isinstance(one, int) for one in indices)
    return {
        "epoch": epoch,
        "step": step,
        "worker": rebuilt.worker_id,
        "digest": f"{rebuilt.digest:08x}",
        "built before it": before,
        "indices": None if indices is None else [*indices] if plain else repr(indices),
    }


def _print(found: dict[str, Any]) -> None:
    where = "in the program" if found["worker"] is None else f"of worker {found['worker']}"
    out.print(f"Step {found['step']:,} of epoch {found['epoch']}, {where}, digest {found['digest']}")
    if found["indices"] is not None:
        out.print("indices:", shown(str(found["indices"])))
