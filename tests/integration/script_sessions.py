"""Ray is shut down under live iterators, by its user and by rayloader; nothing of ours is left; all begins anew.

python script_sessions.py [users]

With `users` it goes on with a Ray that its user has started, and that rayloader must leave running.
"""

import gc
import os
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import psutil
import pytest
import ray

import rayloader
from latches import Gate, Mail
from rayloader import DataLoader, RaySessionError


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
    return names + [name for name in map(link, os.listdir("/proc/self/fd")) if "rayloader" in name]


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
    """Waits in next() for a batch that does not come."""

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
        self.join(30)
        self.mail.close()
        assert isinstance(self.error, RaySessionError), self.error


class Waits(Pids):
    def __init__(self, gate, mail):
        self.gate, self.mail = gate, mail

    def __getitem__(self, index):
        self.mail.send(index)
        self.gate.wait()


loader = DataLoader(Pids(), None, num_workers=1)
folders = [Path(tempfile.mkdtemp()) for _ in range(2)]

# Ray started by us: shutdown() ends the workers and Ray; whoever waits in next() is told.
iterator, processes = use(loader)
user = User(folders[0])
rayloader.shutdown()
rayloader.shutdown()
user.check_told()
del user
gc.collect()  # its error has a traceback, whose frames have it
assert not ray.is_initialized()
check_gone(processes)
check_dead(iterator)
assert ours() == []

# The user shuts Ray down, under persistent workers and others; an error does not start it again, the next iter() does.
iterator, processes = use(loader)
assert ray.is_initialized()
persistent = DataLoader(Pids(), None, num_workers=1, persistent_workers=True)
again, more = use(persistent)
user = User(folders[1])
ray.shutdown()
user.check_told()
del user
gc.collect()  # its error has a traceback, whose frames have it
check_gone(processes + more)
check_dead(iterator)
check_dead(again)
assert not ray.is_initialized()

if "users" in sys.argv:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(address="local", num_cpus=2, include_dashboard=False)
    again, processes = use(persistent)
    rayloader.shutdown()
    check_gone(processes)
    check_dead(again)
    assert ray.is_initialized()
    assert len({*loader}) == 1
del loader, persistent, iterator, again
gc.collect()
rayloader.shutdown()
assert ours() == []
assert ray.is_initialized() == ("users" in sys.argv)
for folder in folders:
    shutil.rmtree(folder)
print("the end")
