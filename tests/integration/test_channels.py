"""One list of what every channel must do, over each kind, with a real worker process at its other end.

A fleet's mailbox receives for its channels, so it is used here too: nothing else tells when a channel has something.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
import time

import psutil
import pytest
import ray
import torch
from torch.utils.data import Dataset, default_collate

from inside import held_by_mailbox, taken_from
from latches import Gate, Mail
from rayloader import DataLoader
from rayloader.actors.actors import ActorLine, RayCalls, TcpCalls
from rayloader.protocol import Answer, ResultKind, Up, carried
from rayloader.resume.digest import drawn
from rayloader.resume.journal import Journal
from rayloader.task import Task
from rayloader.transport.lanes import SMALL_BYTES, Recycled, from_wire, received
from rayloader.transport.line import LineSocket
from rayloader.workers.connection import Channel, LineRefused, Mailbox, ProcessLost
from rayloader.workers.fleet import Worker

pytestmark = pytest.mark.usefixtures("ray_session")

LIMIT_S = 500.0  # for one answer; on expiry the test fails
LANES = {"arena": "line, arena", "line": "line", "tcp": "TCP line", "calls": "Ray calls"}  # in words, of each kind


class Requests(Dataset):
    """Its indices say what is wanted."""

    def __init__(self, gate, mail):
        self.gate, self.mail = gate, mail

    def __len__(self):
        return 1

    def __getitem__(self, request):
        what, value = request
        match what:
            case "bytes":
                return torch.full((value,), value % 251, dtype=torch.uint8)
            case "gate":
                self.mail.send("at the gate")
                self.gate.wait()
            case "reference":
                return ray.put(("back", value))
            case "fetch":
                return torch.tensor(ray.get(value))
        return torch.tensor(value)


def collate(samples):
    return samples if isinstance(samples[0], ray.ObjectRef) else default_collate(samples)


class Peer:
    """A worker process, and one channel to it."""

    def __init__(self, kind, worker, source):
        self.kind, self.actor = kind, worker.host
        self.memory = Recycled()
        self.mailbox = Mailbox()
        if kind == "line":
            self.actor.lane.refused("as planned")
        self.worker = Worker(worker.setup, Journal(), self.actor, self.mailbox)
        self.source = source
        self.begin()
        self.tasks = {}

    def begin(self):
        """Begins the worker over a new channel."""
        self.mailbox.remove(self.actor)
        self.channel = self._channel()
        self.mailbox.add(self.channel)
        self.worker.begin(self.source)

    def _channel(self):
        if self.kind == "calls":
            return RayCalls(self.actor, self.mailbox)
        if self.kind == "tcp":
            return TcpCalls(self.actor, self.mailbox, ray.util.get_node_ip_address(), self.memory.room)
        return ActorLine(self.actor, self.mailbox)

    def task(self, *requests):
        """A task of which each sample is what was requested."""
        return Task(len(self.tasks), drawn(list(requests), 0, carried()))

    def run(self, *requests):
        """Gives the worker a task; not sent before `flush`."""
        task = self.task(*requests)
        self.worker.give(task)
        self.tasks[task.call] = task
        return task

    def hear(self, count=1):
        """So many messages, or fewer if the process has ended."""
        self.mailbox.flush()
        heard, until = [], time.monotonic() + LIMIT_S
        while len(heard) < count:
            assert time.monotonic() < until, f"only {heard} came"
            self.mailbox.wait(1.0)
            messages = self.mailbox.receive()
            assert all(actor is self.actor for actor, _ in messages)
            heard += [message for _, message in messages]
            if heard and isinstance(heard[-1], ProcessLost | LineRefused):
                break
        return heard

    def answer(self, message):
        """The task that was answered, and the result."""
        kind, call, content = message
        assert kind == Up.ANSWER
        task, answer = self.tasks.pop(call), Answer(*content)
        assert answer.task_id == task.task_id
        if answer.wire is not None:
            answer.wire = received(answer.wire, task.lent)
        task.lent = None
        return task, answer

    def batch(self, message):
        _, result = self.answer(message)
        assert result.kind == ResultKind.BATCH, result.text
        return from_wire(result.wire)

    def pid(self):
        assert self.actor.has_started()
        return self.actor.address.pid

    def check_closed(self):
        """Nothing is waited for any more."""
        assert list(self.channel.descriptors()) == []
        assert self.channel.quiet_line is None
        assert self.channel.receive() == []

    def close(self):
        self.channel.close()
        self.mailbox.close()
        self.memory.close()
        for task in self.tasks.values():
            task.lent = None
        assert not held_by_mailbox(self.mailbox)


@pytest.fixture
def peer(request, tmp_path):
    """Of this kind; its process is nobody else's before or after."""
    with contextlib.ExitStack() as stack:
        made = []

        def make(kind):
            gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")
            stack.callback(mail.close)
            stack.callback(gate.open)
            loader = DataLoader(
                Requests(gate, mail),
                1,
                sampler=[("value", 0)],
                num_workers=1,
                collate_fn=collate,
                fresh_processes=True,
                prefetch_factor=1,
                persistent_workers=True,  # it keeps its process after its last batch
            )
            iterator = iter(loader)
            next(iterator)
            stack.callback(iterator._close)
            worker, source = taken_from(iterator)
            made.append(Peer(kind, worker, source))
            made[-1].gate, made[-1].mail = gate, mail
            stack.callback(made[-1].close)
            return made[-1]

        yield make


@pytest.fixture(params=LANES)
def any_peer(request, peer):
    return peer(request.param)


@pytest.fixture(params=["arena", "line", "tcp"])
def line_peer(request, peer):
    return peer(request.param)


def test_references_to_rays_objects_come_back_in_their_turn_and_are_sent_by_ray_calls_only(any_peer):
    for request in (("value", 1), ("reference", "sent"), ("value", 2), ("bytes", SMALL_BYTES + 1)):
        any_peer.run(request)
    before, (came,), after, large = map(any_peer.batch, any_peer.hear(4))
    assert (before.tolist(), ray.get(came), after.tolist()) == ([1], ("back", "sent"), [2])
    assert large.eq((SMALL_BYTES + 1) % 251).all()
    assert any_peer.channel.lane == LANES[any_peer.kind]
    reference = ray.put(7)
    if any_peer.kind == "calls":
        any_peer.run(("fetch", reference))
        assert any_peer.batch(any_peer.hear()[0]).tolist() == [7]
    else:
        with pytest.raises(TypeError, match="arenas=False"):
            any_peer.run(("fetch", reference))


def test_the_end_of_the_process_is_the_last_message(any_peer):
    any_peer.run(("value", 0))
    any_peer.run(("gate", 0))
    any_peer.run(("value", 1))
    (answer,) = any_peer.hear(1)
    assert any_peer.batch(answer).tolist() == [0]
    any_peer.mail.receive()
    process = psutil.Process(any_peer.pid())
    process.send_signal(signal.SIGKILL)
    (lost,) = any_peer.hear(9)
    assert isinstance(lost, ProcessLost)
    assert lost.process is any_peer.actor
    assert str(lost)
    any_peer.check_closed()
    assert any_peer.mailbox.receive(also=any_peer.actor) == []


def test_closing_twice_ends_it_and_leaves_nothing(any_peer):
    any_peer.run(("value", 0))
    any_peer.hear()
    before = len(os.listdir("/proc/self/fd"))
    held = len(list(any_peer.channel.descriptors()))
    any_peer.run(("gate", 0))
    any_peer.mailbox.flush()
    any_peer.mail.receive()
    for _ in range(2):
        any_peer.mailbox.remove(any_peer.actor)
        any_peer.channel.close()
        any_peer.check_closed()
    assert len(os.listdir("/proc/self/fd")) <= before - held
    assert not held_by_mailbox(any_peer.mailbox)
    assert any_peer.actor not in any_peer.mailbox
    any_peer.gate.open()
    assert any_peer.mailbox.receive(also=any_peer.actor) == []


# ---- lines only


def test_all_that_there_is_goes_in_one_message_and_not_before_it_is_flushed(line_peer, monkeypatch):
    line_peer.run(("value", 0))
    line_peer.hear()
    sent = []
    for name in ("send", "sendmsg"):
        own = getattr(LineSocket, name)
        monkeypatch.setattr(LineSocket, name, lambda *args, own=own: sent.append(own(*args)) or sent[-1])
    for number in range(20):
        line_peer.run(("value", number))
    assert sent == []
    line_peer.mailbox.flush()
    assert len(sent) == 1
    line_peer.hear(20)


def test_a_process_that_is_not_the_workers_is_not_let_in_and_that_is_told(peer, monkeypatch):
    monkeypatch.setattr(ActorLine, "_is_actor", lambda self, pid: False)
    refused = peer("arena")
    refused.run(("value", 0))
    (message,) = refused.hear()
    assert isinstance(message, LineRefused)
    assert "did not let it in" in str(message)
    refused.check_closed()
    assert psutil.pid_exists(refused.pid()), "the process itself is well"


@pytest.mark.parametrize("kind", ["arena", "tcp"])
def test_a_line_that_nobody_can_reach_is_refused_and_ray_calls_take_its_place(peer, kind):
    refused = peer(kind)
    refused.run(("value", 0))
    address = refused.channel._line.address
    elsewhere = address._replace(name="rayloader-line-0") if kind == "arena" else dataclasses.replace(address, port=1)
    refused.channel._line.address = elsewhere
    (message,) = refused.hear()
    assert isinstance(message, LineRefused)
    refused.check_closed()
    refused.kind = "calls"
    refused.begin()
    refused.run(("value", 3))
    assert refused.batch(refused.hear()[0]).tolist() == [3]


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
