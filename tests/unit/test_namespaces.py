"""What is bound in modules is read without importing those that are lazy."""

import importlib.util
import random
import sys
import types

import pytest

from rayloader.namespaces import namespace_of
from rayloader.random.search import search


@pytest.fixture
def lazy(tmp_path, monkeypatch):
    """A module that raises an error when it is imported, which asking it for an attribute does."""
    (tmp_path / "optional.py").write_text("raise ImportError('it is not installed')")
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.find_spec("optional")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "optional", module)
    return module


def generators_beside(module):
    """What a search finds in the globals of code that names the module, and a generator."""
    contents = {"__name__": __name__, "module": module, "RNG": random.Random(1)}
    exec("def function():\n    return module.attribute, RNG", contents)
    return [one.random() for one in search({"function": contents["function"]}).values()]


def test_lazy_modules_among_globals_stay_lazy(lazy):
    assert generators_beside(lazy) == [random.Random(1).random()]
    assert type(lazy) is not types.ModuleType


def test_the_slot_of_a_module_counts_and_not_what_a_subclass_says():
    class Shadowing(types.ModuleType):
        @property
        def __dict__(self):
            raise AssertionError("the user's code")

        __class__ = property(lambda self: 1 / 0)

    module = Shadowing("shadowing")
    assert namespace_of(module)["__name__"] == "shadowing"
    assert namespace_of(types.SimpleNamespace(generator=1)) == {}
    assert generators_beside(module)
