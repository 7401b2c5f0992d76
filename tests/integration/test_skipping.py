"""`skip_steps`: which batches nobody builds and nobody gets, and what becomes of the others."""

import copy
import random

import pytest

import replay_data as data
from checkpoint_data import plain
from probes import oversubscribed

pytestmark = oversubscribed

SKIPPED = [0, 3, 4, (0, 9), (1, 2)]


def loaded(dataset=data.Augmented, seed=1, **options):
    data.seed(seed)
    return data.make(dataset, **{"workers": "fork", **options})


def batches(iterable):
    return [plain(batch) for batch in iterable]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 1},
        {},
        {"prefetch_factor": 1},
        {"persistent_workers": True},
        {"in_order": False},
        {"workers": "ray"},
    ],
)
def test_with_batch_seeding_all_other_batches_stay_the_same(options, request):
    if "workers" in options:
        request.getfixturevalue("ray_session")
    whole = loaded(seeding="batch", **{**options, "in_order": True})
    expected = [batches(whole), batches(whole)]
    loader = loaded(seeding="batch", **options, skip_steps=SKIPPED)
    for of_epoch, gone in zip(expected, ([0, 3, 4, 9], [2]), strict=True):
        left = [batch for step, batch in enumerate(of_epoch) if step not in gone]
        assert sorted(batches(loader), key=str) == sorted(left, key=str)


def test_with_worker_seeding_the_other_workers_batches_stay_the_same():
    whole, found = batches(loaded()), batches(loaded(skip_steps=[2]))
    found.insert(2, None)
    assert (found[0], found[1::2]) == (whole[0], whole[1::2])


class Counting(data.Augmented):
    """Notes in a file what was built."""

    def __init__(self, path):
        self.path = path

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        return index


def test_nobody_builds_them(tmp_path):
    loader = loaded(Counting(tmp_path / "built"), skip_steps=[1, 5], shuffle=False)
    assert len(list(loader)) == 8
    built = sorted(map(int, (tmp_path / "built").read_text().split()))
    assert built == [*range(4), *range(8, 20), *range(24, 40)]


@pytest.mark.parametrize("kind", [data.Stream, data.StreamWithoutState])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_after_what_is_left_out(kind, num_workers):
    whole = batches(loaded(kind, num_workers=num_workers))
    found = batches(loaded(kind, num_workers=num_workers, skip_steps=[1, 4]))
    assert found == [batch for step, batch in enumerate(whole) if step not in (1, 4)]


@pytest.mark.parametrize("seed", range(8))
def test_wherever_a_run_is_resumed_it_leaves_out_the_same(seed):
    """Also of the next epoch, and where the loader that goes on is not told; the epochs of the run are counted."""
    draw = random.Random(seed)
    kind = draw.choice([data.Augmented, data.Augmented, data.StreamWithoutState])
    options = {"dataset": kind, "num_workers": seed % 4, "seeding": draw.choice(["worker", "batch"])}
    skipped = draw.sample([(epoch, step) for epoch in range(2) for step in range(10)], draw.randrange(1, 15))
    whole = loaded(**options, skip_steps=skipped)
    epochs = [batches(whole), batches(whole)]
    loader = loaded(**options, skip_steps=skipped)
    for epoch, expected in enumerate(epochs):
        found, iterator = [], iter(loader)
        if kind is data.Augmented:
            assert len(expected) == 10 - len([one for one in skipped if one[0] == epoch])
        for _ in expected:
            found.append(plain(next(iterator)))
            if draw.random() < 0.3:
                state = copy.deepcopy(loader.state_dict())
                assert state["epoch"] == epoch
                loader = loaded(**{**options, "seed": draw.randrange(99)})
                loader.load_state_dict(state)
                iterator = iter(loader)
        assert found == expected
        assert next(iterator, None) is None
        assert loader.state_dict()["epoch"] == epoch + 1


def test_a_state_from_before_a_spike_goes_on_without_it_and_an_epoch_that_was_broken_off_counts():
    loader = loaded(seeding="batch")
    next(iter(loader))
    iterator = iter(loader)
    [next(iterator) for _ in range(3)]
    state, rest = loader.state_dict(), batches(iterator)
    assert state["epoch"] == 1
    resumed = loaded(seed=2, seeding="batch", skip_steps=[(1, 6)])
    resumed.load_state_dict(state)
    assert batches(resumed) == [batch for step, batch in enumerate(rest, 3) if step != 6]
    assert resumed.state_dict()["epoch"] == 2
