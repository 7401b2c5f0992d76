"""The parts of a batch that the command line tells."""

import dataclasses
from collections import namedtuple

import numpy as np
import pytest
import torch

from rayloader.cli.parts import MOST_PARTS, parts_in

Pair = namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Sample:
    image: torch.Tensor
    text: str


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (torch.zeros(3), ["batch"]),
        ([torch.zeros(3), ["a", "b"]], ["[0]", "[1]"]),
        ({"x": {"y": torch.zeros(3)}, "z": 1}, ["x.y", "z"]),
        (Pair(torch.zeros(3), torch.zeros(3)), ["image", "label"]),
        ([Sample(torch.zeros(3), "a")], ["[0].image", "[0].text"]),
        ([1, 2, 3], ["batch"]),
        ({}, ["batch"]),
    ],
)
def test_parts_are_named_by_where_they_are(batch, names) -> None:
    assert [part["part"] for part in parts_in(batch)] == names


def test_numbers_have_statistics_of_the_finite_ones() -> None:
    (part,) = parts_in(torch.tensor([1.0, 3.0, torch.nan, torch.inf, -torch.inf]))

    assert part == {
        "part": "batch",
        "kind": "float32 (5,)",
        "least": 1.0,
        "most": 3.0,
        "mean": 2.0,
        "deviation": 1.0,
        "nans": 1,
        "infinite": 2,
    }


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        None,
        object(),
        np.array(["a"]),
        np.array([None]),
        torch.zeros(0),
        ["a"],
        torch.zeros(2, 2).to_sparse(),
    ],
)
def test_what_has_no_numbers_has_no_statistics(value) -> None:
    assert [part.keys() for part in parts_in(value)] == [{"part", "kind"}]


def test_numbers_that_are_none_of_them_finite_are_counted() -> None:
    (part,) = parts_in(np.array([np.nan, np.inf]))

    assert (part["least"], part["mean"], part["nans"], part["infinite"]) == (None, None, 1, 1)


def test_deep_nesting_and_many_parts_end() -> None:
    nested = torch.zeros(1)
    for _ in range(100):
        nested = {"in": nested}

    assert len(parts_in(nested)) == 1
    assert len(parts_in([torch.zeros(1)] * 1000)) == MOST_PARTS
