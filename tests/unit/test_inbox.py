"""A consumer's end of its line to the producer of a share: no Ray, the producer is a thread that has all batches."""

import pickle
import threading

import numpy as np
import pytest
import torch

import rayloader.sharing.link
from rayloader import ConsumerDroppedError, ShareError
from rayloader.actors import tcp_line
from rayloader.sharing.link import MOST_AHEAD, Inbox
from rayloader.sharing.messages import Kind, for_line
from rayloader.transport import codec
from rayloader.transport.lanes import SMALL_BYTES, Wire, from_wire, to_wire
from rayloader.transport.line import LineError, packed

LENGTH = 12
LARGE = 4 * SMALL_BYTES


class Producer:
    """Sends numbers as batches of `nbytes` bytes each; `ends_after` so many a line ends, once for each number in it."""

    def __init__(self, nbytes=8, ends_after=(), refusal=None):
        self.nbytes, self.ends_after, self.refusal = nbytes, list(ends_after), refusal
        self.begun = []  # what each series has begun with
        self.until = []
        self.taken = 0
        self.threads = []

    def attach(self, address):
        thread = threading.Thread(target=self._serve, args=(address,))
        self.threads.append(thread)
        thread.start()
        return thread

    def _serve(self, address):
        line = tcp_line.connect(address, bytearray)
        sent = 0
        begin = None
        while not line.ended:
            for said in map(pickle.loads, line.receive_next()):
                if begin is None or said.series != begin.series:
                    begin, number = said, said.first
                    self.begun.append((said.epoch, said.taken, said.first))
                self.taken = max(self.taken, said.taken)
                self.until.append(said.until - said.taken)
                while number < said.until:
                    if self.ends_after and sent == self.ends_after[0]:
                        self.ends_after.pop(0)
                        line.close()
                        return
                    line.send(for_line(begin.series, number, self._content(number)))
                    line.drain()
                    sent += 1
                    number += 1
        line.close()

    def _content(self, number):
        if number == LENGTH:
            return packed((Kind.END.value, None), None)
        if number == self.refusal:
            return packed((Kind.REFUSED.value, ConsumerDroppedError("dropped")), None)
        wire = tuple(to_wire(codec.encode(torch.full((self.nbytes // 8,), number))))
        return packed((Kind.BATCH.value, wire), tcp_line.TcpLine.apart)


class Link:
    """Calls go to the producer; `attach` is answered at once."""

    refused = ""
    name = "numbers"

    def __init__(self, producer):
        self.producer = producer
        self.waits = 0

    def call(self, method, *arguments):
        assert method == "attach"
        if not self.refused:
            self.producer.attach(*arguments)

    def result(self, call):
        if self.refused:
            raise LineError(self.refused)

    def check_session(self):
        pass

    def note_wait(self):
        self.waits += 1


class Answered:
    """As if a Ray call were answered at once."""

    def __init__(self, call):
        self.value = ""


@pytest.fixture
def inbox_of(monkeypatch):
    monkeypatch.setattr(rayloader.sharing.link.session, "node_ip", lambda: "127.0.0.1")
    monkeypatch.setattr(rayloader.sharing.link, "RayAnswer", Answered)
    made = []

    def make(producer):
        made.append((Inbox(Link(producer)), producer))
        return made[-1][0]

    yield make
    for inbox, producer in made:
        inbox.close()
        for thread in producer.threads:
            thread.join()
    assert ahead_threads() == []


def ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


def read(inbox, start=0, stop=LENGTH, found=None):
    """The batches of these numbers, taken one by one; adds them to `found`, if given."""
    found = [] if found is None else found
    for number in range(start, stop):
        batch = from_wire(Wire(*inbox.next(number)[1]))
        inbox.tell(number + 1)
        del inbox.pending[number]
        found.append(batch)
    return found


def numbers(batches):
    assert all(len(batch.unique()) == 1 for batch in batches)
    return [int(batch[0]) for batch in batches]


@pytest.mark.parametrize("nbytes", [8, SMALL_BYTES, LARGE])
def test_batches_come_in_order_series_after_series_and_the_producer_knows_what_was_taken(inbox_of, nbytes):
    producer = Producer(nbytes)
    inbox = inbox_of(producer)
    for epoch in range(3):
        inbox.begin(epoch, 0, None)
        assert numbers(read(inbox)) == list(range(LENGTH))
        assert inbox.next(LENGTH) == (Kind.END, None)
        inbox.rest(wait=True)
        assert producer.begun[-1] == (epoch, 0, 0)
        assert len(producer.threads) == 1


def test_what_was_sent_for_a_series_that_was_broken_off_is_dropped(inbox_of):
    inbox = inbox_of(Producer(LARGE))
    inbox.begin(0, 0, None)
    read(inbox, 0, 2)
    inbox.begin(1, 5, None)
    assert numbers(read(inbox, 5)) == list(range(5, LENGTH))


def test_only_large_batches_have_a_thread_which_ends_with_the_epoch(inbox_of):
    small, large = inbox_of(Producer(8)), inbox_of(Producer(LARGE))
    for inbox, count in ((small, 0), (large, 1)):
        inbox.begin(0, 0, None)
        read(inbox, 0, 4)
        assert len(ahead_threads()) == count
    large.rest(wait=True)
    assert ahead_threads() == []


def test_large_batches_come_while_the_user_works(inbox_of):
    inbox = inbox_of(Producer(LARGE))
    inbox.begin(0, 0, None)
    read(inbox, 0, 2)
    while len(inbox.pending) < MOST_AHEAD:  # nobody asks for them
        inbox._thread.wait(1.0)
    assert sorted(inbox.pending) == list(range(2, 2 + MOST_AHEAD))


def test_no_more_bytes_are_asked_for_ahead_than_was_agreed(inbox_of, monkeypatch):
    monkeypatch.setattr(rayloader.sharing.link, "COPIED_AHEAD_BYTES", 2.5 * LARGE)
    producer = Producer(LARGE)
    inbox = inbox_of(producer)
    inbox.begin(0, 0, None)
    assert numbers(read(inbox)) == list(range(LENGTH))
    assert producer.until[0] == 1  # their size is not known yet
    assert max(producer.until) == 2
    inbox.begin(1, 0, None)
    read(inbox)
    assert max(producer.until) == 2


def test_one_large_batch_does_not_count_for_ever(inbox_of, monkeypatch):
    class Mostly(Producer):
        def _content(self, number):
            self.nbytes = LARGE if number == 0 else 8
            return super()._content(number)

    monkeypatch.setattr(rayloader.sharing.link, "COPIED_AHEAD_BYTES", 4.5 * LARGE)
    monkeypatch.setattr(rayloader.sharing.link, "DECAY", 0.5)
    producer = Mostly()
    inbox = inbox_of(producer)
    inbox.begin(0, 0, None)
    read(inbox)
    assert producer.until[:2] == [1, 4]
    assert producer.until[-1] == MOST_AHEAD


def test_batches_are_the_users_to_write_to_and_their_memory_is_used_again(inbox_of):
    inbox = inbox_of(Producer(LARGE))
    addresses = set()
    for epoch in range(4):
        inbox.begin(epoch, 0, None)
        for number in range(LENGTH):
            (batch,) = read(inbox, number, number + 1)
            assert int(batch[-1]) == number
            addresses.add(batch.data_ptr())
            batch.fill_(-1)
    assert len(addresses) < 2 * LENGTH


def test_a_batch_that_is_kept_keeps_its_bytes(inbox_of):
    inbox = inbox_of(Producer(LARGE))
    kept = []
    for epoch in range(2):
        inbox.begin(epoch, 0, None)
        kept += read(inbox)
    assert numbers(kept) == 2 * list(range(LENGTH))
    assert len({np.asarray(batch).ctypes.data for batch in kept}) == 2 * LENGTH


@pytest.mark.parametrize("nbytes", [8, LARGE])
@pytest.mark.parametrize("ends_after", [[0], [1], [5, 3], [LENGTH]])
def test_a_line_that_ends_is_replaced_and_nothing_is_lost_or_repeated(inbox_of, nbytes, ends_after):
    producer = Producer(nbytes, ends_after)
    inbox = inbox_of(producer)
    inbox.begin(0, 0, None)
    assert numbers(read(inbox)) == list(range(LENGTH))
    assert inbox.next(LENGTH) == (Kind.END, None)
    assert len(producer.threads) == 1 + len(ends_after)


def test_a_line_that_ends_again_and_again_is_an_error(inbox_of):
    inbox = inbox_of(Producer(ends_after=[0] * 4))
    inbox.begin(0, 0, None)
    with pytest.raises(ShareError, match="has ended again and again"):
        inbox.next(0)


def test_why_there_can_be_no_line_is_said(inbox_of, monkeypatch):
    inbox = inbox_of(Producer())
    monkeypatch.setattr(Link, "refused", "no route")
    for epoch in range(2):
        with pytest.raises(ShareError, match=r"the share 'numbers' cannot connect to this consumer.*: no route"):
            inbox.begin(epoch, 0, None)


def test_where_there_can_be_no_other_line_is_said(inbox_of, monkeypatch):
    inbox = inbox_of(Producer(ends_after=[2]))
    inbox.begin(0, 0, None)
    read(inbox, 0, 2)
    monkeypatch.setattr(Link, "refused", "no route")
    with pytest.raises(ShareError, match=r"cannot connect to this consumer.*: no route"):
        inbox.next(2)


def test_a_refusal_comes_in_its_turn_and_again(inbox_of):
    inbox = inbox_of(Producer(refusal=2))
    inbox.begin(0, 0, None)
    assert numbers(read(inbox, 0, 2)) == [0, 1]
    for _ in range(2):
        with pytest.raises(ConsumerDroppedError, match="dropped"):
            inbox.next(2)


def test_who_waits_long_asks_for_whom(inbox_of, monkeypatch):
    class Slow(Producer):
        def _content(self, number):
            if number == 1:
                waits.wait()
            return super()._content(number)

    waits = threading.Event()
    inbox = inbox_of(Slow())
    monkeypatch.setattr(rayloader.sharing.link, "NOTICE_S", 0.0)
    monkeypatch.setattr(Link, "note_wait", lambda link: waits.set())
    inbox.begin(0, 0, None)
    assert numbers(read(inbox, 0, 3)) == [0, 1, 2]
    assert waits.is_set()


def test_interrupts_again_and_again_are_no_fault_of_the_line(inbox_of, monkeypatch):
    producer = Producer()
    inbox = inbox_of(producer)
    inbox.begin(0, 0, None)
    found = read(inbox, 0, 1)
    for _ in range(10):
        inbox.pending.clear()
        whole = inbox._line.receive

        def interrupted(whole=whole):
            whole()
            raise KeyboardInterrupt

        monkeypatch.setattr(inbox._line, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            inbox.next(1)
        inbox._reconnect()
    assert numbers(found + read(inbox, 1)) == list(range(LENGTH))


def test_an_interrupted_call_of_the_line_has_it_replaced(inbox_of, monkeypatch):
    """A handler may raise where the line has sent or received, and does not know of it yet."""
    for method in ("send", "receive"):
        producer = Producer()
        inbox = inbox_of(producer)
        inbox.begin(0, 0, None)
        found = read(inbox, 0, 2)
        whole = getattr(inbox._line, method)

        def interrupted(*arguments, whole=whole):
            whole(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(inbox._line, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(inbox, 2, found=found)
        assert numbers(read(inbox, len(found), found=found)) == list(range(LENGTH))
        assert len(producer.threads) == 2
