"""What `state_dict` of the user's objects gives, in JSON and in a file that `torch.load(weights_only=True)` reads."""

import copy
import io
import json
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from rayloader import StateError
from rayloader.errors import NESTING
from rayloader.plain_state import _TYPE, pack, unpack

STATES = [
    {"a": 1, "b": [2.5, None, True, (b"x", "y", b"")]},
    random.Random(1).getstate(),
    [(), [], (("rayloader: tuple",), ["rayloader: tuple", 1]), {"rayloader: tuple": ["rayloader: tuple"]}],
    {1: "a", None: "b", 2.5: "c", ("d", 3): (4,), "rayloader: tuple": 5},
    {2**70: -(2**70), "inf": float("-inf"), "text": "\ud800 \N{SNOWMAN} '"},
    OrderedDict(b=np.arange(3), a=deque([1])),
    defaultdict(list, {"x": [np.float32(2)]}),
    defaultdict(None, {3: 4}),
    defaultdict(int),
    deque([1, {"a": pathlib.Path("/tmp/x")}, deque()], maxlen=3),
    deque([1, 2]),
    pathlib.Path("data/train"),
    pathlib.PurePosixPath("/a/b"),
    pathlib.PureWindowsPath("c:/a"),
    np.dtype("float32"),
    np.dtype(">i2"),
    {"dtype": np.dtype(bool)},
    {pathlib.Path("a"): 1, (1, "b"): 2, np.int64(3): 3, np.dtype("f4"): 4},
    OrderedDict([(pathlib.Path("a"), 1)]),
    {_TYPE: "a name that the user chose"},
    {1, (2, "b")},
    frozenset([1, "a"]),
    range(2, 9, 3),
    slice(None, 4),
    [np.float64(1.5), np.bool_(True), np.arange(6).reshape(2, 3)[:, ::2], np.zeros((2, 0), "U3"), np.array(5)],
    np.datetime64("2026-01-02"),
]
# These are left to torch, and JSON does not know them, or makes another type of them.
OF_TORCH = [torch.float32, torch.bfloat16, {torch.int8: [torch.int8]}, Counter("aab"), complex(1, 2), torch.arange(3)]


def same(a, b):
    if isinstance(a, (np.ndarray, np.generic, torch.Tensor)):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict):
        factories = getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
        return type(a) is type(b) and factories and same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple, deque)):
        ends = getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return type(a) is type(b) and ends and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_a_state_comes_back_from_json(state):
    packed = pack(state)
    text = json.dumps(packed)
    assert same(unpack(json.loads(text)), state)
    assert json.dumps(json.loads(text)) == text


@pytest.mark.parametrize("state", [*STATES, *OF_TORCH], ids=lambda state: type(state).__name__)
def test_a_state_comes_back_from_a_file(state):
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    assert same(unpack(torch.load(file, weights_only=True)), state)


def test_what_is_not_known_is_left_as_it_is():
    """Its file is then torch's matter."""
    structured, objects = np.zeros(2, [("a", "i4")]), np.array([None])
    factory = defaultdict(lambda: 3)
    assert pack(structured) is structured
    assert pack(objects) is objects
    assert pack(factory) is factory


def nested(kind, levels):
    state = 1
    for _ in range(levels):
        state = {"next": state} if kind is dict else kind([state])
    return state


@pytest.mark.parametrize("kind", [list, tuple, dict, deque, frozenset])
def test_a_state_is_nested_to_a_limit_and_can_be_used_that_far(kind):
    levels = NESTING // 2 if kind in (deque, frozenset) else NESTING
    packed = pack(nested(kind, levels))
    assert unpack(packed) == nested(kind, levels)
    copy.deepcopy(packed)
    torch.save(packed, io.BytesIO())
    with pytest.raises(StateError, match="levels deep"):
        pack(nested(kind, levels + 1))


def test_a_state_that_holds_itself_is_refused():
    state = [1]
    state.append({"deque": deque([defaultdict(list, {1: state})])})
    with pytest.raises(StateError, match="hold itself"):
        pack(state)


@pytest.mark.parametrize("number", [1 << 20000, -(1 << 20000), 10**600], ids=["huge", "negative", "least"])
def test_a_number_whose_digits_python_may_refuse_to_show_goes_through_json(number):
    assert unpack(json.loads(json.dumps(pack([number])))) == [number]


def test_a_set_is_packed_in_one_order():
    assert pack({1000, 8, 16}) == pack({16, 8, 1000})
