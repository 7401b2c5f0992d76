"""An epoch is ended while another thread waits in next(): that thread is told, and the state knows what was taken."""

import gc
import threading
import weakref

import pytest
import torch

from inside import engine_of
from latches import Gate, Mail
from probes import Calls
from rayloader import DataLoader, RaySessionError
from rayloader.epoch.iterator import close_all

pytestmark = pytest.mark.usefixtures("ray_session")

LIMIT = 120  # seconds for a thread to end; on expiry the test fails
TAKEN = 2  # batches


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.open()


@pytest.fixture
def mail(tmp_path):
    mail = Mail(tmp_path / "mail")
    yield mail
    mail.close()


class User(threading.Thread):
    """Iterates to the end; notes how it ended."""

    def __init__(self, iterator):
        super().__init__()
        self.iterator = iterator
        self.batches = []
        self.took = threading.Semaphore(0)
        self.error = None
        self.start()

    def run(self):
        try:
            for batch in self.iterator:
                self.batches.append(batch.item())
                self.took.release()
        except Exception as error:
            self.error = error


def ends(way, loader):
    if way == "iter() again":
        return iter(loader)
    return close_all()  # what shutdown() does with live iterators


@pytest.mark.parametrize("way", ["shutdown", "iter() again"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_whoever_waits_in_next_is_told_that_the_epoch_was_ended(accelerator, gate, mail, pin_memory, way):
    def get(index):
        if index == TAKEN:
            mail.send("waits")
            gate.wait()
        return torch.tensor(index)

    options = {"prefetch_factor": 2, "pin_memory": pin_memory, "persistent_workers": way == "iter() again"}
    loader = DataLoader(Calls(get, 20), None, num_workers=1, **options)
    user = User(iter(loader))
    assert mail.receive() == ["waits"]
    assert all(user.took.acquire(timeout=LIMIT) for _ in range(TAKEN))
    state_before = loader.state_dict()["position"] if way == "shutdown" else None
    ends(way, loader)
    user.join(LIMIT)
    assert not user.is_alive()
    assert user.batches == list(range(TAKEN))
    assert isinstance(user.error, RaySessionError), user.error
    if state_before is not None:
        state = loader.state_dict()["position"]
        assert (state["finished"], state["next_task"]) == (False, TAKEN)
        resumed = DataLoader(Calls(torch.tensor, 20), None, num_workers=1, **options)
        resumed.load_state_dict(loader.state_dict())
        assert [batch.item() for batch in resumed] == list(range(TAKEN, 20))


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_closed_iterator_does_not_end_as_a_finished_one(accelerator, pin_memory):
    loader = DataLoader(Calls(torch.tensor, 6), None, num_workers=1, pin_memory=pin_memory)
    iterator = iter(loader)
    assert next(iterator).item() == 0
    close_all()
    for _ in range(2):
        with pytest.raises(RaySessionError, match=r"call iter\(\) on the loader again"):
            next(iterator)
    assert not loader.state_dict()["position"]["finished"]
    assert [batch.item() for batch in loader] == list(range(6))


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_finished_iterator_stays_finished_when_it_is_closed(accelerator, pin_memory):
    iterator = iter(DataLoader(Calls(torch.tensor, 3), None, num_workers=1, pin_memory=pin_memory))
    assert len(list(iterator)) == 3
    close_all()
    assert list(iterator) == []


class Waiting:
    """An iterator that waits for a batch in a thread of its own; only that thread refers to it."""

    def __init__(self, gate, mail, **options):
        def get(index):
            if index == TAKEN:
                mail.send("waits")
                gate.wait()
            return torch.tensor(index)

        self.user = User(iter(DataLoader(Calls(get, 6), None, num_workers=1, prefetch_factor=2, **options)))
        assert mail.receive() == ["waits"]
        assert all(self.user.took.acquire(timeout=LIMIT) for _ in range(TAKEN))

    def continuation(self, gate):
        assert self.user.is_alive()
        gate.open()
        self.user.join(LIMIT)
        assert not self.user.is_alive()
        assert (self.user.batches, self.user.error) == (list(range(6)), None)


@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_an_iterator_is_collected_while_another_waits(accelerator, gate, mail, pin_memory, in_a_cycle):
    waiting = Waiting(gate, mail, pin_memory=pin_memory)
    loader = DataLoader(Calls(torch.tensor, 20), None, num_workers=1, pin_memory=pin_memory)
    iterator = iter(loader)
    assert next(iterator).item() == 0
    if in_a_cycle:
        iterator.itself = iterator
    collected = weakref.ref(iterator)
    collector = threading.Thread(target=gc.collect)
    del iterator
    collector.start()
    collector.join(LIMIT)
    assert not collector.is_alive()
    assert collected() is None
    assert [batch.item() for batch in loader] == list(range(20))
    waiting.continuation(gate)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_last_reference_of_the_program_goes_while_the_iterator_waits(accelerator, gate, mail, pin_memory):
    """The call of next() is one more reference: the iterator ends with the thread, not before."""
    waiting = Waiting(gate, mail, pin_memory=pin_memory)
    waiting.user.iterator = None
    gc.collect()
    waiting.continuation(gate)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_collector_ends_an_iterator_in_the_midst_of_another_ones_next(accelerator, monkeypatch, pin_memory):
    """Under its locks too: the collector may run, and finalizers with it, at any allocation."""
    loader = DataLoader(Calls(torch.tensor, 8), None, num_workers=1, pin_memory=pin_memory, prefetch_factor=2)
    ended = []

    def with_collections(method):
        def call(engine, *args):
            with engine.lock:
                iterator = iter(loader)
                iterator.itself = iterator
                weakref.finalize(iterator, ended.append, None)
                del iterator
                gc.collect()
            return method(engine, *args)

        return call

    user = iter(DataLoader(Calls(torch.tensor, 6), None, num_workers=1, pin_memory=pin_memory, prefetch_factor=2))
    engine = type(engine_of(user))
    monkeypatch.setattr(engine, "_end_turn", with_collections(engine._end_turn))
    thread = User(user)
    del user
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert (thread.batches, thread.error) == (list(range(6)), None)
    assert len(ended) == 6
