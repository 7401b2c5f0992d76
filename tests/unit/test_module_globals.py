"""Which globals of which modules travel, and what is said of the others."""

import argparse
import collections
import dataclasses
import enum
import importlib
import importlib.util
import json
import logging
import pickle
import random
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from rayloader.inherit.module_globals import ModuleGlobals
from rayloader.namespaces import own_modules
from rayloader.random import generators
from rayloader.random.search import search


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the program's own."""
    (tmp_path / "own_settings.py").write_text("VALUE = 1\nSAME = []\nNOTHING = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield importlib.import_module("own_settings")
    sys.modules.pop("own_settings", None)


def in_a_worker(state):
    """The module as a process has it that imports it after it has adopted the state."""
    del sys.modules["own_settings"]
    state.adopt()
    return importlib.import_module("own_settings")


PLAIN = [
    *(True, -1, 0.5, 1j, "text", b"bytes", None, (1, [2]), {1, 2}, frozenset("a"), {"a": {1: None}}),
    *(Path("/data"), torch.float16, torch.device("cuda:1")),
    *(argparse.Namespace(a=[1]), types.SimpleNamespace(b=argparse.Namespace())),
    *(collections.OrderedDict(a=1), collections.Counter("aab"), numpy.float32(0.5), numpy.bool_(True)),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_travel(module, value):
    module.VALUE = value
    new = in_a_worker(ModuleGlobals.capture())
    assert (new.VALUE, type(new.VALUE)) == (value, type(value))


class Colour(enum.Enum):
    RED = 1


def recursive():
    values = []
    values.append(values)
    return values


def deep():
    value = ()
    for _ in range(5000):
        value = (value,)
    return value


def some_function():
    pass


OTHERS = {
    f"{__name__}.Colour RED": Colour.RED,
    "builtins.list of 1": [Colour.RED],
    "torch.Tensor": torch.ones(1),
    "builtins.object": object(),
    "builtins.list of 1 ": recursive(),
    "builtins.tuple of 1": deep(),
    "builtins.list of 200000": list(range(200_000)),
    f"{__name__}.some_function": some_function,
    f"{__name__}.Colour": Colour,
    "builtins.print": print,
}


@pytest.mark.parametrize("described", OTHERS)
def test_what_cannot_travel_is_said_by_name_once(module, described, caplog, monkeypatch):
    value = OTHERS[described]
    module.VALUE, module.NOTHING = 2, value
    monkeypatch.setattr("rayloader.inherit.module_globals._finder._reported", set())
    state = ModuleGlobals.capture()
    with caplog.at_level(logging.WARNING, "rayloader"):
        new = in_a_worker(state)
        state.adopt()
    assert (new.VALUE, new.NOTHING) == (2, None)
    (record,) = caplog.records
    assert f"NOTHING ({described.strip()}) of the module own_settings" in record.getMessage()
    assert "pass what the dataset needs to its constructor" in record.getMessage()


def test_what_is_equal_stays_the_same_object(module):
    state = ModuleGlobals.capture()
    before = module.SAME
    state.adopt()
    assert module.SAME is before
    module.SAME, module.VALUE = [True], True
    state = ModuleGlobals.capture()
    module.SAME, module.VALUE = [1], 1
    state.adopt()
    assert [type(module.SAME[0]), type(module.VALUE)] == [bool, bool], "1 is equal, and is not the same"


def test_what_two_names_share_is_shared_again(module):
    module.VALUE = module.SAME = {"a": 1}
    new = in_a_worker(ModuleGlobals.capture())
    assert new.VALUE is new.SAME


def test_modules_of_others_are_left_alone(module, monkeypatch, caplog):
    monkeypatch.setattr(json, "SIZE", 5, raising=False)
    monkeypatch.setattr(torch, "SIZE", 5, raising=False)
    state = ModuleGlobals.capture()
    json.SIZE = torch.SIZE = 6
    in_a_worker(state)
    assert (json.SIZE, torch.SIZE) == (6, 6)
    assert not caplog.records


OBJECTS = """
import dataclasses

@dataclasses.dataclass
class Config:
    size: int = 1
    layers: list = dataclasses.field(default_factory=list)

class Items(dict):
    pass

CONFIG, ITEMS = Config(), Items(a=1)
DEFAULTS = [CONFIG, ITEMS]
"""


def test_objects_with_plain_attributes_are_as_the_program_has_set_them(tmp_path, monkeypatch, module):
    (tmp_path / "own_settings.py").write_text(OBJECTS)
    module = importlib.reload(module)
    module.CONFIG.size, module.CONFIG.layers, module.CONFIG.extra = 64, [1, 2], {"a": None}
    module.ITEMS["b"] = module.ITEMS.name = 2
    new = in_a_worker(ModuleGlobals.capture())
    assert vars(new.CONFIG) == {"size": 64, "layers": [1, 2], "extra": {"a": None}}
    assert type(new.CONFIG) is new.Config is not module.Config
    assert (new.ITEMS, new.ITEMS.name) == ({"a": 1, "b": 2}, 2)
    assert new.DEFAULTS[0] is new.CONFIG
    assert new.DEFAULTS[1] is new.ITEMS


class Ordered(collections.OrderedDict):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    size: int
    scale: float = 0.0


@pytest.mark.parametrize(
    ("theirs", "own"),
    [
        (Ordered(a=1), Ordered(b=2, a=3)),
        (Ordered(a=1, b=2), Ordered(b=2, a=1)),
        (collections.defaultdict(list, a=1), collections.defaultdict(list, b=2)),
        (Slotted(1), Slotted(9, -0.0)),
    ],
)
def test_objects_that_keep_their_content_elsewhere_are_as_the_program_has_set_them(module, caplog, theirs, own):
    module.VALUE = own
    state = ModuleGlobals.capture()
    module.VALUE = theirs
    state.adopt()
    assert module.VALUE is theirs
    assert repr(theirs) == repr(own)
    assert not caplog.records


def test_the_sign_of_a_zero_travels(module):
    module.VALUE = -0.0
    state = ModuleGlobals.capture()
    module.VALUE = 0.0
    state.adopt()
    assert repr(module.VALUE) == "-0.0"


class Sized(list):
    def __len__(self):
        raise RuntimeError("not to be called")


@pytest.mark.parametrize("kind", [Sized, collections.deque])
def test_a_collection_of_a_class_of_its_own_and_another_size_is_said_by_name(module, caplog, kind):
    module.VALUE = kind([1, 2])
    state = ModuleGlobals.capture()
    module.VALUE = kind([1])
    state.adopt()
    assert "VALUE" in caplog.text
    assert "of 2" in caplog.text


def test_a_method_that_is_another_one_of_its_class_is_said_by_name(tmp_path, module, caplog, monkeypatch):
    source = "class DS:\n    def load(self): ...\n    def fast(self): ...\n    same = load\n"
    (tmp_path / "own_settings.py").write_text(source)
    changed = importlib.reload(module)
    monkeypatch.setattr(changed.DS, "load", changed.DS.fast)
    in_a_worker(ModuleGlobals.capture())
    assert "DS.load (own_settings.DS.fast)" in caplog.text
    assert "DS.same" not in caplog.text


def test_torchs_collate_map_under_a_name_of_the_programs_is_not_compared(module, caplog, monkeypatch):
    """It travels with the dataset."""
    module.NOTHING = default_collate_fn_map
    monkeypatch.setitem(default_collate_fn_map, Colour, some_function)
    in_a_worker(ModuleGlobals.capture())
    assert not caplog.records


CLASSES = """
import enum

class Settings:
    size = 1
    names = ["a"]

class Strict(type):
    def __setattr__(cls, name, value):
        raise AttributeError(name)

class Config(Settings, metaclass=Strict):
    rate: float = 0.1
    settings = Settings()

    class Nested:
        depth = 1

    def method(self):
        return self.rate

    @property
    def double(self):
        return 2 * self.rate

class Mode(enum.Enum):
    TRAIN = 1

Again = Config
"""


def test_attributes_of_classes_are_as_the_program_has_set_them(tmp_path, module, caplog):
    (tmp_path / "own_settings.py").write_text(CLASSES)
    module = importlib.reload(module)
    module.Settings.size = 9
    module.Settings.names.append("b")
    module.Settings.added = {"a": 1}
    type.__setattr__(module.Config, "rate", 0.5)
    module.Config.Nested.depth = 2
    module.Config.settings.size = 3
    new = in_a_worker(ModuleGlobals.capture())
    assert new.Config is new.Again is not module.Config
    assert (new.Settings.size, new.Settings.names, new.Settings.added) == (9, ["a", "b"], {"a": 1})
    assert (new.Config.rate, new.Config().method(), new.Config().double) == (0.5, 0.5, 1.0)
    assert (new.Config.size, new.Config.Nested.depth, new.Config.settings.size) == (9, 2, 3)
    assert "size" not in vars(new.Config)
    assert new.Mode.TRAIN.value == 1
    assert not caplog.records


def test_what_a_class_holds_that_cannot_travel_is_said_by_name(tmp_path, module, caplog, monkeypatch):
    (tmp_path / "own_settings.py").write_text(CLASSES)
    module = importlib.reload(module)
    monkeypatch.setattr("rayloader.inherit.module_globals._finder._reported", set())
    module.Settings.size = torch.ones(1)
    type.__setattr__(module.Config, "method", some_function)
    type.__setattr__(module.Config, "double", property(some_function))
    new = in_a_worker(ModuleGlobals.capture())
    assert (new.Settings.size, new.Config().method(), new.Config().double) == (1, 0.1, 0.2)
    (record,) = caplog.records
    patched = f"Config.method ({__name__}.some_function), Config.double ({__name__}.some_function)"
    assert f"Settings.size (torch.Tensor), {patched} of the module own_settings" in record.getMessage()


def test_a_class_that_a_worker_does_not_have_is_said_by_name(tmp_path, module, caplog, monkeypatch):
    (tmp_path / "own_settings.py").write_text(CLASSES)
    module = importlib.reload(module)
    monkeypatch.setattr("rayloader.inherit.module_globals._finder._reported", set())
    state = ModuleGlobals.capture()
    (tmp_path / "own_settings.py").write_text(
        CLASSES.replace("class Settings", "Settings = None\n\nclass Other", 1)
        .replace("(Settings, ", "(Other, ")
        .replace("= Settings()", "= Other()")
    )
    importlib.invalidate_caches()
    new = in_a_worker(state)
    assert new.Settings is None
    assert "Settings (own_settings.Settings)" in caplog.records[0].getMessage()


def test_a_collection_of_another_size_is_said_by_name(module, caplog):
    """As a vocabulary that the program has filled."""
    module.SAME = dict.fromkeys(range(200_000))
    in_a_worker(ModuleGlobals.capture())
    assert "SAME (builtins.dict of 200000) of the module own_settings" in caplog.records[0].getMessage()


GENERATORS = """
import functools
import random
import numpy as np
import torch

class Augment:
    of_class = random.Random(1)

    def __init__(self):
        self.deep = [{"torch": torch.Generator().manual_seed(2)}]

    def draw(self):
        return self.of_class.random(), float(torch.rand(1, generator=self.deep[0]["torch"]))

AUGMENT = Augment()
PARTIAL = functools.partial(lambda held: held.random(), random.Random(6))
NUMPY, BITS, LATE, PLACES = np.random.default_rng(7), np.random.PCG64(8), None, {}
ONE = TWO = random.Random(9)
BOUND = random.Random(13).random

def everything():  # one draw from each
    held = [one for one in (LATE, *PLACES.values(), ONE, TWO) if one is not None]
    return [AUGMENT.draw(), PARTIAL(), NUMPY.random(), BITS.random_raw(), BOUND(),
            [one.random() for one in held]]
"""


@pytest.fixture
def drawing(module, tmp_path):
    """The module with generators wherever functions may have theirs."""
    (tmp_path / "own_settings.py").write_text(GENERATORS)
    return importlib.reload(module)


def test_generators_are_as_they_are_in_the_program(drawing):
    drawing.everything()
    state = ModuleGlobals.capture()
    expected = drawing.everything()
    new = in_a_worker(state)
    assert new.everything() == expected
    state.adopt()
    assert new.everything() == expected, "where the module is there already too, as in a warm process"


def test_generators_that_the_program_has_put_there_are_made(drawing, caplog):
    shared = random.Random(10)
    drawing.LATE = drawing.PLACES["a"] = shared
    drawing.ONE, drawing.NUMPY = random.Random(11), numpy.random.Generator(numpy.random.MT19937(12))
    state = ModuleGlobals.capture()
    expected = drawing.everything()
    new = in_a_worker(state)
    assert new.LATE is new.PLACES["a"]
    assert new.ONE is not new.TWO
    assert new.everything() == expected
    assert not caplog.records


def test_a_generator_of_two_modules_is_one(drawing, tmp_path, monkeypatch):
    (tmp_path / "own_other.py").write_text("from own_settings import NUMPY, ONE\nMINE = ONE\n")
    other = importlib.import_module("own_other")
    try:
        other.MINE = drawing.NUMPY
        state = ModuleGlobals.capture()
        expected = drawing.NUMPY.random()
        del sys.modules["own_other"]
        new = in_a_worker(state)
        assert new.NUMPY.random() == expected
        later = importlib.import_module("own_other")
        assert later.MINE is later.NUMPY is new.NUMPY
        assert (later.ONE, new.NUMPY.random()) == (new.ONE, drawing.NUMPY.random()), "its state is set once"
    finally:
        sys.modules.pop("own_other", None)


def test_what_modules_draw_while_they_are_imported_is_as_it_was(drawing, tmp_path):
    """The first from a module that it imports itself, the second from one that was there."""
    source = "import own_settings\nTABLE = [object(), own_settings.NUMPY.random(), own_settings.ONE.random()]\n"
    for name in ("own_table", "own_table_later"):
        (tmp_path / f"{name}.py").write_text(source)
    tables = [importlib.import_module(name).TABLE[1:] for name in ("own_table", "own_table_later")]
    drawing.everything()
    state = ModuleGlobals.capture()
    expected = drawing.everything()
    try:
        for name in ("own_table", "own_table_later", "own_settings"):
            del sys.modules[name]
        generators._as_imported.clear()  # a new process
        state.adopt()
        table = importlib.import_module("own_table")
        new = table.own_settings
        assert table.TABLE[1:] == tables[0]
        assert new.everything() == expected
        state.adopt()  # a warm one
        new.NUMPY.random()
        now = new.NUMPY.bit_generator.state
        assert importlib.import_module("own_table_later").TABLE[1:] == tables[1]
        assert new.NUMPY.bit_generator.state == now
    finally:
        for name in ("own_table", "own_table_later"):
            sys.modules.pop(name, None)


class OwnGenerator(random.Random):
    def __reduce__(self):
        raise TypeError("of the program's own")


def test_a_generator_that_only_the_program_can_make_is_said_by_name(drawing, caplog, monkeypatch):
    monkeypatch.setattr("rayloader.inherit.module_globals._finder._reported", set())
    drawing.PLACES = [OwnGenerator(1)]
    new = in_a_worker(ModuleGlobals.capture())
    assert new.PLACES == {}
    (record,) = caplog.records
    assert "PLACES[0] (a random generator)" in record.getMessage()


def test_global_generators_and_those_without_a_state_do_not_travel(drawing):
    drawing.LATE, drawing.ONE, drawing.TWO = random.SystemRandom(), random._inst, numpy.random.mtrand._rand
    drawing.PLACES = {object(): random.Random(1), "set": {random.Random(2)}}
    paths = [path for carried in ModuleGlobals.capture().generators for path in carried.paths]
    assert not {"LATE", "ONE", "TWO", "PLACES"} & {path[1][1] for path in paths}


def test_only_so_much_behind_a_global_is_looked_at(drawing):
    class Node:
        pass

    drawing.PLACES = [[object()] for _ in range(100_000)]
    drawing.LATE = Node()
    last = drawing.LATE
    for _ in range(5_000):
        last.next = last = Node()
    last.next = random.Random(1)
    names = {path[1][1] for carried in ModuleGlobals.capture().generators for path in carried.paths}
    assert "LATE" not in names
    assert "ONE" in names


def test_a_module_imported_in_a_worker_looks_as_ever(module):
    loader, spec = module.__loader__, module.__spec__
    new = in_a_worker(ModuleGlobals.capture())
    assert type(new.__loader__) is type(new.__spec__.loader) is type(loader)
    assert (new.__spec__.name, new.__spec__.origin) == (spec.name, spec.origin)


class Unconfigured:
    """As the proxies of settings that are read on first use."""

    @property
    def __class__(self):
        raise RuntimeError("not configured")


def test_nothing_of_the_programs_is_called(module, tmp_path):
    (tmp_path / "own_lazy.py").write_text("raise RuntimeError('imported')")
    spec = importlib.util.find_spec("own_lazy")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    lazy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lazy)
    sys.modules["own_lazy"] = lazy
    try:
        module.VALUE = Unconfigured()
        assert "Unconfigured" in pickle.loads(ModuleGlobals.capture().sent)["own_settings"].others["VALUE",]
    finally:
        del sys.modules["own_lazy"]


def test_a_class_that_is_a_global_of_its_module_is_looked_at_by_that_name_only():
    """Else each of thousands of classes would be, once for each class that refers to it."""
    module = types.ModuleType("own_classes")
    source = "import random\nclass Base:\n    rng = random.Random(1)\nclass One(Base):\n    other = Base\nONE = One()\n"
    exec(source, vars(module))
    sys.modules["own_classes"] = module
    try:
        ((_, paths),) = search({}, [("own_classes", vars(module))])
    finally:
        del sys.modules["own_classes"]
    assert paths == ((("module", "own_classes"), ("attribute", "Base"), ("attribute", "rng")),)


def test_a_value_of_several_modules_is_placed_in_each(drawing, tmp_path):
    """A worker may import only one of them."""
    (tmp_path / "own_first.py").write_text("from own_settings import AUGMENT\n")
    importlib.import_module("own_first")
    try:
        sys.modules["own_settings"] = sys.modules.pop("own_settings")  # so that it comes after the other one
        state = ModuleGlobals.capture()
        expected = drawing.everything()
        del sys.modules["own_first"]
        assert in_a_worker(state).everything() == expected
    finally:
        sys.modules.pop("own_first", None)


class Asking:
    """A finder of the program's that asks all others, as coverage tools and import hooks do."""

    def find_spec(self, name, path=None, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                spec.asked = True
                return spec
        return None


@pytest.mark.parametrize("place", [0, None])
def test_a_finder_that_asks_all_others_does_not_go_round_in_circles(module, place):
    module.VALUE = 2
    state = ModuleGlobals.capture()
    state.adopt()
    sys.meta_path.insert(len(sys.meta_path) if place is None else place, Asking())
    del sys.modules["own_settings"]
    new = importlib.import_module("own_settings")
    assert new.VALUE == 2
    if place == 0:
        assert new.__spec__.asked


@pytest.mark.parametrize("metadata", ["other_package-1.0.dist-info/RECORD", "other_package-1.0.egg-info/top_level.txt"])
@pytest.mark.parametrize("of_sources", [False, True])
def test_a_package_with_its_metadata_beside_it_is_an_installed_one(metadata, of_sources, tmp_path, monkeypatch):
    folder = tmp_path / "target"
    (folder / "installed").mkdir(parents=True)
    (folder / "installed" / "__init__.py").write_text("")
    (folder / "installed" / "catalogue.py").write_text("ENTRIES = {'a': 1}\n")
    (folder / "beside.py").write_text("VALUE = 1\n")
    (folder / metadata).parent.mkdir()
    (folder / metadata).write_text("installed/__init__.py,,\n" if "RECORD" in metadata else "installed\n")
    if of_sources:
        (folder / "pyproject.toml").write_text("")
    monkeypatch.syspath_prepend(folder)
    try:
        for name in ("installed.catalogue", "beside"):
            importlib.import_module(name)
        own = set(dict(own_modules()))
    finally:
        for name in ("installed", "installed.catalogue", "beside"):
            sys.modules.pop(name, None)
    assert "beside" in own
    assert ("installed.catalogue" in own) is (of_sources and "egg-info" in metadata)


def test_attributes_of_functions_travel(module, tmp_path):
    (tmp_path / "own_settings.py").write_text("def register():\n    pass\n")
    del sys.modules["own_settings"]
    module = importlib.import_module("own_settings")
    module.register.calls = 3
    assert in_a_worker(ModuleGlobals.capture()).register.calls == 3
