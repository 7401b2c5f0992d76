"""What the time of a worker for one batch went into, as it travels: packed, for the driver to count many together.

Promise: data only; no Ray, no torch, no clock.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_PACKED = struct.Struct("=6d")  # NumPy reads many of them as rows of numbers
pack = _PACKED.pack  # the fields of a `Spent`, in their order


class Spent(NamedTuple):
    """The same, to be read. Seconds.

    Attributes:
        worker_id: who built the batch.
        began: when it began, perf_counter() of its machine.
        idle: for which its process had nothing to do before that.
        fetch: in the dataset.
        collate: in `collate_fn`.
        transfer: for encoding, and for sending the batch before: what sending this one takes is told with the next.
    """

    worker_id: float
    began: float
    idle: float
    fetch: float
    collate: float
    transfer: float

    @classmethod
    def unpack(cls, packed: bytes) -> Spent:
        """What was packed."""
        return cls(*_PACKED.unpack(packed))

    @property
    def build(self) -> float:
        """The work on the batch."""
        return self.fetch + self.collate + self.transfer
