"""Reports available memory, raises an error when it is insufficient, and pauses the garbage collector. No state."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

from rayloader.errors import ReplicaMemoryError

# Smaller sizes are not checked: the check would cost more than it is worth.
_SMALL = 1 << 24


def check_room(nbytes: int, purpose: str) -> None:
    """Makes sure that so much memory can be written to.

    Raises:
        ReplicaMemoryError: there is less; it says what was needed, what is available, and what to do.
    """
    if nbytes < _SMALL:
        return
    free = available()
    if free is not None and nbytes > free:
        raise ReplicaMemoryError(
            f"{nbytes / 1e9:.2f} GB are needed {purpose}, and {free / 1e9:.2f} GB are available. Let the dataset "
            "memory-map its files (np.memmap, np.load(mmap_mode='r'), torch.from_file, Arrow's memory_map), which then "
            "are not copied; hold strings and other objects in a rayloader.SharedList; or load them in __getitem__"
        )


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pauses Python's garbage collector while many objects and no garbage are created: three times as fast."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def available() -> int | None:
    """Bytes that are available without swapping, on this machine and in this process's control group."""
    return min(_machine_and_groups(), default=None)


def _machine_and_groups() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield from _groups(Path("/sys/fs/cgroup"), group, "memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                yield from _groups(Path("/sys/fs/cgroup/memory"), group, *names)


def _groups(root: Path, group: str, limit: str, usage: str, cache: str) -> Iterator[int]:
    """The remaining bytes of a control group and those above it; a container may see its own as the root."""
    path = root / group.strip("/")
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError, ValueError):  # no limit ("max"), or no such file
            left = int((folder / limit).read_text()) - int((folder / usage).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(f"{cache} "):
                    left += int(line.split()[1])  # pages of files, which the kernel drops first
            yield max(0, left)
        if folder == root:
            return
