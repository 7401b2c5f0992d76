"""What a batch is when it arrives: the user's own, writable, as it left the worker."""

import collections
import threading
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset, TensorDataset

from probes import Calls, load
from rayloader import DataLoader
from rayloader.transport import codec

pytestmark = pytest.mark.usefixtures("ray_session")

INLINE_LIMIT = 100 * 1024  # bytes; what is larger travels through Ray's object store
SIZES = [10, INLINE_LIMIT // 8 + 1, 3_000_000]  # in int64: inline, just over the limit, 24 MB


def numbers(size):
    return lambda index: torch.arange(size) + index


@pytest.mark.parametrize("size", SIZES)
def test_batches_are_writable_and_private(size):
    kept = []
    for batch in load(numbers(size), 4, num_workers=2, persistent_workers=True):
        expected = torch.arange(size) + len(kept)
        assert torch.equal(batch, expected)
        batch.neg_()
        kept.append(batch)
    for index, batch in enumerate(kept):  # no write showed in another batch, or was undone
        assert torch.equal(batch, -(torch.arange(size) + index))


@pytest.mark.parametrize("size", SIZES)
def test_a_write_does_not_reach_the_dataset_of_a_persistent_worker(size):
    loader = DataLoader(torch.zeros(2, size), None, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in loader:
            assert batch.count_nonzero() == 0
            batch.fill_(1)


@pytest.mark.parametrize("size", SIZES)
def test_arrays_are_writable(size):
    for index, array in enumerate(load(lambda index: np.arange(size) + index)):
        assert array.flags.writeable
        array += 1
        assert (array == np.arange(size) + index + 1).all()


def test_a_kept_batch_outlives_its_loader():
    size = SIZES[-1]
    kept = [next(iter(load(numbers(size), 2, num_workers=1))) for _ in range(2)]
    for batch in load(numbers(size), 6, num_workers=2):
        batch.fill_(-1)
    assert all(torch.equal(batch, torch.arange(size)) for batch in kept)


def test_small_parts_of_a_batch_do_not_keep_all_of_it():
    big, small = next(iter(load(lambda index: (torch.zeros(1_000_000), torch.ones(2)), 1)))
    assert small.untyped_storage().nbytes() < 1000 < big.untyped_storage().nbytes()


def test_a_view_of_a_big_storage_is_not_shipped_whole():
    def views(index):
        big = torch.arange(10_000_000)
        return big[5:10], big[1000:1010:3]

    first, second = next(iter(load(views, 1)))
    assert (first.tolist(), second.tolist()) == ([5, 6, 7, 8, 9], [1000, 1003, 1006, 1009])
    assert first.untyped_storage().nbytes() < 10_000
    assert sum(buffer.nbytes for buffer in codec.encode(views(0)).buffers) < 10_000


def test_strides_and_offsets_survive():
    def make(index):
        return torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1), torch.arange(10)[::3], torch.zeros(1).expand(5)

    for arrived, sent in zip(next(iter(load(make, 1))), make(0), strict=True):
        assert torch.equal(arrived, sent)
        assert (arrived.stride(), arrived.dtype) == (sent.stride(), sent.dtype)


def test_a_parameter_survives():
    def make(index):
        return torch.nn.Parameter(torch.full((2,), 3.0)), torch.ones(2, requires_grad=True)

    parameter, leaf = next(iter(load(make, 1)))
    assert type(parameter) is torch.nn.Parameter
    (parameter * leaf).sum().backward()
    assert (parameter.grad.tolist(), leaf.grad.tolist()) == ([1, 1], [3, 3])


def test_tensors_that_shared_memory_share_it_again():
    def make(index):
        tensor = torch.zeros(4)
        return {"whole": tensor, "tail": tensor[2:], "again": tensor}

    batch = next(iter(load(make, 1)))
    assert batch["again"] is batch["whole"]
    batch["tail"].fill_(7)
    assert batch["whole"].tolist() == [0, 0, 7, 7]


LAYOUTS = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "sparse_coo": lambda: torch.eye(3).to_sparse(),
    "sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state):UserWarning")
# The first nested tensor has torch import its compiler, which takes five seconds; test_shortcuts.py has one too.
@pytest.mark.parametrize("layout", [pytest.param("nested", marks=pytest.mark.full), "sparse_coo", "sparse_csr"])
def test_nested_and_sparse_tensors_survive(layout):
    make = LAYOUTS[layout]
    arrived, sent = next(iter(load(lambda index: make(), 1))), make()
    assert (arrived.layout, arrived.is_nested, type(arrived)) == (sent.layout, sent.is_nested, type(sent))
    for mine, theirs in zip(arrived.unbind(), sent.unbind(), strict=True) if sent.is_nested else [(arrived, sent)]:
        assert torch.equal(mine.to_dense(), theirs.to_dense())


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16]
)
def test_dtypes_survive(dtype):
    arrived = next(iter(load(lambda index: torch.tensor([1, 0, 1]).to(dtype), 1)))
    assert arrived.dtype is dtype
    assert arrived.to(torch.complex64).tolist() == [1, 0, 1]


Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    name: str
    value: torch.Tensor


class Custom:
    def __init__(self, value):
        self.value = value


CONTAINERS = {
    "dict": lambda index: {"a": torch.tensor([index]), "b": [index, "text"]},
    "ordered dict": lambda index: collections.OrderedDict(b=index, a=1.5),
    "tuple": lambda index: (index, torch.tensor([index]), b"bytes", None),
    "namedtuple": lambda index: Pair(index, torch.tensor([index])),
    "dataclass": lambda index: Record("name", torch.tensor([index])),
    "custom": lambda index: Custom(torch.tensor([index])),
    "set": lambda index: {index, 100},  # a set of strings has another order in each process
    "simple namespace": lambda index: types.SimpleNamespace(value=index),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_keep_their_type_and_content(container):
    make = CONTAINERS[container]
    for index, arrived in enumerate(load(make)):
        sent = make(index)
        assert type(arrived) is type(sent)
        content = (arrived, sent) if not hasattr(sent, "__dict__") else (vars(arrived), vars(sent))
        assert str(content[0]) == str(content[1])


def test_collated_containers_are_torchs():
    data = StackDataset(x=torch.arange(4.0), pair=[Pair(k, {"k": k}) for k in range(4)], name=list("abcd"))
    for mine, torchs in zip(DataLoader(data, 2, num_workers=2), DataLoader(data, 2), strict=True):
        assert type(mine["pair"]) is Pair
        assert str(mine) == str(torchs)


def test_without_batching_arrays_become_tensors_and_ints_stay_ints():
    def get(index):
        return {"array": np.ones(2), "int": 3, "float": 0.5, "text": "t"}

    for num_workers in (0, 1):
        (batch,) = DataLoader(Calls(get, 1), None, num_workers=num_workers)
        assert torch.equal(batch.pop("array"), torch.ones(2, dtype=torch.float64))
        assert batch == {"int": 3, "float": 0.5, "text": "t"}
        assert type(batch["int"]) is int


def test_a_batch_may_be_none_or_empty():
    assert list(load(lambda index: None)) == [None, None]
    assert list(load(lambda index: [])) == [[], []]
    assert [batch.shape for batch in load(lambda index: torch.empty(0, 3))] == [(0, 3)] * 2


def test_batches_may_be_passed_to_another_thread_and_dropped_there():
    sums = []

    def consume(batches):
        while batches:
            sums.append(batches.popleft().sum().item())

    batches = collections.deque(load(numbers(SIZES[1]), 4, num_workers=2))
    thread = threading.Thread(target=consume, args=(batches,))
    thread.start()
    thread.join()
    size = SIZES[1]
    assert sums == [size * (size - 1) // 2 + size * index for index in range(4)]


def test_the_class_of_a_local_batch_is_the_drivers_own():
    class Local:
        def __init__(self, index):
            self.index = index

    first, second = load(Local)
    assert type(first) is type(second) is Local
    assert (first.index, second.index) == (0, 1)


def test_tensor_dataset():
    data = TensorDataset(torch.arange(6).view(3, 2), torch.arange(3))
    (xs, ys), (x, y) = DataLoader(data, 2, num_workers=2)
    assert (xs.tolist(), ys.tolist(), x.tolist(), y.tolist()) == ([[0, 1], [2, 3]], [0, 1], [[4, 5]], [2])


def test_worker_side_changes_after_sending_do_not_show():
    state = torch.zeros(SIZES[1])

    def get(index):
        state.add_(1)
        return state

    assert [batch[0].item() for batch in load(get, 3, num_workers=1)] == [1, 2, 3]
