"""Every private name of torch, cloudpickle, Python and datasets that rayloader uses: where to look when one differs.

Its imports are for other files too (mypy and ruff know: see pyproject.toml).

NOTE [Loaded positions]. An `IterableDataset` of Hugging Face's `datasets` into which a position was loaded
(`load_state_dict()`) begins each iteration there until its epoch changes, and between two iterations reports the
position at which the last one ended. A program that loads a position wants that. Where rayloader loads one, for the
rest of one epoch, the next epoch would begin in its middle, or be empty. The same holds if the loader's dataset is of
the user's own class, holds such streams, and passes its own `state_dict()` and `load_state_dict()` on to them, at once
or when it is iterated.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing.resource_tracker
import multiprocessing.util
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from rayloader.errors import private_names_of
from rayloader.namespaces import attributes_in

with private_names_of("torch"):
    from torch._tensor import _rebuild_from_type_v2 as rebuild_from_type
    from torch._utils import ExceptionWrapper
    from torch._utils import _get_obj_state as state_of_subclass
    from torch.multiprocessing.reductions import shared_cache
    from torch.utils.data import _DatasetKind as DatasetKind
    from torch.utils.data._utils import worker as torch_worker
    from torch.utils.data._utils.collate import (
        collate_float_fn,
        collate_int_fn,
        collate_tensor_fn,
        default_collate_fn_map,
    )
    from torch.utils.data._utils.pin_memory import pin_memory
    from torch.utils.data._utils.worker import _generate_state as numpy_seed
    from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseIterator
    from torch.utils.data.dataloader import _InfiniteConstantSampler as InfiniteConstantSampler
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as MultiProcessIterator
    from torch.utils.data.dataloader import _sharding_worker_init_fn as sharding_worker_init_fn
    from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as SingleProcessIterator
    from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper as DataPipeWrapper

    profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
    no_torch_function = torch._C.DisableTorchFunctionSubclass
    function_modes, dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    _free_dead_storages: Callable[[], None] = shared_cache.free_dead_references

    # Of tensors and storages. What is read of each tensor of a batch is read where it is used, which takes no call;
    # those names are listed in tests/unit/test_layout.py.
    _storages: Any = torch.UntypedStorage
    reduce_as_torch: Callable[[torch.Tensor, int], Any] = torch.Tensor._reduce_ex_internal
    shared_by_descriptor = _storages._new_shared_fd_cpu  # a storage
    share_by_descriptor = _storages._share_fd_cpu_  # of a storage

with private_names_of("cloudpickle"):
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as ids_by_class
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as classes_by_id
    from cloudpickle.cloudpickle import _class_setstate as fill_class
    from cloudpickle.cloudpickle import _get_or_create_tracker_id as id_of_class
    from cloudpickle.cloudpickle import _make_skeleton_class as make_class
    from cloudpickle.cloudpickle import _make_skeleton_enum as make_enum

COMPILED = "_torchdynamo_orig_callable"  # an attribute of functions that `torch.compile` has made
typed_storage = functools.partial(torch.TypedStorage, _internal=True)  # without a warning
untyped_in = operator.attrgetter("_untyped_storage")  # of a typed storage; `untyped()` warns
datapipe_in = operator.attrgetter("_datapipe")  # of a `DataPipeWrapper`

torch_tensor = torch.tensor


_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


def current_accelerator() -> torch.device | None:
    """The kind of accelerator that this torch works with. If there is none, torch 2.6 raises an error."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:
        return None


def pinning_device_index(kind: str | None) -> int:
    """The device that batches are pinned for.

    Args:
        kind: `_pin_memory_device` of torch's iterator. The loader of torch 2.6 pins for the kind that the user named,
            else for CUDA; that of torch 2.9 and newer for the current accelerator.
    """
    if _TORCH < (2, 9):
        return int(torch.get_device_module(kind or "cuda").current_device())
    return torch.accelerator.current_device_index()


# In torch 2.6 and 2.9 the list of storages that were sent to other processes keeps the attributes of storages that are
# gone, and is cleared only when it has 128 entries; in torch 2.13 it does not keep them.
KEEPS_SENT_STORAGES = _TORCH < (2, 13)


def release_sent_storages() -> None:
    """Releases these attributes."""
    if shared_cache and shared_cache.lock.acquire(blocking=False):  # otherwise a later call does it
        try:
            _free_dead_storages()
        finally:
            shared_cache.lock.release()


def default_store() -> Any:
    """The store of torch.distributed's default process group; raises ImportError if this torch does not offer it."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def set_worker_info(info: Any) -> None:
    """Sets what `get_worker_info()` returns in this process."""
    torch_worker._worker_info = info


with private_names_of("Python"):
    call_at_begin_of_exit: Callable[..., None] = threading._register_atexit  # type: ignore[attr-defined]
    _exit_function: Callable[[], None] = multiprocessing.util._exit_function  # type: ignore[attr-defined]
    _tracker: Any = multiprocessing.resource_tracker._resource_tracker


class Identity(NamedTuple):
    """What programs tell processes of `multiprocessing` apart by, of all that a program and its children make."""

    name: str
    numbers: tuple[int, ...]  # that of the process, after those of the one that has made it


def new_identity() -> Identity:
    """That of a process which this one would make now, as torch's loader makes a worker; it is given only once."""
    process: Any = multiprocessing.Process()
    return Identity(process.name, process._identity)


def take_identity(identity: Identity) -> None:
    """This process has that one from now on."""
    process: Any = multiprocessing.current_process()
    process.name, process._identity = identity


def run_as_process(work: Callable[[], object], identity: Identity, parent: int, sentinel: int | None) -> int:
    """Does in this fork what `multiprocessing` does in one that it has made; returns the exit code.

    Args:
        work: what the process does.
        identity: of the process.
        parent: the id of the process that counts as its parent, of which this one is a fork, perhaps of a fork.
        sentinel: a descriptor that is readable once the parent has ended; None: there is none.
    """
    process: Any = multiprocessing.Process(target=work, daemon=True)
    process.name, process._identity = identity
    process._parent_pid = parent
    return int(process._bootstrap(sentinel))


def run_finalizers() -> None:
    """Ends the process's children and finalizes as `multiprocessing` does at the end of a process that it has made."""
    _exit_function()


def end_tracker() -> None:
    """Waits until this process's resource tracker has removed the shared memory that is left, and has ended.

    Not in a process that `multiprocessing` has made, whose tracker is the one of its parent.
    """
    _tracker._stop()


libc = ctypes.CDLL(None)  # loaded before there are forks


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, because fresh pages are a loader's main cost; not without glibc."""
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


# ---- streams of Hugging Face's datasets, see NOTE [Loaded positions]

# How many objects of a dataset are looked at, and how many may be in one container: larger ones hold samples.
_MOST, _MOST_IN_ONE = 5000, 100
# The position of the start: a stream begins there, because its own epoch is a number. What any other position contains
# belongs to the shards that a worker reads, which are not known before.
_START = {"examples_iterable": None, "epoch": None}


class LoadedPosition(dict[str, Any]):
    """A position that rayloader loads, and, as an attribute, the one that the program had loaded before.

    Attributes:
        before: that position, or None.
    """

    before: Any = None


@contextlib.contextmanager
def loading_streams(dataset: Any) -> Iterator[None]:
    """The positions that its streams load meanwhile are rayloader's: `begin_streams` will undo that."""
    before = [(stream, _own_position(stream)) for stream in _streams_in(dataset)]
    try:
        yield
    finally:
        for stream, own in before:
            loaded = stream._starting_state_dict
            if loaded == _START:
                stream._starting_state_dict = own
            elif loaded is not own and isinstance(loaded, dict) and not isinstance(loaded, LoadedPosition):
                stream._starting_state_dict = LoadedPosition(loaded)
                stream._starting_state_dict.before = own


def begin_streams(dataset: Any) -> None:
    """Makes its streams begin their next iteration where the program would have it begin, and report that position."""
    for stream in _streams_in(dataset):
        stream._starting_state_dict = _own_position(stream)
        stream._state_dict = _START


def _own_position(stream: Any) -> Any:
    with private_names_of("datasets"):
        loaded = stream._starting_state_dict
    return loaded.before if isinstance(loaded, LoadedPosition) else loaded


def _streams_in(dataset: Any) -> list[Any]:
    """The streams of `datasets` that a stream is, or holds."""
    module = sys.modules.get("datasets.iterable_dataset")
    if module is None or not isinstance(dataset, IterableDataset):
        return []
    objects: list[Any] = [dataset]
    found, seen = [], set[int]()
    for obj in objects:  # which grows
        if id(obj) in seen or len(seen) == _MOST:
            continue
        seen.add(id(obj))
        if issubclass(type(obj), module.IterableDataset):
            found.append(obj)
        elif type(obj) is not types.ModuleType:
            objects += _held_by(obj)
    return found


def _held_by(obj: Any) -> Collection[Any]:
    """The contents of a container, or the attributes of anything else; calls no code of the user's."""
    if type(obj) in (list, tuple):
        held: Collection[Any] = obj
    else:
        held = dict.values(obj if issubclass(type(obj), dict) else attributes_in(obj) or {})
    return held if len(held) <= _MOST_IN_ONE else ()
