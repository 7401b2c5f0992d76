"""Lines between this process and itself, or a child: no Ray."""

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

from lines import check_finished, exchange, messages, wait_for
from rayloader.transport.line import CHUNK_BYTES, JOINED_BYTES, LineError
from rayloader.transport.local_line import DriverLine, connect

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lines need Linux")


def anybody(_: int) -> bool:
    return True


@pytest.fixture
def ends():
    """Both ends of a line; the driver's has let the worker's in."""
    driver = DriverLine(anybody)
    worker = connect(driver.address)
    assert driver.receive() == []
    yield driver, worker
    driver.close()
    worker.close()


SIZES = st.one_of(
    st.integers(0, 300),
    st.sampled_from([JOINED_BYTES - 1, JOINED_BYTES, JOINED_BYTES + 1, CHUNK_BYTES - 8, CHUNK_BYTES, 3 * CHUNK_BYTES]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=30))
def test_messages_of_any_size_arrive_whole_and_in_order(plan):
    driver = DriverLine(anybody)
    worker = connect(driver.address)
    driver.receive()
    for down in (True, False):
        sent = [bytes([number]) * size for number, (goes_down, size) in enumerate(plan) if goes_down is down]
        pair = (driver, worker) if down else (worker, driver)
        assert exchange(*pair, sent) == sent
    driver.close()
    worker.close()


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
    driver.finish()
    thread.join(60)
    assert not thread.is_alive()
    assert [message for messages in found for message in messages] == [b"one", b"x" * 3 * CHUNK_BYTES]


def test_whoever_does_not_ask_to_wait_does_not(ends):
    driver, worker = ends
    assert worker.receive() == driver.receive() == []
    for end in ends:
        end.send(bytes(64 * CHUNK_BYTES))  # far more than a socket takes
        assert end.unsent


def test_what_is_sent_before_the_worker_has_connected_is_kept():
    driver = DriverLine(anybody)
    driver.send(b"first")
    driver.finish()
    worker = connect(driver.address)
    worker.send(b"hello")
    assert messages(driver, 1) == [b"hello"]
    assert messages(worker, 1) == [b"first"]
    assert messages(worker, 1) == []
    check_finished(driver, worker)


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


def test_what_a_process_sent_before_it_died_arrives_and_then_the_line_ends():
    met: list[int] = []
    driver = DriverLine(lambda pid: not met.append(pid))  # type: ignore[func-returns-value]
    child = os.fork()
    if not child:
        line = connect(driver.address._replace(pid=os.getppid()))
        line.send(b"last words")
        os._exit(0)
    os.waitpid(child, 0)
    assert messages(driver, 2) == [b"last words"]
    assert driver.ended
    assert met == [child]
    assert driver.descriptor == -1
    driver.send(b"nobody reads this")
    assert not driver.receive()
    driver.close()


@pytest.mark.parametrize("unread", [False, True])
def test_to_close_is_to_hang_up_whatever_is_unread_and_whoever_has_a_copy(ends, unread):
    driver, worker = ends
    if unread:
        worker.send(b"never read")
        driver.send(b"perhaps")
    copy = os.dup(driver.descriptor)  # as a forked child has one
    driver.close()
    while not worker.ended:
        worker.wait()
        worker.receive()
    assert worker.hung_up
    worker.send(b"into the void")
    assert not worker.unsent
    os.close(copy)
    driver.close()


def test_a_forked_child_that_drops_its_copy_does_not_end_the_line(ends):
    driver, worker = ends
    child = os.fork()
    if not child:
        driver.close()
        worker.close()
        os._exit(0)
    os.waitpid(child, 0)
    driver.send(b"still there")
    assert messages(worker, 1) == [b"still there"]


def test_an_address_that_is_not_what_it_says_is_refused():
    driver = DriverLine(anybody)
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
    assert stranger.hung_up
    stranger.close()
    driver.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in():
    driver = DriverLine(anybody)
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
        driver = DriverLine(anybody)
        worker = connect(driver.address)
        driver.receive()
        worker.send(bytes(100))
        del driver, worker
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_death_of_the_other_end_kills_nobody_who_has_given_sigpipe_back():
    driver = DriverLine(anybody)
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
    driver = DriverLine(anybody)
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
    driver = DriverLine(anybody)
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        if first == "connect":
            worker = connect(driver.address)
            driver.close()
            assert not worker.receive()
            assert worker.ended
            assert worker.hung_up
        else:
            driver.close()
            with pytest.raises(LineError, match="refused"):
                connect(driver.address)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("first", ["line", "socket"])
@pytest.mark.parametrize("connected", [False, True])
def test_a_line_that_the_collector_finds_ends_without_a_warning(connected, first):
    """Whichever of the line and its socket comes first."""
    listening = DriverLine(anybody)
    line = connect(listening.address) if connected else DriverLine(anybody)
    held = line._socket if connected else line._listener
    if first == "line":
        line.me = line
    else:
        held.line = line
    descriptor = held.fileno()
    del line, held
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    listening.close()
