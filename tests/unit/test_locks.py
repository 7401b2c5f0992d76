"""Our locks are free after a signal handler has raised at any point of a `with` on them, and are all of one maker."""

import functools
import itertools
import re
import threading
from pathlib import Path

import pytest

import rayloader
from handlers import Interrupt, interrupted
from rayloader import interrupts
from rayloader.interrupts import GuardedLock, new_lock

PACKAGE = Path(rayloader.__file__).parent


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
def test_a_lock_is_held_within_the_block_and_only_a_reentrant_one_may_be_taken_twice(make):
    lock = make()
    with lock:
        assert not is_free(lock)
        again = lock.acquire(blocking=False)
        assert again == hasattr(lock.release.__self__, "_is_owned")
        if again:
            lock.release()
    assert is_free(lock)
    with pytest.raises(Interrupt), lock:
        raise Interrupt
    assert is_free(lock)


@makers
def test_a_lock_is_free_after_an_interrupt_at_any_point_where_python_may_run_a_handler(make):
    for number in itertools.count():
        lock = make()
        fired = interrupted({__file__, interrupts.__file__}, number, functools.partial(use, lock))
        assert is_free(lock), number
        if not fired:
            break


def test_all_locks_are_of_new_lock():
    """A `with` on any other one may leave it held on Python 3.14."""
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    bare = r"threading\.(R?Lock|Condition|Event|Semaphore)\(|allocate_lock|queue\.(Lifo|Priority)?Queue\("
    assert {name for name, source in sources.items() if re.search(bare, source)} == {"interrupts.py"}
