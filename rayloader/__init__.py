"""torch's DataLoader with workers that are forks or Ray actors: change the import, keep the training script."""

import importlib
from typing import TYPE_CHECKING, Any

from rayloader._version import __version__ as __version__
from rayloader.errors import (
    BatchTimeoutError,
    CacheError,
    RayloaderError,
    RaySessionError,
    ReplayError,
    ReplicaError,
    ReplicaMemoryError,
    ShareError,
    SkipLimitError,
    StateError,
    WorkerDiedError,
    WorkerStartError,
)
from rayloader.loader import DataLoader, init, shutdown

if TYPE_CHECKING:
    from rayloader import plans as plans
    from rayloader.data.arrow import ArrowDataset as ArrowDataset
    from rayloader.data.cached import CachedDataset as CachedDataset
    from rayloader.data.cached import cached as cached
    from rayloader.data.parquet import ParquetStream as ParquetStream
    from rayloader.data.shared_list import SharedList as SharedList
    from rayloader.data.shuffle import ShuffleBuffer as ShuffleBuffer
    from rayloader.frameworks.patching import Patch as Patch
    from rayloader.frameworks.patching import patch as patch
    from rayloader.host.shard_info import ShardInfo as ShardInfo
    from rayloader.host.shard_info import get_shard_info as get_shard_info
    from rayloader.observe.stats import CacheStats as CacheStats
    from rayloader.observe.stats import LoaderStats as LoaderStats
    from rayloader.plans import lengths as lengths
    from rayloader.sharing.consumer import Consumer as Consumer
    from rayloader.sharing.consumer import SharedLoader as SharedLoader
    from rayloader.sharing.consumer import share as share
    from rayloader.sharing.consumer import shared as shared

# What the parts around the core offer, by the module that is imported when a program first names it.
_PARTS = {
    "ArrowDataset": "data.arrow",
    "CacheStats": "observe.stats",
    "CachedDataset": "data.cached",
    "Consumer": "sharing.consumer",
    "LoaderStats": "observe.stats",
    "ParquetStream": "data.parquet",
    "Patch": "frameworks.patching",
    "ShardInfo": "host.shard_info",
    "SharedList": "data.shared_list",
    "SharedLoader": "sharing.consumer",
    "ShuffleBuffer": "data.shuffle",
    "cached": "data.cached",
    "get_shard_info": "host.shard_info",
    "lengths": "plans",
    "patch": "frameworks.patching",
    "share": "sharing.consumer",
    "shared": "sharing.consumer",
}

# Without ArrowDataset and ParquetStream, which need pyarrow: `import *` and `dir()` must not.
__all__ = [
    "BatchTimeoutError",
    "CacheError",
    "CacheStats",
    "CachedDataset",
    "Consumer",
    "DataLoader",
    "LoaderStats",
    "Patch",
    "RaySessionError",
    "RayloaderError",
    "ReplayError",
    "ReplicaError",
    "ReplicaMemoryError",
    "ShardInfo",
    "ShareError",
    "SharedList",
    "SharedLoader",
    "ShuffleBuffer",
    "SkipLimitError",
    "StateError",
    "WorkerDiedError",
    "WorkerStartError",
    "cached",
    "get_shard_info",
    "init",
    "lengths",
    "patch",
    "share",
    "shared",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    """A name of a part, which is imported for it."""
    if name == "plans":
        return importlib.import_module("rayloader.plans")
    if name not in _PARTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"rayloader.{_PARTS[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name == "pyarrow":
            raise ImportError(f"rayloader.{name} needs pyarrow: pip install rayloader[arrow]") from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
