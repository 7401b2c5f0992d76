"""Inside a worker: what user code finds there, and what it leaves behind."""

import builtins
import gc
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
import psutil
import pytest
import torch
from PIL import Image, ImageFile
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_str_fn, default_collate_fn_map
from torch.utils.data._utils.worker import _generate_state

import rayloader.actors.lifetimes
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


# ---- the driver's state as it was at iter()


def test_working_directory_and_environment_are_the_drivers_at_iter(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYLOADER_TEST_SET", "at iter")
    monkeypatch.setenv("RAYLOADER_TEST_GONE", "before")
    loader = load(
        lambda index: (os.getcwd(), os.environ.get("RAYLOADER_TEST_SET"), os.environ.get("RAYLOADER_TEST_GONE")),
        4,
        num_workers=2,
        prefetch_factor=1,
    )
    monkeypatch.delenv("RAYLOADER_TEST_GONE")
    iterator = iter(loader)
    monkeypatch.chdir("/")
    monkeypatch.setenv("RAYLOADER_TEST_SET", "after")
    assert list(iterator) == [(str(tmp_path), "at iter", None)] * 4
    assert list(loader) == [("/", "after", None)] * 4


def test_the_environment_reaches_c_libraries_and_child_processes(monkeypatch):
    monkeypatch.setenv("RAYLOADER_TEST_SET", "to the shell")
    assert in_each_worker(lambda index: os.popen("echo $RAYLOADER_TEST_SET").read(), 1) == ["to the shell\n"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_default_dtype_is_the_drivers(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert in_each_worker(lambda index: torch.get_default_dtype()) == [dtype] * 2
        assert [batch.dtype for batch in load(lambda index: torch.ones(1))] == [dtype] * 2
    finally:
        torch.set_default_dtype(before)
    assert in_each_worker(lambda index: torch.get_default_dtype()) == [before] * 2


def test_grad_mode_is_that_of_the_thread_that_called_iter():
    with torch.no_grad():
        iterator = iter(load(lambda index: torch.is_grad_enabled()))
    assert list(iterator) == [False, False]
    assert in_each_worker(lambda index: torch.is_grad_enabled()) == [True, True]


def test_torch_has_one_thread_in_a_worker():
    assert in_each_worker(lambda index: torch.get_num_threads()) == [1, 1]


@oversubscribed
def test_cpu_affinity_is_that_of_the_thread_that_called_iter():
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    os.sched_setaffinity(0, one)
    try:
        iterator = iter(load(lambda index: os.sched_getaffinity(0)))
    finally:
        os.sched_setaffinity(0, mine)
    assert list(iterator) == [one, one]
    assert in_each_worker(lambda index: os.sched_getaffinity(0)) == [mine, mine]


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


def test_worker_processes_are_forks_of_one_that_this_process_has_started():
    """Or else each imports torch anew; test_fork_server.py has the rest."""
    (parent,) = set(in_each_worker(lambda index: os.getppid(), 2))
    assert psutil.Process(parent).ppid() == os.getpid()


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


variable = ContextVar("variable", default="")


def state(index=0):
    """What user code may change of its process, and the next user must not find changed."""
    return {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "environ": {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
        "argv": list(sys.argv),
        "sys.path": list(sys.path),
        "affinity": os.sched_getaffinity(0),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)],
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "collate map": sorted(map(str, default_collate_fn_map)),
        "worker info": get_worker_info().num_workers,
        "thread": threading.current_thread().name,
        "folder": tempfile.tempdir,
        "context": variable.get(),
    }


def leave_traces(index):
    os.chdir("/")
    os.environ["RAYLOADER_TEST_TRACE"] = "1"
    os.environ.pop("PATH", None)
    sys.argv.append("trace")
    sys.path.insert(0, "/trace")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, lambda *_: None)
    torch.set_default_dtype(torch.float16)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    default_collate_fn_map[Point] = lambda batch, *, collate_fn_map=None: "trace"
    threading.current_thread().name = "trace"
    tempfile.tempdir = "/trace"
    variable.set("trace")
    return state()


KEYS_CHANGED = ["cwd", "environ", "argv", "sys.path", "signals", "threads", "grad", "default dtype", "collate map"]
KEYS_CHANGED += ["thread", "folder", "context"]


def test_a_dataset_leaves_no_trace_in_the_process():
    own = {"ray_remote_args": {"num_cpus": 0, "memory": 1}}  # this actor serves no other test
    keeper = load(state, 1, **own)
    first = list(keeper)
    for to_the_end in (True, False):
        before = list(keeper)
        traces = iter(load(leave_traces, 8, num_workers=1, **own))
        for trace, was in zip(traces, before, strict=False):
            assert trace["pid"] == was["pid"], "the processes are warm"
            assert [key for key in KEYS_CHANGED if trace[key] == was[key]] == []
            if not to_the_end:
                break
        else:
            assert len(list(traces)) == 6  # zip took one more
        del traces
        assert list(keeper) == first


def be_nice():
    os.nice(5)
    return os.getpriority(os.PRIO_PROCESS, 0)


def change_builtins():
    before = builtins.__dict__.get("trace")
    builtins.trace = 1
    return before


def start_a_thread():
    before = threading.active_count()
    threading.Thread(target=lambda: threading.Event().wait(), daemon=True).start()
    return before


TRACES = [
    (be_nice, "the niceness"),
    (change_builtins, "builtins"),
    (start_a_thread, "a thread that still runs"),
]


@pytest.mark.parametrize(("leave", "text"), TRACES, ids=[leave.__name__ for leave, _ in TRACES])
def test_a_process_in_which_something_was_left_behind_serves_no_other_epoch(leave, text, caplog):
    rayloader.actors.lifetimes._tell.cache_clear()
    own = {"ray_remote_args": {"num_cpus": 0, "memory": 2}}  # this actor serves no other test
    keeper = load(state, 1, **own)
    before = list(keeper)
    seen = [one for _ in range(2) for one in load(lambda _: (os.getpid(), leave()), 1, **own)]
    assert seen[0][0] == before[0]["pid"]
    assert seen[1][0] != seen[0][0]
    assert seen[1][1] == seen[0][1], "it finds what the first one has found"
    after = list(keeper)
    assert after[0]["pid"] not in dict(seen)
    assert [{**one, "pid": 0} for one in after] == [{**one, "pid": 0} for one in before]
    assert [f"cannot be put back: {text};" in record.getMessage() for record in caplog.records] == [True]


def settle_in(worker_id):
    """What many programs do."""
    torch.set_num_threads(2)
    torch.manual_seed(worker_id)
    random.seed(worker_id)
    np.random.seed(worker_id)
    gc.disable()
    gc.freeze()
    os.environ["OMP_NUM_THREADS"] = "1"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft // 2, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ImageFile.LOAD_TRUNCATED_IMAGES = True


def use_libraries(index):
    import cv2
    import h5py
    import pyarrow
    import sklearn.preprocessing

    Image.new("L", (4, 4)).resize((2, 2))
    cv2.setNumThreads(0)
    cv2.blur(np.zeros((4, 4, 3), np.uint8), (2, 2))
    pyarrow.table({"a": [1]}).to_pandas()
    h5py.File("no file", "w", driver="core", backing_store=False).close()
    sklearn.preprocessing.StandardScaler().fit([[1.0], [2.0]])
    pool.submit(len, "").result()
    return os.getpid()


pool = ThreadPoolExecutor(1)  # in a worker: of a module that it imports


@pytest.mark.full
def test_ordinary_programs_keep_their_processes_warm():
    own = {"ray_remote_args": {"num_cpus": 0, "memory": 3}}
    loader = load(use_libraries, 2, num_workers=1, worker_init_fn=settle_in, **own)
    assert len({*loader, *loader, *loader}) == 1


def test_what_a_module_sets_as_it_is_imported_holds_in_each_epoch(tmp_path, monkeypatch):
    """It is imported once in a warm process, as it was once in the program, from which torch's workers are forked."""
    source = "import socket\nsocket.setdefaulttimeout(7.0)\ndef get(index):\n    return socket.getdefaulttimeout()\n"
    (tmp_path / "sets_a_timeout.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import sets_a_timeout

    socket.setdefaulttimeout(None)  # for the other tests
    loader = load(sets_a_timeout.get, 1)
    assert [*loader, *loader] == [7.0, 7.0]


def test_between_persistent_epochs_the_process_keeps_what_the_dataset_did():
    loader = load(lambda index: os.environ.setdefault("RAYLOADER_TEST_FIRST", str(index)), 2, num_workers=1)
    persistent = load(
        lambda index: os.environ.setdefault("RAYLOADER_TEST_FIRST", str(os.getpid())), 1, persistent_workers=True
    )
    assert [*loader, *loader] == ["0"] * 4
    assert len({*persistent, *persistent}) == 1


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
