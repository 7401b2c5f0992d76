"""Channels to actors: what only some of them carry, and what takes the place of one that cannot be made.

What every channel carries, and how it ends, is compared with torch's workers by the tests of conformance.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import signal

import pytest
import ray
import torch
from torch.utils.data import default_collate

from probes import Calls
from rayloader import DataLoader
from rayloader.actors import actors
from rayloader.actors.actors import ActorLine
from rayloader.transport.lanes import SMALL_BYTES
from rayloader.workers.connection import Channel, Mailbox

pytestmark = pytest.mark.usefixtures("ray_session")

OWN = {"num_cpus": 0, "memory": 3}  # of actors that serve no other test


def get(request):
    """The sample that the index asks for."""
    what, value = request
    match what:
        case "bytes":
            return torch.full((value,), value % 251, dtype=torch.uint8)
        case "reference":
            return ray.put(("back", value))
        case "death" if not value.exists():
            value.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        case "death":
            return torch.tensor(4)
        case "fetch":
            return torch.tensor(ray.get(value))
    return torch.tensor(value)


def collate(samples):
    return samples if isinstance(samples[0], ray.ObjectRef) else default_collate(samples)


def asking(*requests, **options):
    """A loader of a batch for each request, which has one worker, an actor."""
    return DataLoader(
        Calls(get), 1, sampler=requests, num_workers=1, collate_fn=collate, **{"workers": "ray", **options}
    )


def lanes_of(loader):
    return {worker.lane for worker in loader.stats().epoch.workers}


@pytest.mark.parametrize("lane", ["line, arena", "TCP line", "Ray calls"])
def test_references_to_rays_objects_come_back_in_their_turn_and_are_sent_by_ray_calls_only(lane, monkeypatch, tmp_path):
    """A worker that dies meanwhile is replaced, over the same kind of channel."""
    monkeypatch.setattr(actors, "LOCAL_LINES", lane != "TCP line")
    arenas, reference = lane != "Ray calls", ray.put(7)
    requests = ("value", 1), ("reference", "sent"), ("bytes", SMALL_BYTES + 1)
    before, (came,), large = loader = asking(*requests, arenas=arenas)
    assert (before.tolist(), ray.get(came)) == ([1], ("back", "sent"))
    assert large.eq((SMALL_BYTES + 1) % 251).all()
    assert lanes_of(loader) == {lane}
    # The owner of a reference must live as long as it is used.
    before, last = loader = asking(("value", 1), ("death", tmp_path / "struck"), arenas=arenas)
    assert (before.tolist(), last.tolist(), loader.stats().epoch.restarts) == ([1], [4], 1)
    assert lanes_of(loader) == {lane}
    fetching = asking(("fetch", reference), arenas=arenas)
    if arenas:
        with pytest.raises(TypeError, match="arenas=False"):
            next(iter(fetching))
    else:
        assert [batch.tolist() for batch in fetching] == [[7]]


def nowhere(address):
    """Of the same kind, where nobody listens."""
    return dataclasses.replace(address, port=1) if hasattr(address, "port") else address._replace(name="rayloader-0")


@pytest.mark.parametrize("kind", ["local", "tcp"])
@pytest.mark.parametrize("why", ["it is not let in", "it reaches nobody"])
def test_where_a_line_is_refused_ray_calls_take_its_place_and_the_log_says_why(why, kind, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "rayloader")
    monkeypatch.setattr(actors, "LOCAL_LINES", kind == "local")
    if why == "it is not let in":
        monkeypatch.setattr(actors, "_is_actor", lambda process, pid: False)
        monkeypatch.setattr(actors.TcpDriverLine, "_proves_itself", lambda self, stranger: False)
    serve = ActorLine._serve

    def serve_elsewhere(self):
        self._line.address = nowhere(self._line.address)
        serve(self)

    if why == "it reaches nobody":
        monkeypatch.setattr(ActorLine, "_serve", serve_elsewhere)
    loader = asking(*(("value", number) for number in range(5)), ray_remote_args=OWN, fresh_processes=True)
    assert [batch.tolist() for batch in loader] == [[number] for number in range(5)]
    assert lanes_of(loader) == {"Ray calls"}
    (message,) = [record.getMessage() for record in caplog.records if record.name == "rayloader"]
    assert "a worker is reached by Ray calls, which take longer than a socket: " in message
    assert kind == "tcp" or why == "it reaches nobody" or "did not let it in" in message


class Waiting(Channel):
    """Waits for one descriptor, and does nothing else."""

    start = run = rebuild = resume = close = lambda *_: None
    lane = ""

    def __init__(self, descriptor, mailbox):
        super().__init__(object(), mailbox)
        self.descriptor = descriptor

    def descriptors(self):
        return iter([(self.descriptor, select.POLLIN)])

    def receive(self):
        return []


def test_a_descriptor_that_was_closed_and_is_another_files_wakes_whoever_waits_for_that():
    mailbox, (read, write), (other, others_write) = Mailbox(), os.pipe(), os.pipe()
    one, another = Waiting(read, mailbox), Waiting(read, mailbox)
    for channel in (one, another):
        mailbox.add(channel)
        mailbox.to(channel.process)
        mailbox.flush()
        mailbox.wait(0)
        if channel is one:
            os.dup2(other, read)  # as a zygote's, that is closed before all its channels know
    os.write(others_write, b"!")
    assert mailbox.wait(60)
    for descriptor in (read, write, other, others_write):
        os.close(descriptor)
