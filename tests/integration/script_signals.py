"""A script with signal handlers of its own, which first iterates in a thread that ends.

    python script_signals.py FOLDER

Its handlers must be as they were after Ray was started, after it was used and after it was shut down; and the Ray that
the thread had started must live on. Then it does without a handler for SIGTERM, starts Ray again, prints what it has
started, and waits for a batch that does not come, until SIGTERM ends it.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

import psutil

import rayloader
from latches import Gate

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM]
heard = []


def handler(number, frame):
    heard.append(number)


for number in SIGNALS:
    signal.signal(number, handler)
faulthandler.enable()  # handlers that Python does not know of
libc = ctypes.CDLL(None)


def actions():
    """What Python does at each signal, and what the kernel does: the first field of `struct sigaction`."""
    found = {}
    for number in signal.valid_signals():
        libc.sigaction(number, None, action := ctypes.create_string_buffer(512))
        found[number] = signal.getsignal(number), action.raw[:8]
    return found


before = actions()


class Waits:
    def __init__(self, folder):
        self.gate = Gate(folder / "gate")

    def __len__(self):
        return 2

    def __getitem__(self, index):
        if index:
            self.gate.wait()
        return index


def check(when, number=signal.SIGTERM):
    assert actions() == before, when
    heard.clear()
    os.kill(os.getpid(), number)
    assert heard == [number], when


loader = rayloader.DataLoader(range(6), None, num_workers=1, workers="ray")
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
signal.signal(signal.SIGTERM, signal.SIG_DFL)
before = actions()
iterator = iter(rayloader.DataLoader(Waits(Path(sys.argv[1])), None, num_workers=1, workers="ray"))
assert next(iterator) == 0
check("started again", signal.SIGUSR1)
print("all:", *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)
next(iterator)
