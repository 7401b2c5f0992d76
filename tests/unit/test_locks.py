"""Our locks are free after a signal handler has raised at any point of a `with` on them, and are all of one maker."""

import re
import signal
import sys
import threading
from pathlib import Path

import pytest

import rayloader
from rayloader.interrupts import DaemonThread, GuardedLock, new_lock

PACKAGE = Path(rayloader.__file__).parent
MANY = 300  # interrupts; on Python 3.14 more than one in three finds a bare lock held


class Alarm(BaseException):
    """What a handler raises."""


def use(lock):
    with lock:
        pass
    with lock:
        pass


def is_free(lock):
    bare = lock.release.__self__
    return not (bare._is_owned() if hasattr(bare, "_is_owned") else bare.locked())


MAKERS = {
    "reentrant": new_lock,
    "not reentrant": lambda: new_lock(reentrant=False),
    "reentrant, as on 3.14": lambda: GuardedLock(threading.RLock()),
    "not reentrant, as on 3.14": lambda: GuardedLock(threading.Lock()),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@makers
def test_a_lock_is_held_within_the_block_and_free_after_it(make):
    lock = make()
    with lock:
        assert not is_free(lock)
    assert is_free(lock)
    with pytest.raises(Alarm), lock:
        raise Alarm
    assert is_free(lock)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_thread_may_take_only_a_reentrant_lock_twice(reentrant):
    for lock in new_lock(reentrant=reentrant), GuardedLock(new_lock(reentrant=reentrant)):
        with lock:
            assert lock.acquire(blocking=False) == reentrant
            if reentrant:
                lock.release()
        assert is_free(lock)


@makers
def test_a_lock_is_free_after_an_interrupt_at_any_point_where_python_may_run_a_handler(make):
    for number in range(1, 100):
        lock, left = make(), [number]

        def interrupt(frame, event, argument, left=left):
            if event in ("call", "c_return") and argument is not sys.setprofile:
                left[0] -= 1
                if not left[0]:
                    sys.setprofile(None)
                    raise Alarm

        try:
            sys.setprofile(interrupt)
            use(lock)
        except Alarm:
            pass
        finally:
            sys.setprofile(None)
        assert is_free(lock), number
        if left[0] > 0:  # there are no further points
            return
    raise AssertionError("no end")


@makers
def test_a_lock_is_free_after_a_signal_whenever_it_comes(make):
    lock = make()

    def handler(*_):
        raise Alarm

    before, raised = signal.signal(signal.SIGALRM, handler), 0
    try:
        for number in range(MANY):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + number % 7))
                for _ in range(100_000):  # not for ever: Python drops what is raised while it runs a finalizer
                    use(lock)
            except Alarm:
                raised += 1
            assert is_free(lock), number
        assert raised
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_all_locks_are_of_new_lock():
    """A `with` on any other one may leave it held on Python 3.14."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    bare = r"threading\.(R?Lock|Condition|Event|Semaphore)\(|allocate_lock|queue\.(Lifo|Priority)?Queue\("
    assert {name for name, source in sources.items() if re.search(bare, source)} == {"interrupts.py"}


@pytest.mark.parametrize("final", [False, True], ids=["as this Python", "as Python 3.13 and 3.14"])
def test_a_thread_that_could_not_be_started_can_be_started_later(monkeypatch, final):
    failed, start = [], threading.Thread.start

    def failing_start(self):
        if final and self._started in failed:  # the constructor makes it
            raise RuntimeError("thread already started")
        if not failed:
            failed.append(self._started)
            raise RuntimeError("can't start new thread")
        start(self)

    done = []
    monkeypatch.setattr(threading.Thread, "start", failing_start)
    thread = DaemonThread(lambda: done.append(True), "rayloader-test")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    thread.start()
    thread.join()
    assert done
