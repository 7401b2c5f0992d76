"""What is in a pack, parts of samples, packs of a stream, and lengths that are computed once."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

import rayloader
from rayloader.plans import Cuts, PackedStream, Packing, pack_collate

TEXTS = [[1, 2, 3], [4, 5], [6]]


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    form=st.sampled_from([list, np.array, torch.tensor]),
    labelled=st.booleans(),
    fields=st.sampled_from([None, ["labels"]]),
    seq_len=st.none() | st.integers(1, 8),
    more=st.none() | st.integers(0, 3),
)
def test_a_pack_is_that_of_a_loop(sizes, form, labelled, fields, seq_len, more):
    """Cut, or padded with so many more: the padding is a sequence of its own. The samples stay as they are."""
    texts = [list(range(10 * number, 10 * number + size)) for number, size in enumerate(sizes)]
    rows = [
        {"input_ids": form(text), "speech": np.array([text] * 2), "words": [*map(str, text)], "name": "x"}
        | ({"labels": form(text)} if labelled else {})
        for text in texts
    ]
    if more is None:
        pack, padding = pack_collate(rows, fields=fields if labelled else None, seq_len=seq_len), []
    else:
        seq_len, padding = sum(sizes) + more, [[9] * more] * (more > 0)
        pack = pack_collate(rows, fields=fields if labelled else None, seq_len=seq_len, pad=True, pad_id=9)
    texts = [text[:seq_len] for text in texts]
    sequences = texts + padding
    expected = {
        "input_ids": (torch.int64, [*itertools.chain(*sequences)]),
        "labels": (torch.int64, [token if place else -100 for text in texts for place, token in enumerate(text)]),
        "position_ids": (torch.int64, [place for one in sequences for place in range(len(one))]),
        "seq_ids": (torch.int32, [number for number, text in enumerate(texts) for _ in text]),
        "cu_seqlens": (torch.int32, [*itertools.accumulate(map(len, sequences), initial=0)]),
    }
    expected["labels"][1].extend([-100] * (more or 0))
    expected["seq_ids"][1].extend([-1] * (more or 0))
    assert {name: (pack[name].dtype, pack[name].tolist()) for name in expected} == expected
    assert pack["max_seqlen"] == max(map(len, sequences))
    if fields and labelled:
        assert pack.keys() == {*expected, "max_seqlen"}
    else:
        assert pack.keys() == {*expected, "max_seqlen", "speech"}
        assert pack["speech"].tolist() == [[*itertools.chain(*texts), *[0] * (more or 0)]] * 2
    assert all(row.get("labels", [10 * number])[0] == 10 * number for number, row in enumerate(rows))


def test_labels_are_the_field_of_that_name_also_of_parts():
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [5, 6, 7], "labels": [-100, 0, 1]}]
    assert pack_collate(rows)["labels"].tolist() == [-100, -100, 3, 4, -100, 0, 1]
    assert pack_collate(TEXTS)["labels"].tolist() == [-100, 2, 3, -100, 5, -100]
    pack = pack_collate([Cuts(rows)[0, 1, 3], Cuts(rows)[1, 0, 2]])
    assert (pack["input_ids"].tolist(), pack["labels"].tolist()) == ([2, 3, 5, 6], [-100, 3, -100, 0])
    cuts = Cuts([{"input_ids": [1, 2, 3], "wave": torch.ones(2, 3), "name": "abc"}])
    part = cuts[0, 1, 3]
    assert (part["input_ids"], part["wave"].shape, part["name"]) == ([2, 3], (2, 2), "abc")
    assert (cuts[0]["input_ids"], len(cuts), Cuts(TEXTS)[0, 0, 2]) == ([1, 2, 3], 1, [1, 2])


# ---- streams


def packs(stream, seq_len, **options):
    return [pack["input_ids"].tolist() for pack in PackedStream(stream, seq_len, **options)]


@given(sizes=st.lists(st.integers(0, 6), max_size=8), seq_len=st.integers(2, 9), in_dicts=st.booleans())
@settings(max_examples=25)
def test_packs_of_a_stream_have_every_token(sizes, seq_len, in_dicts):
    """Their states are in test_wrapped_states.py."""
    ends = [*itertools.accumulate(sizes)]
    stream = [torch.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    stream = [{"input_ids": sequence} for sequence in stream] if in_dicts else stream
    whole = packs(stream, seq_len, drop_last=False)
    assert [*itertools.chain(*whole)] == [*range(sum(sizes))]
    assert {len(pack) for pack in whole[:-1]} <= {seq_len}
    assert packs(stream, seq_len) == [pack for pack in whole if len(pack) == seq_len]


class Stateful:
    """A stream with a state of its iterator, which gives nothing."""

    def __iter__(self):
        return self

    def __next__(self):
        raise StopIteration

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_what_does_not_fit_is_an_error_that_says_so():
    packed, buffer = PackedStream(Stateful(), 4), rayloader.ShuffleBuffer(Stateful(), 2)
    squares = type("Squares", (Dataset,), {"__getitem__": lambda _, index: index**2})()  # which Python would read
    no_source = {"open": [], "source": None, "ended": False, "end": None}
    too_long = [{"input_ids": [1, 2], "labels": [1, 2, 3]}]
    unequal = [{"input_ids": [1, 2], "x": np.ones(size)} for size in (2, 1)]
    no_number = "fn must give the length of a sample, a whole number, got 1\\.5"
    for error, text, call in [
        (ValueError, r"as long as the tokens, \[2\], and 'labels' is \[3\] long", lambda: pack_collate(too_long)),
        (ValueError, "each field must be as long as the tok", lambda: pack_collate(unequal)),
        (ValueError, "must fit into seq_len, got 6 tokens .*=5", lambda: pack_collate(TEXTS, seq_len=5, pad=True)),
        (TypeError, "PackedStream reads an iterable of samples, got Squares", lambda: PackedStream(squares, 4)),
        (TypeError, "ShuffleBuffer reads an iterable", lambda: rayloader.ShuffleBuffer(squares, 4)),
        (TypeError, no_number, lambda: rayloader.lengths([1.5], lambda sample: sample)),
    ]:
        with pytest.raises(error, match=text):
            call()
    for stream, state, text in [
        (packed, {"read": 1}, "this is not a state of a PackedStream's iterator"),
        (packed, no_source, "is of a stream whose iterator has a state, or has none"),
        (packed, iter(buffer).state_dict(), "this is not a state of a PackedStream's iterator"),
        (buffer, iter(packed).state_dict(), "this is not a state of a ShuffleBuffer's iterator"),
        (rayloader.ShuffleBuffer(Stateful(), 3), iter(buffer).state_dict(), "size=2, and here it is 3"),
    ]:
        with pytest.raises(rayloader.StateError, match=text):
            iter(stream).load_state_dict(state)


def test_lengths_are_whole_numbers_that_are_computed_once():
    def size_of(text, more):
        asked.append(text)
        return len(text) + more

    asked = []
    found = rayloader.lengths(TEXTS, functools.partial(size_of, more=1))
    assert (found.tolist(), found.dtype, asked) == ([4, 3, 2], np.int64, TEXTS)
    assert rayloader.lengths([]).tolist() == []
    found = rayloader.lengths(TEXTS, num_workers=1, workers="fork")
    assert found.tolist() == [3, 2, 1]
    loader = rayloader.DataLoader(
        TEXTS, batch_sampler=Packing(found, 4), collate_fn=pack_collate, num_workers=1, workers="fork"
    )
    assert sorted(sorted(pack["input_ids"].tolist()) for pack in loader) == [[1, 2, 3, 6], [4, 5]]
