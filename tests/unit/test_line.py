"""Lines of both kinds, and local ones, between this process and itself, or a child: no Ray."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import resource
import signal
import socket
import sys
import threading

import pytest

from lines import KINDS, listening, messages, met, plain, reach, serve, wait_for
from rayloader.transport.line import (
    CHUNK_BYTES,
    HEADER,
    JOINED_BYTES,
    DriverLine,
    Line,
    LineError,
    LineSocket,
    Parcel,
    connect,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lines need Linux")


@pytest.fixture(params=KINDS)
def ends(request):
    """Both ends of a line of each kind; the driver's has let the worker's in."""
    driver = listening(request.param)
    worker = met(driver)
    yield driver, worker
    driver.close()
    worker.close()


local = pytest.mark.parametrize("ends", ["local"], indirect=True)


@contextlib.contextmanager
def forked():
    """A child that has a copy of all there is, and does nothing."""
    here, there = os.pipe()
    child = os.fork()
    if not child:
        os.close(here)
        os.write(there, b"!")
        signal.pause()
        os._exit(0)
    try:
        os.read(here, 1)
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(here)
        os.close(there)


# ---- lines of both kinds

SMALL = 0, 1, 7, 300
ALL = 1 << 30
EDGES = [edge + by for edge in (4096, JOINED_BYTES, CHUNK_BYTES - 8, CHUNK_BYTES) for by in (-1, 0, 1)]


class End:
    """One end of a line, whose socket takes and gives as many bytes as it is told, in as many calls."""

    def __init__(self, line):
        self.line, self.room, self.went, self.came = line, 0, 0, 0  # bytes
        self.sent, self.ends, self.received = [], [0], []  # messages, where each ends, and those of the other end
        own = line._socket
        own.send = lambda data, flags: self._moves("went", own, "send", [data], lambda views: (views[0], flags))
        own.sendmsg = lambda parts, _, flags: self._moves("went", own, "sendmsg", parts, lambda some: (some, (), flags))
        own.recv_into = lambda view, _, flags: self._moves(
            "came", own, "recv_into", [view], lambda views: (views[0], len(views[0]), flags)
        )
        own.recvmsg_into = lambda parts, _, flags: self._moves(
            "came", own, "recvmsg_into", parts, lambda some: (some, 0, flags)
        )

    def _moves(self, way, own, name, parts, arguments):
        some, room = [], self.room
        for part in parts:
            if room:
                some.append(memoryview(part)[:room])
                room -= len(some[-1])
        if not some:
            raise BlockingIOError
        result = getattr(socket.socket, name)(own, *arguments(some))
        count = result[0] if isinstance(result, tuple) else result
        self.room -= count
        setattr(self, way, getattr(self, way) + count)
        return result

    def send(self, message, room):
        self.room = room
        self.sent.append(plain(message))
        body, buffers = self.sent[-1] if isinstance(message, Parcel) else (message, [])
        self.ends.append(self.ends[-1] + HEADER.size + 8 * len(buffers) + len(body) + sum(map(len, buffers)))
        self.line.send(message)

    def flush(self, room):
        self.room = room
        self.line.flush()

    def receive(self, room, other):
        self.room = room
        messages = self.line.receive()
        assert not any(view.readonly for message in messages if not isinstance(message, bytes) for view in message[1])
        self.received += map(plain, messages)
        assert self.received == other.sent[: len(self.received)]


def size(chance):
    return chance.choice(SMALL if chance.random() < 0.9 else [*EDGES, 3 * CHUNK_BYTES])


def act(chance, end, other, number):
    """An end sends, or receives, as much as its socket takes, or gives; after `keep` it writes to what it has sent."""
    room = chance.choice([0, 1, 2, 11, 12, 13, 20, 100, 5000, ALL])
    match chance.choice(["send", "send", "flush", "receive", "receive", "receive"]):
        case "send":
            buffers = [bytearray([number + place]) * size(chance) for place in range(chance.choice([0, 0, 1, 3, 100]))]
            body = bytes([number]) * size(chance)
            end.send(Parcel(body, list(map(memoryview, buffers))) if buffers else body, room)
            if chance.random() < 0.5:
                Line.keep(end.line)  # not by a thread
                for buffer in buffers:
                    buffer[:] = bytes(len(buffer))
            while end.line.unsent and chance.random() < 0.7:
                end.flush(ALL)
                other.receive(ALL, end)
        case "flush":
            end.flush(room)
        case "receive":
            end.receive(room, other)
    assert end.line.unsent is (end.went < end.ends[-1])


def finish(how, gone, there, all_arrives):
    """One end ends, and the other one hears all that was sent, if it is known to arrive, and then the end."""
    if how == "all is sent":
        for end, other in ((gone, there), (there, gone)):
            while end.line.unsent or len(other.received) < len(end.sent):
                end.flush(ALL)
                other.receive(ALL, end)
    if how == "dies":
        os.close(gone.line._socket.detach())  # no more than the kernel does
    else:
        gone.line.close()
    while not there.line.ended:
        wait_for(there.line)
        there.receive(ALL, gone)
    if all_arrives:
        assert len(there.received) == sum(end <= gone.went for end in gone.ends[1:])
    there.line.send(b"into the void")
    assert there.line.descriptors == there.line.receive() == []
    for end in (gone, there):
        end.line.close()


def run_ends(kind, seed):
    """Both ends send, receive, keep and end in any order, in pieces of any size."""
    chance = random.Random(seed)
    driver = listening(kind)
    ends = worker, _ = End(met(driver)), End(driver)
    for number in range(60):
        act(chance, *chance.sample(ends, 2), number)
    gone, there = chance.sample(ends, 2)
    all_arrives = kind == "local" or (gone is worker and gone.came == there.went)  # else it is reset
    finish(chance.choice(["all is sent", "closes", "dies"]), gone, there, all_arrives)


@pytest.mark.parametrize("kind", KINDS)
def test_messages_arrive_whole_and_in_order_in_pieces_of_any_size_until_one_end_ends_and_leaves_nothing(kind):
    before = len(os.listdir("/proc/self/fd"))
    for seed in range(30):
        run_ends(kind, seed)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_what_is_sent_before_the_worker_connects_or_dies_arrives_and_the_end_is_heard(kind, how):
    driver = listening(kind)
    driver.send(b"first")
    child = os.fork()
    if not child:
        worker = reach(driver)
        worker.send(Parcel(messages(worker, 1)[0], [memoryview(b"x" * 100_000)]))
        worker.drain()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    serve(driver, until=lambda: driver._socket is not None)
    os.waitpid(child, 0)
    assert list(map(plain, messages(driver, 2))) == [(b"first", [b"x" * 100_000])]
    assert driver.ended
    assert driver.descriptors == []
    driver.close()


@pytest.mark.parametrize(
    "said", [HEADER.pack(2**64 - 1, 0), HEADER.pack(2**61, 0), HEADER.pack(0, 1) + (2**63).to_bytes(8, "little")]
)
def test_what_cannot_be_a_message_ends_the_line_and_says_so(ends, said):
    driver, worker = ends
    worker.send(b"a message")
    worker.drain()
    worker._socket.sendall(said)
    assert messages(driver, 2) == [b"a message"]
    assert driver.ended
    assert not driver.closed
    assert "something else was written to the line" in driver.fault
    assert driver.receive() == []


@pytest.mark.parametrize("dies", ["driver", "worker"])
def test_a_forked_child_neither_ends_a_line_nor_holds_it_open(ends, dies):
    end, other = ends if dies == "driver" else ends[::-1]
    with forked():
        end.send(b"still there")
        assert messages(other, 1) == [b"still there"]
        os.close(end._socket.detach())  # as when its process dies
        assert messages(other, 1) == []
        assert other.ended


def test_to_close_is_to_hang_up_whatever_is_unread_and_whoever_has_a_copy(ends):
    driver, worker = ends
    worker.send(b"never read")
    driver.send(b"perhaps")
    copy = os.dup(driver._socket.fileno())  # as a child has one that Python has not forked
    driver.close()
    while not worker.ended:
        worker.wait()
        worker.receive()
    os.close(copy)
    driver.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("connected", [False, True])
def test_a_line_that_the_collector_finds_ends_without_a_warning(kind, connected):
    driver = listening(kind)
    worker = met(driver) if connected else None
    held = driver._socket if connected else driver._listener
    driver.me, held.line, descriptor = driver, driver, held.fileno()
    del driver, held
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    if worker is not None:
        worker.close()


# ---- local ones


@local
def test_a_wait_ends_when_there_is_room_to_send(ends):
    driver, worker = ends
    while not worker.unsent:
        worker.send(bytes(1 << 16))
    waiter = threading.Thread(target=worker.wait)
    waiter.start()
    assert waiter.is_alive()
    while waiter.is_alive():
        driver.receive()
    waiter.join()


def test_an_address_that_is_not_what_it_says_is_refused():
    driver = listening("local")
    for change in ({"pid": 1}, {"uid": os.getuid() + 1}, {"machine": "elsewhere"}, {"name": "rayloader-line-0"}):
        with pytest.raises(LineError):
            connect(driver.address._replace(**change))
    driver.close()
    with pytest.raises(LineError):
        connect(driver.address)


def test_another_process_than_the_workers_is_not_let_in():
    driver = DriverLine(lambda pid: pid != os.getpid())
    stranger = connect(driver.address)
    assert driver.receive() == messages(stranger, 1) == []
    assert stranger.ended
    stranger.close()
    driver.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in():
    driver = listening("local")
    child = os.fork()
    if not child:
        os.setuid(65534)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(f"\0{driver.address.name}")
        os._exit(0 if stranger.recv(1) == b"" else 1)
    wait_for(driver)
    assert driver.receive() == []
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    met(driver).close()
    driver.close()


@local
def test_after_an_interrupt_while_it_is_read_or_sent_nothing_more_comes_or_goes(ends, monkeypatch):
    driver, worker = ends
    worker.send(b"lost")

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        for name, use in (("recv_into", driver.receive), ("send", lambda: driver.send(b"perhaps"))):
            interrupting.setattr(LineSocket, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                use()
    assert driver.receive() == []
    driver.send(b"neither")
    assert worker.receive() == []


@local
def test_the_death_of_the_other_end_kills_nobody_who_has_given_sigpipe_back(ends):
    driver, worker = ends
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        worker.close()
        driver.send(b"one part")
        driver.send(bytes(JOINED_BYTES + 1))  # two
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not driver.unsent


def test_without_a_descriptor_to_let_it_in_a_worker_is_refused_and_not_waited_for():
    driver = listening("local")
    worker = connect(driver.address)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (driver.descriptors[0][0], hard))
    try:
        assert not driver.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "open files" in driver.refused
    driver.close()
    worker.receive()
    assert worker.ended


@pytest.mark.parametrize("connected", [True, False])
def test_nobody_waits_for_a_closed_line_that_a_forked_child_has_a_copy_of(connected):
    driver = listening("local")
    with forked():
        worker = connect(driver.address) if connected else None
        driver.close()
        if connected:
            assert messages(worker, 1) == []  # once the child has closed its copy
            assert worker.ended
        else:
            with pytest.raises(LineError, match="refused"):
                connect(driver.address)
