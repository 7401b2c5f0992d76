"""Generators in an object, in a replica, and made later: found, and put back in another process's copy."""

import collections
import functools
import importlib
import io
import random
import sys
import types

import numpy as np
import pytest
import torch

from rayloader import DataLoader
from rayloader.errors import ReplayError
from rayloader.namespaces import own_modules
from rayloader.random import generators, search
from rayloader.random.generator_kinds import engine, kind_of, make_generator, set_state, state_of
from rayloader.random.generators import RECORDED, Generators, collecting
from rayloader.random.packed import pack, unpack
from rayloader.random.random_state import RandomState
from rayloader.transport import codec


@pytest.fixture(autouse=True)
def no_other_modules(monkeypatch):
    """The modules that are there already are none of the program's."""
    others = set(sys.modules)
    own = generators.own_modules
    monkeypatch.setattr(
        generators, "own_modules", lambda **options: (one for one in own(**options) if one[0] not in others)
    )


def module_of(program, name, monkeypatch):
    """A module in a folder of the program's, or of a package's."""
    module = types.ModuleType(name)
    module.__file__ = f"/usr/lib/{program}/{name}.py"
    monkeypatch.setitem(sys.modules, name, module)
    return module


def found_in(obj):
    return [one.generator for one in search.search({"object": obj})]


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
    "behind large data": lambda g: Holder([[*map(str, range(20_000))], [(k, k) for k in range(2_000)], g]),
    "in a long list": lambda g: Holder([*range(500), g]),
    "deep": lambda g: nested(g, 20),
    "closure": closure,
    "partial": lambda g: functools.partial(draw, g),
    "default": lambda g: types.FunctionType(draw.__code__, globals(), "draw", (g,)),
    "bound method": lambda g: Holder(g).__call__,
    "slot": lambda g: set_slot(g),
    "dict of tuples": lambda g: {"a": ({3: g},)},
    "function's attribute": lambda g: named(g),
}


def named(generator):
    def function():
        """Holds it."""

    function.held = generator
    return function


def set_slot(generator):
    slotted = Slotted()
    slotted.held = generator
    return slotted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_generators_are_found_wherever_they_are(place, kind):
    generator = make(kind)
    (found,) = found_in(PLACES[place](generator))
    assert engine(found) is engine(generator)


def test_the_search_ends_at_modules_classes_and_circles():
    holder = Holder()
    holder.held = [holder, sys, np, torch, Holder, found_in, draw]
    assert found_in(holder) == []


def test_of_shared_state_there_is_one():
    bits = np.random.PCG64(1)
    assert len(found_in([np.random.Generator(bits), bits, np.random.Generator(bits)])) == 1
    legacy = np.random.RandomState(1)
    assert found_in([legacy._bit_generator, legacy]) == [legacy]  # its second normal number in store counts


def test_global_generators_and_those_without_a_state_are_nobodys():
    held = [np.random.rand, random.random, torch.default_generator, np.random.mtrand._rand, random.SystemRandom()]
    assert found_in(held) == []


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
    torch.save(pack(state), file)
    file.seek(0)
    saved = unpack(torch.load(file, weights_only=True))
    assert saved.equals(state)
    expected = generator.spawn(1)[0].random()
    again = make_generator(kind_of(generator), saved.others[0])
    set_state(again, saved.others[0])
    assert again.spawn(1)[0].random() == expected


def test_children_that_share_what_they_were_seeded_with_have_the_state_that_was_saved():
    children = np.random.default_rng([1, 2]).spawn(2)
    state = RandomState(others=tuple(map(state_of, children)))
    assert unpack(pack(state)).equals(state)


def travelled(obj):
    """The object as a worker has it, and its generators."""
    encoded = codec.encode(obj, replica=True, special=RECORDED)
    with collecting() as unpickled:
        copy = codec.decode(encoded.skeleton, encoded.buffers)
    return copy, Generators({"dataset": copy}, unpickled)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "default"])
def test_the_pickler_meets_each(place, kind):
    original = make(kind)
    _, copy = travelled(PLACES[place](original))
    (found,) = copy.given
    assert repr(state_of(found)) == repr(state_of(found_in([original])[0]))


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
    module = module_of("program", "made_by_a_test", monkeypatch)
    (_, mine), (_, others) = two_workers(None)
    module.state = {"generators": [make("numpy")]}
    later = mine.look()
    expected = draw(module.state["generators"][0])
    module.state = {"generators": [make("legacy")]}
    others.put_back(later)
    assert draw(module.state["generators"][0]) == expected


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
    """Where no other can be put in its place."""
    module = module_of("program", "imported_for_a_replica", monkeypatch)
    elsewhere = Generators({"dataset": None}, [])
    module.held = (make("python"),)
    later = elsewhere.look()
    expected = draw(module.held[0])
    second = Generators({"dataset": None}, [])
    second.put_back(later)
    assert draw(module.held[0]) == expected
    assert [one.paths for one in second.look()] == [one.paths for one in later]


def test_one_in_a_module_counts_once_it_was_drawn_from(monkeypatch):
    """Another process has it as its import has made it, or as another loader has left it."""
    module = module_of("program", "used_by_two_loaders", monkeypatch)
    module.left = Holder(make("numpy"))
    mine = Generators({"dataset": None}, [])
    assert mine.look() == ()
    module.own = make("numpy")
    assert paths_in(mine.look()) == ["used_by_two_loaders.own"]
    module.left.held.random()
    assert paths_in(mine.look()) == ["used_by_two_loaders.own", "used_by_two_loaders.left.held"]


def test_a_module_that_is_not_imported_is_imported_for_its_generator(monkeypatch, tmp_path):
    (tmp_path / "imported_to_restore.py").write_text("import random\nRNG = random.Random(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = []
    monkeypatch.setattr(generators, "own_modules", lambda **_: [(name, vars(sys.modules[name])) for name in names])
    (_, mine), (_, others) = two_workers(None)
    try:
        names.append(importlib.import_module("imported_to_restore").__name__)
        sys.modules["imported_to_restore"].RNG.random()
        (later,) = mine.look()
        del sys.modules["imported_to_restore"]
        others.put_back((later,))
        assert state_of(sys.modules["imported_to_restore"].RNG) == later.state
    finally:
        sys.modules.pop("imported_to_restore", None)


def test_one_in_the_place_of_another_does_not_last():
    (old, mine), _ = two_workers(Holder())
    for lasts in (True, False, False):
        old.held = Holder(make("numpy"))
        assert [later.lasts for later in mine.look()] == [lasts]
    assert [later.lasts for later in mine.look()] == [True]


def test_containers_of_the_users_are_looked_into_without_their_code():
    """Lazy containers of packages import, or raise, when they are iterated over."""

    def refuse(*_):
        raise ValueError("this is the user's code")

    def lazy(base):
        return type(
            f"Lazy{base.__name__}", (base,), dict.fromkeys(("__iter__", "__getitem__", "items", "keys"), refuse)
        )

    def children(container):
        return [value for _, value in search._parts(container)]

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
    assert children(lazy(set)([1])) == []


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
    module = module_of("program", "late", monkeypatch)
    module.Dataset = type("Dataset", (), {"__module__": "late", "nothing": None})
    module.nothing, module.by_name = None, {}
    for _ in range(2):  # epochs
        followed = Generators({}, [])
        assert followed.look() == ()
        made = torch.Generator().manual_seed(1)
        bind(module, made)
        (later,) = followed.look()
        assert followed.look() == (later,)
        state = made.get_state()
        made.manual_seed(2)
        followed.put_back((later,))
        assert made.get_state().equal(state)


def test_a_module_that_was_imported_anew_is_searched_instead_of_the_old_one(monkeypatch):
    for _ in range(2):
        module = module_of("program", "late", monkeypatch)
        followed = Generators({}, [])
        module.generator = torch.Generator()
        assert len(followed.look()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_modules_and_classes_of_packages_are_not_searched(kind, monkeypatch):
    package = module_of("site-packages", "package", monkeypatch)

    package.Class = type("Class", (), {"__module__": "package"})
    dataset = Holder([package.Class(), package, package.Class])
    followed = Generators({"dataset": dataset}, [])
    made = package.generator = package.Class.generator = make(kind)
    assert followed.look() == ()
    dataset.held[0].own = made  # in an object of a package's class
    assert paths_in(followed.look()) == ["dataset.held[0].own"]


@pytest.mark.parametrize("hold", [list, tuple, collections.deque, lambda items: dict(enumerate(items))])
def test_of_a_long_container_only_the_items_themselves_are_searched(hold):
    holders = [Holder() for _ in range(search.LONG)]
    dataset = Holder(hold([*holders, object()]))
    followed = Generators({"dataset": dataset}, [])
    holders[0].held = make("numpy")
    assert followed.look() == ()
    dataset.held = hold([*holders[1:], object(), make("torch")])
    assert paths_in(followed.look()) == [f"dataset.held[{search.LONG}]"]
    dataset.held = hold(holders)
    assert paths_in(followed.look()) == ["dataset.held[0].held"]


def paths_in(later):
    return [search.in_words(path) for one in later for path in one.paths]


@pytest.mark.parametrize("where", ["dataset", "module"])
def test_a_look_ends_after_so_many_objects(where, monkeypatch):
    """It is made at the start of each epoch, which it must not delay, whatever the dataset holds."""
    module = module_of("program", "large", monkeypatch)
    many = nested(Holder(), search.MOST // 2)
    dataset = Holder(many if where == "dataset" else None)
    module.many = many if where == "module" else None
    visited = []
    walk = search.walk
    monkeypatch.setattr(search, "walk", lambda *args: (visited.append(1) or one for one in walk(*args)))
    followed = Generators({"dataset": dataset}, [])
    assert search.MOST <= len(visited) <= 2 * search.MOST
    visited.clear()
    dataset.first = module.first = make("numpy")
    assert len(followed.look()) == 1
    assert len(visited) <= 2 * search.MOST


@pytest.mark.parametrize("count", [3, 3 * search.MOST])
def test_each_global_is_looked_at_before_what_is_behind_them(count, monkeypatch):
    module = module_of("program", "of_many_names", monkeypatch)
    vars(module).update({f"name_{number}": nested(None, 3) for number in range(count)})
    module.last = Holder()
    module.rng = make("python")
    followed = Generators({}, [])
    module.rng.random()
    assert paths_in(followed.look()) == ["of_many_names.rng"]


def test_a_container_of_containers_that_hold_each_other_is_looked_through_once():
    contents = [{}]
    contents[0]["self"] = contents
    assert found_in(contents) == []
    contents[0]["rng"] = random.Random(1)
    assert found_in(contents) == [contents[0]["rng"]]


@pytest.mark.parametrize("name", ["loader", "iterator"])
def test_a_loader_among_the_globals_is_searched_but_not_what_it_notes_of_its_epochs(name, monkeypatch):
    module = module_of("program", "with_loader", monkeypatch)
    dataset = Holder()
    loader = DataLoader([dataset], collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    setattr(module, name, {"loader": loader, "iterator": iterator}[name])
    followed = Generators({}, [])
    iterator.position.generator = loader._recorder.generator = make("torch")
    dataset.held = make("numpy")
    found = {"loader": "loader.dataset", "iterator": "iterator._dataset"}[name]
    assert paths_in(followed.look())[0] == f"with_loader.{found}[0].held"
    assert len(followed.look()) == 1


@pytest.mark.parametrize("main", [None, 5, object()], ids=repr)
def test_what_is_no_module_in_the_place_of_the_main_one_has_no_generators(main, monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert "__main__" not in dict(own_modules(main=True))


def test_a_module_that_replaces_another_of_its_name_is_searched(monkeypatch):
    module_of("program", "replaced", monkeypatch)
    Generators({}, [])
    newest = next(reversed(sys.modules))
    module_of("program", "replaced", monkeypatch).generator = make("python")
    assert next(reversed(sys.modules)) == newest
    followed = Generators({}, [])
    sys.modules["replaced"].generator.random()
    assert paths_in(followed.look()) == ["replaced.generator"]
