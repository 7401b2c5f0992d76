"""TCP lines between this process and itself, or a child: no Ray."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import sys
import threading
from pickle import PickleBuffer

import numpy as np
import pytest

from lines import HERE, LIMIT_S, messages, met, new_buffer, serve
from rayloader.actors import tcp_line
from rayloader.actors.tcp_line import MAGIC, MOST_STRANGERS, TcpAddress, TcpDriverLine, connect
from rayloader.transport.lanes import Recycled
from rayloader.transport.line import LineError, Parcel, packed, unpacked

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lines need Linux")


@pytest.fixture
def driver():
    before = len(os.listdir("/proc/self/fd"))
    driver = TcpDriverLine(HERE, new_buffer)
    assert repr(driver.address.secret) not in repr(driver.address)
    assert len(driver.address.secret) == 32
    yield driver
    driver.close()
    del driver
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def worker(driver):
    """The other end, which the driver has let in."""
    worker = met(driver)
    yield worker
    worker.close()


def senders():
    return [thread for thread in threading.enumerate() if thread.name == "rayloader-sender"]


# ---- messages, and buffers behind them


def test_large_buffers_travel_apart_and_small_ones_in_the_message():
    large, small = np.arange(10_000), np.arange(3)
    message = packed((0, [PickleBuffer(large), PickleBuffer(small)]), 4096)
    assert isinstance(message, Parcel)
    (buffer,) = message.buffers
    assert np.shares_memory(np.frombuffer(buffer, large.dtype), large), "it was copied"
    _, (first, second) = unpacked(message)
    assert np.frombuffer(first, large.dtype).tolist() == large.tolist()
    assert np.frombuffer(second, small.dtype).tolist() == small.tolist()
    assert not memoryview(second).readonly
    assert isinstance(packed((0, [PickleBuffer(small)]), 4096), bytes)
    assert isinstance(packed((0, [PickleBuffer(large)]), None), bytes)


def test_buffers_arrive_in_memory_that_is_used_again():
    memory = Recycled()
    driver = TcpDriverLine(HERE, memory.room)
    worker = met(driver)
    content = np.arange(1 << 20, dtype=np.uint8)
    addresses = set()
    for _ in range(5):
        worker.send(Parcel(b"batch", [memoryview(content)]))
        worker.keep()
        (came,) = messages(driver, 1)
        array = np.frombuffer(came.buffers[0], np.uint8)
        assert array.tobytes() == content.tobytes()
        array[0] = 7  # it is writable
        assert memory.leased_bytes >= content.nbytes
        addresses.add(array.ctypes.data)
        del array, came
    assert len(addresses) == 1
    worker.send(Parcel(b"half", [memoryview(content)]))
    driver.receive()
    driver.close()
    worker.close()
    del driver  # with what had come of it
    memory.close()
    assert memory.leased_bytes == 0


def test_what_is_kept_may_be_written_to_and_is_sent_by_a_thread_that_ends_with_the_line(driver, worker):
    content = np.zeros(32 << 20, np.uint8)
    worker.send(Parcel(b"large", [memoryview(content)]))
    assert worker.unsent, "the socket took it all, so nothing is tried"
    worker.keep()
    content[:] = 1
    worker.send(b"next")
    (large, following) = messages(driver, 2)  # without a flush of the worker's
    assert not np.frombuffer(large.buffers[0], np.uint8).any()
    assert following == b"next"
    (thread,) = senders()
    worker.send(Parcel(b"never read", [memoryview(content)]))
    worker.keep()
    worker.close()
    assert not thread.is_alive()


def test_a_line_that_is_dropped_while_its_thread_waits_for_room_ends_that_too(driver):
    worker = met(driver)
    worker.send(Parcel(b"large", [memoryview(bytes(32 << 20))]))
    worker.keep()
    (thread,) = senders()
    assert messages(driver, 1)
    del worker
    serve(driver, until=lambda: driver.ended)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


# ---- strangers


def stranger(driver: TcpDriverLine) -> socket.socket:
    """Connected, and greeted."""
    found = socket.create_connection((driver.address.host, driver.address.port), timeout=LIMIT_S)
    name = found.getsockname()
    serve(driver, until=lambda: any(other.getpeername() == name for other in driver._strangers))
    return found


def answer_of(found: socket.socket) -> bytes:
    """All that is said to it until it is turned away."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := found.recv(4096):
            said += part
    found.close()
    return said


@pytest.mark.parametrize("says", [bytes(64), pickle.dumps("a message") * 100])
def test_a_stranger_who_answers_wrong_is_turned_away_has_learned_nothing_and_was_not_unpickled(driver, says):
    found = stranger(driver)
    found.sendall(says)
    serve(driver, until=lambda: not driver._strangers)
    said = answer_of(found)
    assert MAGIC.startswith(said[: len(MAGIC)])
    assert len(said) <= len(MAGIC) + 32
    assert driver._socket is None
    assert driver.arrived() == []


def test_an_answer_can_be_used_once_only(driver):
    """What was said to another line, or before, is of no use: each has words of its own."""
    other = TcpDriverLine(HERE, new_buffer)
    other.address = TcpAddress(HERE, other.address.port, driver.address.secret)
    found = stranger(other)
    nonce = found.recv(4096)[len(MAGIC) :]
    proof = tcp_line._proof(driver.address.secret, b"worker", nonce, bytes(32))
    replayed = stranger(driver)
    replayed.sendall(bytes(32) + proof)
    serve(driver, until=lambda: not driver._strangers)
    assert driver._socket is None
    found.close()
    replayed.close()
    other.close()


def test_strangers_who_say_nothing_hold_up_nobody_and_are_few(driver):
    silent = [stranger(driver) for _ in range(3 * MOST_STRANGERS)]
    serve(driver, until=lambda: len(driver._strangers) == MOST_STRANGERS)
    assert len(driver.descriptors) == 1 + MOST_STRANGERS
    worker = met(driver)
    assert not driver._strangers
    for found in silent:
        answer_of(found)
    worker.send(b"a friend")
    assert messages(driver, 1) == [b"a friend"]
    worker.close()


def test_a_secret_that_is_wrong_is_refused_in_time(driver):
    failed: list[Exception] = []

    def try_to():
        with pytest.raises(LineError) as caught:
            connect(TcpAddress(HERE, driver.address.port, bytes(32)), new_buffer, 0.2, 0.2)
        failed.append(caught.value)

    worker = threading.Thread(target=try_to)
    worker.start()
    serve(driver, until=lambda: not worker.is_alive())
    assert f"port {driver.address.port} of {HERE}" in str(failed[0])
    assert "ip_local_port_range" in str(failed[0])
    assert driver._socket is None


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request", MAGIC + bytes(32) + bytes(32)])
def test_whoever_answers_in_the_drivers_place_is_not_believed(says):
    with socket.create_server((HERE, 0)) as listener:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.sendall(says)
                        connection.recv(1) if says else None

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(LineError):
            connect(TcpAddress(HERE, listener.getsockname()[1], bytes(32)), new_buffer, 0.2, 0.2)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(LIMIT_S)


def test_nobody_listens_any_more_once_the_worker_is_in_or_the_line_is_closed(driver, worker):
    other = TcpDriverLine(HERE, new_buffer)
    other.close()
    for address in (driver.address, other.address):
        with pytest.raises(LineError, match="refused"):
            connect(address, new_buffer, 0.2, 0.2)
    with pytest.raises(LineError, match="can't listen at"):
        TcpDriverLine("203.0.113.1", new_buffer)
