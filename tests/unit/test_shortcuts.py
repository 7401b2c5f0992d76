"""Every kind of object that the pickler treats in its own way: the same as what torch's workers give, or a fork leaves.

In batches the measure is what torch's loader delivers, in datasets the object itself. What differs is in two tables.
"""

import array
import ctypes
import mmap
import warnings
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from rayloader.actors.image import Contents, Image, open_image
from rayloader.transport.codec import decode, encode
from rayloader.transport.raw import copied
from rayloader.transport.replica import encode_for_worker

RECORDS = np.array([(1, 2.5, b"ab"), (3, 4.5, b"c")], dtype=[("i", "<i4"), ("f", "<f8"), ("s", "S3")])


class OwnTensor(torch.Tensor):
    pass


class OwnArray(np.ndarray):
    pass


class OwnBytes(bytes):
    pass


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


def grid(dtype=None):
    return np.arange(6, dtype=dtype).reshape(2, 3)


def real():
    return torch.arange(6.0).reshape(2, 3)


def conjugated():
    return (real() * (1 + 2j)).conj()


def read_only(values):
    values.flags.writeable = False
    return values


def of_a_file():
    file = mmap.mmap(-1, mmap.PAGESIZE)
    file[:4] = b"abcd"
    return file


KINDS = {
    "bytes": lambda: b"abc",
    "long bytes": lambda: b"x" * 1000,
    "own bytes": lambda: OwnBytes(b"abc"),
    "bytearray": lambda: bytearray(b"abc"),
    "array": lambda: array.array("q", [1000, 1001]),
    "ctypes number": lambda: ctypes.c_ushort(5),
    "ctypes array": lambda: (ctypes.c_int * 3)(1, 2, 3),
    "ctypes grid": lambda: (ctypes.c_short * 3 * 2)(),
    "ctypes text": lambda: ctypes.create_string_buffer(b"abc"),
    "ctypes structure": lambda: Pair(1, 2.0),
    "ctypes structures": lambda: (Pair * 2)((1, 2.0), (3, 4.0)),
    "scalar": lambda: np.float16(1.5),
    "time scalar": lambda: np.datetime64("2020-01-01", "D"),
    "record scalar": lambda: RECORDS[0],
    "array without axes": lambda: np.array(1.5, np.float32),
    "records": lambda: RECORDS.copy(),
    "aligned records": lambda: np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "record array": lambda: RECORDS.view(np.recarray),
    "objects": lambda: np.array([1, "a", None], object),
    "times": lambda: np.array(["2020-01-01"], "M8[D]"),
    "text array": lambda: np.array(["ab", "c"]),
    "read-only array": lambda: read_only(np.arange(3)),
    "long read-only array": lambda: read_only(np.arange(200)),
    "swapped array": lambda: np.arange(3, dtype=">i4"),
    "Fortran array": lambda: np.asfortranarray(grid()),
    "array of turned axes": lambda: np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "array with gaps": lambda: np.arange(10)[::2],
    "array backwards": lambda: np.arange(5)[::-1],
    "broadcast array": lambda: np.broadcast_to(np.arange(3), (2, 3)),
    "own array": lambda: np.arange(3).view(OwnArray),
    "masked array": lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    "tensor": real,
    "transposed tensor": lambda: real().T,
    "tensor with gaps": lambda: real()[:, ::2],
    "expanded tensor": lambda: torch.zeros(1).expand(3),
    "channels last": lambda: torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "bfloat16": lambda: real().bfloat16(),
    "tensor that requires grad": lambda: real().requires_grad_(),
    "parameter": lambda: torch.nn.Parameter(real()),
    "own tensor": lambda: real().as_subclass(OwnTensor),
    "conjugate": conjugated,
    "transposed conjugate": lambda: conjugated().T,
    "one of a conjugate": lambda: conjugated()[1, 2],
    "conjugate that requires grad": lambda: conjugated().detach().requires_grad_(),
    "own conjugate": lambda: conjugated().as_subclass(OwnTensor),
    "negative": lambda: torch._neg_view(real()),
    "resolved conjugate": lambda: conjugated().resolve_conj(),
    "sparse": lambda: real().to_sparse(),
    "storage": lambda: real().untyped_storage(),
    "typed storage": lambda: torch.TypedStorage([1.0, 2.0], device="cpu"),
    "empty storage": lambda: torch.UntypedStorage(0),
}

TORCH_REFUSES = {"ctypes array", "ctypes grid", "ctypes text", "ctypes structures"}
TORCH_GIVES_OTHER_VALUES = {name for name in KINDS if "conjugate" in name} - {"own conjugate", "resolved conjugate"}
TORCH_GIVES_OTHER_VALUES |= {"negative"}
# Their items lie side by side in the workers.
CLOSES_GAPS = {"array with gaps"}


def described(obj):
    """Whatever of an object a program may see."""
    seen = {"type": f"{type(obj).__module__}.{type(obj).__qualname__}"}
    if isinstance(obj, torch.Tensor):
        plain = obj.detach().to_dense()
        seen |= {"dtype": obj.dtype, "shape": obj.shape, "layout": obj.layout, "grad": obj.requires_grad}
        seen |= {"conjugate": obj.is_conj(), "negative": obj.is_neg(), "leaf": obj.is_leaf}
        seen |= {"stride": obj.stride() if obj.layout is torch.strided else None}
        seen |= {"value": plain.resolve_conj().resolve_neg().tolist()}
    elif isinstance(obj, np.ndarray):
        seen |= {"dtype": obj.dtype, "aligned": obj.dtype.isalignedstruct, "shape": obj.shape, "strides": obj.strides}
        seen |= {"writable": obj.flags.writeable, "value": np.ma.getdata(obj).tolist()}
        seen |= {"mask": np.ma.getmaskarray(obj).tolist() if isinstance(obj, np.ma.MaskedArray) else None}
    elif isinstance(obj, (ctypes.Array, ctypes.Structure)):
        seen |= {"value": bytes(obj)}
    elif isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
        seen |= {"dtype": getattr(obj, "dtype", None), "value": list(obj)}
    else:
        seen |= {"dtype": getattr(obj, "dtype", None), "value": repr(obj.value if hasattr(obj, "value") else obj)}
    return seen


class Kinds:
    def __len__(self):
        return len(KINDS)

    def __getitem__(self, index):
        obj = list(KINDS.values())[index]()
        try:
            ForkingPickler.dumps(obj)
        except Exception as error:  # what torch's worker would hang after
            return error
        return obj


def as_is(sample):
    return sample


@pytest.fixture(scope="module")
def of_torch():
    """What torch's loader delivers, or the error of sending it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(Kinds(), None, num_workers=1, collate_fn=as_is, multiprocessing_context="fork")
        return dict(zip(KINDS, loader, strict=True))


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_batch_it_is_what_torch_delivers(kind, of_torch):
    obj, wanted = KINDS[kind](), of_torch[kind]
    encoded = encode({"it": obj}, known_classes=True)
    got = described(decode(encoded.skeleton, [*map(copied, encoded.buffers)])["it"])
    assert isinstance(wanted, Exception) == (kind in TORCH_REFUSES)
    want = described(obj if kind in TORCH_REFUSES else wanted)
    if kind in TORCH_GIVES_OTHER_VALUES:
        assert want["value"] != described(obj)["value"]
        want = described(obj)
    assert got == want


def described_in_a_worker(obj):
    """A failed test would keep the image."""
    image = Image.write(Contents(encode_for_worker({"it": obj})))
    return described(decode(*open_image(image.address))["it"])


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_dataset_it_is_what_a_fork_leaves(kind):
    obj = KINDS[kind]()
    got, want = described_in_a_worker(obj), described(obj)
    if kind in CLOSES_GAPS:
        del want["strides"], got["strides"]
    assert got == want


@pytest.mark.parametrize("view", [memoryview(b"abc"), memoryview(np.arange(3))])
@pytest.mark.parametrize("encode", [encode, encode_for_worker])
def test_a_view_of_memory_is_refused(view, encode):
    """As pickle refuses it; cloudpickle would send bytes."""
    with pytest.raises(TypeError, match="cannot pickle 'memoryview' object: keep the object that it is a view of"):
        encode(view)
