"""A seal says whether a state is what it was, also where a file format has made lists of its tuples."""

import json

import pytest
import torch

from rayloader import StateError
from rayloader.state.seal import check_seal, sealed

PARTS = {
    "numbers": [1, 2.5, True, None],
    "pairs": [[1, 2], (3, 4)],
    "sizes": [torch.Size([1, 2])],
    "mixed": {"deep": [(1, "x"), None, [[(5,)]]], "text": "abc"},
    "empty": [],
}
NAMES = {*PARTS, "seal"}


def test_a_state_that_has_gone_through_json_is_whole():
    check_seal(json.loads(json.dumps(sealed(PARTS, NAMES))), NAMES)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numbers", [1, 2.5, 1, None]),
        ("pairs", [[1, 2], (4, 3)]),
        ("pairs", [[1, 2, 3], (4,)]),
        ("sizes", [torch.Size([1, 3])]),
        ("mixed", {"deep": [(1, "x"), None, [[(6,)]]], "text": "abc"}),
        ("empty", [[]]),
    ],
)
def test_a_part_that_has_changed_is_named(name, value):
    with pytest.raises(StateError, match=name):
        check_seal({**sealed(PARTS, NAMES), name: value}, NAMES)
