"""A shared loader in the producer's process, and its batches in the form in which all consumers get them.

Promise: the batches are those that the loader would have given in the program that shared it. Each is encoded once. Its
bytes stay where the loader's worker has built them; without workers they are copied, because the dataset may write to
them again. An error of the loader takes the place of its batch.

All methods run in one thread of the producer, which is not that of its event loop.
"""

from __future__ import annotations

import functools
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import ray

from rayloader.errors import StateError, add_note
from rayloader.inherit.process_state import Baseline
from rayloader.protocol import CARRY
from rayloader.replica import unpicklable
from rayloader.replica.image import decode_replica, open_image
from rayloader.sharing.ledger import Place, PlacesLeft
from rayloader.sharing.messages import Kind, Pipeline, Produced, packed_content
from rayloader.start import session
from rayloader.transport import codec
from rayloader.transport.lanes import Recycled, switched_off, to_wire
from rayloader.transport.memory_file import MemoryFileError
from rayloader.transport.tcp_line import TcpLine

# For how many seconds batches are produced without a look at what the consumers do.
_AT_ONCE_S = 0.001
# The share of its time that the producer may spend on states of the loader, for the consumers' `state_dict()`.
STATE_SHARE = 0.01


class HostedLoader:
    """The loader of one share.

    Args:
        name: of the share.
        kept_bytes: how many bytes of batches the share keeps, besides those that the loader prefetches.

    Attributes:
        length: batches in an epoch; or why there is no length.
        lines: whether batches may come over lines.
        pinning: its pin_memory and pin_memory_device, which the consumers carry out.
        states: of the loader at some places, or the error in place of one; oldest first. They start with the newest
            that is not after the slowest consumer's place.
    """

    def __init__(self, name: str, kept_bytes: int) -> None:
        self._name, self._kept_bytes = name, kept_bytes
        self.length: int | str = 0
        self.lines = False
        self.pinning = False, ""
        self.states: dict[Place, Any] = {}
        self._loader: Any = None
        self._iterator: Iterator[Any] = iter(())
        self._copies: Recycled | None = None  # without workers
        self._began = self._spent = 0.0  # time.perf_counter(); seconds spent on states

    def open(self, pipeline: Pipeline) -> bool:
        """Opens the loader; False if that requires the image's contents. Raises the errors of unpickling it."""
        own = {key for key in os.environ if key.startswith("RAY_")}
        here = pipeline.process.node_id == session.node_id()
        Baseline(session.node_id(), own).adopt(pipeline.process)
        contents = ray.get(pipeline.contents[0]) if pipeline.contents is not None else None
        try:
            opened = open_image(pipeline.image, here=here, contents=contents)
        except MemoryFileError:
            return False
        self._loader = loader = decode_replica(*opened, pipeline.carried, "loader")
        self.pinning = bool(loader.pin_memory), loader.pin_memory_device
        loader.pin_memory = False  # the consumers pin batches
        loader.prefetch_bytes += self._kept_bytes  # which the loader counts as its user's
        self.lines = loader.arenas and not switched_off()
        self._copies = Recycled() if loader.num_workers == 0 else None
        pipeline.random.restore([])
        try:
            self.length = len(self._loader)
        except TypeError as error:
            self.length = str(error)
        self._began = time.perf_counter()
        self._note_state(Place(0, 0))
        return True

    def begin(self, epoch: int, sampler_epoch: int | None) -> tuple[Produced, int] | None:
        """Begins to iterate; returns the error if that fails, in the form of a batch."""
        loader = self._loader
        try:
            if sampler_epoch is not None:
                loader.set_epoch(sampler_epoch)
            self._iterator = iter(loader)
        except Exception as error:  # of the user's objects or the loader: the consumers get it
            self._iterator = iter(())
            return self._as_error(error)
        self._note_state(Place(epoch, 0))
        return None

    def produce(
        self, front: Place, lowest: Place, room: PlacesLeft, give: Callable[[tuple[Produced, int] | None], object]
    ) -> None:
        """Gives the consumers' batches from the front on, and the bytes of each; None after the last batch.

        They are one, or as many as fit in `room` if they come at once: meanwhile nothing can be asked of the loader,
        nor does it notice that nobody reads any more.
        """
        until, nbytes = time.perf_counter() + _AT_ONCE_S, 0
        for number in range(front.number, front.number + room.batches):
            found = self._next(Place(front.epoch, number), lowest)
            give(found)
            if found is None or (nbytes := nbytes + found[1]) >= room.nbytes or time.perf_counter() >= until:
                break

    def _next(self, front: Place, lowest: Place) -> tuple[Produced, int] | None:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._note_state(Place(front.epoch + 1, 0))
            return None
        except Exception as error:  # of the user's objects or the loader
            found = self._as_error(error)
        else:
            found = self._as_batch(batch)
        if self._spent < STATE_SHARE * (time.perf_counter() - self._began):
            self._note_state(Place(front.epoch, front.number + 1))
        needed = [place for place in self.states if place <= lowest][-1:]
        for place in [place for place in self.states if needed and place < needed[0]]:
            del self.states[place]
        return found

    def _note_state(self, place: Place) -> None:
        began = time.perf_counter()
        try:
            self.states[place] = self._loader.state_dict()
        except Exception as error:  # raised in the consumer that asks for it
            self.states[place] = error if isinstance(error, StateError) else StateError(str(error))
        self._spent += time.perf_counter() - began

    def _as_batch(self, batch: Any) -> tuple[Produced, int]:
        try:
            encoded = codec.encode(batch, carry=CARRY)
        except Exception as error:  # of the user's own pickling
            unpicklable.note_batch(error, batch, functools.partial(codec.encode, carry=CARRY))
            return self._as_error(error)
        if self._copies is not None:
            encoded = encoded._replace(buffers=[self._copies.copy(buffer) for buffer in encoded.buffers])
        wire = to_wire(encoded).fields
        by_call = bool(encoded.carried)
        content = packed_content(Kind.BY_CALL) if by_call else packed_content(Kind.BATCH, wire, TcpLine.apart)
        return Produced(Kind.BATCH, wire, content), encoded.nbytes

    def _as_error(self, error: Exception) -> tuple[Produced, int]:
        if self._loader.num_workers == 0:  # with workers, the traceback is in the text already
            add_note(error, "".join(traceback.format_tb(error.__traceback__)))
        text = f"Caught {type(error).__name__} in the producer of the share {self._name!r}: {error}"
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # the pickling of its type may raise anything
            pickled = pickle.dumps(RuntimeError(text))
        return Produced(Kind.ERROR, pickled, packed_content(Kind.ERROR, pickled)), len(pickled)
