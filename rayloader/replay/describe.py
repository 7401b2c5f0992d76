"""What a state is, in plain types.

Promise: pure functions. A description holds everything that is in a state: what is long or of no meaning to a reader
(generators, the states of the user's own objects) by its size and a checksum, so that states with equal descriptions
continue in the same way.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch

from rayloader.random.generator_kinds import set_state
from rayloader.random.random_state import RandomState
from rayloader.resume.checkpoint import fits_any_ranks, fits_any_workers
from rayloader.resume.state import VERSION, LocalState, SavedWorker, State, Stream, as_saved, tasks_in


@as_saved()
def described(state: State) -> dict[str, Any]:
    """Everything that a state holds, in types that JSON knows."""
    return {
        "position": _position(state),
        "loader": state.fits._asdict(),
        "samplers": _samplers(state),
        "versions": {**state.versions},
        "skip_steps": [list(step) for step in state.skip_steps],
        "seeds": _seeds(state),
        "process": _process(state.process),
        "workers": _workers(state),
        "continues_on": {
            "no_workers": not state.num_workers or fits_any_workers(state),
            "workers": bool(state.num_workers) or fits_any_workers(state),
            "other_ranks": fits_any_ranks(state),
        },
        "version": VERSION,
        "bytes": len(json.dumps(state.pack(), default=str)),
    }


def _mark(content: Any) -> str:
    """A checksum, for what is too long to be shown."""
    return f"{zlib.crc32(content if isinstance(content, bytes) else repr(content).encode()):08x}"


def _opaque(content: bytes | None) -> dict[str, Any] | None:
    return None if content is None else {"bytes": len(content), "checksum": _mark(content)}


def _random(random: RandomState) -> dict[str, Any]:
    """The generators, by checksums of their states; torch's state also tells by which number it was seeded."""
    python, torch_, numpy, others, located = random.pack()
    named = {"python": python, "torch": torch_, "numpy": numpy}
    found: dict[str, Any] = {name: _mark(state) for name, state in named.items() if state is not None}
    if random.torch is not None:
        set_state(generator := torch.Generator(), random.torch)
        found["torch_seed"] = generator.initial_seed()
    if random.others:
        found["others"] = [_mark(state) for state in others[1:]]
    if random.located:
        found["found_in_objects"] = [_mark(one) for one in located]
    return found


def _position(state: State) -> dict[str, Any]:
    place = state.position
    found: dict[str, Any] = {
        "epoch": state.epoch,
        "between_epochs": state.is_between_epochs,
        "next_step": 0,
        "taken": state.taken,
    }
    if place is None:
        return found
    return {
        **found,
        "next_step": 0 if place.finished else place.next_task,
        "taken_ahead": list(place.ahead),
        "samples_skipped": place.skipped,
        "next_worker": place.next_worker,
        "draws": place.draws,
        "indices_checksum": f"{place.checksum:08x}",
        "drawn": place.drawn,
        "drawn_checksum": f"{place.drawn_checksum:08x}",
        "stream": _stream(place.stream),
    }


def _stream(stream: Stream | None) -> dict[str, Any] | None:
    if stream is None:
        return None
    begin = None if stream.begin is None else _random(stream.begin)
    return {"begin": begin, "state": _opaque(stream.told), "checksum": f"{stream.digest:08x}", "ended": stream.ended}


def _seeds(state: State) -> dict[str, Any]:
    found: dict[str, Any] = {"now": _random(state.now)}
    if (begin := state.begin) is not None:
        found |= {"base_seed": begin.base_seed, "shared_seed": begin.shared_seed, "epoch_of_workers": begin.epoch}
        found["order"] = _order(state)
        found["began_with_ranks"] = [len(stage.taken) for stage in begin.stages]
    return found


def _order(state: State) -> list[str]:
    """Checksums of the points of the epoch from which the sampler can be read again."""
    starts = () if state.begin is None else state.begin.starts
    return [_mark(((start.moment.random.pack(), start.moment.attributes), *start[1:4])) for start in starts]


def _samplers(state: State) -> list[dict[str, Any]]:
    """The samplers, the outermost first; the state of their own is the first one's that has one."""
    names = state.fits.sampler.split(" of ")
    found = [{"name": name, **simple} for name, simple in zip(names, state.sampler.attributes, strict=True)]
    if state.sampler.own is not None:
        found.append({"state": _opaque(state.sampler.own)})
    return found


def _process(process: LocalState | None) -> dict[str, Any] | None:
    if process is None:
        return None
    return {"generators": _random(process.random), "state": _opaque(process.dataset)}


def _workers(state: State) -> dict[str, Any]:
    place = state.position
    return {
        "num_workers": state.num_workers,
        "remember": state.num_workers > 0 and place is not None and place.remembers,
        "each": [] if place is None else [_worker(one) for one in place.workers],
    }


def _worker(worker: SavedWorker) -> dict[str, Any]:
    snapshot = worker.start.state
    found: dict[str, Any] = {
        "snapshot_after_step": None if snapshot is None else snapshot.last_task,
        "rebuilds": {f"{step}": f"{digest:08x}" for step, digest in tasks_in(worker.replay)},
    }
    if snapshot is not None:
        found |= {
            "tasks": snapshot.tasks,
            "exhausted": snapshot.exhausted,
            "generators": _random(snapshot.random),
            "dataset": _opaque(snapshot.dataset),
            "iterator": _opaque(snapshot.iterator),
        }
    if worker.start.before is not None:
        found["from_epoch_before"] = _mark([getattr(one, "task_id", one) for one in worker.start.before.entries])
    return found
