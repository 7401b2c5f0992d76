"""A script that waits for a batch that does not come, until a signal ends it.

    python script_wait.py FOLDER WORKERS

It prints what it started, for loaders with these `workers`.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import psutil

import rayloader
from latches import Gate


class Waits:
    def __init__(self, folder):
        self.folder = folder
        self.gate = Gate(folder / "gate")
        os.dup(self.gate._closed.fileno())  # keeps it closed to the end, where Python 3.14 warns of a file that is open
        self.gate._closed.close()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index >= 2:
            self.gate.wait()
        return os.getpid()


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it starts in the background ignore it
loader = rayloader.DataLoader(Waits(Path(sys.argv[1])), None, num_workers=1, workers=sys.argv[2])
iterator = iter(loader)
print("workers:", *{next(iterator), next(iterator)})


def tell_when_it_waits(frame, event, function):
    """An interrupt that comes once `tell` has printed finds `next` below, which has begun to wait."""
    if event == "c_call" and function.__name__ == "poll" and frame.f_globals["__name__"].startswith("rayloader."):
        sys.setprofile(None)
        threading.Thread(target=tell, args=[threading.get_ident()], daemon=True).start()


def tell(waiting):
    """Prints when that thread has left this file: an interrupt would find it here."""
    while sys._current_frames()[waiting].f_code.co_filename in (__file__, threading.__file__):
        os.sched_yield()
    print("all:", *(process.pid for process in psutil.Process().children(recursive=True)), flush=True)


sys.setprofile(tell_when_it_waits)
next(iterator)
