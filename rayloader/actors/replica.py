"""What the driver sends of itself to actors: the replica, and where its modules are found.

Promise: it is sent as it is at `iter()`. The user's objects may raise anything while they are pickled: the error names
the part at fault, and the remedy.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rayloader.errors import add_note
from rayloader.protocol import Replica, carried
from rayloader.random.generators import GENERATORS
from rayloader.transport import codec, unpicklable
from rayloader.transport.mapped import shared_file
from rayloader.transport.memory_file import address_of_buffer

if TYPE_CHECKING:
    from rayloader.actors.image import ImageAddress


@dataclass(frozen=True, slots=True)
class Source:
    """Where an actor gets its replica from.

    Attributes:
        node_id: the driver's.
        sys_path: where the driver finds modules.
        image: of the replica, the driver's.
        carried: parts of the replica that Ray carries unchanged.
        content: for workers that cannot open the driver's files: in a list, Ray's object with the bytes of the image's
            file, or None if the node has an image of an earlier epoch.
        hosted: in a list too, the address of the image that one worker of the node has made of them.
    """

    node_id: str
    sys_path: list[str]
    image: ImageAddress
    carried: list[Any]
    content: list[Any] | None = None
    hosted: list[Any] | None = None


def module_folders() -> list[str]:
    """Where this process finds modules, for processes with another working directory."""
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing is found there
        cwd = ""
    return [os.path.join(cwd, entry) for entry in map(os.fspath, sys.path)]


def encode_replica(replica: Replica) -> codec.Encoded:
    """A replica, to be written into an image. What the workers are to get otherwise than as it is here is warned of."""
    try:
        encoded = codec.encode(replica, carry=carried(), replica=True, special=GENERATORS)
    except Exception as error:  # the user's objects may raise anything: add a note that names the culprit
        if (explanation := _explained(replica)) is not None:
            add_note(error, f"It cannot be sent to the workers: {explanation}")
        raise
    if encoded.copied is not None:
        _warn_of_copy(*encoded.copied)
    copied = (buffer for number, buffer in enumerate(encoded.buffers) if number not in encoded.mapped)
    if (path := shared_file(map(address_of_buffer, copied))) is not None:
        _warn_of_shared_memory(path)
    return encoded


def _explained(replica: Replica) -> str | None:
    """Which part of a replica cannot be pickled, if it is found."""
    for name in ("dataset", "collate_fn", "worker_init_fn", "collate_fn_map"):
        if (explanation := unpicklable.explain(getattr(replica, name), name)) is not None:
            return explanation
    return None


def _warn_of_copy(function: str, generator: str) -> None:
    warnings.warn(
        f"the workers have a copy of the random generator {generator} for {function}, which is a lambda or was made by "
        "another function, and one more for the rest of its module: both may draw the same numbers. Define the "
        "function at the top level of the module, or let the dataset hold the generator",
        stacklevel=2,
    )


def _warn_of_shared_memory(path: str) -> None:
    warnings.warn(
        f"the dataset holds a tensor or an array in memory that processes share, {path}, but its type does not tell "
        "that, so the workers get a copy, and what one writes there reaches nobody else. Hold the np.memmap itself, an "
        "array over a multiprocessing.RawArray, or a tensor after share_memory_(), and make views of it in "
        '__getitem__; or use workers="fork"',
        stacklevel=2,
    )
