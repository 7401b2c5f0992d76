"""What a state holds goes through its plain form and torch's files; what is incomplete is refused."""

import copy
import io

import numpy as np
import pytest
import torch

from rayloader import StateError
from rayloader.random.generators import RandomState
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
        SavedWorker(
            WorkerStart(worker_state, Before(worker_state, (told, Resumed(2, 5)), 6)),
            True,
            ((4, 7), (6, 8)),
        ),
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
    first = saved.pack(known)
    place = saved.position
    same = place._replace(
        begin=place.begin._replace(), workers=[w._replace(start=w.start._replace()) for w in place.workers]
    )
    second = saved._replace(position=same).pack(known)
    assert second["position"]["begin"] is first["position"]["begin"]
    assert second["position"]["workers"][1]["start"] is first["position"]["workers"][1]["start"]
    assert repr(first) == repr(second) == repr(saved.pack())
    other = saved._replace(position=place._replace(begin=place.begin._replace(base_seed=2))).pack(known)
    assert other["position"]["begin"]["base_seed"] == 2


PARTS = ["fits", "now", "sampler", "process", "position", "redeal"]


@pytest.mark.parametrize("name", ["num_workers", *PARTS])
def test_a_state_that_lacks_something_is_refused(name):
    packed = state().pack()
    del packed[name]
    with pytest.raises(StateError, match=f"lacks {name}"):
        State.load(packed)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("value", [7, [1], {"a": 1}], ids=["number", "list", "dict"])
def test_a_state_that_holds_something_else_is_refused(name, value):
    with pytest.raises(StateError, match=r"is not what state_dict\(\) gave"):
        State.load({**state().pack(), name: value})


@pytest.mark.parametrize("version", [15, 99, "15", None])
def test_a_state_of_another_version_is_refused(version):
    with pytest.raises(StateError, match=f"the state has version {version!r}, this rayloader reads"):
        State.load({**state().pack(), "version": version})
