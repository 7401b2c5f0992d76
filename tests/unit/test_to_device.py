"""How a batch is rebuilt with its tensors on a device: what keeps its type, and what is left alone."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayloader.epoch.ahead import Delivery
from rayloader.gpu import device as devices
from rayloader.gpu.to_device import Moved, PinOrMove, rebuilt
from simulated_device import DEVICE, SimulatedAccelerator

Pair = collections.namedtuple("Pair", "first second")
ONE = torch.tensor(1)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    name: str = "name"


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


class TitledTuple(tuple):  # type: ignore[type-arg]
    title = ""


class Twice(tuple):  # type: ignore[type-arg]
    """Its constructor does not take its items."""

    def __new__(cls, item: Any) -> Twice:
        return super().__new__(cls, (item, item))


class TwiceNamed(Pair):
    def __new__(cls, item: Any) -> TwiceNamed:
        return super().__new__(cls, item, item)


class Strict(dict):  # type: ignore[type-arg]
    """As the outputs of Transformers' models."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a model's output cannot be updated")


class Attributes(dict):  # type: ignore[type-arg]
    """Its items are attributes too; any other is a KeyError."""

    __getattr__ = dict.__getitem__


@dataclasses.dataclass
class Cached:
    image: Any
    cache: Any = dataclasses.field(init=False)


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
        (range(3), range(3)),
        (bytearray(b"bytes"), bytearray(b"bytes")),
        ([ONE, [ONE]], [torch.tensor(2), [torch.tensor(2)]]),
        ((ONE, "text"), (torch.tensor(2), "text")),
        (Pair(ONE, 1.5), Pair(torch.tensor(2), 1.5)),
        ({"a": ONE, 3: None}, {"a": torch.tensor(2), 3: None}),
        (collections.OrderedDict(b=ONE, a=1), collections.OrderedDict(b=torch.tensor(2), a=1)),
        (collections.UserDict(a=ONE), collections.UserDict(a=torch.tensor(2))),
        (collections.Counter(a=3), collections.Counter(a=3)),
        (collections.Counter(a=ONE, b=3), collections.Counter(a=torch.tensor(2), b=3)),
        (collections.deque([ONE, 1]), collections.deque([torch.tensor(2), 1])),
        (torch.return_types.max((ONE, ONE)), torch.return_types.max((torch.tensor(2), torch.tensor(2)))),
        (Twice(1), Twice(1)),
        (Twice(ONE), Twice(torch.tensor(2))),
        (TwiceNamed(ONE), TwiceNamed(torch.tensor(2))),
        (Frozen(ONE), Frozen(torch.tensor(2))),
        (Strict(image=ONE), Strict(image=torch.tensor(2))),
        ([Attributes(image=ONE)], [Attributes(image=torch.tensor(2))]),
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


@pytest.mark.parametrize("kind", [Titled, TitledTuple])
def test_attributes_of_containers_stay_and_the_batch_itself_is_left_alone(kind: Any) -> None:
    batch = kind([ONE])
    batch.title = "mine"
    found = rebuilt(batch, doubled)
    assert (found, found.title, batch) == (kind([torch.tensor(2)]), "mine", kind([ONE]))


class Lines(collections.abc.Sequence):  # type: ignore[type-arg]
    """Is made of something else than its items."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: Any) -> Any:
        return self.lines[index]


def test_a_container_in_which_nothing_changes_is_left_as_it_is() -> None:
    batch = Lines("first\nsecond"), {"a": [1]}
    assert rebuilt(batch, doubled) is batch
    found = rebuilt([*batch, ONE], doubled)
    assert found[0] is batch[0]
    assert found[1] is batch[1]


def test_a_field_without_a_value_stays_so() -> None:
    found = rebuilt(Cached(ONE), doubled)
    assert vars(found) == {"image": torch.tensor(2)}


class Wrapper(torch.Tensor):
    """Carries out operations by itself, and has no kernel that records a stream."""

    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)  # type: ignore[attr-defined,no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "make",
    [torch.Tensor.to_sparse, lambda ones: torch.quantize_per_tensor(ones, 0.5, 0, torch.quint8), Wrapper],
)
def test_a_tensor_that_cannot_be_recorded_is_moved_when_it_is_handed_over(
    make: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, leaf = SimulatedAccelerator(), make(torch.ones(2))
    moved = Moved([leaf], DEVICE, accelerator)
    assert accelerator.queued == 0
    monkeypatch.setattr(devices, "move", lambda leaf, device: (leaf, device))
    ((found, device),) = moved.handed_over()
    assert found is leaf
    assert device == DEVICE


class InPlace:
    """Moves itself, and does not say so."""

    device: Any = None

    def to(self, device: Any) -> None:
        self.device = device


def test_an_object_that_moves_itself_and_returns_nothing_stays_in_the_batch() -> None:
    batch = InPlace()
    assert Moved([batch], DEVICE, SimulatedAccelerator()).handed_over() == [batch]
    assert batch.device == DEVICE


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
    assert PinOrMove(pin=lambda batch: batch).prepares
    assert PinOrMove(device=DEVICE).prepares
