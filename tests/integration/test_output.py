"""What workers print, warn of and log arrives as under torch; how loaders, actors and processes are called."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from traceback import extract_tb

import psutil
import pytest
import ray
import torch

import rayloader.workers.actors
from probes import Calls, load
from rayloader import DataLoader, WorkerStartError

pytestmark = pytest.mark.usefixtures("ray_session")

FOLDER = Path(__file__).parent
LIMIT = 240  # seconds for a script, or for a record to arrive; on expiry the test fails


def run_script(kind, folder):
    """Lines of its standard output, standard error and log file, sorted: processes print as it happens."""
    folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}  # whole lines
    if kind == "rayloader":
        environment["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, FOLDER / "script_output.py", kind, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    texts = done.stdout, done.stderr, (folder / "log").read_text()
    # The script has two paths; Ray says where it connects to, and we what is waited for on a slow machine.
    left_out = "script_output.py", "INFO worker.py", "rayloader: waiting"
    return [sorted(line for line in text.splitlines() if not any(out in line for out in left_out)) for text in texts]


def test_all_that_workers_print_and_log_arrives_as_under_torch(tmp_path):
    torchs, ours = (run_script(kind, tmp_path / kind) for kind in ("torch", "rayloader"))
    assert len(torchs[0]) > 60
    assert torchs[0].count("the same line") == 24
    assert ours == torchs


def test_records_reach_the_programs_handlers_while_it_iterates(caplog):
    last = threading.Event()

    class Ends(logging.Handler):
        def emit(self, record):
            if "sample 1" in record.getMessage():
                last.set()

    def log(index):
        logging.getLogger("mine").warning("sample %d", index)
        return index

    ends = Ends()
    logging.root.addHandler(ends)
    try:
        iterator = iter(load(log, length=2, num_workers=1))
        next(iterator)
        next(iterator)
        assert last.wait(LIMIT)
    finally:
        logging.root.removeHandler(ends)
    records = [record for record in caplog.records if record.name == "mine"]
    assert [record.getMessage() for record in records] == ["sample 0", "sample 1"]
    assert {record.processName for record in records} == {"DataLoader worker 0"}
    assert os.getpid() not in {record.process for record in records}


def test_the_process_is_as_it_was_when_the_next_loader_has_it(capfd):
    """Levels, handlers and streams are those of the loader that a worker works for."""

    def level(_):
        return logging.getLogger("mine").level, len(logging.root.handlers) > 0, os.readlink("/proc/self/fd/1")

    logger = logging.getLogger("mine")
    (before,) = load(level, length=1)
    logger.setLevel(logging.ERROR)
    try:
        (within,) = load(level, length=1)
    finally:
        logger.setLevel(logging.NOTSET)
    (after,) = load(level, length=1)
    assert before == after == (logging.NOTSET, True, os.readlink("/proc/self/fd/1"))
    assert within[0] == logging.ERROR


def test_a_handler_that_raises_does_not_keep_others_from_logging(capsys):
    class Raises(logging.Handler):
        def emit(self, record):
            if record.name == "mine":
                raise RuntimeError("this handler is broken")

    class Hears(logging.Handler):
        def emit(self, record):
            if record.getMessage() == "sample 1":
                heard.set()

    heard, raises, hears = threading.Event(), Raises(), Hears()

    def log(index):
        logging.getLogger("mine" if index == 0 else "other").warning("sample %d", index)
        return index

    logging.root.addHandler(raises)
    logging.root.addHandler(hears)
    try:
        assert list(load(log, length=2, num_workers=1)) == [0, 1]
        assert heard.wait(LIMIT)
    finally:
        logging.root.removeHandler(raises)
        logging.root.removeHandler(hears)
    assert "RuntimeError: this handler is broken" in capsys.readouterr().err


def test_a_breakpoint_says_what_to_do(caplog):
    heard = threading.Event()

    class Hears(logging.Handler):
        def emit(self, record):
            if "breakpoint()" in record.getMessage():
                heard.set()

    def breaks(index):
        os.environ["PYTHONBREAKPOINT"] = "0"  # the debugger itself is not wanted here
        breakpoint()
        return index

    hears = Hears()
    logging.root.addHandler(hears)
    try:
        assert list(load(breaks, length=1, fresh_processes=True)) == [0]
        assert heard.wait(LIMIT)
    finally:
        logging.root.removeHandler(hears)
    assert "Debug with num_workers=0" in caplog.text


def test_actors_and_processes_carry_the_loaders_name():
    def title(_):
        return psutil.Process().cmdline()[0]

    assert list(load(title, num_workers=2, name="train", fresh_processes=True)) == [
        "ray::rayloader:train:0",
        "ray::rayloader:train:1",
    ]
    assert list(load(title, num_workers=1)) == ["ray::rayloader:Calls:0"] * 2
    names = {actor["Name"] for actor in ray._private.state.actors().values()}
    assert {"rayloader:train:0", "rayloader:train:1"} <= names


def test_repr_says_what_a_loader_is():
    assert repr(DataLoader(range(8), 4)) == "rayloader.DataLoader(range, num_workers=0, batch_size=4)"
    named = DataLoader(Calls(print), batch_sampler=[[0]], num_workers=2, name="train")
    assert repr(named) == "rayloader.DataLoader(Calls, num_workers=2, name='train')"


@pytest.mark.parametrize("name", ["", 3])
def test_a_name_is_a_text(name):
    with pytest.raises(TypeError, match="name must be a text that is not empty, or None, got"):
        DataLoader(range(8), name=name)


def test_a_traceback_that_is_kept_does_not_keep_the_workers():
    """As a notebook keeps that of the last error. The workers serve the next loader."""

    def fails(index):
        if index:
            raise ValueError(index)
        return os.getpid()

    def cell(loader):
        for pid in loader:
            pids.append(pid)

    pids, kept = [], []
    loader = load(fails, length=2, num_workers=1)
    for _ in range(3):
        with pytest.raises(ValueError, match="1") as caught:
            cell(loader)
        kept.append(caught)
    assert len(set(pids)) == 1
    assert [frame.name for frame in extract_tb(kept[0].tb)][-2:] == ["cell", "__next__"]


class Breaks(torch.utils.data.Sampler):
    def __iter__(self):
        yield from [0, 1]
        raise KeyError("in the sampler")


def test_a_samplers_error_shows_the_samplers_lines():
    with pytest.raises(KeyError) as caught:
        list(DataLoader(range(8), sampler=Breaks(), num_workers=1, prefetch_factor=1))
    frames = extract_tb(caught.tb)
    assert frames[-1].name == "__iter__"
    assert "epoch.py" not in "".join(frame.filename for frame in frames)


def test_who_waits_for_workers_is_told_what_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(rayloader.workers.actors, "NOTICE_S", 0.0)
    monkeypatch.setenv("RAYLOADER_START_TIMEOUT", "1")
    nowhere = {"num_cpus": 0, "resources": {"nowhere": 1}}
    with pytest.raises(WorkerStartError):
        next(iter(load(os.getpid, num_workers=1, ray_remote_args=nowhere)))
    told = [message for message in caplog.messages if message.startswith("rayloader: waiting for")]
    assert len(told) == 1
    assert told[0].startswith(
        "rayloader: waiting for 1 of 1 worker processes. Ray has found no room for 1 of them so far. "
        "Each asks for nowhere 1; free now: "
    )


def test_a_message_that_does_not_fit_its_arguments_is_told_as_under_torch(capfd):
    def log(index):
        logging.getLogger("mine").warning("%d samples", "many")
        return index

    assert list(load(log, num_workers=1)) == [0, 1]
    assert "--- Logging error ---" in capfd.readouterr().err


def test_a_fork_beside_a_thread_that_logs_may_log(caplog):
    def forks(index):
        ended = threading.Event()

        def talk():
            while not ended.is_set():
                logging.getLogger("mine").info("x" * 20_000)

        thread = threading.Thread(target=talk)
        thread.start()
        try:
            for _ in range(5):
                pid = os.fork()
                if not pid:
                    logging.getLogger("mine").info("from the child")
                    os._exit(0)
                os.waitpid(pid, 0)
        finally:
            ended.set()
            thread.join()
        return index

    logging.getLogger("mine").setLevel(logging.INFO)
    try:
        assert list(load(forks, length=1)) == [0]
    finally:
        logging.getLogger("mine").setLevel(logging.NOTSET)
    assert caplog.messages.count("from the child") == 5


def test_a_subclass_keeps_a_name_of_its_own():
    class Method(DataLoader):
        def name(self):
            return "method"

    class Property(DataLoader):
        name = property(lambda self: "property")

    class Before(DataLoader):
        def __init__(self, *arguments, **options):
            self.name = "before"
            super().__init__(*arguments, **options)

    assert Method(range(2)).name() == "method"
    assert [c(range(2)).name for c in (Property, Before)] == ["property", "before"]
    assert [c(range(2)).label for c in (Method, Property)] == ["range", "property"]
    assert repr(DataLoader.__new__(DataLoader)).startswith("rayloader.DataLoader(")
