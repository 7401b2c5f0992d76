"""Generators that objects hold, or their code names: found under the same names in another process's copy."""

import collections
import functools
import io
import random
import sys
import types

import numpy as np
import pytest
import torch

from rayloader.random import search
from rayloader.random.generators import KINDS as CLASSES
from rayloader.random.generators import RandomState, engine, reduce_generator, same_state, set_state, state_of
from rayloader.resume.state import pack_random as pack
from rayloader.resume.state import unpack_random as unpack
from rayloader.transport import codec
from rayloader.transport.replica import encode_for_worker


def module_of(program, name, monkeypatch):
    """A module in a folder of the program's, or of a package's."""
    monkeypatch.setitem(sys.modules, name, module := types.ModuleType(name))
    module.__file__ = f"/usr/lib/{program}/{name}.py"
    return module


def found_in(obj):
    return [*search.search({"object": obj}).values()]


def names_in(obj):
    return [*search.search({"dataset": obj})]


def travelled(obj):
    """The object as a worker has it."""
    encoded = encode_for_worker(obj, (), CLASSES, reduce_generator)
    return codec.decode(encoded.skeleton, encoded.buffers)


class Holder:
    def __init__(self, held=None):
        self.held = held

    def __call__(self, *_):
        return draw(self.held)


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return (generator.rand if isinstance(generator, np.random.RandomState) else generator.random)()


KINDS = {
    "python": lambda: random.Random(1),
    "numpy": lambda: np.random.default_rng(2),
    "legacy": lambda: np.random.RandomState(3),
    "torch": lambda: torch.Generator().manual_seed(4),
}


def nested(obj, depth):
    for _ in range(depth):
        obj = Holder([obj])
    return obj


PLACES = {
    "attribute": Holder,
    "behind large data": lambda g: Holder([[*map(str, range(20_000))], [(k, k) for k in range(2_000)], g]),
    "in a long list": lambda g: Holder([*range(500), g]),
    "deep": lambda g: nested(g, 20),
    "closure": lambda g: lambda: draw(g),
    "partial": lambda g: functools.partial(draw, g),
    "default": lambda g: types.FunctionType(draw.__code__, globals(), "draw", (g,)),
    "bound method": lambda g: Holder(g).__call__,
    "slot": Slotted,
    "dict of tuples": lambda g: {"a": ({3: g},)},
    "function's attribute": lambda g: functools.update_wrapper(lambda: 0, Holder(g), assigned=()),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_wherever_they_are_and_by_the_same_name_in_a_worker(place, kind):
    generator = KINDS[kind]()
    original = PLACES[place](generator)
    copy = travelled(original)
    (found,) = found_in(original)
    assert engine(found) is engine(generator)
    state = RandomState.capture(held=search.search({"dataset": original}))
    (held,) = state.held.values()
    here = search.search({"dataset": copy})
    assert state.unlike(here) == []
    (found,) = here.values()
    assert same_state(state_of(found), held)
    draw(found if kind != "legacy" else np.random.RandomState(engine(found)))
    state.restore((), here)
    assert same_state(state_of(found), held)


def test_of_shared_state_there_is_one():
    legacy = np.random.RandomState(1)
    assert found_in([legacy._bit_generator, legacy]) == [legacy]  # its second normal number in store counts


def test_global_generators_and_those_without_a_state_are_nobodys():
    """Bound to a global generator a dataset draws in a worker, as after a fork, from the one that its seeds reach."""
    held = [np.random.rand, random.random, torch.default_generator, np.random.mtrand._rand]
    assert found_in([*held, random.SystemRandom()]) == []
    copy = travelled(held)
    assert copy[0].__self__ is copy[3] is np.random.mtrand._rand
    assert copy[1].__self__ is random._inst
    assert copy[2] is torch.default_generator
    assert found_in(copy) == []


@pytest.mark.parametrize(
    "entropy",
    [2**100, [np.int64(1), 2], np.array([3, 4], np.uint32), np.array([2**70, 3], object), ["12", 3]],
    ids=["number", "list of NumPy numbers", "array", "array of objects", "list with text"],
)
def test_what_a_generator_was_seeded_with_can_be_saved(entropy):
    sibling, generator = np.random.default_rng(entropy).spawn(2)
    generator.spawn(1)
    state = RandomState(others=(state_of(generator), state_of(sibling)))  # which share it
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    saved = unpack(torch.load(file, weights_only=True))
    assert saved.equals(state)
    expected = generator.spawn(1)[0].random()
    for again in np.random.default_rng(), generator:  # how many it had spawned is a part of its state
        set_state(again, saved.others[0])
        assert again.spawn(1)[0].random() == expected


class Own(random.Random):
    """With a pickling of its own."""

    def __reduce__(self):
        return Own, (7,), self.getstate()


def test_subclasses_and_who_is_the_same_as_whom_stay():
    generator, numpy = Own(7), np.random.default_rng(5)
    generator.random()
    copy = travelled((generator, Holder(generator), [numpy, np.random.Generator(numpy.bit_generator)]))
    one, same, numpys = copy
    assert type(one) is Own
    assert same.held is one
    assert one.random() == generator.random()
    assert numpys[0].bit_generator is numpys[1].bit_generator
    assert len(found_in(copy)) == 2


def test_containers_of_the_users_are_looked_into_without_their_code():
    """Lazy containers of packages import, or raise, when they are iterated over."""

    def refuse(*_):
        raise ValueError("this is the user's code")

    def lazy(base, content):
        methods = dict.fromkeys(("__iter__", "__getitem__", "items", "keys"), refuse)
        return type("Lazy", (base,), methods)(content)

    held = np.random.default_rng(1)
    for base in dict, collections.OrderedDict, list, tuple, collections.deque:
        assert found_in(lazy(base, {"key": held} if issubclass(base, dict) else [held])) == [held]
    assert found_in(lazy(set, [1])) == []


# ---- in the globals that code names

MODULE = """
import random, helpers, package
from helpers import augment as imported

RNG, UNUSED = random.Random(1), random.Random(2)
IN_DICT = {"key": [random.Random(3)]}

class Parent:
    RNG = random.Random(4)

    @property
    def drawn(self):
        return RNG.random()

class Child(Parent):
    other = None

def by_dict():
    return [IN_DICT["key"][0].random() for _ in range(1)]

def by_import(index):
    return imported(index)

def by_module():
    return helpers.inner.RNG.random()

def by_package():
    return package.RNG.random() + package.draw()

def two():
    import helpers  # later
    return lambda: RNG.random()

class ByDecorator:
    @staticmethod
    def one():
        return two()

"""
HELPERS = """
import random
RNG, UNUSED = random.Random(5), random.Random(6)

def augment(index):
    return RNG.random()
"""


@pytest.fixture
def module(monkeypatch):
    """A module of the program's, which imports another one of it, and one of a package's."""
    package = module_of("site-packages", "package", monkeypatch)
    package.RNG = random.Random(7)
    exec("def draw():\n    return RNG.random()", vars(package))
    helpers, inner = (module_of("program", name, monkeypatch) for name in ("helpers", "inner"))
    exec(HELPERS, vars(helpers))
    helpers.inner, inner.RNG, inner.helpers = inner, random.Random(8), helpers
    module = module_of("program", "made_by_a_test", monkeypatch)
    exec(MODULE, vars(module))
    return module


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Child", ["dataset.__class__.RNG", "dataset.__class__.drawn.fget:RNG"]),
        ("by_dict", ["dataset:IN_DICT['key'][0]"]),
        ("by_import", ["dataset:imported:RNG"]),
        ("by_module", ["dataset:helpers.RNG", "dataset:helpers.inner.RNG"]),
        ("by_package", []),
        ("ByDecorator", ["dataset.__class__.one.__func__:two:RNG"]),
    ],
)
def test_those_that_the_code_of_the_program_names_are_found(module, name, found):
    named = vars(module)[name]
    assert names_in(named() if isinstance(named, type) else named) == found


def test_code_of_a_program_that_is_sent_by_value_names_the_same(module, monkeypatch):
    """As that of `__main__` is, of which an actor has another one."""
    vars(module)["__name__"] = "__main__"
    module.two.__module__ = "__main__"
    monkeypatch.setitem(sys.modules, "__main__", module)
    encoded = encode_for_worker(module.two)
    monkeypatch.undo()
    copy = codec.decode(encoded.skeleton, encoded.buffers)
    assert copy is not module.two
    assert names_in(copy) == names_in(module.two) == ["dataset:RNG"]


def test_of_a_long_container_only_the_items_themselves_are_searched():
    holders = [Holder() for _ in range(search.LONG)]
    holders[0].held = KINDS["numpy"]()
    assert names_in(Holder([*holders, KINDS["torch"]()])) == [f"dataset.held[{search.LONG}]"]
    assert names_in(Holder(holders)) == ["dataset.held[0].held"]


def test_a_search_ends_after_so_many_objects_and_at_circles_and_modules():
    """It is made at the start of each worker, which it must not delay, whatever the dataset holds."""
    dataset = Holder(nested(Holder(), search.MOST))
    dataset.first = KINDS["numpy"]()
    assert len([*search.walk({"dataset": dataset})]) == search.MOST + 1
    assert names_in(dataset) == ["dataset.first"]
    assert found_in([list(range(10)) for _ in range(10_000)]) == []
    holder = Holder()
    holder.held = [holder, sys, np, torch, Holder, found_in, draw, None]
    assert found_in(holder) == []
    contents = [{}]
    contents[0]["self"] = contents
    assert found_in(contents) == []
    contents[0]["rng"] = random.Random(1)
    assert found_in(contents) == [contents[0]["rng"]]
