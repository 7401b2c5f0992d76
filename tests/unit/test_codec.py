"""The codec: what goes in comes out, through real copies of the buffers, writable and without waste."""

import collections
import dataclasses
import functools
import gc
import multiprocessing
import pickle
import sys
import threading
import types
import warnings
import weakref
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloader.transport import pickler, raw
from rayloader.transport.codec import decode, encode
from rayloader.transport.memory_file import address_of_buffer
from rayloader.transport.raw import copied
from rayloader.transport.replica import encode_for_worker

STRIDED = list(raw.NAMES)
ALIGNED = 64  # bytes; where the buffer of a part of a storage begins
ENCODERS = pytest.mark.parametrize("encode", [encode, encode_for_worker])


def through_copies(skeleton, buffers, carried=()):
    """As a reader of read-only memory decodes it."""
    return decode(skeleton, [copied(bytes(b)) for b in buffers], carried)


def decoded(encoded):
    assert all(b.format == "B" and b.ndim == 1 and b.c_contiguous for b in encoded.buffers)
    return through_copies(*encoded[:3])


def through(obj, encode=encode, **options):
    return decoded(encode(obj, **options))


# ---- any structure


@dataclasses.dataclass
class Sample:
    image: object
    label: int


def filled(dtype, size, stride=None, offset=0):
    """A tensor of random bytes; bool gets zeros and ones. Without a stride it is dense."""
    if stride is None:
        stride = [int(np.prod(size[i + 1 :])) for i in range(len(size))]
    count = max(1, offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1) * dtype.itemsize
    memory = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), offset, size, stride)


@st.composite
def tensors(draw):
    size = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(STRIDED))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(size), max_size=len(size)))
    tensor = filled(dtype, size, stride, draw(st.integers(0, 200)))
    grows = (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1 and draw(st.booleans())
    return tensor.requires_grad_() if grows else tensor


@st.composite
def views(draw):
    """Views of one storage, by different types, of which one may be the other."""
    base = filled(torch.uint8, (256,))
    start = draw(st.integers(0, 15)) * 16
    other = draw(st.sampled_from([torch.int64, torch.float16, torch.bool]))
    return draw(st.permutations([base, base, base[3:20], base[start:].view(other), 3]))[:3]


@st.composite
def arrays(draw):
    """Views with the axes in any order, and with reversed, left out, repeated, empty and new axes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(["f4", ">i2", "i1, f8", "U2", ">U1", "S3", "V3", "M8[s]", ">M8[D]", "?", "c16", "O"]))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("S3" if dtype == "V3" else dtype).astype(dtype)
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    steps = [slice(None), slice(None, None, -1), slice(1, None), slice(None, None, 2), slice(None, 1)]
    array = array[(*(draw(st.sampled_from(steps)) for _ in shape), ...)]
    repeated = tuple(draw(st.sampled_from([1, count])) if count else 0 for count in array.shape)
    array = np.broadcast_to(array[(*map(slice, repeated), ...)], array.shape)
    array = array.copy("K") if draw(st.booleans()) else array.view()
    return array[..., None] if draw(st.booleans()) else array


VALUES = st.sampled_from([None, True, -1, 2**100, 1.5, b"bytes", "seven", "\ud800", np.float32(3)])
DENSE = st.builds(filled, st.sampled_from(STRIDED), st.lists(st.integers(1, 4), max_size=4))
BATCHES = st.lists(DENSE | VALUES, max_size=4)  # most are such a list, tuple or dict, and have a skeleton of their own
PAYLOADS = BATCHES | BATCHES.map(tuple) | BATCHES.map(lambda parts: dict(zip("abcd", parts, strict=False)))
PAYLOADS |= st.recursive(
    st.one_of(DENSE, tensors(), views(), arrays(), VALUES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
        | st.builds(Sample, inner, st.integers())
        | inner.map(lambda one: [one, one])
    ),
    max_leaves=10,
)


def apart(obj, leaves):
    """The structure of an object, whose tensors, arrays and values go to the list `leaves`."""
    if isinstance(obj, Sample):
        return Sample, apart(vars(obj), leaves)
    if isinstance(obj, dict):
        return dict, [(key, apart(part, leaves)) for key, part in obj.items()]
    if isinstance(obj, (list, tuple)):
        return type(obj), [apart(part, leaves) for part in obj]
    leaves.append(obj)
    return type(obj)


def leaves_of(obj):
    apart(obj, leaves := [])
    return leaves


def content(tensor):
    """The bytes of each element, for any dtype."""
    item = tensor.dtype.itemsize
    memory = torch.empty(0, dtype=torch.uint8)
    offset, stride = tensor.storage_offset() * item, [s * item for s in tensor.stride()]
    return memory.set_(tensor.untyped_storage(), offset, (*tensor.shape, item), (*stride, 1)).numpy().tobytes()


def told(leaf):
    """Whatever a program may see of it."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype, leaf.shape, leaf.stride(), leaf.requires_grad, leaf.is_leaf, content(leaf)
    if isinstance(leaf, np.ndarray):
        return leaf.dtype, leaf.shape, leaf.size and leaf.strides, leaf.flags.writeable, leaf.tolist()
    return leaf


def check(got, payload, change):
    """All is as it was, arrays as `change` makes them, and shares what it shared."""
    apart(got, arrived := [])
    apart(payload, sent := [])
    assert apart(got, []) == apart(payload, [])
    for one, other in zip(arrived, sent, strict=True):
        assert told(one) == told(change(other) if isinstance(other, np.ndarray) else other)
    assert sharing(arrived) == sharing(sent)
    assert not any(isinstance(leaf, torch.Tensor) and leaf._is_view() for leaf in arrived)


def sharing(leaves):
    """Of all pairs of tensors, and of arrays, whether they are the same, and whether over the same memory."""
    found = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, np.ndarray))]
    memory = [one.untyped_storage()._cdata if isinstance(one, torch.Tensor) and one.numel() else 0 for one in found]
    return [[(a is b, m == n) for b, n in zip(found, memory, strict=True)] for a, m in zip(found, memory, strict=True)]


def between_torchs_processes(obj, protocol=None):
    return pickle.loads(ForkingPickler.dumps(obj, protocol))


def without_gaps(array):
    """An array of a dataset in a worker."""
    if array.dtype.hasobject:
        return between_torchs_processes(array)
    low, end = np.lib.array_utils.byte_bounds(array)
    if not array.flags.c_contiguous and end - low <= array.nbytes:
        return array
    copy = array.copy("C")
    copy.flags.writeable = array.flags.writeable
    return copy


def spans(obj):
    """Address and size of what the tensors use of each storage."""
    used = collections.defaultdict(list)
    for tensor in leaves_of(obj):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            first, item = tensor.storage_offset(), tensor.dtype.itemsize
            used[tensor.untyped_storage().data_ptr()].append((first * item, (first + last + 1) * item))
    starts = {base: min(start for start, _ in parts) // ALIGNED * ALIGNED for base, parts in used.items()}
    return {(base + starts[base], max(end for _, end in parts) - starts[base]) for base, parts in used.items()}


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32):UserWarning")
@pytest.mark.parametrize("protocol", [4, 5])  # of torch's batches, which differs by the version of Python
@settings(max_examples=120)
@given(payload=PAYLOADS)
def test_a_batch_comes_out_as_between_torchs_processes(protocol, payload):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickler, "_TORCHS_PROTOCOL", protocol)
        encoded = encode(payload)
    check(decoded(encoded), payload, lambda array: between_torchs_processes(array, protocol))
    buffers = {(address_of_buffer(buffer), buffer.nbytes) for buffer in encoded.buffers}
    assert spans(payload) <= buffers, "other memory than just that which the tensors use"
    assert len(encoded.buffers) - len(spans(payload)) <= len({*map(id, leaves_of(payload))})


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32):UserWarning")
@settings(max_examples=120)
@given(payload=PAYLOADS)
def test_a_dataset_comes_out_as_it_was_but_for_gaps_in_arrays(payload):
    check(through(payload, encode_for_worker), payload, without_gaps)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32):UserWarning")
def test_dtypes_are_all_of_torch():
    dense, others = [filled(d, (2, 3)) for d in STRIDED], [filled(d, (3, 5), (0, 2), 13) for d in STRIDED]
    for tensors in (dense, others):
        check(through(tensors), tensors, None)
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.complex32, torch.uint16, torch.bool} < set(STRIDED)
    assert not any(name.startswith("q") for name in raw.NAMES.values())


# ---- memory


SHARING = {
    "conjugate": lambda x: x.conj(),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "typed storage": torch.Tensor.storage,
    "storage": torch.Tensor.untyped_storage,
}


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
@pytest.mark.parametrize("kind", SHARING)
@ENCODERS
def test_what_shared_memory_shares_it_again_apart_from_its_source(kind, encode):
    source = torch.ones(50, dtype=torch.uint8 if kind == "storage" else torch.complex64)
    encoded = encode([source[:40], SHARING[kind](source)])
    assert [b.nbytes for b in encoded.buffers] == [source.nbytes]
    one, other = decoded(encoded)
    one[0] = 7
    assert type(other) is type(SHARING[kind](source))
    assert (complex(other[0]), complex(source[0])) == (7, 1)


def test_only_tensors_without_items_can_grow_in_a_worker_and_the_source_can_as_before():
    source = [torch.empty(0), torch.ones(1)]
    empty, one = through(source, encode_for_worker)
    assert torch.stack([torch.ones(3)] * 2, out=empty).sum() == 6
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        one.resize_(2)
    through(source)
    assert source[1].resize_(5).shape == (5,)


@pytest.mark.parametrize(
    "make",
    [lambda: [torch.arange(100.0), np.arange(100.0)], lambda: torch.arange(100.0), lambda: torch.ones(9).cfloat()],
)
def test_what_is_encoded_keeps_its_source_and_what_is_decoded_its_buffers_even_read_only_ones(make):
    obj = make()
    source = weakref.ref(leaves_of(obj)[0].untyped_storage())
    encoded = encode(obj)
    del obj
    gc.collect()
    assert source() is not None
    memory = [np.frombuffer(bytes(b), np.int32) for b in encoded.buffers]
    alive = [weakref.ref(m) for m in memory]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = decode(encoded.skeleton, memory)
    del memory, encoded
    gc.collect()
    assert source() is None
    assert str(got) == str(make())
    parts = [part[:2] for part in leaves_of(got)]
    assert not any(part.flags.writeable for part in parts[1:])
    del got
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del parts
    gc.collect()
    assert all(ref() is None for ref in alive)


# ---- tensors of users


class Labelled(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Labelled.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@ENCODERS
def test_the_overrides_of_subclasses_do_not_run_and_cycles_come_back_as_such(encode):
    tensor = torch.arange(10_000.0)[10:14].as_subclass(Labelled).requires_grad_()
    batch = {"image": tensor}
    batch["self"] = tensor.owner = [batch]
    before = Labelled.calls
    batch = through(batch, encode)
    assert Labelled.calls == before
    assert batch["self"][0] is batch
    got = batch["image"]
    assert (type(got), got.tolist(), got.owner is batch["self"]) == (Labelled, [10, 11, 12, 13], True)
    assert (got.requires_grad, got.is_leaf) == (True, True)


def test_a_tensor_of_a_graph_is_refused_in_torchs_words():
    grown = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError) as torchs:
        ForkingPickler.dumps(grown)
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf") as ours:
        encode([grown])
    assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_the_readers_modes_do_not_matter(mode):
    with mode():
        whole, part = through(torch.ones(2, device="cpu")), through([torch.ones(2, device="cpu")[1:]])
        assert (whole.tolist(), part[0].tolist()) == ([1, 1], [1])


def test_sparse_tensors_are_not_kept():
    utils = torch._utils  # torch 2.15 keeps a list for each thread
    listed = getattr(utils, "_get_sparse_tensors_to_validate", lambda: utils._sparse_tensors_to_validate)
    before = len(listed())
    through(torch.eye(3).to_sparse())
    assert len(listed()) == before


# ---- errors


def test_excessive_depth_is_a_pickling_error():
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
    with pytest.raises(pickle.PicklingError, match="excessively deep recursion"):
        encode(deep)
    while deep:
        deep = deep.pop()


# ---- classes and functions


def answer(skeleton, buffers):
    """In another process: the batch of a dataset."""
    encoded = encode(decode(skeleton, buffers).batch(), known_classes=True)
    return encoded.skeleton, [bytes(b) for b in encoded.buffers]


@pytest.fixture
def ask():
    """Asks a process that has none of the classes which a test defines."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as worker:
        worker.submit(int).result()

        def ask(dataset):
            encoded = encode_for_worker(dataset)
            return worker.submit(answer, encoded.skeleton, [bytearray(b) for b in encoded.buffers]).result()

        yield ask


@pytest.mark.parametrize("main", ["__main__", "__mp_main__"])
def test_classes_of_a_program_come_back_as_its_own(main, ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "__mp_main__", types.ModuleType("__mp_main__"))

    class Batch:
        def __init__(self, t):
            self.t = t

        def double(self):
            return self.t * 2

    class Slotted:
        __slots__ = ("__private", "missing")

        def __init__(self, a):
            self.__private = a

        def private(self):
            return self.__private

    class Open(Slotted):
        pass

    class Dataset:
        tag = "first"

        def batch(self):
            opened = Open(3)
            opened.d = 5
            return [Batch(torch.arange(3)), self.tag, Batch, Slotted(1), opened]

    mine = (Batch, Slotted, Open, Dataset)
    for cls in mine:
        cls.__module__, cls.__qualname__ = main, cls.__name__
        monkeypatch.setattr(sys.modules[main], cls.__name__, cls, raising=False)
    before = [dict(vars(cls)) for cls in mine]
    for tag in ("first", "first", "second"):  # a change of the class reaches the worker that has it already
        Dataset.tag = tag
        batch, *same, one, opened = through_copies(*ask(Dataset()))
        assert (type(batch), batch.double().tolist(), same) == (Batch, [0, 2, 4], [tag, Batch])
        assert (type(one), type(opened), opened.private(), opened.d) == (Slotted, Open, 3, 5)
        assert (one.private(), hasattr(one, "missing"), hasattr(one, "__dict__")) == (1, False, False)
        now = [{name: value for name, value in vars(cls).items() if name != "__slotnames__"} for cls in mine[:-1]]
        assert all(new.items() <= old.items() for new, old in zip(now, before, strict=False)), "a class was overwritten"


def test_known_classes_need_not_be_picklable_here():
    class Local:
        lock = threading.Lock()

    with pytest.raises(TypeError):
        encode_for_worker(Local())
    assert type(through(Local(), known_classes=True)) is Local


def seeds_all():
    torch.backends.cudnn.benchmark = torch.backends.mps.is_available()
    return torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled


@ENCODERS
def test_modules_of_classes_of_their_own_travel_by_name(encode):
    held = [torch.backends, torch.backends.cudnn, torch.backends.cuda, torch.backends.mkldnn]
    by_value = types.FunctionType(seeds_all.__code__, {**globals(), "__name__": "__main__"}, "seeds_all")
    by_value.__module__ = "__main__"
    *copies, function = through([*held, by_value], encode)
    assert copies == held
    assert function() == seeds_all()


# ---- what unpickling alone would not make


class Link:
    def __init__(self, value, inner):
        self.value, self.inner = value, inner


class DelegatingLink(Link):
    """Asks its `inner` for whatever it lacks itself, which it has only after unpickling."""

    def __getattr__(self, name):
        return getattr(self.inner, name)


class KeyLink(Link):
    """Is equal to others by its value: it must be complete before it is put into a set."""

    def __hash__(self):
        return hash(self.value)


@ENCODERS
@pytest.mark.parametrize("kind", [Link, DelegatingLink])
def test_a_linked_list(kind, encode):
    first = None
    for number in range(200):
        first = kind(number, first)
    first, numbers, same = through([first, torch.arange(3), {KeyLink(n, None) for n in range(3)}], encode)
    assert {key.value for key in same} == {0, 1, 2}
    assert numbers.tolist() == [0, 1, 2]
    for value in reversed(range(200)):
        assert (type(first), first.value) == (kind, value)
        first = first.inner
    assert first is None
