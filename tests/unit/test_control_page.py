"""The page that a worker and the driver share, both sides in one process."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from rayloader.transport import control_page
from rayloader.transport.control_page import PAGE_BYTES, ControlPage, WorkerPage


def sides():
    page = ControlPage()
    return page, WorkerPage(page.address)


def test_entries_are_read_once_in_order():
    page, worker = sides()
    worker.begin(7)
    assert page.read(7) == []
    assert worker.publish(b"one")
    assert worker.publish(b"")
    assert page.read(7) == [b"one", b""]
    assert worker.publish(b"three")
    assert page.read(7) == [b"three"]
    assert page.read(7) == []


def test_only_the_call_at_work_is_read():
    page, worker = sides()
    worker.begin(1)
    worker.publish(b"old")
    worker.begin(2)
    assert page.read(1) == []
    assert page.read(2) == []
    worker.publish(b"new")
    assert page.read(1) == []
    assert page.read(2) == [b"new"]


def test_a_full_page_takes_no_more():
    page, worker = sides()
    worker.begin(1)
    assert not worker.publish(bytes(PAGE_BYTES))
    count = 0
    while worker.publish(bytes([count]) * 100_000):
        count += 1
    assert [entry[0] for entry in page.read(1)] == list(range(count))
    worker.begin(2)
    assert worker.publish(b"again")
    assert page.read(2) == [b"again"]


def test_an_entry_that_is_not_all_there_waits():
    page, worker = sides()
    worker.begin(1)
    worker.publish(b"whole")
    memory = page._memory
    at = bytes(memory).index(b"whole")
    memory[at : at + 1] = b"?"
    assert page.read(1) == []
    memory[at : at + 1] = b"w"
    assert page.read(1) == [b"whole"]


@pytest.mark.parametrize("lengths", [[], [3], [1, 2], [PAGE_BYTES - 128 - 8], [PAGE_BYTES - 128 - 12], [9, 1 << 19]])
@pytest.mark.parametrize("already_read", [False, True])
def test_a_call_that_begins_while_the_last_one_is_read_is_not_taken_for_it(lengths, already_read, monkeypatch):
    """The worker begins it, and publishes, when the driver has seen the number of the call and not yet the count."""
    page, worker = sides()
    worker.begin(1)
    old = [b"o" * length for length in lengths]
    assert all(map(worker.publish, old))
    if already_read:
        assert page.read(1) == old

    class Between(control_page.struct.Struct):
        def unpack_from(self, memory, offset):
            found = super().unpack_from(memory, offset)
            if offset == control_page._CALL:
                worker.begin(2)
                for _ in range(4):
                    assert worker.publish(b"new")
            return found

    with monkeypatch.context() as patch:
        patch.setattr(control_page, "_WORD", Between("<q"))
        assert page.read(1) == []
    assert page.read(1) == []
    assert page.read(2) == [b"new"] * 4


def test_tasks_are_dropped_up_to_a_call():
    page, worker = sides()
    assert not worker.dropped(1, 0)
    page.drop(up_to_call=5, from_task=10)
    assert [worker.dropped(*task) for task in [(5, 9), (5, 10), (1, 99), (6, 10)]] == [False, True, True, False]
    page.drop(up_to_call=6, from_task=0)
    assert worker.dropped(6, 0)
    assert not worker.dropped(7, 0)


SCRIPT = """
import pickle, sys
from rayloader.transport.control_page import WorkerPage
page = WorkerPage(pickle.loads(bytes.fromhex(sys.argv[1])))
page.begin(3)
page.publish(b"from another process")
print(page.dropped(3, 5))
"""


def test_across_processes():
    page = ControlPage()
    page.drop(3, 4)
    address = pickle.dumps(page.address).hex()
    finished = subprocess.run([sys.executable, "-c", SCRIPT, address], capture_output=True, text=True, timeout=60)
    assert finished.stdout == "True\n", finished.stderr
    assert page.read(3) == [b"from another process"]
