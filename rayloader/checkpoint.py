"""Where the user is in a loader's stream: `state_dict` and back.

Promise: a state is made of plain types and tensors (but for what a dataset's or sampler's own `state_dict` gives), and
says all that it takes to go on with the same stream: the generators of this process from before the epoch, how much of
it the user has taken, and a snapshot of each worker. What does not fit is refused.
"""

from __future__ import annotations

import copy
import math
import pickle
import threading
import zlib
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import DistributedSampler

from rayloader import redeal
from rayloader.errors import StateError
from rayloader.generators import find_generators
from rayloader.journal import Journal, Told
from rayloader.prefetch import QUIET_SAMPLERS
from rayloader.random_state import RandomState
from rayloader.snapshot import WorkerState, has_state
from rayloader.transport import codec

FORMAT, VERSION = "rayloader", 1
_ARRAY = "rayloader: NumPy array of dtype"
# What a state and a loader must have in common: with another value of these, the stream is another one.
_FITS = ("batch_size", "drop_last", "seeding", "scheduling", "in_order", "persistent_workers")


class Samplers:
    """The sampler of a loader and those within it: who tells its state, and whose generators it draws from."""

    def __init__(self, loader: Any) -> None:
        self.index_sampler = loader._index_sampler
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        chain: list[Any] = []
        sampler = self.index_sampler
        while sampler is not None and all(sampler is not known for known in chain):
            chain.append(sampler)
            sampler = getattr(sampler, "sampler", None)
        self._chain = chain
        self._stateful = next((sampler for sampler in chain if has_state(sampler)), None)
        self.is_stock = type(chain[-1]) in QUIET_SAMPLERS
        own = loader.generator is not None and getattr(chain[-1], "generator", loader.generator) is not None
        self._needs_global = not (self.is_stock and own)
        self._generators: list[Any] = [] if loader.generator is None else [loader.generator]
        for sampler in chain:
            inner = {k: v for k, v in _attributes(sampler).items() if k not in ("data_source", "dataset", "sampler")}
            self._generators += [g for g in find_generators(inner) if all(g is not known for known in self._generators)]

    @property
    def name(self) -> str:
        """Of the kinds of samplers."""
        return " of ".join(type(sampler).__name__ for sampler in self._chain)

    @property
    def epoch(self) -> int | None:
        """What `set_epoch` was told."""
        return next((s.epoch for s in self._chain if hasattr(s, "set_epoch") and hasattr(s, "epoch")), None)

    def set_epoch(self, epoch: int | None) -> None:
        """Tells it to who wants to know."""
        for sampler in self._chain:
            if epoch is not None and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def is_stateful(self, iterator: Any) -> bool:
        """Whether the sampler, or its iterator, tells its state."""
        return has_state(iterator) or self._stateful is not None

    def state(self, iterator: Any) -> Any:
        """The sampler's own state, None if it has none."""
        stateful = iterator if has_state(iterator) else self._stateful
        return None if stateful is None else copy.deepcopy(stateful.state_dict())

    @property
    def distributed(self) -> DistributedSampler[Any] | None:
        """The sampler, if it is torch's for several ranks."""
        return self._chain[-1] if type(self._chain[-1]) is DistributedSampler else None

    def iterator(self, stages: list[redeal.Stage]) -> Any:
        """The index sampler's; after stages, over what is left for this rank."""
        if not stages:
            return iter(self.index_sampler)
        assert self.distributed is not None
        return redeal.batches(self.distributed, stages, self._batch_size, drop_last=self._drop_last)

    def load_state(self, state: Any) -> None:
        """Gives the sampler its state back."""
        if self._stateful is not None and state is not None:
            self._stateful.load_state_dict(copy.deepcopy(state))

    def iterator_at(self, state: Any) -> Any:
        """An iterator that goes on from a state."""
        self.load_state(state)
        iterator = iter(self.index_sampler)
        if has_state(iterator):
            iterator.load_state_dict(copy.deepcopy(state))
        return iterator

    def capture(self) -> RandomState:
        """The generators that `iter()` and the sampler draw from."""
        random = RandomState.capture(self._generators)
        if self.is_stock:
            random = random._replace(python=None, numpy=None)
        return random if self._needs_global else random._replace(torch=None)

    def restore(self, random: RandomState) -> None:
        """Puts them back."""
        if random.others is not None and len(random.others) != len(self._generators):
            raise StateError(
                f"the state is of a loader whose sampler has {len(random.others)} random generators of its own, this "
                f"one has {len(self._generators)}; make the loader as the one that was saved"
            )
        random.restore(self._generators)


class Position:
    """How far the user of one iterator is; kept up to date by the epoch, under `lock`."""

    def __init__(self, samplers: Samplers, base_seed: int, num_workers: int, *, iterable: bool) -> None:
        self.lock = threading.Condition()
        self.samplers = samplers
        self.base_seed = base_seed
        self.shared_seed: int | None = None
        self.num_workers = num_workers
        self.iterable = iterable
        self.journals = [Journal() for _ in range(num_workers)]
        self.epoch = 0  # epochs of these workers before this one
        self._begin_epoch()

    def begins(self, again: bool) -> None:
        """A new epoch, before the sampler is asked for its iterator; `again`: of workers that had one before."""
        self.epoch += again
        self._begin_epoch()

    def restarts(self) -> None:
        """The workers are lost: new ones begin."""
        self.epoch, self.finished = 0, False
        self.journals = [Journal() for _ in range(self.num_workers)]

    def _begin_epoch(self) -> None:
        self.begin = self.samplers.capture()  # before the epoch's sampler is asked for its iterator
        self.next_task = 0  # all before it are taken
        self.next_worker = 0
        self.delivered = 0  # batches
        self.checksum = 0  # of the indices before `next_task`
        self.skipped = 0  # samples
        self.stages: list[redeal.Stage] = []  # that the epoch went through with other numbers of ranks
        self.finished = False
        self._ahead: dict[int, int] = {}  # checksums by task, of those taken after `next_task`
        self._sampler_states: dict[int, tuple[Any, int]] = {}  # and checksum; by next task
        self._stateful = False
        self._total: int | None = None  # tasks of the epoch, once the sampler has ended
        self._sampler_end: Any = None  # its state then

    def sampler_begins(self, iterator: Any) -> None:
        """The sampler's iterator is about to be asked."""
        self._stateful = self.samplers.is_stateful(iterator)
        if self._stateful:
            self._sampler_states[self.next_task] = self.samplers.state(iterator), self.checksum

    def drawn(self, task_id: int, iterator: Any, checksum: int) -> None:
        """The sampler has given the indices of this task."""
        if task_id in self._ahead:
            self._ahead[task_id] = checksum
        if self._stateful:
            self._sampler_states[task_id + 1] = self.samplers.state(iterator), checksum

    def sampler_ended(self, total: int) -> None:
        """It has given the indices of so many tasks, and has no more."""
        self._total = total
        self._sampler_end = self.samplers.state(None)

    def has(self, task_id: int) -> bool:
        """Whether the user has this task's batch already."""
        return task_id in self._ahead

    def taken(self, worker_id: int, task_id: int, checksum: int) -> None:
        """The user has this task's batch now."""
        self.journals[worker_id].taken(task_id)
        self.next_worker = (worker_id + 1) % self.num_workers
        self.delivered += 1
        if (
            task_id == self.next_task or self.iterable
        ):  # there, what an exhausted worker was to build is in nobody's way
            self.next_task, self.checksum = task_id + 1, checksum
        else:
            self._ahead[task_id] = checksum
        while self.next_task in self._ahead:
            self.checksum = self._ahead.pop(self.next_task)
            self.next_task += 1
        if self._stateful:
            oldest = self._oldest_replay()
            while min(self._sampler_states) < oldest:
                del self._sampler_states[min(self._sampler_states)]

    def _oldest_replay(self) -> int:
        return min([self.next_task, *(journal.replay[0].task_id for journal in self.journals if journal.replay)])

    # ---- as a state

    def pack(self) -> dict[str, Any]:
        """The position, as part of a state."""
        if not all(journal.begun for journal in self.journals):
            raise StateError("the iterator was dropped before its workers had told their state; save while iterating")
        begin = min(self._sampler_states) if self._stateful else 0
        sampler, checksum = self._sampler_states[begin] if self._stateful else (None, 0)
        return {
            "base_seed": self.base_seed,
            "shared_seed": self.shared_seed,
            "epoch": self.epoch,
            "next_task": self.next_task,
            "next_worker": self.next_worker,
            "delivered": self.delivered,
            "ahead": sorted(self._ahead),
            "checksum": self.checksum,
            "skipped": self.skipped,
            "finished": self.finished,
            "at_end": self._total == self.next_task,
            "begin": self.begin.pack(),
            "sampler_epoch": self.samplers.epoch,
            "stages": [stage.taken for stage in self.stages],
            "sampler_begin": {"task": begin, "checksum": checksum, "state": sampler} if self._stateful else None,
            "sampler_end": self._sampler_end if self._total == self.next_task else None,
            "workers": [
                {"state": _pack_worker(journal.base), "replay": [[t.task_id, t.digest] for t in journal.replay]}
                for journal in self.journals
            ],
        }  # fmt: skip

    def unpack(self, packed: dict[str, Any]) -> Any:
        """Moves this position, of a new iterator, to where another one was.

        Returns:
            The sampler's iterator, from there on.

        Raises:
            StateError: the sampler does not give the indices that it gave.
        """
        for name in (
            "base_seed",
            "shared_seed",
            "epoch",
            "next_task",
            "next_worker",
            "delivered",
            "skipped",
            "finished",
        ):
            setattr(self, name, packed[name])
        self._ahead = dict.fromkeys(packed["ahead"], packed["checksum"])
        self.stages = [redeal.Stage(taken) for taken in packed["stages"]]
        self.begin = RandomState.unpack(packed["begin"])
        self.samplers.restore(self.begin)
        self.samplers.set_epoch(packed["sampler_epoch"])
        iterator = self._fast_forward(packed)
        if self.checksum != packed["checksum"]:
            raise StateError(
                f"the sampler does not give the same indices again: those of the first {self.next_task} batches are "
                "others than when the state was saved. A sampler must depend on nothing but its arguments, set_epoch "
                "and random generators that it holds, or have state_dict() and load_state_dict()"
            )
        return iterator

    def _fast_forward(self, packed: dict[str, Any]) -> Any:
        samplers, begin = self.samplers, packed["sampler_begin"]
        iterator = samplers.iterator(self.stages) if begin is None else samplers.iterator_at(begin["state"])
        self._stateful = begin is not None
        task_id, self.checksum = (0, 0) if begin is None else (begin["task"], begin["checksum"])
        if self._stateful:
            self._sampler_states[task_id] = begin["state"], self.checksum
        replays = {task_id for worker in packed["workers"] for task_id, _ in worker["replay"]}
        told: dict[int, codec.Encoded] = {}
        if self.iterable:  # its indices stand for nothing, and are all the same
            told = dict.fromkeys(replays, codec.encode(next(iterator)))
            task_id, self.checksum = self.next_task, packed["checksum"]
        while task_id < self.next_task:
            try:
                encoded = codec.encode(next(iterator))
            except StopIteration:
                break  # the checksum says so
            self.checksum = zlib.crc32(encoded.skeleton, self.checksum)
            if task_id in replays:
                told[task_id] = encoded
            self.drawn(task_id, iterator, self.checksum)
            task_id += 1
        for journal, worker in zip(self.journals, packed["workers"], strict=True):
            # Without order a worker may be ahead of what was drawn again; nothing then depends on what it has built.
            replay = [Told(t, told[t], checksum) for t, checksum in worker["replay"] if t in told]
            journal.starts_at(_unpack_worker(worker["state"]), replay)
        if self._stateful and packed["at_end"]:  # asked again, it might begin its next epoch
            samplers.load_state(packed["sampler_end"])
            return iter(())
        return iterator


def _attributes(obj: Any) -> dict[str, Any]:
    return dict(getattr(obj, "__dict__", {}))


def _pack_worker(state: WorkerState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    if state.error:
        raise StateError(f"a worker's dataset could not tell its state:\n{state.error}")
    return {
        **state._asdict(),
        "random": state.random.pack(),
        "begin": None if state.begin is None else state.begin.pack(),
        "dataset": None if state.dataset is None else {"state": _pack_arrays(pickle.loads(state.dataset))},
        "iterator": None if state.iterator is None else {"state": _pack_arrays(pickle.loads(state.iterator))},
    }


def _unpack_worker(packed: dict[str, Any] | None) -> WorkerState | None:
    if packed is None:
        return None
    return WorkerState(
        **{
            **packed,
            "random": RandomState.unpack(packed["random"]),
            "begin": None if packed["begin"] is None else RandomState.unpack(packed["begin"]),
            "dataset": _unpack_object(packed["dataset"]),
            "iterator": _unpack_object(packed["iterator"]),
        }
    )


def _unpack_object(packed: dict[str, Any] | None) -> bytes | None:
    return None if packed is None else cloudpickle.dumps(_unpack_arrays(packed["state"]))


def _pack_arrays(state: Any) -> Any:
    """With tensors in place of NumPy's arrays, which `torch.load(weights_only=True)` refuses."""
    if isinstance(state, (np.ndarray, np.generic)) and not state.dtype.hasobject:
        content = torch.frombuffer(bytearray(state.tobytes()) or bytearray(1), dtype=torch.uint8)
        return {_ARRAY: state.dtype.str, "shape": list(state.shape), "content": content}
    if type(state) is dict:
        return {key: _pack_arrays(value) for key, value in state.items()}
    return type(state)(map(_pack_arrays, state)) if type(state) in (list, tuple) else state


def _unpack_arrays(packed: Any) -> Any:
    if type(packed) is dict and _ARRAY in packed:
        count = math.prod(packed["shape"])
        array = np.frombuffer(bytearray(packed["content"].numpy().tobytes()), packed[_ARRAY], count)
        return array.reshape(packed["shape"])[() if not packed["shape"] else ...]
    if type(packed) is dict:
        return {key: _unpack_arrays(value) for key, value in packed.items()}
    return type(packed)(map(_unpack_arrays, packed)) if type(packed) in (list, tuple) else packed


def make_state(loader: Any, position: Position | None, num_workers: int) -> dict[str, Any]:
    """The state of a loader.

    Args:
        loader: whose.
        position: of its last iterator; None: it has not begun one.
        num_workers: that the stream depends on.
    """
    samplers = Samplers(loader)
    packed = None
    if position is not None:
        with position.lock:
            if not position.finished or loader.persistent_workers:
                packed = position.pack()
    now = samplers.capture()
    return {
        "format": FORMAT,
        "version": VERSION,
        "num_workers": num_workers,
        "fits": _fits(loader, samplers),
        "now": now.pack(),
        "sampler": samplers.state(None),
        "position": packed,
        "redeal": None,
    }


def redealt(loader: Any, states: Any) -> dict[str, Any]:
    """One state for this rank, of those of all ranks, which may have been another number.

    Raises:
        StateError: they do not belong together, or not to this loader.
    """
    sampler = Samplers(loader).distributed
    if sampler is None or loader._dataset_kind or (loader.batch_size is None and loader._auto_collation):
        raise StateError(
            "a list of states is for a map-style dataset with torch's DistributedSampler and a batch_size; load the "
            "one state of this rank"
        )
    rank = _rank(Samplers(loader))
    for state in states:
        check_state(loader, {**state, "fits": {**state["fits"], **rank}} if _is_state(state) else state)
    states = sorted(states, key=lambda state: state["fits"]["rank"])
    worlds = {state["fits"]["num_replicas"] for state in states}
    if worlds != {len(states)} or [state["fits"]["rank"] for state in states] != list(range(len(states))):
        raise StateError(
            f"a list must hold one state of each rank, got ranks {[state['fits']['rank'] for state in states]} of "
            f"{sorted(worlds)}"
        )
    if len(states) == sampler.num_replicas:
        return states[sampler.rank]  # type: ignore[no-any-return]
    positions = [state["position"] for state in states]
    if all(position is None or position["finished"] for position in positions):
        return make_state(loader, None, states[0]["num_workers"])
    if any(position is None for position in positions) or len({str(_epoch_of(p)) for p in positions}) > 1:
        raise StateError("the states are of different epochs; save them at the same step of every rank")
    taken = [position["next_task"] * (loader.batch_size or 1) for position in positions]
    epoch, stages = _epoch_of(positions[0])
    state = make_state(loader, None, states[0]["num_workers"])
    return {**state, "redeal": {"epoch": epoch, "stages": [*stages, taken]}}


def _epoch_of(position: dict[str, Any]) -> tuple[int, list[list[int]]]:
    return position["sampler_epoch"], position["stages"]


def _is_state(state: Any) -> bool:
    return isinstance(state, dict) and state.get("format") == FORMAT


def check_state(loader: Any, state: Any) -> None:
    """Raises StateError unless the state fits the loader."""
    if not _is_state(state):
        raise StateError(f"this is not a state of a rayloader.DataLoader: {str(state)[:100]!r}")
    if state.get("version") != VERSION:
        raise StateError(
            f"the state has version {state.get('version')!r}, this rayloader reads {VERSION}; use the one that wrote it"
        )
    saved, own = state["fits"], _fits(loader, Samplers(loader))
    for name, value in own.items():
        if saved.get(name) != value:
            raise StateError(
                f"the state is of a loader with {name}={saved.get(name)!r}, this one has {value!r}: its batches would "
                "not be the rest of the same stream; make the loader as the one that was saved"
                + (", or load the list of all ranks' states" if name in ("num_replicas", "rank") else "")
            )


def _fits(loader: Any, samplers: Samplers) -> dict[str, Any]:
    try:
        length = len(loader.dataset) if not loader._dataset_kind else None
    except TypeError:  # a map-style dataset need not have a length
        length = None
    kind = "iterable" if loader._dataset_kind else "map"
    fits = {name: getattr(loader, name) for name in _FITS}
    return {**fits, "dataset_kind": kind, "dataset_length": length, "sampler": samplers.name, **_rank(samplers)}


def _rank(samplers: Samplers) -> dict[str, Any]:
    sampler = samplers.distributed
    return {} if sampler is None else {"num_replicas": sampler.num_replicas, "rank": sampler.rank}


def leave_global_generator(state: dict[str, Any], samplers: Samplers) -> None:
    """Puts torch's global generator to where it was when the state was saved, unless a sampler draws on from it."""
    if samplers.is_stock:
        now = RandomState.unpack(state["now"]).torch
        if now is None:
            return
        torch.set_rng_state(torch.frombuffer(bytearray(now), dtype=torch.uint8))
