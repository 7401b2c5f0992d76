"""`rayloader.patch`, and the warning where a loader of ours becomes torch's: without any framework but torchdata.

tests/frameworks has the real ones.
"""

import copy
import inspect
import multiprocessing
import pickle
import re
import sys
import types
import warnings
from typing import get_type_hints

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import rayloader
from rayloader._compat import MultiProcessIterator
from rayloader.epoch.local import LocalIterator
from rayloader.errors import OfOneProcess
from rayloader.frameworks import patching, readers
from rayloader.observe.recorder import Recorder
from rayloader.options import OwnArguments

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata's constructor calls

DATASET = range(10)
PATCHED = (DataLoader, StatefulDataLoader)
# What a framework does: it takes torch's class by name, checks against it, derives from it, and makes loaders.
FRAMEWORK = """
from torch.utils.data import DataLoader
import torch.utils.data.dataloader

class Wrapped(DataLoader):
    def __init__(self, inner):
        self.__dict__.update(inner.__dict__)

class Rebuilt(DataLoader):
    def __init__(self, loader):
        super().__init__(loader.dataset, num_workers=loader.num_workers)

def is_loader(x):
    return isinstance(x, DataLoader)

def makers():
    return [DataLoader, DataLoader[int], torch.utils.data.DataLoader, torch.utils.data.dataloader.DataLoader]

def make_anew(loader, **changed):
    names = "num_workers collate_fn pin_memory timeout worker_init_fn generator prefetch_factor".split()
    return DataLoader(loader.dataset, **{**{name: getattr(loader, name) for name in names}, **changed})
"""


def imported(name):
    module = types.ModuleType(name)
    exec(FRAMEWORK, module.__dict__)
    return module


@pytest.fixture(autouse=True)
def all_is_put_back():
    readers._warn_of_rebuilt.cache_clear()
    before = [dict(vars(loader_class)) for loader_class in PATCHED]
    yield
    assert [dict(vars(loader_class)) for loader_class in PATCHED] == before
    assert type(DataLoader(DATASET)) is DataLoader
    assert type(StatefulDataLoader(DATASET)) is StatefulDataLoader


def test_a_framework_makes_ours_whenever_it_was_imported():
    earlier = imported("earlier")
    torchs = DataLoader(DATASET)
    with rayloader.patch(seeding="batch", on_error="skip"):
        for framework in (earlier, imported("later")):
            for make in framework.makers():
                loader = make(DATASET, 3, True, num_workers=2)
                assert type(loader) is rayloader.DataLoader
                assert (loader.seeding, loader.on_error, loader.arenas) == ("batch", "skip", True)
                assert (loader.batch_size, loader.num_workers, len(loader)) == (3, 2, 4)
                assert framework.is_loader(loader)
            assert framework.is_loader(torchs)
            assert framework.is_loader(framework.Wrapped(loader))
            assert not framework.is_loader(DATASET)
            assert type(framework.make_anew(torchs)) is rayloader.DataLoader
        assert type(torchs) is DataLoader
    for framework in (earlier, imported("afterwards")):
        assert all(type(make(DATASET)) is DataLoader for make in framework.makers())
    assert type(loader) is rayloader.DataLoader


def test_as_a_plain_call_it_holds_until_it_is_removed():
    patched, of_ours = rayloader.patch(on_error="skip"), type("OfOurs", (rayloader.DataLoader,), {})
    assert isinstance(patched, rayloader.Patch)
    assert [type(ours(DATASET)) for ours in (of_ours, rayloader.DataLoader)] == [of_ours, rayloader.DataLoader]
    assert of_ours(DATASET).on_error == rayloader.DataLoader(DATASET).on_error == "raise"  # ours are left alone
    assert DataLoader(DATASET).on_error == "skip"
    for _ in range(2):
        patched.remove()
        assert type(DataLoader(DATASET)) is DataLoader
    with patched, patched:  # it can be installed again
        assert DataLoader(DATASET).on_error == "skip"


def test_nested_patches_add_up_and_end_in_any_order():
    outer = rayloader.patch(seeding="batch", max_skipped=1)
    with rayloader.patch(max_skipped=2, scheduling="dynamic"):
        loader = DataLoader(DATASET)
        assert (loader.seeding, loader.max_skipped, loader.scheduling) == ("batch", 2, "dynamic")
    loader = DataLoader(DATASET)
    assert (loader.seeding, loader.max_skipped, loader.scheduling) == ("batch", 1, "static")
    inner = rayloader.patch(max_skipped=3)
    outer.remove()
    loader = DataLoader(DATASET)
    assert (loader.seeding, loader.max_skipped) == ("worker", 3)
    inner.remove()


# ---- classes that derive from torch's: those of libraries


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Derived(DataLoader):
    """As PyG's and TorchIO's: it has a constructor of its own."""

    def __init__(self, dataset, *sizes, label="x", **others):
        self.label = label
        super().__init__(dataset, *sizes, collate_fn=self.collate, **others)

    def collate(self, samples):
        return [self.label, *samples]


@pytest.fixture
def made(monkeypatch):
    """The iterators of ours that are made."""
    found = []
    begins = Recorder.begins

    def noted(recorder, iterator, *others, **options):
        found.append(type(iterator))
        return begins(recorder, iterator, *others, **options)

    monkeypatch.setattr(Recorder, "begins", noted)
    return found


def test_loaders_of_derived_classes_keep_their_class_and_get_our_iterators(made):
    expected = list(Derived(DATASET, 4))
    with rayloader.patch():
        loader = Derived(DATASET, 4)
        assert (type(loader), loader.__class__) == (Derived, Derived)
        copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), loader]
        assert list(loader) == expected
    assert [list(one) for one in copies] == [expected] * 4  # also after the patch
    with pytest.raises(ValueError, match="batch_size attribute should not be set after Derived"):
        loader.batch_size = 3
    assert list(Derived(DATASET, 4)) == expected
    assert made == [LocalIterator] * 5


def test_their_iterators_have_the_arguments_of_the_patch():
    dataset = {1: 1, 2: 2, 3: 3}
    with rayloader.patch(on_error="skip", seeding="batch"):
        loader, given = Derived({**dataset, 4: 4}, 2, sampler=range(4)), rayloader.DataLoader(DATASET, max_skipped=1)
        anew = Derived(dataset, 2, sampler=range(4), num_workers=given.num_workers)
    assert list(loader) == [["x", 1], ["x", 2, 3]]
    with pytest.raises(KeyError, match="0"):
        next(iter(anew))
    with rayloader.patch(scheduling="dynamic", seeding="batch"), pytest.raises(ValueError, match="map-style dataset"):
        iter(Derived(Stream()))


def without_processes(monkeypatch):
    """Torch's iterators start none."""
    monkeypatch.setattr(vars(MultiProcessIterator)["__init__"], "_init", lambda iterator, loader: None)
    monkeypatch.setattr(MultiProcessIterator, "__del__", lambda iterator: None)


class Threads(multiprocessing.context.SpawnContext):
    """As MONAI's, whose workers are threads."""


@pytest.mark.parametrize(
    ("given", "defaults", "is_early", "reason"),
    [
        ({"multiprocessing_context": Threads()}, {}, False, "are no processes of multiprocessing's; leave it out"),
        ({}, {"num_replicas": 2, "rank": 0}, False, "num_replicas and rank divide .* alone; create one"),
        ({}, {}, True, r"it was created before, .* call patch\(\) at the start"),
    ],
    ids=["threads", "ranks", "made before"],
)
def test_one_warning_names_a_class_that_cannot_get_our_iterators(given, defaults, is_early, reason, monkeypatch, made):
    patching.warn_of_torchs.cache_clear()
    early = [Derived(DATASET, num_workers=1, **given) for _ in range(2)]
    with rayloader.patch(**defaults):
        loaders = early if is_early else [Derived(DATASET, num_workers=1, **given) for _ in range(2)]
        without_processes(monkeypatch)
        with pytest.warns(UserWarning, match=rf"does not reach this .*Derived: .*{reason}") as told:
            iterators = [iter(loader) for loader in loaders]
    assert [warning.filename for warning in told] == [__file__]
    assert not made
    assert not any(isinstance(iterator, OfOneProcess) for iterator in iterators)


@pytest.mark.parametrize("loader_class", PATCHED)
@pytest.mark.parametrize(
    "copied",
    [
        lambda loader: loader,
        lambda loader: pickle.loads(pickle.dumps(loader)),
        lambda loader: type(loader)(loader.dataset, loader.batch_size, num_workers=loader.num_workers),
    ],
)
def test_what_a_class_makes_is_an_instance_of_it(loader_class, copied):
    """A trainer may have bound the class at any time, and asks by it whether a loader keeps its position."""
    with rayloader.patch():
        loader = copied(loader_class(DATASET, 2))
    assert all(isinstance(loader, name) for name in (loader_class, DataLoader, rayloader.DataLoader))
    theirs = StatefulDataLoader, sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader
    assert [isinstance(loader, name) for name in theirs] == [loader_class is StatefulDataLoader] * 2
    assert repr(loader).startswith(f"rayloader.{loader_class.__name__}(range")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_a_state_of_torchdatas_own_is_an_error_that_says_so():
    theirs = StatefulDataLoader(DATASET, 2, True)
    next(iter(theirs))
    with rayloader.patch():
        loader = StatefulDataLoader(DATASET, 2, True)
    with pytest.raises(rayloader.StateError, match="but of torchdata's StatefulDataLoader"):
        loader.load_state_dict(theirs.state_dict())


def test_patch_takes_the_arguments_that_torchs_loader_has_not_whose_signature_stays():
    ours, torchs = (
        inspect.signature(loader_class).parameters.keys() for loader_class in (rayloader.DataLoader, DataLoader)
    )
    types_of_ours, signature = get_type_hints(rayloader.DataLoader.__init__), inspect.signature(DataLoader)
    assert get_type_hints(OwnArguments) == {name: types_of_ours[name] for name in ours - torchs}
    with rayloader.patch():
        assert inspect.signature(DataLoader) == signature


@pytest.mark.parametrize("changed", [{}, {"arenas": True}])
def test_a_loader_of_ours_that_is_made_anew_keeps_its_own_arguments(changed):
    framework = imported("framework")
    given = {"seeding": "batch", "scheduling": "dynamic", "on_error": "skip", "max_skipped": 7, "arenas": False}
    loader = rayloader.DataLoader(DATASET, 2, num_workers=2, **given)
    loader.fresh_processes = True
    with rayloader.patch(max_worker_restarts=9):
        anew = framework.make_anew(framework.make_anew(loader), **changed)
    assert {name: getattr(anew, name) for name in given} == {**given, **changed}
    assert (anew.fresh_processes, anew.max_worker_restarts) == (True, 3)


def test_a_state_that_is_loaded_before_or_after_a_loader_is_made_anew_is_not_lost_in_silence():
    loader = rayloader.DataLoader(DATASET)
    state = loader.state_dict()
    anew = type(loader)(loader.dataset, num_workers=loader.num_workers)  # as Lightning does
    loader.load_state_dict(state)
    with pytest.raises(rayloader.StateError, match="load it into the new loader"):
        iter(anew)
    with rayloader.patch(), pytest.raises(rayloader.StateError, match="load it into the new loader"):
        imported("framework").make_anew(loader)
    loader.load_state_dict({})
    assert len(list(anew)) == 10


class Shard(IterableDataset):
    """As Accelerate's."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return iter(self.dataset)


def test_a_loader_whose_batches_come_from_another_one_has_no_position():
    framework = imported("framework")
    loader = rayloader.DataLoader(DATASET)
    with rayloader.patch():
        anew = framework.make_anew(loader)
        skipping = framework.make_anew(anew)
        other = DataLoader(range(5), num_workers=loader.num_workers)
    next(iter(other))
    assert loader.state_dict()["position"] is None
    next(iter(skipping))
    for source in (loader, anew):
        with pytest.raises(rayloader.StateError, match=r"reads the new one, .* create the loader with num_replicas"):
            source.state_dict()
    next(iter(loader))
    assert loader.state_dict()["position"]["delivered"] == 1


def test_nor_has_one_whose_batches_come_from_torchs():
    loader = rayloader.DataLoader(Stream())
    with pytest.warns(UserWarning, match="was rebuilt as"):
        DataLoader(Shard(loader.dataset), num_workers=loader.num_workers)
    with pytest.raises(rayloader.StateError, match=r"its state_dict\(\) \(rayloader\.patch\(\) gives it one\)"):
        loader.state_dict()


@pytest.mark.parametrize(
    ("defaults", "error", "text"),
    [
        ({"seedling": 1}, TypeError, "got seedling; choose from arenas, device, fresh_processes"),
        ({"num_workers": 1}, TypeError, "torch's has not, got num_workers"),
        ({"seeding": "epoch"}, ValueError, "seeding must be 'worker' or 'batch'"),
        ({"max_skipped": "1"}, TypeError, "max_skipped must be a whole number >= 0"),
        ({"scheduling": "dynamic"}, ValueError, 'needs seeding="batch"'),
    ],
)
def test_defaults_are_checked_at_once(defaults, error, text):
    with pytest.raises(error, match=text):
        rayloader.patch(**defaults)


# ---- the warning


@pytest.mark.parametrize("make", PATCHED)
@pytest.mark.parametrize("dataset", [DATASET, Stream()])
@pytest.mark.parametrize("copied", [lambda loader: loader, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_one_warning_tells_of_the_first_loader_that_is_made_anew_and_none_comes_without_cause(make, dataset, copied):
    loader = copied(rayloader.DataLoader(dataset, 2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        if dataset is DATASET:  # the same objects, for a comparison
            make(loader.dataset, batch_sampler=loader.batch_sampler, collate_fn=loader.collate_fn)
            make(loader.dataset, sampler=loader.sampler, num_workers=0)
        type(loader)(loader.dataset, num_workers=loader.num_workers)  # as Lightning does
        with rayloader.patch():
            DataLoader(loader.dataset, num_workers=loader.num_workers)
        assert caught == []
        anew = make(loader.dataset, num_workers=loader.num_workers)
        make(loader.dataset, num_workers=loader.num_workers)
        list(anew)
    (warning,) = caught
    assert re.search(rf"rebuilt as torch.*{make.__name__}, whose .* call rayloader.patch\(\)", str(warning.message))
    assert warning.filename == __file__


def test_the_number_of_workers_is_a_number():
    loader = rayloader.DataLoader(DATASET, num_workers=2)
    assert (loader.num_workers, f"{loader.num_workers}", repr(loader.num_workers)) == (2, "2", "2")
    assert type(pickle.loads(pickle.dumps(loader.num_workers))) is int
    assert type(loader.state_dict()["num_workers"]) is int
