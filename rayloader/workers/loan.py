"""A crew's right to actors of the pool, while its Ray session lives.

Promise: nothing here calls Ray if the loan has ended, the session is another one, or the process was forked: that
raises `RaySessionError`.
"""

from __future__ import annotations

import os
from typing import Any

from rayloader.errors import RaySessionError
from rayloader.workers.actor import Actor, Lease
from rayloader.workers.pool import Pool

SESSION_ENDED = (
    "Ray was shut down while this iterator was live; its workers are gone: "
    "call iter() on the loader again, which starts new ones"
)


class Loan:
    """The loan of one crew.

    Args:
        pool: the one that lends.
        lease: only the crew holds it.
        remote_args: the user's options of actors.
        fresh: no actor may have been another crew's before.

    Attributes:
        pool: the one that lends.
        remote_args: the user's options of actors.
    """

    def __init__(self, pool: Pool, lease: Lease, remote_args: dict[str, Any], *, fresh: bool) -> None:
        self.pool = pool
        self.remote_args = remote_args
        self._lease: Lease | None = lease  # None after the actors were given back
        self._fresh = fresh
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether the actors are still this crew's and can be called."""
        return self._lease is not None and not self.pool.closed and self.pool.session_alive()

    def lend(self, count: int, *, fresh: bool | None = None) -> list[Actor]:
        """Lends `count` more actors; does not wait until new ones run. `fresh`: overrides that of the crew."""
        self.check_session()
        assert self._lease is not None
        fresh = self._fresh if fresh is None else fresh
        return self.pool.lend(self._lease, self.remote_args, count, fresh=fresh)

    def lend_on_joined(self, count: int) -> list[Actor]:
        """`Pool.lend_on_joined`."""
        self.check_session()
        assert self._lease is not None
        return self.pool.lend_on_joined(self._lease, self.remote_args, count)

    def check_session(self) -> None:
        """Raises RaySessionError unless the loan is usable."""
        if os.getpid() != self._pid:
            raise RaySessionError(
                "an iterator works in the process that made it, and this one was forked from it; "
                "load with num_workers=0 here, or start this process with the spawn method"
            )
        if self._lease is None or self.pool.closed:
            raise RaySessionError("this iterator's workers were shut down; call iter() on the loader again")
        if not self.pool.session_alive():
            raise RaySessionError(SESSION_ENDED)

    def end(self) -> Lease | None:
        """Lends no more; returns the lease, for the caller to end. None if it was returned before or was not ours.

        An interrupt after this ends the lease too: no reference to it is left then.
        """
        if os.getpid() != self._pid:
            return None
        lease, self._lease = self._lease, None
        return lease
