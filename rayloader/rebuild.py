"""Builds one batch of a run again, alone.

Promise: it is bit for bit the batch that the run delivered, as far as a state can restore its workers. What cannot be
built again is an error. Ray is not used where workers can be forks.

NOTE [Alone]. The loader is resumed from a state, as for the rest of a run, but skips all steps except for those on
which the batch depends: with `seeding="batch"` none but itself, otherwise those that its worker has built since the
state. The other workers begin, and do nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from rayloader.epoch.local import LocalIterator
from rayloader.errors import RayloaderError, StateError, add_note
from rayloader.options import check_means, check_whole
from rayloader.protocol import Caught
from rayloader.random.generators import RandomState
from rayloader.resume import checkpoint
from rayloader.resume.digest import digest_of
from rayloader.resume.samplers import Samplers, ranks_in
from rayloader.resume.snapshot import has_state
from rayloader.resume.state import SavedPlace, SavedWorker, State, Stream
from rayloader.task import SkipSteps, Step, Task
from rayloader.transport import codec, raw

_STEPS = 2**31  # an epoch has fewer


class Rebuilt(NamedTuple):
    """A batch that was built again.

    Attributes:
        batch: as the loader delivers it, in main memory.
        indices: of its samples, as the sampler gave them; None for an iterable dataset.
        worker_id: of the worker that builds it; None without workers.
        digest: of the batch: equal ones have equal digests, wherever they are built.
        before: how many batches were built before it.
    """

    batch: Any
    indices: Any
    worker_id: int | None
    digest: int
    before: int


class AllBut(SkipSteps):
    """Skips what is not needed to build one batch again.

    Args:
        needed: the steps of the epoch that are built, but for those that were skipped in the run.
        skipped: these, as a state has them.
        end: the step after the last one.
        worker_id: the worker that builds them.
    """

    def __init__(self, needed: Container[int], end: int, worker_id: int, skipped: Iterable[Step] = ()) -> None:
        super().__init__()
        left_out = {*skipped}
        self.has = lambda step: step[1] not in needed or step in left_out
        self.end, self.only_worker = end, worker_id


def rebuilt(loader: Any, states: Sequence[State], epoch: int, step: int) -> Rebuilt:
    """Builds a batch again, in this process: samplers and generators of the program are moved.

    Args:
        loader: created like the run's; it serves for this alone from now on.
        states: of the run. The one is taken from which the fewest steps lead to the batch.
        epoch: of the run, from 0.
        step: of the epoch, from 0.

    Raises:
        ReplayError: a batch since the state came differently than in the run.
        StateError: no state is of that epoch, or none fits, or the batch can't be built from it, or never came.
        Exception: raised by the dataset, as in the run.
    """
    state, skips, count = _planned(loader, checkpoint.load(loader, _nearest(loader, states, epoch, step)), step)
    _alone(loader)
    iterator: Any
    before = RandomState.capture([])
    if loader.num_workers:
        from rayloader.epoch.iterator import EpochIterator

        iterator = EpochIterator(loader, _stream_workers(loader, state), state, skips)
    else:
        iterator = LocalIterator(loader, state, skips)
    if not state.step:  # `iter()` has begun the epoch here as in the run, and has drawn what it drew there
        before = RandomState.capture([])
    error, number = None, -1
    try:
        while number < step:
            error = None
            try:
                batch = next(iterator)
            except (StopIteration, RayloaderError):
                raise
            except Exception as raised:  # of the dataset, in this batch: the run went on after it too
                error = raised
            task: Task = iterator.last_task
            number = iterator.position.step_of(task.task_id)
        if number > step:
            raise StopIteration
    except StopIteration:
        raise _never_came(step) from None
    finally:
        with contextlib.suppress(AttributeError):  # it has no workers
            iterator._shutdown_workers()
    if error is not None:
        raise error
    of_samples = "samples draw" if loader.seeding != "batch" and count else ""
    draws = "sampler draws" if loader.num_workers else of_samples
    if draws and not RandomState.capture([]).equals(before):
        raise StateError(
            f"the {draws} from the program's own random generators, and the program may have used them too in "
            f"the steps from the state to step {step}; pass a state that was saved right before the step"
        )
    indices = None if _is_iterable(loader) else task.indices.indices
    worker_id = task.worker_id if loader.num_workers else None
    return Rebuilt(batch, indices, worker_id, digest_of(batch) if task.digest is None else task.digest, count)


def rebuilt_in_fork(loader: Any, epoch: int, step: int, state: Any = None) -> Rebuilt:
    """The same in a fork of this process, in which nothing changes; see `DataLoader.batch_at`.

    Raises:
        ValueError: there is no such epoch or step.
        RayloaderError: the fork has died.
        Exception: as `rebuilt` does.
    """
    check_whole("epoch", epoch, 0)
    check_whole("step", step, 0)
    given = [] if state is None else [state] if isinstance(state, dict) else [*state]
    states = [State.load(one) for one in given or [loader.state_dict()]]
    check_means("batch_at()")
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(
        target=_send, args=(sending, loader, states, epoch, step), name="rayloader-replay", daemon=True
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
            process.start()
        sending.close()
        try:
            content, buffers = pickle.loads(receiving.recv_bytes())
        except EOFError:
            process.join()
            raise RayloaderError(
                f"the process that was to build step {step} of epoch {epoch} again has died, with exit code "
                f"{process.exitcode}; if memory was short, use `rayloader replay`"
            ) from None
        error, *found = codec.decode(content, [*map(raw.copied, buffers)], ())
        if error is not None:
            raise error
        return Rebuilt(*found)
    finally:
        receiving.close()
        sending.close()
        if process.pid is not None:
            process.kill()
            process.join()


def _send(connection: Any, *arguments: Any) -> None:
    """In the fork: builds the batch, and sends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the program's, which then kills this process
    torch.set_num_threads(1)  # the threads of the program are not here
    try:
        encoded = codec.encode((None, *rebuilt(*arguments)), known_classes=True)
    except Exception as error:
        loader, *_ = arguments
        if not loader.num_workers and not isinstance(error, RayloaderError):  # else it is in the text already
            add_note(error, "".join(traceback.format_tb(error.__traceback__)))
        try:
            encoded = codec.encode((error,), known_classes=True)
            codec.decode(encoded.skeleton, [*map(raw.copied, encoded.buffers)], ())
        except Exception:  # the user's own exception, which may not be picklable
            encoded = codec.encode((RuntimeError(Caught(error, "as a step was built again").text),))
    connection.send_bytes(pickle.dumps((encoded.skeleton, [bytes(buffer) for buffer in encoded.buffers])))


# ---- what must be built


def _nearest(loader: Any, states: Sequence[State], epoch: int, step: int) -> State:
    """The state from which the fewest steps lead to this one."""
    ranks = ranks_in(loader, Samplers(loader))
    fitting = [state for state in states if state.epoch == epoch and (ranks is None or state.fits.rank == ranks.rank)]
    if not fitting:
        of_rank = "" if ranks is None else f" and of rank {ranks.rank}"
        raise StateError(
            f"to build step {step} of epoch {epoch}, a state of that epoch{of_rank} is needed; got states of epochs "
            f"{sorted({state.epoch for state in states})}"
        )
    return min(fitting, key=lambda state: step - state.step if step >= state.step else step + state.step)


def _planned(loader: Any, state: State, step: int) -> tuple[State, SkipSteps, int]:
    """How a step is built again: the state to resume from, what is left out, and how many batches come before it."""
    is_iterable, place = _is_iterable(loader), state.position
    depends = _why_it_depends(loader, state)
    if place is not None and not place.finished and (step < state.step or step in place.ahead):
        state = _from_start(loader, state, place, step, is_free=not depends)
    place, start = state.position, state.step
    if (state.epoch, step) in state.skip_steps or step >= _STEPS:
        raise _never_came(step)
    count = checkpoint.continuation(loader, state, _stream_workers(loader, state))[1]
    if not depends:
        if count:
            state = _with_workers(state, lambda _: checkpoint.fresh_worker(state.position))
        return state, AllBut({step}, step + 1, step % max(1, count)), 0
    if not count:
        return state, AllBut(range(start, step + 1), step + 1, 0, state.skip_steps), step - start
    if is_iterable:  # whose turn it is depends on which streams have ended before, so all are read
        return state, SkipSteps(), step - start
    if count > 1 and (not loader.in_order or loader.scheduling == "dynamic"):
        raise StateError(
            f"step {step} depends on the batches that its worker has built before it ({depends}), and with "
            f"in_order={loader.in_order} and scheduling={loader.scheduling!r} no state says which; use seeding='batch'"
        )
    worker_id = step % count
    mine = range(start + (worker_id - start) % count, step + 1, count)
    again = 0 if place is None else len(place.workers[worker_id].to_rebuild)
    skipped = sum(epoch == state.epoch and one in mine for epoch, one in state.skip_steps)
    state = _with_workers(state, lambda number: None if number == worker_id else SavedWorker())
    return state, AllBut(mine, step + 1, worker_id, state.skip_steps), len(mine) - 1 + again - skipped


def _stream_workers(loader: Any, state: State) -> int:
    """How many workers the run had; this loader may have another number of processes for them."""
    return state.num_workers or int(loader.num_workers)


def _from_start(loader: Any, state: State, place: SavedPlace, step: int, *, is_free: bool) -> State:
    """The state at the start of its epoch, in which the step was taken already."""
    why = ""
    if place.begin.epoch and not is_free:
        why = "persistent workers begin an epoch where they have ended the one before"
    elif not loader.num_workers and not is_free:
        why = "without workers, samples draw from the program's own random generators, which have moved on"
    if why:
        raise StateError(
            f"step {step} can't be built from this state, which was saved after step {state.step - 1}: {why}; "
            "pass a state that was saved before the step"
        )
    begin = place._replace(
        stream=None if place.stream is None else Stream(),
        workers=(SavedWorker(),) * len(place.workers),
        ahead=(),
        next_task=0,
        next_worker=0,
        delivered=0,
        checksum=0,
        skipped=0,
        # All draws are made where the generators are as they were, and those that the state has are compared with it.
        draws=max(step + 1, place.next_task),
        drawn=place.next_task,
        drawn_checksum=place.checksum,
    )
    return state._replace(position=begin)


def _with_workers(state: State, other: Callable[[int], SavedWorker | None]) -> State:
    """The state with other workers; None: the worker stays as it is."""
    if (place := state.position) is None:
        return state
    workers = tuple(other(number) or worker for number, worker in enumerate(place.workers))
    return state._replace(position=place._replace(workers=workers))


def _is_iterable(loader: Any) -> bool:
    return isinstance(loader.dataset, IterableDataset)


def _why_it_depends(loader: Any, state: State) -> str:
    """Why a batch may depend on earlier ones of its worker; an empty text if it does not."""
    if loader.seeding != "batch":
        return "a worker's random stream goes on from batch to batch"
    if _is_iterable(loader):
        return "a stream goes on from batch to batch"
    if has_state(loader.dataset):
        return "the dataset has a state"
    if held := checkpoint.generators_of(loader):
        return f"{next(iter(held))} goes on from batch to batch"
    # What `worker_init_fn` makes is in the workers alone.
    is_held = state.position is not None and state.position.remembers
    return "a random generator of its worker goes on from batch to batch" if is_held else ""


def _alone(loader: Any) -> None:
    """Sets what does not matter to a batch as it serves one that is built alone."""
    loader.in_order, loader.scheduling, loader.prefetch_factor = True, "static", 2 if loader.num_workers else None
    loader.timeout, loader.on_timeout, loader.max_skipped = 0, "raise", sys.maxsize
    loader.device, loader.prefetch_to_device, loader.pin_memory = None, None, False
    if sys.platform == "linux":
        loader.workers, loader.ray_remote_args, loader.arenas, loader.multiprocessing_context = "fork", None, True, None


def _never_came(step: int) -> StateError:
    return StateError(
        f"step {step} was never delivered: the epoch has fewer steps, or the step was in skip_steps, or all its "
        "samples were skipped"
    )
