"""One local Ray for the whole session, and the proof after each test that nothing of ours is left.

`ray_session` starts Ray through rayloader itself and keeps a loader alive, so that its actors stay warm and serve all
tests. `nothing_left` runs around every test; it waits on threads and processes themselves, with a bound, never for a
span of time.
"""

import contextlib
import gc
import importlib.metadata
import logging
import math
import os
import re
import reprlib
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import psutil
import pytest

from inside import end_idle_actors, image_files, live_actor_pids, live_memory_files, pool_if_any

ROOT = Path(__file__).parents[1]
PIP_LIMIT = 600  # seconds; on expiry the test fails
EXIT_LIMIT = 500.0  # seconds for threads and actors to end after a test; on expiry the test fails
OUR_ACTOR = re.compile(r"ray::(WorkerProcess\b|(.*:)?Producer\b|rayloader:)")  # how Ray titles processes of rayloader

# Where a shell has started the tests in the background, their programs would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

_keepers = []
_files = None  # what `our_files` gave after the last test, unless more may be open or mapped by now


def pytest_addoption(parser):
    """Adds `--against`."""
    parser.addoption(
        "--against",
        choices=("rayloader", "torch"),
        default="rayloader",
        help="conformance: whose loader is compared with torch's; torch's own shows that every case is deterministic",
    )


def pytest_collection_finish():
    """Spares each test some milliseconds.

    What was imported and collected lives as long as the session: no collection of garbage need look at it again.
    And pytest adds its handlers, three times a test, to each logger that does not propagate, of which torch has dozens.
    """
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(scope="session")
def default_packages(tmp_path_factory):
    """What `ray[default]` needs beside `ray`, fetched by pip; with it each start of Ray takes longer."""
    folder = tmp_path_factory.mktemp("default")
    needed = [need.split(";")[0] for need in importlib.metadata.requires("ray") or () if 'extra == "default"' in need]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
    subprocess.run([*pip, "--constraint", ROOT / "constraints.txt", *needed], check=True, timeout=PIP_LIMIT)
    return folder


@pytest.fixture(scope="session")
def ray_session(keepers):
    """A local Ray with three warm actors; gives the loader that keeps them.

    Idle actors stay as long as a test takes, and end with it if no loader that lives can use them: else each test would
    see those of the last.
    """
    import torch
    from torch.utils.data import TensorDataset

    import rayloader.actors.actors
    import rayloader.actors.pool
    import rayloader.actors.session
    from rayloader import DataLoader, init, shutdown

    rayloader.actors.pool.GRACE_S = math.inf
    # What the log holds is not to depend on how fast the machine is.
    rayloader.actors.session.START_NOTICE_S = rayloader.actors.actors.NOTICE_S = math.inf
    rayloader.actors.pool.LATE_NOTICE_S = math.inf
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # 3 workers on 2 cores
        init()  # from now on this program uses Ray
        keeper = DataLoader(TensorDataset(torch.arange(8)), num_workers=3)
        for _ in keeper:
            pass
    keepers.append(keeper)
    yield keeper
    keepers.remove(keeper)
    del keeper
    shutdown()
    import ray

    if ray.is_initialized():
        ray.shutdown()
    check_actors(allowed=set)


@pytest.fixture(scope="session")
def keepers():
    """Loaders that keep actors warm from one test to the next: those of the pool may live as long as one is here."""
    return _keepers


@pytest.fixture(autouse=True)
def nothing_left():
    """After a test: no thread, descriptor, mapping or actor process of ours but those that were there before.

    While there are keepers, the actors of the process's pool stay warm for it, each with its arena, and the thread
    that started Ray lives, and those of the janitor and of questions to Ray once there was a worker.
    """
    threads, files, actors = our_threads(), our_files() if _files is None else _files, pool_pids()
    yield
    if "rayloader" not in sys.modules:
        return
    end_idle_actors(_keepers)
    check_threads(threads)
    check_files(files)
    if "rayloader.actors.pool" in sys.modules:
        check_actors(allowed=lambda: pool_pids() if _keepers else pool_pids() & actors)


def pytest_fixture_setup(fixturedef):
    """What a fixture opens that outlives a test is there before the next one."""
    global _files
    if fixturedef.scope != "function":
        _files = None


def our_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("rayloader-")}


def check_threads(before):
    def left():
        allowed = {"rayloader-janitor", "rayloader-asks"} | ({"rayloader-session"} if _keepers else set())
        return [thread for thread in our_threads() - before if thread.name not in allowed]

    if left():
        gc.collect()  # an iterator in a cycle ends its threads when it is collected
    deadline = time.monotonic() + EXIT_LIMIT
    while (now := left()) and time.monotonic() < deadline:  # one that ends may let another start
        now[0].join(max(0.0, deadline - time.monotonic()))
    assert not left(), f"threads left: {left()}"


def check_files(before):
    """Waits for what finalizers have left to the janitor: actors that stop, or are killed, give up their files then."""
    global _files
    _files = None
    deadline = time.monotonic() + EXIT_LIMIT
    waited = False
    while left := (now := our_files()) - before:
        assert time.monotonic() < deadline, f"memory files left open or mapped: {sorted(left)}\n{holders()}"
        if waited:
            gc.collect()  # a batch in a cycle lets go of its memory when it is collected
        if (pool := pool_if_any()) is not None:
            pool.wait()
        waited = True
    _files = now


def holders():
    """Who refers to what of ours may keep a memory file, for the message of a test that fails."""
    kinds = {"Actor", "Arena", "Image", "Lent", "MemoryFile", "_Lease", "_Mapping"}
    found = [o for o in gc.get_objects() if type(o).__name__ in kinds and type(o).__module__.startswith("rayloader.")]
    lines = []
    for obj in found:
        name = getattr(getattr(obj, "address", None), "name", "")
        lines.append(f"{type(obj).__name__} {name} at {id(obj):x}, referred to by:")
        for referrer in gc.get_referrers(obj):
            if referrer is not found and referrer is not sys._getframe():
                lines.append(f"    {type(referrer).__name__} at {id(referrer):x}: {reprlib.repr(referrer)}")
    return "\n".join(lines)


def our_files():
    """Names of our memory files that this process has open or mapped, but for those that the pool and loaders keep."""
    names = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    maps = Path("/proc/self/maps").read_text()
    if "rayloader-" in maps:
        names.update(line.split(maxsplit=5)[-1] for line in maps.splitlines())
    names = {name for name in names if "rayloader-" in name}
    if not names:
        return names
    kept = live_memory_files() | image_files()  # which actors may live is check_actors' matter
    kept = {*kept, "/session_"}  # what Ray has open in the folder that was made for it
    return {name for name in names if not any(file in name for file in kept)}


def pool_pids():
    """Processes of the actors that this process's pool knows and keeps."""
    return live_actor_pids()


def our_actors():
    """All processes of rayloader's actors below this process, whose Ray it started."""
    actors = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if OUR_ACTOR.match(" ".join(process.cmdline())):
                actors.append(process)
    return actors


def check_actors(allowed):
    """Waits until no actor of ours runs but those that `allowed()` names."""
    deadline = time.monotonic() + EXIT_LIMIT
    collected = False
    while left := [process for process in our_actors() if process.pid not in allowed()]:
        if not collected:
            collected = gc.collect() is not None
        assert time.monotonic() < deadline, f"actors left: {left}"
        psutil.wait_procs(left, timeout=0.5)  # an actor that is still starting may yet turn out to be the pool's
