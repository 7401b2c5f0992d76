"""Which processes an iterator's workers get: forks of the driver, or Ray actors with an image of the replica.

Promise: workers are actors in a program that uses Ray, and forks elsewhere, unless `workers` says which; they stay what
they are as long as the iterator lives. What one iterator of a loader leaves to the next ends with the loader.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayloader.epoch.depth import Pace
from rayloader.errors import add_note
from rayloader.options import Options, check_forks
from rayloader.protocol import Replica
from rayloader.workers import ray_use
from rayloader.workers.fleet import Fleet
from rayloader.workers.forks import Forks
from rayloader.workers.janitor import Notes

if TYPE_CHECKING:
    from rayloader.actors.image import Image
    from rayloader.gpu.device import Accelerator

logger = logging.getLogger("rayloader")


@dataclass(eq=False, slots=True)
class Kept:
    """What one iterator of a loader leaves to the next.

    Attributes:
        image: of its replica, as last sent: the next one is compared with it.
        paces: of its workers, as their last epoch left them.
        forks: Ray cannot send the replica, so its workers are forks.
    """

    image: Image | None = None
    paces: list[Pace] = field(default_factory=list)
    forks: bool = False


loaders = Notes(Kept)


def fleet_for(
    loader: Any,
    replica: Replica,
    options: Options,
    *,
    num_workers: int,
    num_processes: int,
    accelerator: Accelerator | None,
) -> Fleet:
    """The processes for an iterator's workers; `Fleet.begin` will tell each which worker it is.

    Args:
        loader: the one that is iterated.
        replica: what the workers get.
        options: those of the loader.
        num_workers: how many workers the stream has.
        num_processes: how many processes host them, where one can host several.
        accelerator: for which the memory of batches is page-locked.
    """
    kept = loaders.of(loader)
    if options.needs_actors or (options.workers == "auto" and not kept.forks and ray_use.is_used()):
        actors = _actors(loader, replica, options, kept, num_processes, accelerator)
        if actors is not None:
            return actors
    check_forks(options.workers)
    from rayloader.host import server  # which is imported here for the forks

    fleet = Fleet(Forks(functools.partial(server.serve, replica)), accelerator)
    fleet.lend(num_workers)
    return fleet


def _actors(
    loader: Any, replica: Replica, options: Options, kept: Kept, count: int, accelerator: Accelerator | None
) -> Fleet | None:
    """A fleet of actors, which have the image of the replica that they will open.

    New processes start meanwhile. Warm ones release their previous replica while the next one is encoded, and before it
    is written: there may not be room for both.

    Returns:
        None if Ray cannot send the replica, and forks can do the same.
    """
    from rayloader.actors import session
    from rayloader.actors.actors import Actors
    from rayloader.actors.image import Image
    from rayloader.actors.pool import get_pool
    from rayloader.actors.replica import encode_replica, in_short
    from rayloader.transport import codec
    from rayloader.transport.mapped import Mappings

    pool = get_pool()
    actors = Actors(pool, loader, options, loader._label, accelerator)
    fleet = Fleet(actors, accelerator)
    try:
        fresh = options.fresh_processes
        warm = not fresh and pool.has_warm(options.ray_remote_args, count)
        if not warm:
            fleet.lend(count, fresh=fresh)
        with codec.no_collection():
            mappings = Mappings()
            try:
                encoded = encode_replica(replica, mappings)
            except Exception as error:
                if options.needs_actors or not session.is_on_one_node():
                    add_note(error, _REMEDY)
                    raise
                kept.forks = True
                _tell_of_forks(in_short(error))
                fleet.release(busy=True)
                return None
            if warm:
                fleet.lend(count, fresh=fresh)
            kept.image = Image.write(encoded, mappings, kept.image)
        actors.replica = kept.image, list(encoded.carried)
    except BaseException:  # the actors were borrowed: they go back in any case
        fleet.release(busy=True)
        raise
    return fleet


_REMEDY = (
    "Workers that are Ray actors get dataset, collate_fn and worker_init_fn as Ray sends them. Workers that are forks "
    'need not be sent anything: use workers="fork", which keeps them on this machine'
)


@functools.cache  # says it once
def _tell_of_forks(reason: str) -> None:
    logger.info(
        "rayloader: the workers are forks of this process, as torch's are, so they cannot be on other machines: %s",
        reason,
    )
