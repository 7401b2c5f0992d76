"""torch's DataLoader with Ray actors as workers: change the import, keep the training script."""

from rayloader.errors import (
    BatchTimeoutError,
    RayloaderError,
    RaySessionError,
    WorkerDiedError,
    WorkerStartError,
)
from rayloader.loader import DataLoader, shutdown

__all__ = [
    "BatchTimeoutError",
    "DataLoader",
    "RaySessionError",
    "RayloaderError",
    "WorkerDiedError",
    "WorkerStartError",
    "shutdown",
]
__version__ = "0.1.0"
