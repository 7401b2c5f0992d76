"""A script with signal handlers of its own, which first iterates in a thread that ends.

    python script_signals.py

Its handlers must be as they were after Ray was started, after it was used and after it was shut down; and the Ray that
the thread had started must live on.
"""

import faulthandler
import os
import signal
import sys
import threading

import rayloader
from rayloader.signals import SignalHandlers

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM]
heard = []


def handler(number, frame):
    heard.append(number)


for number in SIGNALS:
    signal.signal(number, handler)
faulthandler.enable()  # handlers that Python does not know of
before = SignalHandlers()


def in_kernel(handlers):
    """Addresses of the handlers: the first field of `struct sigaction`."""
    return {number: action[:8] for number, action in handlers._in_kernel.items()}


def check(when):
    now = SignalHandlers()
    assert now._in_python == before._in_python, when
    assert in_kernel(now) == in_kernel(before), when
    heard.clear()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM], when


loader = rayloader.DataLoader(range(6), None, num_workers=1)
thread = threading.Thread(target=lambda: list(loader), name="first")
thread.start()
thread.join()
check("Ray was started")
batches = [int(batch) for batch in loader]
assert batches == list(range(6)), batches
check("used")
rayloader.shutdown()
check("shut down")
assert not [thread for thread in threading.enumerate() if thread.name.startswith("rayloader-")]
assert sorted(map(int, loader)) == list(range(6))
check("started again")
print("the end")
sys.stdout.flush()
