"""Saves and loads the user's position in a loader's stream, and refuses a state that does not fit.

Promise: a state contains everything needed to continue the same stream: the generators of this process from before
the epoch, how much of it the user has taken, and a snapshot of each worker. Without workers it contains the objects
that do the work in this process: the program's generators and the dataset's own state. What does not fit changes
nothing.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from rayloader._compat import loading_streams
from rayloader.errors import StateError
from rayloader.random.generators import RandomState
from rayloader.random.search import search
from rayloader.resume.digest import drawn
from rayloader.resume.position import Position
from rayloader.resume.ranks import in_batches, order_of, share
from rayloader.resume.samplers import EpochBegin, Moment, Samplers, SamplerState, Start, ranks_in
from rayloader.resume.saved import saved_place
from rayloader.resume.snapshot import WorkerState, has_state, load_state, own_state_of
from rayloader.resume.state import (
    Fits,
    LocalState,
    SavedPlace,
    SavedWorker,
    State,
    WorkerStart,
    as_saved,
)
from rayloader.task import SkipSteps, Step

# The arguments that make a DistributedSampler this rank's; other ranks may continue, see `ranks.py`.
_RANK = ("num_replicas", "rank")
_OF_RANK = (*_RANK, "num_samples", "total_size")
_END = object()


def make_state(loader: Any, position: Position | None, num_workers: int) -> dict[str, Any]:
    """The state of a loader.

    Args:
        loader: the loader.
        position: of its last iterator; None: it has not begun one.
        num_workers: the number of workers of the loader's next epoch.

    Raises:
        StateError: the state of the dataset or the sampler could not be saved.
    """
    if position is None:
        skips = SkipSteps(loader.skip_steps).in_order
        return _state(loader, Samplers(loader), num_workers, skip_steps=skips).pack()
    samplers, place = Samplers(loader), None
    with position.lock:
        stateful = position.stateful
        if not position.finished or (loader.persistent_workers and position.num_workers == num_workers):
            place, num_workers = saved_place(position), position.num_workers
        epoch, skips = position.epoch_of_run + position.finished, position.skips.in_order
    if position.follows_break and not position.delivered:
        warnings.warn(
            "this state was saved before the first batch of an epoch that follows one that was broken off: if the "
            "stream's state_dict() tells its old position until it is asked for a sample, the resumed epoch begins "
            "there. Save after the first batch, or use persistent workers",
            stacklevel=4,
        )
    state = _state(
        loader,
        samplers,
        num_workers,
        place,
        loaded=position.loaded,
        epoch=epoch,
        skip_steps=skips,
        stateful=stateful,
    )
    return state.pack(position.packed)


def still(loader: Any, state: State) -> dict[str, Any]:
    """The state of a loader that has loaded one, and has not begun to iterate since."""
    loaded = None if state.process is None else state.process.dataset
    program = _state(loader, Samplers(loader), state.num_workers, loaded=loaded, stateful=state.sampler.tells)
    return state._replace(now=program.now, sampler=program.sampler, process=program.process).pack()


def _state(
    loader: Any,
    samplers: Samplers,
    num_workers: int,
    place: SavedPlace | None = None,
    *,
    loaded: bytes | None = None,
    epoch: int = 0,
    skip_steps: tuple[Step, ...] = (),
    stateful: bool = False,
) -> State:
    """The state of a loader at this place.

    Args:
        loader: the loader.
        samplers: its own.
        num_workers: that the batches depend on.
        place: the position in the epoch.
        loaded: see `Position.loaded`.
        epoch: see `State`.
        skip_steps: see `State`.
        stateful: whether the sampler has a state.
    """
    own = samplers.own_state()
    if own.error:
        raise StateError(f"the sampler could not save its state:\n{own.error}")
    return State(
        num_workers,
        _fits(loader, samplers),
        samplers.capture(),
        SamplerState(own.sampler, samplers.progress(), stateful or samplers.is_stateful(None)),
        None if loader.num_workers else LocalState(capture_random(loader), loaded or own_state_of(loader.dataset)),
        place,
        epoch=epoch,
        skip_steps=skip_steps,
    )


def load(loader: Any, state: State | list[State]) -> State:
    """Restores everything that is the program's own; see NOTE [What a state moves].

    Args:
        loader: that goes on from there.
        state: its own, or those of all ranks.

    Returns:
        The state, for the next `iter()`.

    Raises:
        StateError: the state does not fit the loader.
    """
    samplers = LoadedSamplers(loader)
    if isinstance(state, list):
        state = redealt(loader, samplers, state)
    state = _checked(loader, samplers, state)
    _check_workers(loader, state, loader.num_workers)
    before = RandomState.capture([])
    try:
        if loader.num_workers == 0 and state.process is not None:
            restore(loader, state.process)
        if state.is_between_epochs:
            samplers.load_between_epochs(state.sampler.own)
        else:
            samplers.load(state.sampler.own)
        with as_saved():
            samplers.move_to(state.now)
    except Exception:  # the user's own load_state_dict() may raise anything
        before.restore([])
        raise
    return state


def continuation(loader: Any, state: State | None, num_workers: int) -> tuple[SavedPlace | None, int]:
    """The part of a state's position that a loader of `num_workers` continues, and with how many workers.

    The rest of an epoch depends on the workers that began it. The next epoch has new workers, of the loader's own
    number; persistent ones of the same number continue. If the batches do not depend on the workers, the loader's
    own number applies at once.
    """
    if state is not None:
        _check_workers(loader, state, num_workers)
    if state is None or (place := state.position) is None or (place.finished and not loader.persistent_workers):
        return None, num_workers
    if state.num_workers == num_workers:
        return place, num_workers
    if _fits_any_workers(loader, state):
        new = fresh_worker(place)
        next_worker = place.next_task % max(1, num_workers)
        return place._replace(workers=(new,) * num_workers, next_worker=next_worker), num_workers
    return (None, num_workers) if place.finished else (place, state.num_workers)


def fresh_worker(place: SavedPlace | None) -> SavedWorker:
    """A worker of the epoch of this place that has built nothing, and need not have."""
    epoch = 0 if place is None or place.finished else place.begin.epoch
    return SavedWorker(WorkerStart(WorkerState(epoch=epoch) if epoch else None))


def fits_any_workers(state: State) -> bool:
    """Whether the batches depend neither on the number of workers nor on whether there are any."""
    remembers = any(part is not None and part.remembers for part in (state.position, state.process))
    return state.fits.seeding == "batch" and state.fits.dataset_kind == "map" and not remembers


def _fits_any_workers(loader: Any, state: State) -> bool:
    """The same for this loader: before the first batches of an epoch its workers have not told yet what they hold."""
    if not fits_any_workers(state):
        return False
    if state.position is None:
        return True
    return not has_state(loader.dataset) and not generators_of(loader) and not search({"": loader.worker_init_fn})


def fits_any_ranks(state: State) -> bool:
    """Whether the list of all ranks' states can be continued by another number of ranks.

    For that the loader itself divides a sampler's samples or batches, and the sampler has no state of its own.
    """
    fits = state.fits
    outermost = fits.sampler.split(" of ")[0 if fits.batch_size is None else 1 :]
    is_dealt = fits.dataset_kind == "map" and outermost[:1] in (["DistributedSampler"], ["Shard"])
    return fits.num_replicas is not None and is_dealt and not state.sampler.tells


def _check_workers(loader: Any, state: State, num_workers: int) -> None:
    """Raises StateError if a state with workers is for a loader without, or vice versa, and that matters.

    Without workers the samples draw from the program's own generators.
    """
    if bool(state.num_workers) == bool(num_workers) or _fits_any_workers(loader, state):
        return
    raise StateError(
        f"the state is of a loader with num_workers={state.num_workers}, this one has {num_workers}: without workers "
        "the samples draw from the program's own random generators, and with workers each worker has a stream of its "
        'own; create the loader with workers, or without, like the one that was saved. With seeding="batch" both give '
        "the same batches, unless the dataset is a stream, or has a state or random generators of its own"
    )


def redealt(loader: Any, samplers: LoadedSamplers, states: list[State]) -> State:
    """One state for this rank, from those of all ranks, whose number may have been different.

    Raises:
        StateError: they do not belong together, or not to this loader.
    """
    own = _fits(loader, samplers)
    if own.num_replicas is None or own.rank is None:
        raise StateError(
            "a list of states is for a loader that is one rank's, with num_replicas and rank, or with torch's "
            "DistributedSampler; load the one state of this loader"
        )
    states = [_checked(loader, samplers, state, any_rank=True) for state in states]
    states = sorted(states, key=lambda state: state.fits.rank or 0)
    ranks, worlds = [state.fits.rank for state in states], {state.fits.num_replicas for state in states}
    if worlds != {len(states)} or ranks != [*range(len(states))]:
        raise StateError(f"a list must hold one state of each rank, got ranks {ranks} of {sorted(worlds, key=str)}")
    if len(states) == own.num_replicas:
        return states[own.rank]
    if samplers.part is None or not all(map(fits_any_ranks, states)):
        raise StateError(
            f"the states are of {len(states)} ranks, and this loader is one of {own.num_replicas}: the number can "
            "change where the loader itself divides a sampler's samples or batches (num_replicas and rank, or "
            "torch's DistributedSampler), and the sampler has no state_dict(). Other loaders, those of iterable "
            "datasets too, continue only with as many ranks"
        )
    # A rank that has read the sampler knows what it has drawn from its generators, which is the same in all ranks.
    lead = next((state for state in states if state.position is not None and state.position.draws), states[0])
    if any(state.skip_steps != lead.skip_steps for state in states):
        raise StateError("the ranks' states differ in their skip_steps; all ranks must skip the same steps")
    now = samplers.of_this_rank(lead.now)
    state = _state(loader, samplers, states[0].num_workers, skip_steps=lead.skip_steps)
    state = state._replace(epoch=min(one.epoch for one in states))
    state = state._replace(now=now, sampler=lead.sampler._replace(own=None))
    places = [state.position for state in states if state.position is not None]
    if all(place.finished for place in places):
        return state
    epochs = [
        ([simple.get("epoch") for simple in place.begin.starts[0].moment.attributes], place.begin.stages)
        for place in places
    ]
    if len(places) < len(states) or any(epoch != epochs[0] for epoch in epochs):
        raise StateError("the states are of different epochs; save them at the same step of every rank")
    if not epochs[0][1] and not any(place.draws for place in places):
        return state  # the epoch begins when the sampler is read
    assert lead.position is not None
    return state._replace(redeal=_rest(loader, samplers, lead.position, places))


def _rest(loader: Any, samplers: LoadedSamplers, lead: SavedPlace, places: list[SavedPlace]) -> EpochBegin:
    """What no rank has taken, from the places of all; raises StateError unless they have drawn the same order."""
    part: Any = samplers.part
    size, stages = loader.batch_size, lead.begin.stages
    first = lead.begin.starts[0]
    start = samplers.of_this_rank(first.drawing or first.moment)
    with samplers.at(start):
        order = order_of(part, len(stages[0] if stages else places))
    for rank, place in enumerate(places):
        count, checksum = 0, 0
        mine = share(order, stages, len(places), rank, drop_last=part.drop_last)
        for indices in itertools.islice(in_batches(mine, size, drop_last=loader.drop_last), place.drawn):
            count, checksum = count + 1, drawn(indices, checksum).checksum
        if (count, checksum) != (place.drawn, place.drawn_checksum):
            raise StateError(
                f"the sampler did not reproduce its indices, those that rank {rank} got before its state was saved; "
                "create dataset and sampler (seed, shuffle, drop_last) like those that were saved. If they are alike, "
                "the ranks had drawn different orders, by generators of the sampler that were seeded differently"
            )
    size = size or 1
    taken = [
        [(0, place.next_task * size), *((task * size, (task + 1) * size) for task in place.ahead)] for place in places
    ]
    return EpochBegin(starts=(Start(start),), stages=(*stages, taken))


@as_saved()
def _checked(loader: Any, samplers: LoadedSamplers, state: State, *, any_rank: bool = False) -> State:
    """The state with the arguments of the loader's own samplers, so that other ones show in the indices.

    Args:
        loader: that loads it.
        samplers: of the loader.
        state: as it was saved.
        any_rank: whether it may be another rank's.

    Raises:
        StateError: it does not fit the loader.
    """
    saved = state.fits._asdict()
    for name, value in _fits(loader, samplers)._asdict().items():
        if saved[name] != value and not (any_rank and name in _RANK):
            raise StateError(
                f"the state is of a loader with {name}={saved[name]!r}, this one has {value!r}: its batches would "
                "not be the rest of the same stream; create the loader like the one that was saved"
                + (", or load the list of all ranks' states" if name in _RANK else "")
            )
    names = samplers.check(state.now, state.sampler)

    def with_arguments(begin: EpochBegin) -> EpochBegin:
        starts = [
            start._replace(
                moment=samplers.with_arguments(start.moment, names),
                drawing=start.drawing and samplers.with_arguments(start.drawing, names),
            )
            for start in begin.starts
        ]
        return begin._replace(starts=tuple(starts))

    return state._replace(
        now=samplers.with_arguments(state.now, names),
        position=state.position and state.position._replace(begin=with_arguments(state.position.begin)),
        redeal=state.redeal and with_arguments(state.redeal),
    )


def _fits(loader: Any, samplers: Samplers) -> Fits:
    ranks = ranks_in(loader, samplers)
    return Fits(
        loader.batch_size,
        loader.drop_last,
        loader.seeding,
        loader.scheduling,
        loader.in_order,
        "iterable" if loader._dataset_kind else "map",
        _length(loader),
        samplers.name,
        None if ranks is None else ranks.num_replicas,
        None if ranks is None else ranks.rank,
    )


def _length(loader: Any) -> int | None:
    try:
        return None if loader._dataset_kind else len(loader.dataset)
    except TypeError:  # a map-style dataset need not have a length
        return None


# ---- the samplers of a loader that loads a state


class LoadedSamplers(Samplers):
    """Those of a loader that loads a state."""

    def of_this_rank(self, moment: Moment) -> Moment:
        """A moment of another rank's samplers, converted for these: only what all ranks share is taken from it."""
        own = self.capture()
        attributes = tuple(
            {**theirs, **{name: value for name, value in ours.items() if name in _OF_RANK}}
            for theirs, ours in zip(moment.attributes, own.attributes, strict=True)
        )
        others = moment.random.others
        is_samplers = any(generator is self._loaders_own for generator in self._held_generators())
        if others and self._loaders_own is not None and not is_samplers:  # only base seeds are drawn from it
            others = own.random.others[:1] + others[1:]  # type: ignore[index]
        return Moment(own.random._replace(others=others), attributes)

    def with_arguments(self, moment: Moment, names: Sequence[Collection[str]]) -> Moment:
        """A moment with these samplers' own arguments: it keeps of each sampler the attributes of `names` alone."""
        attributes = tuple(
            {
                name: value if name in those or (makes and name == "generator") else own.get(name, value)
                for name, value in simple.items()
            }
            for simple, own, those, makes in zip(
                moment.attributes, self.attributes(), names, self._makes_generator, strict=True
            )
        )
        return Moment(moment.random, attributes)

    def check(self, saved: Moment, sampler_state: SamplerState) -> list[set[str]]:
        """Raises StateError if these samplers can't become what the saved ones were.

        Args:
            saved: what the samplers were when the state was saved.
            sampler_state: the rest of the state that is about them.

        Returns:
            For each sampler, the attributes that have changed, there or here, since a loader first had it, and its
            epoch: the others are its arguments, and stay.
        """
        self._has_made(saved)
        self._check_generators(saved)
        epochs = [
            [name for name in simple if hasattr(sampler, "set_epoch") and "epoch" in name.lower()]
            for sampler, simple in zip(self._chain, saved.attributes, strict=True)
        ]
        parts = zip(sampler_state.progress, self.progress(), epochs, strict=True)
        return [{*theirs, *ours, *epoch} for theirs, ours, epoch in parts]

    def load_between_epochs(self, state: bytes | None) -> None:
        """Loads a state from between two epochs: the next epoch is a whole one.

        Samplers differ in what such a state says: that they begin, or, like torchdata's, that everything was yielded.
        Such a sampler is iterated once, yields nothing, and then begins.
        """
        self.load(state)
        if self._stateful is None or state is None:
            return
        before = self.capture()
        is_at_end = next(iter(self.index_sampler), _END) is _END
        if is_at_end:
            before.random.restore(self._generators)
        else:
            self.move_to(before)
            self.load(state)


# ---- without workers: what does the work in this process


def generators_of(loader: Any) -> dict[str, Any]:
    """The random generators that a loader's dataset and `collate_fn` hold, or their code names, by names."""
    return search({"dataset": loader.dataset, "collate_fn": loader.collate_fn})


def capture_random(loader: Any) -> RandomState:
    """The states of the global generators, and of these."""
    return RandomState.capture(held=generators_of(loader))


def restore(loader: Any, saved: LocalState) -> None:
    """Restores them.

    Raises:
        StateError: the dataset and `collate_fn` hold other generators than those that were saved.
    """
    with as_saved():
        held = generators_of(loader)
        unlike = [*saved.random.unlike(held), *(name for name in held if name not in (saved.random.held or {}))]
        if unlike:
            raise StateError(
                f"the state does not fit the random generators of dataset and collate_fn: {unlike[0]} is missing "
                "here or in the state, or of another kind; create both like those that were saved, with all their "
                "generators (one that an object creates only on first use does not exist yet: create it before "
                "load_state_dict()), or give the dataset state_dict() and load_state_dict()"
            )
        saved.random.restore((), held)
    with loading_streams(loader.dataset):
        load_state(loader.dataset, saved.dataset)
