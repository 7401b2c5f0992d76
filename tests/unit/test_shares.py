"""What a consumer of a share does with the replies that it gets: no Ray, the producer is a list."""

import functools
import logging
import pickle
from types import SimpleNamespace
from typing import ClassVar

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from torch.utils.data import IterableDataset

import rayloader.sharing.link
from rayloader import DataLoader, RaySessionError, SharedLoader, ShareError, share, shared
from rayloader.sharing.link import Link
from rayloader.sharing.messages import Connection, Kind
from rayloader.transport import codec
from rayloader.transport.lanes import to_wire
from rayloader.workers.connection import NONE_YET

BATCHES = [10, 11, 12, 13, 14]


class FakeLink:
    """Knows where the consumer is."""

    def __init__(self, producer, name, rank):
        self.connection = Connection("share", 1, 1, 0, 0, len(BATCHES), False, "", None)


class FakeInbox:
    """Has the batches, and raises what a test puts in, once, at the next call of a method."""

    interrupts: ClassVar = {}  # method, and how many calls of it pass before one is interrupted

    def __init__(self, link):
        self.taken = []

    def _interrupted(self, method):
        if method in self.interrupts:
            self.interrupts[method] -= 1
            if self.interrupts[method] < 0:
                del self.interrupts[method]
                raise KeyboardInterrupt

    def begin(self, epoch, taken, sampler_epoch):
        self.taken.append(taken)
        self.pending = dict(enumerate(BATCHES))

    def next(self, number):
        self._interrupted("next")
        if number == len(BATCHES):
            return Kind.END, None
        return Kind.BATCH, tuple(to_wire(codec.encode(self.pending[number])))

    def tell(self, taken):
        self._interrupted("tell")
        self.taken.append(taken)

    def rest(self, *, wait):
        pass


@pytest.fixture
def consumer(monkeypatch):
    monkeypatch.setattr(rayloader.sharing.link, "Link", FakeLink)
    monkeypatch.setattr(rayloader.sharing.link, "Inbox", FakeInbox)
    monkeypatch.setattr(FakeInbox, "interrupts", {})
    return SharedLoader(None, "numbers", 1).consumer(0)


def test_a_consumer_iterates_as_a_loader_does(consumer):
    assert len(consumer) == 5
    for epoch in range(2):
        assert consumer.epoch == epoch
        assert list(consumer) == BATCHES
    assert repr(consumer) == "rayloader.Consumer('numbers', rank=0)"
    with pytest.raises(TypeError, match=r"rayloader\.shared\('numbers', 0\)"):
        pickle.dumps(consumer)


@pytest.mark.parametrize("method", ["next", "tell"])
@pytest.mark.parametrize("calls", range(4))
def test_an_interrupted_next_loses_and_repeats_nothing(consumer, method, calls):
    batches = iter(consumer)
    found = [next(batches)]
    FakeInbox.interrupts[method] = calls
    interrupted = 0
    while len(found) < len(BATCHES):
        try:
            found.append(next(batches))
        except KeyboardInterrupt:
            interrupted += 1
    assert found == BATCHES
    assert interrupted == 1
    assert list(batches) == []


def test_the_producer_is_told_of_each_batch_when_it_is_taken(consumer):
    batches = iter(consumer)
    for taken in range(1, 6):
        next(batches)
        assert consumer._inbox.taken[-1] == taken


def test_batches_are_asked_for_as_soon_as_an_epoch_begins(consumer):
    iter(consumer)
    assert consumer._inbox.taken == [0]


class FakeProducer:
    """Each call gives its answers, one after the other."""

    def __init__(self, **answers):
        for method, given in answers.items():
            setattr(self, method, SimpleNamespace(remote=functools.partial(lambda given, *_: given, iter(given))))


def wait_for(calls, count, timeout):
    """As if each wait ended with the next answer of each call."""
    return [next(answers) for answers in calls]


@pytest.fixture
def link(monkeypatch):
    """As if Ray ran; the state is long in coming."""
    monkeypatch.setattr(rayloader.sharing.link, "wait_for", wait_for)
    for name in ("ensure", "current"):
        monkeypatch.setattr(rayloader.sharing.link.session, name, lambda: ("session", "job"))
    connection = Connection("share", 1, 2, 0, 0, 5, False, "", None)
    producer = FakeProducer(
        connect=[connection],
        state=[NONE_YET, NONE_YET, "state"],
        held_up_by=[[1, 3], []],
    )
    return Link(producer, "numbers", 0)


def test_who_waits_long_is_told_for_whom(link, caplog):
    """And not told where it waits for the dataset."""
    with caplog.at_level(logging.WARNING, "rayloader"):
        assert link.ask("state", 0, 0) == "state"
    (said,) = caplog.messages
    assert "consumer 0 of the share 'numbers' has waited for 60 s: consumer(s) 1, 3 must first take" in said


def test_after_the_shutdown_of_ray_it_is_not_called(link, monkeypatch):
    monkeypatch.setattr(rayloader.sharing.link.session, "current", lambda: None)
    with pytest.raises(RaySessionError, match="Ray was shut down while the share 'numbers' was read"):
        link.call("state", 0, 0)


def test_where_rays_connections_are_encrypted_nothing_is_shared(monkeypatch):
    monkeypatch.setattr(rayloader.sharing.link.session, "ensure", lambda: ("session", "job"))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with pytest.raises(RaySessionError, match="Ray's TLS"):
        shared("numbers", 0)


@pytest.mark.usefixtures("link")
def test_a_producer_that_takes_long_to_start_is_told(caplog):
    def opened(*answers):
        return rayloader.sharing.link._opened(FakeProducer(open=answers), "numbers", None)

    with caplog.at_level(logging.WARNING, "rayloader"):
        assert opened(NONE_YET, True)
    assert "the producer of the share 'numbers' has not opened the loader within 60 s" in caplog.text
    with pytest.raises(ShareError, match="the producer of the share 'numbers' is gone"):
        opened(ActorDiedError())
    with pytest.raises(OSError, match="no file"):
        opened(RayTaskError("open", "", OSError("no file")))


def test_shutdown_ends_the_shares_of_this_process(monkeypatch):
    ended = []
    monkeypatch.setattr(rayloader.sharing.link, "_owned", [("session", "a"), ("earlier", "b"), ("session", "c")])
    monkeypatch.setattr(rayloader.sharing.link.session, "current", lambda: "session")
    monkeypatch.setattr(rayloader.sharing.link.ray, "kill", ended.append)
    rayloader.sharing.link.close_all()
    assert ended == ["a", "c"]  # never what belongs to a Ray that is gone
    assert rayloader.sharing.link._owned == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"consumers": 0}, "share\\(\\) needs consumers >= 1, a whole number"),
        ({"consumers": True}, "needs consumers"),
        ({"consumers": 1, "buffer": 0}, "needs buffer "),
        ({"consumers": 1, "buffer_bytes": 0.5}, "needs buffer_bytes "),
        ({"consumers": 1, "consumer_timeout": 0}, "consumer_timeout must be a number of seconds > 0"),
        ({"consumers": 1, "ray_remote_args": {"name": "x"}}, "ray_remote_args must not"),
    ],
)
def test_arguments_are_checked(options, error):
    with pytest.raises(ValueError, match=error):
        share(DataLoader(range(3)), **options)


def test_what_is_no_loader_and_no_name_is_refused():
    with pytest.raises(TypeError, match=r"takes a rayloader\.DataLoader, got builtins\.range;"):
        share(range(3), consumers=1)
    with pytest.raises(TypeError, match="name must be a text"):
        share(DataLoader(range(3)), consumers=1, name="")
    with pytest.raises(TypeError, match="name must be a text"):
        shared("", 0)


def test_a_stream_of_a_rank_that_nobody_knows_is_refused(monkeypatch):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match="was not told its rank"):
        share(DataLoader(Stream()), consumers=1)
