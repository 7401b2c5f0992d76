"""The thread that ends what finalizers leave behind, where a signal handler interrupts whoever waits for it."""

import functools
import itertools
import sys
import threading

import pytest

from rayloader import bell
from rayloader.driver import janitor as module
from rayloader.driver.janitor import Janitor

FILES = {threading.__file__, bell.__file__, module.__file__}
HANG_LIMIT = 60.0  # seconds; on expiry the test fails


class Interrupt(Exception):
    """Of a signal handler."""


def interrupted(number, function):
    """Calls it, with an exception as of a signal handler at the given one of the moments at which one may run.

    Returns whether there were so many.
    """
    left = [number]

    def profile(frame, event, _):
        if event in ("call", "c_return") and frame.f_code.co_filename in FILES:
            left[0] -= 1
            if left[0] < 0:
                sys.setprofile(None)
                raise Interrupt

    sys.setprofile(profile)
    try:
        function()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def use(janitor, done):
    """As the next one who waits for it."""
    janitor.start()
    janitor.do(lambda: janitor.do(lambda: done.append(threading.current_thread().name)))
    janitor.end()


@pytest.mark.parametrize("method", ["wait", "start"])
def test_an_interrupt_at_any_moment_of_a_wait_hangs_no_later_one(method):
    for number in itertools.count():
        janitor = Janitor(lambda: None)
        janitor.start()
        janitor.wait()
        fired = interrupted(number, getattr(janitor, method))
        done = []
        user = threading.Thread(target=use, args=(janitor, done), daemon=True)
        user.start()
        user.join(HANG_LIMIT)
        assert done == ["rayloader-janitor"], number
        assert not user.is_alive(), number
        assert "rayloader-janitor" not in [thread.name for thread in threading.enumerate()], number
        if not fired:
            break
    assert number > 1


def test_an_interrupted_join_may_be_called_again():
    for number in itertools.count():
        go = bell.Bell()
        thread = bell.DaemonThread(functools.partial(go.wait, HANG_LIMIT), "waits")
        thread.start()
        assert thread.is_alive()
        go.ring()
        fired = interrupted(number, thread.join)
        thread.join()
        assert not thread.is_alive(), number
        assert thread not in threading.enumerate(), number
        if not fired:
            break
    assert number > 1
