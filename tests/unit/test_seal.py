"""A seal says whether a state is what it was, also where a file format has made lists of its tuples."""

import collections
import io
import json
import sys
import warnings

import pytest
import torch

from rayloader import StateError
from rayloader.resume.seal import Part, Parts, check_seal, checksum, owned, sealed

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


class Subclass(torch.Tensor):
    def __deepcopy__(self, memo):
        return self.clone()


def rare(kind, value):
    """A tensor of a kind that torch warns of, as new or old."""
    tensor = torch.tensor([value, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        match kind:
            case "compressed":
                return torch.diag(tensor).to_sparse_csr()
            case "nested":
                return torch.nested.nested_tensor([tensor, torch.ones(3)])
            case "quantized":
                return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


OTHERS = {
    "bytes": b"abc",
    "tensor": torch.arange(3),
    "keys": {1: "a", (2, "b"): b"c"},
    "deep": ({"a": [b"x", {"y": 1.5}]}, (torch.zeros(2),)),
    "set": {1, "a"},
    "sets": [{(1, b"x"), frozenset([2])}],
    "array": bytearray(b"abc"),
    "ordered": collections.OrderedDict(a=1, b=2),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "subclass": torch.ones(2).as_subclass(Subclass),
    "sparse": torch.eye(2).to_sparse(),
    "compressed": rare("compressed", 1.0),
    "nested": rare("nested", 1.0),
    "quantized": rare("quantized", 1.0),
    "meta": torch.zeros(3, device="meta"),
    "storage": torch.ones(2).untyped_storage(),
    "number": (5,),
    "huge": [1 << 20000, 10**600],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes", b"abd"),
        ("bytes", "abc"),
        ("bytes", [b"abc"]),
        ("tensor", torch.arange(3, dtype=torch.int32)),
        ("tensor", torch.tensor([0, 1, 3])),
        ("tensor", b"abc"),
        ("keys", {1: "a", (2, "c"): b"c"}),
        ("keys", {True: "a", (2, "b"): b"c"}),
        ("keys", {1: "a"}),
        ("deep", ({"a": [b"x", {"y": 1.25}]}, (torch.zeros(2),))),
        ("deep", ({"a": [b"x", {"z": 1.5}]}, (torch.zeros(2),))),
        ("deep", ({"a": [b"x", {"y": 1.5}]}, (torch.zeros(3),))),
        ("set", {1, "b"}),
        ("set", [1, "a"]),
        ("sets", [{(1, b"y"), frozenset([2])}]),
        ("array", bytearray(b"abd")),
        ("array", b"abc"),
        ("ordered", collections.OrderedDict(b=2, a=1)),
        ("ordered", collections.OrderedDict(a=2, b=1)),
        ("parameter", torch.nn.Parameter(torch.zeros(2))),
        ("parameter", torch.ones(2)),
        ("subclass", torch.zeros(2).as_subclass(Subclass)),
        ("sparse", torch.ones(2, 2).to_sparse()),
        ("sparse", 2 * torch.eye(2).to_sparse()),
        ("compressed", rare("compressed", 0.5)),
        ("nested", rare("nested", 0.5)),
        ("quantized", rare("quantized", 0.5)),
        ("meta", torch.zeros(4, device="meta")),
        ("storage", torch.zeros(2).untyped_storage()),
        ("number", (b"5",)),
        ("number", ({5},)),
        ("huge", [1 << 20001, 10**600]),
        ("huge", [1 << 20000, 10**600 + 1]),
    ],
)
def test_a_part_of_other_kinds_that_has_changed_is_named(name, value):
    names = {*OTHERS, "seal"}
    state = sealed(OTHERS, names)
    check_seal(state, names)
    with pytest.raises(StateError, match=name):
        check_seal({**state, name: value}, names)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (5, b"5"),
        (None, b"None"),
        ([1, 2], b"[1, 2]"),
        ([b"5"], [5]),
        ({5: 1}, {b"5": 1}),
        (b"abc", bytearray(b"abc")),
        (set(), []),
        ({"a": 1}, collections.OrderedDict(a=1)),
    ],
)
def test_other_kinds_with_the_same_text_have_another_checksum(one, other):
    assert checksum(one) != checksum(other)


def test_a_part_that_its_own_seal_stands_in_for_is_named():
    names = {*PARTS, "seal"}
    state = sealed(PARTS, names)
    for name, seal in state["seal"].items():
        with pytest.raises(StateError, match=name):
            check_seal({**state, name: seal}, names)


@pytest.mark.parametrize("seal", [{1: 2, "zz": 3}, {"numbers": torch.zeros(2)}, {"numbers": None}, [], None])
def test_whatever_stands_in_place_of_the_seal_is_refused(seal):
    with pytest.raises(StateError, match="numbers"):
        check_seal({**PARTS, "seal": seal}, NAMES)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's, where it builds rare kinds of tensors
def test_what_was_saved_has_the_same_checksum(name):
    file = io.BytesIO()
    torch.save(OTHERS[name], file)
    file.seek(0)
    assert checksum(torch.load(file, weights_only=False)) == checksum(OTHERS[name])


def test_a_huge_number_has_one_checksum_whatever_the_process_shows_of_numbers():
    before, limit = checksum(OTHERS["huge"]), sys.get_int_max_str_digits()
    try:
        sys.set_int_max_str_digits(0)
        assert checksum(OTHERS["huge"]) == before
        sys.set_int_max_str_digits(640)
        assert checksum(OTHERS["huge"]) == before
        checksum([10**600 - 1])
    finally:
        sys.set_int_max_str_digits(limit)


def test_a_seal_made_of_parts_is_that_of_what_they_hold():
    parts = {name: Part(value) for name, value in OTHERS.items()}
    nested = {"all": Part(parts), "list": [*parts.values()], **parts}
    names = {*nested, "seal"}
    state = sealed(nested, names)
    check_seal(state, names)
    assert state["seal"] == {name: checksum(state[name]) for name in nested}
    assert Part(b"abcd", checksum(b"abcd")).checksum == Part(b"abcd").checksum


@pytest.mark.parametrize("value", [{"a": [1]}, {"a": (1, b"x")}, [1], ([1],), {"a": {"b": 1}}])
def test_each_state_has_contents_of_its_own(value):
    part = Part(value)
    first = owned(part)
    holder = first if not isinstance(first, tuple) else first[0]
    holder.clear()
    assert owned(part) == value
    nested = Part({"inner": part, "number": 1})
    owned(nested)["inner" if isinstance(value, dict) else "number"] = None
    assert owned(nested) == {"inner": value, "number": 1}


def test_what_nobody_can_change_is_shared():
    part = Part((1, (b"x", None)))
    assert owned(part) is owned(part)


def test_a_part_is_made_again_where_it_is_made_of_something_else():
    parts, made = Parts(), []

    def part(made_of):
        return parts.part("name", made_of, lambda: made.append(made_of))

    first, second = object(), object()
    for made_of in (first, first, second, second, first):
        part(made_of)
    assert made == [first, second, first]


@pytest.mark.parametrize("count", [3, 1000])
def test_a_seal_depends_on_names_and_values_and_not_on_the_order_of_a_dict(count):
    numbers = {str(number): number for number in range(count)}
    assert checksum(dict(reversed(numbers.items()))) == checksum(numbers)
    assert checksum({**numbers, "0": 1, "1": 0}) != checksum(numbers)
    assert checksum({name if name != "0" else "other": number for name, number in numbers.items()}) != checksum(numbers)
