"""Map-style datasets of the conformance cases: tiny, and equal in every process that builds them.

Imported by the reference process, by pytest and by the worker processes. No global here ever changes: whatever a
dataset adds at random comes from the generators that a worker is seeded with, or from its own.
"""

import decimal
import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.error
import warnings
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, TensorDataset, get_worker_info

LENGTH = 17

Point = namedtuple("Point", ["x", "y", "extra"])


@dataclass
class Sample:
    image: torch.Tensor
    label: int
    name: str


class Money:
    """A type that default_collate doesn't know."""

    def __init__(self, cents):
        self.cents = cents


class TensorWithUnit(torch.Tensor):
    """A tensor subclass."""


def tensors(length=LENGTH):
    values = torch.arange(length * 3, dtype=torch.float32).reshape(length, 3) / 7
    return TensorDataset(values, torch.arange(length))


def records(length=LENGTH):
    """A plain list of dicts, which is a map-style dataset too."""
    return [{"id": i, "name": f"sample {i}", "weight": i / 3, "raw": bytes([i])} for i in range(length)]


class SharedCache(Dataset):
    """Each sample counts in its own cell of a tensor that driver and workers share."""

    def __init__(self, length=LENGTH):
        self.cells = torch.zeros(length, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.cells)

    def __getitem__(self, index):
        self.cells[index] += 1
        return int(self.cells[index])


class Sized(Dataset):
    def __init__(self, length=LENGTH):
        self.length = length

    def __len__(self):
        return self.length


class Noisy(Sized):
    """Dicts that mix the index with draws from the three global generators."""

    def __getitem__(self, index):
        return {
            "index": index,
            "python": random.random(),
            "numpy": np.random.rand(2),
            "torch": torch.rand(3),
        }


class Arrays(Sized):
    """Tuples of NumPy arrays and scalars, one of them drawn by NumPy."""

    def __getitem__(self, index):
        noise = np.random.normal(size=(2, 2)).astype(np.float32)
        return np.full((2, 3), index, dtype=np.int16), np.float64(index) / 3, noise


class Whole(Sized):
    """Answers index lists at once (`__getitems__`), with one draw per call and the worker's own facts."""

    def __getitem__(self, index):
        return torch.tensor(index) + torch.rand(())

    def __getitems__(self, indices):
        info = get_worker_info()
        worker = (-1, 0, 0) if info is None else (info.id, info.num_workers, info.seed)
        noise = torch.rand(())
        return [(torch.tensor(index) + noise, *worker) for index in indices]


class Points(Sized):
    """Named tuples with nested containers and a draw from `random`."""

    def __getitem__(self, index):
        extra = {"pair": (index, [float(index), torch.tensor([index, -index])]), "text": f"#{index}"}
        return Point(torch.full((2, 2), float(index)), random.randrange(1000), extra)


def settings():
    """What settings of torch, NumPy and Python do in this process."""
    ones = torch.ones(2, 2)
    return {
        "autocast": (str((ones @ ones).dtype), str(torch.get_autocast_dtype("cpu")), torch.is_autocast_cache_enabled()),
        "denormal": float(torch.tensor(1e-310, dtype=torch.float64) / 2),
        "NumPy's errors": str(np.geterr()),
        "third": str(decimal.Decimal(1) / 3),
        "matmul precision": torch.get_float32_matmul_precision(),
        "recursion limit": sys.getrecursionlimit(),
        "printed": str(torch.tensor(1.23456)) + str(np.array([1.23456])),
    }


class Facts(Sized):
    """What a worker knows about itself and about its process."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.path = [os.path.abspath(entry) for entry in sys.path]

    def __getitem__(self, index):
        info = get_worker_info()
        grad = torch.ones(1, requires_grad=True) * 2
        return {
            "index": index,
            "info": None if info is None else (info.id, info.num_workers, info.seed, info.dataset is self),
            "method": None if info is None else (info.worker_method, info.rng),
            "threads": torch.get_num_threads() if info else 1,
            "seed": torch.initial_seed(),
            "dtype": str(torch.get_default_dtype()),
            "made": torch.tensor([1.5]) + index,
            "niceness": os.nice(0),
            "main_thread": threading.current_thread() is threading.main_thread(),
            "grad": grad.requires_grad,
            "inference": torch.is_inference_mode_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "settings": settings(),
            "not on the path": [entry for entry in self.path if entry not in map(os.path.abspath, sys.path)],
        }


class Surroundings(Facts):
    """And what a process inherits by fork."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.arguments = list(sys.argv)

    def __getitem__(self, index):
        os.umask(umask := os.umask(0o022))
        return super().__getitem__(index) | {
            "arguments": sys.argv == self.arguments,
            "folder": os.path.basename(os.getcwd()),
            "variable": os.environ.get("CONFORMANCE_VARIABLE"),
            "cores": sorted(os.sched_getaffinity(0)),
            "hour": time.localtime(0).tm_hour,
            "umask": umask,
        }


class Kinds(Sized):
    """One tensor of each kind that a batch of stacked tensors can hold."""

    def __getitem__(self, index):
        base = torch.arange(6).reshape(2, 3) + index
        dtypes = [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.uint8, torch.complex64]
        kinds = {str(dtype): base.to(dtype) for dtype in dtypes}
        kinds["float8"] = base.to(torch.float8_e4m3fn).view(torch.uint8)
        kinds["scalar"] = torch.tensor(index, dtype=torch.int32)
        kinds["empty"] = torch.empty(0, 3)
        kinds["nan"] = torch.tensor([float("nan"), -0.0, float("inf")])
        kinds["transposed"] = base.t()
        kinds["channels_last"] = torch.zeros(2, 3, 4).permute(1, 2, 0) + index
        return kinds


class Views(Sized):
    """Views of one big storage. No randomness: what is compared is shape, stride and who shares memory."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.storage = torch.arange(length * 64, dtype=torch.float32).reshape(length, 8, 8)

    def __getitem__(self, index):
        image = self.storage[index]
        return {
            "row": image[1],
            "column": image[:, 2],
            "transposed": image.t(),
            "step": image[::3, 1::2],
            "expanded": image[0, :1].expand(4, 1),
            "flipped": np.flip(image.numpy().copy(), 0),
            "fortran": np.asfortranarray(image.numpy()),
            "structured": np.array([(index, 0.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
            "dates": np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
            "words": np.array(["a", "bc"]),
            "objects": np.array([None, "x", 3], dtype=object),
        }


class Exotic(Sized):
    """What does not stack: sparse, nested, parameters, subclasses, custom objects. Needs `batch_size=None`."""

    def __getitem__(self, index):
        dense = torch.eye(3) * index
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of features in beta state
            compressed = dense.to_sparse_csr()
            nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3) * index])
        shared = torch.arange(4.0) + index
        return {
            "coo": dense.to_sparse(),
            "csr": compressed,
            "nested": nested,
            "parameter": torch.nn.Parameter(torch.ones(2) * index),
            "leaf": torch.full((2,), float(index), requires_grad=True),
            "subclass": torch.ones(2).mul(index).as_subclass(TensorWithUnit),
            "money": Money(index),
            "sample": Sample(torch.ones(1), index, f"sample {index}"),
            "set": {index},
            "frozen": frozenset([index]),
            "none": None,
            "range": range(index),
            "type": Sample,
            "dtype": torch.float16,
            "device": torch.device("cpu"),
            "size": torch.Size([2, index]),
            "slice": slice(1, None, 2),
            "array": bytearray(b"abc"),
            "complex": complex(index, 1),
            "big": 1 << 80,
            "same": (shared, shared),
            "overlapping": (shared[1:], shared[:3]),
        }


class Stacking(Sized):
    """Tensors on whose stacking torch's default_collate differs between workers and the main process."""

    KINDS = ("image", "image batch", "widening", "narrowing", "integers", "shapes", "gradient", "subclass", "mixed")

    def __init__(self, kind, length=LENGTH):
        super().__init__(length)
        self.kind = kind

    def __getitem__(self, index):
        value = torch.full((3,), index / 3)
        odd = index % 2
        if self.kind == "image":
            return torch.arange(24.0).reshape(4, 2, 3).permute(2, 0, 1) + index
        if self.kind == "image batch":
            return (torch.arange(24.0).reshape(1, 4, 2, 3).permute(0, 3, 1, 2) + index).contiguous(
                memory_format=torch.channels_last
            )
        if self.kind == "widening":
            return value.double() if odd else value
        if self.kind == "narrowing":
            return value if odd else value.double()
        if self.kind == "integers":
            return value.int() if odd else value.long()
        if self.kind == "shapes":
            return value[:2] if odd else value
        if self.kind == "gradient":
            return value.requires_grad_()
        if self.kind == "subclass":
            return value.as_subclass(TensorWithUnit)
        return Money(index) if odd else value


class Growing(Sized):
    """Tensors of different sizes, for collate functions of the user's own; default_collate can't stack them."""

    def __getitem__(self, index):
        return torch.arange(index % 4 + 1)

    def pad(self, batch):
        """A bound method as collate_fn."""
        return torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-self.length)


class Stateful(Sized):
    """Counts its calls and keeps generators of its own: shows which copy of the dataset an epoch works on."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.calls = 0
        self.scale = 1
        self.offset = torch.zeros(2)
        self.python = random.Random(1)
        self.numpy = np.random.default_rng(2)
        self.prepared = 0

    def prepare(self, worker_id):
        """A bound method as worker_init_fn: it must see the dataset that the worker reads."""
        self.prepared = 100 * (worker_id + 1)

    def __getitem__(self, index):
        self.calls += 1
        own = self.python.random(), float(self.numpy.random())
        return index * self.scale, self.calls, self.prepared, self.offset + 1, own


class OwnGenerator(Sized):
    """Draws from a torch.Generator that it holds."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.generator = torch.Generator().manual_seed(9)

    def __getitem__(self, index):
        return torch.rand(2, generator=self.generator) + index


class Located(Sized):
    """Tells which worker read the sample."""

    def __getitem__(self, index):
        info = get_worker_info()
        return index, -1 if info is None else info.id


class PrivateWrites(Sized):
    """Writes into its own plain tensors and arrays: each worker has its copy, whose views stay views."""

    def __init__(self, length=LENGTH):
        super().__init__(length)
        self.tensor = torch.zeros(length + 3)
        self.view = self.tensor[3:]
        self.array = np.zeros(length)
        self.same = self.array

    def __getitem__(self, index):
        self.view[index] += 1
        self.same[index] -= 1
        return float(self.tensor.sum()), float(self.array.sum())


class Monies(Sized):
    def __getitem__(self, index):
        return Money(index), index


class ByName(Dataset):
    """Samples are asked for by name: indices needn't be numbers."""

    def __init__(self, names):
        self.values = {name: len(name) + i / 10 for i, name in enumerate(names)}

    def __len__(self):
        return len(self.values)

    def __getitem__(self, name):
        return name, self.values[name]


class Echo(Sized):
    """Gives back the index as it came, with its type."""

    def __getitem__(self, index):
        return type(index).__name__, repr(index)


class NestedLoader(Sized):
    """Runs torch's in-process loader inside a worker."""

    def __getitem__(self, index):
        inner = TorchDataLoader(Noisy(4), batch_size=2, shuffle=True)
        return index, [batch["index"] for batch in inner]


def local_dataset():
    """A dataset class that no other process can import, holding a closure."""
    offset = torch.arange(3)

    class Local(Sized):
        def __init__(self):
            super().__init__()
            self.function = lambda index: offset * index

        def __getitem__(self, index):
            return {"value": self.function(index), "noise": random.random()}

    return Local()


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")


class WithMessage(Exception):
    """Has a `message` at class level, which torch passes by keyword."""

    message = "none"

    def __init__(self, message):
        super().__init__(message)
        self.message = message


def fail(how):
    """Raise one of the ways in which user code fails."""
    if how == "value":
        raise ValueError("a value\nin two lines")
    if how == "key":
        raise KeyError("missing key")
    if how == "lookup":
        return {}["absent"]
    if how == "two arguments":
        raise TwoArguments(7, "no such thing")
    if how == "message":
        raise WithMessage("said by keyword")
    if how == "stop":
        raise StopIteration("enough")
    if how == "chained":
        try:
            _ = [][1]
        except IndexError as error:
            raise RuntimeError("outer") from error
    if how == "file":
        with open("no such file"):
            pass
    if how == "unicode":
        return b"\xff".decode("utf-8")
    if how == "local":

        class LocalError(Exception):
            pass

        raise LocalError("from inside a function")
    if how == "assertion":
        raise AssertionError
    if how == "exit":
        raise SystemExit(3)
    raise NotImplementedError(how)


@dataclass(frozen=True)
class Frozen(Exception):
    """Not even its traceback may be set in Python."""

    reason: str


@dataclass
class FieldsError(Exception):
    code: int
    reason: str


class KeywordError(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")


class PickyError(Exception):
    """Its constructor refuses torch's text."""

    def __init__(self, text):
        if "\n" in text:
            raise LookupError("one line only")
        super().__init__(text)


class ReducedError(Exception):
    """Pickles in its own way."""

    def __init__(self, code, reason):
        super().__init__(reason)
        self.code = code

    def __reduce__(self):
        return type(self), (self.code, self.args[0])


class RefusingError(Exception):
    """Refuses to be pickled, and to have attributes."""

    def __reduce__(self):
        raise TypeError("never")

    def __setattr__(self, name, value):
        raise TypeError(f"no attribute {name}")


class NewError(Exception):
    def __new__(cls, code, reason):
        return super().__new__(cls, code, reason)


class OtherKind(Exception):
    """Made of one string, it is something else."""

    def __new__(cls, text):
        return super().__new__(cls, text) if "\n" not in text else ValueError(text)


OWN = [
    lambda: TwoArguments(7, "no such thing"),
    lambda: Frozen("never thawed"),
    lambda: FieldsError(7, "no such thing"),
    lambda: KeywordError(code=7),
    lambda: PickyError("one line"),
    lambda: ReducedError(7, "no such thing"),
    lambda: RefusingError("alone"),
    lambda: NewError(7, "no such thing"),
    lambda: OtherKind("said"),
]
LIBRARY = [
    lambda: OSError(errno.ENOSPC, "full", "a file"),
    lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "a reason"),
    lambda: subprocess.CalledProcessError(3, ["command"]),
    lambda: json.JSONDecodeError("unexpected", "text", 1),
    lambda: urllib.error.HTTPError("http://host", 404, "not there", {}, None),
    lambda: ImportError("not there", name="module", path="file"),
    lambda: SyntaxError("bad", ("file", 1, 2, "text")),
    lambda: StopAsyncIteration("enough"),
    lambda: torch.OutOfMemoryError("too much"),
    lambda: UserWarning("beware"),
]


class Odd(Dataset):
    """Each sample raises an exception of another class; those that torch loses are in tests/unit/test_caught.py."""

    def __init__(self, which):
        self.makers = {"own": OWN, "library": LIBRARY}[which]

    def __len__(self):
        return len(self.makers)

    def __getitem__(self, index):
        raise self.makers[index]()


class Failing(Sized):
    """Draws a number, and fails at certain indices: the draws show that the worker goes on where it was."""

    def __init__(self, how, at=(5, 11), length=LENGTH):
        super().__init__(length)
        self.how = how
        self.at = at

    def __getitem__(self, index):
        noise = random.random()
        if index in self.at:
            fail(self.how)
        return index, noise


class Unsupported(Sized):
    """default_collate refuses these."""

    def __getitem__(self, index):
        return Money(index) if index % 5 == 0 else torch.tensor(index)
