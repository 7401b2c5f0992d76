"""Generators in an object, in a replica, and made later: found, and put back in another process's copy."""

import collections
import functools
import gc
import io
import random
import string
import sys
import types

import numpy as np
import pytest
import torch

from rayloader.errors import ReplayError
from rayloader.state import generators, living_generators, object_paths
from rayloader.state.generator_kinds import engine, kind_of, make_generator, set_state, state_of
from rayloader.state.generators import Generators, find_generators, noting
from rayloader.state.random_state import RandomState
from rayloader.transport import codec


@pytest.fixture(autouse=True)
def modules_noted(monkeypatch):
    before = set(living_generators.MODULES_AT_START)
    living_generators.note_modules()
    living_generators.MODULES_AT_START.remove(__name__)
    monkeypatch.setattr(living_generators, "_namespaces", living_generators._Namespaces())
    living_generators.freeze()  # as a worker's process does when it has started
    yield
    gc.unfreeze()
    living_generators.MODULES_AT_START.clear()
    living_generators.MODULES_AT_START.update(before)


class Holder:
    def __init__(self, held=None):
        self.held = held

    def __call__(self, *_):
        return draw(self.held)


class Slotted:
    __slots__ = ("held",)


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return (generator.rand if isinstance(generator, np.random.RandomState) else generator.random)()


def make(kind):
    return {
        "python": lambda: random.Random(1),
        "numpy": lambda: np.random.default_rng(2),
        "legacy": lambda: np.random.RandomState(3),
        "torch": lambda: torch.Generator().manual_seed(4),
    }[kind]()


KINDS = ["python", "numpy", "legacy", "torch"]


def closure(generator):
    return lambda: draw(generator)


def nested(obj, depth):
    for _ in range(depth):
        obj = Holder([obj])
    return obj


PLACES = {
    "attribute": Holder,
    "behind many objects": lambda g: Holder([*map(str, range(20_000)), *([k] for k in range(2_000)), g]),
    "deep": lambda g: nested(g, 20),
    "closure": closure,
    "partial": lambda g: functools.partial(draw, g),
    "default": lambda g: types.FunctionType(draw.__code__, globals(), "draw", (g,)),
    "bound method": lambda g: Holder(g).__call__,
    "slot": lambda g: set_slot(g),
    "dict of tuples": lambda g: {"a": ({3: g},)},
    "iterator": lambda g: iter([g]),
}


def set_slot(generator):
    slotted = Slotted()
    slotted.held = generator
    return slotted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_wherever_they_are(place, kind):
    generator = make(kind)
    (found,) = find_generators(PLACES[place](generator))
    assert engine(found) is engine(generator)


def test_the_search_ends_at_modules_classes_and_circles():
    holder = Holder()
    holder.held = [holder, sys, np, torch, Holder, find_generators, draw]
    assert find_generators(holder) == []


def test_of_shared_state_there_is_one():
    bits = np.random.PCG64(1)
    assert len(find_generators([np.random.Generator(bits), bits, np.random.Generator(bits)])) == 1
    legacy = np.random.RandomState(1)
    assert find_generators([legacy._bit_generator, legacy]) == [legacy]  # its second normal number in store counts


def test_global_generators_and_those_without_a_state_are_nobodys():
    held = [np.random.rand, random.random, torch.default_generator, np.random.mtrand._rand, random.SystemRandom()]
    assert find_generators(held) == []


def test_how_many_were_spawned_is_in_the_state_and_in_what_it_was_seeded_with():
    seed = np.random.SeedSequence([1, 2])
    generator = np.random.default_rng(seed)
    begin = state_of(generator)
    first = generator.spawn(1)[0].random()
    then = state_of(generator)
    second = generator.spawn(1)[0].random()
    for state, expected in ((then, second), (begin, first)):
        set_state(generator, state)
        assert generator.spawn(1)[0].random() == expected
    assert seed.n_children_spawned == 1
    again = make_generator(kind_of(generator), then)
    set_state(again, then)
    assert again.spawn(1)[0].random() == second


ENTROPIES = {
    "number": 2**100,
    "NumPy number": np.uint32(7),
    "list of NumPy numbers": [np.int64(1), 2],
    "range": range(3),
    "array": np.array([3, 4], np.uint32),
    "array of objects": np.array([2**70, 3], object),
    "list with text": ["12", 3],
}


@pytest.mark.parametrize("entropy", ENTROPIES)
def test_what_a_generator_was_seeded_with_can_be_saved(entropy):
    generator = np.random.default_rng(ENTROPIES[entropy]).spawn(2)[1]
    generator.spawn(1)
    state = RandomState(others=(state_of(generator),))
    file = io.BytesIO()
    torch.save(state.pack(), file)
    file.seek(0)
    saved = RandomState.unpack(torch.load(file, weights_only=True))
    assert saved.equals(state)
    expected = generator.spawn(1)[0].random()
    again = make_generator(kind_of(generator), saved.others[0])
    set_state(again, saved.others[0])
    assert again.spawn(1)[0].random() == expected


def test_children_that_share_what_they_were_seeded_with_have_the_state_that_was_saved():
    children = np.random.default_rng([1, 2]).spawn(2)
    state = RandomState(others=tuple(map(state_of, children)))
    assert RandomState.unpack(state.pack()).equals(state)


def travelled(obj):
    """The object as a worker has it, and its generators."""
    encoded = codec.encode(obj, mapped=())
    with noting() as noted:
        copy = codec.decode(encoded.skeleton, encoded.buffers)
    return copy, Generators({"dataset": copy}, noted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [place for place in PLACES if place not in ("iterator", "default")])
def test_the_pickler_meets_each(place, kind):
    original = make(kind)
    _, copy = travelled(PLACES[place](original))
    (found,) = copy.given
    assert repr(state_of(found)) == repr(state_of(find_generators([original])[0]))


class Own(random.Random):
    """With a pickling of its own."""

    def __init__(self, tag):
        super().__init__(7)
        self.tag = tag

    def __reduce__(self):
        return Own, (self.tag,), self.getstate()

    def __setstate__(self, state):
        self.setstate(state)


def test_subclasses_and_who_is_the_same_as_whom_stay():
    generator = Own("mine")
    generator.random()
    numpy = np.random.default_rng(5)
    (one, same, numpys), copy = travelled(
        (generator, Holder(generator), [numpy, np.random.Generator(numpy.bit_generator)])
    )
    assert type(one) is Own
    assert one.tag == "mine"
    assert same.held is one
    assert one.random() == generator.random()
    assert numpys[0].bit_generator is numpys[1].bit_generator
    assert len(copy.given) == 2


def test_what_is_bound_to_a_global_generator_is_bound_to_it_there_too():
    """As after a fork: such a dataset draws from the generators that the worker's seeds reach."""
    copy, found = travelled([np.random.rand, random.random, torch.default_generator, np.random.mtrand._rand])
    assert copy[0].__self__ is copy[3] is np.random.mtrand._rand
    assert copy[1].__self__ is random._inst
    assert copy[2] is torch.default_generator
    assert found.given == []


def test_system_random_travels():
    copy, found = travelled(Holder(random.SystemRandom()))
    assert 0 <= copy() < 1
    assert found.given == []


# ---- made later


def two_workers(obj):
    """The same replica in two processes."""
    return travelled(obj), travelled(obj)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_one_is_put_back(kind):
    (old, mine), (new, others) = two_workers(Holder())
    assert mine.look() == ()
    old.held = make(kind)
    draw(old.held)
    later = mine.look()
    expected = draw(old.held)
    others.put_back(later)
    assert draw(new.held) == expected
    assert others.look()[0].paths == later[0].paths


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_there_already_keeps_its_identity(kind):
    (old, mine), (new, others) = two_workers([Holder(), Holder()])
    old[0].held = old[1].held = make(kind)
    new[0].held = new[1].held = there = make(kind)
    later = mine.look()
    assert len(later) == 1
    draw(there)
    others.put_back(later)
    assert new[0].held is new[1].held is there
    assert draw(there) == draw(old[0].held)


def test_two_names_of_one_that_is_made_again_stay_names_of_one():
    (old, mine), (new, others) = two_workers([Holder(), Holder()])
    old[0].held = old[1].held = make("numpy")
    others.put_back(mine.look())
    assert new[0].held is new[1].held is not None


def test_one_in_the_place_of_a_given_one():
    """The given one, which somebody else has too, is left alone."""
    shared = make("python")
    (old, mine), (new, others) = two_workers([Holder(shared), shared])
    old[0].held = random.Random(99)
    others.put_back(mine.look())
    assert new[0].held.random() == random.Random(99).random()
    assert new[1].random() == make("python").random()


def test_a_global_of_a_module(monkeypatch):
    module = types.ModuleType("made_by_a_test")
    monkeypatch.setitem(sys.modules, "made_by_a_test", module)
    (_, mine), (_, others) = two_workers(None)
    module.state = {"generators": [make("numpy")]}
    later = mine.look()
    expected = draw(module.state["generators"][0])
    module.state = {"generators": [make("legacy")]}
    others.put_back(later)
    assert draw(module.state["generators"][0]) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_global_of_a_module_that_was_there_at_the_start(kind, monkeypatch):
    (_, mine), (_, others) = two_workers(None)
    monkeypatch.setattr(string, "generator", make(kind), raising=False)
    later = mine.look()
    expected = draw(string.generator)
    del string.generator
    others.put_back(later)
    assert draw(string.generator) == expected


def test_those_that_a_list_has_got_since_are_its_again():
    (old, mine), (new, others) = two_workers(Holder([make("numpy")]))
    old.held += [make("python"), make("torch")]
    others.put_back(mine.look())
    assert list(map(draw, new.held)) == list(map(draw, old.held))


def test_a_list_that_lacks_something_else_too_is_left_alone():
    (old, mine), (new, others) = two_workers(Holder([]))
    old.held += ["something", make("python")]
    with pytest.raises(ReplayError, match=r"generator at dataset\.held\[1\] was made while loading"):
        others.put_back(mine.look())
    assert new.held == []


def test_one_whose_place_is_missing_is_an_error():
    (old, mine), (_, others) = two_workers(Holder())
    old.held = Holder(make("numpy"))
    with pytest.raises(ReplayError, match=r"generator at dataset\.held\.held was made while loading"):
        others.put_back(mine.look())


def test_one_whose_place_cannot_be_followed_is_an_error_only_once_it_was_drawn_from(monkeypatch):
    module = types.ModuleType("holds_a_view")
    monkeypatch.setitem(sys.modules, "holds_a_view", module)
    module.VIEW = types.MappingProxyType({"generator": make("python")})
    (_, mine), (_, others) = two_workers(Holder())
    assert mine.look() == ()
    module.VIEW["generator"].random()
    with pytest.raises(ReplayError, match=r"generator at holds_a_view\.VIEW\.\?.* was made while loading"):
        others.put_back(mine.look())


def test_one_that_is_made_anew_each_time_need_not_be_there():
    (old, mine), (_, others) = two_workers(Holder())
    old.held = Holder(make("numpy"))
    mine.look()
    old.held = Holder(make("numpy"))
    others.put_back(mine.look())


def test_one_that_nobody_reaches_is_not_followed():
    (_, mine), _ = two_workers(Holder())
    mine_alone = make("numpy")
    assert mine.look() == ()
    assert draw(mine_alone)


def test_one_in_a_module_that_another_worker_of_this_process_has_imported(monkeypatch):
    """Where no other can be put in its place: the default of an argument."""
    module = types.ModuleType("imported_for_a_replica")
    monkeypatch.setitem(sys.modules, "imported_for_a_replica", module)
    elsewhere = Generators({"dataset": None}, [], living_generators.living_generators())

    def draws(*, source):
        return source.random()

    draws.__kwdefaults__ = {"source": make("python")}
    module.draws = draws
    later = elsewhere.look()
    expected = draws()
    second = Generators({"dataset": None}, [], living_generators.living_generators())
    second.put_back(later)
    assert draws() == expected
    assert [one.paths for one in second.look()] == [one.paths for one in later]


def test_what_another_loader_has_left_in_a_module_is_not_followed(monkeypatch):
    module = types.ModuleType("used_by_two_loaders")
    monkeypatch.setitem(sys.modules, "used_by_two_loaders", module)
    module.left = Holder(make("numpy"))
    before = living_generators.living_generators()
    mine = Generators({"dataset": None}, [], before)
    assert mine.look() == ()
    module.own = make("numpy")
    assert [later.paths for later in mine.look()] == [((("module", "used_by_two_loaders"), ("attribute", "own")),)]


def test_those_of_other_workers_in_this_process_are_not_searched_for(monkeypatch):
    held = [random.Random(seed) for seed in range(2)]
    mine, theirs = (Generators({"dataset": Holder(generator)}, [generator]) for generator in held)
    walks = []
    monkeypatch.setattr(generators, "walk", lambda roots: walks.append(roots) or [])
    assert mine.look() == theirs.look() == ()
    assert walks == []
    del mine, theirs
    assert Generators({"dataset": None}, []).look() == ()
    assert len(walks) == 3  # from the replica, then from the program's modules too, and then from all


def test_whether_a_new_one_lasts_shows_at_the_next_look():
    (old, mine), _ = two_workers(Holder())
    assert mine.settled
    old.held = Holder(make("numpy"))
    assert [later.lasting for later in mine.look()] == [True]
    assert not mine.settled
    assert [later.lasting for later in mine.look()] == [True]
    assert mine.settled
    old.held = Holder(make("numpy"))
    assert [later.lasting for later in mine.look()] == [False]
    assert mine.settled


def test_containers_of_the_users_are_looked_into_without_their_code():
    """Lazy containers of packages import, or raise, when they are iterated over."""

    def refuse(*_):
        raise ValueError("this is the user's code")

    def lazy(base):
        return type(
            f"Lazy{base.__name__}", (base,), dict.fromkeys(("__iter__", "__getitem__", "items", "keys"), refuse)
        )

    def children(container):
        return [value for _, value in object_paths._children(container, {}, lambda _: True, None)]

    held = np.random.default_rng(1)
    containers = {
        base: lazy(base)(content)
        for base, content in [
            (dict, {"key": held}),
            (collections.OrderedDict, {"key": held}),
            (list, [held]),
            (tuple, [held]),
            (collections.deque, [held]),
        ]
    }
    for base, container in containers.items():
        assert [value for value in children(container) if value is held] == [held], base
    assert children(lazy(set)([1]))[-1:] != [held]


def bind_name(module, generator):
    module.generator = generator


def bind_again(module, generator):
    module.nothing = generator


def bind_in_class(module, generator):
    module.Dataset.generator = generator


def bind_in_class_again(module, generator):
    module.Dataset.nothing = generator


def put_into_dict(module, generator):
    module.by_name["generator"] = generator


@pytest.mark.parametrize("bind", [bind_name, bind_again, bind_in_class, bind_in_class_again, put_into_dict])
def test_generators_in_modules_that_an_earlier_epoch_has_imported_are_found(monkeypatch, bind):
    """The collector tells of no generator of torch's, and of nothing that was frozen."""
    module = types.ModuleType("late")
    module.Dataset = type("Dataset", (), {"__module__": "late", "nothing": None})
    module.nothing, module.by_name = None, {}
    monkeypatch.setitem(sys.modules, "late", module)
    for _ in range(2):  # epochs
        living_generators.freeze()
        followed = Generators({}, [], living_generators.living_generators())
        assert followed.look() == ()
        made = torch.Generator().manual_seed(1)
        bind(module, made)
        (later,) = followed.look()
        assert followed.look() == (later,)
        state = made.get_state()
        made.manual_seed(2)
        followed.put_back((later,))
        assert made.get_state().equal(state)


def test_a_module_that_was_imported_anew_is_watched_instead_of_the_old_one(monkeypatch):
    for _ in range(2):
        module = types.ModuleType("late")
        monkeypatch.setitem(sys.modules, "late", module)
        living_generators.freeze()
        followed = Generators({}, [], living_generators.living_generators())
        module.generator = torch.Generator()
        assert len(followed.look()) == 1


def in_a_package(monkeypatch, name="package"):
    module = types.ModuleType(name)
    module.__file__ = f"/usr/lib/site-packages/{name}.py"
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_what_packages_and_their_classes_name_is_found_without_looking_into_their_objects(kind, monkeypatch):
    class Refusing:
        def __getattribute__(self, name):
            raise AssertionError("looked into")

    followed = Generators({}, [])
    package = in_a_package(monkeypatch)
    package.other = Refusing()
    package.generator = make(kind)
    package.Class = type("Class", (), {"__module__": "package", "generator": make(kind)})
    walked = []
    walk = generators.walk
    monkeypatch.setattr(generators, "walk", lambda roots: walk(walked.append(root) or root for root in roots))
    assert sorted(object_paths.in_words(later.paths[0]) for later in followed.look()) == [
        "package.Class.generator",
        "package.generator",
    ]
    assert package.other not in [value for _, value in walked]


def test_packages_are_looked_into_once_for_a_generator_that_no_path_leads_to(monkeypatch):
    package = in_a_package(monkeypatch)
    package.held = [Holder()]
    followed = Generators({}, [])
    looked_into = []
    roots = followed._module_roots
    monkeypatch.setattr(followed, "_module_roots", lambda deep: looked_into.append(deep(package)) or roots(deep))
    for generator in ("first", "second"):
        hidden = iter(map(np.random.default_rng(1).integers, [generator]))  # as in an iterator's frame
        for _ in range(2):
            assert followed.look() == ()
        assert looked_into == [False, True, False]
        looked_into.clear()
        del hidden
    package.held[0].held = make("numpy")
    assert len(followed.look()) == 1


@pytest.mark.parametrize(
    "contents",
    [
        [("a", 1), {"b": [2.0, None]}, {3}, collections.deque([b"c"])],
        [("a", 1), {"b": [2.0, {"rng": random.Random(1)}]}],
        [("a", 1), (Holder, types.MappingProxyType({"rng": random.Random(1)}))],
        {"key": [[[[[[[[[[[[random.Random(1)]]]]]]]]]]]]},
        {"key": [[[[[[[[[[[[1]]]]]]]]]]]]},
    ],
)
def test_only_containers_that_cannot_lead_to_generators_are_passed_over(contents):
    expected = "Random" in repr(contents)
    assert bool(find_generators(contents)) == expected


def test_a_container_of_containers_that_hold_each_other_is_looked_through_once():
    contents = [{}]
    contents[0]["self"] = contents
    assert find_generators(contents) == []
    contents[0]["rng"] = random.Random(1)
    assert find_generators(contents) == [contents[0]["rng"]]


def test_what_many_share_is_looked_through_once():
    shared = [str(number) for number in range(1000)]
    records = [(number, shared) for number in range(20_000)]
    (containers,) = [object_paths.plain_containers(records)]
    assert sum(container is shared for container in containers) == 1
