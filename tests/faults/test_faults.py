"""Where a fault strikes x how x what the user sees, in each lane. The loader works again.

A fault that strikes once: the batches are those of an undisturbed run, bit for bit, or the user's own error arrives as
torch's does. One that strikes always ends the epoch with an error that names the batch. `make test` takes a sample:
each place with an error and nearly each with a death, each way, all kinds of datasets and all lanes; `make test-full`
takes all. The conformance tests kill workers of every dataset that they have, too, in any epoch.
"""

import contextlib
import gc
import os
import re
from enum import Enum

import pytest
import ray
import torch

import rayloader
from fault_points import (
    BATCH_SIZE,
    EXIT_LIMIT,
    POISONED,
    STRUCK,
    Calls,
    Faults,
    PlannedError,
    epoch,
    kill,
    make,
    striking_worker,
    table,
    wait_for_exit,
    warned,
)
from inside import await_more, has_started, kill_worker, live_actor_pids, workers_are_idle
from rayloader import DataLoader
from rayloader.epoch.schedule import KILLS
from simulated_device import SimulatedAccelerator

OWN_ACTORS = {"ray_remote_args": {"num_cpus": 0, "memory": 13}}  # no other test's loader shares them
TIMEOUT = 2  # seconds, for workers that hang; no other batch takes so long once its worker runs
START_TIMEOUT = "10"  # seconds, for workers whose process hangs while it starts


class Outcome(Enum):
    """What the user sees of a fault that strikes once."""

    RECOVERED = "nothing but a warning in the log"
    UNSEEN = "nothing"
    ERROR = "his own error, as torch's loader raises it"
    TIMED_OUT = "BatchTimeoutError"


RECOVERED, UNSEEN, ERROR, TIMED_OUT = Outcome
NEVER = None  # this can't happen there

RAISES = ("raise", "MemoryError")
UNPICKLABLE = ("unpicklable result",)
EXITS = ("sys.exit", "KeyboardInterrupt")
CRASHES = ("os._exit", "SIGKILL", "segfault", "killed")
HANGS_AND_IS_RESTARTED = ("hang, restart",)
HANGS = ("hang",)
WAYS = (RAISES, UNPICKLABLE, EXITS, CRASHES, HANGS_AND_IS_RESTARTED, HANGS)
DEATHS = (*EXITS, *CRASHES, *HANGS_AND_IS_RESTARTED)

BOTH = ("map", "iterable")
LANES = {
    "arena": {"arenas": True, **OWN_ACTORS},
    "store": {"arenas": False, **OWN_ACTORS},
    "fork": {"workers": "fork"},
}
# The user's code in a destructor: Python itself passes over what it raises.
TABLE = {
    #                   datasets, raises, unpicklable, exits, crashes, hangs and is restarted, hangs
    "init":            (BOTH, RECOVERED, NEVER, RECOVERED, RECOVERED, NEVER, RECOVERED),
    "unpickling":      (BOTH, ERROR, NEVER, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "worker_init_fn":  (BOTH, ERROR, NEVER, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "__iter__":        (("iterable",), ERROR, NEVER, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "__getitem__":     (("map",), ERROR, ERROR, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "__next__":        (("iterable",), ERROR, ERROR, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "collate_fn":      (BOTH, ERROR, ERROR, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "encode":          (BOTH, ERROR, NEVER, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "between batches": (BOTH, UNSEEN, NEVER, UNSEEN, RECOVERED, RECOVERED, TIMED_OUT),
    "reply":           (BOTH, RECOVERED, NEVER, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "between calls":   (BOTH, RECOVERED, NEVER, RECOVERED, RECOVERED, RECOVERED, TIMED_OUT),
    "first":           (BOTH, NEVER, NEVER, NEVER, RECOVERED, NEVER, NEVER),
    "last":            (BOTH, NEVER, NEVER, NEVER, RECOVERED, NEVER, NEVER),
    "end":             (("iterable",), NEVER, NEVER, NEVER, RECOVERED, NEVER, NEVER),
    "idle":            (BOTH, NEVER, NEVER, NEVER, UNSEEN, NEVER, NEVER),
}  # fmt: skip
EXPECTED = {
    (where, how): outcome
    for where, (_, *outcomes) in TABLE.items()
    for ways, outcome in zip(WAYS, outcomes, strict=True)
    for how in ways
    if outcome is not NEVER and (where != "idle" or how == "killed")  # idle, no code of its own runs
}
OF_ACTORS = ("init", "unpickling", "reply", "between calls", "idle")
ROWS = [
    (where, how, kind, lane)
    for where, how in EXPECTED
    for kind in TABLE[where][0]
    for lane in LANES
    if lane != "fork" or (where not in OF_ACTORS and how != "segfault")  # of which pytest would print a trace
]

# What is poisoned for good, by the names of its places: in the samples, and in what comes before them.
POISONED_BATCH = ("__getitem__", "__next__", "collate_fn", "encode")
POISONED_START = ("worker_init_fn", "__iter__", "unpickling", "init")
POISONED_ROWS = [row for where in POISONED_BATCH for row in ROWS if row[0] == where and row[1] in DEATHS]
POISONED_START_ROWS = [row for where in POISONED_START for row in ROWS if row[0] == where and row[1] in DEATHS]


# In these a worker dies in most of the other tests.
DEATHS_ELSEWHERE = ("collate_fn", "__getitem__", "__next__")


def meetings(row):
    """A death takes the start of a process, and a hang its time: they meet no more than is needed to see each."""
    where, how, kind, lane = row
    expected = EXPECTED[row[:2]]
    if how.startswith("hang"):  # that one lasts until it is killed
        return {how} if expected in (RECOVERED, TIMED_OUT) and where != "init" else set()
    dies = expected is RECOVERED or how in CRASHES
    found = {(where, dies), (how in EXITS, dies), (how, kind), (how, lane), (kind, lane)}
    if lane == "fork":  # which takes little
        return found | {(where, lane, dies)}
    return found - {(place, True) for place in DEATHS_ELSEWHERE} if dies else found | {(where, kind), (where, lane)}


def any_will_do(row):
    return {True}


@pytest.fixture(scope="module")
def striking_actors(ray_session, tmp_path_factory):
    """All actors of these tests have places for faults; two stay warm."""
    faults = Faults(tmp_path_factory.mktemp("faults"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rayloader.actors.pool, "_remote_worker", ray.remote(striking_worker(faults)))
        patch.setattr(rayloader.actors.pool, "UNWANTED_S", 1.0)  # for those that hang
        keeper = DataLoader(range(2), num_workers=2, **OWN_ACTORS)
        assert len(list(keeper)) == 2
        yield faults
        del keeper


@pytest.fixture
def faults(striking_actors):
    wait_for_actors()
    striking_actors.clear()
    yield striking_actors
    striking_actors.clear()


def wait_for_actors():
    """Until none is at a call that the last test has left: of a stream that ends more is asked than is awaited."""
    calls = [actor.handle.hello.remote() for actor in rayloader.actors.pool.get_pool().actors]
    assert ray.wait(calls, num_returns=len(calls), timeout=EXIT_LIMIT)[1] == []


@pytest.fixture(scope="module")
def undisturbed(striking_actors):
    """Two epochs of each kind of dataset."""
    return {kind: [epoch(make(striking_actors, kind, **OWN_ACTORS), seed) for seed in range(2)] for kind in BOTH}


def until_error(loader, kind):
    """What the batches before an error of that type hold, and the error."""
    torch.manual_seed(0)
    batches = []
    with pytest.raises(kind) as caught:
        batches.extend(batch.content() for batch in loader)
    error = caught.value.with_traceback(None)  # its frames hold the iterator
    del caught
    gc.collect()  # torch's way to raise it leaves a cycle with them
    return batches, error


ERRORS = {"raise": PlannedError, "MemoryError": MemoryError, "unpicklable result": TypeError}


def check_users_error(error, how):
    assert type(error) is ERRORS[how]
    worker = re.match(
        rf"Caught {ERRORS[how].__name__} in DataLoader worker process (\d)\.\nOriginal Traceback", str(error)
    )[1]
    assert re.search(rf"batch \d, worker {worker} \(pid \d+ on ", error.__notes__[0])


@pytest.mark.parametrize(("where", "how", "kind", "lane"), list(table(ROWS, meetings)))
def test_a_fault_that_strikes_once(where, how, kind, lane, faults, undisturbed, monkeypatch, caplog):
    expected = EXPECTED[where, how]
    options = {"timeout": TIMEOUT if how.startswith("hang") else 0}
    if how == "hang, restart":
        options["on_timeout"] = "restart"
    if (where, how) == ("init", "hang"):  # then the other process does its work
        monkeypatch.setenv("RAYLOADER_START_TIMEOUT", START_TIMEOUT)
    loader = make(faults, kind, **LANES[lane], **options)
    if where in ("idle", "init"):
        epoch(loader)
        kill(faults.process_of(STRUCK))  # the next epoch needs a new one
    if where != "idle":
        faults.plan(where, how)
    if expected in (RECOVERED, UNSEEN):
        assert epoch(loader) == undisturbed[kind][0]
    elif expected is ERROR:
        batches, error = until_error(loader, ERRORS[how])
        check_users_error(error, how)
    else:
        batches, error = until_error(loader, rayloader.BatchTimeoutError)
    if expected in (ERROR, TIMED_OUT):
        assert batches == undisturbed[kind][0][0][: len(batches)]
    monkeypatch.undo()
    assert epoch(loader, seed=1) == undisturbed[kind][1]
    assert len(faults.struck()) == (where != "idle"), "the fault did not strike"
    assert len(warned(caplog)) == (expected is RECOVERED), warned(caplog)
    if how in DEATHS and (expected is RECOVERED or how in CRASHES):
        wait_for_exit(faults.struck())


def check_died(error, pids):
    """`pids`: of those that may have died last."""
    assert str(error).startswith("DataLoader worker (")
    if "(not started)" not in str(error):
        died = re.match(r"DataLoader worker \(pid\(s\) (\d+)\) exited unexpectedly: worker \d on ", str(error))
        assert int(died[1]) in pids


@pytest.mark.parametrize(("where", "how", "kind", "lane"), list(table(POISONED_ROWS, any_will_do)))
def test_a_batch_that_kills_whoever_builds_it(where, how, kind, lane, faults, undisturbed):
    options = {"timeout": TIMEOUT, "on_timeout": "restart"} if how.startswith("hang") else {}
    loader = make(faults, kind, **LANES[lane], **options)
    faults.plan(where, how, always=True)
    batches, error = until_error(loader, rayloader.WorkerDiedError)
    number = POISONED // BATCH_SIZE
    assert batches == undisturbed[kind][0][0][:number]
    pids = faults.struck()
    # A process that exits says that the batch ended it: two are enough. Else the worker may lose as many in a row as
    # `max_worker_restarts` says, and the row begins anew with each of the worker's batches before this one: what a
    # process has built, and not yet handed over when it dies, the next one must build.
    enough = KILLS if how in EXITS else 1 + loader.max_worker_restarts
    assert enough <= len(set(pids)) <= enough + number // 2 * loader.max_worker_restarts
    check_died(error, pids[-1:])
    assert error.__notes__[0].startswith(f"batch {number}, worker {STRUCK} (pid ")
    if kind == "map":
        assert error.__notes__[0].endswith(f", indices [{POISONED}, {POISONED + 1}]")
    faults.clear()
    assert epoch(loader, seed=1) == undisturbed[kind][1]
    wait_for_exit(pids)


@pytest.mark.parametrize(("where", "how", "kind", "lane"), list(table(POISONED_START_ROWS, any_will_do)))
def test_a_worker_that_dies_whenever_it_starts(where, how, kind, lane, faults, undisturbed, caplog):
    options = {"timeout": TIMEOUT, "on_timeout": "restart"} if how.startswith("hang") else {}
    options |= {"max_worker_restarts": 1, "fresh_processes": where == "init"}
    loader = make(faults, kind, **LANES[lane], **options)
    faults.plan(where, how, always=True)
    batches, error = until_error(loader, rayloader.WorkerDiedError)
    assert batches == undisturbed[kind][0][0][: len(batches)]
    pids = faults.struck()
    strikes_both = where in ("init", "unpickling")
    check_died(error, pids[-2:] if strikes_both else pids[-1:])
    if where in ("worker_init_fn", "__iter__"):  # in one worker only
        assert len(set(pids)) == 2
        assert error.worker_id == STRUCK
        assert len(warned(caplog)) == 1
    faults.clear()
    assert epoch(loader, seed=1) == undisturbed[kind][1]
    # Of two processes that exit at once one ends the epoch. What the other says nobody takes in: it is warm again.
    warm = live_actor_pids() if strikes_both and how in EXITS else set()
    wait_for_exit([pid for pid in pids if pid not in warm])


# ---- programs of their own; their workers are forks unless told otherwise

HANG_LIMIT = 500.0  # seconds; on expiry the loader raises and the test fails


@pytest.fixture
def own_faults(tmp_path):
    folder = tmp_path / "faults"
    folder.mkdir()
    return Faults(folder)


@pytest.fixture
def pipe(tmp_path):
    """A pipe, and a function that lets one who waits to read from it go on."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)  # this waits for nobody
    yield path, lambda: os.write(descriptor, b".")
    os.close(descriptor)


def load(function, length, num_workers=2, **options):
    return DataLoader(
        Calls(function, length),
        None,
        **{"num_workers": num_workers, "workers": "fork", "timeout": HANG_LIMIT, **options},
    )


@pytest.mark.parametrize("kind", BOTH)
def test_without_restarts_a_death_is_the_end_of_the_epoch_and_not_of_the_loader(kind, own_faults, caplog):
    loader = make(own_faults, kind, workers="fork", max_worker_restarts=0)
    undisturbed = epoch(loader)
    own_faults.plan("collate_fn", "SIGKILL")
    batches, error = until_error(loader, rayloader.WorkerDiedError)
    assert re.match(r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly", str(error))
    assert batches == undisturbed[0][: len(batches)]
    assert warned(caplog) == []
    assert epoch(loader) == undisturbed


@pytest.mark.parametrize("kind", BOTH)
def test_the_thread_that_pins_goes_on(kind, own_faults, monkeypatch, caplog):
    accelerator = SimulatedAccelerator().install(monkeypatch, locks=False)
    loader = make(own_faults, kind, workers="fork", pin_memory=True)
    undisturbed = epoch(loader)
    own_faults.plan("collate_fn", "SIGKILL")
    assert epoch(loader) == undisturbed
    assert len(own_faults.struck()) == len(warned(caplog)) == 1
    assert accelerator.pinned


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_workers_that_die_while_an_epoch_is_broken_off_are_not_missed(kind, idle, own_faults):
    """One of them, or both once all that they were given is answered."""

    def epochs(kills):
        loader = make(own_faults, kind, workers="fork", persistent_workers=True)
        found = [epoch(loader)]
        iterator = iter(loader)
        found.append([next(iterator).content() for _ in range(3)])
        for worker_id in range(1 + idle) if kills else ():
            while not has_started(iterator, worker_id) or (idle and worker_id == 0 and not workers_are_idle(iterator)):
                await_more(iterator)
            kill_worker(iterator, worker_id)
        del iterator
        return [*found, epoch(loader), epoch(loader, seed=1)]

    assert epochs(kills=True) == epochs(kills=False)


@pytest.mark.parametrize("in_order", [True, False])
def test_batches_of_live_workers_are_delivered_meanwhile(in_order, own_faults, pipe):
    """Worker 1 dies over sample 3, and its replacement waits in its worker_init_fn."""
    path, let_it_go_on = pipe

    def init(worker_id):
        if worker_id == 1 and own_faults.struck():
            with open(path) as file:
                file.read(1)

    def get(index):
        if index == 3:
            own_faults.strike("sample")
        return index

    own_faults.plan("sample", "SIGKILL")
    iterator = iter(load(get, 24, worker_init_fn=init, prefetch_factor=2, in_order=in_order))
    # In order all before the lost one; otherwise all but what the lost worker may hold.
    found = [next(iterator) for _ in range(3 if in_order else 24 - 2)]
    let_it_go_on()
    found += iterator
    assert (found if in_order else sorted(found)) == list(range(24))


def test_sigterm_is_not_blamed_on_the_batch_as_an_exit_of_its_own_is(own_faults):
    """It comes as from outside, over sample 5, three times."""

    def get(index):
        if index == 5 and len(own_faults.struck()) < 3:
            own_faults.plan("sample", "SIGTERM")
            own_faults.strike("sample")
        return index

    assert list(load(get, 10, num_workers=1, max_worker_restarts=9)) == list(range(10))
    assert len(set(own_faults.struck())) == 3


@pytest.mark.parametrize("workers", ["ray", "fork"])
def test_a_worker_is_dead_though_a_child_of_it_lives(workers, own_faults, pipe, ray_session):
    """The child outlives it, with copies of its descriptors."""
    path, let_it_go_on = pipe

    def get(index):
        if index == 5 and not own_faults.struck():
            for number in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):  # that of the list itself
                    os.dup(int(number))
            if not os.fork():
                with open(path) as file:
                    file.read(1)
                os._exit(0)
            own_faults.strike("sample")
        return index

    own_faults.plan("sample", "SIGKILL")
    assert list(load(get, 10, num_workers=1, workers=workers)) == list(range(10))
    let_it_go_on()
