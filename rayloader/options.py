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


def check_whole(name: str, value: Any, least: int) -> int:
    """A whole number that the user gave, perhaps one of NumPy's.

    Raises:
        TypeError: it is none.
        ValueError: it is less than `least`.
    """
    rule = f"{name} must be a whole number >= {least}, got {value!r}"
    try:
        number = int(operator.index(value))
    except TypeError:
        raise TypeError(rule) from None
    if number < least:
        raise ValueError(rule)
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
            "prefetch_factor": 0,
            "ray_remote_args": dict(loader.ray_remote_args or {}),
            "needs_actors": _needs_actors(loader),
            "prefetch_to_device": DEVICE_PREFETCH if loader.prefetch_to_device is None else loader.prefetch_to_device,
        }
        if loader.num_workers:  # 2 as in torch's constructor, after which `num_workers` may have been set
            ahead = 2 if loader.prefetch_factor is None else loader.prefetch_factor
            derived["prefetch_factor"] = check_whole("prefetch_factor", ahead, 0)
            if not derived["prefetch_factor"]:  # torch's type for this error
                raise AssertionError("prefetch_factor must be greater than 0, got 0; use num_workers=0")
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
    for name in ("max_worker_restarts", "max_skipped"):
        check_whole(name, getattr(loader, name), 0)
    if loader.device is not None:
        torch.device(loader.device)  # raises torch's error
    steps_in(loader.skip_steps)
    ahead = loader.prefetch_to_device
    if ahead is not None and check_whole("prefetch_to_device", ahead, 1) and loader.device is None:
        raise ValueError(
            f'prefetch_to_device={ahead} needs a device to which batches are moved; pass device="cuda" too'
        )
    for name, choices in _CHOICES.items():
        if (value := getattr(loader, name)) not in choices:
            raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {value!r}")
    timeout = loader.timeout
    if not isinstance(timeout, Real) or not float(timeout) >= 0:  # NaN is not
        raise ValueError(f"timeout must be a number of seconds >= 0, got {timeout!r}; 0 waits for ever")
    if loader.on_timeout == "restart" and not timeout:
        raise ValueError('on_timeout="restart" needs a timeout > 0: the seconds after which a worker counts as hung')
    seeds_batches = loader.seeding == "batch" and not isinstance(loader.dataset, IterableDataset)
    if loader.scheduling == "dynamic" and not seeds_batches:
        raise ValueError('scheduling="dynamic" needs seeding="batch" and a map-style dataset; or use "static"')
    if loader.on_error == "skip" and isinstance(loader.dataset, IterableDataset):
        from rayloader.resume.wrapped import innermost

        if getattr(innermost(loader.dataset), "equal_steps", None) in ("cut", "pad"):  # a ParquetStream
            raise ValueError('on_error="skip" leaves out rows that equal_steps of the dataset counts; use one of them')


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


@functools.cache  # says it once
def check_forks(workers: Workers) -> None:
    """Warns if the program has asked `multiprocessing` for other processes than forks."""
    method = multiprocessing.get_start_method(allow_none=True)
    if workers == "auto" and method not in (None, "fork", multiprocessing.get_all_start_methods()[0]):
        warnings.warn(
            f"multiprocessing.set_start_method({method!r}) does not concern rayloader's workers, forks unless the "
            'program uses Ray; say workers="fork" if that is right, or workers="ray" for Ray actors',
            stacklevel=level_outside("rayloader", "torch"),
        )


def target_of(device: Any) -> tuple[torch.device, Any] | None:
    """The device to which a loader moves its batches; None if they stay where they are. See `gpu/to_device.py`.

    Raises:
        ValueError: it is not here.
        RuntimeError: torch's, which knows no such device.
    """
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
