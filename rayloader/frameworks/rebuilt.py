"""Notices a loader of ours that a framework rebuilds as one of another class: refuses what would go wrong, or warns."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from rayloader.errors import level_outside
from rayloader.frameworks.readers import callers
from rayloader.resume.ranks import check_once

ADOPTED = "_rayloader_adopted"  # an attribute of loaders that get our iterators
_warned = False


def note_rebuilt(loader: Any, source: Any, same: Any) -> None:
    """A loader of another class is being made whose `num_workers` was read from a loader of ours.

    Args:
        loader: that one.
        source: the loader of ours; None: it is gone.
        same: likewise, if it has the same dataset.
    """
    if source is not None and source._ranks is not None:
        check_once(loader._index_sampler)
        check_dispatch(source)
    if same is not None:
        same._read_anew = True
    if not is_adopted(loader):
        _warn_once(type(loader))


def is_adopted(loader: Any) -> bool:
    """Whether a loader gets our iterators."""
    return ADOPTED in getattr(loader, "__dict__", ())


def check_dispatch(source: Any) -> None:
    """Raises ValueError if one rank's part of the data would be read by one process, and distributed to all.

    That is what Accelerate does with `dispatch_batches`, its default for iterable datasets. Neither the arguments nor
    the class of the loader that it creates show it; only the calling code does.
    """
    module = sys.modules.get("accelerate.data_loader")
    if module is None or source._ranks is None or source._ranks.num_replicas == 1:
        return
    for caller in callers():
        if issubclass(type(caller), module.DataLoaderDispatcher):
            if module.PartialState().num_processes == 1:
                return
            raise ValueError(
                "with dispatch_batches, Accelerate's default for iterable datasets, one process reads the batches of "
                f"all ranks, and this loader has those of rank {source._ranks.rank} of {source._ranks.num_replicas}; "
                "leave num_replicas and rank out, or do not give this loader to prepare()"
            )


def _warn_once(loader_class: type) -> None:
    global _warned
    if not _warned:
        _warned = True
        framework = {loader_class.__module__.partition(".")[0]} - {"__main__"}
        warnings.warn(
            f"a rayloader.DataLoader was rebuilt as {loader_class.__module__}.{loader_class.__qualname__}, "
            "whose batches come from torch's workers; call rayloader.patch() at the start of the program",
            stacklevel=level_outside("rayloader", "torch", *framework),
        )
