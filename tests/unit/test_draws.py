"""What is taken down of a sampler's indices: what they were, whatever becomes of the object."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rayloader.resume.digest import drawn


@dataclass
class Request:
    rows: Any


def of(make, *values):
    """The same kind of indices of other values."""
    return make(torch.tensor(values))


KINDS = {
    "list": torch.Tensor.tolist,
    "tensor": lambda t: t,
    "tensor of a small type": lambda t: t.to(torch.uint8),
    "scattered tensor": lambda t: torch.stack([t, t + 50], 1)[:, 0],
    "list of tensors": list,
    "array": torch.Tensor.numpy,
    "long array": lambda t: np.tile(t.numpy(), 100),
    "scattered array": lambda t: np.tile(t.numpy(), 200)[::2],
    "list of NumPy's numbers": lambda t: list(t.numpy()),
    "dict": lambda t: {"rows": t, "name": "x"},
    "object": Request,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_counts(kind):
    def checksum(*values, before=0):
        return drawn(of(KINDS[kind], *values), before).checksum

    others = [(1, 2, 4), (0, 2, 3), (2, 1, 3), (1, 2, 3, 3)]
    assert len({checksum(1, 2, 3), *(checksum(*other) for other in others)}) == 5
    assert checksum(1, 2, 3) == checksum(1, 2, 3) != checksum(1, 2, 3, before=1)


@pytest.mark.parametrize("start", [0, 3, 100])
def test_where_the_values_lie_does_not_count(start):
    memory = torch.full((200,), start)
    memory[start : start + 3] = torch.tensor([1, 2, 3])
    assert drawn(memory[start : start + 3], 0).checksum == drawn(torch.tensor([1, 2, 3]), 0).checksum
    array = memory.numpy()
    assert drawn(array[start : start + 3], 0).checksum == drawn(np.array([1, 2, 3]), 0).checksum


@pytest.mark.parametrize("kind", ["list", "tensor", "scattered tensor", "array", "long array", "object"])
def test_indices_stay_what_they_were_when_they_were_drawn(kind):
    indices = of(KINDS[kind], 1, 2, 3)
    taken = drawn(indices, 0)
    memory = indices.rows if kind == "object" else indices
    memory[0] = 9
    expected = of(KINDS[kind], 1, 2, 3)
    found, expected = (taken.indices.rows, expected.rows) if kind == "object" else (taken.indices, expected)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
