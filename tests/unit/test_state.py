"""What a state holds goes through its plain form and torch's files; what is incomplete is refused."""

import copy
import io
import itertools
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rayloader import StateError
from rayloader.errors import NESTING
from rayloader.random.generators import RandomState, same_state
from rayloader.resume import checkpoint
from rayloader.resume.digest import Drawn
from rayloader.resume.journal import Before, Resumed
from rayloader.resume.samplers import EpochBegin
from rayloader.resume.snapshot import WorkerState
from rayloader.resume.state import (
    Fits,
    LocalState,
    Moment,
    OwnState,
    SamplerState,
    SavedPlace,
    SavedWorker,
    Start,
    State,
    Stream,
    WorkerStart,
    from_plain,
    to_plain,
)
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
        SavedWorker(WorkerStart(worker_state, Before(worker_state, (told, Resumed(2, 5)), 6)), True, ((4, 7), (6, 8))),
    )
    stages = ([[(0, 4)], [(0, 2), (4, 6)]],)
    starts = (Start(moment(), drawing=moment()), Start(moment(), OwnState(OWN, OWN), [1, 2], 99))
    return State(
        num_workers=2,
        fits=Fits(4, False, "worker", "static", True, "map", 10, "RandomSampler", 2, 1),
        now=moment(),
        sampler=SamplerState(OWN, (("epoch",),), True),
        process=LocalState(RandomState.capture([]), OWN),
        position=SavedPlace(
            EpochBegin(1, None, 2, starts, stages),
            Stream(RandomState.capture([]), OWN, 3, True),
            workers,
            (9, 11),
            *(0, 1, 2, 3, 4, False, 6, 7, 8),
        ),
        epoch=5,
        skip_steps=((0, 3), (5, 48)),
        redeal=EpochBegin(starts=(Start(moment()),), stages=stages),
    )


def through_a_file(packed):
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file])
def test_a_loaded_state_holds_what_the_saved_one_held(way):
    saved = state()
    loaded = State.load(way(saved.pack()))
    assert repr(loaded.pack()) == repr(saved.pack())
    places = [state.position._replace(begin=None, stream=None, workers=None) for state in (loaded, saved)]
    assert (loaded.fits, places[0]) == (saved.fits, places[1])
    told, resumed = loaded.position.workers[1].start.before.entries
    assert (told.task_id, told.indices.encoded.skeleton, told.digest) == (4, codec.encode([5, 6]).skeleton, 7)
    assert (resumed, loaded.position.workers[1].to_rebuild) == (Resumed(2, 5), ((4, 7), (6, 8)))
    assert loaded.now.random.equals(saved.now.random)


def test_what_stays_the_same_is_packed_once():
    saved, known = state(), {}
    place, begin = saved.position, saved.position.begin
    packed = [
        saved._replace(position=place._replace(begin=begin._replace(base_seed=seed))).pack(known) for seed in (1, 1, 2)
    ]
    assert [parts["position"]["begin"]["base_seed"] for parts in packed] == [1, 1, 2]
    for first, second in itertools.pairwise(parts["position"] for parts in packed):
        assert (first["begin"] is second["begin"]) == (second["begin"]["base_seed"] == 1)
        assert first["workers"][1]["start"] is second["workers"][1]["start"]


PARTS = ["fits", "now", "sampler", "process", "position", "redeal"]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *((name, value, "is not what") for name, value in itertools.product(PARTS, [[], [7], [[1]], [{"a": 1}]])),
        *(("version", value, f"has version {value!r}, this rayloader reads") for value in (15, 99, "15", None)),
    ],
)
def test_a_state_that_holds_something_else_or_is_of_another_version_is_refused(name, value, message):
    with pytest.raises(StateError, match=message):
        State.load({**state().pack(), name: value})


def test_a_state_that_lacks_something_is_refused():
    packed = state().pack()
    del packed["num_workers"]
    with pytest.raises(StateError, match="lacks num_workers"):
        State.load(packed)


# ---- what `state_dict` of the user's objects gives

STATES = [
    {"a": 1, "b": [2.5, None, True, (b"x", "y")]},
    random.Random(1).getstate(),
    [(), [], {}],
    {1: "a", None: "b", 2.5: "c", ("d", 3): (4,)},
    {2**70: -(2**70), "inf": float("-inf"), "text": "\ud800 \N{SNOWMAN} '"},
    OrderedDict(b=1, a=[2]),
    {1, 2},
    {"numbers": [np.float64(1.5), np.bool_(True), np.int64(-3)], "array": np.arange(6).reshape(2, 3)[:, ::2]},
    (np.arange(3, dtype=np.uint32), np.arange(3, dtype=np.uint64), np.zeros((2, 0)), np.array(5)),
    np.random.RandomState(1).get_state(legacy=False),
    [(np.arange(count, dtype=np.uint32), b"\xff" * count) for count in (1, 8, 9, 16)],
    [torch.float32, {torch.int8: [torch.int8]}, Counter("aab"), complex(1, 2)],
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
@pytest.mark.parametrize("way", [through_a_file, lambda packed: pickle.loads(pickle.dumps(packed))])
def test_a_state_comes_back_from_a_file(way, state):
    assert same_state(from_plain(way(to_plain(state))), state)


@pytest.mark.parametrize("kind", [[("a", "i4")], object, str, ">i4", ">u4", "datetime64[D]", defaultdict, deque])
def test_what_torch_has_not_is_left_as_it_is(kind):
    """Its file is then torch's matter."""
    state = kind() if kind in (defaultdict, deque) else np.zeros(2, kind)
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


# ---- without workers: what is put back only where it fits


class MadeWhenFirstUsed:
    rng = None

    def draw(self):
        self.rng = self.rng or random.Random(1)
        return self.rng.random()


def test_a_generator_that_is_made_later_is_missed_with_a_remedy_that_helps():
    old, new = (SimpleNamespace(dataset=MadeWhenFirstUsed(), collate_fn=None) for _ in range(2))
    old.dataset.draw()
    state = LocalState(checkpoint.capture_random(old), None)
    with pytest.raises(StateError, match=r"dataset\.rng is missing here.* first use .* before load_state_dict\(\)"):
        checkpoint.restore(new, state)
    new.dataset.draw(), new.dataset.draw()
    checkpoint.restore(new, state)
    assert new.dataset.draw() == old.dataset.draw()
