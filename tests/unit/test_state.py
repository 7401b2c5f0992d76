"""What a state holds goes through its plain form, JSON and torch's files; what is damaged is named."""

import copy
import io
import json
import warnings

import numpy as np
import pytest
import torch

from rayloader import StateError
from rayloader.random.random_state import RandomState
from rayloader.resume.draws import Drawn
from rayloader.resume.journal import Before, Resumed
from rayloader.resume.seal import Part, Parts, checksum
from rayloader.resume.snapshot import WorkerState
from rayloader.resume.state import (
    EpochBegin,
    Fits,
    Moment,
    OwnState,
    Process,
    Replay,
    SamplerState,
    SavedPlace,
    SavedWorker,
    Start,
    State,
    Stream,
    WorkerStart,
)
from rayloader.sampling.redeal import Stage
from rayloader.task import Task
from rayloader.transport import codec

OWN = b"\x80\x05]K\x07a."  # [7], pickled


def moment():
    return Moment(RandomState.capture([np.random.default_rng(1)]), ({"epoch": 3, "name": "x"}, {}))


def state():
    """With something at each place."""
    told = Task(4, Drawn(codec.encode([5, 6]), 0), digest=7)
    worker_state = WorkerState(1, 2, 3, random=RandomState.capture([]), begin=RandomState.capture([]), dataset=OWN)
    workers = (
        SavedWorker(),
        SavedWorker(
            WorkerStart(worker_state, Before(worker_state, (told, Resumed(2, 5, None)), 6)),
            True,
            Replay().plus([told]).plus([Task(6, Drawn(codec.encode([1]), 0), digest=8)]),
        ),
    )
    stages = (Stage([[(0, 4)], [(0, 2), (4, 6)]]),)
    starts = (Start(moment(), drawing=moment()), Start(moment(), OwnState(OWN, OWN), [1, 2], 99))
    return State(
        num_workers=2,
        fits=Fits(4, False, "worker", "static", True, "map", 10, "RandomSampler", 2, 1),
        now=RandomState.capture([]),
        sampler=SamplerState(OWN, ({"epoch": 3},), (("epoch",), ()), True, True),
        process=Process(RandomState.capture([]), OWN),
        position=SavedPlace(
            EpochBegin(1, None, 2, starts, stages),
            Stream(RandomState.capture([]), OWN, 3, True),
            workers,
            (9, 11),
            *range(9),
        ),
        redeal=EpochBegin(starts=(Start(moment()),), stages=stages),
    )


def through_json(packed):
    return json.loads(json.dumps(packed))


def through_a_file(packed):
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", [copy.deepcopy, through_json, through_a_file])
def test_a_loaded_state_holds_what_the_saved_one_held(way):
    saved = state()
    loaded = State.load(way(saved.pack()))
    assert loaded.pack() == saved.pack()
    assert loaded.fits == saved.fits
    assert loaded.position[3:] == saved.position[3:]
    assert loaded.position.workers[1].replay.tasks == [(4, 7), (6, 8)]
    told, resumed = loaded.position.workers[1].start.before.entries
    assert (told.task_id, told.indices.encoded.skeleton, told.digest) == (4, codec.encode([5, 6]).skeleton, 7)
    assert resumed == Resumed(2, 5, None)
    assert loaded.moment.epoch == 3
    assert loaded.now.equals(saved.now)


def test_what_is_done_to_one_state_does_not_show_in_the_next():
    saved, parts = state(), Parts()
    before = repr(saved.pack(parts))

    def clear(held):
        for inner in held.values() if isinstance(held, dict) else held:
            if isinstance(inner, (dict, list, tuple)):
                clear(inner)
        if not isinstance(held, tuple):
            held.clear()

    clear(saved.pack(parts))
    assert repr(saved.pack(parts)) == before


def test_what_stays_the_same_is_packed_once():
    saved, parts = state(), Parts()
    first = saved.pack(parts)
    second = saved._replace(now=RandomState.capture([]), fits=saved.fits._replace()).pack(parts)
    assert second["now"] is first["now"]
    assert second["fits"] is first["fits"]
    assert first == second == saved.pack()


@pytest.mark.parametrize("seal", [{1: 2, "zz": 3}, {"now": torch.zeros(2)}, {"now": None}, [], None])
def test_whatever_stands_in_place_of_the_seal_is_refused(seal):
    with pytest.raises(StateError, match="now"):
        State.load({**state().pack(), "seal": seal})


def test_a_part_that_its_own_seal_stands_in_for_is_named():
    packed = state().pack()
    for name, seal in packed["seal"].items():
        with pytest.raises(StateError, match=name):
            State.load({**packed, name: seal})


# ---- checksums


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


VALUES = {
    "numbers": [1, 2.5, True, None, 3j],
    "pairs": [[1, 2], (3, 4)],
    "sizes": [torch.Size([1, 2])],
    "mixed": {"deep": [(1, "x"), None, [[(5,)]]], "text": "abc"},
    "empty": [],
    "bytes": b"abc",
    "tensor": torch.arange(3),
    "keys": {1: "a", (2, "b"): b"c"},
    "deep": ({"a": [b"x", {"y": 1.5}]}, (torch.zeros(2),)),
    "array": bytearray(b"abc"),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "subclass": torch.ones(2).as_subclass(Subclass),
    "sparse": torch.eye(2).to_sparse(),
    "compressed": rare("compressed", 1.0),
    "nested": rare("nested", 1.0),
    "quantized": rare("quantized", 1.0),
    "meta": torch.zeros(3, device="meta"),
    "storage": torch.ones(2).untyped_storage(),
    "number": (5,),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numbers", [1, 2.5, 1, None, 3j]),
        ("pairs", [[1, 2], (4, 3)]),
        ("pairs", [[1, 2, 3], (4,)]),
        ("sizes", [torch.Size([1, 3])]),
        ("mixed", {"deep": [(1, "x"), None, [[(6,)]]], "text": "abc"}),
        ("empty", [[]]),
        ("empty", {}),
        ("bytes", b"abd"),
        ("bytes", "abc"),
        ("bytes", [b"abc"]),
        ("tensor", torch.arange(3, dtype=torch.int32)),
        ("tensor", torch.tensor([0, 1, 3])),
        ("tensor", torch.arange(3).reshape(3, 1)),
        ("tensor", b"abc"),
        ("tensor", torch.arange(3).to_sparse()),
        ("keys", {1: "a", (2, "c"): b"c"}),
        ("keys", {True: "a", (2, "b"): b"c"}),
        ("keys", {1: "a"}),
        ("deep", ({"a": [b"x", {"y": 1.25}]}, (torch.zeros(2),))),
        ("deep", ({"a": [b"x", {"z": 1.5}]}, (torch.zeros(2),))),
        ("deep", ({"a": [b"x", {"y": 1.5}]}, (torch.zeros(3),))),
        ("array", bytearray(b"abd")),
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
        ("number", ("5",)),
        ("number", ([5],)),
        ("number", (5.0,)),
    ],
)
def test_another_value_has_another_checksum(name, value):
    assert checksum(value) != checksum(VALUES[name])


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's, where it builds rare kinds of tensors
def test_what_was_saved_has_the_same_checksum(name):
    file = io.BytesIO()
    torch.save(VALUES[name], file)
    file.seek(0)
    assert checksum(torch.load(file, weights_only=False)) == checksum(VALUES[name])


@pytest.mark.parametrize("name", ["numbers", "pairs", "sizes", "mixed", "empty"])
def test_what_has_gone_through_json_has_the_same_checksum(name):
    if name == "numbers":
        assert checksum(through_json([1, 2.5, True, None])) == checksum([1, 2.5, True, None])
    else:
        assert checksum(through_json(VALUES[name])) == checksum(VALUES[name])


def test_a_value_that_no_checksum_covers_has_one():
    assert checksum(object()) == checksum(pytest)


def test_a_checksum_depends_on_names_and_values_and_not_on_the_order_of_a_dict():
    numbers = {str(number): number for number in range(100)}
    assert checksum(dict(reversed(numbers.items()))) == checksum(numbers)
    assert checksum({**numbers, "0": 1, "1": 0}) != checksum(numbers)
    assert checksum({name if name != "0" else "other": number for name, number in numbers.items()}) != checksum(numbers)


# ---- parts


@pytest.mark.parametrize("value", [{"a": [1]}, {"a": (1, b"x")}, [1], ([1],), {"a": {"b": 1}}])
def test_each_state_has_contents_of_its_own(value):
    part = Part(value)
    first = part.own()
    holder = first if not isinstance(first, tuple) else first[0]
    holder.clear()
    assert part.own() == value


def test_what_nobody_can_change_is_shared():
    part = Part((1, (b"x", None)))
    assert part.own() is part.own()


def test_a_part_is_made_again_where_it_is_made_of_something_else():
    parts, made = Parts(), []
    first, second = object(), object()
    for source in (first, first, second, second, first):
        parts.part("name", source, made.append)
    assert made == [first, second, first]
