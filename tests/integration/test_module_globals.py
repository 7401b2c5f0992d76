"""Globals of the program's modules in real workers: as the program has set them, as after a fork."""

import contextlib
import copy
import importlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from inside import live_actor_pids
from probes import as_is
from rayloader import DataLoader
from rayloader.resume.state import State

pytestmark = pytest.mark.usefixtures("ray_session")

HANG_LIMIT = 120  # seconds for a program; on expiry it is killed and the test fails

CONFIG = """
from argparse import Namespace
SIZE = 1
NAMES = ["default"]
OPTIONS = {}
ARGS = Namespace(lr=0.1)
ROOT = None
MODEL = None
ALIAS = NAMES
"""
DATA = """
from {package}.config import NAMES, SIZE

class Data:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        from {package} import config
        later = __import__("{package}.later", fromlist=["LIMIT"])
        return [SIZE, config.SIZE, NAMES, config.NAMES is NAMES, config.ALIAS, config.OPTIONS, vars(config.ARGS),
                config.ROOT, later.LIMIT, later.__loader__ is later.__spec__.loader, hasattr(later.__loader__, "path")]
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A package of the program's own: its modules `config`, `data` and `later`."""
    package = f"program_{abs(hash(tmp_path))}"
    (tmp_path / package).mkdir()
    sources = {"__init__": "", "config": CONFIG, "data": DATA.format(package=package), "later": "LIMIT = 1\n"}
    for name, source in sources.items():
        (tmp_path / package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield [importlib.import_module(f"{package}.{name}") for name in ("config", "data", "later")]
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


def batches(data, **options):
    return list(DataLoader(data.Data(), None, num_workers=2, collate_fn=as_is, **options))


def test_modules_are_as_the_program_has_set_them(program):
    config, data, later = program
    config.SIZE, config.ROOT, later.LIMIT = 64, Path("/data"), 5
    config.NAMES.append("more")
    config.OPTIONS["depth"] = [1, {"two": (2.0, None)}]
    config.ARGS.lr = 0.5
    names = ["default", "more"]
    expected = [1, 64, names, True, names, config.OPTIONS, {"lr": 0.5}, Path("/data"), 5, True, True]
    assert batches(data) == [expected, expected]
    config.SIZE, data.SIZE, config.NAMES, config.ARGS = 65, 66, ["other"], Namespace(wd=1)
    expected = [66, 65, names, False, names, config.OPTIONS, {"wd": 1}, Path("/data"), 5, True, True]
    assert batches(data) == [expected, expected], "the processes are warm and have the modules"
    assert batches(data, fresh_processes=True) == [expected, expected]


ALIASED = """
import dataclasses

@dataclasses.dataclass
class Config:
    size: int = 1
    name: str = "default"

DEFAULT = Config()
current = DEFAULT
TRAIN, EVAL = Config(2, "train"), Config(3, "eval")
ACTIVE, MODES = TRAIN, [TRAIN, EVAL]
FIRST = SECOND = Config(4)

class State:
    default = Config(5)
    now = default

def use():
    global current, ACTIVE, FIRST
    current, State.now, ACTIVE, FIRST = Config(9, "mine"), Config(7), EVAL, Config(8)

def seen():
    objects = [DEFAULT, current, TRAIN, EVAL, ACTIVE, *MODES, FIRST, SECOND, State.default, State.now]
    return [repr(one) for one in objects] + [[one is other for one in objects] for other in objects]

class Data:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return seen()
"""


def test_objects_that_a_module_shares_between_names_are_as_the_program_has_them(tmp_path, monkeypatch):
    name = f"aliased_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(ALIASED)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    loader = DataLoader(module.Data(), None, num_workers=1, collate_fn=as_is)
    for change in (lambda: None, module.use, lambda: setattr(module.EVAL, "size", 33)):
        change()
        assert list(loader) == [module.seen()]


COUNTING = """
COUNT = 0

class Data:
    def __len__(self):
        return 16
    def __getitem__(self, index):
        global COUNT
        COUNT += index % 2 == 0
        return COUNT if index % 2 == 0 else None
"""


def test_another_worker_of_the_process_does_not_undo_what_the_dataset_has_set(tmp_path, monkeypatch):
    name = f"counting_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    data = importlib.import_module(name).Data()
    loader = DataLoader(data, None, num_workers=2, collate_fn=as_is, prefetch_factor=2)
    found = []
    for value in loader:
        found.append(value)
        if len(found) == 6:
            loader.resize(1)
    assert found[::2] == [1, 2, 3, 4, 5, 6, 7, 8]


DRAWING = """
import random
import numpy as np

RNG, HELD, LATE = np.random.default_rng(0), {"python": random.Random(1)}, None

class Settings:
    class OfAugmentation:
        rng = random.Random(2)

class Derived(Settings):
    pass

def registered():
    class Local:
        rng = random.Random(4)
    return Local

REGISTRY = {"local": registered()}

def others():
    return Derived.OfAugmentation.rng, REGISTRY["local"].rng

def configure(seed):
    global RNG, LATE
    RNG, LATE = np.random.default_rng(seed), random.Random(seed)
    for number, rng in enumerate(others()):
        rng.seed(seed + number)

class Data:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        numbers = [int(RNG.integers(1000)), HELD["python"].randrange(1000), LATE.randrange(1000)]
        numbers.append(int(RNG.spawn(1)[0].integers(1000)))
        nested = Derived.OfAugmentation.rng.randrange(1000), REGISTRY["local"].rng.randrange(1000)
        return [index, *numbers, *nested]
"""


@pytest.fixture
def drawing(tmp_path, monkeypatch):
    """A module of the program's own whose functions draw from its generators."""
    name = f"drawing_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(DRAWING)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    module.configure(5)
    return module


def forked(drawing):
    """The samples as two forked workers give them, each with the generators as they are here now."""
    keep = copy.deepcopy((drawing.RNG, drawing.HELD, drawing.LATE))
    others = [rng.getstate() for rng in drawing.others()]
    samples = {}
    for worker_id in range(2):
        drawing.RNG, drawing.HELD, drawing.LATE = copy.deepcopy(keep)
        for rng, state in zip(drawing.others(), others, strict=True):
            rng.setstate(state)
        samples |= {index: drawing.Data()[index] for index in range(worker_id, 40, 2)}
    drawing.RNG, drawing.HELD, drawing.LATE = keep
    for rng, state in zip(drawing.others(), others, strict=True):
        rng.setstate(state)
    return [samples[index] for index in range(40)]


def test_generators_of_modules_are_as_the_program_has_them_in_each_epoch(drawing):
    loader = DataLoader(drawing.Data(), None, num_workers=2, collate_fn=as_is)
    for _ in range(3):
        expected = forked(drawing)
        assert list(loader) == expected
        drawing.HELD["python"].random()
        drawing.LATE.seed(expected[-1][-1])
    assert list(DataLoader(drawing.Data(), None, num_workers=2, collate_fn=as_is)) == forked(drawing)


def test_generators_that_nobody_draws_from_are_no_state_of_a_worker(drawing):
    """Else a state with seeds for batches would not fit other numbers of workers, if a warm process has the module."""
    list(DataLoader(drawing.Data(), None, num_workers=1, collate_fn=as_is))
    loader = DataLoader(range(40), 4, num_workers=1, seeding="batch")
    batches = [batch.tolist() for batch in loader]
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    again = DataLoader(range(40), 4, num_workers=2, seeding="batch")
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == batches[1:]
    assert not State.load(state).position.remembers


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("persistent", "epoch"),
    [pytest.param(False, 0, marks=FULL), (False, 1), (True, 0), pytest.param(True, 1, marks=FULL)],
)
def test_generators_of_modules_go_on_after_a_loss_and_in_a_resumed_run(drawing, persistent, epoch):
    def make():
        options = {"num_workers": 2, "collate_fn": as_is, "prefetch_factor": 2, "persistent_workers": persistent}
        return DataLoader(drawing.Data(), None, **options)

    whole = make()
    epochs = [list(whole) for _ in range(2)]
    loader = make()
    for _ in range(epoch):
        list(loader)
    found, states = [], []
    for sample in loader:
        found.append(sample)
        if len(found) in (1, 21):
            for pid in live_actor_pids():
                with contextlib.suppress(ProcessLookupError):  # one that was killed before
                    os.kill(pid, signal.SIGKILL)
        if len(found) in (3, 30):
            states.append((len(found), loader.state_dict()))
    assert found == epochs[epoch]
    for taken, state in states:
        resumed = make()
        resumed.load_state_dict(state)
        assert list(resumed) == epochs[epoch][taken:]


TRAIN = """
import argparse

from {package} import config
from {package}.data import Data
from rayloader import DataLoader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int)
    config.ARGS = parser.parse_args()
    config.SIZE = config.ARGS.size
    loaders = [DataLoader(Data(), None, num_workers=n, collate_fn=list, workers="ray") for n in (0, 1)]
    print([batch for loader in loaders for batch in loader])


if __name__ == "__main__":
    main()
"""
DATA_OF_TRAIN = """
from {package} import config

class Data:
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return [config.SIZE, config.ARGS.size]
"""


@pytest.mark.full
def test_what_a_modules_main_has_put_into_a_config_reaches_the_workers(tmp_path):
    (tmp_path / "package").mkdir()
    sources = {"__init__": "", "config": CONFIG, "data": DATA_OF_TRAIN, "train": TRAIN}
    for name, source in sources.items():
        (tmp_path / "package" / f"{name}.py").write_text(source.replace("{package}", "package"))
    done = subprocess.run(
        [sys.executable, "-m", "package.train", "--size", "64"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, "[[64, 64], [64, 64]]\n"), done.stderr


REGISTRY = """
COUNT, ORDER, NAMES, BY_NAME = 0, [], set(), {}

class Base:
    labels = []
    def __init_subclass__(cls):
        cls.index = len(Base.labels)
        Base.labels.append(cls.__name__)

def register(cls):
    global COUNT
    if cls.__name__ in NAMES:
        raise ValueError(f"{cls.__name__} is registered already")
    cls.label = COUNT
    register.calls = getattr(register, "calls", 0) + 1
    COUNT += 1
    ORDER.append(cls.__name__)
    NAMES.add(cls.__name__)
    BY_NAME[cls.__name__] = cls.label
    return cls

def found():
    return COUNT, ORDER, sorted(NAMES), BY_NAME, Base.labels, register.calls
"""
# `first` and `second` import each other.
FIRST = """
from {package} import registry
from {package}.registry import ORDER

@registry.register
class First(registry.Base):
    pass

from {package} import second
"""
SECOND = """
from {package} import first, registry

@registry.register
class Second(registry.Base):
    pass
"""
LATER = """
from {package} import registry

@registry.register
class Later(registry.Base):
    pass
"""
REGISTERED = """
import importlib
from {package} import registry

class Data:
    def __init__(self, *held):
        self.held = held
    def __len__(self):
        return 8
    def __getitem__(self, index):
        found = registry.found()
        modules = [importlib.import_module(f"{package}.{{name}}") for name in ("first", "second", "later")]
        kinds = modules[0].First, modules[1].Second, modules[2].Later
        labels = [(kind.label, kind.index) for kind in kinds]
        return [found, labels, registry.found() == found, modules[0].ORDER is registry.ORDER]
"""


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """A package whose modules register and number their classes as they are imported."""
    package = f"registered_{abs(hash(tmp_path))}"
    (tmp_path / package).mkdir()
    sources = {"registry": REGISTRY, "first": FIRST, "second": SECOND, "later": LATER, "data": REGISTERED}
    for name, source in {"__init__": "", **sources}.items():
        text = source if name == "registry" else source.format(package=package)
        (tmp_path / package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield [importlib.import_module(f"{package}.{name}") for name in ("registry", "first", "second", "later", "data")]
    for name in [name for name in sys.modules if name.startswith(package)]:
        del sys.modules[name]


HELD = (), ("First",), ("Later",), ("Second", "First")


def expected_of(registry):
    order = ["First", "Second", "Later"]
    found = 3, order, sorted(order), {"First": 0, "Second": 1, "Later": 2}, order, 3
    assert registry.found() == found
    return [[found, [(0, 0), (1, 1), (2, 2)], True, True]] * 8


@pytest.mark.parametrize(
    ("holds", "persistent"),
    [
        ((), False),
        (("Later",), True),
        *(pytest.param(*case, marks=pytest.mark.full) for case in itertools.product(HELD, (False, True))),
    ],
)
def test_what_modules_register_and_number_as_they_are_imported_is_counted_once(registered, holds, persistent):
    """Whether the worker imports them with the dataset, or only when a sample needs them, and in every epoch."""
    registry, first, second, later, data = registered
    kinds = {"First": first.First, "Second": second.Second, "Later": later.Later}
    loader = DataLoader(
        data.Data(*map(kinds.get, holds)), None, num_workers=2, collate_fn=as_is, persistent_workers=persistent
    )
    for _ in range(2):
        assert list(loader) == expected_of(registry)
    iterator = iter(loader)
    seen = [next(iterator)]
    for pid in live_actor_pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert [*seen, *iterator] == expected_of(registry)


def test_what_the_program_registers_itself_reaches_later_epochs(registered):
    registry, first, _, _, data = registered
    loader = DataLoader(data.Data(first.First), None, num_workers=1, collate_fn=as_is)
    assert list(loader) == expected_of(registry)
    registry.ORDER.append("more")
    registry.COUNT = 9
    (found, _, same, aliased), *_ = list(loader)
    assert (found[0], found[1][-1], same, aliased) == (9, "more", True, True)


def test_workers_of_another_loader_import_what_they_need_into_the_same_process(registered):
    """The registry of the warm process has the program's content by then, and would refuse what is there already."""
    registry, first, _, later, data = registered
    for held in (first.First, later.Later):
        loader = DataLoader(data.Data(held), None, num_workers=1, collate_fn=as_is)
        assert list(loader) == expected_of(registry)


def test_several_workers_of_one_process_import_once(registered):
    registry, first, _, _, data = registered
    loader = DataLoader(data.Data(first.First), None, num_workers=2, collate_fn=as_is, prefetch_factor=1)
    iterator = iter(loader)
    seen = [next(iterator)]
    loader.resize(1)
    assert [*seen, *iterator] == expected_of(registry)


PLUGIN = """
LIMIT = 1

class Plugin:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        import plugin_of_a_file
        return LIMIT, plugin_of_a_file is __import__("sys").modules[__name__]
"""


def test_a_module_that_was_loaded_from_a_file_is_there_in_workers(tmp_path):
    """The recipe of importlib's documentation: no finder knows the module, but `sys.modules` holds it."""
    (tmp_path / "any.py").write_text(PLUGIN)
    spec = importlib.util.spec_from_file_location("plugin_of_a_file", tmp_path / "any.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        module.LIMIT = 5
        loader = DataLoader(module.Plugin(), None, num_workers=2, collate_fn=as_is)
        assert [list(loader), list(loader)] == [[(5, True)] * 2] * 2
    finally:
        del sys.modules[spec.name]


HOLDING = """
import gc

class Held:
    pass

HELD = [Held() for _ in range(100)]

class Data:
    def __init__(self):
        self.own = Held()
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return sum(type(one) is Held for one in gc.get_objects())
"""


def test_what_modules_hold_is_not_for_the_collection_after_an_epoch(tmp_path, monkeypatch):
    """The objects of a large package take longer than a short epoch; those of the dataset must go with it."""
    (tmp_path / "holding.py").write_text(HOLDING)
    monkeypatch.syspath_prepend(tmp_path)
    data = importlib.import_module("holding")
    for options in ({"fresh_processes": True}, {}):  # a process that imports the module, and a warm one
        assert batches(data, **options) == [1, 1]
    del sys.modules["holding"]
