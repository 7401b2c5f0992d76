"""What actors have in place of a fork of the driver: an image of the replica, and settings of the process.

Promise: it is made in the driver at `iter()`, or in a fork, which is as the driver was at `iter()`. The user's objects
may raise anything while they are pickled: the error names the part at fault.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from multiprocessing.managers import BaseManager, BaseProxy
from typing import Any

import cloudpickle
import torch

from rayloader.errors import add_note
from rayloader.inherit.process_state import ProcessState
from rayloader.namespaces import is_own_name, own_modules
from rayloader.protocol import Replica, carried
from rayloader.random.generators import RECORDED
from rayloader.random.search import walk
from rayloader.replica import unpicklable
from rayloader.replica.image import Image
from rayloader.transport import codec
from rayloader.transport.mapped import Mappings
from rayloader.transport.memory_file import MemoryFile
from rayloader.transport.pickler import Overlap

logger = logging.getLogger("rayloader")

# How deep objects that are shared with forks are looked for behind a global, and at how many parts of each object.
DEPTH = 3
MOST = 100


def encode_replica(replica: Replica, mappings: Mappings) -> codec.Encoded:
    """A replica, to be written into an image."""
    try:
        encoded = codec.encode(replica, carry=carried(), mapped=mappings, special=RECORDED)
    except Exception as error:  # the user's objects may raise anything: add a note that names the culprit
        if (explanation := _explained(replica)) is not None:
            add_note(error, f"It cannot be sent to the workers: {explanation}")
        raise
    if encoded.overlap is not None:
        _note_overlap(encoded.overlap, replica.dataset)
    if encoded.copied is not None:
        _warn_of_copy(*encoded.copied)
    return encoded


def in_short(error: Exception) -> str:
    """An error of `encode_replica`: its note, if it has one."""
    return "; ".join(getattr(error, "__notes__", [])) or f"{type(error).__name__}: {error}"


def _explained(replica: Replica) -> str | None:
    """Which part of a replica cannot be pickled, if it is found."""
    for name in ("dataset", "collate_fn", "worker_init_fn", "collate_fn_map"):
        if (explanation := unpicklable.explain(getattr(replica, name), name)) is not None:
            return explanation
    return None


def prepared(replica: Replica) -> tuple[str, list[int]]:
    """In a fork: what actors need to be like it, in files; or why that cannot be had, in words."""
    torch.set_num_threads(1)  # its other threads are not in a fork
    for name, contents in own_modules(main=True):
        for key, value in list(contents.items()):
            if not key.startswith("__") and any(map(_is_shared_with_forks, _reached(value, DEPTH))):
                return f"{name}.{key}, which may tell workers something, or hear of them, is shared with forks only", []
    try:
        mappings = Mappings()
        with codec.no_collection():
            image = Image.write(codec.encode(replica, mapped=mappings, special=RECORDED), mappings)
        sent, descriptors = image.sent
        content = cloudpickle.dumps((ProcessState.capture(""), sent))
        file = MemoryFile("inherited", len(content))
        os.pwrite(file.fd, content, 0)
        _kept_open.append((image, file))
        return "", [file.fd, *descriptors]
    except Exception as error:  # the user's objects may raise anything
        return _explained(replica) or f"{type(error).__name__}: {error}", []


def _reached(value: Any, depth: int) -> Iterator[Any]:
    """What is reached from a global of the program's: through containers, its classes, and what its functions hold."""
    yield value
    parts: Iterable[Any] = ()
    if type(value) in (list, tuple, set, deque):
        parts = value
    elif type(value) is dict:
        parts = value.values()
    elif isinstance(value, type) and is_own_name(value.__module__):
        parts = vars(value).values()
    elif isinstance(value, types.FunctionType) and is_own_name(value.__module__):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        parts = [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *cells]
    for part in itertools.islice(list(parts) if depth else (), MOST):
        yield from _reached(part, depth - 1)


def _is_shared_with_forks(value: object) -> bool:
    """Whether processes share it by a fork, so that another one that imports its module has another object."""
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.device.type == "cpu" and value.is_shared()
    if isinstance(value, mmap.mmap):
        return not memoryview(value).readonly
    return type(value).__module__.startswith(("multiprocessing.", "torch.multiprocessing.")) and not isinstance(
        value, (BaseContext, BaseManager, BaseProxy, types.ModuleType, type)
    )


_kept_open: list[Any] = []  # until the fork ends, after it has sent their descriptors


_MUCH = 64 << 20  # bytes that are held twice
_seen_overlaps: set[tuple[str, str, bool]] = set()  # each kind is looked at, and told of, once


def _note_overlap(overlap: Overlap, dataset: object) -> None:
    """Tells of arrays that share memory, unless it hardly matters: libraries keep samples as arrays and as tensors."""
    much = overlap.nbytes >= _MUCH
    if (kind := (overlap.one, overlap.other, much)) in _seen_overlaps:
        return
    _seen_overlaps.add(kind)
    if much or not overlap.converted or _have_attributes(dataset, overlap.arrays):
        logger.warning(
            "rayloader: in the dataset %s shares memory with %s, and in the workers each has a copy of its own; if "
            "they are large, or written to, hold tensors (torch.from_numpy once, and slices of that), which share it "
            "there too",
            overlap.one,
            overlap.other,
        )


def _have_attributes(dataset: object, arrays: list[Any]) -> bool:
    """Whether some of these arrays are attributes: an object's methods may write to them, and rarely to samples."""
    those = {*map(id, arrays)}
    return any(
        id(obj) in those and path[-1][0] == "attribute" for path, obj in walk([((("object", "dataset"),), dataset)])
    )


def _warn_of_copy(function: str, generator: str) -> None:
    warnings.warn(
        f"the workers have a copy of the random generator {generator} for {function}, which is a lambda or was made by "
        "another function, and one more for the rest of its module: both may draw the same numbers. Define the "
        "function at the top level of the module, or let the dataset hold the generator",
        stacklevel=2,
    )
