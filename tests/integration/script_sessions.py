"""Ray is shut down under live iterators, by its user and by rayloader; nothing of ours is left; all begins anew.

python script_sessions.py
"""

import functools
import gc
import os
import shutil
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import ray

import rayloader
from latches import Gate, Mail
from rayloader import RaySessionError

DataLoader = functools.partial(rayloader.DataLoader, workers="ray")


class Pids:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return os.getpid()


def check_dead(iterator):
    with pytest.raises(RaySessionError, match=r"call iter\(\) on the loader again"):
        next(iterator)


def check_gone(processes):
    assert psutil.wait_procs(processes, 30)[1] == []


def ours():
    """Threads and memory files of ours, and descriptors of any kind but Ray's (which come and go with it)."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("rayloader-")]
    open_files = map(link, os.listdir("/proc/self/fd"))
    return names + [name for name in open_files if "rayloader" in name and "/session_" not in name]


def link(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def use(loader):
    """A live iterator and its worker processes."""
    iterator = iter(loader)
    return iterator, [psutil.Process(pid) for pid in {next(iterator), next(iterator)}]


class User(threading.Thread):
    """Takes some batches and waits in next() for one that does not come."""

    def __init__(self, folder):
        super().__init__()
        self.gate, self.mail, self.error = Gate(folder / "gate"), Mail(folder / "mail"), None
        self.iterator = iter(DataLoader(Waits(self.gate, self.mail), None, num_workers=1))
        self.start()
        self.mail.receive()

    def run(self):
        try:
            list(self.iterator)
        except Exception as error:
            self.error = error

    def check_told(self):
        self.join(120)
        self.mail.close()
        assert isinstance(self.error, RaySessionError), self.error


class Waits(Pids):
    def __init__(self, gate, mail):
        self.gate, self.mail = gate, mail

    def __getitem__(self, index):
        if index == 2:
            self.mail.send(index)
            self.gate.wait()
        return index


class ShutsDown(Pids):
    """Ends Ray when it is pickled for the second time: its workers are warm then."""

    times = 0

    def __getstate__(self):
        ShutsDown.times += 1
        if ShutsDown.times == 2:
            ray.shutdown()
        return {}


loader = DataLoader(Pids(), None, num_workers=1)
folder = Path(tempfile.mkdtemp())

# Ray started by us: shutdown() ends the workers and Ray. Of whoever waits in next() meanwhile see test_closing.py.
iterator, processes = use(loader)
rayloader.shutdown()
rayloader.shutdown()
assert not ray.is_initialized()
check_gone(processes)
check_dead(iterator)
assert ours() == []

# The user shuts Ray down, under persistent workers and others; an error does not start it again, the next iter() does.
iterator, processes = use(loader)
assert ray.is_initialized()
persistent = DataLoader(Pids(), None, num_workers=1, persistent_workers=True)
again, more = use(persistent)
user = User(folder)
ray.shutdown()
user.check_told()
del user
gc.collect()  # its error has a traceback, whose frames have it
check_gone(processes + more)
check_dead(iterator)
check_dead(again)
assert not ray.is_initialized()

# And while iter() pickles the dataset for warm workers: no call of Ray's starts another one.
shuts_down = DataLoader(ShutsDown(), None, num_workers=1)
assert len({*shuts_down}) == 1
with pytest.raises(RaySessionError, match=r"call iter\(\) on the loader again"):
    iter(shuts_down)
assert not ray.is_initialized()

del loader, persistent, iterator, again, shuts_down
gc.collect()
rayloader.shutdown()
assert ours() == []
assert not ray.is_initialized()
shutil.rmtree(folder)
print("the end")
