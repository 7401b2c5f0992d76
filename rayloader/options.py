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
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch.utils.data import IterableDataset

from rayloader.errors import level_outside
from rayloader.task import Given, steps_in
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


_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(OwnArguments).items() if get_origin(kind) is Literal}

# Actor options that the loader sets itself, or with which batches would be repeated, or user code would not run in the
# actor's main thread, or a restarted actor would have lost its dataset and its random streams.
RESERVED_REMOTE_ARGS = {
    *("concurrency_groups", "enable_task_events", "get_if_exists", "lifetime", "max_concurrency", "max_pending_calls"),
    *("max_restarts", "max_task_retries", "name", "namespace", "num_returns"),
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
        derived: dict[str, Any] = {
            "prefetch_factor": _checked_prefetch_factor(loader.prefetch_factor) if loader.num_workers else 0,
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
    steps_in(loader.skip_steps)
    ahead, device = loader.prefetch_to_device, loader.device
    if ahead is not None and (device is None or not is_whole(ahead) or ahead < 1):
        raise ValueError(
            "prefetch_to_device must be a whole number of batches >= 1, beside a device to which they are moved, got "
            f'prefetch_to_device={ahead!r} and device={device!r}; pass device="cuda" too, or leave it out'
        )
    for name, choices in _CHOICES.items():
        if (value := getattr(loader, name)) not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
    timeout = loader.timeout
    if not isinstance(timeout, Real) or not float(timeout) >= 0:  # NaN is not
        raise ValueError(f"timeout must be a number of seconds >= 0, got {timeout!r}; 0 waits for ever")
    if loader.on_timeout == "restart" and not timeout:
        raise ValueError('on_timeout="restart" needs a timeout > 0: the seconds after which a worker counts as hung')
    streams = isinstance(loader.dataset, IterableDataset)
    if loader.scheduling == "dynamic" and (streams or loader.seeding != "batch"):
        raise ValueError(
            f'scheduling="dynamic" needs seeding="batch" and a map-style dataset, got seeding={loader.seeding!r} and '
            f'{"an IterableDataset" if streams else "one"}: samples would depend on who builds them; use "static"'
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
        f"multiprocessing.set_start_method({method!r}) does not concern rayloader's workers, forks unless the program "
        'uses Ray; say workers="fork" if that is right, or workers="ray" for Ray actors',
        stacklevel=level_outside("rayloader", "torch"),
    )


def check_device(device: Any) -> None:
    """Checks that it names a device; whether there is one is only known where the loader is iterated over.

    Raises:
        ValueError: torch knows no such device.
        TypeError: torch's, for what is neither a name nor a device, nor None.
    """
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


def _checked_prefetch_factor(prefetch_factor: Any) -> int:
    number = 2 if prefetch_factor is None else _whole("prefetch_factor", prefetch_factor, 1)  # as torch's constructor
    if number < 1:  # torch's type for this error
        raise AssertionError(
            f"prefetch_factor must be greater than 0, got {number}; use num_workers=0 to load in-process"
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
        raise TypeError(f'ray_remote_args must be a dict such as {{"num_cpus": 1}}, got {remote_args!r}')
    for name in remote_args:
        if name in RESERVED_REMOTE_ARGS:
            raise ValueError(f"ray_remote_args must not hold {name!r}, which the loader sets itself; leave it out")
    amounts = {name: remote_args.get(name) or 0 for name in ("num_cpus", "num_gpus")}
    resources = remote_args.get("resources") or {}
    if not isinstance(resources, dict):
        raise TypeError(f"ray_remote_args['resources'] must be a dict of names to amounts, got {resources!r}")
    for name, amount in {**amounts, **resources}.items():
        if not isinstance(amount, (int, float)) or not amount >= 0:
            raise ValueError(f"ray_remote_args: {name} must be a number >= 0, got {amount!r}")
