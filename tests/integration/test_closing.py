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
TAKEN, LENGTH = 2, 6  # batches


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


@pytest.fixture
def wait(tmp_path):
    """Makes loaders with users who have taken some batches, and wait for another one until the test opens a gate."""
    gate, mail = Gate(tmp_path / "gate"), Mail(tmp_path / "mail")

    def get(index):
        if index == TAKEN:
            mail.send("waits")
            gate.wait()
        return torch.tensor(index)

    def wait(**options):
        loader = DataLoader(Calls(get, LENGTH), None, num_workers=1, prefetch_factor=2, **options)
        user = User(iter(loader))
        assert mail.receive() == ["waits"]
        assert all(user.took.acquire(timeout=LIMIT) for _ in range(TAKEN))
        return loader, user

    wait.gate = gate
    yield wait
    gate.open()
    mail.close()


def check_goes_on(wait, user):
    """The user, who alone refers to the iterator, gets what is left."""
    assert user.is_alive()
    wait.gate.open()
    user.join(LIMIT)
    assert not user.is_alive()
    assert (user.batches, user.error) == (list(range(LENGTH)), None)


@pytest.mark.parametrize("way", ["shutdown", "iter() again"])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_whoever_waits_in_next_is_told_that_the_epoch_was_ended(accelerator, wait, pin_memory, way):
    loader, user = wait(pin_memory=pin_memory, persistent_workers=way == "iter() again")
    if way == "shutdown":
        loader.state_dict()
        close_all()  # what shutdown() does with live iterators
    else:
        iter(loader)
    user.join(LIMIT)
    assert not user.is_alive()
    assert user.batches == list(range(TAKEN))
    assert isinstance(user.error, RaySessionError), user.error
    if way == "shutdown":
        state = loader.state_dict()
        assert (state["position"]["finished"], state["position"]["next_task"]) == (False, TAKEN)
        resumed = DataLoader(Calls(torch.tensor, LENGTH), None, num_workers=1, pin_memory=pin_memory)
        resumed.load_state_dict(state)
        assert [batch.item() for batch in resumed] == list(range(TAKEN, LENGTH))


@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_closed_iterator_does_not_end_as_a_finished_one_which_stays_finished(accelerator, pin_memory):
    loader = DataLoader(Calls(torch.tensor, LENGTH), None, num_workers=1, pin_memory=pin_memory)
    finished = iter(loader)
    assert len(list(finished)) == LENGTH
    iterator = iter(loader)
    assert next(iterator).item() == 0
    close_all()
    assert list(finished) == []
    for _ in range(2):
        with pytest.raises(RaySessionError, match=r"call iter\(\) on the loader again"):
            next(iterator)
    assert not loader.state_dict()["position"]["finished"]
    assert [batch.item() for batch in loader] == list(range(LENGTH))


@pytest.mark.parametrize("in_a_cycle", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_an_iterator_is_collected_while_another_waits(accelerator, wait, pin_memory, in_a_cycle):
    _, user = wait(pin_memory=pin_memory)
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
    check_goes_on(wait, user)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_last_reference_of_the_program_goes_while_the_iterator_waits(accelerator, wait, pin_memory):
    """The call of next() is one more reference: the iterator ends with the thread, not before."""
    user = wait(pin_memory=pin_memory)[1]
    user.iterator = None
    gc.collect()
    check_goes_on(wait, user)


@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_collector_ends_an_iterator_in_the_midst_of_another_ones_next(accelerator, monkeypatch, pin_memory):
    """Under its locks too: the collector may run, and finalizers with it, at any allocation."""
    options = {"num_workers": 1, "pin_memory": pin_memory, "prefetch_factor": 2}
    loader, ended = DataLoader(Calls(torch.tensor, 8), None, **options), []

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

    user = iter(DataLoader(Calls(torch.tensor, 6), None, **options))
    engine = type(engine_of(user))
    monkeypatch.setattr(engine, "_end_turn", with_collections(engine._end_turn))
    thread = User(user)
    del user
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert (thread.batches, thread.error) == (list(range(6)), None)
    assert len(ended) == 6
