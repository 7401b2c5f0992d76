"""Generators that the program's code names without holding them: found, and found again after a change."""

import collections
import gc
import random
import sys
import types
import weakref

import pytest

from rayloader.random import named_generators
from rayloader.random.named_generators import NamedGenerators


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


# ---- after a change

SLOTTED = "class Slotted: __slots__ = ('rng',)\nSLOTTED = Slotted()\nSLOTTED.rng = R(1)\ndef draw(): return SLOTTED.rng"
CLOSURE = """
def make():
    rng = R(1)
    def draw(new=None):
        nonlocal rng
        rng = new or rng
        return rng
    return draw
inner = make()
def draw(): return inner()
"""
REPLACED = {
    "global": ("RNG = R(1)\ndef draw(): return RNG", "own.RNG = new"),
    "attribute of a function": ("def inner(): pass\ninner.rng = R(1)\ndef draw(): return inner.rng", "inner.rng = new"),
    "default": ("def inner(rng=R(1)): return rng\ndef draw(): return inner()", "inner.__defaults__ = (new,)"),
    "keyword default": (
        "def inner(*, rng=R(1)): return rng\ndef draw(): return inner()",
        "inner.__kwdefaults__['rng'] = new",
    ),
    "closure": (CLOSURE, "inner(new)"),
    "slot": (SLOTTED, "SLOTTED.rng = new"),
    "deque": ("DEQUE = collections.deque([R(1)])\ndef draw(): return DEQUE[0]", "DEQUE[0] = new"),
    "set": ("SET = {R(1)}\ndef draw(): return next(iter(SET))", "SET.clear(), SET.add(new)"),
    "dict": ("DICT = {1: R(1)}\ndef draw(): return DICT[1]", "DICT[1] = new"),
    "imported module": ("def draw():\n    import other\n    return other.RNG", "other.RNG = new"),
    "class": ("class Base: RNG = R(1)\ndef draw(): return Base.RNG", "Base.RNG = new"),
    "global that is a class": (
        "Base = None\nclass Other: RNG = None\ndef draw(): return Base.RNG",
        "own.Base = Other; Other.RNG = new",
    ),
    "behind a value that was bound since": (
        "HELD = None\ndef draw(): return HELD['rng']",
        "own.HELD = {}; named.look(); own.HELD['rng'] = new",
    ),
}


@pytest.mark.parametrize("place", REPLACED)
def test_one_that_replaces_another_is_found(program, place):
    source, replace = REPLACED[place]
    program("RNG = R(2)", "other")
    own = program(source)
    named, new = NamedGenerators(own.draw), random.Random(3)
    named.look()

    class Names(dict):
        def __missing__(self, name):
            return getattr(own, name)

    exec(replace, Names(own=own, named=named, new=new, other=sys.modules["other"], next=next))
    assert own.draw() is new
    assert named.look() == [new]


def test_a_module_that_code_imports_when_it_is_called_is_found(program):
    own = program("def draw():\n    from late import RNG\n    return RNG")
    named = NamedGenerators(own.draw)
    assert named.look() == []
    late = program("RNG = R(1)", "late")
    assert named.look() == [late.RNG]


@pytest.fixture
def searches(monkeypatch):
    """The roots of each walk."""
    walked = []
    walk = named_generators.walk
    monkeypatch.setattr(named_generators, "walk", lambda roots, **how: walked.append(roots[0][1]) or walk(roots, **how))
    return walked


CHANGING = """
RNG = R(1)
LAST = None
CACHE = {}
RECORDS = [{"id": number} for number in range(20_000)]
class Item: use = lambda self: (RNG, RECORDS)
def draw(): return RNG, LAST, CACHE, RECORDS, Item
"""


def test_it_searches_again_where_something_is_bound_that_may_lead_to_a_generator(program, searches):
    own = program(CHANGING)
    named = NamedGenerators(own.draw)
    for number in range(3):
        own.LAST = number
        assert named.look() == [own.RNG]
    assert len(searches) == 1
    own.LAST = own.Item()
    named.look()
    own.CACHE[1] = 1
    named.look()
    assert len(searches) == 3


def test_an_interrupted_search_is_made_again(program, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    own = program(CHANGING)
    named = NamedGenerators(own.draw)
    named.look()
    own.RNG = random.Random(2)
    with monkeypatch.context() as patched:
        patched.setattr(named_generators, "walk", interrupted)
        with pytest.raises(KeyboardInterrupt):
            named.look()
    assert named.look() == [own.RNG]


def test_values_that_are_gone_are_not_kept(program):
    own = program(CHANGING)
    named = NamedGenerators(own.draw)
    for _ in range(3):
        named.look()
        item = own.LAST = own.Item()
        item.held = [item]
        named.look()
        gone, item = weakref.ref(item), None
        own.LAST = None
        named.look()
        gc.collect()
        assert gone() is None


def test_a_place_that_is_too_large_is_not_watched_and_others_are(program, monkeypatch):
    own = program("RECORDS = [{} for _ in range(200)]\nRNG = R(1)\ndef draw(): return RECORDS, RNG")
    monkeypatch.setattr(named_generators, "_MOST_WATCHED", 200)
    named = NamedGenerators(own.draw)
    named.look()
    own.RNG = random.Random(2)
    assert named.look() == [own.RNG]


SHAPES = """
class Item:
    __slots__ = ("one", "other")
class Open: pass
class Other(Open): rng = R(0)
TOP = [None] * 4
NAMES = {}
DEQUE = collections.deque([None, None])
EXTRA = R(99)
def inner(): return Other, EXTRA
def draw(): return TOP, NAMES, DEQUE, Item, Open, inner
"""


def change(container, value, rng):
    """Binds a value anew somewhere in a container."""
    if isinstance(container, (list, collections.deque)):
        container[rng.randrange(2)] = value
        if rng.random() < 0.2:
            container.reverse()
    elif isinstance(container, dict):
        container[rng.choice("ab")] = value
        if rng.random() < 0.3:
            container.pop("a", None)
    else:
        setattr(container, rng.choice(["one", "other"]), value)


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_always_that_of_a_new_search(program, seed):
    own, rng = program(SHAPES), random.Random(seed)
    containers = [own.TOP, own.NAMES, own.DEQUE]

    def value():
        match rng.randrange(9):
            case 0:
                return random.Random(1)
            case 1:
                return rng.choice(containers)
            case 2:
                containers.append(made := [value(), value()])
            case 3:
                containers.append(made := {"one": value()})
            case 4:
                containers.append(made := own.Item())
            case 5:
                containers.append(made := rng.choice([own.Open, own.Other])())
            case 6:
                return rng.choice([own.inner, own.Other, own.EXTRA, (value(), value())])
            case _:
                return None
        return made

    named = NamedGenerators(own.draw)
    for _ in range(60):
        assert list(map(id, named.look())) == list(map(id, NamedGenerators(own.draw).look()))
        for _ in range(rng.randrange(3)):
            change(rng.choice(containers), value(), rng)
