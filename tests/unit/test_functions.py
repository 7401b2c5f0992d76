"""Functions that travel by value: in a worker they are over the globals of their own modules."""

import importlib
import pickle
import random
import sys
import types

import cloudpickle
import numpy as np
import pytest
import torch

from rayloader.state.generators import Generators, noting
from rayloader.state.module_globals import ModuleGlobals
from rayloader.transport.codec import decode, encode
from rayloader.transport.mapped import Mappings

SOURCE = """
import asyncio, functools, random
import numpy as np
import torch

SCALE = 1
TABLE = None
HELD = []
RNG = random.Random(0)
MISSING = object()

def helper(x):
    return x * SCALE

def nested():
    factor = 2
    def inner(x, *, one=1):
        return x * SCALE * factor // 2 * one
    inner.attribute = "kept"
    return inner

def local_class():
    class Local:
        def __call__(self, x):
            return super().__hash__() * 0 + self.scaled(x)
        @staticmethod
        def scaled(x):
            return x * SCALE
    return Local()

def decorated():
    def outer(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args)
        return wrapper
    return outer(lambda x: x * SCALE)

def recursive():
    def down(x, depth=3):
        return down(x, depth - 1) if depth else x * SCALE
    return down

def generator():
    def each(x):
        yield x * SCALE
    return lambda x: next(each(x))

def coroutine():
    async def later(x):
        return x * SCALE
    return lambda x: asyncio.run(later(x))

def setter():
    def set_scale(scale):
        global SCALE
        SCALE = scale
    return set_scale

by_name = lambda x: x * SCALE
REGISTRY = {"helper": helper}

class Names(list):
    pass

class Config:
    size = 1

NAMES, CONFIG = Names(["a"]), Config()
CONFIGS = [CONFIG]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the program's own."""
    (tmp_path / "own_functions.py").write_text(SOURCE)
    (tmp_path / "own_alias.py").write_text("from own_functions import MISSING, RNG\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr("rayloader.state.module_globals._finder.pending", {})
    yield importlib.import_module("own_functions")
    for name in ("own_functions", "own_alias"):
        sys.modules.pop(name, None)


def in_a_worker(obj):
    """As a process has it that has not imported the module before; with the module as it is there."""
    encoded, state = encode(obj, mapped=Mappings()), ModuleGlobals.capture()
    for name in ("own_functions", "own_alias"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    state.adopt()
    return decode(encoded.skeleton, encoded.buffers), sys.modules.get("own_functions")


KINDS = "by_name", "nested", "local_class", "decorated", "recursive", "generator", "coroutine"


@pytest.mark.parametrize("kind", KINDS)
def test_they_share_the_globals_of_their_module(module, kind):
    made = getattr(module, kind)
    made = made if kind == "by_name" else made()
    (function, set_scale), new = in_a_worker([made, module.setter()])
    assert new is not module
    new.SCALE = 10
    assert function(3) == 30
    set_scale(20)
    assert (new.SCALE, new.helper(3), function(3), module.SCALE) == (20, 60, 60, 1)


def test_what_a_function_has_of_its_own_stays(module):
    function = module.nested()
    function.__annotations__["x"], function.__kwdefaults__["one"] = int, 3
    function, new = in_a_worker(function)
    assert (function.attribute, function(1), function.__annotations__) == ("kept", 3, {"x": int})
    assert (function.__globals__ is vars(new), function.__module__) == (True, "own_functions")


def generators():
    return {
        "Random": random.Random(1),
        "Generator": np.random.default_rng(1),
        "RandomState": np.random.RandomState(1),
        "BitGenerator": np.random.PCG64(1),
        "torch": torch.Generator().manual_seed(1),
    }


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return generator.random_raw() if isinstance(generator, np.random.BitGenerator) else generator.random()


@pytest.mark.parametrize("kind", generators())
def test_a_generator_of_the_module_is_one_and_has_the_drivers_state(module, kind, tmp_path):
    seeds = {"Random": "random.Random(0)", "Generator": "np.random.default_rng(0)", "torch": "torch.Generator()"}
    seeds |= {"RandomState": "np.random.RandomState(0)", "BitGenerator": "np.random.PCG64(0)"}
    (tmp_path / "own_functions.py").write_text(SOURCE.replace("random.Random(0)", seeds[kind]))
    module.RNG = generators()[kind]
    draw(module.RNG)
    module.TABLE = eval("lambda: RNG", vars(module))
    alias = importlib.import_module("own_alias")
    alias.RNG = module.RNG
    with noting() as noted:
        (function, held), new = in_a_worker([module.TABLE, module.RNG])
    alias = importlib.import_module("own_alias")
    assert function() is held is new.RNG is alias.RNG
    assert draw(held) == draw(module.RNG)
    generators_ = Generators({}, noted)
    assert len(generators_.given) == len(generators_.shared) == 1


def test_generators_that_are_one_in_a_fresh_module_and_two_in_the_program_stay_two(module, tmp_path):
    (tmp_path / "own_functions.py").write_text(SOURCE + "OTHER = RNG\n")
    module.OTHER = random.Random(7)
    functions = [eval("lambda: RNG", vars(module)), eval("lambda: OTHER", vars(module))]
    with noting():
        (one, other), new = in_a_worker(functions)
    assert [one().random(), other().random()] == [random.Random(0).random(), random.Random(7).random()]
    assert [one(), other()] == [new.RNG, new.OTHER]


def test_what_the_program_has_set_arrives_in_the_module(module):
    module.TABLE, module.ADDED = torch.ones(2), {"a": torch.zeros(1)}
    module.NAMES.append("b")
    module.CONFIG.size = 2
    function, new = in_a_worker(eval("lambda: (TABLE, ADDED, NAMES, CONFIG)", vars(module)))
    assert function() == (new.TABLE, new.ADDED, new.NAMES, new.CONFIG)
    assert (new.TABLE.tolist(), new.ADDED, new.NAMES) == ([1, 1], {"a": torch.zeros(1)}, ["a", "b"])
    assert (new.CONFIG.size, new.CONFIGS[0]) == (2, new.CONFIG)


def test_what_is_equal_stays_the_modules_own(module):
    module.HELD.append(module.HELD)
    in_module = eval("lambda: (REGISTRY, SCALE)", vars(module))
    (function, itself), new = in_a_worker([in_module, eval("lambda: HELD", vars(module))])
    assert new.REGISTRY["helper"] is new.helper
    assert function()[0] is new.REGISTRY
    assert new.__dict__["HELD"] is itself()
    assert itself()[0] is itself()
    registry = new.REGISTRY
    encoded = encode(function, mapped=Mappings())
    assert decode(encoded.skeleton, encoded.buffers)()[0] is registry


def test_a_bare_object_of_a_module_is_one(module):
    importlib.import_module("own_alias")
    (default, other), new = in_a_worker([module.MISSING, object()])
    assert default is new.MISSING
    assert other is not new.MISSING
    assert type(other) is object


def test_functions_of_what_a_worker_cannot_import_share_a_copy(module, tmp_path):
    (tmp_path / "own_functions.py").unlink()
    for file in tmp_path.glob("__pycache__/*"):
        file.unlink()
    module.SCALE = 5
    (function, set_scale), new = in_a_worker([module.by_name, module.setter()])
    assert (function(1), new) == (5, None)
    set_scale(7)
    assert function(1) == 7


def test_functions_of_another_module_of_that_name_share_a_copy(module, tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "own_functions.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "other")
    function, new = in_a_worker(module.by_name)
    new.SCALE = 3
    assert function(1) == 1


def test_functions_of_modules_that_are_to_travel_by_value_do(module):
    cloudpickle.register_pickle_by_value(module)
    try:
        function, new = in_a_worker(module.helper)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    assert (function(2), new) == (2, None)


def test_functions_of_modules_made_at_run_time_travel_with_what_they_name():
    made = sys.modules["made_here"] = types.ModuleType("made_here")
    try:
        exec("SCALE = 2\nfunction = lambda x: x * SCALE", vars(made))
        encoded = encode(made.function, mapped=Mappings())
    finally:
        del sys.modules["made_here"]
    assert decode(encoded.skeleton, encoded.buffers)(2) == 4


def test_batches_bring_functions_with_a_copy_of_what_they_name(module):
    encoded = encode(module.by_name)
    function = decode(encoded.skeleton, encoded.buffers)
    assert function.__globals__ is not vars(module)
    assert pickle.loads(cloudpickle.dumps(function))(1) == 1
