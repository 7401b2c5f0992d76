"""Which processes an iterator's workers get: forks of the driver, or Ray actors with an image of the replica.

Promise: workers are actors in a program that uses Ray, and forks elsewhere, unless `workers` says which; they stay what
they are as long as the iterator lives. What one iterator of a loader leaves to the next ends with the loader.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from rayloader.errors import add_note
from rayloader.options import Options, check_forks
from rayloader.protocol import Replica
from rayloader.workers import ray_use
from rayloader.workers.fleet import Fleet
from rayloader.workers.forks import Forks

if TYPE_CHECKING:
    from rayloader.actors.image import Image
    from rayloader.gpu.device import Accelerator


# The image of each loader's replica, as last sent, by the loader's id: it is used again if it would be the same.
images: dict[int, Image | None] = {}


def fleet_for(
    loader: Any,
    replica: Replica,
    options: Options,
    *,
    num_workers: int,
    accelerator: Accelerator | None,
) -> Fleet:
    """The processes for an iterator's workers; `Fleet.begin` will tell each which worker it is.

    Args:
        loader: the one that is iterated.
        replica: what the workers get.
        options: those of the loader.
        num_workers: how many workers the stream has, each with a process of its own.
        accelerator: for which the memory of batches is page-locked.
    """
    if options.needs_actors or (options.workers == "auto" and ray_use.is_used()):
        return _actors(loader, replica, options, num_workers, accelerator)
    check_forks(options.workers)
    from rayloader.host import server  # which is imported here for the forks

    fleet = Fleet(Forks(functools.partial(server.serve, replica)), accelerator)
    fleet.lend(num_workers)
    return fleet


def _actors(loader: Any, replica: Replica, options: Options, count: int, accelerator: Accelerator | None) -> Fleet:
    """A fleet of actors, which have the image of the replica that they will open.

    New processes start meanwhile. Warm ones release their previous replica while the next one is encoded, and before it
    is written: there may not be room for both.
    """
    from rayloader.actors.actors import Actors
    from rayloader.actors.image import Contents, Image, encode_replica
    from rayloader.actors.pool import get_pool
    from rayloader.transport import codec

    pool = get_pool()
    actors = Actors(pool, options, loader._label, accelerator)
    fleet = Fleet(actors, accelerator)
    try:
        fresh = options.fresh_processes
        warm = not fresh and pool.has_warm(options.ray_remote_args, count)
        if not warm:
            fleet.lend(count, fresh=fresh)
        with codec.no_collection():
            try:
                encoded = encode_replica(replica)
            except Exception as error:
                add_note(error, _REMEDY)
                raise
            if warm:
                fleet.lend(count, fresh=fresh)
            contents, key = Contents(encoded), id(loader)
            if key not in images:
                images[key] = None
                weakref.finalize(loader, images.pop, key, None).atexit = False
            image = images[key]
            if image is None or not image.equals(contents):
                images[key] = image = None  # there may not be room for two
                images[key] = image = Image.write(contents)
        actors.replica = image, list(encoded.carried)
    except BaseException:  # the actors were borrowed: they go back in any case
        fleet.release(busy=True)
        raise
    return fleet


_REMEDY = (
    "Workers that are Ray actors get dataset, collate_fn and worker_init_fn as Ray sends them. Workers that are forks "
    'need not be sent anything: use workers="fork", which keeps them on this machine'
)
