"""The channels to the actors of one crew, and the one wait for all of them.

Promise: whatever channel has more to be waited for than its descriptors can tell is looked at in time; what was told
over one is on its way after `flush`.
"""

from __future__ import annotations

import math

from rayloader.driver.actor import Actor
from rayloader.driver.answers import Answers
from rayloader.driver.channel import Channel, Message
from rayloader.driver.ways import Ways
from rayloader.driver.worker_slot import WorkerSlot
from rayloader.transport.line import Line


class Channels:
    """Of one crew.

    Args:
        ways: to its actors.
        answers: to Ray's calls.
    """

    def __init__(self, ways: Ways, answers: Answers) -> None:
        self._ways = ways
        self._answers = answers
        self._channels: dict[Actor, Channel] = {}
        self._unflushed: set[Channel] = set()  # that were told something
        self._impatient: set[Channel] = set()  # that have more to wait for than descriptors can tell
        self._quiet: dict[Channel, Line | None] = {}  # the line of each that is all there was to wait for, as last seen

    def __contains__(self, actor: Actor) -> bool:
        """Whether there is one to that actor."""
        return actor in self._channels

    def lane(self, actor: Actor) -> str:
        """How it is reached and how its batches travel, in words."""
        channel = self._channels.get(actor)
        return "" if channel is None else channel.lane

    def open(self, actor: Actor) -> None:
        """There is one from here on."""
        if actor not in self._channels:
            self._channels[actor] = self._ways.channel_to(actor)

    def to(self, slot: WorkerSlot) -> Channel:
        """To tell that worker something."""
        channel = self._channels[slot.host]
        self._unflushed.add(channel)
        return channel

    def flush(self) -> None:
        """To be called when the last of several calls has been made: before that they may not be on their way."""
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
        """Reads what a wait has found, for `receive`: without the epoch's lock, where no interrupt can come."""
        for channel in list(self._answers.ready):
            if channel is not None:
                channel.read()

    def receive(self, *, all_channels: bool, was_read: bool) -> list[tuple[Actor, Message]]:
        """What the actors have sent; see `Crew.receive`."""
        ready = self._answers.ready
        arrived = []
        for channel in list(self._channels.values()) if all_channels else {*ready, *self._impatient}:
            ready.discard(channel)  # first: what comes from here on makes it ready again
            if channel is not None:
                if not was_read:
                    channel.read()
                arrived += [(channel.actor, message) for message in channel.receive()]
                self._watch(channel)
        if arrived:
            self._answers.ring_others()
        return arrived

    def hurry(self, slot: WorkerSlot) -> None:
        """The worker's host is told that another process will be this worker soon."""
        self.to(slot).pause()
        slot.host.hurry(slot.worker_id)

    def leave(self, slot: WorkerSlot) -> None:
        """The worker's host is told that it is this worker no longer."""
        if slot.host in self._channels:
            self.to(slot).pause()
        slot.host.leave(slot.worker_id)
        slot.host.lane.abandon(slot.worker_id)

    def hang_up(self, actor: Actor) -> None:
        """Ends the one to that actor, if there is one."""
        channel = self._channels.pop(actor, None)
        if channel is not None:
            self._unflushed.discard(channel)
            channel.close()
            self._watch(channel)
            del self._quiet[channel]

    def close(self) -> None:
        """Ends all of them."""
        for actor in list(self._channels):
            self.hang_up(actor)

    def _watch(self, channel: Channel) -> None:
        """It may have to be waited for in another way than before."""
        line = channel.quiet_line
        if line is not None and self._quiet.get(channel) is line:
            return  # as before: asked after every message
        self._answers.watch_descriptors(channel, tuple(channel.descriptors()))
        if channel.patience < math.inf:
            self._impatient.add(channel)
        else:
            self._impatient.discard(channel)
        self._quiet[channel] = line  # last: an interrupt must not hide what was not done
