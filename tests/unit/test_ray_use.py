"""Who builds: whether a program uses Ray, and what a loader's own arguments ask for. Without Ray."""

import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import programs
from rayloader import DataLoader
from rayloader.epoch import hosts
from rayloader.options import Options
from rayloader.workers import ray_use


@pytest.fixture(autouse=True)
def unused(monkeypatch):
    """A program that does not use Ray, whatever other tests have left."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    for name in ("asked", "forked"):
        monkeypatch.setattr(ray_use, name, False)
    monkeypatch.setattr(ray_use, "is_own", lambda: False)


def import_ray(monkeypatch, *, connected):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))


def test_a_program_without_ray_does_not_use_it():
    assert not ray_use.is_used()


@pytest.mark.parametrize(("address", "used"), [("auto", True), ("local", True), ("10.0.0.1:6379", True), ("", False)])
def test_a_ray_that_the_environment_names_is_used(address, used, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert ray_use.is_used() is used


def test_a_ray_that_was_asked_for_is_used(monkeypatch):
    monkeypatch.setattr(ray_use, "asked", True)
    assert ray_use.is_used()


@pytest.mark.parametrize("connected", [False, True])
def test_a_ray_counts_once_the_program_is_connected(connected, monkeypatch):
    import_ray(monkeypatch, connected=connected)
    assert ray_use.is_used() is connected


def test_a_ray_that_another_thread_still_imports_does_not_count(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert not ray_use.is_used()


def test_a_ray_that_was_started_for_one_loader_does_not_count_for_others(monkeypatch):
    import_ray(monkeypatch, connected=True)
    monkeypatch.setattr(ray_use, "is_own", lambda: True)
    assert not ray_use.is_used()
    monkeypatch.setattr(ray_use, "asked", True)
    assert ray_use.is_used()


@pytest.mark.parametrize("connected", [False, True])
def test_a_fork_of_a_process_that_is_connected_does_not_use_ray(connected, monkeypatch):
    import_ray(monkeypatch, connected=connected)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    if (child := os.fork()) == 0:
        import_ray(monkeypatch, connected=False)
        os._exit(ray_use.is_used())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (not connected)
    assert ray_use.is_used()


# ---- what a loader asks for


@pytest.fixture
def built_by(monkeypatch):
    """Gives "actors" or "forks" for a loader."""
    monkeypatch.setattr(hosts, "_actors", lambda *_: "actors")
    monkeypatch.setattr(hosts, "Forks", lambda _: None)
    monkeypatch.setattr(hosts, "Fleet", lambda *_: SimpleNamespace(lend=lambda _: None))

    def kind(loader):
        fleet = hosts.fleet_for(loader, None, Options.of(loader), num_workers=1, accelerator=None)
        return "actors" if fleet == "actors" else "forks"

    return kind


ASK_FOR_ACTORS = {
    "ray_remote_args": {"ray_remote_args": {"num_cpus": 0}},
    "arenas": {"arenas": False},
    "'spawn'": {"multiprocessing_context": "spawn"},
    "'forkserver'": {"multiprocessing_context": "forkserver"},
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("given", [{}, {"multiprocessing_context": "fork"}, {"ray_remote_args": {}}], ids=str)
def test_where_a_loader_does_not_say_the_program_decides(given, used, built_by, monkeypatch):
    monkeypatch.setattr(ray_use, "asked", used)
    assert built_by(DataLoader(range(4), num_workers=1, **given)) == ("actors" if used else "forks")
    assert built_by(DataLoader(range(4), num_workers=1, **given, workers="fork")) == "forks"
    assert built_by(DataLoader(range(4), num_workers=1, **given, workers="ray")) == "actors"


@pytest.mark.parametrize("reason", ASK_FOR_ACTORS)
def test_arguments_of_actors_ask_for_them_for_that_loader_alone(reason, built_by):
    given = ASK_FOR_ACTORS[reason]
    assert built_by(DataLoader(range(4), num_workers=1, **given)) == "actors"
    assert built_by(DataLoader(range(4), num_workers=1)) == "forks"
    with pytest.raises(ValueError, match=f'workers="fork" makes workers forks of this process, but .*{reason}'):
        built_by(DataLoader(range(4), num_workers=1, workers="fork", **given))


def test_arenas_that_the_environment_switches_off_ask_for_actors(built_by, monkeypatch):
    monkeypatch.setenv("RAYLOADER_ARENAS", "0")
    assert built_by(DataLoader(range(4), num_workers=1)) == "actors"


def test_a_replica_that_ray_cannot_send_is_given_to_forks(built_by, monkeypatch):
    monkeypatch.setattr(ray_use, "asked", True)
    monkeypatch.setattr(hosts, "_actors", lambda *_: None)
    assert built_by(DataLoader(range(4), num_workers=1)) == "forks"


@pytest.mark.parametrize("default", ["fork", "forkserver", "spawn"])
def test_the_default_start_method_of_a_python_is_no_choice_of_the_program(default):
    program = f"""
import multiprocessing, sys
from multiprocessing.context import _concrete_contexts, _default_context
_default_context._default_context = _concrete_contexts[{default!r}]
methods = sorted(_concrete_contexts, key={default!r}.__ne__)
multiprocessing.get_all_start_methods = _default_context.get_all_start_methods = lambda: methods
from rayloader import DataLoader
lock = multiprocessing.Lock()  # now it is as if it had been chosen
assert multiprocessing.get_start_method(allow_none=True) == {default!r}
for workers in "fork", "auto":
    assert list(DataLoader(range(4), 2, num_workers=1, collate_fn=list, workers=workers)) == [[0, 1], [2, 3]]
assert "ray" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("method", "count"), [("spawn", 1), ("forkserver", 1), ("fork", 0)])
def test_a_start_method_of_the_program_gives_forks_and_one_warning(method, count):
    program = f"""
import multiprocessing, os, sys, warnings
from rayloader import DataLoader
multiprocessing.set_start_method({method!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    list(DataLoader(range(4), num_workers=1, workers="fork"))
    assert not caught, caught
    for _ in range(2):
        assert list(DataLoader(range(4), 2, num_workers=1, collate_fn=list)) == [[0, 1], [2, 3]]
assert "ray" not in sys.modules
print([(str(one.message)[:36], one.filename) for one in caught])
"""
    done = programs.run(program)
    is_default = method == multiprocessing.get_all_start_methods()[0]  # which is no choice
    expected = [] if is_default else [("multiprocessing.set_start_method('" + method[:2], "<string>")] * count
    assert (done.stdout, done.returncode) == (f"{expected}\n", 0), done.stderr
