"""Lines of both kinds, and local ones, between this process and itself, or a child: no Ray."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lines import KINDS, check_ends, exchange, listening, messages, met, plain, reach, serve, wait_for
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
    pair,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lines need Linux")


def both(kind):
    driver = listening(kind)
    worker = met(driver)
    yield driver, worker
    driver.close()
    worker.close()


@pytest.fixture
def ends():
    """Both ends of a local line; the driver's has let the worker's in."""
    yield from both("local")


@pytest.fixture(params=KINDS)
def any_ends(request):
    """Those of a line of each kind."""
    yield from both(request.param)


# ---- lines of both kinds


EDGES = 4096, JOINED_BYTES, CHUNK_BYTES - 8, CHUNK_BYTES
SIZES = st.one_of(
    st.integers(0, 300), st.sampled_from([3 * CHUNK_BYTES, *(edge + by for edge in EDGES for by in (-1, 0, 1))])
)
MESSAGE = st.tuples(st.booleans(), SIZES, st.lists(SIZES, max_size=4))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=60)
@given(st.lists(MESSAGE, max_size=20))
def test_messages_and_buffers_of_any_size_arrive_whole_and_in_order(kind, plan):
    driver = listening(kind)
    worker = met(driver)
    for down in (True, False):
        sent = []
        for number, (goes_down, size, sizes) in enumerate(plan):
            if goes_down is down:
                body, fill = bytes([number]) * size, [bytes([number + place]) * n for place, n in enumerate(sizes)]
                sent.append(Parcel(body, [memoryview(content) for content in fill]) if fill else body)
        pair = (driver, worker) if down else (worker, driver)
        assert list(map(plain, exchange(*pair, sent))) == list(map(plain, sent))
    driver.close()
    worker.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sent_before_the_worker_has_connected_is_kept_and_the_end_is_heard(kind):
    driver = listening(kind)
    driver.send(b"first")
    worker = met(driver)
    worker.send(b"hello")
    assert messages(driver, 1) == [b"hello"]
    assert messages(worker, 1) == [b"first"]
    check_ends(driver, worker)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_what_a_process_sent_before_it_died_arrives_and_then_the_line_ends(kind, how):
    driver = listening(kind)
    child = os.fork()
    if not child:
        worker = reach(driver)
        worker.send(Parcel(b"last words", [memoryview(b"x" * 100_000)]))
        worker.drain()
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    serve(driver, until=lambda: driver._socket is not None)
    os.waitpid(child, 0)
    assert list(map(plain, messages(driver, 2))) == [(b"last words", [b"x" * 100_000])]
    assert driver.ended
    assert driver.descriptors == []
    driver.send(b"nobody reads this")
    assert not driver.receive()
    driver.close()


@pytest.mark.parametrize(
    "said", [HEADER.pack(2**64 - 1, 0), HEADER.pack(2**61, 0), HEADER.pack(0, 1) + (2**63).to_bytes(8, "little")]
)
def test_what_cannot_be_a_message_ends_the_line_and_says_so(any_ends, said):
    driver, worker = any_ends
    worker.send(b"a message")
    worker.drain()
    worker._socket.sendall(said)
    assert messages(driver, 2) == [b"a message"]
    assert driver.ended
    assert not driver.closed
    assert "something else was written to the line" in driver.fault
    assert driver.receive() == []


def test_a_forked_child_that_closes_its_copy_does_not_end_the_line(any_ends):
    driver, worker = any_ends
    child = os.fork()
    if not child:
        driver.close()
        worker.close()
        os._exit(0)
    os.waitpid(child, 0)
    driver.send(b"still there")
    assert messages(worker, 1) == [b"still there"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["line", "socket"])
@pytest.mark.parametrize("connected", [False, True])
def test_a_line_that_the_collector_finds_ends_without_a_warning(kind, connected, first):
    """Whichever of the line and its socket comes first."""
    driver = listening(kind)
    worker = met(driver) if connected else None
    held = driver._socket if connected else driver._listener
    if first == "line":
        driver.me = driver
    else:
        held.line = driver
    descriptor = held.fileno()
    del driver, held
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    if worker is not None:
        worker.close()


# ---- local ones


def test_a_pair_is_a_line_and_no_child_has_a_copy_of_the_drivers_end():
    driver, theirs = pair()
    driver.send(b"at once")
    child = os.fork()
    if not child:
        worker = Line(LineSocket(fileno=theirs.detach()))
        worker.send(b"still there" if driver._socket.fileno() < 0 else b"a copy")
        worker.receive_next()
        worker.receive_next()
        os._exit(0)
    theirs.close()
    driver.watch(child)
    assert messages(driver, 1) == [b"still there"]
    driver.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_worker_waits_in_its_read_until_something_comes_or_the_line_ends(ends):
    driver, worker = ends
    found = []

    def work():
        while not worker.ended:
            found.append(worker.receive_next())

    thread = threading.Thread(target=work)
    thread.start()
    driver.send(b"one")
    driver.send(b"x" * 3 * CHUNK_BYTES)
    while driver.unsent:
        driver.flush()
    driver.close()
    thread.join(60)
    assert not thread.is_alive()
    assert [message for messages in found for message in messages] == [b"one", b"x" * 3 * CHUNK_BYTES]


def test_whoever_does_not_ask_to_wait_does_not(ends):
    driver, worker = ends
    assert worker.receive() == driver.receive() == []
    for end in ends:
        end.send(bytes(64 * CHUNK_BYTES))  # far more than a socket takes
        assert end.unsent


def test_nobody_blocks_on_a_full_socket(ends):
    driver, worker = ends
    sent = [bytes([number]) * (1 << 20) for number in range(20)]
    for message in sent:
        driver.send(message)
        worker.send(message)
    assert driver.unsent
    assert worker.unsent
    down: list[bytes] = []
    up: list[bytes] = []
    while len(down) < 20 or len(up) < 20:
        driver.flush()
        worker.flush()
        down += worker.receive()
        up += driver.receive()
    assert down == up == sent
    assert not driver.unsent


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


@pytest.mark.parametrize("unread", [False, True])
def test_to_close_is_to_hang_up_whatever_is_unread_and_whoever_has_a_copy(ends, unread):
    driver, worker = ends
    if unread:
        worker.send(b"never read")
        driver.send(b"perhaps")
    copy = os.dup(driver._socket.fileno())  # as a forked child has one
    driver.close()
    while not worker.ended:
        worker.wait()
        worker.receive()
    worker.send(b"into the void")
    assert not worker.unsent
    os.close(copy)
    driver.close()


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
    assert driver.receive() == []
    assert messages(stranger, 1) == []
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
    worker = connect(driver.address)
    worker.send(b"a friend")
    assert messages(driver, 1) == [b"a friend"]
    worker.close()
    driver.close()


def test_after_an_interrupt_while_it_is_read_or_sent_nothing_more_comes_or_goes(ends):
    driver, worker = ends
    worker.send(b"lost")

    class Interrupting:
        def recv_into(self, *arguments):
            raise KeyboardInterrupt

        send = recv_into

        def fileno(self):
            return -1

        def shutdown(self, how):
            pass

        def close(self):
            pass

    own, driver._socket = driver._socket, Interrupting()
    with pytest.raises(KeyboardInterrupt):
        driver.receive()
    with pytest.raises(KeyboardInterrupt):
        driver.send(b"perhaps")
    driver._socket = own
    assert driver.receive() == []
    driver.send(b"neither")
    assert worker.receive() == []


def test_no_descriptor_is_left():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        driver = listening("local")
        worker = connect(driver.address)
        driver.receive()
        worker.send(bytes(100))
        del driver, worker
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_death_of_the_other_end_kills_nobody_who_has_given_sigpipe_back():
    driver = listening("local")
    worker = connect(driver.address)
    driver.receive()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        worker.close()
        driver.send(b"one part")
        driver.send(bytes(JOINED_BYTES + 1))  # two
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not driver.unsent
    driver.close()


def test_without_a_descriptor_to_let_it_in_a_worker_is_refused_and_not_waited_for():
    driver = listening("local")
    assert not driver.receive()
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


@pytest.mark.parametrize("first", ["connect", "close"])
def test_nobody_waits_for_a_closed_line_that_a_forked_child_has_a_copy_of(first):
    driver = listening("local")
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        if first == "connect":
            worker = connect(driver.address)
            driver.close()
            assert messages(worker, 1) == []  # once the child has closed its copy
            assert worker.ended
        else:
            driver.close()
            with pytest.raises(LineError, match="refused"):
                connect(driver.address)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
