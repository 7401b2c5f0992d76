"""Workers that are forks of the program: whatever ends first, nothing is lost, and nothing is left.

See also script_forks.py; Ctrl-C and the death of the program in test_scripts.py; what a dataset may hold in
test_kinds_of_datasets.py.
"""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import types
import warnings

import psutil
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import programs
import rayloader
from inside import kill_worker, pid_of, pid_of_zygote, set_timeout
from probes import oversubscribed
from rayloader import BatchTimeoutError, DataLoader, WorkerDiedError, WorkerStartError
from rayloader.errors import own_notes
from rayloader.workers import connection, zygote
from test_scripts import FOLDER, finish

pytestmark = [oversubscribed, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]

EXIT_LIMIT = 500.0  # seconds for a process to end; on expiry the test fails


class Drawing(Dataset):
    """Samples that depend on the worker's random stream and on how often its dataset was asked."""

    length = 24

    def __init__(self):
        self.calls = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.calls += 1
        return torch.tensor([index, float(torch.rand(())), self.calls])

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for index in range(worker.id, Drawing.length, worker.num_workers):
            yield torch.tensor([index, float(torch.rand(()))])


KINDS = {"map-style": Drawing, "stream": Stream}


def load(dataset, *, torchs=False, workers="fork", **options):
    torch.manual_seed(7)
    if torchs:
        return torch.utils.data.DataLoader(dataset, 2, num_workers=2, **options)
    return DataLoader(dataset, 2, num_workers=2, workers=workers, **options)


def taken(batches):
    return [batch.tolist() for batch in batches]


def torchs(kind, epochs=1, **options):
    loader = load(KINDS[kind](), torchs=True, **options)
    return [taken(loader) for _ in range(epochs)]


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "rayloader"]


# ---- ends


@pytest.fixture(scope="module", autouse=True)
def ends():
    """The program runs beside the tests."""
    script = programs.Program(FOLDER / "script_forks.py")
    yield script
    finish(script)


@pytest.mark.parametrize(("kind", "also_workers"), [("map-style", False), ("stream", True)])
def test_a_killed_zygote_takes_its_forks_along_and_all_are_replaced(kind, also_workers, caplog):
    batches = []
    for number, batch in enumerate(iterator := iter(load(KINDS[kind](), prefetch_factor=2))):
        batches.append(batch.tolist())
        if number == 2:
            pids = [pid_of(iterator, worker_id) for worker_id in (0, 1)]
            processes = [psutil.Process(pid) for pid in pids]
            for pid in pids if also_workers else ():
                os.kill(pid, signal.SIGKILL)
            os.kill(pid_of_zygote(iterator), signal.SIGKILL)
            assert psutil.wait_procs(processes, EXIT_LIMIT)[1] == []
    assert [batches] == torchs(kind, prefetch_factor=2)
    told = [line for line in lines(caplog) if "the process that forks workers was killed" in line]
    assert len(told) == 1


def stop(pid):
    """Stops a process, which then is stopped."""
    os.kill(pid, signal.SIGSTOP)
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        pass


def test_the_socket_of_a_zygote_may_be_finalized_before_the_zygote():
    made = zygote.Zygote(lambda end: None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made._control.__del__()  # as the collector does with what is in one cycle, in any order
    made.close()
    assert [str(warning.message) for warning in warned] == []


def test_a_timeout_counts_from_the_call_though_the_zygote_is_stopped():
    iterator = iter(load(Drawing(), prefetch_factor=2))
    batches = [next(iterator).tolist() for _ in range(3)]
    stop(pid_of_zygote(iterator))
    kill_worker(iterator, 1)
    set_timeout(iterator, 0.5)
    with pytest.raises(BatchTimeoutError, match=r"timed out after 0\.5 seconds"):
        batches.extend(map(torch.Tensor.tolist, iterator))
    set_timeout(iterator, 0)
    os.kill(pid_of_zygote(iterator), signal.SIGCONT)
    assert [batches + taken(iterator)] == torchs("map-style", prefetch_factor=2)


class Killing(Drawing):
    """One sample ends its process in some way."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def __getitem__(self, index):
        if index == 9:
            self.end()
        return super().__getitem__(index)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        (kill_itself, "killed by signal: Killed"),
        (lambda: os._exit(3), "exit code 3"),
        (lambda: sys.exit(4), "exit code 4"),
    ],
    ids=["SIGKILL", "_exit", "exit"],
)
def test_a_batch_that_ends_its_worker_again_and_again_is_an_error(end, cause, caplog):
    loader = load(Killing(end), max_worker_restarts=2, prefetch_factor=1)
    batches = []
    with pytest.raises(WorkerDiedError) as error:
        batches.extend(loader)
    assert taken(batches) == torchs("map-style")[0][:4]
    assert str(error.value).startswith("DataLoader worker (pid(s) ")
    assert cause in str(error.value)
    assert "[8, 9]" in "".join(error.value.__notes__)


def sockets(pid="self"):
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append((os.readlink(f"/proc/{pid}/fd/{number}"), int(number)))
    return {name: number for name, number in found if name.startswith("socket:")}


def test_a_fork_has_its_own_end_of_a_line_and_nobody_else_has_it():
    iterators = [iter(load(Drawing())) for _ in range(2)]
    for iterator in iterators:
        taken(next(iterator) for _ in range(2))
    zygotes = [set(sockets(pid_of_zygote(iterator))) for iterator in iterators]
    forks = [set(sockets(pid_of(iterator, worker_id))) for iterator in iterators for worker_id in (0, 1)]
    shared = set.intersection(*zygotes, *forks)
    assert [len(ends - shared) for ends in zygotes] == [1, 1]  # of their control sockets
    assert [len(ends - shared) for ends in forks] == [1, 1, 1, 1]
    assert len(set.union(*zygotes, *forks) - shared) == 6
    assert not (set.union(*zygotes, *forks) - shared) & set(sockets())


# ---- what goes on elsewhere


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begins", ["fork", "ray"])
@pytest.mark.parametrize("processes", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_state_of_forks_goes_on_in_actors_and_the_other_way_round(ray_session, kind, begins, processes):
    loader = load(KINDS[kind](), workers=begins)
    iterator = iter(loader)
    before = [next(iterator).tolist() for _ in range(5)]
    state = loader.state_dict()
    del iterator
    goes_on = DataLoader(KINDS[kind](), 2, num_workers=processes, workers="ray" if begins == "fork" else "fork")
    goes_on.load_state_dict(state)
    assert before + taken(goes_on) == torchs(kind)[0]


def test_a_fork_beside_a_running_ray_sees_nothing_of_it(ray_session):
    import ray

    class Asking(Drawing):
        def __getitem__(self, index):
            return threading.active_count(), os.getppid()

    assert ray.is_initialized()
    iterator = iter(load(Asking()))
    zygote_pid = pid_of_zygote(iterator)
    assert list(pairs(iterator)) == [(1, zygote_pid)] * 24
    assert ray.get(ray.put(7)) == 7


def pairs(batches):
    for threads, parents in batches:
        yield from zip(threads.tolist(), parents.tolist(), strict=True)


def test_a_fork_in_a_program_with_threads():
    """Which hold locks, and use torch, all the time."""
    ends, lock = threading.Event(), threading.Lock()

    def work():
        while not ends.is_set():
            with lock:
                torch.ones(1000).sum()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert [taken(load(Drawing())) for _ in range(3)] == torchs("map-style", 1) * 3
    finally:
        ends.set()
        for thread in threads:
            thread.join()


class Forks(Drawing):
    """Its samples fork a process, which ends."""

    def __getitem__(self, index):
        if not (pid := os.fork()):
            sys.exit()
        os.waitpid(pid, 0)
        return index


def test_what_a_sample_forks_ends_without_a_word(capfd):
    assert list(DataLoader(Forks(), None, num_workers=2, workers="fork")) == [*range(len(Forks()))]
    assert capfd.readouterr().err == ""


def test_a_worker_that_hangs_is_restarted(tmp_path, caplog):
    hung = tmp_path / "hung"

    class Hanging(Drawing):
        def __getitem__(self, index):
            if index == 4 and not hung.exists():
                hung.touch()
                threading.Event().wait()
            return super().__getitem__(index)

    assert [taken(load(Hanging(), timeout=3, on_timeout="restart"))] == torchs("map-style")
    # On a busy machine others may give nothing for three seconds too.
    assert any("worker 0 is lost and gets another process: it gave no batch for 3 s" in line for line in lines(caplog))


# ---- limits


def test_too_few_processes(monkeypatch):
    """The zygote cannot be forked; then it cannot fork. `ulimit -u` does not bind the superuser."""

    def refuse():
        raise BlockingIOError(11, "Resource temporarily unavailable")

    def refuse_in_c():
        ctypes.set_errno(errno.EAGAIN)
        return -1

    monkeypatch.setattr(zygote.os, "fork", refuse)
    with pytest.raises(WorkerStartError, match=r"could not be forked: .*temporarily unavailable.*ulimit -u"):
        iter(load(Drawing()))
    monkeypatch.undo()
    monkeypatch.setattr(zygote, "_python", types.SimpleNamespace(fork=refuse_in_c))
    with pytest.raises(rayloader.RayloaderError, match="temporarily unavailable"):
        taken(load(Drawing()))
    monkeypatch.undo()
    assert [taken(load(Drawing()))] == torchs("map-style")


def test_too_few_descriptors():
    """Whatever is missing, there is an error with a remedy or there are the batches, and no hang."""
    program = (
        "import os, resource, torch\n"
        "from rayloader import DataLoader, RayloaderError\n"
        "list(DataLoader(range(8), 2, num_workers=2, workers='fork'))\n"
        "used, ways = os.open('/dev/null', os.O_RDONLY), set()\n"
        "os.close(used)\n"
        "for more in range(18):\n"
        "    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "    try:\n"
        "        batches = [b.tolist() for b in DataLoader(range(8), 2, num_workers=2, workers='fork')]\n"
        "        assert batches == [[0, 1], [2, 3], [4, 5], [6, 7]], batches\n"
        "        ways.add('batches')\n"
        "    except RayloaderError as error:\n"
        "        assert 'ulimit -n' in str(error)\n"
        "        ways.add('error')\n"
        "        print(type(error).__name__, error)\n"
        "print(sorted(ways))\n"
    )
    done = programs.run(program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "['batches', 'error']", done.stdout


def test_a_wait_for_which_there_is_no_descriptor_says_so_and_can_be_repeated(monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    iterator = iter(load(Drawing()))
    with monkeypatch.context() as patch:
        patch.setattr(connection.select, "epoll", refuse)
        with pytest.raises(rayloader.RayloaderError, match=r"can't wait for the workers: .*files.*ulimit -n"):
            list(iterator)
    assert [taken(iterator)] == torchs("map-style")


# ---- which workers


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ray_remote_args": {"num_cpus": 1}}, "ray_remote_args are options of actors"),
        ({"arenas": False}, "arenas are switched off"),
        ({"multiprocessing_context": "spawn"}, "asks for 'spawn'"),
        *(({"workers": value}, "workers must be 'auto' or 'ray' or 'fork', got ") for value in ("forks", None, True)),
    ],
)
def test_what_forks_cannot_do_and_kinds_of_workers_that_do_not_exist(options, why):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a context has no other effect
        with pytest.raises(ValueError, match=why if "workers" in options else f"but .*{why}.*; leave one of the two"):
            iter(load(Drawing(), **options))


def test_in_a_program_that_uses_ray_a_dataset_that_ray_cannot_send_is_an_error(ray_session):
    dataset = Drawing()
    with open(os.devnull) as dataset.file:
        for options in ({"workers": "auto"}, {"workers": "ray"}, {"ray_remote_args": {"num_cpus": 0}}):
            with pytest.raises(TypeError, match="cannot pickle") as caught:
                iter(load(dataset, **{"workers": "auto", **options}))
            named, *_, remedy = own_notes(caught.value)
            assert "dataset.file: _io.TextIOWrapper can't be sent to a worker" in named
            assert 'use workers="fork"' in remedy
        loader = load(dataset, workers="fork")
        assert [taken(loader), taken(loader)] == torchs("map-style", 2)


def test_the_kind_of_workers_is_an_attribute_and_a_default_of_patch():
    loader = load(Drawing(), workers="auto")
    assert loader.workers == "auto"
    loader.workers = "fork"
    iterator = iter(loader)
    assert psutil.Process(pid_of_zygote(iterator)).ppid() == os.getpid()
    del iterator
    loader.workers = "thread"
    with pytest.raises(ValueError, match="workers must be"):
        iter(loader)
    program = (
        "import os, sys, torch, rayloader\n"
        "rayloader.patch(workers='fork')\n"
        "loader = torch.utils.data.DataLoader(range(4), 2, num_workers=2)\n"
        "assert type(loader) is rayloader.DataLoader and loader.workers == 'fork'\n"
        "print([batch.tolist() for batch in loader], 'ray' in sys.modules)\n"
    )
    done = programs.run(program)
    assert (done.returncode, done.stdout) == (0, "[[0, 1], [2, 3]] False\n"), done.stderr


def test_nothing_is_left_however_an_epoch_ends(ends):
    """See the script. This test is the last one: the program has had the time of the others."""
    output, errors = finish(ends)
    assert (ends.returncode, output[-1:]) == (0, ["the end"]), errors


def test_warnings_of_others_name_the_programs_line_and_end_no_epoch(tmp_path):
    """Of torch, which cannot pin here, and of a library that is told of forks: each once for each `iter()`.

    Where the latter is an error, Python ignores it, as with torch's workers.
    """
    program = tmp_path / "program.py"
    program.write_text(
        "import os, warnings\n"
        "from rayloader import DataLoader\n"
        "os.register_at_fork(before=lambda: warnings.warn('forks are disliked', RuntimeWarning))\n"
        "for batch in DataLoader(range(4), num_workers=2, pin_memory=True):\n"
        "    pass\n"
        "warnings.simplefilter('error', RuntimeWarning)\n"
        "print([batch.tolist() for batch in DataLoader(range(4), 2, num_workers=2)])\n"
    )
    done = programs.run(program)
    assert (done.returncode, done.stdout) == (0, "[[0, 1], [2, 3]]\n"), done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith(f"{program}:")]
    if not torch.accelerator.is_available():
        assert [line for line in told if "pin_memory" in line and line.startswith(f"{program}:4: UserWarning")]
    assert [line for line in told if "disliked" in line] == [f"{program}:4: RuntimeWarning: forks are disliked"]
