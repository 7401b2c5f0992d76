"""The channels to the actors of one crew, and the one wait for all of them.

Promise: a channel that must also wait for a deadline is checked before that deadline passes; calls made over a channel
are sent at the latest by `flush`.
"""

from __future__ import annotations

import math

from rayloader.transport.line import Line
from rayloader.workers.actor import Actor
from rayloader.workers.answers import Answers
from rayloader.workers.channel import Channel, Message
from rayloader.workers.ways import Ways
from rayloader.workers.worker_slot import WorkerSlot


class Channels:
    """The channels of one crew.

    Args:
        ways: to its actors.
        answers: to Ray calls.
    """

    def __init__(self, ways: Ways, answers: Answers) -> None:
        self._ways = ways
        self._answers = answers
        self._channels: dict[Actor, Channel] = {}
        self._unflushed: set[Channel] = set()  # over which calls were made
        self._impatient: set[Channel] = set()  # that must be checked without a sign from their descriptors
        # For each channel, its line if that was the only thing to wait for when last checked.
        self._quiet: dict[Channel, Line | None] = {}

    def __contains__(self, actor: Actor) -> bool:
        """Whether there is a channel to that actor."""
        return actor in self._channels

    def lane(self, actor: Actor) -> str:
        """How an actor is reached and how its batches travel, in words."""
        channel = self._channels.get(actor)
        return "" if channel is None else channel.lane

    def open(self, actor: Actor) -> None:
        """Opens a channel to an actor."""
        if actor not in self._channels:
            self._channels[actor] = self._ways.channel_to(actor)

    def to(self, slot: WorkerSlot) -> Channel:
        """The channel over which to send that worker a message."""
        channel = self._channels[slot.host]
        self._unflushed.add(channel)
        return channel

    def flush(self) -> None:
        """To be called after the last of several calls: until then they may not be sent."""
        while self._unflushed:
            channel = self._unflushed.pop()
            channel.flush()
            self._watch(channel)

    def wait(self, timeout: float) -> bool:
        """Waits for `timeout` seconds at most until something has come; False if nothing has."""
        if self._impatient:
            timeout = min(timeout, *(channel.patience for channel in self._impatient))
        return self._answers.wait(timeout)

    def read(self) -> None:
        """Reads what a wait has found, for `receive`: without the epoch's lock, in a thread without interrupts."""
        for channel in list(self._answers.ready):
            if channel is not None:
                channel.read()

    def receive(self, *, all_channels: bool, was_read: bool) -> list[tuple[Actor, Message]]:
        """The actors' messages; see `Crew.receive`."""
        ready = self._answers.ready
        arrived = []
        for channel in list(self._channels.values()) if all_channels else {*ready, *self._impatient}:
            ready.discard(channel)  # first: anything that arrives from here on makes it ready again
            if channel is not None:
                if not was_read:
                    channel.read()
                arrived += [(channel.actor, message) for message in channel.receive()]
                self._watch(channel)
        if arrived:
            self._answers.ring_others()
        return arrived

    def hurry(self, slot: WorkerSlot) -> None:
        """Tells the worker's host that another process will soon be this worker."""
        self.to(slot).pause()
        slot.host.hurry(slot.worker_id)

    def leave(self, slot: WorkerSlot) -> None:
        """Tells the worker's host that it no longer is this worker."""
        if slot.host in self._channels:
            self.to(slot).pause()
        slot.host.leave(slot.worker_id)
        slot.host.lane.abandon(slot.worker_id)

    def hang_up(self, actor: Actor) -> None:
        """Closes the channel to that actor, if there is one."""
        channel = self._channels.pop(actor, None)
        if channel is not None:
            self._unflushed.discard(channel)
            channel.close()
            self._watch(channel)
            del self._quiet[channel]

    def close(self) -> None:
        """Closes all channels."""
        for actor in list(self._channels):
            self.hang_up(actor)

    def _watch(self, channel: Channel) -> None:
        """Updates what to wait for on a channel."""
        line = channel.quiet_line
        if line is not None and self._quiet.get(channel) is line:
            return  # as before: checked after every message
        self._answers.watch_descriptors(channel, tuple(channel.descriptors()))
        if channel.patience < math.inf:
            self._impatient.add(channel)
        else:
            self._impatient.discard(channel)
        self._quiet[channel] = line  # last: an interrupt must not hide an update that was not made
