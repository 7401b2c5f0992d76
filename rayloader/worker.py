"""The worker: an actor process that holds a replica of the dataset, fetches and collates.

Promise: user code runs in the actor's one main thread, seeded and set up as torch's worker loop does it. Nothing that
user code raises leaves through Ray: it travels as a `Result`. The process is warm: `stop` puts back what the user's
code may have changed of it (see `process_state.py`), so that another epoch, or another loader, finds it as new. The
actor starts no thread and owns nothing but its process.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import os
import pickle
import random
import socket
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
import torch.utils.data._utils.worker as torch_worker
from ray.exceptions import RayError
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils.collate import default_collate_fn_map
from torch.utils.data.graph_settings import apply_random_seed

from rayloader import session, skipping
from rayloader.collate import stack, stack_into
from rayloader.digest import chain, digest
from rayloader.errors import ReplayError, ReplicaMemoryError
from rayloader.generators import Generators, alive, note_modules, noting
from rayloader.process_state import Baseline, ProcessState
from rayloader.random_state import RandomState, Rewind, seed_all
from rayloader.snapshot import Recorder, WorkerState, has_state, load_state
from rayloader.transport import codec
from rayloader.transport.arena import ArenaError, ArenaWriter
from rayloader.transport.control_page import PAGE_BYTES, PageAddress, WorkerPage
from rayloader.transport.image import ImageAddress, open_image
from rayloader.transport.lanes import Wire, WorkerLane, fits_in_band, from_wire, pack, sealed, to_wire, unpack
from rayloader.transport.memory import no_collection
from rayloader.transport.memory_file import FileAddress, MemoryFileError, open_file, this_machine
from rayloader.transport.replica import Image, image_from_contents

# What is copied into the reply at most of a batch that could be sent out of band: that takes Ray longer than a copy.
IN_BAND_BYTES = 1 << 16

# References to Ray's objects go through Ray as they are: it keeps their owners in touch.
CARRY = (ray.ObjectRef,)
# How long a call builds again what nobody waits for, in seconds: then it returns, so that the driver sees progress.
REPLAY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Setup:
    """What one worker is told before its first task; the same for all but for `worker_id`."""

    worker_id: int
    num_workers: int
    base_seed: int
    seed_batches: bool  # seed anew before each batch, by its number
    shared_seed: int | None  # of IterDataPipes
    dataset_kind: int
    auto_collation: bool
    batch_size: int | None
    drop_last: bool
    skip_errors: bool
    max_undone: int  # tasks that `resume` may have to undo
    process: ProcessState
    page: PageAddress | None  # where the driver looks for what is done early


@dataclass(frozen=True, slots=True)
class Replica:
    """What travels once per worker: the user's objects, pickled together, as one fork would copy them together."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None
    collate_fn_map: dict[Any, Any]  # what the user changed of torch's default_collate_fn_map


@dataclass(frozen=True, slots=True)
class Source:
    """What a worker opens its replica from.

    Attributes:
        image: the driver's.
        carried: parts of the replica that travel as they are.
        contents: for who can't open the driver's files: in a list, Ray's object with their bytes. None in it if the
            node has an image of an earlier epoch.
        hosted: likewise, the address of the image that one worker of the node has made of them.
    """

    image: ImageAddress
    carried: list[Any]
    contents: list[Any] | None = None
    hosted: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker runs."""

    pid: int
    node_id: str
    hostname: str
    reaches_driver: bool  # can open the driver's memory files
    machine: str  # workers of one node and one machine can open each other's

    @property
    def place(self) -> tuple[str, str]:
        """Equal for workers that share an image."""
        return self.node_id, self.machine


class ResultKind(Enum):
    """What became of a task."""

    BATCH = "batch"
    ERROR = "error"  # the user's exception, as torch's ExceptionWrapper
    EXHAUSTED = "exhausted"  # the worker's iterable dataset has ended
    EMPTY = "empty"  # every sample of it was skipped
    EXITED = "exited"  # user code asked this process to end: SystemExit, KeyboardInterrupt
    NOT_STARTED = "not started"  # the same, before its first task


class Result(NamedTuple):
    """One task's answer: `wire` holds the batch or the ExceptionWrapper, `text` has an error in words."""

    task_id: int
    kind: ResultKind
    wire: Wire | None = None
    text: str = ""
    nbytes: int = 0  # of the batch's buffers
    skipped: tuple[skipping.Skipped, ...] = ()
    digest: int = 0  # tells whether it is the same when it is built again


@dataclass(frozen=True, slots=True)
class Reply:
    """What a call returns: the results of the tasks that were done, in order, and what that took.

    Tasks may be left over for the next call; results may have been published before (see control_page.py).
    """

    results: list[tuple[int, Any]]  # each task and its result as it travels, see NOTE [final]
    nbytes: int  # of their batches' buffers
    exhausted: bool  # the last of them says that the iterable dataset has ended
    state: tuple[Any, ...] | None  # fields of `WorkerState`: the worker after these tasks, if a snapshot was taken
    replay: tuple[int, int]  # batches built again since the worker was restored, and how many that must be
    seconds: float  # spent on the tasks
    publishes: bool  # whether this worker's control page works
    full: bool  # the arena had no room for something
    no_arena: str  # why the arena could not be opened, if it could not


class Worker:
    """One actor process. Ray calls its methods one after the other, on the main thread."""

    def __init__(self) -> None:
        runtime_env = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        own = {key for key in os.environ if key.startswith("RAY_") or key == "CUDA_VISIBLE_DEVICES"}
        self._baseline = Baseline(session.node_id(), own | set(runtime_env))
        self._hosted: dict[int, _Hosted] = {}  # by worker
        self._at_work: _Hosted | None = None  # whose generators are the process's
        self._lane = WorkerLane()
        self._page: WorkerPage | None = None
        self._image: tuple[str, Image] | None = None  # that this worker hosts for its node; of what image
        note_modules()

    def hello(self, probe: FileAddress | None = None) -> WorkerAddress:
        """Where this worker runs; also the proof that it does. `probe` is a memory file of the driver's."""
        machine, reaches = "", False
        with contextlib.suppress(MemoryFileError):
            machine = this_machine()
            if probe is not None:
                os.close(open_file(probe, writable=False))
                reaches = True
        return WorkerAddress(os.getpid(), session.node_id(), socket.gethostname(), reaches, machine)

    def host(self, name: str, image: ImageAddress, contents: list[Any]) -> ImageAddress:
        """Makes an image of what came through Ray, for all workers of this node.

        It stays until this worker is started on another image than `name`, and longer where it is open.
        """
        self._image = None  # first: for two there may be no room
        self._image = name, image_from_contents(image, contents)
        return self._image[1].address

    def start(self, setup: Setup, source: Source, state: WorkerState | None) -> None:
        """Makes this process worker `setup.worker_id`, beside those that it is; at its start, or as it was."""
        if not self._hosted:
            gc.freeze()  # what is here by now is nobody's: neither `stop` nor the search for generators looks at it
        if self._image is not None and self._image[0] != source.image.name:
            self._image = None
        if setup.page is not None and (self._page is None or self._page.address != setup.page):
            with contextlib.suppress(ArenaError):  # another node or container: nothing is published
                self._page = WorkerPage(setup.page)
        self._switch_to(None)
        hosted = self._at_work = self._hosted[setup.worker_id] = _Hosted(setup, self._page)
        hosted.start(self._baseline, source, state)

    def resume(self, worker_id: int, epoch: int, shared_seed: int | None, undo_from: int | None) -> WorkerState:
        """Begins a new epoch with the same dataset object, as if tasks from `undo_from` on had not been given."""
        self._switch_to(worker_id)
        return self._hosted[worker_id].resume(epoch, shared_seed, undo_from)

    def run(self, message: Any) -> Any:
        """Builds tasks' batches, in order.

        Args:
            message: packed (worker_id, call, task_ids, indices, room, digests): `call` counts the calls of this actor;
                of the tasks, which may be none, to go on with those that an earlier call left over, `indices` holds
                what the sampler gave for each; `room` says where in this actor's arena the batches may lie;
                if there are `digests` the batches are built for what that changes in the worker, and not sent: they
                must be those of these digests, where one is known.

        Returns:
            A packed `Reply`.
        """
        worker_id, call, task_ids, indices, room, digests = unpack(message)
        self._switch_to(worker_id)
        hosted = self._hosted[worker_id]
        arena = self._lane.open(room)
        began = time.perf_counter()
        results = hosted.run(call, task_ids, indices, arena, digests)
        seconds = time.perf_counter() - began
        replay, state = hosted.replay, hosted.snapshot_if_due(seconds)
        sent = [(result.task_id, final) for result, final in results]
        nbytes = sum(result.nbytes for result, _ in results)
        exhausted = bool(results) and results[-1][0].kind is ResultKind.EXHAUSTED
        lane, publishes = self._lane, self._page is not None
        reply = Reply(sent, nbytes, exhausted, state, replay, seconds, publishes, lane.take_full(), lane.error)
        return pack(reply, [result.wire for result, final in results if result.wire and not isinstance(final, bytes)])

    def leave(self, worker_id: int) -> None:
        """This process is that worker no longer; another one is."""
        if self._at_work is self._hosted.pop(worker_id, None):
            self._at_work = None

    def stop(self) -> None:
        """Lets go of the dataset and puts the process back as it was."""
        self._hosted.clear()
        self._at_work = None
        torch_worker._worker_info = None
        self._baseline.restore()
        gc.collect()

    def _switch_to(self, worker_id: int | None) -> None:
        """Workers of one process take turns with its generators."""
        hosted = self._hosted[worker_id] if worker_id is not None else None
        if hosted is self._at_work:
            return
        if self._at_work is not None:
            self._at_work.park()
        if hosted is not None:
            hosted.unpark()
        self._at_work = hosted


class _Task(NamedTuple):
    call: int
    task_id: int
    indices: Wire
    wanted: bool
    digest: int | None  # of what was delivered before, where it is built again


class _Hosted:
    """A worker in torch's sense: its dataset object and what it has of its own."""

    def __init__(self, setup: Setup, page: WorkerPage | None) -> None:
        self._setup = setup
        self._page = page
        self._where = f"in DataLoader worker process {setup.worker_id}"
        self._dataset: Any = None
        self._collate_fn: Any = None
        self._fetcher: Any = None
        self._failure: Result | None = None  # of `start` or `resume`; answers every task
        self._unrestored = False  # that failure says that this worker can't be brought to where it was
        self._exhausted = False
        self._end_is_told = False  # in a snapshot
        self._epoch = 0
        self._tasks = 0  # built in this epoch
        self._last_task = -1
        self._digest = 0
        self._goal: WorkerState | None = None  # to which an iterable dataset is being read again
        self._replayed, self._to_replay = 0, 0  # batches
        self._parked: RandomState | None = None
        self._worker_info: Any = None
        self._recorder = Recorder(None, Generators({}, []), RandomState.capture([]))
        self._left: deque[_Task] = deque()  # not begun, oldest first
        self._rewind: Rewind | None = None

    def start(self, baseline: Baseline, source: Source, state: WorkerState | None) -> None:
        """Process state, dataset, seeds, worker_init_fn, iterator: in torch's order. An error is kept."""
        with self._keeping_failure():
            baseline.adopt(self._setup.process)
            before = alive()
            with noting() as noted:
                loaded: Replica = _open_replica(source, here=self._setup.process.node_id == session.node_id())
            names = "dataset", "collate_fn", "worker_init_fn"
            generators = Generators({name: getattr(loaded, name) for name in names}, noted, before)
            self._dataset, self._collate_fn = loaded.dataset, loaded.collate_fn
            default_collate_fn_map[torch.Tensor] = stack
            default_collate_fn_map.update(loaded.collate_fn_map)
            self._seed()
            seeded = RandomState.capture([])
            if loaded.worker_init_fn is not None:
                loaded.worker_init_fn(self._setup.worker_id)
            self._recorder = Recorder(self._dataset, generators, seeded)
            if self._setup.max_undone:
                self._rewind = Rewind(self._setup.max_undone, generators.given)
            if state is None:
                self._create_fetcher()
            else:
                self._restore(state)
        self._unrestored = self._failure is not None and state is not None

    def _restore(self, state: WorkerState) -> None:
        """Makes this the worker that the snapshot was taken of; a stream that can't tell its state is read later."""
        if state.error:
            raise ReplayError(f"the state of worker {self._setup.worker_id} could not be told:\n{state.error}")
        self._epoch, self._exhausted = state.epoch, state.exhausted
        load_state(self._dataset, state.dataset)
        if self._is_iterable and state.is_to_be_proven:
            if state.begin is not None:
                self._recorder.restore(state.begin)
            self._goal = state
            self._to_replay += state.tasks
            self._create_fetcher()
            return
        self._create_fetcher()
        load_state(self._iterator, state.iterator)  # after `__iter__`, which may have put it back to its start
        if self._is_iterable:
            self._fetcher.ended = state.ended
        self._recorder.restore(state.random)
        self._tasks, self._last_task, self._digest = state.tasks, state.last_task, state.digest

    def _read_on(self, until: float) -> bool:
        """Reads an iterable dataset from its start to where it was; False if that is not done at the time `until`."""
        goal = self._goal
        if goal is None:
            return True
        nothing = to_wire(codec.encode([None] * self._setup.batch_size if self._setup.batch_size else None))
        again = _Task(0, -1, nothing, wanted=False, digest=None)
        while self._failure is None and self._tasks < goal.tasks and not self._exhausted:
            result = self._build(again, None)
            if result.kind is ResultKind.EXITED:
                self._failure = result._replace(kind=ResultKind.NOT_STARTED)
            self._replayed += 1
            if time.monotonic() >= until:
                return False
        self._goal, self._replayed = None, goal.tasks
        if self._failure is not None:
            return True
        with self._keeping_failure():
            if self._tasks != goal.tasks or self._digest != goal.digest or not self._recorder.is_at(goal.random):
                raise ReplayError(
                    f"the iterable dataset of worker {self._setup.worker_id} was to be read again up to batch "
                    f"{goal.tasks}, and gave something else than before; to be resumed, a dataset must give the same "
                    "each time that it is read, or have state_dict() and load_state_dict()"
                )
            self._recorder.restore(goal.random)
        self._unrestored = self._failure is not None
        self._last_task = goal.last_task
        return True

    @property
    def replay(self) -> tuple[int, int]:
        """How many batches were built again, and how many that must be."""
        return self._replayed, self._to_replay

    def snapshot_if_due(self, seconds: float) -> tuple[Any, ...] | None:
        """The worker as it is now, if a snapshot is due after these seconds of work."""
        self._recorder.worked(seconds)
        if self._goal is not None or self._unrestored:
            return None
        begins = 0 < self._replayed == self._to_replay  # something new, after all that was built again
        ends = self._exhausted and not self._end_is_told
        self._end_is_told = self._exhausted
        if begins:
            self._replayed = self._to_replay = 0
        if ends:
            return tuple(self.snapshot())
        due = begins or self._recorder.is_due
        state = self._recorder.snapshot_if_settled(self._iterator, **self._place()) if due else None
        return None if state is None else tuple(state)

    def snapshot(self) -> WorkerState:
        """The worker as it is now, where it has changed since the last snapshot."""
        return self._recorder.snapshot(self._iterator, **self._place())

    def _place(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "tasks": self._tasks,
            "last_task": self._last_task,
            "exhausted": self._exhausted,
            "ended": getattr(self._fetcher, "ended", False),
            "digest": self._digest,
        }

    def park(self) -> None:
        """Another worker of this process is to work."""
        self._parked = RandomState.capture([])

    def unpark(self) -> None:
        """This worker is to work again."""
        assert self._parked is not None
        self._parked.restore([])
        torch_worker._worker_info = self._worker_info

    def resume(self, epoch: int, shared_seed: int | None, undo_from: int | None) -> WorkerState:
        """A new iterator over the same dataset; as in torch's persistent workers nothing is seeded again.

        What torch's worker would have been given is built first, also as there, and nothing more: the random streams
        go on from behind it.
        """
        self._read_on(math.inf)
        while self._left:
            task = self._left.popleft()
            if undo_from is None or task.task_id < undo_from:
                self._do(task, None)
        if self._rewind is not None:
            self._rewind.undo_from(undo_from)
        self._epoch, self._exhausted, self._end_is_told = epoch, False, False
        self._tasks, self._last_task, self._digest = 0, -1, 0
        if self._unrestored and self._failure is not None:
            return self.snapshot()._replace(error=self._failure.text)
        if self._fetcher is not None:  # else never started: that failure stands
            self._failure = None
            with self._keeping_failure():
                self._shuffle_datapipe(shared_seed)
                self._create_fetcher()
        self._recorder.forget()  # answers of an epoch that was broken off
        return self.snapshot()

    def run(
        self,
        call: int,
        task_ids: tuple[int, ...],
        indices: list[Wire],
        arena: ArenaWriter | None,
        digests: list[int | None] | None,
    ) -> list[tuple[Result, Any]]:
        """One result a task, and what travels of it, up to the first that cannot be published while others wait.

        What is not wanted is built for a while; the rest of it is left over.
        """
        wanted = digests is None
        known: list[int | None] = [None] * len(task_ids) if digests is None else digests
        self._left.extend(map(_Task, itertools.repeat(call), task_ids, indices, itertools.repeat(wanted), known))
        self._unrestored |= not wanted and self._failure is not None
        self._to_replay += 0 if wanted else len(task_ids)
        if self._page is not None:
            self._page.begin(call)
        results: list[tuple[Result, Any]] = []
        until = time.monotonic() + REPLAY_SECONDS
        if not self._read_on(until):
            return []
        while self._left:
            task = self._left.popleft()
            if self._page is not None and self._page.dropped(task.call, task.task_id):
                self._replayed += not task.wanted
                continue
            result = self._do(task, arena)
            if not task.wanted:
                result = result._replace(wire=None, nbytes=0, skipped=())
            others_wait = bool(self._left) and not self._exhausted
            final = _final(result, PAGE_BYTES if others_wait else IN_BAND_BYTES)
            results.append((result, final))
            if not task.wanted and time.monotonic() >= until:
                break
            if result.kind in (ResultKind.EXITED, ResultKind.NOT_STARTED) or (others_wait and not self._publish(final)):
                break
        return results

    def _do(self, task: _Task, arena: ArenaWriter | None) -> Result:
        """A task's result; that of one that is done again must be what it was."""
        if self._rewind is not None:
            self._rewind.task_begins(task.task_id)
        result = self._build(task, arena)
        self._replayed += not task.wanted
        if task.digest in (None, result.digest) or self._failure is not None or result.kind is ResultKind.EXITED:
            return result
        if has_state(self._dataset) or has_state(self._iterator):
            return result  # they are believed
        with self._keeping_failure():
            raise ReplayError(
                f"batch {task.task_id} of worker {self._setup.worker_id} was built again, for the worker lost its "
                "process or was resumed, and is not what it was: it depends on something that cannot be restored, such "
                "as a random generator that cannot be followed, the time, the process, or the order of a set of "
                "strings (set PYTHONHASHSEED). Make generators in __init__ or in worker_init_fn; or give the dataset "
                "state_dict() and load_state_dict(): then it is believed to restore itself"
            )
        self._unrestored = True
        assert self._failure is not None
        return self._failure._replace(task_id=task.task_id)

    def _publish(self, final: Any) -> bool:
        """Shows a result to the driver before the call ends; False if it does not fit, or must go through Ray."""
        return self._page is not None and isinstance(final, bytes) and self._page.publish(final)

    def _build(self, task: _Task, arena: ArenaWriter | None) -> Result:
        task_id = task.task_id
        if self._failure is not None and (self._unrestored or not self._exhausted):
            # The indices of a stream are endless: that it can't start is told once, as an iterator that raised ends.
            self._exhausted = self._is_iterable and task.wanted and not self._unrestored
            return self._failure._replace(task_id=task_id)
        if self._exhausted:
            return Result(task_id, ResultKind.EXHAUSTED)
        skipped: list[skipping.Skipped] = []
        setup = self._setup
        try:
            if setup.seed_batches:
                # Of a stream: what its number would be if no worker's had ended; the true one depends on when that was.
                number = self._tasks * setup.num_workers + setup.worker_id if self._is_iterable else task_id
                seed_all(setup.base_seed, self._epoch, number)
            if arena is not None:
                arena.begin(setup.worker_id)
            batch = self._fetch(task.indices, arena, skipped)
            encoded = codec.encode(batch, known_classes=True, carry=CARRY)
            checksum = digest(batch, encoded)
            wire, nbytes = to_wire(encoded, arena), sum(buffer.nbytes for buffer in encoded.buffers)
            if arena is not None:
                del batch, encoded  # the last that refer to the batch, unless user code does
                wire = sealed(wire, arena)
            result = Result(task_id, ResultKind.BATCH, wire, nbytes=nbytes, skipped=tuple(skipped), digest=checksum)
        except skipping.NothingLeft:
            result = Result(task_id, ResultKind.EMPTY, skipped=tuple(skipped))
        except Exception as error:  # all that user code can raise: it belongs to the user, not to Ray
            if isinstance(error, StopIteration) and self._is_iterable:
                self._exhausted = True
                return Result(task_id, ResultKind.EXHAUSTED, skipped=tuple(skipped))
            checksum = zlib.crc32(type(error).__qualname__.encode())
            result = _error(task_id, self._where)._replace(skipped=tuple(skipped), digest=checksum)
        except BaseException as error:
            return _exited(task_id, error)
        if self._is_iterable:
            self._digest = chain(result.digest, self._digest)
        self._tasks, self._last_task = self._tasks + 1, task_id
        return result

    def _fetch(self, indices: Wire, arena: ArenaWriter | None, skipped: list[skipping.Skipped]) -> Any:
        kind, collate_fn = self._setup.dataset_kind, self._collate_fn
        stack_into(arena)
        try:
            if self._setup.skip_errors:
                return skipping.fetch(self._fetcher, kind, from_wire(indices), collate_fn, skipped)
            return self._fetcher.fetch(from_wire(indices))
        finally:
            stack_into(None)

    @property
    def _is_iterable(self) -> bool:
        return self._setup.dataset_kind == _DatasetKind.Iterable

    @property
    def _iterator(self) -> Any:
        return getattr(self._fetcher, "dataset_iter", None)

    @contextlib.contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # all that user code can raise, as in _build
            self._failure = _error(-1, self._where)
        except BaseException as error:
            self._failure = _exited(-1, error)._replace(kind=ResultKind.NOT_STARTED)

    def _seed(self) -> None:
        setup = self._setup
        seed = setup.base_seed + setup.worker_id
        torch.set_num_threads(1)
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(setup.base_seed, setup.worker_id))
        self._shuffle_datapipe(setup.shared_seed)
        torch_worker._worker_info = self._worker_info = torch_worker.WorkerInfo(
            id=setup.worker_id, num_workers=setup.num_workers, seed=seed, dataset=self._dataset
        )

    def _shuffle_datapipe(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe):
            assert shared_seed is not None
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, generator)

    def _create_fetcher(self) -> None:
        setup = self._setup
        if self._is_iterable:
            self._recorder.iterator_begins()
        self._fetcher = _DatasetKind.create_fetcher(
            setup.dataset_kind, self._dataset, setup.auto_collation, self._collate_fn, setup.drop_last
        )


def _open_replica(source: Source, *, here: bool) -> Any:
    """The replica: from the driver's image, or this node's own, or a copy if neither can be opened."""
    if source.contents is None or source.hosted is None:
        opened = open_image(source.image, here=here)
    else:
        try:
            opened = open_image(ray.get(source.hosted[0]), here=here)
        except ReplicaMemoryError:
            raise  # no room for one: none for a copy in each worker
        except (RayError, MemoryFileError):  # the host died, or may not be looked into
            if source.contents[0] is None:
                raise
            opened = open_image(source.image, here=here, contents=ray.get(source.contents[0]))
    with no_collection():
        return codec.decode(*opened, source.carried)


# NOTE [final]. A dataset may write to what it returned as soon as it is asked for the next: a reader that reuses its
# buffer does. So a result is final when its task ends. It is pickled once, with copies of what does not lie in a slot,
# and these bytes are what the page and the reply show. Only what is too large for that, or must be looked into by Ray,
# keeps views of the batch's memory: its call ends with it, and Ray copies them before the next one begins.


def _final(result: Result, in_band: int) -> Any:
    """What travels of a result: bytes if at most `in_band` bytes of it must be copied, else its fields."""
    if result.wire is None or fits_in_band(result.wire, in_band):
        return pickle.dumps(tuple(result), pickle.HIGHEST_PROTOCOL)
    return tuple(result)


def result_of(final: Any) -> Result:
    """The result, of what travelled of it."""
    return Result(*(pickle.loads(final) if isinstance(final, bytes) else final))


def _error(task_id: int, where: str) -> Result:
    """The exception being handled, as torch sends it; in words only when its type cannot travel."""
    wrapper = ExceptionWrapper(where=where)
    assert wrapper.exc_type is not None
    text = f"Caught {wrapper.exc_type.__name__} {where}.\nOriginal {wrapper.exc_msg}"
    try:
        wire = to_wire(codec.encode(wrapper, known_classes=True, carry=CARRY))
    except Exception:  # the type's own pickling may raise anything
        return Result(task_id, ResultKind.ERROR, text=text)
    return Result(task_id, ResultKind.ERROR, wire, text)


def _exited(task_id: int, error: BaseException) -> Result:
    return Result(task_id, ResultKind.EXITED, text="".join(traceback.format_exception(error)))
