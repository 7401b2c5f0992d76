"""Every private name of torch and Ray that rayloader uses: where to look when a new version of one of them differs."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import inspect
import io
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch._tensor import _rebuild_from_type_v2 as rebuild_from_type
from torch._utils import ExceptionWrapper
from torch._utils import _get_obj_state as state_of_subclass
from torch.utils.data import _DatasetKind as DatasetKind
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data._utils.worker import _generate_state as numpy_seed
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseIterator
from torch.utils.data.dataloader import _InfiniteConstantSampler as InfiniteConstantSampler
from torch.utils.data.dataloader import _sharding_worker_init_fn as sharding_worker_init_fn
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter as SingleProcessIterator
from torch.utils.data.datapipes.datapipe import _DataPipeSerializationWrapper as DataPipeWrapper

__all__ = [
    "RAY_START_LOGGERS",
    "BaseIterator",
    "DataPipeWrapper",
    "DatasetKind",
    "ExceptionWrapper",
    "InfiniteConstantSampler",
    "SingleProcessIterator",
    "authenticate",
    "collate_tensor_fn",
    "connection_of",
    "default_collate_fn_map",
    "give_own_random",
    "has_process",
    "may_autoscale",
    "newline_of",
    "no_torch_function",
    "numpy_seed",
    "on_completed",
    "pin_memory",
    "profiler_enabled",
    "rebuild_from_type",
    "set_process_title",
    "set_worker_info",
    "sharding_worker_init_fn",
    "state_of_subclass",
    "torch_worker",
]

profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
no_torch_function = torch._C.DisableTorchFunctionSubclass
# Loggers of Ray that say at its start what a program that has not asked for Ray need not know.
RAY_START_LOGGERS = "ray._private.worker", "ray._private.authentication.authentication_token_setup"


def set_worker_info(info: Any) -> None:
    """What `get_worker_info()` gives in this process."""
    torch_worker._worker_info = info


def newline_of(file: io.TextIOWrapper) -> str | None:
    """The argument `newline` that a text file was made with, which has no attribute. Only directly after a `seek`.

    Raises:
        TypeError: this interpreter does not tell.
    """
    for newline in _NEWLINES:
        if _newline_of(io.TextIOWrapper(io.BytesIO(), newline=newline)) != newline:
            raise TypeError("cannot pickle a text file: this Python does not tell its newline argument; open it binary")
    return _newline_of(file)


_NEWLINES = None, "", "\n", "\r", "\r\n"


def _newline_of(file: io.TextIOWrapper) -> str | None:
    found = [held for held in gc.get_referents(file) if isinstance(held, str) and held in _NEWLINES]
    return found[0] if found else None


def on_completed(ref: Any, callback: Callable[[Any], None]) -> None:
    """Has a thread of Ray's call this with the answer of a call, or with Ray's error."""
    ref._on_completed(callback)


def connection_of(ray: ModuleType) -> Any:
    """What stands for this process's connection to a cluster, and goes with it; None if there is none.

    Its `session_name` is what newer versions of Ray give by `get_runtime_context().get_session_name()`.
    """
    worker = ray._private.worker.global_worker
    return worker.node if worker.connected else None


def has_process(ray: ModuleType, actor: Any) -> bool:
    """Whether Ray has found a place for an actor and a process there, which need not run the actor yet."""
    return bool(ray._private.state.actors(actor._actor_id.hex()).get("Pid"))


def set_process_title(ray: ModuleType, title: str) -> None:
    """What `ps` and `top` show of this process; Ray sets it again when a call of an actor begins or ends."""
    with ray._private.worker._changeproctitle(title, title):  # where the function that it calls is differs by version
        pass


def may_autoscale(ray: ModuleType) -> bool:
    """Whether the cluster that Ray is connected to has an autoscaler."""
    return ray._private.state.state.get_max_resources_from_cluster_config() is not None


def give_own_random(ray: ModuleType) -> None:
    """Has Ray's processes and connections draw from a generator of their own, not from the program's `random`."""
    for name, module in list(sys.modules.items()):
        if (
            name.startswith(("ray._private.", "ray._common.", "ray._raylet"))
            and getattr(module, "random", None) is random
        ):
            module.random = _random_of_ray()  # type: ignore[attr-defined]


@functools.cache
def _random_of_ray() -> ModuleType:
    """The module `random` once more."""
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def authenticate(ray: ModuleType) -> None:
    """What `ray.init` does first where it starts a local Ray, for a process that joins one by its address.

    That is nothing in versions of Ray that do not switch token authentication on by themselves.
    """
    setup = getattr(getattr(ray._private, "authentication", None), "authentication_token_setup", None)
    enable = getattr(setup, "enable_token_auth_by_default", None)
    if enable is not None:
        enable()


@contextlib.contextmanager
def own_start(ray: ModuleType, worker_path: str | None, *, dashboard: bool) -> Iterator[None]:
    """A Ray of one machine and one program, that is started meanwhile, starts no processes that are of no use to it.

    Args:
        ray: the module.
        worker_path: the script that it is to run for its worker processes; None: its own.
        dashboard: whether the dashboard was asked for. Where it was not, Ray would start its process nevertheless, with
            nothing to serve, and wait for it; and that of the autoscaler.
    """
    parameters, services = ray._private.parameter.RayParams, ray._private.services
    before, start_dashboard = parameters.__init__, services.start_api_server
    known = inspect.signature(before).parameters
    wanted = {"worker_path": worker_path, "no_monitor": not dashboard}
    parameters.__init__ = functools.partialmethod(before, **{key: wanted[key] for key in wanted if key in known})
    if not dashboard:
        services.start_api_server = lambda *_, **__: (None, None)
    try:
        yield
    finally:
        parameters.__init__, services.start_api_server = before, start_dashboard
