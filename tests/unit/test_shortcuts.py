"""Every kind of object that the pickler treats in its own way: the same as what torch's workers give, or a fork leaves.

In batches the measure is what arrives between torch's processes, in datasets the object itself. What differs is in
tables.
"""

import array
import ctypes
import pickle
import tempfile
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from rayloader.actors.image import Contents, Image, open_image
from rayloader.transport.codec import decode, encode
from rayloader.transport.raw import copied
from rayloader.transport.replica import encode_for_worker

RECORDS = np.array([(1, 2.5, b"ab"), (3, 4.5, b"c")], dtype=[("i", "<i4"), ("f", "<f8"), ("s", "S3")])


class OwnTensor(torch.Tensor):
    pass


class InfoArray(np.ndarray):
    """As in NumPy's page "Subclassing ndarray"."""

    def __new__(cls, values, info=None):
        self = np.asarray(values).view(cls)
        self.info = info
        return self

    def __array_finalize__(self, other):
        if other is not None:
            self.info = getattr(other, "info", None)


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


def real():
    return torch.arange(6.0).reshape(2, 3)


def conjugated():
    return (real() * (1 + 2j)).conj()


def read_only(values):
    values.flags.writeable = False
    return values


def mapped():
    with tempfile.NamedTemporaryFile() as file:
        np.arange(1000.0).tofile(file.name)
        return np.memmap(file.name, np.float64, "c", shape=(10, 100))


def with_attributes(obj, **attributes):
    for name, value in attributes.items():
        setattr(obj, name, value)
    return obj


def hard():
    masked = np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0], fill_value=7.0)
    masked.harden_mask()
    return with_attributes(masked, note="x")


def masked_records():
    return np.ma.array([(1, 2.0), (3, 4.0)], mask=[(0, 1), (1, 0)], dtype="i4, f8")


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 3)], layout=layout)


def per_channel():
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(torch.arange(12.0).reshape(3, 4), scales, zeros, 0, torch.qint8)


KINDS = {
    "bytes": lambda: b"abc",
    "bytearray": lambda: bytearray(b"abc"),
    "array": lambda: array.array("q", [1000, 1001]),
    "ctypes number": lambda: ctypes.c_ushort(5),
    "ctypes array": lambda: (ctypes.c_int * 3)(1, 2, 3),
    "ctypes structure": lambda: Pair(1, 2.0),
    "ctypes structures": lambda: (Pair * 2)((1, 2.0), (3, 4.0)),
    "scalar": lambda: np.float16(1.5),
    "record scalar": lambda: RECORDS[0],
    "aligned records": lambda: np.zeros(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "record array": lambda: RECORDS.view(np.recarray),
    "row of a memory map": lambda: mapped()[3],
    "array with attributes": lambda: InfoArray(np.arange(120.0).reshape(10, 12).T, ["x"]),
    "read-only array with attributes": lambda: read_only(InfoArray(np.arange(100), 1)),
    "objects with attributes": lambda: InfoArray([None, {}], "objects"),
    "masked array": lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    "hard mask": hard,
    "masked records": masked_records,
    "masked": lambda: np.ma.masked,
    "parameter": lambda: torch.nn.Parameter(real()),
    "own tensor": lambda: real().as_subclass(OwnTensor),
    "conjugate": conjugated,
    "own conjugate": lambda: conjugated().as_subclass(OwnTensor),
    "negative": lambda: torch._neg_view(real()),
    "tensor with attributes": lambda: with_attributes(real(), note="x"),
    "frozen parameter with attributes": lambda: with_attributes(torch.nn.Parameter(real(), False), note="x"),
    "sparse": lambda: real().to_sparse(),
    "sparse rows": lambda: torch.eye(4).to_sparse_csr(),
    "sparse blocks of rows": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse parameter": lambda: torch.nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False),
    "sparse that requires grad": lambda: real().to_sparse().requires_grad_(),
    "quantized": lambda: torch.quantize_per_tensor(real(), 0.1, 3, torch.quint8),
    "quantized by channel": per_channel,
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "without memory": lambda: torch.empty(3, 4, device="meta"),
    "storage": lambda: real().untyped_storage(),
    "typed storage": lambda: torch.TypedStorage([1.0, 2.0], device="cpu"),
}

TORCH_REFUSES = {"ctypes array", "ctypes structures"}
# Of these torch gives other values, or drops attributes, that they require grad, or how they are quantized.
TORCH_CHANGES = {name for name in KINDS if "conjugate" in name or "quantized" in name} - {"own conjugate"}
TORCH_CHANGES |= {"negative", "tensor with attributes", "frozen parameter with attributes", "row of a memory map"}
TORCH_CHANGES |= {"sparse parameter", "sparse that requires grad"}


def described(obj):
    """Whatever of an object a program may see."""
    seen = {"type": f"{type(obj).__module__}.{type(obj).__qualname__}"}
    attributes = {key: value for key, value in getattr(obj, "__dict__", {}).items() if key != "_mmap"}
    seen |= {"attributes": repr(attributes), "note": getattr(obj, "note", None)}
    if isinstance(obj, torch.Tensor):
        seen |= {"dtype": obj.dtype, "layout": obj.layout, "grad": obj.requires_grad, "device": obj.device}
        seen |= {"conjugate": obj.is_conj(), "negative": obj.is_neg(), "leaf": obj.is_leaf}
        seen |= {"stride": obj.stride() if obj.layout is torch.strided and not obj.is_nested else None}
        seen |= {"coalesced": obj.layout is torch.sparse_coo and obj.is_coalesced()}
        seen |= {"quantized": (obj.qscheme(), obj.int_repr().tolist()) if obj.is_quantized else None}
        seen |= {"attributes": None} if obj.is_nested else {}
        parts = obj.detach().unbind() if obj.is_nested else [obj.detach()]
        seen |= {"shapes": [part.shape for part in parts], "value": [*map(value_of, parts)]}
    elif isinstance(obj, np.ndarray):
        seen |= {"dtype": obj.dtype, "aligned": obj.dtype.isalignedstruct, "shape": obj.shape, "strides": obj.strides}
        seen |= {"writable": obj.flags.writeable, "value": np.ma.getdata(obj).tolist()}
        seen |= {"mask": np.ma.getmaskarray(obj).tolist() if isinstance(obj, np.ma.MaskedArray) else None}
        seen |= {"hard": getattr(obj, "hardmask", None), "no mask": getattr(obj, "mask", None) is np.ma.nomask}
    elif isinstance(obj, (ctypes.Array, ctypes.Structure)):
        seen |= {"value": bytes(obj)}
    elif isinstance(obj, (torch.UntypedStorage, torch.TypedStorage)):
        seen |= {"dtype": getattr(obj, "dtype", None), "value": list(obj), "attributes": None}
    else:
        seen |= {"dtype": getattr(obj, "dtype", None), "value": repr(obj.value if hasattr(obj, "value") else obj)}
    return seen


def value_of(tensor):
    if tensor.device.type == "meta":
        return None
    tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().tolist()


pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's own: deprecated, beta, experimental
    pytest.mark.parametrize("kind", KINDS),
]


def test_in_a_batch_it_is_what_torch_delivers(kind):
    obj = KINDS[kind]()
    encoded = encode({"it": obj}, known_classes=True)
    assert b"_load_from_bytes" not in encoded.skeleton, "torch's own pickling, with the memory inside"
    got = described(decode(encoded.skeleton, [*map(copied, encoded.buffers)])["it"])
    if kind in TORCH_REFUSES:
        with pytest.raises(Exception, match="pickle"):
            ForkingPickler.dumps(obj)
    elif kind not in TORCH_CHANGES:
        obj = pickle.loads(ForkingPickler.dumps(obj))
    assert got == described(obj)


def test_in_a_dataset_it_is_what_a_fork_leaves(kind):
    obj = KINDS[kind]()
    image = Image.write(Contents(encode_for_worker({"it": obj})))
    got = described(decode(*open_image(image.address))["it"])
    del image  # which a failed test would keep
    assert got == described(obj)
