"""Who builds: whether a program uses Ray, and what a loader's own arguments ask for. Without Ray."""

import os
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


@pytest.mark.parametrize(
    ("address", "asked", "connected", "own", "used"),
    [
        (None, False, None, False, False),
        ("auto", False, None, False, True),
        ("local", False, None, False, True),
        ("10.0.0.1:6379", False, None, False, True),
        ("", False, None, False, False),
        (None, True, None, False, True),
        (None, False, False, False, False),
        (None, False, True, False, True),
        (None, False, True, True, False),  # it was started for one loader, and does not count for others
        (None, True, True, True, True),
    ],
)
def test_ray_is_used_where_it_is_named_asked_for_or_connected(address, asked, connected, own, used, monkeypatch):
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    if connected is not None:
        import_ray(monkeypatch, connected=connected)
    monkeypatch.setattr(ray_use, "asked", asked)
    monkeypatch.setattr(ray_use, "is_own", lambda: own)
    assert ray_use.is_used() is used


def test_a_ray_that_another_thread_still_imports_does_not_count(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace())
    assert not ray_use.is_used()


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


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("given", [{}, {"multiprocessing_context": "fork"}, {"ray_remote_args": {}}], ids=str)
def test_where_a_loader_does_not_say_the_program_decides(given, used, built_by, monkeypatch):
    monkeypatch.setattr(ray_use, "asked", used)
    assert built_by(DataLoader(range(4), num_workers=1, **given)) == ("actors" if used else "forks")
    assert built_by(DataLoader(range(4), num_workers=1, **given, workers="fork")) == "forks"
    assert built_by(DataLoader(range(4), num_workers=1, **given, workers="ray")) == "actors"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"ray_remote_args": {"num_cpus": 0}}, "ray_remote_args"),
        ({"arenas": False}, "arenas"),
        ({"multiprocessing_context": "spawn"}, "'spawn'"),
        ({"multiprocessing_context": "forkserver"}, "'forkserver'"),
    ],
)
def test_arguments_of_actors_ask_for_them_for_that_loader_alone(given, reason, built_by):
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


@pytest.mark.parametrize(
    ("default", "chosen", "count"),
    [("fork", "spawn", 1), ("fork", "forkserver", 1), ("fork", "fork", 0), ("forkserver", None, 0)],
)
def test_a_start_method_that_the_program_chooses_gives_forks_and_one_warning(default, chosen, count):
    """The default of a Python, which is "forkserver" from 3.14 on, is no choice of the program."""
    program = f"""
import multiprocessing, sys, warnings
from multiprocessing.context import _concrete_contexts, _default_context
_default_context._default_context = _concrete_contexts[{default!r}]
methods = sorted(_concrete_contexts, key={default!r}.__ne__)
multiprocessing.get_all_start_methods = _default_context.get_all_start_methods = lambda: methods
from rayloader import DataLoader
if {chosen!r} is not None:
    multiprocessing.set_start_method({chosen!r})
lock = multiprocessing.Lock()  # now it is as if it had been chosen
assert multiprocessing.get_start_method(allow_none=True) == {chosen or default!r}
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
    expected = [(f"multiprocessing.set_start_method('{chosen}"[:36], "<string>")] * count
    assert (done.stdout, done.returncode) == (f"{expected}\n", 0), done.stderr
