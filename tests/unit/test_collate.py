"""What workers stack is what torch's workers stack, wherever it lies."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import namedtuple
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.utils.data._utils.worker as torch_worker
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import collate, collate_float_fn, collate_tensor_fn, default_collate_fn_map

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

TORCHS = dict(default_collate_fn_map)
Pair = namedtuple("Pair", "left right")


@pytest.fixture(scope="module")
def opened():
    """Where this thread stacks, as in a worker, whatever its size."""
    arena = Arena(64 * PAGE)
    with pytest.MonkeyPatch.context() as patch:
        info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=())
        patch.setattr(torch_worker, "_worker_info", info)
        yield ArenaWriter(arena.address)
        collate_into(None)


def start(writer, small=0):
    """A batch of its own begins, with torch's map; what is not larger than `small` bytes is not put into the arena."""
    default_collate_fn_map.clear()
    default_collate_fn_map.update(TORCHS)
    adopt_collate_fn_map(TORCHS)
    writer.small = small
    writer.begin()
    collate_into(writer)


@pytest.fixture
def writer(opened):
    start(opened)
    yield opened
    collate_into(None)
    default_collate_fn_map.clear()
    default_collate_fn_map.update(TORCHS)


def begin(arena, collate_fn, samples):
    """As a worker that is about to collate these samples; gives the collection of fresh tensors."""
    return collate_into(arena, alone=is_torchs(collate_fn) and are_torchs(samples))


def in_slot(writer, tensor):
    start = writer._mapping.start
    return start <= tensor.data_ptr() < start + writer._mapping.bytes.nbytes


def described(value):
    """All that a program can see of a batch."""
    if isinstance(value, Mapping):
        return type(value), {key: described(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [described(part) for part in value]
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    plain = value.detach().resolve_conj().resolve_neg().clone()
    bits = [] if value.is_meta else [bytes(one) for one in codec.encode(plain.contiguous()).buffers]
    flags = value.requires_grad, value.is_conj(), value.is_neg(), value.stride()
    return type(value), value.dtype, value.shape, value.layout, value.device, *flags, bits


def outcome(function, *args, **options):
    """What a call gives, or raises, as something to compare."""
    try:
        return described(function(*args, **options))
    except Exception as error:
        return type(error), re.sub(r"0x\w+", "", str(error))


# ---- what users have


class Arrayed(list):
    """NumPy takes it for something else than torch does."""

    def __array__(self, dtype=None, copy=None):
        return np.array([7, 8, 9], dtype)


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


class Marked(torch.Tensor):
    """Stacks as others do."""


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


# ---- samples and batches


def channels_last(*size):
    return torch.randn(*size).contiguous(memory_format=torch.channels_last)


PLAIN = [
    *(lambda d=d: torch.randint(0, 2, (3, 4)).to(d) for d in (torch.uint8, torch.bool, torch.int64, torch.float64)),
    *(lambda d=d: torch.randn(3, 4).to(d) for d in (torch.float32, torch.float16, torch.bfloat16, torch.complex64)),
    lambda: torch.randn(3, 4).to(torch.float8_e4m3fn),
    *(lambda size=size: torch.randn(size) for size in ((), (7,), (2, 3, 4, 5), (2, 1, 4, 5), (1, 2, 3, 1, 2, 2))),
    *(lambda size=size: channels_last(*size) for size in ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 4, 1))),
    lambda: torch.randn(2, 3, 2, 3, 4).to(memory_format=torch.channels_last_3d),
    lambda: torch.randn(8, 9, 3).permute(2, 0, 1),
    lambda: torch.randn(1).expand(4),
    lambda: torch.randn(8)[::2],
    lambda: torch.full((3,), torch.nan),
    lambda: torch.zeros([1] * 32 + [2]),
    lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
]
ODD = [
    lambda: torch.randn(3, dtype=torch.complex64).conj(),
    lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    lambda: torch.empty(0, 3),
    lambda: torch.randn(3, requires_grad=True),
    lambda: torch.nn.Parameter(torch.randn(3)),
    *(lambda kind=kind: torch.randn(3).as_subclass(kind) for kind in (Marked, Twin, Grads)),
    lambda: torch.randn(3, 3).to_sparse(),
    lambda: torch.empty(3, device="meta"),
    lambda: torch.randn(3, 3).to_mkldnn(),
    lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]),
    lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8),
]
NUMBERS = [5, -7, True, 2.5, float("nan"), -0.0, 5e-324, 2**62, 2**63, 2**64, np.int32(5), np.float32(2.5)]
OTHERS = ["a", b"b", None, np.zeros((2, 2), np.int16), np.array(["x"]), Fraction(1, 2), Lazy(1), Lazy(2)]
leaves = st.sampled_from([*PLAIN, *ODD, *(lambda value=value: value for value in [*NUMBERS, *OTHERS])])


def made(shape):
    """A sample of this shape, with new random tensors."""
    if callable(shape):
        return shape()
    if isinstance(shape, dict):
        return {key: made(part) for key, part in shape.items()}
    parts = [made(part) for part in shape]
    return Pair(*parts) if type(shape) is Pair else type(shape)(parts)


shapes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from("ab"), inner, min_size=1),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=4,
)


@st.composite
def batches(draw):
    """Samples of one shape, of which one may have another; or numbers of any kinds, and no list perhaps."""
    if draw(st.integers(0, 4)) == 0:
        kind = draw(st.sampled_from([list, list, tuple, Arrayed]))
        return kind(draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=3)))
    shape, count = draw(shapes), draw(st.integers(1, 3))
    samples = [made(shape) for _ in range(count)]
    if draw(st.integers(0, 3)) == 0:
        samples[draw(st.integers(0, count - 1))] = made(draw(shapes))
    return samples


class OneMore(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made + 1 if "lift_fresh" in str(func) else made


@contextlib.contextmanager
def a_patch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda *args, **named: torch.as_tensor(*args, **named) + 5)
        yield


CHANGING = [lambda: torch.device("meta"), OneMore, a_patch]  # torch's tensors of numbers


@pytest.mark.parametrize("surrounding", [torch.inference_mode, torch.no_grad, *CHANGING])
@pytest.mark.parametrize(
    "make", [lambda number: number, lambda number: torch.full((3,), float(number)).requires_grad_()]
)
def test_whatever_torch_is_told_to_do_with_tensors_they_stack_as_torchs_do(make, surrounding, writer):
    samples = [make(1), make(2)]
    with surrounding():
        fresh = begin(writer, default_collate, samples)
        found = outcome(default_collate, samples)
        assert found == outcome(collate, samples, collate_fn_map=TORCHS)
    if surrounding in CHANGING:
        assert not fresh


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested and quantized tensors
@given(samples=batches(), small=st.sampled_from([0, 100, 4096]))
def test_batches_are_torchs_bit_for_bit_and_errors_too(opened, samples, small):
    start(opened, small)
    expected = outcome(collate, samples, collate_fn_map=TORCHS)
    assert outcome(default_collate, samples) == expected
    fresh = begin(opened, default_collate, samples)
    assert outcome(default_collate, samples) == expected
    fresh.clear()
    try:
        batch = default_collate(samples)
    except Exception:  # of samples that torch refuses
        return
    encoded, looked_at = codec.encode(batch, fresh=fresh), codec.encode(batch)
    assert encoded.skeleton == looked_at.skeleton
    assert [*map(bytes, encoded.buffers)] == [*map(bytes, looked_at.buffers)]


SAME = torch.arange(6.0)


# ---- where they lie


@pytest.mark.parametrize("make", [*PLAIN, lambda: np.zeros((2, 2), np.int16)])
def test_large_tensors_lie_in_slots_and_are_not_copied_again(make, writer):
    tensor = default_collate([{"a": make()} for _ in range(2)])["a"]
    assert in_slot(writer, tensor)
    slots = len(writer._slots)
    assert writer.put(codec.encode(tensor).buffers[0]) is not None
    assert len(writer._slots) == slots


def test_without_room_for_small_ones_and_in_other_threads_it_is_the_workers_own_memory(writer):
    found = [stack([torch.zeros(16 * PAGE)])]
    thread = threading.Thread(target=lambda: found.append(default_collate([SAME])))
    thread.start()
    thread.join()
    assert in_slot(writer, default_collate([SAME]))
    writer.small = SAME.nbytes
    assert in_slot(writer, default_collate([SAME, SAME]))
    found.append(default_collate([SAME]))
    assert [in_slot(writer, tensor) for tensor in found] == [False] * 3


# ---- the map


class Imported:
    """Its module has added an entry when the worker imported it."""


def simply(batch, *, collate_fn_map=None):
    return torch.stack(batch)


def test_the_collate_map_is_the_drivers_in_the_drivers_order(writer):
    drivers = {Imported: collate_float_fn, **TORCHS, Fraction: collate_tensor_fn, str: simply}
    del drivers[bytes]
    default_collate_fn_map[complex] = default_collate_fn_map[Imported] = simply
    adopt_collate_fn_map(drivers)
    ours = {torch.Tensor: stack, Fraction: stack, int: whole_numbers, float: floats, Imported: floats}
    assert list(default_collate_fn_map.items()) == list({**drivers, **ours, complex: simply}.items())


# ---- fresh tensors: those that nobody but torch's collate and ours has had


@pytest.mark.parametrize("make", [tuple, list, lambda sample: {"image": sample[0], "label": sample[1]}])
def test_images_and_labels_are_fresh(make, writer):
    for into, numbers in ((writer, [0, 1]), (None, [0.5, 1.0])):
        samples = [make((torch.randint(0, 256, (1, 5, 6), dtype=torch.uint8), number)) for number in numbers]
        fresh = begin(into, default_collate, samples)
        batch = default_collate(samples)
        tensors = list(batch.values()) if isinstance(batch, dict) else batch
        assert list(map(id, tensors)) == [id(made.tensor) for made in fresh.values()]
        assert [made.memory.nbytes for made in fresh.values()] == [tensor.nbytes for tensor in tensors]


def own(batch, *, collate_fn_map=None):
    return batch[0].resize_(1)  # of a tensor that default_collate has made


@pytest.mark.parametrize("collate_fn", [own, default_collate], ids=["own collate_fn", "own function in the map"])
def test_what_functions_of_the_users_make_is_not_fresh(collate_fn, writer):
    if collate_fn is default_collate:
        default_collate_fn_map[Fraction] = own
    fresh = begin(None, collate_fn, [1, 2, 3])
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


def test_tensors_of_many_dimensions_arrive():
    tensor = torch.arange(2).reshape([1] * 63 + [2])
    encoded = codec.encode(tensor)
    decoded = codec.decode(encoded.skeleton, [bytearray(buffer) for buffer in encoded.buffers])
    assert described(decoded) == described(tensor)
