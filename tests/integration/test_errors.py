"""What goes wrong in the user's code and how it arrives: type, torch's text, place; and what works afterwards."""

import asyncio
import ctypes
import gc
import os
import re
import signal
import sys
import threading
import traceback
import weakref

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler, Subset, TensorDataset, get_worker_info

import rayloader
from inside import begin_all, set_timeout
from latches import Barrier, Gate, Mail
from probes import Calls, Stream, as_is, load
from rayloader import DataLoader, cached
from rayloader.errors import own_notes

pytestmark = pytest.mark.usefixtures("ray_session")


class CustomError(Exception):
    """Can be made of one string."""


class TwoArgumentError(Exception):
    """Cannot."""

    def __init__(self, code, reason):
        super().__init__(f"code {code}: {reason}")


AS_PLANNED = r"^as planned$"


def fail(*_):
    raise CustomError("as planned")


def outcomes(iterator, limit=50):
    """All that `next` gives until the end: batches, and exceptions in their place."""
    found = []
    while len(found) < limit:
        try:
            found.append(next(iterator))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
    raise AssertionError(f"no end: {found}")


def check_caught(error, worker, kind=CustomError, line='raise CustomError("as planned")', original="CustomError"):
    """The exception is of that type and its text is torch's, with the traceback of the worker."""
    assert type(error) is kind
    text = str(error)
    assert text.startswith(
        f"Caught {original} in DataLoader worker process {worker}.\nOriginal Traceback (most recent call last):\n"
    )
    assert line in text
    assert "ray" not in type(error).__module__
    assert "RayTaskError" not in text


def note_of(error):
    (note,) = error.__notes__
    return note


# ---- where user code raises


def test_getitem_raises():
    def get(index):
        if index == 5:
            fail()
        return index

    iterator = iter(DataLoader(Calls(get, 8), 2, num_workers=2))
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(CustomError) as caught:
        next(iterator)
    check_caught(caught.value, worker=0)
    assert f'File "{__file__}", line ' in str(caught.value)
    where = r"batch 2, worker 0 \(pid \d+ on \S+, node \w+\), indices \[4, 5\]"
    assert re.fullmatch(f"sample 5, position 1 of 2, {where}", note_of(caught.value))
    assert [batch.tolist() for batch in iterator] == [[6, 7]]


class MessageError(Exception):
    """Has a `message`, which its constructor names otherwise: torch's loader loses it."""

    message = "said"

    def __init__(self, text):
        super().__init__(text)


class NoTracebackError(Exception):
    """Does not let others set its traceback in their way."""

    def with_traceback(self, traceback, more):
        return self


def raise_without_traceback(index):
    raise NoTracebackError("as planned")


async def fail_in_a_task():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(fail))


def raise_message(index):
    raise MessageError("as planned")


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_an_exception_that_torch_would_lose_arrives(workers):
    (error,) = outcomes(iter(load(raise_message, 1, workers=workers)))
    check_caught(error, 0, MessageError, 'raise MessageError("as planned")', "MessageError")
    (error,) = outcomes(iter(load(raise_without_traceback, 1, workers=workers)))
    check_caught(error, 0, NoTracebackError, 'raise NoTracebackError("as planned")', "NoTracebackError")
    (group,) = outcomes(iter(load(lambda index: asyncio.run(fail_in_a_task()), 1, workers=workers)))
    assert (type(group), [type(part) for part in group.exceptions]) == (ExceptionGroup, [CustomError])
    check_caught(group.exceptions[0], 0)
    told, where = group.__notes__
    assert told.startswith("Caught ExceptionGroup in DataLoader worker process 0.\nOriginal ")
    assert "asyncio.run(fail_in_a_task())" in told
    assert where.startswith("sample 0, batch 0, worker 0 (pid ")


class Several(Calls):
    def __getitems__(self, indices):
        fail()


def test_getitems_raises():
    for worker, error in enumerate(outcomes(iter(DataLoader(Several(as_is, 4), 2, num_workers=2)))):
        check_caught(error, worker)
        assert note_of(error).endswith(f"indices [{2 * worker}, {2 * worker + 1}]")


WAYS = {"in_process": {"num_workers": 0}, "forks": {"workers": "fork"}, "actors": {"workers": "ray"}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrap", [lambda of: of, lambda of: Subset(of, range(8)), cached])
def test_the_note_names_the_sample(wrap, way):
    dataset = wrap(Calls(lambda index: fail() if index == 6 else index, 8))
    *_, error = outcomes(iter(DataLoader(dataset, 4, **{"num_workers": 2, **WAYS[way]})))
    worker = "" if way == "in_process" else r", worker 1 \(pid .*\)"
    assert re.fullmatch(rf"sample 6, position 2 of 4, batch 1{worker}, indices \[4, 5, 6, 7\]", note_of(error))


@pytest.mark.parametrize("way", WAYS)
def test_the_note_names_an_index_that_whole_batches_refuse(way):
    indices = [*range(32), 99]  # so many that torch's own datasets are not asked for each
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_sampler=[indices], **{"num_workers": 1, **WAYS[way]})
    (error,) = outcomes(iter(loader))
    assert type(error) is IndexError
    assert note_of(error).startswith("sample 99, position 32 of 33, batch 0")


@pytest.mark.parametrize("way", WAYS)
def test_the_note_counts_the_samples_of_a_stream_also_after_it_was_resumed(way):
    def loader():
        return DataLoader(Positions(8), 2, **{"num_workers": 1, **WAYS[way]})

    first = loader()
    iterator = iter(first)
    assert next(iterator).tolist() == [0, 1]
    again = loader()
    again.load_state_dict(first.state_dict())
    *_, error = outcomes(iter(again))
    assert note_of(error).startswith("sample 5 of the stream, position 1 of 2, batch 2")


class Positions(IterableDataset):
    """Has a state, and fails at 5."""

    def __init__(self, length):
        self.length, self.position = length, 0

    def __iter__(self):
        while self.position < self.length:
            self.position += 1
            yield fail() if self.position == 6 else self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_without_batching_the_note_names_the_index():
    error, last = outcomes(iter(load(lambda index: fail() if index == 0 else index)))
    check_caught(error, 0)
    assert note_of(error).endswith("indices 0")
    assert last == 1


def test_iter_raises():
    loader = DataLoader(Stream(lambda worker: range(2) if worker else fail()), None, num_workers=2)
    error, *rest = outcomes(iter(loader))
    check_caught(error, 0)
    assert rest == [0, 1]


def test_next_raises_and_only_that_worker_stops():
    def numbers(worker):
        for number in range(3):
            if (worker, number) == (0, 1):
                fail()
            yield 10 * worker + number

    *batches, error, eleven, twelve = outcomes(iter(DataLoader(Stream(numbers), None, num_workers=2)))
    assert (batches, eleven, twelve) == ([0, 10], 11, 12)
    check_caught(error, 0)
    assert re.fullmatch(r"sample 1 of the stream, batch 2, worker 0 \(pid \d+ on \S+, node \w+\)", note_of(error))


def test_collate_raises():
    loader = DataLoader(range(4), 2, num_workers=2, collate_fn=lambda batch: fail() if 3 in batch else batch)
    good, error = outcomes(iter(loader))
    assert good == [0, 1]
    check_caught(error, 1)
    assert note_of(error).endswith("indices [2, 3]")


def test_torchs_own_collate_error_arrives():
    _, error = outcomes(iter(DataLoader([0, 1, 2, "3"], 2, num_workers=1)))
    check_caught(error, 0, TypeError, "collate_int_fn", "TypeError")


def test_worker_init_fn_raises():
    loader = load(as_is, worker_init_fn=lambda worker: fail() if worker == 1 else None)
    good, error = outcomes(iter(loader))
    assert good == 0
    check_caught(error, 1)
    assert note_of(error).startswith("batch 1, worker 1 ")


class FailsToArrive(Calls):
    def __setstate__(self, state):
        fail()


def test_the_datasets_unpickling_raises():
    found = outcomes(iter(DataLoader(FailsToArrive(as_is), num_workers=2)))
    assert len(found) == 2
    for worker, error in enumerate(found):
        check_caught(error, worker)


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)


def test_a_dataset_that_cannot_be_pickled_names_the_attribute_at_iter():
    dataset = Calls(as_is)
    dataset.cache = {"entry": [1, Holder(stream=(i for i in ()))]}
    loader = DataLoader(dataset, num_workers=2, workers="ray")
    with pytest.raises(TypeError, match=r"cannot pickle 'generator' object") as caught:
        iter(loader)
    culprit, remedy = own_notes(caught.value)
    assert "dataset.cache['entry'][1].stream: builtins.generator can't be sent to a worker" in culprit
    assert 'use workers="fork"' in remedy
    del dataset.cache
    assert [batch.item() for batch in loader] == [0, 1]


@pytest.mark.parametrize("argument", ["collate_fn", "worker_init_fn"])
def test_a_function_that_cannot_be_pickled_is_named(argument):
    stream = (i for i in ())
    loader = DataLoader(range(2), num_workers=1, workers="ray", **{argument: lambda _: stream})
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        iter(loader)
    assert f"{argument}.<closure>.stream: builtins.generator can't be sent" in caught.value.__notes__[0]


class RefusesToLeave:
    def __reduce__(self):
        fail()


def test_a_batch_that_cannot_be_pickled():
    first, error, last = outcomes(iter(load(lambda index: RefusesToLeave() if index == 1 else index, 3, num_workers=1)))
    assert (first, last) == (0, 2)
    check_caught(error, 0)
    assert "batch 1, worker 0" in note_of(error)


def test_the_part_of_a_batch_that_cannot_be_sent_is_named_with_the_remedy():
    dataset = Calls(lambda index: {"deep": [1, {"lock": threading.Lock()}]})
    error = outcomes(iter(DataLoader(dataset, 2, num_workers=1, collate_fn=as_is)))[0]
    check_caught(error, 0, TypeError, "cannot pickle '_thread.lock' object", "TypeError")
    assert "What the dataset or collate_fn has returned cannot be sent to the trainer" in str(error)
    assert "batch[0]['deep'][1]['lock']: _thread.lock (TypeError: cannot" in str(error)
    assert "let them return what it can be made from, or leave it out" in str(error)


class RefusesToArrive:
    def __reduce__(self):
        return fail, ()


def test_a_batch_that_fails_to_unpickle_in_the_driver():
    first, error, last = outcomes(
        iter(load(lambda index: RefusesToArrive() if index == 1 else index, 3, num_workers=1))
    )
    assert (first, last) == (0, 2)
    assert type(error) is CustomError
    assert "unpickling a batch of DataLoader worker process 0" in str(error)
    assert 'raise CustomError("as planned")' in str(error)
    assert "batch 1, worker 0" in note_of(error)


class NoLength(Calls):
    def __len__(self):
        fail()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_len_raises_where_torchs_does(num_workers):
    loader = DataLoader(NoLength(as_is), num_workers=num_workers)
    with pytest.raises(CustomError, match=AS_PLANNED):
        len(loader)
    with pytest.raises(CustomError, match=AS_PLANNED):
        next(iter(loader))


class FailingSampler(Sampler):
    """Yields 0, 1, 2 ... and raises in place of `at`."""

    def __init__(self, at):
        self.at = at
        self.drawn = 0

    def __iter__(self):
        for index in range(8):
            if index == self.at:
                fail()
            self.drawn += 1
            yield index


def test_the_sampler_raises_at_iter():
    with pytest.raises(CustomError, match=AS_PLANNED):
        iter(DataLoader(range(8), num_workers=2, prefetch_factor=2, sampler=FailingSampler(at=3)))


@pytest.mark.parametrize("persistent", [False, True])
def test_the_sampler_raises_on_the_way(persistent):
    sampler = FailingSampler(at=5)
    loader = DataLoader(range(8), num_workers=2, prefetch_factor=2, sampler=sampler, persistent_workers=persistent)
    iterator = iter(loader)
    assert sampler.drawn == 4
    assert next(iterator).item() == 0
    assert sampler.drawn == 5
    with pytest.raises(CustomError, match=AS_PLANNED):
        next(iterator)
    sampler.at = None
    assert [batch.item() for batch in loader] == list(range(8))


@pytest.mark.parametrize("prefetch_factor", [1, 3])
def test_indices_are_drawn_at_iter_as_many_as_the_window_holds_then_one_for_each_batch(prefetch_factor):
    sampler = FailingSampler(at=None)
    iterator = iter(DataLoader(range(8), num_workers=2, prefetch_factor=prefetch_factor, sampler=sampler))
    drawn = [sampler.drawn]
    for _ in range(3):
        next(iterator)
        drawn.append(sampler.drawn)
    assert drawn == [min(8, 2 * prefetch_factor + taken) for taken in range(4)]


# ---- what it raises


def raise_at_1(make):
    def get(index):
        if index == 1:
            raise make()
        return index

    return get


@pytest.mark.parametrize(
    ("kind", "arguments", "arrives_as"),
    [
        (CustomError, ("as planned",), CustomError),
        (TwoArgumentError, (3, "as planned"), RuntimeError),
        (UnicodeDecodeError, ("utf-8", b"x", 0, 1, "as planned"), RuntimeError),
        (FileNotFoundError, (2, "as planned"), FileNotFoundError),
        (KeyError, ("as planned",), KeyError),
        (AssertionError, (), AssertionError),
    ],
)
def test_types_arrive_and_what_no_string_makes_is_a_runtime_error(kind, arguments, arrives_as):
    first, caught, last = outcomes(iter(load(raise_at_1(lambda: kind(*arguments)), 3, num_workers=1)))
    assert (first, last) == (0, 2)
    check_caught(caught, 0, arrives_as, "raise make()", kind.__name__)


class PickyError(Exception):
    message = "planned"

    def __init__(self, message):
        if "\n" in message:  # as in torch's text
            raise LookupError("one line only")
        super().__init__(message)


@pytest.mark.parametrize(("kind", "arrives_as"), [(CustomError, CustomError), (PickyError, RuntimeError)])
def test_an_error_that_is_kept_keeps_no_iterator(kind, arrives_as):
    def fail(_):
        raise kind("as planned")

    iterator = iter(DataLoader(Calls(fail), 1, num_workers=1, workers="fork"))
    iterators = weakref.ref(iterator)
    gc.disable()
    try:
        with pytest.raises(arrives_as) as caught:
            next(iterator)
        del iterator
        assert iterators() is None
    finally:
        gc.enable()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "__next__"


def test_a_type_that_exists_in_the_worker_only_arrives_as_text():
    def get(index):
        raise type("Local", (Exception,), {"__reduce_ex__": lambda self, protocol: fail()})("made here")

    (error,) = outcomes(iter(load(get, 1)))
    assert isinstance(error, Exception)
    assert str(error).startswith("Caught Local in DataLoader worker process 0.\nOriginal Traceback")
    assert "Local: made here" in str(error)


def test_stop_iteration_out_of_a_map_style_dataset_ends_the_epoch_quietly():
    loader = load(raise_at_1(StopIteration), 4, num_workers=1)
    iterator = iter(loader)
    assert list(iterator) == [0]
    assert list(iterator) == [2, 3]  # as torch's goes on when it is asked again
    assert list(loader) == [0]


def test_an_error_in_each_batch_is_an_error_for_each():
    found = outcomes(iter(load(fail, 6, num_workers=2)))
    assert len(found) == 6
    for task, error in enumerate(found):
        check_caught(error, task % 2)


def test_without_order_errors_arrive_too():
    found = outcomes(iter(load(raise_at_1(CustomError), 6, num_workers=2, in_order=False)))
    assert sorted(value for value in found if isinstance(value, int)) == [0, 2, 3, 4, 5]
    (error,) = [value for value in found if not isinstance(value, int)]
    assert str(error).startswith("Caught CustomError in DataLoader worker process ")


def test_persistent_workers_go_on_after_an_error():
    loader = load(raise_at_1(CustomError), 3, num_workers=2, persistent_workers=True)
    for _ in range(2):
        first, error, last = outcomes(iter(loader))
        assert (first, last) == (0, 2)
        check_caught(error, 1, line="raise make()")


# ---- a worker that exits


def interrupt():
    raise KeyboardInterrupt


def cancel():
    raise asyncio.CancelledError


def close():
    raise GeneratorExit


# What is no Exception ends torch's worker too.
RAISED = {
    "SystemExit": lambda: sys.exit(3),
    "KeyboardInterrupt": interrupt,
    "CancelledError": cancel,
    "GeneratorExit": close,
}
EXITS = {
    **RAISED,
    "os._exit": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segmentation fault": lambda: ctypes.string_at(0),
}


# What is said of actors that tell nothing themselves: Ray does not say how a process ended.
UNKNOWN = "its process has ended; Ray knows neither a signal nor an exit code, and its logs may say more"
WORDS = {
    "SystemExit": "exit code 3\n",
    **dict.fromkeys(("os._exit", "SIGKILL", "segmentation fault"), UNKNOWN),
}
# The ways differ little, and the table of faults has all.
ALIKE = {"os._exit", "segmentation fault", "CancelledError", "KeyboardInterrupt"}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.full if way in ALIKE else ()) for way in EXITS])
def test_a_worker_that_exits_is_torchs_error_with_its_pid_and_the_next_iter_works(tmp_path, way):
    mail, exits = Mail(tmp_path / "mail"), tmp_path / "exits"
    exits.touch()
    leave = EXITS[way]

    def get(index):
        if index == 3 and exits.exists():
            mail.send(os.getpid())
            leave()
        return index

    loader = load(get, 6, num_workers=2, max_worker_restarts=0)
    iterator = iter(loader)
    with pytest.raises(RuntimeError) as caught:
        assert [next(iterator) for _ in range(6)] == []
    (pid,) = mail.receive()
    mail.close()
    assert type(caught.value) is rayloader.WorkerDiedError
    assert caught.value.worker_id == 1
    assert str(caught.value).startswith(f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker 1 on ")
    text = str(caught.value)
    assert text.partition(". Cause: ")[2].startswith(WORDS.get(way, "Traceback (most recent call last):\n"))
    assert way in RAISED or text.endswith(WORDS[way])  # and no advice of Ray's
    if way in RAISED:  # the cause is told with its traceback
        assert f'File "{__file__}", line ' in str(caught.value)
        assert f", in {EXITS[way].__name__}\n" in str(caught.value)
        assert way in str(caught.value).splitlines()[-1]
    assert re.fullmatch(rf"batch [13], worker 1 \(pid {pid} on .*\), indices [13]", note_of(caught.value))
    exits.unlink()
    assert list(loader) == list(range(6))


def test_a_death_is_reported_before_the_timeout_and_the_iterator_says_so_again():
    iterator = iter(load(lambda index: os._exit(1), 2, num_workers=1, timeout=300, max_worker_restarts=0))
    for _ in range(2):
        with pytest.raises(rayloader.WorkerDiedError, match="exited unexpectedly"):
            next(iterator)


def test_a_dead_worker_that_another_waits_for_is_an_error_not_a_hang(tmp_path):
    barrier = Barrier(tmp_path, 3)
    mail = Mail(tmp_path / "mail")

    def get(index):
        if index == 1:
            mail.send(os.getpid())
            os._exit(1)
        barrier.wait(leader=True)

    iterator = iter(load(get, max_worker_restarts=0))
    with pytest.raises(rayloader.WorkerDiedError) as caught:
        next(iterator)
    assert str(caught.value).startswith(f"DataLoader worker (pid(s) {mail.receive()[0]}) exited unexpectedly: worker 1")
    for path in barrier.paths:  # lets worker 0 go
        descriptor = os.open(path, os.O_RDWR)
        os.write(descriptor, b"...")
        os.close(descriptor)
    mail.close()


def test_persistent_workers_are_replaced_after_a_death(tmp_path):
    mail = Mail(tmp_path / "mail")
    gate = tmp_path / "fault"
    gate.touch()
    death = Gate(tmp_path / "death")

    def get(index):
        if index == 2 and gate.exists():
            death.wait()
            gate.unlink()
            os._exit(1)
        return index

    loader = load(get, 4, num_workers=2, persistent_workers=True, worker_init_fn=mail.send, max_worker_restarts=0)
    iterator = iter(loader)
    begin_all(iterator)
    assert sorted(mail.receive(2)) == ["0", "1"]  # a process that has not started by then would never say so
    death.open()
    with pytest.raises(rayloader.WorkerDiedError):
        list(iterator)
    assert list(loader) == [0, 1, 2, 3]
    assert sorted(mail.receive(2)) == ["0", "1"]
    mail.close()


# ---- timeouts


def test_a_timeout_names_batch_and_worker_and_iteration_may_go_on(tmp_path):
    gate = Gate(tmp_path / "gate")

    def get(index):
        if index == 2:
            gate.wait()
        return index

    iterator = iter(load(get, 6, num_workers=2))
    assert [next(iterator), next(iterator)] == [0, 1]
    set_timeout(iterator, 2)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 2 seconds\b") as caught:
        next(iterator)
    assert type(caught.value) is rayloader.BatchTimeoutError
    assert re.search(r"batch 2, worker 0 \(pid \d+ on \S+, node \w+\), indices 2\. Raise timeout if", str(caught.value))
    set_timeout(iterator, 0)
    gate.open()
    assert list(iterator) == [2, 3, 4, 5]


# ---- no room


def test_a_cluster_without_room_is_an_error_that_says_what_was_asked_for(monkeypatch):
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "0.1")
    loader = load(as_is, ray_remote_args={"num_cpus": 0, "resources": {"unobtainium": 1}})
    with pytest.raises(rayloader.WorkerStartError) as caught:
        next(iter(loader))
    text = str(caught.value)
    assert text.startswith("2 of 2 DataLoader workers did not start within 0.1 s. Ray has ")
    assert "unobtainium 1; node " in text
    assert "has unobtainium 0 in all" in text
    assert "RAYLOADER_START_TIMEOUT" in text


# ---- tensors that may not travel


def test_a_batch_that_requires_grad_is_refused_in_torchs_words():
    def get(index):
        return torch.ones(1, requires_grad=True) * 2

    (error,) = outcomes(iter(load(get, 1)))
    check_caught(error, 0, RuntimeError, "non-leaf", "RuntimeError")


def test_worker_ids_in_errors_are_those_of_get_worker_info():
    def get(index):
        raise CustomError(f"I am {get_worker_info().id}")

    for error in outcomes(iter(load(get, 4, num_workers=2))):
        worker = re.search(r"I am (\d)", str(error))[1]
        check_caught(error, worker, line="raise CustomError")
