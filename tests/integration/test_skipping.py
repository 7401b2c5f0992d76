"""`skip_steps`: which batches nobody builds and nobody gets, and what becomes of the others."""

import copy
import random

import pytest

import replay_data as data
from checkpoint_data import plain
from probes import oversubscribed
from rayloader import DataLoader

pytestmark = oversubscribed

SKIPPED = [0, 3, 4, (0, 9), (1, 2)]


def loaded(dataset=data.Augmented, seed=1, **options):
    data.seed(seed)
    return data.make(dataset, **{"workers": "fork", **options})


def batches(iterable):
    return [plain(batch) for batch in iterable]


class Counting(data.Augmented):
    """Notes in a file what was built."""

    def __init__(self, path):
        self.path = path

    def __getitem__(self, index):
        with open(self.path, "a") as file:
            file.write(f"{index}\n")
        return index


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"prefetch_factor": 1}, {"persistent_workers": True}, {"in_order": False}])
def test_with_batch_seeding_all_other_batches_stay_the_same(num_workers, options):
    if not num_workers and options:
        options = {}
    options = {"num_workers": num_workers, "seeding": "batch", **options}
    whole = loaded(**{**options, "in_order": True})
    expected = [batches(whole), batches(whole)]
    loader = loaded(**options, skip_steps=SKIPPED)
    for of_epoch, gone in zip(expected, ([0, 3, 4, 9], [2]), strict=True):
        left = [batch for step, batch in enumerate(of_epoch) if step not in gone]
        assert sorted(batches(loader), key=str) == sorted(left, key=str)


def test_with_worker_seeding_the_other_workers_batches_stay_the_same():
    whole = batches(loaded())
    found = batches(loaded(skip_steps=[2]))
    of_the_other = [step for step in range(10) if step % 2]
    steps = [step for step in range(10) if step != 2]
    assert [found[steps.index(step)] for step in of_the_other] == [whole[step] for step in of_the_other]
    assert found[0] == whole[0]


def test_nobody_builds_them(tmp_path):
    data.seed(1)
    dataset = Counting(tmp_path / "built")
    loader = data.make(dataset, workers="fork", skip_steps=[1, 5], shuffle=False)
    assert len(list(loader)) == 8
    built = sorted(map(int, (tmp_path / "built").read_text().split()))
    assert built == [*range(4), *range(8, 20), *range(24, 40)]


@pytest.mark.parametrize("kind", [data.Stream, data.StreamWithState])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_after_what_is_left_out(kind, num_workers):
    whole = batches(loaded(kind, num_workers=num_workers))
    found = batches(loaded(kind, num_workers=num_workers, skip_steps=[1, 4]))
    assert found == [batch for step, batch in enumerate(whole) if step not in (1, 4)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [data.Augmented, data.Stream])
@pytest.mark.parametrize("taken", range(1, 5))
def test_a_run_that_resumes_leaves_out_the_same(kind, num_workers, taken):
    loader = loaded(kind, num_workers=num_workers, skip_steps=SKIPPED)
    iterator = iter(loader)
    [next(iterator) for _ in range(taken if num_workers or kind is data.Augmented else 1)]  # it has two
    state = copy.deepcopy(loader.state_dict())
    rest = batches(iterator)
    resumed = loaded(kind, seed=2, num_workers=num_workers)  # is not told
    resumed.load_state_dict(state)
    assert batches(resumed) == rest
    assert resumed.state_dict()["epoch"] == 1
    if kind is data.Augmented:
        assert len(list(resumed)) == 9  # (1, 2) is of the next epoch


def test_a_state_from_before_a_spike_goes_on_without_it():
    loader = loaded(seeding="batch")
    iterator = iter(loader)
    [next(iterator) for _ in range(3)]
    state, rest = loader.state_dict(), batches(iterator)
    resumed = loaded(seed=2, seeding="batch", skip_steps=[6])
    resumed.load_state_dict(state)
    assert batches(resumed) == [batch for step, batch in enumerate(rest, 3) if step != 6]


def test_the_epochs_of_a_run_are_counted_over_resumptions():
    loader = loaded()
    assert loader.state_dict()["epoch"] == 0
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["epoch"] == 0
    list(iterator)
    assert loader.state_dict()["epoch"] == 1
    next(iter(loader))
    next(iter(loader))  # the second epoch was broken off
    state = loader.state_dict()
    assert state["epoch"] == 2
    resumed = loaded(seed=2)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["epoch"] == 2
    list(resumed)
    assert resumed.state_dict()["epoch"] == 3


def test_actors_leave_out_the_same(ray_session):
    assert batches(loaded(workers="ray", skip_steps=SKIPPED)) == batches(loaded(skip_steps=SKIPPED))


def test_bad_values_are_refused_when_the_loader_is_made():
    with pytest.raises(ValueError, match="skip_steps"):
        DataLoader(range(4), skip_steps=[-1])


def test_random_steps_and_places():
    """Whatever is left out, and wherever a run is resumed, the rest is the same."""
    draw = random.Random(3)
    for _ in range(8):
        skipped = draw.sample(range(10), draw.randrange(1, 9))
        options = {"num_workers": draw.choice([1, 2, 3]), "seeding": draw.choice(["worker", "batch"])}
        whole = batches(loaded(**options, skip_steps=skipped))
        assert len(whole) == 10 - len(skipped)
        loader, found = loaded(**options, skip_steps=skipped), []
        iterator = iter(loader)
        for _ in range(len(whole)):
            found.append(plain(next(iterator)))
            if draw.random() < 0.3:
                state = copy.deepcopy(loader.state_dict())
                loader = loaded(seed=draw.randrange(99), **options)
                loader.load_state_dict(state)
                iterator = iter(loader)
        assert found == whole
        assert next(iterator, None) is None
