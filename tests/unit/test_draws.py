"""What is taken down of a sampler's indices: what they were, whatever becomes of the object."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayloader.resume.digest import drawn

KINDS = {
    "list": torch.Tensor.tolist,
    "tensor": lambda t: t,
    "tensor of a small type": lambda t: t.to(torch.uint8),
    "scattered tensor": lambda t: torch.stack([t, t + 50], 1)[:, 0],
    "array": torch.Tensor.numpy,
    "object": lambda t: SimpleNamespace(rows=t),
    "scattered array": lambda t: np.tile(t.numpy(), 200)[::2],
    "list of NumPy's numbers": lambda t: list(t.numpy()),
    "dict": lambda t: {"rows": t, "name": "x"},
}


def of(kind, *values):
    """The same kind of indices of other values."""
    return KINDS[kind](torch.tensor(values))


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_counts(kind):
    def checksum(*values, before=0):
        return drawn(of(kind, *values), before).checksum

    others = [(1, 2, 4), (0, 2, 3), (2, 1, 3), (1, 2, 3, 3)]
    assert len({checksum(1, 2, 3), *(checksum(*other) for other in others)}) == 5
    assert checksum(1, 2, 3) == checksum(1, 2, 3) != checksum(1, 2, 3, before=1)


@pytest.mark.parametrize("start", [0, 3, 100])
def test_where_the_values_lie_does_not_count(start):
    memory = torch.full((200,), start)
    memory[start : start + 3] = torch.tensor([1, 2, 3])
    for whole, alone in ((memory, torch.tensor([1, 2, 3])), (memory.numpy(), np.array([1, 2, 3]))):
        assert drawn(whole[start : start + 3], 0).checksum == drawn(alone, 0).checksum


@pytest.mark.parametrize("kind", [*KINDS][:6])
def test_indices_stay_what_they_were_when_they_were_drawn(kind):
    indices, same = of(kind, 1, 2, 3), of(kind, 1, 2, 3)
    taken = drawn(indices, 0).indices
    if kind == "object":
        indices, taken, same = indices.rows, taken.rows, same.rows
    indices[0] = 9
    assert type(taken) is type(same)
    assert list(taken) == list(same)
