"""Ray is shut down under live iterators, by its user and by rayloader; nothing of ours is left; all begins anew.

python script_sessions.py [users]

With `users` it goes on with a Ray that its user has started, and that rayloader must leave running.
"""

import functools
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
import torch

sys.path.append(str(Path(__file__).parents[1]))

import rayloader
from latches import Gate, Mail
from rayloader import RaySessionError
from simulated_device import SimulatedAccelerator

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

    TAKES = 2  # batches

    def __init__(self, folder, pin_memory=False):
        super().__init__()
        self.gate, self.mail, self.error = Gate(folder / "gate"), Mail(folder / "mail"), None
        self.batches, self.took = [], threading.Semaphore(0)
        self.loader = DataLoader(Waits(self.gate, self.mail), None, num_workers=1, pin_memory=pin_memory)
        self.iterator = iter(self.loader)
        self.start()
        self.mail.receive()
        assert all(self.took.acquire(timeout=60) for _ in range(self.TAKES))

    def run(self):
        try:
            for batch in self.iterator:
                self.batches.append(batch.item())
                self.took.release()
        except Exception as error:
            self.error = error

    def check_told(self):
        self.join(120)
        self.mail.close()
        assert isinstance(self.error, RaySessionError), self.error
        assert self.batches == list(range(self.TAKES))
        state = self.loader.state_dict()
        assert (state["position"]["finished"], state["position"]["next_task"]) == (False, self.TAKES)
        return state


class Waits(Pids):
    def __init__(self, gate, mail):
        self.gate, self.mail = gate, mail

    def __getitem__(self, index):
        if index == User.TAKES:
            self.mail.send(index)
            self.gate.wait()
        return torch.tensor(index)


class ShutsDown(Pids):
    """Ends Ray when it is pickled for the second time: its workers are warm then."""

    times = 0

    def __getstate__(self):
        ShutsDown.times += 1
        if ShutsDown.times == 2:
            ray.shutdown()
        return {}


loader = DataLoader(Pids(), None, num_workers=1)
folders = [Path(tempfile.mkdtemp()) for _ in range(3)]

# Ray started by us: shutdown() ends the workers and Ray; whoever waits in next() is told, whether the batches are
# pinned or not, and the states say what was taken.
iterator, processes = use(loader)
with pytest.MonkeyPatch.context() as monkeypatch:
    accelerator = SimulatedAccelerator().install(monkeypatch, locks=False)
    users = [User(folders[0]), User(folders[1], pin_memory=True)]
    rayloader.shutdown()
    rayloader.shutdown()
    states = [user.check_told() for user in users]
assert accelerator.pinned == User.TAKES
del users
gc.collect()  # their errors have tracebacks, whose frames have them
assert not ray.is_initialized()
check_gone(processes)
check_dead(iterator)
assert ours() == []
for state in states:
    resumed = DataLoader([*map(torch.tensor, range(len(Pids())))], None, num_workers=1)
    resumed.load_state_dict(state)
    assert [batch.item() for batch in resumed] == [*range(User.TAKES, len(Pids()))]
del resumed

# The user shuts Ray down, under persistent workers and others; an error does not start it again, the next iter() does.
iterator, processes = use(loader)
assert ray.is_initialized()
persistent = DataLoader(Pids(), None, num_workers=1, persistent_workers=True)
again, more = use(persistent)
user = User(folders[2])
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
del loader, persistent, iterator, again, shuts_down
gc.collect()
rayloader.shutdown()
assert ours() == []
assert ray.is_initialized() == ("users" in sys.argv)
for folder in folders:
    shutil.rmtree(folder)
print("the end")
