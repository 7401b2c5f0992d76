"""Whether the program uses Ray: the rule by which its workers are actors or forks. Never imports or starts Ray.

Promise: Ray counts as used if the program is connected to one (`ray.init()`), has asked for one (`rayloader.init()`),
or names one in RAY_ADDRESS. One that was started because a loader's own arguments ask for actors does not count for
other loaders. A fork of a process that is connected does not use Ray, whose threads do not survive a fork.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

asked = False  # `rayloader.init()` was called, and what it has started was not ended since
forked = False  # this process is known to be a fork of one that was connected to Ray
is_own: Callable[[], bool] = lambda: False  # noqa: E731  # whether rayloader started the Ray that this is connected to


def is_used() -> bool:
    """Whether workers are actors, where the loader does not say."""
    return not is_forked() and (asked or bool(os.environ.get("RAY_ADDRESS")) or (_is_connected() and not is_own()))


def is_forked() -> bool:
    """Whether this process is a fork of one that was connected to Ray: Ray takes it for connected, too."""
    if forked or not _is_connected():
        return forked
    from rayloader.actors._compat_ray import has_lost_threads  # this module may have been imported only after the fork

    return has_lost_threads(sys.modules["ray"])


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    # A module that another thread is still importing lacks the function.
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def _note_fork() -> None:
    global forked
    forked = forked or _is_connected()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_note_fork)
