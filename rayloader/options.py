"""Rayloader's own arguments, and those of torch's that it reads: checks, and the reasons.

Promise: values that the program has set since the loader was created are checked as the constructor checks them. This
module does not import Ray.
"""

from __future__ import annotations

import functools
import multiprocessing
import operator
import os
import socket
import sys
import warnings
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal, TypedDict, get_args

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rayloader.errors import level_outside
from rayloader.task import Given
from rayloader.transport.lanes import switched_off

# Batches on the device ahead of the program: one is copied while the other waits to be taken.
DEVICE_PREFETCH = 2

Workers = Literal["auto", "ray", "fork"]
Seeding = Literal["worker", "batch"]
Scheduling = Literal["static", "dynamic"]
OnTimeout = Literal["raise", "restart"]
OnError = Literal["raise", "skip"]


def lacking() -> str:
    """What rayloader's workers need and this system lacks; empty if that is nothing."""
    if sys.platform != "linux":
        return f"they need Linux, and this is {sys.platform!r}"
    names = [(os, "fork"), (os, "memfd_create"), (socket, "AF_UNIX"), (socket, "send_fds")]
    missing = [f"{module.__name__}.{name}" for module, name in names if not hasattr(module, name)]
    return f"this Python lacks {', '.join(missing)}" if missing else ""


def check_means(what: str) -> None:
    """Checks that rayloader's workers can be had.

    Raises:
        ValueError: they cannot.
    """
    if why := lacking():
        raise ValueError(f"{what} needs rayloader's own workers, which can't be had here: {why}; leave it out")


def is_whole(value: Any) -> bool:
    """Whether it is a whole number; True is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_whole(name: str, value: Any, least: int) -> int:
    """A whole number that the user gave, perhaps one of NumPy's.

    Raises:
        ValueError: it is none, or is less than `least`.
    """
    number = int(value) if is_whole(value) or isinstance(value, np.integer) else least - 1
    if number < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {value!r}")
    return number


class OwnArguments(TypedDict, total=False):
    """The arguments of `DataLoader` that torch's class does not have, with their types."""

    workers: Workers
    ray_remote_args: dict[str, Any] | None
    fresh_processes: bool
    seeding: Seeding
    scheduling: Scheduling
    max_worker_restarts: int
    on_timeout: OnTimeout
    on_error: OnError
    max_skipped: int
    arenas: bool
    snapshot_every_n_steps: int | None
    name: str | None
    num_replicas: int | None
    rank: int | None
    seed: int
    device: torch.device | str | None
    prefetch_to_device: int | None
    skip_steps: Given


# Actor options that the loader sets itself, with the reason that the error gives.
RESERVED_REMOTE_ARGS = {
    "concurrency_groups": "user code must run in the actor's main thread",
    "enable_task_events": "the loader sets it",
    "get_if_exists": "workers belong to one process",
    "lifetime": "workers end with their loader",
    "max_concurrency": "user code must run in the actor's main thread",
    "max_pending_calls": "the loader bounds its calls by prefetch_factor",
    "max_restarts": "a restarted actor would have lost its dataset and its random streams",
    "max_task_retries": "a repeated call would repeat batches",
    "name": "the loader sets it, from its own name",
    "namespace": "the loader sets it",
    "num_returns": "the loader sets it",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a loader as they were when its iterator was created; see `DataLoader` for what they mean."""

    prefetch_factor: int  # 0 without workers
    in_order: bool
    timeout: float
    seeding: Seeding
    scheduling: Scheduling
    max_worker_restarts: int
    on_timeout: OnTimeout
    on_error: OnError
    max_skipped: int
    arenas: bool
    workers: Workers
    fresh_processes: bool
    ray_remote_args: dict[str, Any]
    needs_actors: bool  # the loader's own arguments ask for Ray actors
    device: torch.device | str | None = None
    prefetch_to_device: int = DEVICE_PREFETCH

    @classmethod
    def of(cls, loader: Any) -> Options:
        """Reads and checks them.

        Raises:
            ValueError: one is out of range, or contradicts another.
            TypeError: one is of the wrong type.
        """
        check(loader)
        workers = loader.num_workers
        derived: dict[str, Any] = {
            "prefetch_factor": _checked_prefetch_factor(loader.prefetch_factor, workers) if workers else 0,
            "ray_remote_args": dict(loader.ray_remote_args or {}),
            "needs_actors": _needs_actors(loader),
            "prefetch_to_device": DEVICE_PREFETCH if loader.prefetch_to_device is None else loader.prefetch_to_device,
        }
        as_given = (field.name for field in fields(cls) if field.name not in derived)
        return cls(**derived, **{name: getattr(loader, name) for name in as_given})

    @property
    def dynamic(self) -> bool:
        """Whether any worker may take the next task."""
        return self.scheduling == "dynamic"

    @property
    def uses_lines(self) -> bool:
        """Whether workers are reached over lines."""
        return self.arenas and not switched_off()

    @property
    def seeds_batches(self) -> bool:
        """Whether each batch is seeded by itself: then it does not depend on the worker that builds it."""
        return self.seeding == "batch"

    @property
    def skips_errors(self) -> bool:
        """Whether samples that raise are left out."""
        return self.on_error == "skip"


def check_types(num_workers: Any, timeout: Any, prefetch_factor: Any) -> None:
    """Checks the types of the numbers that torch compares with 0.

    Raises:
        TypeError: in place of that of the comparison, whose text names no argument.
    """
    if num_workers != 0:
        workers = _whole("num_workers", num_workers, 0)
        if workers > 0 and prefetch_factor is not None:
            _whole("prefetch_factor", prefetch_factor, 1)
    _check_type_of_timeout(timeout)


def check(loader: Any) -> None:
    """Checks rayloader's own arguments, attributes of the loader.

    Raises:
        ValueError: one is out of range, or contradicts another.
        TypeError: one is of the wrong type.
    """
    check_remote_args(loader.ray_remote_args)
    for name in ("fresh_processes", "arenas"):
        if not isinstance(value := getattr(loader, name), bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    for name in ("max_worker_restarts", "max_skipped"):
        if not is_whole(value := getattr(loader, name)) or value < 0:
            raise ValueError(f"{name} must be a whole number >= 0, got {value!r}")
    check_device(loader.device)
    if loader.skip_steps is not None:
        from rayloader.resume.skips import steps_in

        steps_in(loader.skip_steps)
    _check_prefetch_to_device(loader.prefetch_to_device, loader.device)
    steps = loader.snapshot_every_n_steps
    if steps is not None and (not is_whole(steps) or steps < 0):
        raise ValueError(f"snapshot_every_n_steps must be None or a whole number >= 0, got {steps!r}; it has no effect")
    choices = {"on_timeout": OnTimeout, "on_error": OnError, "seeding": Seeding, "scheduling": Scheduling}
    choices["workers"] = Workers
    for name, choice in choices.items():
        *others, last = map(repr, get_args(choice))
        if (value := getattr(loader, name)) not in get_args(choice):
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")
    _check_type_of_timeout(loader.timeout)
    if not float(loader.timeout) >= 0:  # NaN is not
        raise ValueError(f"timeout must be a number of seconds >= 0, got {loader.timeout!r}; 0 waits for ever")
    if loader.on_timeout == "restart" and not loader.timeout:
        raise ValueError('on_timeout="restart" needs a timeout > 0: the seconds after which a worker counts as hung')
    if loader.scheduling == "dynamic" and loader.seeding != "batch":
        raise ValueError(
            f'scheduling="dynamic" needs seeding="batch", got seeding={loader.seeding!r}: the random stream of a '
            'worker would depend on which batches it happens to get; pass seeding="batch" too'
        )
    if loader.scheduling == "dynamic" and isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            'scheduling="dynamic" needs a map-style dataset, got an IterableDataset: each worker has its own stream; '
            'use scheduling="static"'
        )
    _check_skipping(loader)


def _check_skipping(loader: Any) -> None:
    if loader.on_error != "skip" or not isinstance(loader.dataset, IterableDataset):
        return
    from rayloader.resume.wrapped import innermost

    equal_steps = getattr(innermost(loader.dataset), "equal_steps", None)  # of a ParquetStream
    if equal_steps in ("cut", "pad"):
        raise ValueError(
            f'on_error="skip" leaves out rows that the dataset counts, got equal_steps={equal_steps!r}: the ranks '
            "would have unequal numbers of steps; use one of the two"
        )


def _needs_actors(loader: Any) -> bool:
    """Whether the loader's own arguments ask for Ray actors.

    Raises:
        ValueError: they ask for forks, too.
    """
    context, why = getattr(loader, "multiprocessing_context", None), ""
    if loader.ray_remote_args:
        why = "ray_remote_args are options of actors"
    elif not loader.arenas or switched_off():
        why = "arenas are switched off, and forks have no other way for batches"
    elif context is not None and (method := context.get_start_method()) != "fork":
        why = f"multiprocessing_context asks for {method!r}"
    if why and loader.workers == "fork":
        raise ValueError(f'workers="fork" makes workers forks of this process, but {why}; leave one of the two out')
    return bool(why) or loader.workers == "ray"


def check_forks(workers: Workers) -> None:
    """Warns once if the program has asked `multiprocessing` for other processes than forks."""
    method = multiprocessing.get_start_method(allow_none=True)
    if workers == "auto" and method not in (None, "fork", multiprocessing.get_all_start_methods()[0]):
        _warn_of_forks(method)


@functools.cache  # says it once
def _warn_of_forks(method: str) -> None:
    warnings.warn(
        f"multiprocessing.set_start_method({method!r}) does not concern rayloader's workers: they are forks of this "
        'process, unless the program uses Ray. Say workers="fork" if that is right, or workers="ray" for Ray actors',
        stacklevel=level_outside("rayloader", "torch"),
    )


def check_device(device: Any) -> None:
    """Checks that it names a device; whether there is one is only known where the loader is iterated over.

    Raises:
        ValueError: torch knows no such device.
        TypeError: it is neither a name nor a device, nor None.
    """
    if device is not None and not isinstance(device, (str, torch.device)):
        raise TypeError(
            f"device must be a name, such as 'cuda' or 'cuda:1', a torch.device or None, got {device!r}; for number n "
            "pass f'cuda:{n}'"
        )
    try:
        torch.device("cpu" if device is None else device)
    except RuntimeError as error:
        raise ValueError(f"device must name one that torch knows, got {device!r}; torch says: {error}") from None


def target_of(device: Any) -> tuple[torch.device, Any] | None:
    """The device to which a loader moves its batches; None if they stay where they are. See `gpu/to_device.py`.

    Raises:
        ValueError: torch knows no such device, or it is not here.
        TypeError: it is neither a name nor a device, nor None.
    """
    check_device(device)
    if device is None or torch.device(device).type == "cpu":
        return None
    from rayloader.gpu.to_device import device_of

    return device_of(device)


def _check_prefetch_to_device(ahead: Any, device: Any) -> None:
    if ahead is not None and (not is_whole(ahead) or ahead < 1):
        raise ValueError(
            f"prefetch_to_device must be a whole number of batches >= 1, got {ahead!r}; to keep batches in main "
            "memory leave device out"
        )
    if ahead is not None and device is None:
        raise ValueError(
            f"prefetch_to_device needs a device to which batches are moved, got prefetch_to_device={ahead} and "
            'device=None; pass device="cuda" too, or leave prefetch_to_device out'
        )


def check_name(name: Any) -> None:
    """Checks the name of a loader.

    Raises:
        TypeError: it is not a text, is empty, or cannot be encoded in UTF-8.
    """
    if not isinstance(name, str) or not name or name.encode("utf-8", "ignore").decode() != name:
        raise TypeError(f"name must be a text that is not empty, or None, got {name!r}")


def checked_num_workers(num_workers: Any, least: int = 0) -> int:
    """The number of workers of a loader; accepts NumPy's integers too, and True, as torch does.

    Raises:
        ValueError: it is less than `least`.
        TypeError: it is not a whole number.
    """
    number = _whole("num_workers", num_workers, least)
    if number < least:
        raise ValueError(f"num_workers must be a whole number >= {least}, got {num_workers!r}")
    return number


def _whole(name: str, value: Any, least: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number >= {least}, got {value!r}; pass an int") from None


def _check_type_of_timeout(timeout: Any) -> None:
    if not isinstance(timeout, Real):
        raise TypeError(f"timeout must be a number of seconds >= 0, got {timeout!r}; pass a float, 0 to wait for ever")


def _checked_prefetch_factor(prefetch_factor: Any, num_workers: int) -> int:
    if prefetch_factor is None:
        raise TypeError(
            f"prefetch_factor must be a whole number where num_workers={num_workers}, got None: torch's default "
            "of 2 is set where a loader is made with workers; set its prefetch_factor too, or make it with num_workers"
        )
    number = _whole("prefetch_factor", prefetch_factor, 1)
    if number < 1:  # torch's type for this error
        raise AssertionError(
            f"prefetch_factor must be greater than 0, got {prefetch_factor!r}; use num_workers=0 to load in-process"
        )
    return number


def check_remote_args(remote_args: Any) -> None:
    """Checks the user's options of actors.

    Raises:
        ValueError: one is not for the user to set, or out of range.
        TypeError: one is of the wrong type.
    """
    if remote_args is None:
        return
    if not isinstance(remote_args, dict) or not all(isinstance(name, str) for name in remote_args):
        raise TypeError(
            f"ray_remote_args must be a dict of actor option names to values, got {remote_args!r}; "
            'for instance {"num_cpus": 1}'
        )
    for name in remote_args:
        if name in RESERVED_REMOTE_ARGS:
            raise ValueError(f"ray_remote_args must not hold {name!r}: {RESERVED_REMOTE_ARGS[name]}; leave it out")
    amounts = {name: remote_args.get(name) or 0 for name in ("num_cpus", "num_gpus")}
    resources = remote_args.get("resources") or {}
    if not isinstance(resources, dict):
        raise TypeError(f"ray_remote_args['resources'] must be a dict of names to amounts, got {resources!r}")
    for name, amount in {**amounts, **resources}.items():
        if not isinstance(amount, (int, float)) or not amount >= 0:
            raise ValueError(
                f"ray_remote_args: {name} must be a number >= 0, got {amount!r}; leave it out for the default"
            )
