"""The worker: an actor process that holds a replica of the dataset, fetches and collates.

Promise: user code runs in the actor's one main thread, seeded and set up as torch's worker loop does it. Nothing that
user code raises leaves through Ray: it travels as a `Result`. The process is warm: `stop` puts back what the user's code
may have changed of it (see `ProcessState`), so that another epoch, or another loader, finds it as new. The actor starts no
thread and owns nothing but its process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pickle import PickleBuffer
from typing import Any

import numpy as np
import ray
import torch
import torch.utils.data._utils.worker as torch_worker
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, _DatasetKind
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data.graph_settings import apply_random_seed

from rayloader.transport import codec

# What Ray hands over of an encoded object: the skeleton and the buffers, out of band.
Wire = tuple[bytes, list[Any]]


def to_wire(encoded: codec.Encoded) -> Wire:
    """Wraps the buffers so that Ray sends them out of band, without a copy of its own."""
    return encoded.skeleton, [PickleBuffer(buffer) for buffer in encoded.buffers]


def from_wire(wire: Wire) -> Any:
    """Rebuilds the object; what it holds is writable and its own (Ray's buffers are read-only)."""
    skeleton, buffers = wire
    return codec.decode(skeleton, codec.writable_copies(buffers))


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What a forked worker would inherit from the driver, as it was at `iter()`."""

    node_id: str  # of the driver: some of it means something there only
    cwd: str
    environ: dict[str, str]
    argv: list[str]
    sys_path: list[str]
    affinity: set[int]  # cores of the thread that called iter()
    default_dtype: torch.dtype
    grad_enabled: bool

    @classmethod
    def capture(cls) -> ProcessState:
        """The state of this process and thread."""
        try:
            cwd = os.getcwd()
        except FileNotFoundError:  # removed under our feet: there is none to pass on
            cwd = ""
        return cls(
            node_id=ray.get_runtime_context().get_node_id(),
            cwd=cwd,
            environ=dict(os.environ),
            argv=list(sys.argv),
            sys_path=[os.path.abspath(entry or cwd) for entry in sys.path],
            affinity=os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(),
            default_dtype=torch.get_default_dtype(),
            grad_enabled=torch.is_grad_enabled(),
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What one worker is told before its first task; the same for all but for `worker_id`."""

    worker_id: int
    num_workers: int
    base_seed: int
    shared_seed: int | None  # of IterDataPipes
    dataset_kind: int
    auto_collation: bool
    drop_last: bool
    process: ProcessState


@dataclass(frozen=True, slots=True)
class Replica:
    """What travels once per worker: the user's objects, pickled together, as one fork would copy them together."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    worker_init_fn: Callable[[int], Any] | None
    collate_fn_map: dict[Any, Any]  # what the user changed of torch's default_collate_fn_map


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """Where a worker runs."""

    pid: int
    node_id: str
    hostname: str


class ResultKind(Enum):
    """What became of a task."""

    BATCH = "batch"
    ERROR = "error"  # the user's exception, as torch's ExceptionWrapper
    EXHAUSTED = "exhausted"  # the worker's iterable dataset has ended
    EXITED = "exited"  # user code asked this process to end: SystemExit, KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Result:
    """One task's answer. `wire` holds the batch or the ExceptionWrapper; `text` says it in words where there is an error."""

    task_id: int
    kind: ResultKind
    wire: Wire | None = None
    text: str = ""


STOCK_COLLATE_MODULE = "torch.utils.data._utils.collate"


def changed_collate_fn_map() -> dict[Any, Any]:
    """The entries that the user added to torch's collate map: a forked worker would have them."""
    return {
        key: function
        for key, function in default_collate_fn_map.items()
        if getattr(function, "__module__", None) != STOCK_COLLATE_MODULE
    }


def _stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    """torch's collate for tensors as it runs outside of workers (see NOTE [no shared memory in collate])."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)  # type: ignore[no-any-return]
    finally:
        torch_worker._worker_info = info


# NOTE [no shared memory in collate]
# In a worker torch's default_collate allocates fresh shared memory for each batch, ten times slower than a plain stack, and
# of no use here: batches do not travel in torch's shared memory. It decides by get_worker_info(), so the map's tensor
# entry calls it with that hidden.


class Worker:
    """One actor process. Ray calls its methods one after the other, on the main thread."""

    def __init__(self) -> None:
        self._baseline = _Baseline()
        self._failure: Result | None = None
        self._fetcher: Any = None
        self._exhausted = False
        gc.freeze()  # what was imported stays: `stop` collects the user's objects only

    def hello(self) -> WorkerAddress:
        """Where this worker runs; also the proof that it does."""
        return WorkerAddress(os.getpid(), ray.get_runtime_context().get_node_id(), socket.gethostname())

    def start(self, setup: Setup, replica: Wire) -> None:
        """Makes this process worker `setup.worker_id`: seeds, dataset, worker_init_fn, in torch's order.

        An error is kept and answers every task.
        """
        self._setup = setup
        self._failure = None
        self._exhausted = False
        with self._keeping_failure():
            self._baseline.adopt(setup.process)
            loaded: Replica = from_wire(replica)
            self._dataset, self._collate_fn = loaded.dataset, loaded.collate_fn
            default_collate_fn_map[torch.Tensor] = _stack
            default_collate_fn_map.update(loaded.collate_fn_map)
            self._seed(setup)
            if loaded.worker_init_fn is not None:
                loaded.worker_init_fn(setup.worker_id)
            self._fetcher = self._create_fetcher()

    def resume(self, shared_seed: int | None) -> None:
        """A new epoch with the same dataset object, as torch's persistent workers have it: nothing is seeded again."""
        if self._fetcher is None:
            return  # never started: the failure of `start` stands
        self._failure = None
        self._exhausted = False
        with self._keeping_failure():
            self._shuffle_datapipe(shared_seed)
            self._fetcher = self._create_fetcher()

    def run(self, task_ids: tuple[int, ...], indices: Wire) -> list[Result]:
        """Builds the tasks' batches, in order; `indices` holds a list with what the sampler gave for each."""
        results: list[Result] = []
        try:
            all_indices = from_wire(indices)
        except Exception:  # whatever unpickling the user's index objects raises
            return [_error(task_id, self._where) for task_id in task_ids]
        for task_id, task_indices in zip(task_ids, all_indices, strict=True):
            results.append(self._build(task_id, task_indices))
        return results

    def stop(self) -> None:
        """Lets go of the dataset and puts the process back as it was."""
        self._fetcher = self._dataset = self._collate_fn = self._failure = self._setup = None  # type: ignore[assignment]
        torch_worker._worker_info = None
        self._baseline.restore()
        gc.collect()

    def _build(self, task_id: int, indices: Any) -> Result:
        if self._failure is not None:
            return Result(task_id, self._failure.kind, self._failure.wire, self._failure.text)
        if self._exhausted:
            return Result(task_id, ResultKind.EXHAUSTED)
        try:
            batch = self._fetcher.fetch(indices)
            return Result(task_id, ResultKind.BATCH, to_wire(codec.encode(batch, known_classes=True)))
        except Exception as error:  # all that user code can raise: it belongs to the user, not to Ray
            if isinstance(error, StopIteration) and self._setup.dataset_kind == _DatasetKind.Iterable:
                self._exhausted = True
                return Result(task_id, ResultKind.EXHAUSTED)
            return _error(task_id, self._where)
        except BaseException as error:
            return _exited(task_id, error)

    @property
    def _where(self) -> str:
        return f"in DataLoader worker process {self._setup.worker_id}"

    @contextlib.contextmanager
    def _keeping_failure(self) -> Any:
        try:
            yield
        except Exception:  # all that user code can raise, as in _build
            self._failure = _error(-1, self._where)
        except BaseException as error:
            self._failure = _exited(-1, error)

    def _seed(self, setup: Setup) -> None:
        seed = setup.base_seed + setup.worker_id
        torch.set_num_threads(1)
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(setup.base_seed, setup.worker_id))
        self._shuffle_datapipe(setup.shared_seed)
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=setup.worker_id, num_workers=setup.num_workers, seed=seed, dataset=self._dataset
        )

    def _shuffle_datapipe(self, shared_seed: int | None) -> None:
        if isinstance(self._dataset, IterDataPipe):
            assert shared_seed is not None
            generator = torch.Generator()
            generator.manual_seed(shared_seed)
            self._dataset = apply_random_seed(self._dataset, generator)

    def _create_fetcher(self) -> Any:
        setup = self._setup
        return _DatasetKind.create_fetcher(
            setup.dataset_kind, self._dataset, setup.auto_collation, self._collate_fn, setup.drop_last
        )


def _error(task_id: int, where: str) -> Result:
    """The exception being handled, as torch sends it; in words only when its type cannot travel."""
    wrapper = ExceptionWrapper(where=where)
    assert wrapper.exc_type is not None
    text = f"Caught {wrapper.exc_type.__name__} {where}.\nOriginal {wrapper.exc_msg}"
    try:
        wire = to_wire(codec.encode(wrapper, known_classes=True))
    except Exception:  # the type's own pickling may raise anything
        return Result(task_id, ResultKind.ERROR, text=text)
    return Result(task_id, ResultKind.ERROR, wire, text)


def _exited(task_id: int, error: BaseException) -> Result:
    return Result(task_id, ResultKind.EXITED, text="".join(traceback.format_exception(error)))


class _Baseline:
    """The process as Ray started it: the driver's state is put on for an epoch and taken off after it."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()
        self._environ = dict(os.environ)
        runtime_env = ray.get_runtime_context().runtime_env.get("env_vars") or {}
        self._own_variables = {
            key for key in self._environ if key.startswith("RAY_") or key == "CUDA_VISIBLE_DEVICES"
        } | set(runtime_env)
        self._argv = list(sys.argv)
        self._sys_path = list(sys.path)
        self._affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self._default_dtype = torch.get_default_dtype()
        self._num_threads = torch.get_num_threads()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._collate_fn_map = dict(default_collate_fn_map)

    def adopt(self, state: ProcessState) -> None:
        """Takes over what a forked worker would have; on another node than the driver's, what means something there."""
        here = state.node_id == ray.get_runtime_context().get_node_id()
        if state.cwd and os.path.isdir(state.cwd):
            os.chdir(state.cwd)
        _set_environ(self._merged_environ(state.environ, here=here))
        sys.argv[:] = state.argv
        sys.path[:] = [*state.sys_path, *(entry for entry in self._sys_path if entry not in state.sys_path)]
        if here and state.affinity:
            os.sched_setaffinity(0, state.affinity)
        torch.set_default_dtype(state.default_dtype)
        torch.set_grad_enabled(state.grad_enabled)

    def _merged_environ(self, driver: dict[str, str], *, here: bool) -> dict[str, str]:
        """The driver's variables; Ray's own and what `runtime_env` or Ray set for this actor stay.

        Elsewhere than on the driver's node the machine's own values win: PATH and HOME mean other things there.
        """
        own = {key: value for key, value in self._environ.items() if not here or key in self._own_variables}
        return {**{key: value for key, value in driver.items() if not key.startswith("RAY_")}, **own}

    def restore(self) -> None:
        """Puts everything back, whatever user code did to it."""
        os.chdir(self._cwd)
        _set_environ(self._environ)
        sys.argv[:] = self._argv
        sys.path[:] = self._sys_path
        if self._affinity:
            os.sched_setaffinity(0, self._affinity)
        torch.set_default_dtype(self._default_dtype)
        torch.set_num_threads(self._num_threads)
        torch.set_grad_enabled(True)
        for number, handler in self._signals.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        default_collate_fn_map.clear()
        default_collate_fn_map.update(self._collate_fn_map)


def _set_environ(environ: dict[str, str]) -> None:
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    for key, value in environ.items():
        if os.environ.get(key) != value:
            os.environ[key] = value
