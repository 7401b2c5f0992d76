"""The command that builds a batch of a run again: `rayloader replay`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.progress import Progress
from rich.table import Table

from rayloader.cli import rates, sources
from rayloader.cli.console import AsJson, err, fail, out, print_json, shown
from rayloader.cli.inspecting import Key
from rayloader.cli.parts import parts_in
from rayloader.cli.sources import SourceError
from rayloader.errors import RayloaderError
from rayloader.loader import DataLoader
from rayloader.replay.rebuild import Rebuilt, Reconstruction, rebuilt_in_fork
from rayloader.resume.state import State
from rayloader.task import Outcome

if TYPE_CHECKING:
    from rayloader.replay.provenance import Log

Sources = Annotated[
    list[Path],
    typer.Argument(
        help="states, of which the nearest one before the step counts; a provenance log", show_default=False
    ),
]
LoaderName = Annotated[
    str,
    typer.Option(
        "--loader", help="module:name of the run's loader, or of a function that returns it", show_default=False
    ),
]
Step = Annotated[int | None, typer.Option(help="number of the batch in its epoch, from 0", min=0, show_default=False)]
Epoch = Annotated[int | None, typer.Option(help="of the run, from 0; may be left out if there is only one", min=0)]
Rank = Annotated[int | None, typer.Option(help="passed to the function as rank=", min=0)]
World = Annotated[int | None, typer.Option(help="passed to the function as num_replicas=", min=1)]
Save = Annotated[Path | None, typer.Option(help="write the batch to this file, with torch.save")]
Verify = Annotated[
    float | None,
    typer.Option(help="build this share of the epoch's batches, and compare them with the log", min=0.0, max=1.0),
]


def replay(
    source: Sources,
    loader: LoaderName,
    step: Step = None,
    epoch: Epoch = None,
    rank: Rank = None,
    world: World = None,
    key: Key = "",
    save: Save = None,
    verify: Verify = None,
    as_json: AsJson = False,
) -> None:
    """Build one batch of a run again, alone: bit for bit the one that the run delivered."""
    try:
        if (step is None) == (verify is None):
            raise SourceError("say which batch to build, by --step, or which share to compare, by --verify")
        if save is not None and not save.parent.is_dir():
            raise SourceError(f"there is no folder {save.parent} for {save.name}; make it first")
        states, log = _read(source, key)
        chosen = _epoch(states, log) if epoch is None else epoch
        if log is not None and chosen in log.epochs:
            states += map(State.load, log.states_of(chosen))
        _check_sources(states, log, chosen, rank)
        made = _made(loader, rank, world)
        if step is None:
            _verify(made, states, chosen, log, verify or 0.0, as_json)
            return
        rebuilt, before = _rebuilt(made, states, chosen, step, log)
        found = _outcome(rebuilt, chosen, step, before)
        if save is not None:
            torch.save(rebuilt.batch, save)
    except (SourceError, RayloaderError, rates.RateError, LookupError) as error:
        fail(error)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _check_sources(states: list[State], log: Log | None, epoch: int, rank: int | None) -> None:
    """Raises SourceError unless there is a state of this epoch and rank."""
    if not any(state.epoch == epoch for state in states):
        epochs = {state.epoch for state in states} | {*(log.epochs if log is not None else ())}
        raise SourceError(f"the sources have no state of epoch {epoch}, but of epochs {sorted(epochs)}")
    ranks = {state.fits.rank for state in states if state.fits.rank is not None}
    if ranks and rank is not None and rank not in ranks:
        raise SourceError(f"the sources are of ranks {sorted(ranks)}, and not of rank {rank}")


def _read(paths: list[Path], key: str) -> tuple[list[State], Log | None]:
    """The states in these files, and the log, if there is one."""
    states: list[State] = []
    log: Any = None
    for path in paths:
        found = sources.load(path, key)
        if isinstance(found, (dict, list)):
            states += map(State.load, [found] if isinstance(found, dict) else found)
        elif log is not None:
            raise SourceError(f"one log at most, got {log.path} and {path}")
        else:
            log = found
    return states, log


def _epoch(states: list[State], log: Log | None) -> int:
    """The only epoch that the sources are of."""
    epochs = {state.epoch for state in states} or {*(log.epochs if log is not None else ())}
    if len(epochs) != 1:
        raise SourceError(f"say which epoch by --epoch: the sources are of epochs {sorted(epochs)}")
    return epochs.pop()


def _made(name: str, rank: int | None, world: int | None) -> Any:
    """The loader of this name, or the one that a function of this name returns."""
    made = rates.named(name)
    told = {key: value for key, value in (("rank", rank), ("num_replicas", world)) if value is not None}
    if not isinstance(made, DataLoader) and callable(made):
        try:
            inspect.signature(made).bind(**told)
        except TypeError as error:
            raise SourceError(
                f"{name} must be a function that takes {' and '.join(told) or 'no arguments'}, as --rank and --world "
                f"say: {error}"
            ) from None
        made = made(**told)
    elif told:
        raise SourceError(f"--rank and --world are for a function with the arguments rank and num_replicas, not {name}")
    if not isinstance(made, DataLoader):
        raise SourceError(f"{name} must be or return a rayloader.DataLoader, got {type(made).__name__}")
    return made


def _rebuilt(loader: Any, states: list[State], epoch: int, step: int, log: Log | None) -> tuple[Rebuilt, int]:
    """The batch, and how many were built before it."""
    rebuilding = Reconstruction(loader, states, epoch, step, log)
    before = rebuilding.before
    if not before:
        return _built(rebuilding, step), 0
    err.print(f"Built before step {step:,}: {before:,} of its worker's batches.")
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task("building", total=before)
        return _built(rebuilding, step, lambda built: progress.update(task, completed=built)), before


def _built(rebuilding: Reconstruction, step: int, progress: Callable[[int], object] = int) -> Rebuilt:
    """The batch; an exception of the dataset's is told without the loader's own lines."""
    try:
        return rebuilding.run(progress)
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
        "compared with the log": rebuilt.is_compared,
        "built before it": before,
        "indices": None if indices is None else [*indices] if plain else repr(indices),
        "parts": parts_in(rebuilt.batch),
    }


def _print(found: dict[str, Any]) -> None:
    where = "in the program" if found["worker"] is None else f"of worker {found['worker']}"
    proof = "the log's" if found["compared with the log"] else "not compared with a log"
    out.print(f"Step {found['step']:,} of epoch {found['epoch']}, {where}, digest {found['digest']} ({proof})")
    if found["indices"] is not None:
        out.print("indices:", shown(str(found["indices"])))
    table = Table("part", "kind", "min", "max", "mean", "std", "NaN", "inf")
    for part in found["parts"]:
        numbers = [part.get(name) for name in ("least", "most", "mean", "deviation")]
        cells = ["" if one is None else f"{one:.4g}" for one in numbers]
        cells += ["" if (one := part.get(name)) is None else f"{one:,}" for name in ("nans", "infinite")]
        table.add_row(shown(part["part"]), shown(part["kind"]), *cells)
    out.print(table)


def _verify(loader: Any, states: list[State], epoch: int, log: Log | None, share: float, as_json: bool) -> None:
    """Builds a random share of an epoch's batches again; each of them, and those before it, must be the log's."""
    if log is None:
        raise SourceError("--verify compares with a provenance log, and none is given")
    if not share:
        raise SourceError("--verify must be a share of the batches above 0, and at most 1")
    rows = log.steps_of(epoch)
    pairs = zip(rows["step"].to_pylist(), rows["outcome"].to_pylist(), strict=True)
    steps = [step for step, outcome in pairs if outcome == Outcome.BATCH]
    chosen = sorted(random.sample(steps, min(len(steps), max(1, round(share * len(steps))))))
    with Progress(console=err, transient=True) as progress:
        for step in progress.track(chosen, description="comparing"):
            rebuilt_in_fork(loader, states, epoch, step, log)
    if as_json:
        print_json({"epoch": epoch, "compared": chosen, "same": True})
    else:
        out.print(f"Built again: {len(chosen):,} of {len(steps):,} batches of epoch {epoch}; all are the log's.")
