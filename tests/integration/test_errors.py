"""What goes wrong in the user's code and how it arrives: type, torch's text, place; and what works afterwards.

The conformance tests compare the texts of errors with torch's; here is what torch does not say, or cannot deliver.
"""

import asyncio
import gc
import os
import re
import signal
import traceback
import weakref

import pytest
from torch.utils.data import IterableDataset

import rayloader
from latches import Mail
from probes import Calls, Stream, as_is, load
from rayloader import DataLoader
from rayloader.errors import own_notes

pytestmark = pytest.mark.usefixtures("ray_session")


class CustomError(Exception):
    """Can be made of one string."""


ERROR = CustomError("as planned")  # in a list of what must come


def fail(*_):
    raise CustomError("as planned")


def outcomes(iterator):
    """All that `next` gives until the end: batches, and exceptions in their place."""
    found = []
    while len(found) < 50:
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
    where = f"in DataLoader worker process {worker}"
    assert str(error).startswith(f"Caught {original} {where}.\nOriginal Traceback (most recent call last):\n")
    assert line in str(error)
    assert "RayTaskError" not in str(error)


# ---- where user code raises


def fails_at(index):
    return lambda found: fail() if found == index else found


class FailsToArrive(Calls):
    def __setstate__(self, state):
        fail()


class RefusesToLeave:
    def __reduce__(self):
        fail()


class Positions(IterableDataset):
    """Has a state, and fails at 5."""

    position = 0

    def __iter__(self):
        while self.position < 8:
            self.position += 1
            yield fail() if self.position == 6 else self.position - 1

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def stream(worker):
    """Of the first worker, the second sample raises."""
    for number in range(3):
        yield fail() if (worker, number) == (0, 1) else 10 * worker + number


IN_PROCESS, FORKS, ACTORS = {"num_workers": 0}, {"workers": "fork"}, {"workers": "ray"}
EVERYWHERE, WITH_WORKERS = (IN_PROCESS, FORKS, ACTORS), (FORKS, ACTORS)
BATCHES, SECOND = [[0, 1, 2, 3], ERROR], "batch 1, worker 1, indices [4, 5, 6, 7]"
ONE = {"batch_size": None, "collate_fn": as_is}
# Of a place: the dataset; how it is loaded; what comes; the note of the first error; the ways in which it can happen.
PLACES = {
    "dataset": (Calls(fails_at(6), 8), {}, BATCHES, f"sample 6, position 2 of 4, {SECOND}", EVERYWHERE),
    "no batches": (Calls(fails_at(0)), ONE, [ERROR, 1], "sample 0, batch 0, worker 0, indices 0", EVERYWHERE),
    "collate_fn": (range(8), {"collate_fn": fails_at([4, 5, 6, 7])}, BATCHES, SECOND, EVERYWHERE),
    "pickling of a batch": (
        range(8),
        {"collate_fn": lambda batch: RefusesToLeave() if 6 in batch else batch},
        BATCHES,
        SECOND,
        WITH_WORKERS,
    ),
    "worker_init_fn": (range(8), {"worker_init_fn": fails_at(1)}, BATCHES, SECOND, WITH_WORKERS),
    "the dataset's unpickling": (
        FailsToArrive(as_is, 8),
        {},
        [ERROR, ERROR],
        "batch 0, worker 0, indices [0, 1, 2, 3]",
        (ACTORS,),
    ),
    "stream": (
        Stream(stream),
        ONE,
        [0, 10, ERROR, 11, 12],
        "sample 1 of the stream, batch 2, worker 0",
        WITH_WORKERS,
    ),
}


@pytest.mark.parametrize(
    ("place", "way"), [pytest.param(name, way, id=f"{name}-{way}") for name in PLACES for way in PLACES[name][-1]]
)
def test_an_error_arrives_in_its_turn_and_a_note_names_where(place, way):
    dataset, options, expected, note, _ = PLACES[place]
    usual = {"batch_size": 4, "num_workers": 2, "collate_fn": list}
    found = outcomes(iter(DataLoader(dataset, **{**usual, **options, **way})))
    assert [ERROR if isinstance(one, Exception) else one for one in found] == expected
    error = found[expected.index(ERROR)]
    (told,) = error.__notes__
    if way is IN_PROCESS:
        assert (type(error), str(error)) == (CustomError, "as planned")
        assert told == re.sub(r", worker \d", "", note)
    else:
        check_caught(error, note.partition(", worker ")[2][:1])
        assert f'File "{__file__}", line ' in str(error)
        assert re.subn(r" \(pid \d+ on \S+(, node \w+)?\)", "", told) == (note, 1)


@pytest.mark.parametrize("way", EVERYWHERE)
def test_the_note_counts_the_samples_of_a_stream_also_after_it_was_resumed(way):
    first, again = (DataLoader(Positions(), 2, **{"num_workers": 1, **way}) for _ in range(2))
    assert next(iter(first)).tolist() == [0, 1]
    again.load_state_dict(first.state_dict())
    *_, error = outcomes(iter(again))
    assert error.__notes__[0].startswith("sample 5 of the stream, position 1 of 2, batch 2")


# ---- what it raises


class MessageError(Exception):
    """Has a `message`, which its constructor names otherwise: torch's loader loses it."""

    message = "said"

    def __init__(self, text):
        super().__init__(text)


async def fail_in_a_task():
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(fail))


def raise_what(make):
    raise make("as planned")


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_an_exception_that_torch_would_lose_arrives_and_a_group_as_a_group(workers):
    dataset = [MessageError, lambda _: asyncio.run(fail_in_a_task())]
    error, group = outcomes(iter(load(lambda index: raise_what(dataset[index]), 2, 1, workers=workers)))
    check_caught(error, 0, MessageError, 'raise make("as planned")', "MessageError")
    assert (type(group), [type(part) for part in group.exceptions]) == (ExceptionGroup, [CustomError])
    check_caught(group.exceptions[0], 0)
    told, where = group.__notes__
    assert told.startswith("Caught ExceptionGroup in DataLoader worker process 0.\nOriginal ")
    assert "asyncio.run(fail_in_a_task())" in told
    assert where.startswith("sample 1, batch 1, worker 0 (pid ")


def test_a_type_that_exists_in_the_worker_only_arrives_as_text():
    def get(index):
        raise type("Local", (Exception,), {"__reduce_ex__": lambda self, protocol: fail()})("made here")

    (error,) = outcomes(iter(load(get, 1)))
    assert isinstance(error, Exception)
    assert str(error).startswith("Caught Local in DataLoader worker process 0.\nOriginal Traceback")
    assert "Local: made here" in str(error)


def test_an_error_that_is_kept_keeps_no_iterator():
    iterator = iter(load(fail, 1, workers="fork"))
    iterators = weakref.ref(iterator)
    gc.disable()
    try:
        with pytest.raises(CustomError) as caught:
            next(iterator)
        del iterator
        assert iterators() is None
    finally:
        gc.enable()
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "__next__"


# ---- what cannot be sent


def generator():
    return (i for i in ())


def with_cache():
    dataset = Calls(as_is)
    dataset.cache = {"entry": [1, generator()]}
    return {"dataset": dataset}


def with_closure():
    stream = generator()
    return {"dataset": range(2), "collate_fn": lambda _: stream}


@pytest.mark.parametrize(
    ("options", "culprit"),
    [(with_cache(), "dataset.cache['entry'][1]"), (with_closure(), "collate_fn.<closure>.stream")],
)
def test_what_cannot_be_pickled_is_named_at_iter_with_the_remedy(options, culprit):
    loader = DataLoader(num_workers=2, workers="ray", **options)
    with pytest.raises(TypeError, match=r"cannot pickle 'generator' object") as caught:
        iter(loader)
    named, remedy = own_notes(caught.value)
    assert f"{culprit}: builtins.generator can't be sent to a worker" in named
    assert 'use workers="fork"' in remedy


class RefusesToArrive:
    def __reduce__(self):
        return fail, ()


def test_a_batch_that_fails_to_unpickle_in_the_driver():
    first, error, last = outcomes(iter(load(lambda index: RefusesToArrive() if index == 1 else index, 3, 1)))
    assert (first, last) == (0, 2)
    assert type(error) is CustomError
    assert "unpickling a batch of DataLoader worker process 0" in str(error)
    assert 'raise CustomError("as planned")' in str(error)
    assert "batch 1, worker 0" in error.__notes__[0]


# ---- a worker that exits


def leave(error=None):
    if error is None:
        os.kill(os.getpid(), signal.SIGKILL)
    raise error


# What is no Exception ends torch's worker too. The table of faults has other ways.
EXITS = {"SystemExit": SystemExit(3), "KeyboardInterrupt": KeyboardInterrupt(), "SIGKILL": None}
# What is said of actors that tell nothing themselves: Ray does not say how a process ended.
UNKNOWN = "its process has ended; Ray knows neither a signal nor an exit code, and its logs may say more"


@pytest.mark.parametrize("way", EXITS)
def test_a_worker_that_exits_is_torchs_error_with_its_pid_and_the_next_iter_works(tmp_path, way):
    mail, exits = Mail(tmp_path / "mail"), tmp_path / "exits"
    exits.touch()

    def get(index):
        if index == 3 and exits.exists():
            mail.send(os.getpid())
            leave(EXITS[way])
        return index

    loader = load(get, 6, num_workers=2, max_worker_restarts=0)
    with pytest.raises(RuntimeError) as caught:
        list(loader)
    (pid,) = mail.receive()
    mail.close()
    error, text = caught.value, str(caught.value)
    assert (type(error), error.worker_id) == (rayloader.WorkerDiedError, 1)
    assert text.startswith(f"DataLoader worker (pid(s) {pid}) exited unexpectedly: worker 1 on ")
    if way == "SystemExit":
        assert ". Cause: exit code 3\n" in text
    if way == "SIGKILL":
        assert text.endswith(f". Cause: {UNKNOWN}"), "and no advice of Ray's"
    else:  # the cause is told with its traceback
        assert f'File "{__file__}", line ' in text
        assert ", in leave\n" in text
        assert way in text.splitlines()[-1]
    assert re.fullmatch(rf"batch [13], worker 1 \(pid {pid} on .*\), indices [13]", error.__notes__[0])
    exits.unlink()
    assert list(loader) == list(range(6))
