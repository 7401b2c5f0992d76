"""How a batch is rebuilt with its tensors on a device: what keeps its type, and what is left alone."""

import collections
import dataclasses
import types
from typing import Any

import pytest
import torch

from rayloader.epoch.ahead import Delivery
from rayloader.gpu import device as devices
from rayloader.gpu.to_device import Moved, PinOrMove, rebuilt
from simulated_device import DEVICE, SimulatedAccelerator

Pair = collections.namedtuple("Pair", "first second")
ONE, TWO = torch.tensor(1), torch.tensor(2)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    cache: Any = dataclasses.field(init=False)  # has no value


class Output(dict):
    """As the outputs of Transformers' models: its items are attributes too, and it refuses `update`."""

    def __setitem__(self, key, item):
        super().__setitem__(key, item)
        vars(self)[key] = item

    def update(self, *_, **__):
        raise RuntimeError("set items one by one")


class Attributes(dict):
    """Its items are attributes too; any other is a KeyError."""

    __getattr__ = dict.__getitem__


class Twice(tuple):
    """Its constructor does not take its items."""

    def __new__(cls, item):
        return super().__new__(cls, (item, item))


class Lines(collections.abc.Sequence):
    """Is made of something else than its items."""

    def __init__(self, text):
        self.lines = text.splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


class Movable:
    def to(self, device):
        return f"on {device}"


def doubled(leaf):
    return leaf * 2 if isinstance(leaf, torch.Tensor) else leaf.to("there")


FORMS = [
    lambda item: item,
    lambda item: [item, [item, "text"]],
    lambda item: (item, 1.5),
    lambda item: Pair(item, None),
    lambda item: {"a": item, 3: None},
    lambda item: collections.OrderedDict(b=item, a=1),
    lambda item: collections.UserDict(a=item),
    lambda item: collections.Counter(a=item, b=3),
    lambda item: collections.deque([item, 1]),
    lambda item: torch.return_types.max((item, item)),
    Twice,
    lambda item: [Attributes(image=item)],
]


@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_changed_wherever_they_are_and_types_stay(form):
    found = rebuilt(form(ONE), doubled)
    assert found == form(TWO)
    assert type(found) is type(form(TWO))
    assert rebuilt([{"a": (Movable(),)}], doubled) == [{"a": ("on there",)}]


@pytest.mark.parametrize(
    "batch", ["text", bytearray(b"bytes"), None, range(3), Twice(1), Lines("a\nb"), {"a": [1]}, Movable]
)
def test_what_holds_nothing_that_moves_is_left_as_it_is(batch):
    assert rebuilt(batch, doubled) is batch
    assert rebuilt([batch, ONE], doubled)[0] is batch


def test_attributes_stay_and_items_and_fields_are_set_as_a_program_sets_them():
    for base in (list, tuple):
        kind = type("Titled", (base,), {})
        batch = kind([ONE])
        batch.title = "mine"
        found = rebuilt(batch, doubled)
        assert (found, found.title, batch) == (kind([TWO]), "mine", kind([ONE]))
    batch = Output()
    batch["image"] = ONE
    found = rebuilt(batch, doubled)
    assert found["image"] is vars(found)["image"]
    assert (found["image"], batch["image"]) == (TWO, ONE)
    assert vars(rebuilt(Frozen(ONE), doubled)) == {"image": TWO}
    proxy = rebuilt(types.MappingProxyType({"a": ONE}), doubled)
    assert (type(proxy), dict(proxy)) == (types.MappingProxyType, {"a": TWO})


class Wrapper(torch.Tensor):
    """Carries out operations by itself, and has no kernel that records a stream."""

    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    "make", [torch.Tensor.to_sparse, lambda ones: torch.quantize_per_tensor(ones, 0.5, 0, torch.quint8), Wrapper]
)
def test_a_tensor_that_cannot_be_recorded_is_moved_when_it_is_handed_over(make, monkeypatch):
    accelerator, leaf = SimulatedAccelerator(), make(torch.ones(2))
    moved = Moved([leaf], DEVICE, accelerator)
    assert accelerator.queued == 0
    monkeypatch.setattr(devices, "move", lambda leaf, device: (leaf, device))
    ((found, device),) = moved.handed_over()
    assert found is leaf
    assert device == DEVICE


class InPlace:
    """Moves itself, and does not say so."""

    device = None

    def to(self, device):
        self.device = device


def test_what_is_handed_over_twice_is_the_same():
    accelerator, itself = SimulatedAccelerator(), InPlace()
    moved = Moved({"tensor": torch.arange(3), "movable": Movable(), "itself": itself}, DEVICE, accelerator)
    assert accelerator.done == 0
    first, second = moved.handed_over(), moved.handed_over()
    assert (first["movable"], second["movable"]) == ("on cuda:0", "on cuda:0")
    assert first["tensor"].tolist() == [0, 1, 2]
    assert first["tensor"] is second["tensor"]
    assert first["itself"] is itself
    assert (itself.device, accelerator.queued) == (DEVICE, 1)
    prepares = [one.prepares for one in (Delivery(), PinOrMove(pin=lambda batch: batch), PinOrMove(device=DEVICE))]
    assert prepares == [False, True, True]
