"""torch's DataLoader with workers that are forks or Ray actors: change the import, keep the training script."""

from typing import TYPE_CHECKING, Any

from rayloader.data.cached import CachedDataset, cached
from rayloader.data.shard_info import ShardInfo, get_shard_info
from rayloader.data.shared_list import SharedList
from rayloader.errors import (
    BatchTimeoutError,
    CacheError,
    ConsumerDroppedError,
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
from rayloader.frameworks import Patch, patch
from rayloader.loader import DataLoader, init, shutdown
from rayloader.observe.stats import CacheStats, LoaderStats
from rayloader.sharing.shares import Consumer, SharedLoader, share, shared

if TYPE_CHECKING:
    from rayloader.data.arrow import ArrowDataset as ArrowDataset
    from rayloader.data.parquet import ParquetStream as ParquetStream

# Without ArrowDataset and ParquetStream: `import *` must not need pyarrow.
__all__ = [
    "BatchTimeoutError",
    "CacheError",
    "CacheStats",
    "CachedDataset",
    "Consumer",
    "ConsumerDroppedError",
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
    "SkipLimitError",
    "StateError",
    "WorkerDiedError",
    "WorkerStartError",
    "cached",
    "get_shard_info",
    "init",
    "patch",
    "share",
    "shared",
    "shutdown",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What needs pyarrow is imported when a program first names it."""
    try:
        if name == "ArrowDataset":
            from rayloader.data.arrow import ArrowDataset

            return ArrowDataset
        if name == "ParquetStream":
            from rayloader.data.parquet import ParquetStream

            return ParquetStream
    except ModuleNotFoundError as error:
        if error.name == "pyarrow":
            raise ImportError(f"rayloader.{name} needs pyarrow: pip install rayloader[arrow]") from error
        raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
