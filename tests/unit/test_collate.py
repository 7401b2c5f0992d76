"""What workers stack is what torch's workers stack, wherever it lies."""

from __future__ import annotations

import re
import threading
import weakref
from collections import namedtuple
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.utils.data._utils.worker as torch_worker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import (
    collate,
    collate_float_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

from rayloader._compat import no_torch_function
from rayloader.host.collate import (
    adopt_collate_fn_map,
    are_torchs,
    collate_into,
    floats,
    is_torchs,
    stack,
    whole_numbers,
)
from rayloader.transport import codec
from rayloader.transport.arena import PAGE, Arena, ArenaWriter


@pytest.fixture
def writer(monkeypatch):
    """Where this thread stacks, as in a worker; a proxy, for pytest would hold it longer than the test does."""
    arena = Arena(16 * PAGE)
    monkeypatch.setattr(torch_worker, "_worker_info", torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=()))
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, stack)
    opened = ArenaWriter(arena.address)
    opened.begin()
    collate_into(opened)
    yield weakref.proxy(opened)
    collate_into(None)


def into(arena, collate_fn, samples):
    """As a worker that is about to collate these samples."""
    return collate_into(arena, alone=is_torchs(collate_fn) and are_torchs(samples))


def in_slot(writer, tensor):
    start = writer._mapping.start
    return start <= tensor.data_ptr() < start + writer._mapping.bytes.nbytes


def cl(*size):
    return torch.randn(*size).contiguous(memory_format=torch.channels_last)


def sliced(tensor):
    return torch.cat([tensor, tensor])[: len(tensor)]


KINDS = {
    **{str(d): (lambda d=d: torch.randint(0, 2, (3, 4)).to(d), True) for d in (torch.uint8, torch.bool, torch.int64)},
    **{str(d): (lambda d=d: torch.randn(3, 4).to(d), True) for d in (torch.float16, torch.bfloat16, torch.complex64)},
    "fp8": (lambda: torch.randn(3, 4).to(torch.float8_e4m3fn), True),
    "0-d": (lambda: torch.randn(()), True),
    "1-d": (lambda: torch.randn(7), True),
    "3-d": (lambda: torch.randn(3, 8, 9), True),
    "4-d": (lambda: torch.randn(2, 3, 4, 5), True),
    "5-d": (lambda: torch.randn(2, 3, 4, 5, 2), True),
    "6-d": (lambda: torch.randn(1, 2, 3, 1, 2, 2), True),
    "4-d of ones": (lambda: torch.randn(2, 1, 1, 5), True),
    "4-d one channel": (lambda: torch.randn(2, 1, 4, 5), True),
    "channels-last of one channel": (lambda: cl(2, 1, 4, 5), True),
    "channels-last of one pixel": (lambda: cl(2, 3, 1, 1), True),
    "not a number": (lambda: torch.full((3,), torch.nan), True),
    "image as HWC": (lambda: torch.randn(8, 9, 3).permute(2, 0, 1), True),
    "transposed": (lambda: torch.randn(3, 4).t(), True),
    "expanded": (lambda: torch.randn(1).expand(4), True),
    "sliced": (lambda: sliced(torch.randn(4, 5)), True),
    "strided": (lambda: torch.randn(8)[::2], True),
    "conj": (lambda: torch.randn(3, dtype=torch.complex64).conj(), False),
    "neg": (lambda: torch.randn(3, dtype=torch.complex64).conj().imag, False),
    "channels-last": (lambda: cl(2, 3, 8, 9), True),
    "channels-last of a column": (lambda: cl(2, 3, 4, 1), True),
    "channels-last 3-d": (lambda: torch.randn(2, 3, 2, 3, 4).to(memory_format=torch.channels_last_3d), True),
    "no elements": (lambda: torch.empty(0, 3), False),
    "parameter": (lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False), True),
    "grad": (lambda: torch.randn(3, requires_grad=True), False),
    "sparse": (lambda: torch.randn(3, 3).to_sparse(), False),
    "meta": (lambda: torch.empty(3, device="meta"), False),
    "mkldnn": (lambda: torch.randn(3, 3).to_mkldnn(), False),
}


def bits(tensor):
    if tensor.is_meta:
        return b""
    return codec.encode(tensor.detach().resolve_conj().resolve_neg().clone().contiguous()).buffers


def outcome(function, *args, **kwargs):
    """What a call gives, or raises, as something to compare."""
    try:
        tensor = function(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    properties = type(tensor), tensor.dtype, tensor.shape, tensor.layout, tensor.device, tensor.requires_grad
    content = [bytes(b) for b in bits(tensor)]
    return (*properties, tensor.stride(), tensor.is_conj(), tensor.is_neg(), content)


def stacks_like_torch(writer, elements):
    """Compares with torch's workers; returns whether the result lies in the arena."""
    assert outcome(collate_tensor_fn, elements) == outcome(stack, elements)
    try:
        tensor = stack(elements)
    except Exception:
        return False
    return tensor.layout is torch.strided and not tensor.is_meta and in_slot(writer, tensor)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*deprecated.*:UserWarning")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_stacking_is_torchs_bit_for_bit(kind, count, writer):
    make, placed = KINDS[kind]
    assert stacks_like_torch(writer, [make() for _ in range(count)]) == placed


def nested():
    return torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])


def quantized():
    return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


PLAIN = torch.arange(6.0)
MIXED = {
    "shapes": lambda: [PLAIN, PLAIN[:5]],
    "shapes of one size": lambda: [PLAIN.view(2, 3), PLAIN.view(3, 2)],
    "dims": lambda: [PLAIN, PLAIN[:1], torch.tensor(1.0)],
    "dtypes": lambda: [PLAIN, PLAIN.double()],
    "dtypes, wide one first": lambda: [PLAIN.double(), PLAIN],
    "devices": lambda: [PLAIN, PLAIN.to("meta")],
    "devices, meta first": lambda: [PLAIN.to("meta"), PLAIN],
    "layouts": lambda: [PLAIN.view(2, 3), PLAIN.view(2, 3).to_sparse()],
    "grad in the last": lambda: [PLAIN, PLAIN.clone().requires_grad_()],
    "parameter in the last": lambda: [PLAIN, torch.nn.Parameter(PLAIN.clone())],
    "subclass": lambda: [PLAIN, PLAIN.as_subclass(type("Marked", (torch.Tensor,), {}))],
    "memory formats": lambda: [cl(2, 3, 4, 5), torch.randn(2, 3, 4, 5)],
    "nested": lambda: [nested(), nested()],
    "nested in the last": lambda: [PLAIN, nested()],
    "quantized": lambda: [quantized(), quantized()],
    "an array": lambda: [PLAIN, PLAIN.numpy()],
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*deprecated.*:UserWarning")
@pytest.mark.parametrize("make", MIXED.values(), ids=MIXED)
def test_what_is_not_alike_is_stacked_or_refused_as_torch_does(make, writer):
    stacks_like_torch(writer, make())


def test_grad_under_no_grad_stacks_as_torch_does(writer):
    with torch.no_grad():
        stacks_like_torch(writer, [torch.randn(3, requires_grad=True) for _ in range(2)])


def test_inference_tensors_stack_as_torch_does(writer):
    with torch.inference_mode():
        elements = [torch.randn(3) for _ in range(2)]
    stacks_like_torch(writer, elements)


def test_another_default_device_changes_nothing(writer):
    elements = [torch.randn(3) for _ in range(2)]
    with torch.device("meta"):
        assert stacks_like_torch(writer, elements)


def test_without_room_and_for_small_ones_it_is_the_workers_own_memory(writer):
    elements = [torch.zeros(PAGE) for _ in range(5)]  # 20 pages
    assert not stacks_like_torch(writer, elements)
    assert stacks_like_torch(writer, elements[:1])
    writer.small = 4 * PAGE
    assert not stacks_like_torch(writer, elements[:1])


def test_other_threads_stack_in_memory_of_their_own(writer):
    found = []
    thread = threading.Thread(target=lambda: found.append(default_collate([PLAIN])))
    thread.start()
    thread.join()
    assert not in_slot(writer, found[0])
    assert in_slot(writer, default_collate([PLAIN]))


Pair = namedtuple("Pair", "left right")


def test_structures_and_arrays_are_collated_into_slots_and_not_copied_again(writer):
    def sample(i):
        return {
            "pair": Pair(torch.full((3,), i), np.full((2, 2), i, np.int16)),
            "scalars": (i, float(i), np.float32(i), f"{i}"),
            "list": [torch.tensor(i)],
        }

    samples = [sample(i) for i in range(5)]
    got, want = (
        default_collate(samples),
        collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: simply}),
    )
    assert type(got["pair"]) is Pair
    assert got["scalars"][3] == want["scalars"][3]
    tensors = [*got["pair"], *got["scalars"][:3], *got["list"]]
    wanted = [*want["pair"], *want["scalars"][:3], *want["list"]]
    assert all(outcome(lambda g=g: g) == outcome(lambda w=w: w) for g, w in zip(tensors, wanted, strict=True))
    for tensor in (*got["pair"], *got["list"]):
        slots = len(writer._slots)
        assert writer.put(codec.encode(tensor).buffers[0]) is not None
        assert len(writer._slots) == slots


def simply(batch, *, collate_fn_map=None):
    return torch.stack(batch)


# ---- the map


@pytest.fixture
def restored_map():
    before = dict(default_collate_fn_map)
    yield
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


class Imported:
    """Its module has added an entry when the worker imported it."""


@pytest.mark.usefixtures("restored_map")
def test_the_collate_map_is_the_drivers_in_the_drivers_order():
    drivers = {Imported: collate_float_fn, **default_collate_fn_map, Fraction: collate_tensor_fn, str: simply}
    del drivers[bytes]
    default_collate_fn_map[complex] = default_collate_fn_map[Imported] = simply
    adopt_collate_fn_map(drivers)
    ours = {torch.Tensor: stack, Fraction: stack, int: whole_numbers, float: floats, Imported: floats}
    expected = {**drivers, **ours, complex: simply}
    assert list(default_collate_fn_map.items()) == list(expected.items())


# ---- fresh tensors: those that nobody but torch's collate and ours has had


@pytest.fixture
def _workers_map(restored_map):
    adopt_collate_fn_map(dict(default_collate_fn_map))
    yield
    collate_into(None)


SAMPLES = {
    "image and label": [(torch.randint(0, 256, (1, 5, 6), dtype=torch.uint8), label) for label in range(4)],
    "dict of numbers": [{"x": torch.randn(3), "y": 0.1 * n, "n": -n} for n in range(3)],
    "one row": [(torch.randn(2, 3), 5)],
    "large whole numbers": [(torch.zeros(2), 2**62 + n) for n in range(2)],
    "floats that are no numbers": [(torch.zeros(2), n) for n in (float("nan"), float("inf"), -0.0, 5e-324)],
    "bools": [(torch.zeros(2), bool(n)) for n in range(2)],
    "ints and bools": [(torch.zeros(2), n) for n in (5, True)],
    "ints and floats": [(torch.zeros(2), n) for n in (5, 2.5)],
    "floats and ints": [(torch.zeros(2), n) for n in (2.5, 5)],
    "an int beyond floats": [(torch.zeros(2), n) for n in (2.5, 2**64)],
    "NumPy's numbers": [(torch.zeros(2), n) for n in (np.int32(5), np.int32(6))],
    "half": [(torch.randn(3).half(), n) for n in range(2)],
    "bfloat16": [(torch.randn(3).bfloat16(), n) for n in range(2)],
    "transposed": [(torch.randn(3, 4).t(), n) for n in range(2)],
    "more than a slot of small ones": [(torch.randn(40, 41), n) for n in range(20)],
}


@pytest.mark.usefixtures("_workers_map")
@pytest.mark.parametrize("name", SAMPLES)
def test_fresh_tensors_are_sent_as_those_that_are_looked_at(name):
    arena = Arena(64 * PAGE)
    opened = ArenaWriter(arena.address)
    opened.small = 4096
    opened.begin()
    reference = default_collate(SAMPLES[name])
    fresh = into(opened, default_collate, SAMPLES[name])
    batch = default_collate(SAMPLES[name])
    encoded, looked_at = codec.encode(batch, fresh=fresh), codec.encode(batch)
    assert encoded.skeleton == looked_at.skeleton
    assert [bytes(buffer) for buffer in encoded.buffers] == [bytes(buffer) for buffer in looked_at.buffers]
    assert codec.encode(reference).skeleton == encoded.skeleton
    assert list(map(bytes, codec.encode(reference).buffers)) == list(map(bytes, encoded.buffers))


@pytest.mark.usefixtures("_workers_map")
def test_images_and_labels_are_fresh():
    fresh = into(None, default_collate, SAMPLES["image and label"])
    images, labels = default_collate(SAMPLES["image and label"])
    assert [made.tensor for made in fresh.values()] == [images, labels]
    assert [made.memory.nbytes for made in fresh.values()] == [images.nbytes, labels.nbytes]


@pytest.mark.usefixtures("_workers_map")
def test_an_int_that_is_too_large_raises_torchs_error():
    samples = [(torch.zeros(2), 2**63)]
    errors = []
    for collate_fn in (None, default_collate):
        into(None, collate_fn, samples)
        with pytest.raises((RuntimeError, ValueError)) as caught:  # ValueError from torch 2.13 on
            default_collate(samples)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.usefixtures("_workers_map")
def test_numbers_go_to_the_default_device():
    with torch.device("meta"):
        fresh = into(None, default_collate, [1, 2])
        assert default_collate([1, 2]).is_meta
    assert not fresh


class OneMore(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made + 1 if "lift_fresh" in str(func) else made


@pytest.mark.usefixtures("_workers_map")
def test_a_mode_sees_the_numbers_that_become_a_tensor():
    with OneMore():
        into(None, default_collate, [1, 2])
        assert default_collate([1, 2]).tolist() == [2, 3]


@pytest.mark.usefixtures("_workers_map")
def test_a_patch_of_torch_makes_the_numbers(monkeypatch):
    monkeypatch.setattr(torch, "tensor", lambda *args, **named: torch.as_tensor(*args, **named) + 5)
    into(None, default_collate, [1, 2])
    assert default_collate([1, 2]).tolist() == [6, 7]


class Arrayed(list):
    """NumPy takes it for something else than torch does."""

    def __array__(self, dtype=None, copy=None):
        return np.array([7, 8, 9], dtype)


def own(batch, *, collate_fn_map=None):
    return batch[0].resize_(1)  # of a tensor that default_collate has made


class Lazy(Mapping):
    """A sample whose parts are made while it is collated, by code of the user's."""

    def __init__(self, value):
        self.value = value

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2

    def __copy__(self):
        return {}

    def __getitem__(self, key):
        return default_collate([self.value, self.value]).resize_(4).fill_(self.value)


class Twin(torch.Tensor):
    """Stacks into something else than it was told."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        return super().__torch_function__(func, types, args, kwargs).as_subclass(torch.Tensor)


class Grads(torch.Tensor):
    """Changes what it is stacked into."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with no_torch_function():
            out = func(*args, **(kwargs or {}))
        return out.requires_grad_() if func is torch.stack else out


USERS = {
    "a mapping": [Lazy(1), Lazy(2)],
    "a mapping in a tuple": [(Lazy(1), 5), (Lazy(2), 6)],
    "a mapping behind a dict": [{"a": 1, "b": 2}, Lazy(3)],
    "a sequence of its own": Arrayed([1, 2, 3]),
    "a tensor's class": [torch.zeros(3), torch.ones(3).as_subclass(Twin)],
    "a tensor's class that asks for gradients": [torch.zeros(3), torch.ones(3).as_subclass(Grads)],
    "no list": (1, 2, 3),
    "bytes": b"123",
}


@pytest.mark.usefixtures("_workers_map")
@pytest.mark.parametrize("name", USERS)
def test_what_the_users_code_may_have_had_is_not_fresh(name):
    """With samples that run the user's code, all is as with a `collate_fn` of the user's."""
    found = []
    for collate_fn in (None, default_collate):
        fresh = into(None, collate_fn, USERS[name])
        try:
            found.append(repr(default_collate(USERS[name])))
        except Exception as error:
            found.append(repr(error))
        tensors = [made.tensor for made in fresh.values()]
        assert not [tensor for tensor in tensors if tensor.requires_grad or tensor.numel() == 4]
    assert re.sub(r"0x\w+", "", found[0]) == re.sub(r"0x\w+", "", found[1])


@pytest.mark.usefixtures("_workers_map")
@pytest.mark.parametrize("change", ["own collate_fn", "own function in the map"])
def test_what_functions_of_the_users_make_is_not_fresh(change):
    if change == "own function in the map":
        default_collate_fn_map[Fraction] = own
    fresh = into(None, default_collate if change == "own function in the map" else own, [1, 2, 3])
    labels = default_collate([1, 2, 3])
    assert not fresh
    assert labels.resize_(4).tolist()[:3] == [1, 2, 3]  # as torch's, which has a storage of its own


def test_a_signal_handlers_exception_while_a_batch_is_stacked_is_raised(monkeypatch):
    torchs = torch.stack

    def interrupted(*args, **named):
        monkeypatch.setattr(torch, "stack", torchs)  # it is interrupted once
        raise RuntimeError("of a handler")

    monkeypatch.setattr(torch, "stack", interrupted)  # a frame below, as a handler's is
    with pytest.raises(RuntimeError, match="of a handler"):
        stack([torch.zeros(3), torch.ones(3)])
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        stack([torch.zeros(3), torch.zeros(2)])


@pytest.mark.parametrize("dimensions", [32, 33, 64])
def test_tensors_of_many_dimensions_arrive(dimensions):
    tensor = torch.arange(2).reshape([1] * (dimensions - 1) + [2])
    encoded = codec.encode(tensor)
    decoded = codec.decode(encoded.skeleton, [bytearray(buffer) for buffer in encoded.buffers])
    assert torch.equal(decoded, tensor)
    assert decoded.stride() == tensor.stride()
