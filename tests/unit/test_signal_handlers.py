"""Signal handlers are those that the program has set, also while Ray was being started; see actors/signals.py."""

import pytest

import programs

# The function `abort` represents the handler that Ray sets below Python: it ends the process if it is still there. Each
# case is a forked child, in which SIGTERM first does something else than what the program sets meanwhile.
PROGRAM = """
import ctypes, os, signal, sys, threading

signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
from rayloader.actors.signals import SignalHandlers

libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
heard = []
HANDLERS = {"python": lambda *_: heard.append(1), "ignored": signal.SIG_IGN, "default": signal.SIG_DFL}

def case(name, program_first):
    signal.signal(signal.SIGTERM, signal.SIG_DFL if name == "ignored" else signal.SIG_IGN)
    before = SignalHandlers()
    if program_first:
        signal.signal(signal.SIGTERM, HANDLERS[name])
    libc.signal(signal.SIGTERM, ctypes.cast(libc.abort, ctypes.c_void_p))
    if not program_first:
        signal.signal(signal.SIGTERM, HANDLERS[name])
    thread = threading.Thread(target=before.restore)  # as Ray is started by a thread
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(1 if heard else 0)

for name in HANDLERS:
    for program_first in (True, False):
        if (child := os.fork()) == 0:
            case(name, program_first)
        print(name, program_first, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("interrupt", ["default_int_handler", "SIG_IGN"])
def test_a_handler_that_is_set_while_ray_starts_stays(interrupt):
    """Also in a program in the background, which ignores SIGINT: at first it has no handler in Python."""
    done = programs.run(PROGRAM, interrupt)
    outcomes = {"python": 1, "ignored": 0, "default": -15}
    expected = [f"{name} {first} {outcome}" for name, outcome in outcomes.items() for first in (True, False)]
    assert done.stdout.splitlines() == expected, done.stderr
