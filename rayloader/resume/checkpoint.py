"""The user's position in a loader's stream: saved as a state, and loaded again.

Promise: a state consists of types that JSON knows (except for the results of a dataset's or sampler's own
`state_dict`), and contains everything needed to continue the same stream: the generators of this process from before
the epoch, how much of it the user has taken, and a snapshot of each worker. A state that does not fit is refused.
"""

from __future__ import annotations

import copy
import itertools
import operator
import reprlib
import warnings
from typing import Any

from rayloader.errors import StateError
from rayloader.random.random_state import RandomState
from rayloader.resume import local_state
from rayloader.resume.local_state import pack_object, unpack_object
from rayloader.resume.position import Checksums, Position, Start
from rayloader.resume.samplers import RANK, Moment, Samplers, pack_attributes
from rayloader.resume.seal import Parts, check_seal, checksum, sealed
from rayloader.resume.snapshot import WorkerState
from rayloader.resume.worker_parts import new_worker
from rayloader.sampling import redeal
from rayloader.sampling.sharding import order_of

FORMAT, VERSION = "rayloader", 11
KEYS = {"format", "version", "num_workers", "fits", "now", "sampler", "process", "position", "redeal", "seal"}
# Batches taken of the epoch in progress, by torchdata's name: Accelerate lowers it if it has fetched batches
# that are not dispatched to other processes yet.
TAKEN = "_num_yielded"
# What a state and a loader must have in common: other values of these mean another stream.
_FITS = ("batch_size", "drop_last", "seeding", "scheduling", "in_order")
_FITTING = operator.attrgetter(*_FITS)


def make_state(loader: Any, position: Position | None, num_workers: int) -> dict[str, Any]:
    """The state of a loader.

    Args:
        loader: the loader.
        position: of its last iterator; None: it has not begun one.
        num_workers: the number of workers of the loader's next epoch.

    Raises:
        StateError: the state of the dataset or the sampler could not be saved.
    """
    packed, stateful = None, False
    if position is None:
        parts, samplers = Parts(), Samplers(loader)
    else:
        parts, samplers = position.parts, position.samplers_of(loader)
        with position.lock:
            stateful = position.stateful
            if not position.finished or (loader.persistent_workers and position.num_workers == num_workers):
                packed = position.pack()
    fits = samplers, _length(loader), loader._dataset_kind, loader._ranks, *_FITTING(loader)
    state = {
        "format": FORMAT,
        "version": VERSION,
        "num_workers": num_workers if packed is None else position.num_workers,  # type: ignore[union-attr]
        "fits": parts.part("fits", fits, lambda: _fits(loader, samplers), operator.eq),
        **_program(loader, samplers, parts, stateful=stateful, asked=position is not None),
        "position": packed,
        "redeal": None,
        TAKEN: _taken(packed),
    }
    return sealed(state, KEYS)


def _taken(position: dict[str, Any] | None) -> int:
    return 0 if position is None or position["finished"] else position["delivered"]


def still(loader: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The state of a loader that has loaded one, and has not begun to iterate since."""
    sampler = state["sampler"]
    program = _program(loader, Samplers(loader), Parts(), stateful=sampler["tells"], asked=sampler["asked"])
    return sealed({**copy.deepcopy(state), **program}, KEYS)


def _program(loader: Any, samplers: Samplers, parts: Parts, *, stateful: bool, asked: bool) -> dict[str, Any]:
    """The program's own part: the current generators and samplers; without workers the dataset too."""
    own, now, tells = samplers.own_state(), samplers.random(), stateful or samplers.is_stateful(None)
    if own.error:
        raise StateError(f"the sampler could not save its state:\n{own.error}")
    return {
        "now": parts.part("now", now, now.pack, RandomState.equals),
        "sampler": parts.part(
            "sampler",
            (own.sampler, samplers, tells),
            lambda: {
                "own": pack_object(own.sampler),
                "attributes": pack_attributes(samplers.attributes()),
                "progress": samplers.progress(),
                "tells": tells,
                "asked": asked,
            },
            operator.eq,
        ),
        "process": None if loader.num_workers else local_state.capture(loader, parts),
    }


def _now(state: dict[str, Any]) -> Moment:
    """The state of the samplers when the state was saved."""
    return Moment.unpack((state["now"], state["sampler"]["attributes"]))


def load(loader: Any, state: Any) -> dict[str, Any]:
    """Restores everything that is the program's own; see NOTE [What a state moves].

    Returns:
        The state, for the next `iter()`.

    Raises:
        StateError: the state does not fit the loader.
    """
    if isinstance(state, list):
        state = redealt(loader, state)
    progress = check_state(loader, state)
    _check_workers(loader, state, loader.num_workers)
    samplers, own = Samplers(loader), unpack_object(state["sampler"]["own"])
    if loader.num_workers == 0 and state["process"] is not None:
        local_state.restore(loader, state["process"])
    is_between = is_between_epochs(state)
    if is_between:
        samplers.load_between_epochs(own)
    else:
        samplers.load(own)
    samplers.restore(_now(state), progress)
    if is_between and state["sampler"]["asked"] and not state["sampler"]["tells"]:
        _warn_of_more(loader, samplers)
    accepted: dict[str, Any] = copy.deepcopy(state)
    return accepted


def is_between_epochs(state: dict[str, Any]) -> bool:
    """Whether the next `iter()` begins an epoch."""
    return state["redeal"] is None and (state["position"] is None or state["position"]["finished"])


def _warn_of_more(loader: Any, samplers: Samplers) -> None:
    """In the middle of an epoch a sampler that does not reproduce its draws is an error; here nothing is drawn."""
    if samplers.keep_more(loader.dataset, [] if loader.num_workers else local_state.generators_of(loader)):
        warnings.warn(
            f"the sampler ({samplers.name}) gives another order each time that it is asked, with the same random "
            "generators, numbers, texts and booleans: what else its order depends on is not in the state, so the "
            "next epoch may have another order than in the saved run; give the sampler state_dict() and "
            "load_state_dict(), or set_epoch() by which it draws",
            stacklevel=4,
        )


def goes_on(loader: Any, state: dict[str, Any] | None, num_workers: int) -> tuple[dict[str, Any] | None, int]:
    """The part of a state's position that a loader of `num_workers` continues, and with how many workers.

    The rest of an epoch depends on the workers that began it. The next epoch has new workers, of the loader's own
    number; persistent ones of the same number continue. If the batches do not depend on the workers, the loader's
    own number applies at once.
    """
    if state is not None:
        _check_workers(loader, state, num_workers)
    position = state["position"] if state is not None else None
    if state is None or position is None or (position["finished"] and not loader.persistent_workers):
        return None, num_workers
    if state["num_workers"] == num_workers:
        return position, num_workers
    is_map = state["fits"]["dataset_kind"] == "map"
    if loader.seeding == "batch" and is_map and not any(worker["remembers"] for worker in position["workers"]):
        epoch = position["begin"]["epoch"]
        new = WorkerState(epoch=epoch) if epoch and not position["finished"] else None
        workers: list[Any] = [new_worker(new) for _ in range(num_workers)]
        return {**position, "workers": workers, "next_worker": position["next_task"] % max(1, num_workers)}, num_workers
    return (None, num_workers) if position["finished"] else (position, state["num_workers"])


def _check_workers(loader: Any, state: dict[str, Any], num_workers: int) -> None:
    """Raises StateError if a state with workers is for a loader without, or vice versa, and that matters.

    Without workers the samples draw from the program's own generators.
    """
    if bool(state["num_workers"]) == bool(num_workers):
        return
    what = f"the state is of a loader with num_workers={state['num_workers']}, this one has {num_workers}"
    remedy = "create the loader with workers, or without, like the one that was saved"
    if loader.seeding != "batch":
        raise StateError(
            f"{what}: without workers the samples draw from the program's own random generators, and with workers each "
            f'worker has a stream of its own; {remedy}. With seeding="batch" both give the same batches'
        )
    position, process = state["position"], state["process"]
    past = any(worker["remembers"] for worker in position["workers"]) if position is not None else False
    if process is not None:
        past = past or local_state.depends_on_the_past(process)
    if state["fits"]["dataset_kind"] == "iterable" or past:
        raise StateError(
            f"{what}: its dataset is a stream, or has a state or random generators of its own, which the process that "
            f"does the work has; {remedy}"
        )


def redealt(loader: Any, states: list[Any]) -> dict[str, Any]:
    """One state for this rank, from those of all ranks, whose number may have been different.

    Raises:
        StateError: they do not belong together, or not to this loader.
    """
    samplers = Samplers(loader)
    part, own = samplers.part, _ranks(loader, samplers)
    if not own:
        raise StateError(
            "a list of states is for a loader that is one rank's, with num_replicas and rank, or with torch's "
            "DistributedSampler; load the one state of this loader"
        )
    for state in states:
        check_state(loader, state, any_rank=True)
    states = sorted(states, key=lambda state: state["fits"]["rank"])
    worlds = {state["fits"]["num_replicas"] for state in states}
    if worlds != {len(states)} or [state["fits"]["rank"] for state in states] != list(range(len(states))):
        raise StateError(
            f"a list must hold one state of each rank, got ranks {[state['fits']['rank'] for state in states]} of "
            f"{sorted(worlds)}"
        )
    if len(states) == own["num_replicas"]:
        return states[own["rank"]]  # type: ignore[no-any-return]
    is_outermost = part is not None and (part is loader.sampler or part is samplers.index_sampler)
    if loader._dataset_kind or not is_outermost or any(state["sampler"]["tells"] for state in states):
        raise StateError(
            f"the states are of {len(states)} ranks, and this loader is one of {own['num_replicas']}: the number can "
            "change where the loader itself divides a sampler's samples or batches (num_replicas and rank, or "
            "torch's DistributedSampler), and the sampler has no state_dict(). Other loaders, those of iterable "
            "datasets too, continue only with as many ranks"
        )
    positions = [state["position"] for state in states]
    state = make_state(loader, None, states[0]["num_workers"])
    # A rank that has read the sampler knows what it has drawn from its generators, which is the same in all ranks.
    lead = next((rank for rank, position in enumerate(positions) if position is not None and position["draws"]), 0)
    state["now"], state["sampler"]["attributes"] = samplers.of_this_rank(_now(states[lead])).pack()
    for name in ("progress", "asked"):
        state["sampler"][name] = states[lead]["sampler"][name]
    if all(position is None or position["finished"] for position in positions):
        return sealed(state, KEYS)
    if any(position is None for position in positions) or len({checksum(_epoch_of(p)) for p in positions}) > 1:
        raise StateError("the states are of different epochs; save them at the same step of every rank")
    assert part is not None
    _, stages = _epoch_of(positions[lead])
    if not stages and not any(position["draws"] for position in positions):
        return sealed(state, KEYS)  # the epoch begins when the sampler is read
    first = Start.unpack(positions[lead]["begin"]["starts"][0])
    start = samplers.of_this_rank(first.drawing or first.moment)
    with samplers.at(start):
        order = order_of(part)
    size = loader.batch_size
    for rank, position in enumerate(positions):
        expected = {
            position["next_task"]: position["checksum"],
            position["drawn"]: position["drawn_checksum"],
        }
        checksums = Checksums(expected)
        before = [redeal.Stage(taken) for taken in stages]
        share = redeal.share(order, before, len(states), rank, drop_last=part.drop_last)
        for indices in itertools.islice(redeal.in_batches(share, size, drop_last=loader.drop_last), max(expected)):
            checksums.add(indices)
        if not checksums.as_expected:
            raise StateError(
                f"the sampler did not reproduce its indices, those that rank {rank} got before its state was saved; "
                "create dataset and sampler (seed, shuffle, drop_last) like those that were saved. If they are alike, "
                "the ranks had drawn different orders, by generators of the sampler that were seeded differently"
            )
    taken = [
        [(0, p["next_task"] * (size or 1)), *((t * (size or 1), (t + 1) * (size or 1)) for t in p["ahead"])]
        for p in positions
    ]
    return sealed({**state, "redeal": {"start": start.pack(), "stages": [*stages, taken]}}, KEYS)


def _epoch_of(position: dict[str, Any]) -> tuple[int | None, list[list[redeal.Ranges]]]:
    begin = position["begin"]
    return Start.unpack(begin["starts"][0]).moment.epoch, begin["stages"]


def check_state(loader: Any, state: Any, *, any_rank: bool = False) -> list[list[str]]:
    """Raises StateError unless the state fits the loader; with `any_rank` it may be another rank's.

    Returns:
        For each of the loader's samplers, the attributes that the state restores.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise StateError(f"this is not a state of a rayloader.DataLoader: {reprlib.repr(state)}")
    if state.get("version") != VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, this rayloader reads {VERSION}; use the one that wrote it"
        )
    check_seal(state, KEYS, TAKEN)
    taken = _taken(state["position"])
    if (dispatched := state[TAKEN]) != taken:
        raise StateError(
            f"the state says that {taken} batches were taken, and {TAKEN}={dispatched!r} dispatched: with "
            "dispatch_batches=True (Accelerate's default for iterable datasets) one process fetches the batches of "
            "all; use dispatch_batches=False, or save between two epochs"
        )
    samplers = Samplers(loader)
    saved, own = state["fits"], _fits(loader, samplers)
    for name, value in own.items():
        if saved.get(name) != value and not (any_rank and name in RANK):
            raise StateError(
                f"the state is of a loader with {name}={saved.get(name)!r}, this one has {value!r}: its batches would "
                "not be the rest of the same stream; create the loader like the one that was saved"
                + (", or load the list of all ranks' states" if name in RANK else "")
            )
    sampler = state["sampler"]
    return samplers.check(_now(state), sampler["progress"], tells=sampler["tells"], any_rank=any_rank)


def _fits(loader: Any, samplers: Samplers) -> dict[str, Any]:
    kind = "iterable" if loader._dataset_kind else "map"
    fits = {name: getattr(loader, name) for name in _FITS}
    ranks = _ranks(loader, samplers)
    return {
        **fits,
        "dataset_kind": kind,
        "dataset_length": _length(loader),
        "sampler": samplers.name,
        **ranks,
    }


def _length(loader: Any) -> int | None:
    try:
        return len(loader.dataset) if not loader._dataset_kind else None
    except TypeError:  # a map-style dataset need not have a length
        return None


def _ranks(loader: Any, samplers: Samplers) -> dict[str, int]:
    """The loader's rank and number of ranks; empty if it is not one of several."""
    told: Any = samplers.part if samplers.part is not None else loader._ranks
    return {} if told is None else {name: getattr(told, name) for name in RANK}
