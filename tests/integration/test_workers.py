"""Inside a worker: what user code finds there, and what it leaves behind."""

import os
import socket
import sys
import threading

import pytest
import ray
import torch
from torch.utils.data import default_collate, get_worker_info

from probes import Calls, in_each_worker, load
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")


# ---- in which thread


class Threads:
    """Notes in which thread each piece of the user's code runs."""

    def __init__(self):
        self.seen = []

    def note(self, *_):
        self.seen.append((os.getpid(), threading.get_ident(), threading.current_thread() is threading.main_thread()))

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.note()
        return index

    def __setstate__(self, state):
        self.seen = state["seen"]
        self.note()

    def collate(self, samples):
        self.note()
        return list(self.seen)


def test_all_user_code_runs_in_one_and_the_same_thread_the_main_one():
    dataset = Threads()
    loader = DataLoader(dataset, 2, num_workers=1, collate_fn=dataset.collate, worker_init_fn=dataset.note)
    *_, seen = loader
    assert len(seen) == 8  # unpickled, worker_init_fn, four samples, two batches
    assert len(set(seen)) == 1
    pid, _, is_main = seen[0]
    assert pid != os.getpid()
    assert is_main


# ---- what a worker process has


def test_a_module_that_pytest_put_on_the_path_is_imported_not_copied():
    module = Calls.__module__
    assert in_each_worker(lambda index: (Calls.__module__, sys.modules["probes"].__name__)) == [(module, module)] * 2
    (dataset_class,) = in_each_worker(lambda index: type(get_worker_info().dataset), 1)
    assert dataset_class is Calls


# ---- what is left behind


def test_a_warm_process_is_as_user_code_has_left_it_and_a_fresh_one_is_not():
    def leave(index):
        return os.environ.setdefault("RAYLOADER_TEST_LEFT", str(os.getpid())), os.getpid()

    own = {"ray_remote_args": {"num_cpus": 0, "memory": 1}}  # this actor serves no other test
    warm, fresh = load(leave, 1, **own), load(leave, 1, fresh_processes=True, **own)
    ((left, pid),) = {*warm, *warm}
    assert left == str(pid)
    assert all(left == str(pid) for left, pid in [*fresh, *fresh])


def test_what_a_module_sets_as_it_is_imported_holds_in_each_epoch(tmp_path, monkeypatch):
    """It is imported once in a warm process."""
    source = "import socket\nsocket.setdefaulttimeout(7.0)\ndef get(index):\n    return socket.getdefaulttimeout()\n"
    (tmp_path / "sets_a_timeout.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import sets_a_timeout

    socket.setdefaulttimeout(None)  # for the other tests
    loader = load(sets_a_timeout.get, 1)
    assert [*loader, *loader] == [7.0, 7.0]


def test_the_users_own_calls_of_default_collate_make_no_shared_memory():
    def collate(index):
        batch = default_collate([{"a": torch.arange(1000)}, {"a": torch.arange(1000)}])["a"]
        with open("/proc/self/maps") as maps:
            shared = [line for line in maps if "/torch_" in line]
        return batch.is_shared(), shared, batch.shape

    assert in_each_worker(collate, 1) == [(False, [], (2, 1000))]


# ---- its start


def test_ray_gives_a_worker_minutes_to_start():
    """After its own limit of one it would kill the first workers, and `ray.init()` would wait for them for ever."""
    assert ray._raylet.Config.worker_register_timeout_seconds() == 300
