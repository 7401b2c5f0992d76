"""What is in a pack, parts of samples, packs of a stream, and lengths that are computed once."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

import rayloader
from rayloader.plans import Cuts, PackedStream, pack_collate

TEXTS = [[1, 2, 3], [4, 5], [6]]


def test_a_pack_of_lists():
    pack = pack_collate(TEXTS)
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert pack["labels"].tolist() == [-100, 2, 3, -100, 5, -100]
    assert pack["position_ids"].tolist() == [0, 1, 2, 0, 1, 0]
    assert pack["seq_ids"].tolist() == [0, 0, 0, 1, 1, 2]
    assert pack["cu_seqlens"].tolist() == [0, 3, 5, 6]
    assert pack["max_seqlen"] == 3
    assert {name: value.dtype for name, value in pack.items() if name != "max_seqlen"} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "position_ids": torch.int64,
        "seq_ids": torch.int32,
        "cu_seqlens": torch.int32,
    }


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


ROWS = [
    {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4], "words": list("abcd")},
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "words": list("efg")},
]


def test_lists_of_numbers_are_joined_as_datasets_of_hugging_face_give_them():
    pack = pack_collate(ROWS)
    assert pack["labels"].tolist() == [-100, -100, 3, 4, -100, 6, 7]
    assert "words" not in pack
    cuts = Cuts(ROWS)
    pack = pack_collate([cuts[0, 1, 3], cuts[1, 0, 2]])
    assert pack["input_ids"].tolist() == [2, 3, 5, 6]
    assert pack["labels"].tolist() == [-100, 3, -100, 6]


def test_labels_that_do_not_fit_are_an_error_and_never_the_tokens():
    with pytest.raises(ValueError, match=r"as long as the tokens, \[2\], and 'labels' is \[3\] long"):
        pack_collate([{"input_ids": [1, 2], "labels": [1, 2, 3]}])


def test_a_padded_pack_has_one_shape_and_padding_is_a_sequence_of_its_own():
    pack = pack_collate(TEXTS, seq_len=8, pad=True, pad_id=9)
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 9, 9]
    assert pack["labels"].tolist()[-2:] == [-100, -100]
    assert pack["position_ids"].tolist()[-2:] == [0, 1]
    assert pack["seq_ids"].tolist()[-2:] == [-1, -1]
    assert pack["cu_seqlens"].tolist() == [0, 3, 5, 6, 8]
    assert pack_collate([[1] * 8], seq_len=8, pad=True)["cu_seqlens"].tolist() == [0, 8]


def test_samples_are_cut_off():
    assert pack_collate([[1, 2, 3, 4], [5]], seq_len=3)["input_ids"].tolist() == [1, 2, 3, 5]


def test_what_does_not_fit_together():
    with pytest.raises(ValueError, match="each field must be as long as the tokens"):
        pack_collate(
            [{"input_ids": [1, 2], "other": np.ones(2)}, {"input_ids": [1, 2], "other": np.ones(1)}],
        )
    with pytest.raises(ValueError, match="a pack that is padded must fit into seq_len, got 6 tokens and seq_len=5"):
        pack_collate(TEXTS, seq_len=5, pad=True)


def test_parts_of_samples():
    cuts = Cuts([{"input_ids": [1, 2, 3], "wave": torch.ones(2, 3), "name": "x"}])
    part = cuts[0, 1, 3]
    assert part["input_ids"] == [2, 3]
    assert part["wave"].shape == (2, 2)
    assert part["name"] == "x"
    assert cuts[0]["input_ids"] == [1, 2, 3]
    assert len(cuts) == 1
    assert Cuts(TEXTS)[0, 0, 2] == [1, 2]


# ---- streams


class Stream:
    """Sequences, with a state or without."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        return Reading(self.sizes) if isinstance(self, Stateful) else iter(Reading.of(self.sizes))


class Stateful(Stream):
    pass


class Reading:
    def __init__(self, sizes):
        self.left = self.of(sizes)
        self.read = 0

    @staticmethod
    def of(sizes):
        ends = np.cumsum(sizes)
        return [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]

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
    whole = [*packed]
    tokens = [token for pack in whole for token in pack["input_ids"].tolist()]
    assert tokens == [*range(sum(sizes))]
    assert {len(pack["seq_ids"]) for pack in whole[:-1]} <= {seq_len}
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
    assert [pack["input_ids"].tolist() for pack in again] == [pack["input_ids"].tolist() for pack in whole[taken:]]


class Counting:
    def __init__(self):
        self.read = 0

    def __iter__(self):
        while self.read < 6:
            self.read += 1
            yield [self.read] * 3
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def test_a_stream_that_has_a_state_itself():
    packed, other = PackedStream(Counting(), 4), PackedStream(Counting(), 4)
    iterator = iter(packed)
    next(iterator)
    assert packed.state_dict() == {"read": 2}
    state = iterator.state_dict()
    assert state == {"open": [[2, 2]], "source": None, "ended": False, "end": None}
    other.load_state_dict({"read": 2})
    again = iter(other)
    again.load_state_dict(state)
    assert next(again)["input_ids"].tolist() == [2, 2, 3, 3]


def test_a_stream_is_not_begun_again_after_its_last_pack():
    packed, other = (PackedStream(Counting(), 4, drop_last=False) for _ in range(2))
    iterator = iter(packed)
    assert len([next(iterator) for _ in range(5)]) == 5
    other.load_state_dict(packed.state_dict())
    again = iter(other)
    again.load_state_dict(iterator.state_dict())
    assert [*again] == []
    assert len([*other]) == len([*packed]) == 5


def test_states_of_others_are_refused():
    iterator = iter(PackedStream(Stateful([3]), 4))
    with pytest.raises(rayloader.StateError, match="this is not a state of a PackedStream's iterator"):
        iterator.load_state_dict({"read": 1})
    state = {"open": [], "source": None, "ended": False, "end": None}
    with pytest.raises(rayloader.StateError, match="is of a stream whose iterator has a state, or has none"):
        iterator.load_state_dict(state)
    of_a_buffer = iter(rayloader.ShuffleBuffer(Stateful([3]), 2)).state_dict()
    with pytest.raises(rayloader.StateError, match="this is not a state of a PackedStream's iterator"):
        iterator.load_state_dict(of_a_buffer)
    shuffled = iter(rayloader.ShuffleBuffer(Stateful([3]), 2))
    with pytest.raises(rayloader.StateError, match="this is not a state of a ShuffleBuffer's iterator"):
        shuffled.load_state_dict(iter(PackedStream(Stateful([3]), 4)).state_dict())
    with pytest.raises(rayloader.StateError, match="size=2, and here it is 3"):
        iter(rayloader.ShuffleBuffer(Stateful([3]), 3)).load_state_dict(of_a_buffer)


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


# ---- lengths


class Texts:
    def __init__(self, sizes):
        self.sizes = sizes
        self.read = 0

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        self.read += 1
        return {"input_ids": [0] * self.sizes[index]}


def size_of(text, more=0):
    return len(text["input_ids"]) + more


def test_lengths_are_computed_once():
    texts = Texts([3, 1, 2])
    found = rayloader.lengths(texts, functools.partial(size_of, more=1))
    assert (found.tolist(), found.dtype, texts.read) == ([4, 2, 3], np.int64, 3)
    assert rayloader.lengths([[1], [1, 2]]).tolist() == [1, 2]
    assert rayloader.lengths([]).tolist() == []


def test_a_length_is_a_whole_number():
    with pytest.raises(TypeError, match=r"fn must give the length of a sample, a whole number, got 1\.5"):
        rayloader.lengths([1.5], lambda sample: sample)
