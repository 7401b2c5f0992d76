"""`SharedList`: what it holds, what it gives back, how it travels."""

import pickle
import socket
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayloader import SharedList
from rayloader.transport import codec

ITEMS = st.one_of(
    st.lists(st.text()),
    st.lists(st.text(st.characters(categories=("Cs", "Lu")))),  # lone surrogates, as in undecodable file names
    st.lists(st.binary()),
    st.lists(st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.dictionaries(st.text(), st.integers()))),
)


@given(ITEMS, st.slices(6))
def test_it_behaves_as_the_list_of_its_items(items, cut):
    shared = SharedList(items)
    assert len(shared) == len(items)
    assert list(shared) == items
    assert [type(item) for item in shared] == [type(item) for item in items]
    assert shared == items
    assert items == shared
    assert shared[cut] == items[cut]
    assert list(reversed(shared)) == items[::-1]
    assert pickle.loads(pickle.dumps(shared)) == items
    assert pickle.loads(pickle.dumps(shared[cut])) == items[cut]


def test_indices():
    shared = SharedList(["a", "bc", ""])
    assert (shared[0], shared[-1], shared[-3], shared[torch.tensor(1)], shared[np.int64(2)]) == ("a", "", "a", "bc", "")
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 3 items"):
            shared[index]
    with pytest.raises(TypeError):
        shared["a"]


def test_items_are_new_objects_and_the_list_cannot_be_changed():
    record = {"path": "a", "size": [1]}
    shared = SharedList([record])
    shared[0]["size"].append(2)
    record["size"].append(3)
    assert shared[0] == {"path": "a", "size": [1]}
    with pytest.raises(TypeError):
        shared[0] = {}
    with pytest.raises(AttributeError):
        shared.append({})


def test_any_iterable_and_what_only_cloudpickle_can_pickle():
    assert SharedList(x for x in ("a", "b")) == ["a", "b"]
    assert SharedList() == []
    assert SharedList([lambda: 7])[0]() == 7
    assert SharedList([Fraction(1, 3), torch.ones(2)])[1].sum() == 2


def test_an_item_that_cannot_be_pickled_is_named():
    with socket.socket() as unpicklable, pytest.raises(TypeError, match="cannot pickle 'socket' object") as caught:
        SharedList([1, {"a": 2}, unpicklable])
    (note,) = caught.value.__notes__
    assert note.startswith("A SharedList pickles its items, and item 2, of type socket.socket, cannot be pickled; ")


def test_comparison_and_repr():
    assert SharedList(["a"]) != SharedList(["b"])
    assert SharedList(["a"]) != ["a", "b"]
    assert SharedList(["a"]) != ("a",)
    with pytest.raises(TypeError, match="unhashable"):
        hash(SharedList())
    assert repr(SharedList([])) == "SharedList([], 0 items)"
    assert repr(SharedList(["a", "b", "c", "d"])) == "SharedList(['a', 'b', 'c', ...], 4 items)"
    assert len(repr(SharedList(["long" * 1000]))) < 100


def test_a_view_shares_memory_and_travels_without_the_rest():
    shared = SharedList(["x" * 100] * 1000)
    view = shared[10:12]
    assert np.shares_memory(view._data, shared._data)
    assert len(pickle.dumps(view)) < 1000
    assert view.nbytes < 300


def test_strings_take_their_length_and_eight_bytes():
    assert SharedList(["abc"] * 1000).nbytes == 1000 * (3 + 8) + 8
    assert SharedList([b"abc"] * 1000).nbytes == 1000 * (3 + 8) + 8


def test_its_buffers_travel_out_of_band():
    shared = SharedList([f"item {i}" for i in range(1000)])
    encoded = codec.encode({"paths": shared})
    assert len(encoded.buffers) == 2
    assert len(encoded.skeleton) < 400  # its class by name, and no code
    assert codec.decode(encoded.skeleton, encoded.buffers)["paths"] == shared


class Paths(SharedList[str]):
    """A user's subclass."""


def test_a_slice_and_a_copy_are_of_the_same_class():
    paths = Paths(["a", "b", "c"])
    for other in (paths[1:], paths[::2], pickle.loads(pickle.dumps(paths))):
        assert type(other) is Paths
    assert pickle.loads(pickle.dumps(paths[1:])) == ["b", "c"]
