"""Which processes an iterator's workers get: forks of the driver at once, or actors with an image of the replica.

Promise: a dataset that can only be with forks stays there, and the log says why. What one iterator of a loader leaves
to the next, and what is known of a dataset, ends with that object.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rayloader.epoch.depth import Pace
from rayloader.options import Options
from rayloader.protocol import Replica
from rayloader.start import session
from rayloader.transport import codec
from rayloader.workers.fleet import Fleet
from rayloader.workers.forks import Forks
from rayloader.workers.janitor import Notes

if TYPE_CHECKING:
    from rayloader.replica.image import Image
    from rayloader.transport.device import Accelerator

logger = logging.getLogger("rayloader")


@dataclass(eq=False, slots=True)
class Kept:
    """What one iterator of a loader leaves to the next.

    Attributes:
        image: of its replica, as last sent: the next one is compared with it.
        paces: of its workers, as their last epoch left them.
    """

    image: Image | None = None
    paces: list[Pace] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Standing:
    """What is known of a dataset, whichever loader has it.

    Attributes:
        stays: it can only be with forks.
    """

    stays: bool = False


loaders, datasets = Notes(Kept), Notes(Standing)


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
    standing = datasets.of(replica.dataset)
    may_fork = options.may_fork and (options.workers == "fork" or standing.stays or not session.is_wanted())
    if not may_fork:
        actors = _actors(loader, replica, options, standing, num_processes, accelerator)
        if actors is not None:
            return actors
    fleet = _forks(replica, accelerator)
    fleet.lend(num_workers)
    fleet.resize(num_processes)
    return fleet


def _forks(replica: Replica, accelerator: Accelerator | None) -> Fleet:
    from rayloader.host import forked  # which is imported here for the forks

    return Fleet(Forks(functools.partial(forked.serve, replica)), accelerator=accelerator)


def _actors(
    loader: Any, replica: Replica, options: Options, standing: Standing, count: int, accelerator: Accelerator | None
) -> Fleet | None:
    """A fleet of actors, which have the image of the replica that they will open.

    New processes start meanwhile. Warm ones release their previous replica while the next one is encoded, and before it
    is written: there may not be room for both.

    Returns:
        None if the replica cannot be pickled, and forks can do the same.
    """
    from rayloader.epoch.inherited import encode_replica, in_short
    from rayloader.inherit.process_state import ProcessState
    from rayloader.replica.image import Image
    from rayloader.transport.mapped import Mappings
    from rayloader.workers.actors import Actors, Inherited
    from rayloader.workers.pool import get_pool

    pool = get_pool()
    actors = Actors(pool, loader, options, loader.label, accelerator)
    fleet = Fleet(actors, accelerator=accelerator)
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
                if options.workers == "ray" or not options.may_fork or not session.is_on_one_node():
                    raise
                _note(standing, in_short(error))
                fleet.release(busy=True)
                return None
            if warm:
                fleet.lend(count, fresh=fresh)
            kept = loaders.of(loader)
            kept.image = Image.write(encoded, mappings, kept.image)
        process = ProcessState.capture(session.node_id())
        actors.inherited = Inherited(process, kept.image, list(encoded.carried))
    except BaseException:  # the actors were borrowed: they go back in any case
        fleet.release(busy=True)
        raise
    return fleet


def _note(standing: Standing, reason: str) -> None:
    """Notes why a dataset stays with forks."""
    standing.stays = True
    _tell_of_forks(reason)


@functools.cache  # says it once
def _tell_of_forks(reason: str) -> None:
    logger.info(
        "rayloader: the workers stay forks of this process, as torch's are, so they cannot be on other machines: %s",
        reason,
    )
