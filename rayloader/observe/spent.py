"""How a worker's time for one batch was spent, in the form that is sent: packed, so that many are counted together.

Promise: data only; no Ray, no torch, no clock.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

_PACKED = struct.Struct("=6d")  # NumPy reads many of them as rows of numbers
pack = _PACKED.pack  # the fields of a `Spent`, in their order


class Spent(NamedTuple):
    """The unpacked form. In seconds."""

    worker_id: float  # the worker that built the batch.
    began: float  # when it began, perf_counter() of its machine.
    idle: float  # how long its process had nothing to do before that.
    fetch: float  # in the dataset.
    collate: float  # in `collate_fn`.
    # for encoding, and for sending the previous batch: the time to send this one is reported with the next.
    transfer: float

    @classmethod
    def unpack(cls, packed: bytes) -> Spent:
        """The inverse of `pack`."""
        return cls(*_PACKED.unpack(packed))

    @property
    def build(self) -> float:
        """The work on the batch."""
        return self.fetch + self.collate + self.transfer
