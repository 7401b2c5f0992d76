"""What user code has changed in a process is put back, or named. No Ray."""

import builtins
import gc
import locale
import multiprocessing
import resource
import signal
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rayloader.inherit import left_behind
from rayloader.inherit.left_behind import LeftBehind


def soft_limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def set_soft_limit():
    soft, hard = soft_limit()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def ignore(*_):
    pass


PUT_BACK = {
    "handler": (lambda: signal.getsignal(signal.SIGUSR1), lambda: signal.signal(signal.SIGUSR1, ignore)),
    "blocked": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
    ),
    "collector": (lambda: (gc.isenabled(), gc.get_threshold()), lambda: (gc.disable(), gc.set_threshold(5))),
    "threads of torch": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "sockets": (socket.getdefaulttimeout, lambda: socket.setdefaulttimeout(7)),
    "name": (lambda: threading.current_thread().name, lambda: setattr(threading.current_thread(), "name", "mine")),
    "switch interval": (sys.getswitchinterval, lambda: sys.setswitchinterval(1)),
    "hook": (lambda: sys.excepthook, lambda: setattr(sys, "excepthook", ignore)),
    "folder": (lambda: tempfile.tempdir, lambda: setattr(tempfile, "tempdir", "/mine")),
    "limit": (soft_limit, set_soft_limit),
    "locale": (
        lambda: locale.setlocale(locale.LC_ALL),
        lambda: locale.setlocale(locale.LC_NUMERIC, "C" if locale.setlocale(locale.LC_NUMERIC) != "C" else "C.UTF-8"),
    ),
    "start method": (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda: multiprocessing.set_start_method("forkserver", force=True),
    ),
}


@pytest.mark.parametrize("what", PUT_BACK)
def test_what_one_assignment_puts_back_is_put_back(what):
    read, change = PUT_BACK[what]
    before, left = read(), LeftBehind()
    change()
    assert read() != before
    assert left.undo() == ""
    assert read() == before


class Finder:
    """An import hook of the program's."""

    def find_spec(self, *_):
        return None


@pytest.fixture
def leaving(request):
    """Leaves something behind until the test ends."""

    def builtin():
        request.getfixturevalue("monkeypatch").setattr(builtins, "mine", 1, raising=False)

    def finder():
        request.getfixturevalue("monkeypatch").setattr(sys, "meta_path", [Finder(), *sys.meta_path])

    def thread():
        ends = threading.Event()

        def wait():
            ends.wait()

        started = threading.Thread(target=wait)
        started.start()
        request.addfinalizer(started.join)
        request.addfinalizer(ends.set)

    def thread_of_a_library():
        pool = ThreadPoolExecutor(1)
        request.addfinalizer(pool.shutdown)
        assert pool.submit(len, "").result() == 0

    def profile():
        request.addfinalizer(lambda: threading.setprofile(None))
        threading.setprofile(ignore)

    def timer():
        request.addfinalizer(lambda: signal.alarm(0))
        signal.alarm(1000)

    def priority():  # it cannot be put back after the test
        request.getfixturevalue("monkeypatch").setattr(left_behind.os, "getpriority", lambda *_: 20)

    return {
        change.__name__: change for change in (builtin, finder, thread, thread_of_a_library, profile, timer, priority)
    }


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("builtin", "builtins"),
        ("finder", "import hooks or callbacks of the garbage collector"),
        ("thread", "a thread that still runs"),
        ("thread_of_a_library", ""),
        ("profile", "profile and trace functions"),
        ("timer", "timers"),
        ("priority", "the niceness"),
    ],
)
def test_what_cannot_be_put_back_is_named(what, named, leaving):
    left = LeftBehind()
    leaving[what]()
    assert left.undo() == named


def test_what_a_module_sets_as_it_is_imported_stays(monkeypatch):
    left = LeftBehind()
    monkeypatch.setattr(tempfile, "tempdir", "/before")
    with left.importing():
        tempfile.tempdir = "/the module's"
        monkeypatch.setitem(sys.modules, "just_imported", None)
    tempfile.tempdir = "/user code's"
    with left.importing():
        tempfile.tempdir = "/the object's, as it was unpickled"
    assert left.undo() == ""
    assert tempfile.tempdir == "/the module's"
