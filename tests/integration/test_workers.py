"""Inside a worker: what user code finds there, and what it leaves behind."""

import os
import random
import signal
import socket
import sys
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import ray
import torch
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_str_fn, default_collate_fn_map
from torch.utils.data._utils.worker import _generate_state

from latches import Barrier, Mail
from probes import Calls, Stream, as_is, in_each_worker, load, oversubscribed
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


def draws(index):
    return random.random(), torch.rand(1).item(), np.random.rand()


def expected_draws(base_seed, worker_id, count):
    """The first draws of a worker seeded as torch seeds it."""
    python = random.Random(base_seed + worker_id)
    generator = torch.Generator().manual_seed(base_seed + worker_id)
    numpy = np.random.RandomState(_generate_state(base_seed, worker_id))
    return [(python.random(), torch.rand(1, generator=generator).item(), numpy.rand()) for _ in range(count)]


def base_seeds(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return [torch.empty((), dtype=torch.int64).random_(generator=generator).item() for _ in range(count)]


def test_worker_k_is_seeded_base_seed_plus_k_anew_in_each_epoch():
    loader = load(draws, 4, num_workers=2, generator=torch.Generator().manual_seed(3))
    for base_seed in base_seeds(3, 2):
        streams = [expected_draws(base_seed, worker_id, 2) for worker_id in range(2)]
        assert list(loader) == [streams[0][0], streams[1][0], streams[0][1], streams[1][1]]


def test_persistent_workers_are_not_seeded_again():
    generator = torch.Generator().manual_seed(3)
    loader = load(draws, 2, num_workers=1, generator=generator, persistent_workers=True)
    (base_seed,) = base_seeds(3, 1)
    assert [*loader, *loader] == expected_draws(base_seed, 0, 4)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("own_generator", [False, True])
def test_one_base_seed_is_drawn_per_iter_from_the_generator_alone(num_workers, own_generator):
    generator = torch.Generator().manual_seed(5) if own_generator else None
    other, drawn_from = torch.default_generator, generator
    if generator is None:
        other, drawn_from = None, torch.default_generator
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        random.seed(5)
        before = other.get_state() if other is not None else None, random.getstate(), np.random.get_state()[1].tolist()
        loader = DataLoader(range(3), num_workers=num_workers, generator=generator)
        for _ in range(2):
            assert len(list(loader)) == 3
        expected = torch.Generator().manual_seed(5)
        for _ in range(2):
            torch.empty((), dtype=torch.int64).random_(generator=expected)
        assert torch.equal(drawn_from.get_state(), expected.get_state())
        after = other.get_state() if other is not None else None, random.getstate(), np.random.get_state()[1].tolist()
        assert str(after) == str(before)
        if other is not None:
            assert torch.equal(after[0], before[0])


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


def test_an_iterable_dataset_is_a_copy_for_each_worker():
    loader = DataLoader(Stream(lambda worker: [(worker, n) for n in range(2)]), None, num_workers=2, collate_fn=as_is)
    assert list(loader) == [(0, 0), (1, 0), (0, 1), (1, 1)]


@oversubscribed
def test_six_workers_run_at_the_same_time(tmp_path):
    barrier = Barrier(tmp_path, 6)

    def meet(index):
        barrier.wait(leader=index == 0)
        return os.getpid()

    assert len(set(in_each_worker(meet, 6))) == 6


@oversubscribed
def test_six_iterable_workers_meet_before_the_first_batch(tmp_path):
    barrier = Barrier(tmp_path, 6)

    def meet(worker_id):
        barrier.wait(leader=worker_id == 3)
        yield worker_id

    assert list(DataLoader(Stream(meet), None, num_workers=6)) == list(range(6))


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


def test_a_function_of_torchs_for_another_class_reaches_the_workers(monkeypatch):
    monkeypatch.setitem(default_collate_fn_map, Point, collate_str_fn)
    (batch,) = DataLoader(Calls(Point, 2), 2, num_workers=1)
    assert batch == [Point(0), Point(1)]


def test_what_the_driver_has_removed_from_torchs_collate_map_the_workers_have_not(monkeypatch):
    loader = DataLoader(Calls(float, 2), 2, num_workers=1)
    monkeypatch.delitem(default_collate_fn_map, float)
    with pytest.raises(TypeError, match="must contain tensors"):
        list(loader)
    monkeypatch.undo()
    assert torch.equal(next(iter(loader)), torch.tensor([0.0, 1.0], dtype=torch.float64)), "the process is warm"


def test_the_users_own_calls_of_default_collate_make_no_shared_memory():
    def collate(index):
        batch = default_collate([{"a": torch.arange(1000)}, {"a": torch.arange(1000)}])["a"]
        with open("/proc/self/maps") as maps:
            shared = [line for line in maps if "/torch_" in line]
        return batch.is_shared(), shared, batch.shape

    assert in_each_worker(collate, 1) == [(False, [], (2, 1000))]


def test_default_collate_of_the_loader_makes_no_shared_memory():
    def collate(samples):
        batch = default_collate(samples)
        return batch, batch.is_shared()

    loader = DataLoader(Calls(lambda index: torch.full((1000,), index), 4), 2, num_workers=2, collate_fn=collate)
    assert [shared for _, shared in loader] == [False, False]


def test_fresh_processes_start_new_ones_for_each_iter():
    warm = in_each_worker(lambda index: os.getpid())
    loader = load(lambda index: os.getpid(), 1, fresh_processes=True)
    pids = [*loader, *loader]
    assert len({*pids, *warm}) == len(warm) + 2


# ---- its start


def test_ray_gives_a_worker_minutes_to_start():
    """After its own limit of one it would kill the first workers, and `ray.init()` would wait for them for ever."""
    assert ray._raylet.Config.worker_register_timeout_seconds() == 300
