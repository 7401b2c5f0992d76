"""What is done to each batch between its worker and the user: it is pinned, and moved to a device.

Promise: `PinOrMove.prepared` may run in any thread, `handed_over` in the user's. A batch keeps its structure: tensors
in mappings, sequences and dataclasses are moved, other objects are asked for their `to`, and what has none is left as
it is. What the user queues on its current stream finds the batch on the device, and no other stream waits.

NOTE [Late moves]. Ahead of the user, copies are queued on a stream of our own, and the memory of their results must be
recorded for the user's stream (`record_stream`), or the allocator would give it to the next batch too early. Objects
with a `to` alone, and tensors that cannot be recorded, are moved when they are handed over, on the user's stream.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from typing_extensions import override

from rayloader._compat import pin_memory, pinning_device_index
from rayloader.epoch.ahead import Delivery
from rayloader.gpu import device as devices
from rayloader.gpu.device import Accelerator, Event
from rayloader.protocol import Caught

_Work = TypeVar("_Work", bound=Callable[..., Any])

# How many batches are opened and pinned before the user asks for them, unless they go to a device.
PINNED_AHEAD = 2


def _ends_no_loop(work: _Work) -> _Work:
    """Makes a RuntimeError of a StopIteration that a batch's own methods raise, as a generator does.

    Out of `next()` it would end the program's loop without a word.
    """

    @functools.wraps(work)
    def done(*args: Any, **named: Any) -> Any:
        try:
            return work(*args, **named)
        except StopIteration as error:
            raise RuntimeError("a method of the batch raised StopIteration") from error

    return done  # type: ignore[return-value]


pinned: Callable[..., Any] = _ends_no_loop(pin_memory)


@dataclass(frozen=True)
class PinOrMove(Delivery):
    """Pins batches, and moves them to a device.

    Attributes:
        pin: pins a batch; None: no pinning.
        device: to which batches are moved; None: none.
    """

    pin: Callable[[Any], Any] | None = None
    device: torch.device | None = None
    ahead: int = 0
    device_index: int | None = None
    accelerator: Accelerator | None = None

    @property
    @override
    def prepares(self) -> bool:
        return self.pin is not None or self.device is not None

    @override
    def prepared(self, data: Any) -> Any:
        """A batch, pinned; a `Moved`, if it goes to a device; a `Caught` if that has failed."""
        try:
            if self.pin is not None:
                data = self.pin(data)
        except Exception as error:  # a custom pin_memory() may raise anything: it arrives in its turn, as torch's does
            return Caught(error, f"in pin memory thread for device {self.device_index}")
        if self.device is None:
            return data
        assert self.accelerator is not None
        try:
            return Moved(data, self.device, self.accelerator)
        except Exception as error:  # a custom to() may raise anything, and the device may have no memory left
            return Caught(error, f"while a batch was copied to device {self.device}")

    @override
    def keeps(self, data: Any) -> bool:
        return isinstance(data, Moved)

    @override
    def handed_over(self, data: Any) -> Any:
        return data.handed_over() if isinstance(data, Moved) else data

    @override
    def asks(self) -> None:
        if self.accelerator is not None:
            with contextlib.suppress(RuntimeError):  # it has failed, and so will the program, or tries again
                self.accelerator.asks()


def device_of(given: torch.device | str) -> tuple[torch.device, Accelerator]:
    """The device to which a loader moves its batches, with its index.

    Args:
        given: the loader's argument, which is not the CPU.

    Raises:
        ValueError: there is no such device here.
    """
    device, accelerator, here = torch.device(given), devices.current(), "none"
    if accelerator is not None and (found := torch.accelerator.current_accelerator()) is not None:
        count = torch.accelerator.device_count()
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        if found.type == device.type and 0 <= index < count:  # torch makes a negative one of a large one
            return torch.device(device.type, index), accelerator
        here = f"{count} of type {found.type!r}, with numbers from 0"
    raise ValueError(
        f"device must be an accelerator that torch finds here, got {given!r}, and torch finds {here}; "
        'leave it out, or pass "cpu", to keep batches in main memory'
    )


def delivery_of(target: tuple[torch.device, Accelerator] | None, ahead: int, pins_for: str | None) -> PinOrMove:
    """What is done to the batches of a loader that moves or pins them.

    Args:
        target: from `device_of`.
        ahead: how many batches are moved there before the user asks for them.
        pins_for: kind of accelerator that torch's iterator would pin batches for; None: it would not.
    """
    pin = None if pins_for is None else functools.partial(pinned, device=pins_for)
    if target is not None:
        return PinOrMove(pin, target[0], ahead, target[0].index, target[1])
    return PinOrMove(pin, None, PINNED_AHEAD, pinning_device_index(pins_for), devices.current())


class Moved:
    """A batch whose copies to a device are queued. The constructor raises what the `to` of its objects raises."""

    __slots__ = ("_accelerator", "_data", "_device", "_event", "_leaves", "_of_user", "_small")

    @_ends_no_loop
    def __init__(self, data: Any, device: torch.device, accelerator: Accelerator) -> None:
        self._device, self._accelerator = device, accelerator
        self._leaves: list[Any] = []  # what was copied
        self._of_user = False  # whether some objects are moved when they are handed over
        self._data = rebuilt(data, self._copy)
        self._event: Event = accelerator.event(device)

    def _copy(self, leaf: Any) -> Any:
        if not _can_be_recorded(leaf):
            self._of_user = True
            return leaf
        copied = self._accelerator.copy(leaf, self._device)
        self._leaves.append(copied)
        return copied

    def _move(self, leaf: Any) -> Any:
        return leaf if _can_be_recorded(leaf) else devices.move(leaf, self._device)

    def handed_over(self) -> Any:
        """The batch, for the user's current stream, or a `Caught`; may be called again, after an interrupt."""
        try:
            return self._received()
        except Exception as error:  # of a custom to() or record_stream(), or of a signal handler here
            if self._is_received():
                raise  # from a signal handler: the batch is still the next one, see NOTE [interrupts] in interrupts.py
            return Caught(error, f"while a batch was copied to device {self._device}")

    @_ends_no_loop
    def _received(self) -> Any:
        self._accelerator.wait(self._event, self._device, self._leaves)
        return rebuilt(self._data, self._move) if self._of_user else self._data

    def _is_received(self) -> bool:
        try:
            self._received()
        except Exception:  # the custom method's, again
            return False
        return True


@_ends_no_loop
def moved_here(data: Any, device: torch.device) -> Any:
    """A batch, moved on the calling thread's current stream."""
    return rebuilt(data, lambda leaf: devices.move(leaf, device))


def _can_be_recorded(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        plain = leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
        # A class that carries out operations by itself may know nothing of streams.
        return plain and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return callable(_attribute(leaf, "record_stream"))


def _attribute(data: Any, name: str) -> Any:
    """None if it has none of this name. A mapping of the program's may look for any name among its items."""
    return getattr(type(data) if isinstance(data, Mapping) else data, name, None)


def rebuilt(data: Any, change: Callable[[Any], Any]) -> Any:
    """A batch in which tensors and other objects with a method `to` are changed; the rest is as it was.

    A container in which nothing changes is left as it is. For another one there is a new one of the same type, if it
    can be copied or made of its items; otherwise a dict or a list.
    """
    if isinstance(data, (str, bytes, bytearray, int, float, type)):
        return data
    if isinstance(data, torch.Tensor) or callable(_attribute(data, "to")):
        return change(data)
    parts = _parts(data)
    if not parts:
        return data
    changed = {key: new for key, part in parts.items() if (new := rebuilt(part, change)) is not part}
    if not changed:
        return data
    if isinstance(data, (Mapping, Sequence)):
        return _with_items(data, parts | changed, changed)
    clone = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(clone, name, value)  # the dataclass may be frozen
    return clone


def _parts(data: Any) -> dict[Any, Any]:
    """What is in a mapping, by its keys, in a sequence, by the indices, or in a dataclass, by the fields' names."""
    if isinstance(data, Mapping):
        return dict(data.items())
    if isinstance(data, Sequence):
        return dict(enumerate(data))
    if dataclasses.is_dataclass(data):
        names = [field.name for field in dataclasses.fields(data)]
        return {name: getattr(data, name) for name in names if hasattr(data, name)}
    return {}


def _with_items(data: Any, items: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A mapping or sequence like this one with these items, of which some have changed."""
    plain = items if isinstance(data, Mapping) else list(items.values())
    try:
        if isinstance(data, tuple):
            return _tuple_of(data, plain)
        if not isinstance(data, (MutableMapping, MutableSequence)):
            return type(data)(plain)
        clone = copy.copy(data)
        for key, item in changed.items():  # `update` may do something else, as that of a Counter does
            clone[key] = item
    except TypeError:
        return plain
    return clone


def _tuple_of(data: Any, items: Any) -> Any:
    """A tuple like this one, whose class may have a constructor that takes something else than the items."""
    if hasattr(data, "n_sequence_fields"):  # made by C code, as what `torch.max` returns
        return type(data)(items)
    clone = tuple.__new__(type(data), items)
    if hasattr(data, "__dict__"):
        vars(clone).update(vars(data))
    return clone
