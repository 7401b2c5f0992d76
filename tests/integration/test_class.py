"""The class beside torch's: arguments, checks, attributes, and what frameworks do with it."""

import contextlib
import copy
import gc
import inspect
import pickle
import types
import weakref

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from probes import Calls, Stream, as_is, load, oversubscribed
from rayloader import DataLoader

StockLoader = torch.utils.data.DataLoader
NUMBERS = range(10)
SAMPLER = SequentialSampler(NUMBERS)
BATCH_SAMPLER = BatchSampler(SAMPLER, 2, False)
STREAM = Stream(range)
ANY_CPU = {"num_cpus": 0}  # options of workers

OURS = ["workers", "ray_remote_args", "fresh_processes", "seeding", "scheduling"]
OURS += ["max_worker_restarts", "on_timeout", "on_error", "max_skipped", "arenas", "snapshot_every_n_steps", "name"]
OURS += ["num_replicas", "rank", "seed", "device", "prefetch_to_device", "skip_steps"]


class NoLength:
    def __getitem__(self, index):
        return index


# Positional arguments, keyword arguments.
BAD_ARGUMENTS = {
    "negative num_workers": ((NUMBERS,), {"num_workers": -1}),
    "negative timeout": ((NUMBERS,), {"timeout": -1}),
    "prefetch_factor without workers": ((NUMBERS,), {"prefetch_factor": 2}),
    "negative prefetch_factor": ((NUMBERS,), {"prefetch_factor": -1, "num_workers": 1}),
    "persistent without workers": ((NUMBERS,), {"persistent_workers": True}),
    "iterable shuffled": ((STREAM,), {"shuffle": True}),
    "iterable with sampler": ((STREAM,), {"sampler": SAMPLER}),
    "iterable with batch_sampler": ((STREAM,), {"batch_sampler": BATCH_SAMPLER}),
    "sampler and shuffle": ((NUMBERS,), {"sampler": SAMPLER, "shuffle": True}),
    "batch_sampler and batch_size": ((NUMBERS,), {"batch_sampler": BATCH_SAMPLER, "batch_size": 2}),
    "batch_sampler and shuffle": ((NUMBERS,), {"batch_sampler": BATCH_SAMPLER, "shuffle": True}),
    "batch_sampler and sampler": ((NUMBERS,), {"batch_sampler": BATCH_SAMPLER, "sampler": SAMPLER}),
    "batch_sampler and drop_last": ((NUMBERS,), {"batch_sampler": BATCH_SAMPLER, "drop_last": True}),
    "drop_last without batches": ((NUMBERS,), {"batch_size": None, "drop_last": True}),
    "batch_size 0": ((NUMBERS, 0), {}),
    "negative batch_size": ((NUMBERS, -1), {}),
    "batch_size a bool": ((NUMBERS, True), {}),
    "batch_size a float": ((NUMBERS, 1.5), {}),
    "batch_size a string": ((NUMBERS, "2"), {}),
    "drop_last a string": ((NUMBERS,), {"drop_last": "yes"}),
    "context without workers": ((NUMBERS,), {"multiprocessing_context": "fork"}),
    "unknown context": ((NUMBERS,), {"multiprocessing_context": "thread", "num_workers": 1}),
    "context of another type": ((NUMBERS,), {"multiprocessing_context": 1, "num_workers": 1}),
    "nothing to shuffle, no length": ((NoLength(),), {"shuffle": True}),
    "num_workers a string": ((NUMBERS,), {"num_workers": "2"}),
    "prefetch_factor a string": ((NUMBERS,), {"prefetch_factor": "2", "num_workers": 1}),
    "timeout a string": ((NUMBERS,), {"timeout": "5"}),
    "no dataset": ((), {}),
    "unknown argument": ((NUMBERS,), {"number_of_workers": 2}),
    "too many positional arguments": ((NUMBERS, *[None] * 13), {}),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_raise_torchs_errors(case):
    arguments, options = BAD_ARGUMENTS[case]
    with pytest.raises((ValueError, TypeError)) as torchs:
        StockLoader(*arguments, **options)
    with pytest.raises((ValueError, TypeError)) as ours:
        DataLoader(*arguments, **options)
    assert (ours.type, str(ours.value)) == (torchs.type, str(torchs.value))


# What is wrong of an attribute that was set later, or that the constructor takes.
SET_LATER = [
    ("num_workers", -1, ValueError),
    *[("num_workers", value, TypeError) for value in (1.5, "2", None, float("nan"), numpy.float64(2))],
    ("prefetch_factor", 0, AssertionError),
    *[("prefetch_factor", value, TypeError) for value in (1.5, "2")],
    ("on_error", "ignore", ValueError),
    ("max_skipped", -1, ValueError),
    *[("timeout", value, ValueError) for value in (-1, float("nan"), None, "1")],
]


@pytest.mark.parametrize(("name", "value", "error"), SET_LATER)
def test_what_is_set_later_is_checked_by_iter_with_torchs_types(name, value, error):
    for num_workers in (1,) if name == "prefetch_factor" else (0, 1):
        loader = DataLoader(NUMBERS, num_workers=num_workers)
        setattr(loader, name, value)
        state = torch.get_rng_state()
        with pytest.raises(error, match=f"{name} must be"):
            iter(loader)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ([("num_cpus", 1)], TypeError, r"ray_remote_args must be a dict such as .* got \[\('num_cpus', 1\)\]"),
        ({1: 1}, TypeError, r"ray_remote_args must be a dict such as .* got \{1: 1\}"),
        ({"max_concurrency": 2}, ValueError, "must not hold 'max_concurrency', which the loader sets"),
        ({"num_cpus": 1, "name": "x"}, ValueError, "must not hold 'name', which the loader sets itself"),
    ],
)
def test_ray_remote_args_are_checked(value, error, text):
    with pytest.raises(error, match=text):
        DataLoader(NUMBERS, num_workers=1, ray_remote_args=value)


@pytest.mark.parametrize(
    "attribute",
    ["batch_size", "sampler", "batch_sampler", "drop_last", "dataset", "persistent_workers"],
)
def test_attributes_that_must_not_be_set_raise_torchs_error(attribute):
    loader, stock = DataLoader(NUMBERS), StockLoader(NUMBERS)
    with pytest.raises(ValueError, match=attribute) as torchs:
        setattr(stock, attribute, None)
    with pytest.raises(ValueError, match=attribute) as ours:
        setattr(loader, attribute, None)
    assert str(ours.value) == str(torchs.value).replace("DataLoader", type(loader).__name__)


def worker_of(_):
    info = torch.utils.data.get_worker_info()
    return (info.id, info.num_workers) if info is not None else None


@oversubscribed
@pytest.mark.parametrize(("made_with", "then"), [(0, 2), (1, 2), (2, 1), (2, 0)])
def test_num_workers_may_be_set_and_counts_from_the_next_iter_on(ray_session, made_with, then):
    loader = load(worker_of, 4, made_with)
    loader.num_workers = then
    if then:
        loader.prefetch_factor = 2
    for _ in range(2):
        assert list(loader) == [(i % then, then) if then else None for i in range(4)]


@oversubscribed
def test_persistent_workers_stay_as_many_as_they_are(ray_session):
    loader = load(worker_of, 4, 3, persistent_workers=True)
    next(iter(loader))
    loader.num_workers = 2
    assert list(loader) == [(i % 3, 3) for i in range(4)]


@oversubscribed
def test_a_state_says_how_many_workers_the_epoch_has_whatever_num_workers_was_set_to(ray_session):
    loader = load(worker_of, 8, 1)
    loader.num_workers = 2
    next(iterator := iter(loader))
    loader.num_workers = 3
    state = loader.state_dict()
    assert list(iterator) == [(i % 2, 2) for i in range(1, 8)]
    assert loader.state_dict()["num_workers"] == 3
    other = load(worker_of, 8, 1)
    other.load_state_dict(state)
    assert list(other) == [(i % 2, 2) for i in range(1, 8)]


@pytest.mark.parametrize("persistent", [None, [], 0, 1, "yes"])
def test_persistent_workers_may_be_anything_that_is_true_or_false_as_in_torch(ray_session, persistent):
    loader = DataLoader(range(3), None, num_workers=1, persistent_workers=persistent)
    assert [list(loader), list(loader)] == [[0, 1, 2], [0, 1, 2]]


def test_it_is_generic_and_a_subclass_of_torchs():
    assert issubclass(DataLoader, StockLoader)
    assert isinstance(iter(DataLoader(NUMBERS)), type(iter(StockLoader(NUMBERS))))
    alias = DataLoader[int]
    assert alias.__origin__ is DataLoader
    assert alias.__args__ == (int,)
    assert isinstance(alias(NUMBERS), DataLoader)


def test_signature_is_torchs_spelled_out_with_ours_after_it():
    torchs = list(inspect.signature(StockLoader.__init__).parameters.values())
    ours = list(inspect.signature(DataLoader.__init__).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(torchs)]] == [(p.name, p.kind, p.default) for p in torchs]
    assert [(p.name, p.kind) for p in ours[len(torchs) :]] == [(n, inspect.Parameter.KEYWORD_ONLY) for n in OURS]


@pytest.fixture(scope="module")
def warm(ray_session):
    """Keeps an actor of the options `ANY_CPU` warm, for all tests here."""
    keeper = DataLoader(range(1), num_workers=1, ray_remote_args=ANY_CPU)
    list(keeper)
    yield
    del keeper


@pytest.mark.usefixtures("warm")
def test_every_parameter_is_an_attribute_from_which_a_framework_can_rebuild_the_loader():
    loader = DataLoader(
        range(6), 2, num_workers=1, ray_remote_args=ANY_CPU, timeout=60, in_order=False, prefetch_factor=3
    )
    parameters = inspect.signature(type(loader)).parameters
    arguments = {name: getattr(loader, name) for name in parameters if name != "shuffle"}
    assert arguments.pop("batch_size") == 2
    assert arguments.pop("drop_last") is False
    assert arguments.pop("sampler") is loader.sampler
    rebuilt = type(loader)(**arguments)
    assert (rebuilt.ray_remote_args, rebuilt.timeout, rebuilt.prefetch_factor) == (ANY_CPU, 60, 3)
    assert sorted(batch.tolist() for batch in rebuilt) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "make",
    [
        lambda namespace: type("Sub", (DataLoader,), namespace),
        lambda namespace: types.new_class("Sub", (DataLoader[int],), exec_body=lambda ns: ns.update(namespace)),
    ],
    ids=["type", "new_class"],
)
def test_dynamic_subclass_with_own_get_iterator(ray_session, make):
    def get_iterator(self):
        return (batch * 10 for batch in super(subclass, self)._get_iterator())

    subclass = make({"_get_iterator": get_iterator})
    loader = subclass(range(4), 2, num_workers=2)
    assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]


@pytest.fixture
def no_gc():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("taken", [0, 2, 10])
def test_collected_by_reference_count(ray_session, no_gc, persistent, taken):
    """After an error, too."""
    loader = load(lambda index: 1 // (9 - index), 11, 2, persistent_workers=persistent)
    iterator = iter(loader)
    for number in range(taken):
        with pytest.raises(ZeroDivisionError) if number == 9 else contextlib.nullcontext():
            next(iterator)
    dead = weakref.ref(loader), weakref.ref(iterator)
    del loader, iterator
    assert [reference() for reference in dead] == [None, None]


@pytest.mark.usefixtures("warm")
def test_a_loader_may_be_pickled_fresh_and_used():
    loader = DataLoader(range(6), 2, num_workers=1, collate_fn=as_is, prefetch_factor=3, ray_remote_args=ANY_CPU)
    fresh = pickle.loads(pickle.dumps(loader))
    expected = list(loader)
    used = pickle.loads(pickle.dumps(loader))
    assert expected == [[0, 1], [2, 3], [4, 5]]
    assert list(fresh) == list(used) == expected
    assert (used.prefetch_factor, used.ray_remote_args) == (3, ANY_CPU)


def test_an_iterator_refuses_to_be_pickled_with_torchs_type_of_error(ray_session):
    loader = DataLoader(range(2), num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    with pytest.raises(NotImplementedError, match="cannot be pickled"):
        pickle.dumps(iter(StockLoader(range(2))))
    for holder in (iterator, loader):  # with persistent workers a used loader holds its iterator
        with pytest.raises(NotImplementedError, match=r"EpochIterator cannot be pickled: .* drop it in __getstate__"):
            pickle.dumps(holder)
    with pytest.raises(NotImplementedError, match="LocalIterator cannot be pickled"):
        pickle.dumps(iter(DataLoader(range(2))))


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_a_copy_of_a_loader_works_beside_it(ray_session, copier):
    loader = DataLoader(Calls(as_is, 4), 2, num_workers=1)
    twin = copier(loader)
    assert type(twin) is DataLoader
    both = [(a.tolist(), b.tolist()) for a, b in zip(loader, twin, strict=True)]
    assert both == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
