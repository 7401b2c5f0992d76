"""Pinning in a background thread, with an accelerator that is none: what `Tensor.pin_memory` does is put in."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from accelerator import LIMIT, Pinned
from latches import Mail
from probes import Calls, Stream, as_is, load
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")
OLD = torch.__version__ < (2, 9)  # torch 2.6 warns of neither


def opened(loader):
    """An iterator, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        iterator = iter(loader)
    return iterator, [str(warning.message) for warning in caught if warning.category is UserWarning]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_torchs_warning_and_no_pinning():
    iterator, told = opened(DataLoader(range(4), 2, num_workers=1, pin_memory=True))
    assert told == opened(TorchDataLoader(range(4), 2, pin_memory=True))[1]
    assert OLD or "'pin_memory' argument is set as true but no accelerator is found" in told[0]
    threads = [thread.name for thread in threading.enumerate()]
    assert "rayloader-ahead" not in threads
    assert [batch.tolist() for batch in iterator] == [[0, 1], [2, 3]]


def pin_threads():
    return [thread for thread in threading.enumerate() if thread.name == "rayloader-ahead"]


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_pinned_in_order_in_one_thread_on_the_current_device(accelerator, persistent):
    loader = DataLoader(range(10), 2, num_workers=2, pin_memory=True, persistent_workers=persistent)
    for _ in range(2):
        batches = list(loader)
        assert [batch.tolist() for batch in batches] == [[k, k + 1] for k in range(0, 10, 2)]
        assert {type(batch) for batch in batches} == {Pinned}
    assert (accelerator.threads, accelerator.devices, accelerator.pinned) == ({"rayloader-ahead"}, {3}, 10)


def test_containers_are_pinned_as_torch_pins_them(accelerator):
    (batch,) = load(lambda index: {"a": (torch.ones(1), [torch.zeros(1)]), "b": "text"}, 1, pin_memory=True)
    assert [type(batch["a"][0]), type(batch["a"][1][0]), batch["b"]] == [Pinned, Pinned, "text"]


class PinsItself:
    def __init__(self, index):
        self.index = index
        self.thread = None

    def pin_memory(self):
        self.thread = threading.current_thread().name
        return self


def test_a_custom_pin_memory_method_is_called(accelerator):
    batches = list(load(PinsItself, 4, num_workers=2, pin_memory=True))
    assert [(batch.index, batch.thread) for batch in batches] == [(k, "rayloader-ahead") for k in range(4)]


class PinsOrStops(PinsItself):
    def pin_memory(self):
        if self.index == 1:
            raise StopIteration("as planned")
        return self


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_would_end_the_programs_loop_is_an_error_as_out_of_a_generator(accelerator, num_workers):
    iterator = iter(load(PinsOrStops, 3, num_workers=num_workers, pin_memory=True))
    assert next(iterator).index == 0
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    assert next(iterator).index == 2


def test_at_most_two_batches_are_pinned_ahead_of_the_user(accelerator, tmp_path):
    mail = Mail(tmp_path / "mail")
    asked = 0
    too_many = []

    def check(count):
        if count + 1 > asked + 2:
            too_many.append((count, asked))

    def get(index):
        mail.send(index)
        return torch.tensor(index)

    accelerator.at = check
    iterator = iter(load(get, 24, num_workers=2, prefetch_factor=8, pin_memory=True))
    mail.receive(16)  # the window is built, so that nothing but the bound holds the thread back
    for index in range(24):
        accelerator.wait_for(min(24, asked + 2))
        asked += 1
        assert next(iterator).item() == index
    assert too_many == []
    mail.close()


def test_an_error_while_pinning_arrives_in_its_turn_and_the_rest_follows(accelerator):
    def check(count):
        if count == 1:
            raise ValueError("as planned")

    accelerator.at = check
    iterator = iter(load(torch.tensor, 3, num_workers=1, pin_memory=True))
    assert next(iterator).item() == 0
    with pytest.raises(ValueError, match=r"(?s)Caught ValueError in pin memory thread for device 3\..*as planned"):
        next(iterator)
    assert next(iterator).item() == 2


def test_a_workers_error_passes_through(accelerator):
    iterator = iter(load(lambda index: torch.tensor(6 // (index - 1)), 3, num_workers=2, pin_memory=True))
    assert next(iterator).item() == -6
    with pytest.raises(ZeroDivisionError, match=r"Caught ZeroDivisionError in DataLoader worker process 1\."):
        next(iterator)
    assert type(next(iterator)) is Pinned


def test_a_timeout_counts_while_pinning_too(accelerator):
    gate = threading.Event()
    accelerator.at = lambda count: gate.wait(LIMIT)
    iterator = iter(load(torch.tensor, 1, pin_memory=True, timeout=1))
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 1 seconds"):
        next(iterator)
    gate.set()
    assert next(iterator).item() == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_leaves_no_thread(accelerator, persistent):
    loader = load(torch.tensor, 50, num_workers=2, pin_memory=True, persistent_workers=persistent)
    iterator = iter(loader)
    assert next(iterator).item() == 0
    threads = pin_threads()
    assert len(threads) == 1
    del iterator, loader
    for thread in threads:
        thread.join(LIMIT)
    assert pin_threads() == []


def test_a_finished_epoch_leaves_no_thread(accelerator):
    iterator = iter(load(torch.tensor, 4, num_workers=2, pin_memory=True))
    (thread,) = pin_threads()
    assert len(list(iterator)) == 4
    thread.join(LIMIT)
    assert not thread.is_alive()


def test_an_iterator_that_pins_is_collected_by_reference_count(accelerator):
    gc.collect()
    gc.disable()
    try:
        iterator = iter(load(torch.tensor, 8, num_workers=2, pin_memory=True))
        next(iterator)
        dead = weakref.ref(iterator)
        del iterator
        assert dead() is None
    finally:
        gc.enable()


def test_out_of_order_iterable_batches_are_pinned(accelerator):
    dataset = Stream(lambda worker: (torch.tensor(10 * worker + k) for k in range(2 + worker)))
    batches = list(DataLoader(dataset, None, num_workers=2, pin_memory=True, in_order=False))
    assert sorted(batch.item() for batch in batches) == [0, 1, 10, 11, 12]
    assert {type(batch) for batch in batches} == {Pinned}


def test_pin_memory_device_is_deprecated_as_in_torch(accelerator):
    loader = DataLoader(Calls(as_is), 2, num_workers=1, pin_memory=True, pin_memory_device="cuda")
    iterator, told = opened(loader)
    assert told == opened(TorchDataLoader([0], pin_memory=True, pin_memory_device="cuda"))[1]
    assert OLD or "pin_memory_device is deprecated" in told[0]
    (batch,) = iterator
    assert type(batch) is Pinned
