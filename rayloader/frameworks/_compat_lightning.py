"""Every private name of Lightning that rayloader uses: who reads loaders, and what its loop has loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

_PACKAGES = "lightning.pytorch", "pytorch_lightning"


def fetcher_classes() -> tuple[type, ...]:
    """The classes of what reads a `CombinedLoader`, in each of the packages that is imported."""
    return _classes("loops.fetchers", "_PrefetchDataFetcher")


def loop_classes() -> tuple[type, ...]:
    """The classes of the loop that trains."""
    return _classes("loops.fit_loop", "_FitLoop")


def _classes(module: str, name: str) -> tuple[type, ...]:
    modules = [sys.modules[path] for package in _PACKAGES if (path := f"{package}.{module}") in sys.modules]
    return tuple(vars(module)[name] for module in modules if name in vars(module))


def _resumes(loop: Any) -> bool:
    # Older versions lack this property; the other one is false for a checkpoint from after an epoch.
    return bool(loop.is_resuming if hasattr(loop, "is_resuming") else loop.restarting)


def has_states(loop: Any) -> bool:
    """Whether the loop has states of a checkpoint that it has not loaded into its loaders."""
    return _resumes(loop) and bool(getattr(loop, "_combined_loader_states_to_load", ()))


def ended_an_epoch(loop: Any) -> bool:
    """Whether the checkpoint that the loop has loaded, and not begun to continue, was saved at the end of an epoch."""
    return _resumes(loop) and bool(loop.epoch_loop.batch_progress.is_last_batch)


def take_states(loop: Any, combined: Any) -> Iterator[tuple[Any, Any]]:
    """Takes these states from it, and returns the loaders of the `CombinedLoader` with the state of each.

    Raises:
        RuntimeError: Lightning's own, if there is another number of loaders.
    """
    states, loop._combined_loader_states_to_load = loop._combined_loader_states_to_load, []
    loaders = [one for one in combined.flattened if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]
    if len(loaders) != len(states):
        combined._load_state_dicts(states)
    return zip(loaders, states, strict=True)
