"""What is in a pack, parts of samples, packs of a stream, and lengths that are computed once."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import rayloader
from rayloader.plans import Cuts, PackedStream, pack_collate

TEXTS = [[1, 2, 3], [4, 5], [6]]


def test_a_pack_of_lists_and_a_padded_one_whose_padding_is_a_sequence_of_its_own():
    pack, padded = pack_collate(TEXTS), pack_collate(TEXTS, seq_len=8, pad=True, pad_id=9)
    expected = {
        "input_ids": (torch.int64, [1, 2, 3, 4, 5, 6], [9, 9]),
        "labels": (torch.int64, [-100, 2, 3, -100, 5, -100], [-100, -100]),
        "position_ids": (torch.int64, [0, 1, 2, 0, 1, 0], [0, 1]),
        "seq_ids": (torch.int32, [0, 0, 0, 1, 1, 2], [-1, -1]),
        "cu_seqlens": (torch.int32, [0, 3, 5, 6], [8]),
    }
    assert pack.keys() - {"max_seqlen"} == expected.keys()
    for name, (kind, values, more) in expected.items():
        assert (pack[name].dtype, pack[name].tolist(), padded[name].tolist()) == (kind, values, values + more)
    assert (pack["max_seqlen"], padded["max_seqlen"]) == (3, 3)
    assert pack_collate([[1] * 8], seq_len=8, pad=True)["cu_seqlens"].tolist() == [0, 8]
    assert pack_collate([[1, 2, 3, 4], [5]], seq_len=3)["input_ids"].tolist() == [1, 2, 3, 5]


def test_a_pack_of_dicts_joins_the_fields_that_are_as_long():
    samples = [
        {"input_ids": np.array(text), "labels": np.array(text) * 10, "speech": np.ones((2, len(text))), "name": "x"}
        for text in TEXTS
    ]
    pack = pack_collate(samples)
    assert pack["labels"].tolist() == [-100, 20, 30, -100, 50, -100]
    assert pack["speech"].shape == (2, 6)
    assert "name" not in pack
    assert "speech" not in pack_collate(samples, fields=["labels"])
    assert samples[0]["labels"].tolist() == [10, 20, 30]


def test_lists_of_numbers_are_joined_as_datasets_of_hugging_face_give_them():
    rows = [
        {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4], "words": list("abcd")},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "words": list("efg")},
    ]
    pack = pack_collate(rows)
    assert pack["labels"].tolist() == [-100, -100, 3, 4, -100, 6, 7]
    assert "words" not in pack
    cuts = Cuts(rows)
    pack = pack_collate([cuts[0, 1, 3], cuts[1, 0, 2]])
    assert pack["input_ids"].tolist() == [2, 3, 5, 6]
    assert pack["labels"].tolist() == [-100, 3, -100, 6]


def test_parts_of_samples():
    cuts = Cuts([{"input_ids": [1, 2, 3], "wave": torch.ones(2, 3), "name": "x"}])
    part = cuts[0, 1, 3]
    assert (part["input_ids"], part["wave"].shape, part["name"]) == ([2, 3], (2, 2), "x")
    assert (cuts[0]["input_ids"], len(cuts)) == ([1, 2, 3], 1)
    assert Cuts(TEXTS)[0, 0, 2] == [1, 2]


@pytest.mark.parametrize(
    ("samples", "options", "error"),
    [
        (
            [{"input_ids": [1, 2], "labels": [1, 2, 3]}],
            {},
            r"must be as long as the tokens, \[2\], and 'labels' is \[3\] long",
        ),
        ([{"input_ids": [1, 2], "x": np.ones(size)} for size in (2, 1)], {}, "each field must be as long as the tok"),
        (TEXTS, {"seq_len": 5, "pad": True}, "padded must fit into seq_len, got 6 tokens and seq_len=5"),
    ],
)
def test_what_does_not_fit_together(samples, options, error):
    with pytest.raises(ValueError, match=error):
        pack_collate(samples, **options)


# ---- streams


class Stream:
    """Sequences, without a state."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        return iter(sequences(self.sizes))


class Stateful(Stream):
    """With one, of its iterator."""

    def __iter__(self):
        return Reading(self.sizes)


def sequences(sizes):
    return [torch.arange(end - size, end) for size, end in zip(sizes, np.cumsum(sizes), strict=True)]


class Reading:
    def __init__(self, sizes):
        self.left, self.read = sequences(sizes), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == len(self.left):
            raise StopIteration
        self.read += 1
        return {"input_ids": self.left[self.read - 1]}

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


@given(sizes=st.lists(st.integers(0, 6), max_size=8), seq_len=st.integers(2, 9), kind=st.booleans(), data=st.data())
@settings(deadline=None, max_examples=25)
def test_packs_of_a_stream_have_every_token_and_go_on_from_a_state(sizes, seq_len, kind, data):
    packed = PackedStream((Stateful if kind else Stream)(sizes), seq_len, drop_last=False)
    whole = [pack["input_ids"].tolist() for pack in packed]
    assert [*itertools.chain(*whole)] == [*range(sum(sizes))]
    assert {len(pack) for pack in whole[:-1]} <= {seq_len}
    assert len([*PackedStream(packed.stream, seq_len)]) == sum(sizes) // seq_len
    iterator = iter(packed)
    assert hasattr(iterator, "state_dict") is kind
    if not kind:
        return  # a loader reads it again from its start
    taken = data.draw(st.integers(0, len(whole)))
    for _ in range(taken):
        next(iterator)
    state = iterator.state_dict()
    assert sum(map(len, state["open"])) < max(6, seq_len)
    again = iter(packed)
    again.load_state_dict(state)
    assert [pack["input_ids"].tolist() for pack in again] == whole[taken:]


class Counting:
    """A stream that has a state itself, and begins again after its end."""

    read = 0

    def __iter__(self):
        while self.read < 6:
            self.read += 1
            yield [self.read] * 3
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


@pytest.mark.parametrize(("taken", "read", "rest"), [(1, 2, [2, 2, 3, 3]), (5, 0, None)])
def test_a_stream_that_has_a_state_itself(taken, read, rest):
    """It is not begun again after its last pack."""
    packed, other = (PackedStream(Counting(), 4, drop_last=False) for _ in range(2))
    iterator = iter(packed)
    for _ in range(taken):
        next(iterator)
    state = iterator.state_dict()
    if rest:
        assert state == {"open": [[2, 2]], "source": None, "ended": False, "end": None}
        assert packed.state_dict() == {"read": read}
    other.load_state_dict(packed.state_dict())
    again = iter(other)
    again.load_state_dict(state)
    assert [pack["input_ids"].tolist() for pack in again][:1] == ([rest] if rest else [])
    assert len([*other]) == 5


def test_states_of_others_are_refused():
    packed, buffer = PackedStream(Stateful([3]), 4), rayloader.ShuffleBuffer(Stateful([3]), 2)
    no_source = {"open": [], "source": None, "ended": False, "end": None}
    for stream, state, error in [
        (packed, {"read": 1}, "this is not a state of a PackedStream's iterator"),
        (packed, no_source, "is of a stream whose iterator has a state, or has none"),
        (packed, iter(buffer).state_dict(), "this is not a state of a PackedStream's iterator"),
        (buffer, iter(packed).state_dict(), "this is not a state of a ShuffleBuffer's iterator"),
        (rayloader.ShuffleBuffer(Stateful([3]), 3), iter(buffer).state_dict(), "size=2, and here it is 3"),
    ]:
        with pytest.raises(rayloader.StateError, match=error):
            iter(stream).load_state_dict(state)


@pytest.mark.parametrize("wrapper", [PackedStream, rayloader.ShuffleBuffer])
def test_a_map_style_dataset_is_no_stream(wrapper):
    """Python would read it by indices, also past its end."""

    class Squares(Dataset):
        def __getitem__(self, index):
            return index**2

    with pytest.raises(TypeError, match=f"{wrapper.__name__} reads an iterable of samples, got Squares"):
        wrapper(Squares(), 4)


def test_an_epoch_is_told_to_the_stream():
    class Told(IterableDataset):
        epoch = None

        def __iter__(self):
            return iter([])

        def set_epoch(self, epoch):
            self.epoch = epoch

    told = Told()
    PackedStream(told, 4).set_epoch(3)
    assert told.epoch == 3
    rayloader.DataLoader(PackedStream([], 4)).set_epoch(3)


def test_lengths_are_whole_numbers_that_are_computed_once():
    def size_of(text, more):
        asked.append(text)
        return len(text) + more

    asked = []
    found = rayloader.lengths(TEXTS, functools.partial(size_of, more=1))
    assert (found.tolist(), found.dtype, asked) == ([4, 3, 2], np.int64, TEXTS)
    assert rayloader.lengths([]).tolist() == []
    with pytest.raises(TypeError, match=r"fn must give the length of a sample, a whole number, got 1\.5"):
        rayloader.lengths([1.5], lambda sample: sample)
