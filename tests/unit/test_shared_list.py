"""`SharedList`: what it holds, what it gives back, how it travels."""

import pickle
import socket

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


class Paths(SharedList[str]):
    """A user's subclass."""


@given(ITEMS, st.slices(6))
def test_it_behaves_as_the_list_of_its_items(items, cut):
    shared = Paths(item for item in items)
    assert len(shared) == len(items)
    assert [(type(item), item) for item in shared] == [(type(item), item) for item in items]
    assert list(reversed(shared)) == items[::-1]
    assert [shared[number] for number in range(-len(items), len(items))] == items * 2
    for one, other in (shared, items), (shared[cut], items[cut]):
        assert type(one) is type(pickle.loads(pickle.dumps(one))) is Paths
        assert one == pickle.loads(pickle.dumps(one)) == other == one
        assert (one != [*other, 1], one != tuple(other)) == (True, True)


def test_indices_and_what_a_list_that_cannot_be_changed_lacks():
    shared = SharedList(["a", "bc", ""])
    assert (shared[torch.tensor(1)], shared[np.int64(2)]) == ("bc", "")
    for index in (3, -4):
        with pytest.raises(IndexError, match=f"index {index} is out of range for 3 items"):
            shared[index]
    with pytest.raises(TypeError):
        shared["a"]
    with pytest.raises(TypeError):
        shared[0] = ""
    with pytest.raises(TypeError, match="unhashable"):
        hash(shared)
    assert SharedList() == []
    assert SharedList(["a"]) != SharedList(["b"])
    assert repr(SharedList(["a", "b", "c", "d"])) == "SharedList(['a', 'b', 'c', ...], 4 items)"
    assert len(repr(SharedList(["long" * 1000]))) < 100


def test_items_are_new_objects_and_may_be_what_only_cloudpickle_can_pickle():
    record = {"path": "a", "size": [1]}
    shared = SharedList([record, lambda: 7])
    shared[0]["size"].append(2)
    record["size"].append(3)
    assert shared[0] == {"path": "a", "size": [1]}
    assert shared[1]() == 7
    with socket.socket() as unpicklable, pytest.raises(TypeError, match="cannot pickle 'socket' object") as caught:
        SharedList([1, {"a": 2}, unpicklable])
    (note,) = caught.value.__notes__
    assert note.startswith("A SharedList pickles its items, and item 2, of type socket.socket, cannot be pickled; ")


def test_memory_is_shared_and_buffers_travel_out_of_band():
    shared = SharedList(["x" * 100] * 1000)
    assert shared.nbytes == SharedList([b"x" * 100] * 1000).nbytes == 1000 * (100 + 8) + 8
    view = shared[10:12]
    assert np.shares_memory(view._data, shared._data)
    assert len(pickle.dumps(view)) < 1000
    assert view.nbytes < 300
    encoded = codec.encode({"paths": shared})
    assert len(encoded.buffers) == 2
    assert len(encoded.skeleton) < 400  # its class by name, and no code
    assert codec.decode(encoded.skeleton, encoded.buffers)["paths"] == shared
