"""A crew's right to actors of the pool, while its Ray session lives.

Promise: nothing here calls Ray for a loan that has ended, in another session, or in a forked process: that raises
`RaySessionError`.
"""

from __future__ import annotations

import os
from typing import Any

from rayloader.driver.actor import Actor, Lease
from rayloader.driver.pool import Pool
from rayloader.errors import RaySessionError

SESSION_ENDED = (
    "Ray was shut down while this iterator was live; its workers are gone: "
    "call iter() on the loader again, which starts anew"
)


class Loan:
    """Of one crew.

    Args:
        pool: that lends.
        lease: nobody else has it.
        remote_args: the user's options of actors.
        fresh: no actor may have been another's before.

    Attributes:
        pool: likewise.
        remote_args: likewise.
    """

    def __init__(self, pool: Pool, lease: Lease, remote_args: dict[str, Any], *, fresh: bool) -> None:
        self.pool = pool
        self.remote_args = remote_args
        self._lease: Lease | None = lease  # None when the actors were given back
        self._fresh = fresh
        self._pid = os.getpid()

    @property
    def usable(self) -> bool:
        """Whether the actors are still this crew's and can be talked to."""
        return self._lease is not None and not self.pool.closed and self.pool.session_alive()

    def lend(self, count: int, *, fresh: bool | None = None) -> list[Actor]:
        """So many actors more; does not wait until new ones run. `fresh`: unlike the others of the crew."""
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
        """Lends no more; gives the lease, which is to be ended, unless it was given before or is another process's.

        An interrupt after this ends the lease too: nobody refers to it then.
        """
        if os.getpid() != self._pid:
            return None
        lease, self._lease = self._lease, None
        return lease
