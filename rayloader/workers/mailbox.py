"""Everything that the workers of one fleet send: the one wait for it, and what has come over which channel.

Promise: `wait` returns when something has come, over a line or from Ray, and lets any exception through that a signal
handler raises meanwhile. No thread waits inside Ray. A channel that must also look at a deadline is looked at before it
passes; calls made over a channel are sent at the latest by `flush`.

NOTE [waiting]
Python runs signal handlers in the main thread. If that thread waits in `ray.get` or `ray.wait`, Ray calls the handlers
and changes their exceptions: SystemExit loses its code, and any other exception ends as SystemError, or is printed
and dropped. So Ray is only asked to report when a call is answered, which it does in a thread of its own, and this
module waits for descriptors: those of the lines, and one that Ray's thread, or any other, makes readable. Nor is a
thread that waits here inside Ray while another thread shuts Ray down.
"""

from __future__ import annotations

import functools
import math
import select
from itertools import chain
from typing import Any

from rayloader._compat_ray import on_completed
from rayloader.bell import Waker
from rayloader.transport.line import Line
from rayloader.workers.actor import Actor
from rayloader.workers.channel import Channel, Message
from rayloader.workers.waiting import NONE_YET


class Mailbox:
    """The channels of one fleet, and the answers to its Ray calls. Any thread may wait.

    Each call and descriptor belongs to a channel. Channels with something to receive are found without asking the
    others: a wait costs no more with many workers than with one, except for the system call itself.
    """

    def __init__(self) -> None:
        self._channels: dict[Actor, Channel] = {}
        self._answers: dict[Any, Any] = {}  # to the watched calls
        self._waker = Waker()
        self._waiting = 0  # threads that wait
        self._descriptors: dict[Channel, tuple[tuple[int, int], ...]] = {}
        self._owners: dict[int, Channel] = {}  # by descriptor
        self._poll: Any = None  # of these descriptors; None while a thread has it, or when they have changed
        self._changes = 0  # counts the changes of these descriptors
        self._ready: set[Channel | None] = set()  # that have something to receive
        self._unflushed: set[Channel] = set()  # over which calls were made
        self._impatient: set[Channel] = set()  # that must be looked at without a sign from their descriptors
        # For each channel, its line if that was the only thing to wait for when last looked at.
        self._quiet: dict[Channel, Line | None] = {}

    # ---- answers to Ray calls

    def watch(self, ref: Any, channel: Channel | None = None) -> None:
        """The answer to this call will end a wait, and make its channel ready."""
        if ref not in self._answers:
            self._answers[ref] = NONE_YET
            on_completed(ref, functools.partial(self._answered, ref, channel))

    def __getitem__(self, ref: Any) -> Any:
        """The answer to a watched call, Ray's error if there will be none, or NONE_YET."""
        return self._answers[ref]

    def forget(self, ref: Any) -> None:
        """The answer is not needed any more."""
        self._answers.pop(ref, None)

    def _answered(self, ref: Any, channel: Channel | None, answer: Any) -> None:  # in one of Ray's threads
        if ref in self._answers:
            self._answers[ref] = answer
            self._ready.add(channel)
            self._waker.ring()

    # ---- channels

    def __contains__(self, actor: Actor) -> bool:
        """Whether there is a channel to that actor."""
        return actor in self._channels

    def add(self, channel: Channel) -> None:
        """Receives what comes over this channel, until its actor is removed."""
        self._channels[channel.actor] = channel

    def to(self, actor: Actor) -> Channel:
        """The channel to that actor, for a call."""
        channel = self._channels[actor]
        self._unflushed.add(channel)
        return channel

    def lane(self, actor: Actor) -> str:
        """How an actor is reached and how its batches travel, in words."""
        channel = self._channels.get(actor)
        return "" if channel is None else channel.lane

    def remove(self, actor: Actor) -> None:
        """Closes the channel to that actor, if there is one."""
        channel = self._channels.pop(actor, None)
        if channel is not None:
            self._unflushed.discard(channel)
            channel.close()
            self._look_at(channel)
            del self._quiet[channel]

    def close(self) -> None:
        """Closes all channels, and ends the wait in progress."""
        for actor in list(self._channels):
            self.remove(actor)
        self.ring()

    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""
        while self._unflushed:
            channel = self._unflushed.pop()
            channel.flush()
            self._look_at(channel)

    def read(self) -> None:
        """Reads what a wait has found, for `receive`: without the epoch's lock, in a thread without interrupts."""
        for channel in list(self._ready):
            if channel is not None:
                channel.read()

    def receive(self, *, all_channels: bool, was_read: bool) -> list[tuple[Actor, Message]]:
        """The messages that have come, each with the actor that sent it.

        Args:
            all_channels: receive from all of them; otherwise from those that a wait has found ready.
            was_read: only messages that `read` has read.
        """
        arrived = []
        for channel in list(self._channels.values()) if all_channels else {*self._ready, *self._impatient}:
            self._ready.discard(channel)  # first: anything that arrives from here on makes it ready again
            if channel is not None:
                if not was_read:
                    channel.read()
                arrived += [(channel.actor, message) for message in channel.receive()]
                self._look_at(channel)
        if arrived and self._waiting:  # other threads: this one may have received what they wait for
            self._waker.ring()
        return arrived

    def _look_at(self, channel: Channel) -> None:
        """Updates what to wait for on a channel."""
        line = channel.quiet_line
        if line is not None and self._quiet.get(channel) is line:
            return  # as before: looked at after every message
        self._wait_for(channel, tuple(channel.descriptors()))
        if channel.patience < math.inf:
            self._impatient.add(channel)
        else:
            self._impatient.discard(channel)
        self._quiet[channel] = line  # last: an interrupt must not hide an update that was not made

    def _wait_for(self, channel: Channel, descriptors: tuple[tuple[int, int], ...]) -> None:
        """Sets what to wait for besides answers: descriptors, with the events of `select.poll`."""
        before = self._descriptors.get(channel, ())
        if descriptors == before:
            return
        for descriptor, _ in before:
            if self._owners.get(descriptor) is channel:  # else it was closed, and its number now belongs to another
                del self._owners[descriptor]
        self._owners.update((descriptor, channel) for descriptor, _ in descriptors)
        self._descriptors[channel] = descriptors
        if not descriptors:
            del self._descriptors[channel]
            self._ready.discard(channel)  # it refers to this object, and must not depend on the garbage collector
        self._changes += 1
        self._poll = None
        if self._waiting:  # other threads do not wait for these yet
            self._waker.ring()

    # ---- waiting

    def ring(self) -> None:
        """Ends all waits in progress, or the next one."""
        self._waker.ring()

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; returns whether it has."""
        if self._impatient:
            timeout = min(timeout, *(channel.patience for channel in self._impatient))
        changes, (poll, self._poll) = self._changes, (self._poll, None)  # two threads cannot use one at a time
        if poll is None:
            poll = select.poll()
            for descriptor, events in list(chain(*self._descriptors.values())):
                poll.register(descriptor, events)
            poll.register(self._waker.descriptor, select.POLLIN)
        self._waiting += 1
        try:
            found = poll.poll(math.ceil(max(0.0, timeout) * 1000))
        finally:
            self._waiting -= 1
        if changes == self._changes:
            self._poll = poll
        for descriptor, _ in found:
            if descriptor == self._waker.descriptor:
                self._waker.heard()
            elif descriptor in self._owners:
                self._ready.add(self._owners[descriptor])
        return bool(found)
