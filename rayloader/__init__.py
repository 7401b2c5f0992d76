"""torch's DataLoader with workers that are forks or Ray actors: change the import, keep the training script."""

import importlib
from typing import TYPE_CHECKING, Any

from rayloader import errors
from rayloader._version import __version__ as __version__
from rayloader.errors import *
from rayloader.loader import DataLoader, init, shutdown

if TYPE_CHECKING:
    from rayloader import plans as plans
    from rayloader.data.arrow import ArrowDataset as ArrowDataset
    from rayloader.data.cached import CachedDataset, cached
    from rayloader.data.parquet import ParquetStream as ParquetStream
    from rayloader.data.shared_list import SharedList
    from rayloader.data.shuffle import ShuffleBuffer
    from rayloader.frameworks.patching import Patch, patch
    from rayloader.host.shard_info import ShardInfo, get_shard_info
    from rayloader.observe.stats import CacheStats, LoaderStats
    from rayloader.plans import lengths
    from rayloader.sharing import Consumer, SharedLoader, share, shared

# What the parts around the core offer, by the module that is imported when a program first names it.
_PARTS = {
    "data.arrow": ["ArrowDataset"],
    "data.cached": ["CachedDataset", "cached"],
    "data.parquet": ["ParquetStream"],
    "data.shared_list": ["SharedList"],
    "data.shuffle": ["ShuffleBuffer"],
    "frameworks.patching": ["Patch", "patch"],
    "host.shard_info": ["ShardInfo", "get_shard_info"],
    "observe.stats": ["CacheStats", "LoaderStats"],
    "plans": ["lengths"],
    "sharing": ["Consumer", "SharedLoader", "share", "shared"],
}
_MODULES = {name: f"rayloader.{module}" for module, names in _PARTS.items() for name in names}

# Without ArrowDataset and ParquetStream, which need pyarrow: `import *` and `dir()` must not.
__all__ = [
    "CacheStats",
    "CachedDataset",
    "Consumer",
    "DataLoader",
    "LoaderStats",
    "Patch",
    "ShardInfo",
    "SharedList",
    "SharedLoader",
    "ShuffleBuffer",
    "cached",
    "get_shard_info",
    "init",
    "lengths",
    "patch",
    "share",
    "shared",
    "shutdown",
]
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    """A name of a part, which is imported for it."""
    if name == "plans":
        return importlib.import_module("rayloader.plans")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name == "pyarrow":
            raise ImportError(f"rayloader.{name} needs pyarrow: pip install rayloader[arrow]") from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
