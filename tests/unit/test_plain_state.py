"""What `state_dict` of the user's objects gives, in a file that `torch.load(weights_only=True)` reads."""

import copy
import io
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from rayloader import StateError
from rayloader.errors import NESTING
from rayloader.resume.state import from_plain, to_plain

STATES = [
    {"a": 1, "b": [2.5, None, True, (b"x", "y")]},
    random.Random(1).getstate(),
    [(), [], {}],
    {1: "a", None: "b", 2.5: "c", ("d", 3): (4,)},
    {2**70: -(2**70), "inf": float("-inf"), "text": "\ud800 \N{SNOWMAN} '"},
    OrderedDict(b=1, a=[2]),
    {1, (2, "b")},
    {"numbers": [np.float64(1.5), np.bool_(True), np.int64(-3)], "array": np.arange(6).reshape(2, 3)[:, ::2]},
    (np.arange(3, dtype=np.uint32), np.arange(3, dtype=np.uint64), np.zeros((2, 0)), np.array(5)),
    np.random.RandomState(1).get_state(legacy=False),
    [(np.arange(count, dtype=np.uint32), b"\xff" * count) for count in (1, 8, 9, 16)],
    [torch.float32, {torch.int8: [torch.int8]}, Counter("aab"), complex(1, 2), torch.arange(3)],
]


def same(a, b):
    if isinstance(a, (np.ndarray, np.generic, torch.Tensor)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        return type(a) is type(b) and same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_a_state_comes_back_from_a_file(state):
    file = io.BytesIO()
    torch.save(to_plain(state), file)
    file.seek(0)
    assert same(from_plain(torch.load(file, weights_only=True)), state)
    assert same(from_plain(pickle.loads(pickle.dumps(to_plain(state)))), state)


@pytest.mark.parametrize(
    "state",
    [
        np.zeros(2, [("a", "i4")]),
        np.array([None]),
        np.array(["text"]),
        np.zeros(2, ">i4"),
        np.zeros(2, ">u4"),
        np.datetime64("2026-01-02"),
        defaultdict(list, a=[np.int64(1)]),
        deque([1]),
    ],
    ids=str,
)
def test_what_torch_has_not_is_left_as_it_is(state):
    """Its file is then torch's matter."""
    assert to_plain(state) is state


def test_an_array_is_packed_and_unpacked_as_a_copy():
    array = np.arange(3)
    packed = to_plain(array)
    array += 1
    from_plain(packed)[:] += 1
    assert from_plain(packed).tolist() == [0, 1, 2]


def nested(kind, levels):
    state = np.int64(1)
    for _ in range(levels):
        state = {"next": state} if kind is dict else kind([state])
    return state


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_state_is_nested_to_a_limit_and_can_be_used_that_far(kind):
    packed = to_plain(nested(kind, NESTING))
    assert from_plain(packed) == nested(kind, NESTING)
    copy.deepcopy(packed)
    torch.save(packed, io.BytesIO())
    with pytest.raises(StateError, match="levels deep"):
        to_plain(nested(kind, NESTING + 1))


def test_a_state_that_holds_itself_is_refused():
    state = [1]
    state.append({"list": [state]})
    with pytest.raises(StateError, match="hold itself"):
        to_plain(state)
