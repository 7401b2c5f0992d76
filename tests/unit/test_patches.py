"""Which names of installed modules count as bound anew by the program's code. No Ray."""

import functools
import sys
import sysconfig
import types
from unittest import mock

import pytest

from rayloader.inherit.patches import Patches

SOURCE = """
LIMIT = 100
state = cache = None

class Image:
    def convert(self):
        return "converted"

def load():
    return "loaded"

def fill():
    global cache, found
    cache, found = object(), load
"""


@pytest.fixture
def installed(monkeypatch):
    """An installed module, as `installed` in `sys.modules`."""
    module = types.ModuleType("installed")
    module.__file__ = f"{sysconfig.get_path('purelib')}/installed.py"
    exec(SOURCE, vars(module))
    monkeypatch.setitem(sys.modules, "installed", module)
    return module


def changes():
    """Made for each test: the program's functions that a process has imported before are known from then on."""

    def rebinds():
        import installed

        installed.load = lambda: "mine"

    def rebinds_with_a_librarys_function():
        import installed

        installed.load = functools.partial(installed.load)

    def sets_by_name():
        setattr(sys.modules["installed"], "load", len)  # noqa: B010

    def mocks():
        mock.patch("installed.load").start()

    def rebinds_a_method():
        import installed

        installed.Image.convert = lambda image: "mine"

    def adds_a_method():
        import installed

        installed.Image.mine = lambda image: "mine"

    def sets_a_variable():
        import installed

        installed.state = 3

    def sets_a_constant():
        import installed

        installed.LIMIT = None

    def lets_it_fill_its_cache():
        import installed

        installed.fill()

    return [value for value in locals().values() if callable(value)]


NAMED = {
    "rebinds": "installed.load",
    "rebinds_with_a_librarys_function": "installed.load",
    "sets_by_name": "installed.load",
    "mocks": "installed.load",
    "rebinds_a_method": "installed.Image.convert",
    "adds_a_method": "installed.Image.mine",
    "sets_a_variable": "installed.state",
    "sets_a_constant": "",
    "lets_it_fill_its_cache": "",
}


@pytest.mark.parametrize("name", NAMED)
def test_what_the_program_binds_anew_is_named_unless_it_is_a_constant(name, installed):
    (change,) = [change for change in changes() if change.__name__ == name]
    patches = Patches()
    patches.note(anew=False)
    assert patches.undo() == ""
    change()
    assert patches.undo() == NAMED[name]
    mock.patch.stopall()
    assert installed.LIMIT == 100


def test_what_was_changed_before_the_replica_had_arrived_stays(installed):
    (change,) = [change for change in changes() if change.__name__ == "rebinds"]
    patches = Patches()
    patches.note(anew=False)
    change()
    patches.note(anew=True)
    assert patches.undo() == ""
    assert installed.load() == "mine"
