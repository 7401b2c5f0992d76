"""Which part of a replica cannot be unpickled is named, wherever in it that is."""

import functools
import sys
import types

import pytest
import torch

from rayloader.protocol import Replica
from rayloader.replica import unopenable
from rayloader.transport.codec import encode
from rayloader.transport.mapped import Mappings

HERE = __name__


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("one", "two")

    def __init__(self, one, two):
        self.one, self.two = one, two


class Delegates(Holder):
    def __getattr__(self, name):
        return getattr(self.inner, name)


class NeedsArgument:
    def __new__(cls, argument=None):
        if argument is None:
            raise ValueError("no argument")
        return super().__new__(cls)


class RefusesState:
    def __init__(self):
        self.a = 1

    def __setstate__(self, state):
        raise OSError("no state")


class Calls:
    def __reduce__(self):
        return fails, (1, 2, 3, 4)


def fails(*_):
    raise KeyError("it fails")


BAD = NeedsArgument(1)
PARTS = {
    "dataset": BAD,
    "dataset.bad": Holder(a=1, b="text", bad=BAD, c=2),
    "dataset[1]": [0, BAD],
    "dataset.many[2500]": Holder(many=[*range(2500), BAD]),
    "dataset.a[2]['x'][1]": Holder(a=[1, 2, {"x": (0, BAD)}]),
    "dataset.five[4]": Holder(five=(1, 2, 3, 4, BAD)),
    "dataset.numbers[1]": Holder(numbers={1: BAD}),
    "dataset.two": Slotted(1, BAD),
    "dataset.inner.bad": Delegates(inner=Holder(bad=BAD)),
    "dataset.b['same']": Holder(a="same", b={"same": BAD}),
    "dataset.first": Holder(first=BAD, second=BAD),
    "dataset.partial[0]": Holder(partial=functools.partial(print, BAD)),
    "dataset.some": Holder(tensors=[torch.ones(n) for n in range(3)], some={BAD}),
}


def opened(replica, names=Replica.__slots__):
    """The note below the error of opening it."""
    encoded = encode(replica, mapped=Mappings())
    with pytest.raises((ValueError, OSError, KeyError)) as caught:
        unopenable.decode(encoded.skeleton, encoded.buffers, encoded.carried, names)
    (note,) = caught.value.__notes__
    return note


@pytest.mark.parametrize("path", PARTS)
def test_the_part_is_named(path):
    note = opened(Replica(PARTS[path], len, None, {}))
    what = f"It cannot be opened in the worker: {path}: {HERE}.NeedsArgument (ValueError: no argument); its class must"
    assert note.startswith(what)


@pytest.mark.parametrize(
    ("made", "reason"),
    [(RefusesState, "RefusesState (OSError: no state)"), (Calls, "fails (KeyError: 'it fails')")],
)
def test_what_would_have_made_it_is_named_and_why_it_did_not(made, reason):
    assert f"dataset.it: {HERE}.{reason}; its class must" in opened(Replica(Holder(it=made()), len, None, {}))


def test_the_function_is_named():
    assert "worker: collate_fn.bad: " in opened(Replica([1], Holder(bad=BAD), None, {}))


def test_without_items_the_object_has_one_name():
    assert "worker: loader.dataset.bad: " in opened(Holder(dataset=Holder(bad=BAD)), ("loader",))


@pytest.mark.parametrize("part", ["Made", "function", "module"])
def test_of_a_module_that_is_not_there_it_is_said_that_workers_must_import_it(part, monkeypatch):
    module = types.ModuleType("made_at_run_time")
    exec("class Made: pass\ndef function(): pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    encoded = encode(Replica(Holder(it=vars(module).get(part, module)), len, None, {}), mapped=Mappings())
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(ModuleNotFoundError) as caught:
        unopenable.decode(encoded.skeleton, encoded.buffers, (), Replica.__slots__)
    (note,) = caught.value.__notes__
    assert note.startswith("It cannot be opened in the worker: dataset.it: ")
    assert "workers must be able to import its module" in note
