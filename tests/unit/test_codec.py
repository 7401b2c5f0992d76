"""The codec: what goes in comes out, through real copies of the buffers, writable and without waste."""

import atexit
import collections
import dataclasses
import functools
import gc
import io
import mmap
import multiprocessing
import os
import pickle
import pickletools
import sqlite3
import sys
import threading
import types
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import programs
from rayloader.errors import own_notes
from rayloader.transport import pickler, raw
from rayloader.transport.codec import decode, encode
from rayloader.transport.raw import copied
from rayloader.transport.replica import encode_for_worker, explain, note_batch

STRIDED = list(raw.NAMES)


def through(obj, encode=encode, **kwargs):
    """There and back, as a reader of read-only memory does it."""
    encoded = encode(obj, **kwargs)
    assert all(b.format == "B" and b.ndim == 1 and b.c_contiguous for b in encoded.buffers)
    return decode(encoded.skeleton, [copied(bytes(b)) for b in encoded.buffers])


def content(tensor):
    """The bytes of each element, for any dtype, shape (*tensor.shape, itemsize)."""
    item = tensor.dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8)
    offset, stride = tensor.storage_offset() * item, [s * item for s in tensor.stride()]
    return raw.set_(tensor.untyped_storage(), offset, (*tensor.shape, item), (*stride, 1)).clone()


def assert_same(got, want):
    assert type(got) is type(want)
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    assert got.requires_grad == want.requires_grad
    assert torch.equal(content(got), content(want))


def filled(dtype, size, stride=None, offset=0):
    """A tensor of random bytes; bool gets zeros and ones."""
    item = dtype.itemsize
    if stride is None:
        stride = [int(np.prod(size[i + 1 :])) for i in range(len(size))]
    count = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (max(count, 1) * item,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), offset, size, stride)


def chars():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 advises against them
        return np.char.array(["a", "bc"])


# Tensors


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32):UserWarning")
@pytest.mark.parametrize("dtype", STRIDED, ids=str)
def test_every_dtype_and_shape(dtype):
    batch = [
        filled(dtype, ()),
        filled(dtype, (7,)),
        filled(dtype, (2, 3, 4)),
        filled(dtype, (2, 3), (1, 2)),
        filled(dtype, (3, 5), (0, 2), offset=13),
        filled(dtype, (0, 3)),
    ]
    for got, want in zip(through(batch), batch, strict=True):
        assert_same(got, want)
        assert not got._is_view()


def test_dtypes_are_all_of_torch():
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.complex32, torch.uint16, torch.bool} < set(STRIDED)
    assert not any(name.startswith("q") for name in raw.NAMES.values())


def test_arrives_writable_and_apart_from_its_source():
    source = {"t": torch.zeros(3), "e": torch.zeros(1).expand(4), "s": torch.zeros(4, 4)[:, 1]}
    got = through(source)
    for tensor in got.values():
        tensor.as_strided((1,), (1,)).fill_(1)
        assert tensor.flatten()[0] == 1
    assert all(t.eq(0).all() for t in source.values())


def test_encode_does_not_copy():
    tensor, array = torch.zeros(1000), np.zeros(1000)
    encoded = encode([tensor, array])
    tensor.fill_(1)
    array.fill(1)
    got = decode(encoded.skeleton, encoded.buffers)
    assert (got[0] == 1).all()
    assert (got[1] == 1).all()
    got[0].fill_(2)
    assert (tensor == 2).all()


def test_encode_leaves_the_storage_resizable():
    tensor = torch.zeros(3)
    encode(tensor)
    assert tensor.resize_(5).shape == (5,)


def test_views_of_big_storages_stay_small():
    big = torch.arange(1_000_000)
    encoded = encode([big[500_000:500_010], big[500_020:500_030]])
    assert len(encoded.buffers) == 1
    assert sum(len(part) for part in (encoded.skeleton, *encoded.buffers)) < 1000
    got = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
    assert got[0].tolist() == list(range(500_000, 500_010))
    assert got[1].tolist() == list(range(500_020, 500_030))


def test_aliases_stay_aliases():
    base = torch.zeros(4, 6)
    got = through({"base": base, "row": base[2], "bits": base.view(torch.int32), "same": base})
    got["row"][1] = 1
    assert got["base"][2, 1] == 1
    assert got["bits"][2, 1] == torch.tensor(1.0).view(torch.int32)
    assert got["same"] is got["base"]


def test_separate_storages_stay_separate():
    one, two = through([torch.zeros(2), torch.zeros(2)])
    one.fill_(1)
    assert two.tolist() == [0, 0]


def test_views_stay_alive_and_keep_their_buffer_alive():
    encoded = encode([torch.arange(100.0), np.arange(100)])
    memory = [np.frombuffer(bytearray(b), np.uint8) for b in encoded.buffers]
    alive = [weakref.ref(m) for m in memory]
    tensor, array = decode(encoded.skeleton, [memoryview(m) for m in memory])
    part = tensor[50:]
    del memory, tensor
    gc.collect()
    assert [ref() is None for ref in alive] == [False, False]
    assert part[0] == 50
    del part, array
    gc.collect()
    assert [ref() is None for ref in alive] == [True, True]


def test_encoded_keeps_its_sources_alive():
    encoded = encode([torch.arange(1000), np.arange(1000)])
    gc.collect()
    torch.zeros(1000), np.zeros(1000)
    assert decode(encoded.skeleton, encoded.buffers)[0].tolist() == list(range(1000))
    assert decode(encoded.skeleton, encoded.buffers)[1].tolist() == list(range(1000))


def test_gradients():
    leaf = torch.ones(3, requires_grad=True)
    assert through(leaf).requires_grad
    assert through(leaf).is_leaf
    with pytest.raises(RuntimeError) as torchs:
        ForkingPickler.dumps(leaf * 2)
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf") as ours:
        encode([leaf * 2])
    assert str(ours.value) == str(torchs.value)


def test_parameters():
    trained, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    trained.note = "x"
    got = through([trained, frozen, trained.data])
    assert type(got[0]) is type(got[1]) is torch.nn.Parameter
    assert [p.requires_grad for p in got] == [True, False, False]
    assert got[0].note == "x"
    got[2].fill_(5)
    assert got[0].tolist() == [5, 5, 5]


def as_replica(obj):
    encoded = encode_for_worker(obj)
    return decode(encoded.skeleton, [bytearray(b) for b in encoded.buffers])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("make", [torch.clone, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_a_replicas_leaves_require_grad_again(make):
    leaf = make(torch.ones(1, 3)).requires_grad_()
    leaf.grad = leaf.detach() * 7
    got = as_replica(leaf)
    assert (got.requires_grad, got.is_leaf, got.grad) == (True, True, None)
    (got if got.layout is torch.strided else got.to_dense()).sum().backward()
    assert got.grad.to_dense().tolist() == [[1.0] * 3]


def test_a_replicas_tensors_can_grow_only_from_nothing():
    empty, one = as_replica([torch.empty(0), torch.ones(1)])
    assert torch.stack([torch.ones(3)] * 2, out=empty).sum() == 6
    with pytest.raises(RuntimeError, match="Trying to resize storage that is not resizable"):
        one.resize_(2)


def test_hooks_of_batches_are_left_out_with_torchs_warning():
    leaf = torch.nn.Parameter(torch.ones(3))
    leaf.register_hook(torch.neg)
    with pytest.warns(UserWarning, match="backward hook .* will not be serialized"):
        assert not through(leaf)._backward_hooks


def test_modules_come_back_whole():
    module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    encoded = encode(module)
    assert len(encoded.skeleton) < 5000
    got = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
    for name, value in module.state_dict().items():
        assert torch.equal(got.state_dict()[name], value)


class Labelled(torch.Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Labelled.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclass_with_attributes():
    big = torch.arange(10_000.0)
    tensor, leaf = big[10:14].as_subclass(Labelled), torch.ones(2).as_subclass(Labelled).requires_grad_()
    tensor.classes, tensor.owner = ["a", "b"], [tensor]
    before = Labelled.calls
    encoded = encode([tensor, leaf])
    got, got_leaf = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
    assert Labelled.calls == before, "the codec must not run the user's overrides"
    assert sum(len(part) for part in (encoded.skeleton, *encoded.buffers)) < 1000
    assert type(got) is Labelled
    assert torch.equal(got.as_subclass(torch.Tensor), big[10:14])
    assert got.classes == ["a", "b"]
    assert got.owner[0] is got
    assert (got_leaf.requires_grad, got_leaf.is_leaf) == (True, True)


def test_attributes_of_plain_tensors():
    tensor = torch.ones(2)
    tensor.note, tensor.me = "x", tensor
    got = through(tensor)
    assert (type(got), got.note) == (torch.Tensor, "x")
    assert got.me is got


def test_default_device_and_inference_mode():
    with torch.device("meta"):
        got = through(torch.ones(2, device="cpu"))
    assert got.tolist() == [1, 1]
    with torch.inference_mode():
        assert through(torch.ones(2)).tolist() == [1, 1]


def complex_numbers():
    return torch.complex(torch.randn(5), torch.randn(5))


def per_channel():
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(torch.randn(3, 4), scales, zeros, 0, torch.qint8)


def nested(layout):
    return torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout)


EXOTIC = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "sparse parameter": lambda: torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False),
    "per tensor": lambda: torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.quint8),
    "per channel": per_channel,
    "conj": lambda: complex_numbers().conj(),
    "neg": lambda: complex_numbers().conj().imag,
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "meta": lambda: torch.empty(3, 4, device="meta"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own: deprecated, beta, experimental
@pytest.mark.parametrize("kind", EXOTIC)
def test_exotic_tensors(kind):
    want = EXOTIC[kind]()
    encoded = encode(want)
    assert b"_load_from_bytes" not in encoded.skeleton
    assert bool(encoded.buffers) == (kind != "meta")
    got = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
    assert type(got) is type(want)
    assert (got.dtype, got.layout, got.device) == (want.dtype, want.layout, want.device)
    assert (got.is_conj(), got.is_neg(), got.is_quantized) == (want.is_conj(), want.is_neg(), want.is_quantized)
    if kind == "meta":
        assert got.shape == want.shape
        return
    if want.is_nested:
        assert all(torch.equal(a, b) for a, b in zip(got.unbind(), want.unbind(), strict=True))
        return
    assert got.shape == want.shape
    if want.is_quantized:
        assert got.qscheme() == want.qscheme()
        assert torch.equal(got.int_repr(), want.int_repr())
        assert torch.equal(got.dequantize(), want.dequantize())
    elif kind in ("conj", "neg"):
        assert torch.equal(got, want)
    else:
        if want.layout is torch.sparse_coo:
            assert got.is_coalesced() == want.is_coalesced()
        assert torch.equal(got.to_dense(), want.to_dense())


def test_sparse_tensors_are_not_kept():
    utils = torch._utils  # torch 2.15 keeps a list for each thread
    listed = getattr(utils, "_get_sparse_tensors_to_validate", lambda: utils._sparse_tensors_to_validate)
    before = len(listed())
    through(torch.eye(3).to_sparse())
    assert len(listed()) == before


def test_exotic_tensors_share_with_ordinary_ones():
    z = torch.complex(torch.ones(50), torch.ones(50))
    encoded = encode_for_worker([z[10:12], z.conj()])
    assert [b.nbytes for b in encoded.buffers] == [z.nbytes]
    part, conj = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
    part[0] = 7 + 8j
    assert conj[10] == 7 - 8j


class Wrapper(torch.Tensor):
    """A tensor without memory of its own around one that has some."""

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        self.inner = inner
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(func)


def test_wrapper_subclass():
    inner = torch.arange(1000.0)
    got, alias = through([Wrapper(inner), inner[5:7]])
    assert (type(got), got.shape, got.dtype) == (Wrapper, (1000,), torch.float32)
    assert torch.equal(got.inner, inner)
    alias.fill_(-1)
    assert got.inner[5] == -1


def test_storages():
    tensor = torch.arange(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls typed storages deprecated
        encoded = encode([tensor.untyped_storage(), tensor.storage(), tensor[2:4]])
        assert [b.nbytes for b in encoded.buffers] == [40]
        untyped, typed, view = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
        view.fill_(-1)
        assert typed.tolist() == [0, 1, -1, -1, 4, 5, 6, 7, 8, 9]
        assert (type(typed), typed.dtype, untyped.nbytes()) == (torch.TypedStorage, torch.float32, 40)
        assert through(torch.UntypedStorage(0)).nbytes() == 0


# NumPy


def between_torchs_processes(obj, protocol=None):
    return pickle.loads(ForkingPickler.dumps(obj, protocol))


ARRAYS = {
    "floats": np.arange(120.0).reshape(10, 12),
    "small": np.arange(3),
    "0-d": np.array(3.5),
    "empty": np.zeros((0, 3)),
    "fortran": np.asfortranarray(np.arange(120.0).reshape(10, 12)),
    "permuted": np.arange(120.0).reshape(2, 6, 10).transpose(1, 0, 2),
    "strided": np.arange(400.0).reshape(20, 20)[::2, ::3],
    "reversed": np.arange(100.0)[::-1],
    "broadcast": np.broadcast_to(np.arange(50.0), (4, 50)),
    "half": np.arange(500, dtype=np.float16),
    "dates": np.arange(100).astype("datetime64[ns]"),
    "deltas": np.arange(100).astype("timedelta64[D]"),
    "text": np.array(["a", "bcd", "ü"] * 40),
    "bytes": np.array([b"a", b"bcd"] * 60),
    "void": np.zeros(100, "V3"),
    "structured": np.array([(1, 2.5, "x")] * 50, [("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "aligned": np.zeros(50, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "bool": np.array([True, False] * 200),
    "complex": np.arange(100) * 1j,
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("writable", [True, False])
def test_arrays(name, writable):
    source = ARRAYS[name].view()
    source.flags.writeable = writable and source.flags.writeable
    got, again = through([source, source])
    want = between_torchs_processes(source)
    assert got is again
    assert type(got) is np.ndarray
    assert got.dtype == want.dtype
    assert got.dtype.isalignedstruct == want.dtype.isalignedstruct
    assert (got.shape, got.strides) == (want.shape, want.strides)
    assert got.tobytes() == want.tobytes()
    assert got.flags.writeable == want.flags.writeable


@st.composite
def arrays(draw):
    """Views with the axes in any order, and with reversed, left out, repeated, empty and new axes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(["f4", ">i2", "i1, f8", "U2"]))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    array = array.transpose(draw(st.permutations(range(len(shape)))))
    steps = [slice(None), slice(None, None, -1), slice(1, None), slice(None, None, 2), slice(None, 1)]
    array = array[(*(draw(st.sampled_from(steps)) for _ in shape), ...)]
    repeated = tuple(draw(st.sampled_from([1, count])) if count else 0 for count in array.shape)
    array = np.broadcast_to(array[(*map(slice, repeated), ...)], array.shape)
    array = array.copy("K") if draw(st.booleans()) else array.view()
    return array[..., None] if draw(st.booleans()) else array


@pytest.mark.parametrize("protocol", [4, 5])
@settings(max_examples=150)
@given(source=arrays())
def test_batches_have_the_strides_that_torchs_have(protocol, source):
    want = between_torchs_processes(source, protocol)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickler, "_TORCHS_PROTOCOL", protocol)
        got = through(source)
    assert (got.shape, got.strides, got.dtype) == (want.shape, want.strides, want.dtype)
    assert got.tobytes() == want.tobytes()
    assert got.flags.writeable == want.flags.writeable


@given(order=st.permutations(range(3)), steps=st.lists(st.sampled_from([1, -1]), min_size=3, max_size=3))
@settings(max_examples=50)
def test_a_replicas_arrays_without_gaps_keep_their_strides(order, steps):
    base = np.arange(24.0).reshape(4, 3, 2).transpose(order)[tuple(slice(None, None, step) for step in steps)]
    for source in (base, base.astype("i1"), np.broadcast_to(base[..., None], (*base.shape, 3))):
        got = as_replica(source)
        assert got.strides == source.strides
        assert got.tolist() == source.tolist()


@pytest.mark.parametrize("name", [*ARRAYS, "bytes"])
def test_a_replicas_read_only_arrays_stay_so(name):
    source = {**ARRAYS, "bytes": np.frombuffer(bytes(3), np.uint8)}[name].view()
    source.flags.writeable = False
    got, free = as_replica([source, source.copy()])
    assert not got.flags.writeable
    assert free.flags.writeable
    assert got.tolist() == source.tolist()
    assert (got.dtype, got.shape) == (source.dtype, source.shape)


class InfoArray(np.ndarray):
    """As in NumPy's page "Subclassing ndarray"."""

    def __new__(cls, values, info=None):
        self = np.asarray(values).view(cls)
        self.info = info
        return self

    def __array_finalize__(self, other):
        if other is not None:
            self.info = getattr(other, "info", None)


class SlottedArray(np.ndarray):
    __slots__ = "missing", "note"


class PickledArray(InfoArray):
    def __reduce__(self):
        return type(self), (np.asarray(self), "its own")


def subclasses():
    """Sources, and which parts of them have to be what they were."""
    info, objects = InfoArray(np.arange(120.0).reshape(10, 12).T, ["x"]), InfoArray([None, {}], "objects")
    info.info.append(info)
    slotted = np.arange(3).view(SlottedArray)
    slotted.note = "x"
    hard = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0], fill_value=7.0)
    hard.harden_mask()
    hard.note = "x"
    records = np.ma.array([(1, 2.0), (3, 4.0)], mask=[(0, 1), (1, 0)], dtype="i4, f8")
    masked_objects = np.ma.array([None, {}], mask=[True, False], dtype=object)
    masked_objects.harden_mask()
    return {
        "attributes": info,
        "read-only": InfoArray(np.frombuffer(bytes(600), np.uint8), 1),
        "objects": objects,
        "nothing": InfoArray(np.arange(0).reshape(0, 3), 1),
        "slots": slotted,
        "matrix": np.arange(6).reshape(2, 3).view(np.matrix),
        "records": np.rec.array([(1, 2.0)] * 40, [("a", "i4"), ("b", "f8")]),
        "chars": chars(),
        "masked": np.ma.array([1, 2]),
        "hard": hard,
        "masked rows": np.ma.array(np.arange(100.0).reshape(10, 10), mask=np.eye(10)).T,
        "masked records": records,
        "masked record": records[0],
        "masked objects": masked_objects,
    }


@pytest.mark.filterwarnings("ignore:The chararray class is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", subclasses())
@pytest.mark.parametrize("writable", [True, False])
def test_a_replicas_arrays_of_subclasses_keep_what_numpys_pickling_drops(name, writable):
    source = subclasses()[name]
    source.flags.writeable = writable and source.flags.writeable
    before = dict(getattr(source, "__dict__", {}))
    got, again = as_replica([source, source])
    assert got is again
    assert type(got) is type(source)
    assert (got.dtype, got.strides, got.tolist()) == (source.dtype, source.strides, source.tolist())
    assert got.flags.writeable == (source.flags.writeable or source.dtype.hasobject)
    now = dict(getattr(got, "__dict__", {}))
    assert (list(now), repr(now)) == (list(before), repr(before))
    assert getattr(got, "note", None) == getattr(source, "note", None)
    if name == "attributes":
        assert got.info[1] is got
    if isinstance(source, np.ma.MaskedArray):
        assert got.hardmask == source.hardmask
        assert (got.mask is np.ma.nomask) == (source.mask is np.ma.nomask)
        assert np.array_equal(np.ma.getmaskarray(got), np.ma.getmaskarray(source))


def test_an_array_that_pickles_itself_has_the_last_word():
    assert as_replica(PickledArray([1], "lost")).info == "its own"
    assert as_replica(np.ma.masked) is np.ma.masked


@pytest.mark.parametrize("name", ["attributes", "objects", "hard", "masked rows", "records"])
def test_a_batchs_arrays_of_subclasses_arrive_as_torchs_do(name):
    source = subclasses()[name]
    source.flags.writeable = False
    got, want = through(source), between_torchs_processes(source)
    assert repr((type(got), got, vars(got))) == repr((type(want), want, vars(want)))
    assert (got.strides, got.flags.writeable) == (want.strides, want.flags.writeable)


def test_a_replicas_views_of_memory_maps_have_their_attributes(tmp_path):
    np.arange(1000.0).tofile(tmp_path / "values")
    mapped = np.memmap(tmp_path / "values", np.float64, "r", shape=(10, 100))
    rows, row = as_replica([mapped, InfoArray(mapped[3], "x")])
    assert (type(rows), rows.mode, rows.filename) == (np.memmap, "r", mapped.filename)
    assert (row.info, row.tolist()) == ("x", list(range(300, 400)))
    assert mapped._mmap is not None


def test_other_arrays():
    masked = np.ma.array(np.arange(100.0), mask=np.arange(100) % 2 == 0)
    objects = np.array([{"a": 1}, None, "x"], object)
    records = np.rec.array([(1, 2.0)] * 40, [("a", "i4"), ("b", "f8")])
    got = through([masked, objects, records, np.float32(3), np.datetime64("2020-01-01")])
    assert isinstance(got[0], np.ma.MaskedArray)
    assert (got[0].mask == masked.mask).all()
    assert got[0].sum() == masked.sum()
    assert got[1].tolist() == objects.tolist()
    assert got[2].a.tolist() == [1] * 40
    assert got[3:] == [np.float32(3), np.datetime64("2020-01-01")]


def test_memmaps_arrive_as_values(tmp_path):
    path = tmp_path / "values"
    np.arange(1000.0).tofile(path)
    source = np.memmap(path, np.float64, "r", shape=(10, 100))
    encoded = encode([source[3], source[:, 5], source.reshape(-1)[:2]])
    assert [b.nbytes for b in encoded.buffers] == [800]
    row, column, small = decode(encoded.skeleton, [*map(copied, encoded.buffers)])
    assert type(row) is np.memmap
    assert row.mode == "r"
    assert row.tolist() == list(range(300, 400))
    assert column.tolist() == list(range(5, 1000, 100))
    assert small.tolist() == [0, 1]
    row[0] = -1
    assert source[3, 0] == 300


# Everything else


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    label: int
    extra: object = None


Point = collections.namedtuple("Point", "x y")


def test_structures_and_cycles():
    shared = torch.arange(3)
    batch = {
        "sample": Sample(shared, 3, {"k": (shared, None, b"x", "y", 2**70, 1.5, True)}),
        "point": Point(shared, [np.arange(100), {1, 2}]),
        "simple": types.SimpleNamespace(a=bytearray(b"abc")),
    }
    batch["self"] = batch
    got = through(batch)
    assert got["self"] is got
    assert type(got["sample"]) is Sample
    assert type(got["point"]) is Point
    assert got["point"].x is got["sample"].image is got["sample"].extra["k"][0]
    assert got["sample"].extra["k"][1:] == (None, b"x", "y", 2**70, 1.5, True)
    assert got["simple"].a == bytearray(b"abc")


def test_functions_by_value():
    offset = torch.arange(3)
    add = through(lambda x: x + offset)
    assert add(1).tolist() == [1, 2, 3]


def test_buffers_of_other_objects():
    class Owner:
        def __init__(self, data):
            self.data = data

        def __reduce_ex__(self, protocol):
            return Owner, (pickle.PickleBuffer(self.data),)

    writable, readonly = bytearray(range(200)), bytes(range(200))
    got = through([Owner(writable), Owner(readonly), Owner(b""), torch.ones(2), Owner(np.arange(6).reshape(2, 3))])
    assert bytes(got[0].data) == bytes(got[1].data) == readonly
    assert [memoryview(got[i].data).readonly for i in (0, 1)] == [False, True]
    assert bytes(got[2].data) == b""
    assert got[3].tolist() == [1, 1]
    assert np.frombuffer(got[4].data, np.int64).tolist() == list(range(6))


def test_buffers_of_any_format_are_taken():
    encoded = encode([torch.arange(4), np.arange(40)])
    given = [np.frombuffer(bytearray(b), np.int64) for b in encoded.buffers]
    assert [t.tolist() for t in decode(encoded.skeleton, given)] == [list(range(4)), list(range(40))]
    copies = [copied(memoryview(g).toreadonly()) for g in (*given, b"")]
    assert [(c.nbytes, c.format, c.readonly) for c in copies] == [(32, "B", False), (320, "B", False), (0, "B", False)]


def test_large_copies_are_mapped_and_never_taken_from_the_heap():
    """The heap would keep what a freed batch leaves, and cut small tensors out of it."""
    sizes = [(1 << 20) - 1, 1 << 20, 3 << 20]
    given = [os.urandom(size) for size in sizes]
    copies = [*map(copied, given)]
    owners = [copy.obj.base for copy in copies]  # a tensor, or a view of a mapping
    assert [isinstance(getattr(owner, "obj", None), mmap.mmap) for owner in owners] == [False, True, True]
    assert [bytes(copy) for copy in copies] == given
    copies[2][:] = bytes(3 << 20)
    assert bytes(copies[1]) == given[1], "each is a mapping of its own"


def test_read_only_buffers_are_taken_without_a_warning():
    encoded = encode([torch.arange(100), np.arange(100)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor, array = decode(encoded.skeleton, [bytes(b) for b in encoded.buffers])
    gc.collect()
    assert tensor.tolist() == array.tolist() == list(range(100))
    assert not array.flags.writeable


def test_wrong_buffers():
    encoded = encode([torch.arange(100), torch.arange(50)])
    copies = [*map(copied, encoded.buffers)]
    with pytest.raises(ValueError, match="2 buffers, got 1"):
        decode(encoded.skeleton, copies[:1])
    with pytest.raises(ValueError, match="buffer 0 must have 800 bytes, got 400"):
        decode(encoded.skeleton, copies[::-1])


@pytest.mark.parametrize(
    "sample",
    [
        (torch.arange(4), 3),
        (7, torch.arange(4), "seven", torch.ones(2, 3), None),
        [torch.arange(4), True, 1.5, b"bytes"],
        {"image": torch.ones(2), "label": -1, "name": "\ud800"},
        (1 << 100, torch.arange(2)),
    ],
    ids=lambda sample: f"{type(sample).__name__} of {len(sample)}",
)
def test_values_beside_tensors_come_out_as_they_were(sample):
    got = through(sample)
    assert type(got) is type(sample)
    pairs = zip(*(one.items() if type(one) is dict else enumerate(one) for one in (got, sample)), strict=True)
    for (key, value), (wanted_key, wanted) in pairs:
        assert (key, type(value)) == (wanted_key, type(wanted))
        assert value.equal(wanted) if isinstance(wanted, torch.Tensor) else value == wanted


def test_tensors_of_one_storage_share_it_beside_values_too():
    base = torch.arange(4)
    one, label, other = through((base, 3, base[1:]))
    one[1] = 9
    assert (label, other.tolist()) == (3, [9, 2, 3])


def test_nothing_but_a_skeleton():
    encoded = encode({"a": 1})
    assert encoded.buffers == []
    assert decode(memoryview(encoded.skeleton), []) == {"a": 1}


def test_errors_of_user_objects_pass_unchanged():
    class Bad:
        def __reduce__(self):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        encode([Bad()])
    assert not own_notes(caught.value)


def test_excessive_depth_is_a_pickling_error():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(pickle.PicklingError, match="excessively deep recursion"):
        encode(deep)
    while deep:
        deep = deep.pop()


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">U3", ">M8[s]", [("a", ">i4")]])
@pytest.mark.parametrize("shape", [(3,), (40, 20)])
def test_byte_order_is_what_pickling_between_torchs_processes_makes_of_it(dtype, shape):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    for one in (array, array[::2], np.asfortranarray(array), array.T):
        want = between_torchs_processes(one)
        got = through(one)
        assert (got.dtype, got.shape, got.strides) == (want.dtype, want.shape, want.strides)
        assert np.array_equal(got, want)
    kept = encode_for_worker(array)
    assert decode(kept.skeleton, [bytearray(b) for b in kept.buffers]).dtype == array.dtype  # a dataset's


# Classes by value


DRIVER = """
import collections, dataclasses, enum, os, pickle
import torch
from cloudpickle import cloudpickle
from rayloader.transport.codec import decode, encode
from rayloader.transport.raw import copied
from rayloader.transport.replica import encode_for_worker

(asked, ask_end), (answers, answer_end) = os.pipe(), os.pipe()
if (child := os.fork()) == 0:  # as another program: it has none of the classes below
    os.close(ask_end)
    requests, replies = open(asked, "rb"), open(answer_end, "wb")
    while True:
        try:
            dataset = decode(*pickle.load(requests))
        except EOFError:
            os._exit(0)
        encoded = encode(dataset.batch(), known_classes=True)
        pickle.dump((encoded.skeleton, [bytes(b) for b in encoded.buffers]), replies)
        replies.flush()
requests, replies = open(ask_end, "wb"), open(answers, "rb")

class Base:
    def hello(self):
        return "hello"

class Batch(Base):
    count = 0
    def __init__(self, t):
        self.t = t
    def double(self):
        return self.t * 2

@dataclasses.dataclass
class Data:
    t: object

class Color(enum.Enum):
    RED = 1
    BLUE = 2

Pair = collections.namedtuple("Pair", "a b")

class Slotted:
    __slots__ = ("a", "__private", "missing")
    def __init__(self, a):
        self.a = self.__private = a
    def private(self):
        return self.__private

class More(Slotted):
    __slots__ = "c"

class Open(Slotted):
    pass

@dataclasses.dataclass(slots=True)
class Columns:
    a: object
    b: int = 3

class Dataset:
    tag = "first"
    def batch(self):
        class Local(Base):
            def local(self):
                return 42
        return [Batch(torch.arange(3)), Data(1), Color.BLUE, Pair(1, 2), Local(), self.tag, Batch]

class SlottedDataset:
    def batch(self):
        more, open = More(2), Open(3)
        more.c, open.d = 4, 5
        try:
            more.unknown = 1
        except AttributeError:
            return [Slotted(1), more, open, Columns(torch.arange(2))]

def ask(dataset):
    encoded = encode_for_worker(dataset)
    pickle.dump((encoded.skeleton, [bytearray(b) for b in encoded.buffers]), requests)
    requests.flush()
    skeleton, buffers = pickle.load(replies)
    return skeleton, buffers, decode(skeleton, [*map(copied, buffers)])

mine = (Base, Batch, Data, Color, Pair, Dataset)
before = [dict(vars(c)) for c in mine]
batch = Dataset().batch  # keeps nothing
for _ in range(2):
    _, _, (b, d, c, p, local, tag, cls) = ask(Dataset())
    assert (type(b), type(d), type(c), type(p), cls) == (Batch, Data, Color, Pair, Batch)
    assert b.double().tolist() == [0, 2, 4] and d.t == 1 and c is Color.BLUE and p == (1, 2)
    assert isinstance(local, Base) and local.hello() == "hello" and local.local() == 42
    assert tag == "first"
    for cls, attributes in zip(mine, before):
        now = {k: v for k, v in vars(cls).items() if k != "__slotnames__"}
        attributes.pop("__slotnames__", None)
        assert now.keys() == attributes.keys(), cls
        assert all(now[k] is attributes[k] for k in now), cls

one, more, open, columns = ask(SlottedDataset())[2]
assert (type(one), type(more), type(open), type(columns)) == (Slotted, More, Open, Columns)
assert (one.a, one.private(), hasattr(one, "missing"), hasattr(one, "__dict__")) == (1, 1, False, False)
assert (more.a, more.private(), more.c, open.a, open.d, columns.b) == (2, 2, 4, 3, 5, 3)
assert columns.a.tolist() == [0, 1]

# A change of the class reaches the worker that has it already, and only that direction.
Dataset.tag, double = "second", Batch.double
assert ask(Dataset())[2][5] == "second"
assert Batch.double is double

# A driver that forgot the class gets it from its definition, once.
skeleton, buffers, _ = ask(Dataset())
tracker = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
for key in [k for k, v in tracker.items() if v is Batch]:
    del tracker[key]
one, two = (decode(skeleton, [*map(copied, buffers)])[0] for _ in range(2))
assert type(one) is type(two) is not Batch
assert one.double().tolist() == [0, 2, 4] and isinstance(one, Base)
requests.close()
assert os.waitpid(child, 0)[1] == 0
print("passed")
"""


SPAWN = """
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=print)
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


@pytest.mark.parametrize(
    "before", [pytest.param("", id="program"), pytest.param(SPAWN, id="spawned process", marks=pytest.mark.full)]
)
def test_classes_of_main_come_back_as_the_drivers_own(before, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(before + DRIVER)
    done = programs.run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "passed"), done.stderr


def test_what_the_program_has_where_its_name_says_goes_back_by_name(monkeypatch):
    """As a fork of the program has the classes and functions of its script."""

    class Batch:
        pass

    def function():
        pass

    for definition in (Batch, function):
        definition.__module__, definition.__qualname__ = "__main__", definition.__name__
        assert definition.__name__.encode() in encode(definition, known_classes=True).skeleton
        assert not is_name(encode(definition, known_classes=True).skeleton)
        monkeypatch.setattr(sys.modules["__main__"], definition.__name__, definition, raising=False)
        assert is_name(encode(definition, known_classes=True).skeleton)
        assert not is_name(encode(definition).skeleton)


def is_name(skeleton):
    return {opcode.name for opcode, _, _ in pickletools.genops(skeleton)}.isdisjoint({"REDUCE", "BUILD"})


def test_known_classes_need_not_be_picklable_here():
    class Local:
        lock = threading.Lock()

    with pytest.raises(TypeError):
        encode_for_worker(Local())
    assert type(through(Local(), known_classes=True)) is Local


# Functions that travel by value


def seeds_all():
    torch.backends.cudnn.benchmark = torch.backends.mps.is_available()
    return torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled


@pytest.mark.parametrize("encode", [encode, encode_for_worker])
def test_modules_of_classes_of_their_own_travel_by_name(encode):
    held = [seeds_all, torch.backends, torch.backends.cudnn, torch.backends.cuda, torch.backends.mkldnn]
    by_value = types.FunctionType(seeds_all.__code__, {**globals(), "__name__": "__main__"}, "seeds_all")
    by_value.__module__ = "__main__"
    encoded = encode([*held, by_value])
    *copies, function = decode(encoded.skeleton, encoded.buffers, encoded.carried)
    assert copies == held
    assert function() == seeds_all()


# What unpickling alone would not make


class Delegates:
    """Asks its `inner` for whatever it lacks itself, which it has only after unpickling."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class OwnSetter(Delegates):
    def __setstate__(self, state):
        self.inner = state["inner"] * 2


@pytest.mark.parametrize("encode", [encode, encode_for_worker])
def test_objects_that_delegate(encode):
    nested = through([Delegates(Delegates([1, 2])), OwnSetter("ab")], encode)
    assert nested[0].inner.count(2) == nested[0].count(2) == 1
    assert nested[1].inner == "abab"


# Depth


class Link:
    def __init__(self, value, following):
        self.value, self.following = value, following


class SlottedLink:
    __slots__ = ("following", "value")
    __init__ = Link.__init__


class DelegatingLink(Delegates):
    __init__ = Link.__init__

    def __getattr__(self, name):
        return getattr(self.following, name)


class KeyLink(Link):
    """Is equal to others by its value: it must be complete before it is put into a set."""

    def __hash__(self):
        return hash(self.value)


def chain(kind, length):
    first = None
    for number in range(length):
        first = kind(number, first)
    return first


@pytest.mark.parametrize("encode", [encode, encode_for_worker])
@pytest.mark.parametrize("kind", [Link, SlottedLink, DelegatingLink])
def test_a_linked_list(kind, encode):
    keys = {KeyLink(n, None) for n in range(3)}
    first, numbers, same = through([chain(kind, 200), torch.arange(3), keys], encode)
    assert {key.value for key in same} == {0, 1, 2}
    assert numbers.tolist() == [0, 1, 2]
    for value in reversed(range(200)):
        assert (type(first), first.value) == (kind, value)
        first = first.following
    assert first is None


def test_a_recursion_of_the_programs_own_is_such_an_error_too():
    class Endless:
        def __reduce__(self):
            return self.__reduce__()

    with pytest.raises(pickle.PicklingError, match="excessively deep recursion"):
        encode(Endless())


# What can't be pickled


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Drops(Holder):
    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "dropped"}


class Slots:
    __slots__ = ("a", "stream")

    def __init__(self):
        self.a, self.stream = 1, iter_nothing()


def iter_nothing():
    return (i for i in ())


DATABASE = sqlite3.connect(":memory:")
atexit.register(DATABASE.close)


def culprits():
    stream = iter_nothing()
    cyclic = Holder(stream=stream)
    cyclic.me = Holder(back=cyclic)
    return {
        "dataset.stream: builtins.generator": Holder(a=torch.ones(2), stream=stream),
        "dataset.inner['x'][1].stream: builtins.generator": Holder(inner={"x": [1, Holder(stream=stream)]}),
        "dataset.open: builtins.generator": Drops(dropped=iter_nothing(), open=stream),
        "dataset.db: sqlite3.Connection": Holder(db=DATABASE),
        "dataset.g: builtins.generator": Holder(g=(i for i in ())),
        "dataset.file: _io.BufferedWriter": Holder(file=io.BufferedWriter(io.BytesIO())),
        "dataset.n: multiprocessing.sharedctypes.Synchronized": Holder(n=multiprocessing.Value("i")),
        "dataset.grown: torch.Tensor": Holder(grown=torch.ones(2, requires_grad=True) * 2),
        "dataset.<closure>.stream: builtins.generator": lambda: stream,
        "dataset.__self__.stream: builtins.generator": Holder(stream=stream).__init__,
        "dataset.stream: builtins.generator ": Slots(),
        "dataset.stream: builtins.generator  ": cyclic,
        "dataset[0]: builtins.generator": functools.partial(print, stream),
        "dataset.key: builtins.generator": functools.partial(print, key=stream),
        "dataset.me: weakref.ReferenceType": referring_to_itself(),
        "dataset.compiled: builtins.function": Holder(compiled=torch.compile(lambda x: x, backend="eager")),
    }


def referring_to_itself():
    holder = Holder()
    holder.me = weakref.ref(holder)
    return holder


@pytest.mark.parametrize("index", range(16))
def test_explains_what_cannot_be_pickled(index):
    path, obj = list(culprits().items())[index]
    with pytest.raises((TypeError, RuntimeError, pickle.PicklingError)):
        encode_for_worker(obj)
    text = explain(obj, "dataset")
    assert text.startswith(path.strip() + " can't be sent to a worker (")
    assert "__getstate__" in text


def test_explains_nothing_where_there_is_nothing():
    assert explain(Holder(a=1), "dataset") is None


def test_a_note_names_what_of_a_batch_cannot_be_pickled():
    error = TypeError()
    with open(os.devnull) as file:
        note_batch(error, {"labels": [1, file]}, encode)
    (note,) = error.__notes__
    assert "sent to the trainer: batch['labels'][1]: _io.TextIOWrapper (TypeError: cannot pickle" in note
    note_batch(error, {"labels": [1]}, encode)
    assert error.__notes__ == [note]


def test_explaining_is_bounded_and_never_raises():
    class Hostile:
        def __reduce_ex__(self, protocol):
            raise OSError

        def __repr__(self):
            raise OSError

    assert explain([Hostile(), iter_nothing()], "x").startswith(f"x[0]: {__name__}.")
    assert explain({Hostile(): iter_nothing()}, "x").startswith("x: builtins.dict")
    assert explain([0] * 5000 + [iter_nothing()], "x").startswith("x: builtins.list")
    deep = iter_nothing()
    for _ in range(20):
        deep = [deep]
    assert explain(deep, "x").startswith("x[0][0][0][0][0][0]: builtins.list")


# Any structure


@st.composite
def tensors(draw):
    size = draw(st.lists(st.integers(0, 4), max_size=4))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(size), max_size=len(size)))
    return filled(draw(st.sampled_from(STRIDED)), size, stride, draw(st.integers(0, 200)))


@st.composite
def views(draw):
    """Two views of one storage, by different types."""
    base = filled(torch.uint8, (256,))
    start = draw(st.integers(0, 15)) * 16
    return [base[start:].view(draw(st.sampled_from([torch.int64, torch.float16, torch.bool]))), base[3:20]]


LEAVES = st.one_of(tensors(), views(), st.integers(), st.text(max_size=5), st.none())
PAYLOADS = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Sample, inner, st.integers())
    ),
    max_leaves=10,
)


def compare(got, want):
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert_same(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            compare(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            compare(one, other)
    elif isinstance(want, Sample):
        compare(vars(got), vars(want))
    else:
        assert got == want


def walk(obj):
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, (list, tuple, dict, Sample)):
        inner = vars(obj) if isinstance(obj, Sample) else obj
        for part in inner.values() if isinstance(inner, dict) else inner:
            yield from walk(part)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32):UserWarning")
@settings(max_examples=80)
@given(PAYLOADS)
def test_any_structure(payload):
    got = through(payload)
    compare(got, payload)
    storages = [[t.untyped_storage()._cdata for t in walk(p) if t.numel()] for p in (got, payload)]
    relations = [[[a == b for b in ids] for a in ids] for ids in storages]
    assert relations[0] == relations[1]
