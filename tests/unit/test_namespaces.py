"""What is bound in modules is read without importing those that are lazy."""

import importlib.util
import random
import sys
import types

import pytest

from rayloader.inherit.module_globals import own_modules
from rayloader.namespaces import namespace_of
from rayloader.random.generators import find_generators, in_modules
from rayloader.random.named_generators import NamedGenerators


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


def code_of(module):
    """A function that names the module, and a generator."""
    namespace = {"__name__": __name__, "optional": module, "RNG": random.Random(1)}
    exec("def draw(): return optional.RNG.random() + RNG.random()", namespace)
    return namespace["draw"]


def test_lazy_modules_that_code_names_stay_lazy(lazy):
    draw = code_of(lazy)
    for _ in range(2):
        assert NamedGenerators(draw).look() == find_generators(draw) == [draw.__globals__["RNG"]]
    assert type(lazy) is not types.ModuleType


def test_lazy_modules_of_the_process_stay_lazy(lazy):
    assert "optional" in dict(own_modules())
    list(in_modules())
    assert type(lazy) is not types.ModuleType


def test_the_slot_counts_and_not_what_a_subclass_says():
    class Shadowing(types.ModuleType):
        @property
        def __dict__(self):
            raise AssertionError("the user's code")

        __class__ = property(lambda self: 1 / 0)

    module = Shadowing("shadowing")
    assert namespace_of(module)["__name__"] == "shadowing"
    assert NamedGenerators(code_of(module)).look()


@pytest.mark.parametrize("other", [None, object(), types.SimpleNamespace(generator=1)], ids=repr)
def test_what_is_no_module_has_no_namespace(other):
    assert namespace_of(other) == {}
