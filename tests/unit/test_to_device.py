"""How a batch is rebuilt with its tensors on a device: what keeps its type, and what is left alone."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any

import pytest
import torch

from rayloader.epoch.to_device import Delivery, Moved, rebuilt
from simulated_device import DEVICE, SimulatedAccelerator

Pair = collections.namedtuple("Pair", "first second")
ONE = torch.tensor(1)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    name: str = "name"


class Twice(Pair):
    """A namedtuple whose constructor takes other arguments than its fields."""

    def __new__(cls, both: Any) -> Any:
        return super().__new__(cls, both, both)


class Couple(tuple):  # type: ignore[type-arg]
    """A tuple that cannot be made of its items."""

    def __new__(cls, first: Any, second: Any) -> Any:
        return super().__new__(cls, (first, second))


class WithAttributes(dict):  # type: ignore[type-arg]
    """Has its item as an attribute too, and refuses `update`, as the outputs of Transformers' models do."""

    image: Any = None

    def __setitem__(self, key: str, item: Any) -> None:
        super().__setitem__(key, item)
        setattr(self, key, item)

    def update(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("set items one by one")


class Titled(list):  # type: ignore[type-arg]
    title = ""


class Movable:
    def to(self, device: Any) -> str:
        return f"on {device}"


def doubled(leaf: Any) -> Any:
    return leaf * 2 if isinstance(leaf, torch.Tensor) else leaf.to("there")


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (ONE, torch.tensor(2)),
        ("text", "text"),
        (b"bytes", b"bytes"),
        (None, None),
        (range(3), [0, 1, 2]),
        ([ONE, [ONE]], [torch.tensor(2), [torch.tensor(2)]]),
        ((ONE, "text"), (torch.tensor(2), "text")),
        (Pair(ONE, 1.5), Pair(torch.tensor(2), 1.5)),
        ({"a": ONE, 3: None}, {"a": torch.tensor(2), 3: None}),
        (collections.OrderedDict(b=ONE, a=1), collections.OrderedDict(b=torch.tensor(2), a=1)),
        (collections.UserDict(a=ONE), collections.UserDict(a=torch.tensor(2))),
        (collections.Counter(a=3), collections.Counter(a=3)),
        (Twice(ONE), Twice(torch.tensor(2))),
        (Couple(ONE, 1), (torch.tensor(2), 1)),
        (collections.deque([ONE, 1]), collections.deque([torch.tensor(2), 1])),
        (Frozen(ONE), Frozen(torch.tensor(2))),
        (Movable(), "on there"),
        ([{"a": (Movable(),)}], [{"a": ("on there",)}]),
    ],
)
def test_tensors_are_changed_wherever_they_are_and_types_stay(batch: Any, expected: Any) -> None:
    found = rebuilt(batch, doubled)
    assert found == expected
    assert type(found) is type(expected)


def test_a_mapping_that_cannot_be_changed_is_made_anew() -> None:
    found = rebuilt(types.MappingProxyType({"a": ONE}), doubled)
    assert dict(found) == {"a": torch.tensor(2)}
    assert type(found) is types.MappingProxyType


def test_items_of_a_mapping_are_set_as_a_program_sets_them() -> None:
    batch = WithAttributes()
    batch["image"] = ONE
    found = rebuilt(batch, doubled)
    assert type(found) is WithAttributes
    assert found["image"] == torch.tensor(2)
    assert found.image is found["image"]
    assert batch.image is ONE


def test_attributes_of_containers_stay_and_the_batch_itself_is_left_alone() -> None:
    batch = Titled([ONE])
    batch.title = "mine"
    found = rebuilt(batch, doubled)
    assert (found, found.title, batch) == ([torch.tensor(2)], "mine", [ONE])


def test_a_class_is_no_part_of_a_batch_that_moves() -> None:
    assert rebuilt([Frozen, Movable], doubled) == [Frozen, Movable]


def test_what_is_handed_over_twice_is_the_same() -> None:
    accelerator = SimulatedAccelerator()
    moved = Moved({"tensor": torch.arange(3), "movable": Movable()}, DEVICE, accelerator)
    assert accelerator.done == 0
    first, second = moved.handed_over(), moved.handed_over()
    assert (first["movable"], second["movable"]) == ("on cuda:0", "on cuda:0")
    assert first["tensor"].tolist() == [0, 1, 2]
    assert first["tensor"] is second["tensor"]
    assert accelerator.queued == 1


def test_a_delivery_that_does_nothing_prepares_nothing() -> None:
    assert not Delivery().prepares
    assert Delivery(pin=lambda batch: batch).prepares
    assert Delivery(device=DEVICE).prepares
