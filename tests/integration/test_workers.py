"""Inside a worker: what user code finds there, and what it leaves behind."""

import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass

import pytest
import ray
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import default_collate_fn_map

from latches import Barrier, Mail
from probes import Calls, as_is, in_each_worker, load, oversubscribed
from rayloader import DataLoader

pytestmark = pytest.mark.usefixtures("ray_session")


# ---- one copy of the user's objects, in one thread


class Tuned:
    """Its own methods change and read it."""

    def __init__(self):
        self.factor = 1

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * self.factor

    def tune(self, worker_id):
        self.factor = 10

    def collate(self, samples):
        return samples, self.factor, get_worker_info().dataset is self


def test_dataset_collate_fn_and_worker_init_fn_are_one_copy():
    dataset = Tuned()
    loader = DataLoader(dataset, 2, num_workers=2, collate_fn=dataset.collate, worker_init_fn=dataset.tune)
    assert list(loader) == [([0, 10], 10, True), ([20, 30], 10, True)]
    assert dataset.factor == 1


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


def test_user_code_may_set_signal_handlers_and_get_signals():
    def handle(index):
        got = []
        signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
        signal.raise_signal(signal.SIGUSR1)
        return got

    assert in_each_worker(handle, 1) == [[signal.SIGUSR1]]


def test_get_worker_info_tells_inside_and_is_none_outside():
    generator = torch.Generator().manual_seed(7)
    base_seed = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(7)).item()

    def tell(index):
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, info.dataset.length

    assert in_each_worker(tell, generator=generator) == [(k, 2, base_seed + k, 2) for k in range(2)]
    assert get_worker_info() is None


# ---- seeds


# ---- what a worker process has


def test_torch_has_one_thread_in_a_worker():
    assert in_each_worker(lambda index: torch.get_num_threads()) == [1, 1]


def test_sys_path_is_the_drivers(tmp_path, monkeypatch):
    (tmp_path / "only_the_driver_finds_this.py").write_text("ANSWER = 42\n")
    monkeypatch.syspath_prepend(tmp_path)

    def use(index):
        import only_the_driver_finds_this

        return only_the_driver_finds_this.ANSWER, sys.path[0]

    assert in_each_worker(use) == [(42, str(tmp_path))] * 2


def test_a_module_that_pytest_put_on_the_path_is_imported_not_copied():
    module = Calls.__module__
    assert in_each_worker(lambda index: (Calls.__module__, sys.modules["probes"].__name__)) == [(module, module)] * 2
    (dataset_class,) = in_each_worker(lambda index: type(get_worker_info().dataset), 1)
    assert dataset_class is Calls


# ---- which copy of the dataset


class Counter:
    def __init__(self):
        self.offset = 0
        self.calls = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.calls += 1
        return index + self.offset, self.calls


def test_workers_see_changes_made_to_the_dataset_since_the_last_epoch():
    dataset = Counter()
    loader = DataLoader(dataset, None, num_workers=1, collate_fn=as_is)
    assert list(loader) == [(0, 1), (1, 2)]
    dataset.offset = 100
    assert list(loader) == [(100, 1), (101, 2)]


def test_persistent_workers_keep_their_first_copy():
    dataset = Counter()
    loader = DataLoader(dataset, None, num_workers=1, collate_fn=as_is, persistent_workers=True)
    assert list(loader) == [(0, 1), (1, 2)]
    dataset.offset = 100
    assert list(loader) == [(0, 3), (1, 4)]


def test_worker_init_fn_runs_once_per_epoch_or_once_for_persistent_workers(tmp_path):
    mail = Mail(tmp_path / "mail")
    for persistent, starts in ((False, 4), (True, 2)):
        loader = load(as_is, worker_init_fn=mail.send, persistent_workers=persistent)
        assert [*loader, *loader] == [0, 1, 0, 1]
        assert sorted(mail.waiting()) == sorted([str(k % 2) for k in range(starts)])
    mail.close()


@oversubscribed
def test_six_workers_run_at_the_same_time(tmp_path):
    barrier = Barrier(tmp_path, 6)

    def meet(index):
        barrier.wait(leader=index == 0)
        return os.getpid()

    assert len(set(in_each_worker(meet, 6))) == 6


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


# ---- collating


@dataclass
class Point:
    x: float


def collate_points(batch, *, collate_fn_map=None):
    return Point(sum(point.x for point in batch))


def test_the_drivers_extension_of_torchs_collate_map_reaches_the_workers(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Point, collate_points)
    loader = DataLoader(Calls(lambda index: Point(index), 4), 2, num_workers=2)
    assert list(loader) == [Point(1), Point(5)]
    monkeypatch.delitem(default_collate_fn_map, Point)
    with pytest.raises(TypeError, match=r"(?s)Caught TypeError in DataLoader worker process 0.*must contain tensors"):
        list(loader)


def test_the_users_own_calls_of_default_collate_make_no_shared_memory():
    def collate(index):
        batch = default_collate([{"a": torch.arange(1000)}, {"a": torch.arange(1000)}])["a"]
        with open("/proc/self/maps") as maps:
            shared = [line for line in maps if "/torch_" in line]
        return batch.is_shared(), shared, batch.shape

    assert in_each_worker(collate, 1) == [(False, [], (2, 1000))]


def test_fresh_processes_start_new_ones_for_each_iter():
    warm = in_each_worker(lambda index: os.getpid())
    loader = load(lambda index: os.getpid(), 1, fresh_processes=True)
    pids = [*loader, *loader]
    assert len({*pids, *warm}) == len(warm) + 2


# ---- its start


def test_ray_gives_a_worker_minutes_to_start():
    """After its own limit of one it would kill the first workers, and `ray.init()` would wait for them for ever."""
    assert ray._raylet.Config.worker_register_timeout_seconds() == 300
