"""What tests must know of the inside of iterators, and of the pool: the one place that reaches into these.

It imports nothing of the library before a test asks for something, because the proof that nothing is left uses it too,
also around tests that never import the library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import select
import signal
import sys

EXIT_LIMIT = 500.0  # seconds for a process that was killed to end; on expiry the test fails


def engine_of(iterator):
    """The engine of its epoch."""
    return iterator._engine


def has_workers(iterator):
    """Whether its workers are still its own."""
    return iterator._fleet is not None and iterator._fleet.usable


def actors_of(iterator):
    """The actors that host its workers, each once."""
    return list(iterator._fleet.hosts)


def pid_of_zygote(iterator):
    """The process that forks its workers."""
    return iterator._fleet.processes.zygote.pid


def pid_of(iterator, worker_id=0):
    """The process that hosts a worker."""
    fleet = iterator._fleet
    return fleet.address(fleet.workers[worker_id]).pid


def has_started(iterator, worker_id=0):
    """Whether it is known which process hosts a worker."""
    fleet = iterator._fleet
    return fleet.address(fleet.workers[worker_id]) is not None


def kill_worker(iterator, worker_id=0):
    """Kills the process that hosts a worker, and waits until it has ended."""
    process = os.pidfd_open(pid_of(iterator, worker_id))
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert select.select([process], [], [], EXIT_LIMIT)[0]  # even if its parent has not waited for it
    os.close(process)


def results_of(iterator):
    """The results that have come, and were not taken."""
    return [task.result for task in iterator._engine.schedule.untaken]


def await_more(iterator, seconds=1.0):
    """As its user does while there is no batch: handles what comes within so many seconds."""
    iterator._engine._await(seconds)


def set_timeout(iterator, seconds):
    """Has it wait for so long from now on: what came before may have taken as long as the machine needs."""
    engine = iterator._engine
    engine._options = dataclasses.replace(engine._options, timeout=seconds)


def workers_are_idle(iterator, look=lambda: None):
    """Whether its workers have answered all that they were given; calls `look` before, while nothing can change."""
    engine = iterator._engine
    with engine.lock:
        look()
        return not [worker for worker in engine.fleet.workers if engine._owes(worker)]


def lock_of(pool):
    """The lock that is held while a lost worker is replaced."""
    return pool._lock


def pool_if_any():
    """The pool of this process; None if there is none, and does not make one."""
    module = sys.modules.get("rayloader.actors.pool")
    return None if module is None else module._pool


def end_idle_actors(keepers):
    """As when idle actors have been kept for long enough, except for those that a loader that lives can use.

    It may be one of `keepers`, which spares a search for others.
    """
    if (pool := pool_if_any()) is None:
        return
    key = sys.modules["rayloader.actors.pool"]._key
    keys = {key(loader.ray_remote_args or {}) for loader in keepers}
    if {actor.key for actor in pool.actors} - keys:
        loader_class = sys.modules["rayloader.loader"].DataLoader
        keys |= {
            key(found.ray_remote_args or {}) for found in gc.get_objects() if issubclass(type(found), loader_class)
        }
    end_idle_actors_but(keys)


def end_idle_actors_but(keys=frozenset()):
    """As when idle actors have been kept for long enough, except for those with these options."""
    if (pool := pool_if_any()) is not None:
        pool.later(lambda: [setattr(actor, "keep_until", 0.0) for actor in pool.actors if actor.key not in keys])


def live_actor_pids(pool=None):
    """Processes of the actors that run, of this process's pool or of the given one."""
    pool = pool or pool_if_any()
    if pool is None:
        return set()
    pool.wait()
    for actor in pool.actors:
        with contextlib.suppress(Exception):  # it is dead
            actor.has_started()
    return {actor.address.pid for actor in pool.actors if actor.address is not None}


def live_memory_files():
    """Names of the memory files that this process's pool uses: its probe's, and its actors' arenas."""
    if (pool := pool_if_any()) is None:
        return set()
    pool.wait()
    names = {actor.lane._arena.address.name for actor in pool.actors if actor.lane.is_open}
    return names | ({pool._probe.address.name} if pool._probe is not None else set())


def image_files():
    """Names of the memory files of the images that loaders keep."""
    if (hosts := sys.modules.get("rayloader.epoch.hosts")) is None:
        return set()
    return {image.address.name for image in list(hosts.images.values()) if image is not None}
