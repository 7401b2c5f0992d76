"""torch's DataLoader with Ray actors as workers: change the import, keep the training script."""

from rayloader.errors import (
    BatchTimeoutError,
    RayloaderError,
    RaySessionError,
    ReplayError,
    ReplicaError,
    ReplicaMemoryError,
    SkipLimitError,
    StateError,
    WorkerDiedError,
    WorkerStartError,
)
from rayloader.frameworks import Patch, patch
from rayloader.loader import DataLoader, init, shutdown
from rayloader.progress_bar import progress
from rayloader.shard_info import ShardInfo, get_shard_info
from rayloader.shared_list import SharedList
from rayloader.stats import LoaderStats

__all__ = [
    "BatchTimeoutError",
    "DataLoader",
    "LoaderStats",
    "Patch",
    "RaySessionError",
    "RayloaderError",
    "ReplayError",
    "ReplicaError",
    "ReplicaMemoryError",
    "ShardInfo",
    "SharedList",
    "SkipLimitError",
    "StateError",
    "WorkerDiedError",
    "WorkerStartError",
    "get_shard_info",
    "init",
    "patch",
    "progress",
    "shutdown",
]
__version__ = "0.1.0"
