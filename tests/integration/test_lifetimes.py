"""How long actors live, and that they always come back: after an interrupt, a fork, a collection at a bad moment."""

import contextlib
import gc
import itertools
import logging
import os
import threading
import time
import weakref
from types import SimpleNamespace

import psutil
import pytest
import ray

import rayloader.actors.pool
from inside import end_idle_actors_but, live_actor_pids, lock_of
from interrupts import each_point
from pretended import pretend_accelerator
from probes import load
from rayloader import DataLoader, WorkerStartError
from rayloader.actors.actor import ActorState, Lease, wait_for
from rayloader.actors.pool import get_pool

pytestmark = pytest.mark.usefixtures("ray_session")

EXIT_LIMIT = 500.0  # seconds for a process or thread to end; on expiry the test fails
START_LIMIT = 500.0  # for a process to run
_numbers = itertools.count(100)


@pytest.fixture
def own():
    """Options of actors that serve this test alone."""
    return {"ray_remote_args": {"num_cpus": 0, "memory": next(_numbers)}}


@pytest.fixture(scope="module")
def shared(ray_session):
    """Options of one actor that is warm for several tests here, which must find it warm and leave it so."""
    options = {"ray_remote_args": {"num_cpus": 0, "memory": next(_numbers)}}
    keeper = load(pid, 1, **options)
    list(keeper)
    yield options
    del keeper


def pid(_):
    return os.getpid()


def spare(own):
    """The idle actors of these options."""
    memory = own["ray_remote_args"]["memory"]
    return [a for a in get_pool().actors if a.options.get("memory") == memory and a.state is ActorState.IDLE]


@pytest.fixture
def patient(monkeypatch):
    """The next loader finds processes warm however long they take to stop."""
    monkeypatch.setattr(rayloader.actors.pool, "UNWANTED_S", EXIT_LIMIT)


# ---- warm for the next loader


def test_a_new_loader_finds_the_processes_of_one_that_refers_to_itself(own, patient):
    """Though the garbage collector has not run yet: the start of other processes takes longer than its run."""
    seen = []
    gc.disable()
    try:
        for _ in range(3):
            loader = load(pid, 1, persistent_workers=True, **own)
            loader.itself = loader
            seen += set(loader)
            del loader
    finally:
        gc.enable()
    assert len(seen) == 3
    assert len(set(seen)) == 1


def test_loaders_find_the_processes_of_others_until_the_grace_is_over(own, patient, monkeypatch, caplog):
    """Then the processes end, though nobody calls the library again, and a loader that lives could use them."""
    seen = [frozenset(load(pid, 1, **own)) for _ in range(10)]
    assert len(seen[0]) == 1
    assert set(seen) == {seen[0]}
    processes = [psutil.Process(number) for number in seen[0]]
    get_pool().wait()  # the long one counts for what has come back
    monkeypatch.setattr(rayloader.actors.pool, "GRACE_S", 0.5)
    caplog.set_level(logging.INFO, "rayloader")
    loader = load(pid, 1, **own)
    assert set(loader) == seen[0]
    assert psutil.wait_procs(processes, EXIT_LIMIT)[1] == []
    assert "rayloader: 1 worker processes end, which have been idle for 0.5 s" in caplog.messages
    assert len(list(loader)) == 1


# ---- slow is not dead


@pytest.fixture
def at_the_notice(monkeypatch):
    """What a test adds to this is called when `iter()` has begun to wait for late processes."""
    calls = []
    monkeypatch.setattr(rayloader.actors.pool, "LATE_NOTICE_S", 0.0)

    class Handler(logging.Handler):
        def emit(self, record):
            if "which have not answered for 0 s" in record.getMessage():
                for call in calls:
                    call()

    handler = Handler()
    logging.getLogger("rayloader").addHandler(handler)
    yield calls
    logging.getLogger("rayloader").removeHandler(handler)


@pytest.fixture
def starved():
    """Keeps a process from getting any CPU time until the test ends."""
    processes = []

    def starve(number):
        processes.append(psutil.Process(number))
        processes[-1].suspend()
        return processes[-1]

    yield starve
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@pytest.mark.parametrize("batches", [4, 1], ids=["after an epoch", "after a break"])
def test_a_process_that_gets_no_time_is_waited_for_and_works_on(own, batches, starved, at_the_notice):
    loader = load(pid, 4, num_workers=1, **own)
    iterator = iter(loader)
    seen = {next(iterator) for _ in range(batches)}
    (process,) = map(starved, seen)
    at_the_notice.append(process.resume)
    del iterator
    assert set(loader) == seen
    assert at_the_notice


def test_a_process_that_does_not_answer_for_long_is_replaced(own, starved, monkeypatch, caplog):
    loader = load(pid, 2, num_workers=1, **own)
    (before,) = set(loader)
    get_pool().wait()
    wait_for([actor.stopped.ref for actor in spare(own)], EXIT_LIMIT)  # it has done that, and is late with the next
    process = starved(before)
    monkeypatch.setattr(rayloader.actors.pool, "GIVE_UP_S", 0.1)
    assert before not in set(loader)
    assert psutil.wait_procs([process], EXIT_LIMIT)[1] == []
    said = "a warm worker process is ended, which has not answered for 0.1 s; a new one takes its place"
    assert [said in message for message in caplog.messages].count(True) == 1


def test_a_process_that_has_died_is_replaced_without_waiting(own, caplog):
    loader = load(pid, 2, num_workers=1, **own)
    (before,) = set(loader)
    psutil.Process(before).kill()
    assert before not in set(loader)
    assert caplog.messages == []


# ---- no more than are needed, at once


@pytest.fixture
def made(monkeypatch):
    """The actors that were created since."""
    make, actors = rayloader.actors.pool.Pool._make, []

    def noted(pool, *arguments):
        actors.append(make(pool, *arguments))
        return actors[-1]

    monkeypatch.setattr(rayloader.actors.pool.Pool, "_make", noted)
    return actors


def one_after_the_other(loaders, batches):
    """As Lightning validates: each iterator is kept until the next one has been made."""
    for loader in loaders:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)


def test_the_loaders_of_a_trainer_share_as_few_processes_as_are_at_work_at_once(own, patient, made):
    """Two to train and two to validate, as Lightning iterates: it counts batches, and asks for none after the last."""
    training, validation = ([load(pid, 4, num_workers=2, **own) for _ in range(2)] for _ in range(2))
    one_after_the_other(validation, 1)  # its check before the training
    for _ in range(2):
        iterators = [iter(loader) for loader in training]
        for _ in range(4):
            for iterator in iterators:
                next(iterator)
        one_after_the_other(validation, 4)
    assert len(made) == 4


def test_several_iterators_ask_for_their_processes_before_any_runs(own, made):
    iterators = [iter(load(pid, 2, num_workers=2, **own)) for _ in range(2)]
    assert [actor.address for actor in made] == [None] * 4
    assert len({number for iterator in iterators for number in iterator}) == 4


def test_processes_of_an_iterator_that_ended_before_they_ran_are_the_next_ones(own, made):
    loader = load(pid, 4, num_workers=2, **own)
    for _ in range(3):
        iter(loader)
    assert len(set(loader)) == 2
    assert len(made) == 2


# ---- nobody has actors for ever


def lent(own):
    get_pool().wait()
    memory = own["ray_remote_args"]["memory"]
    return [a for a in get_pool().actors if a.options.get("memory") == memory and a.state is ActorState.LENT]


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=pytest.mark.full)])
def test_an_interrupt_at_any_point_of_iter_leaves_no_actor_lent(shared, stride):
    loader = load(pid, 4, num_workers=1, **shared)
    seen = set(loader)
    for interrupt in each_point(stride):
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            iter(loader)
        if lent(shared):
            gc.collect()  # the exception and what it refers to may be a cycle
        assert lent(shared) == [], interrupt.where
    assert interrupt.number > 60
    assert set(loader) == seen, "the interrupts have cost no process"


class NoProcess:
    """In place of an actor's handle: has no process, and is answered at once."""

    hello = stop = end = SimpleNamespace(remote=lambda *_: ray.put(None))


def test_an_interrupt_at_any_point_of_the_creation_leaves_no_actor_lent(own, monkeypatch):
    """An actor that was created is the pool's, or nobody's any more: Ray ends one whose handle is gone."""
    made = weakref.WeakSet()

    class Remote:
        @staticmethod
        def options(**_):
            return SimpleNamespace(remote=create)

    def create():
        handle = NoProcess()
        made.add(handle)
        return handle

    monkeypatch.setattr(rayloader.actors.pool, "_remote_worker", Remote)
    pool = get_pool()
    for interrupt in each_point():
        lease = pool.begin_lease()
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            pool.lend(lease, own["ray_remote_args"], 2, fresh=True)
        del lease
        if lent(own):
            gc.collect()
        assert lent(own) == [], interrupt.where
        pool.wait()
        assert not made - {actor.handle for actor in pool.actors}, interrupt.where
        made.clear()
        end_idle_actors_but({actor.key for actor in pool.actors if not isinstance(actor.handle, NoProcess)})
        pool.wait()
    assert interrupt.number > 20


# ---- finalizers


def test_a_finalizer_under_the_pools_lock_while_the_pin_thread_needs_them(shared, monkeypatch):
    lock, pinning, held = lock_of(get_pool()), threading.Event(), threading.Event()

    def pin(tensor):
        pinning.set()
        held.wait(EXIT_LIMIT)
        with lock:
            return tensor

    pretend_accelerator(monkeypatch, pin)
    cycle = [DataLoader(range(8), num_workers=1, pin_memory=True, **shared)]
    cycle += [iter(cycle[0]), cycle]
    boxes = [cycle]
    del cycle
    assert pinning.wait(EXIT_LIMIT)

    def collect():
        with lock:
            held.set()
            boxes.clear()
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(EXIT_LIMIT)
    assert not thread.is_alive()
    assert lent(shared) == []


def test_an_iterator_that_is_dropped_by_another_thread_gives_its_actors_back(shared):
    loader = load(pid, 8, num_workers=1, **shared)
    boxes = [iter(loader)]
    seen = {next(boxes[0])}
    thread = threading.Thread(target=boxes.clear)
    thread.start()
    thread.join()
    assert lent(shared) == []
    assert set(loader) == seen


# ---- the limit of starting


def test_the_start_of_any_actor_counts_for_all_that_wait_for_theirs(own):
    """As when ten loaders start at once on a small machine: each waits for its turn."""
    pool = get_pool()
    keeper = load(pid, 1, **own)
    assert len(list(keeper)) == 1
    (running,) = [actor for actor in pool.actors if actor.options.get("memory") == own["ray_remote_args"]["memory"]]
    nowhere = {"num_cpus": 0, "resources": {"nowhere": 1}}
    wait_for([actor.hello.ref for actor in pool.actors], START_LIMIT)
    live_actor_pids()  # notes the starts of all: none is news below
    lease = Lease(print)
    (pending,) = pool.lend(lease, nowhere, 1, fresh=True)
    pending.created_at -= 1000
    for actor in pool.actors:
        if actor is not pending:
            actor.started_at = pending.created_at
    with pytest.raises(WorkerStartError, match="1 of 1 DataLoader workers"):
        pool.check_pending([pending], 1)
    running.started_at = time.monotonic()
    pool.check_pending([pending], 1)
    pool.kill(pending)
    pool.wait()


@ray.remote(num_cpus=0)
class Trainer:
    """A process of the same Ray job, as Ray Train and Ray Tune start them."""

    def begin(self):
        self.iterator = iter(DataLoader(range(4), None, num_workers=1))
        return next(self.iterator)


def test_trainers_of_one_job_have_workers_at_the_same_time():
    trainers = [Trainer.remote() for _ in range(2)]
    assert ray.get([trainer.begin.remote() for trainer in trainers]) == [0, 0]
    for trainer in trainers:
        ray.kill(trainer)
