"""Generators that the program's code names without holding them: found, and found again after a change."""

import sys
import types

import pytest

from rayloader.state.named_generators import NamedGenerators


@pytest.fixture
def program(monkeypatch):
    """Makes a module of the program's own from its source."""

    def make(source, name="program", package=""):
        module = types.ModuleType(name)
        module.__package__ = package
        monkeypatch.setitem(sys.modules, name, module)
        exec("import collections, functools, random\nR = random.Random\n" + source, vars(module))
        return module

    return make


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("outer.inner.settings", "from .settings import RNG"),
        ("outer.settings", "from ..settings import RNG"),
        ("outer.settings", "from .. import settings"),
        ("settings", "from settings import RNG"),
    ],
)
def test_modules_that_code_imports_by_their_names_from_its_package(program, module, code):
    settings = program("RNG = R(1)", module)
    user = program(f"def draw():\n    {code}\n    return RNG.random()", "outer.inner.user", "outer.inner")
    assert NamedGenerators(user.draw).look() == [settings.RNG]


def test_attributes_of_a_metaclass(program):
    own = program(
        """
class Meta(type):
    RNG = R(1)
class Base(metaclass=Meta): pass
del Meta
def draw(): return Base.RNG.random()
"""
    )
    assert NamedGenerators(own.draw).look() == [own.Base.RNG]


@pytest.mark.parametrize("size", [None, 8])
def test_what_a_cache_of_results_holds(program, size):
    own = program(f"make = functools.lru_cache(maxsize={size})(lambda seed: R(seed))\ndef draw(): return make(1)")
    drawn = own.draw()
    assert NamedGenerators(own.draw).look() == [drawn]
