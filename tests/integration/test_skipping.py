"""`skip_steps`: which batches nobody builds and nobody gets; the conformance suite disturbs runs that have some."""

import pytest

import replay_data as data
import stateful
from checkpoint_data import batches
from probes import Calls, oversubscribed
from rayloader import DataLoader

pytestmark = oversubscribed


def loaded(dataset=data.Augmented, seed=1, **options):
    data.seed(seed)
    return data.make(dataset, **{"workers": "fork", **options})


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"num_workers": 1}, {"persistent_workers": True}, {"in_order": False}]
)
def test_with_batch_seeding_all_other_batches_stay_the_same(options):
    whole = loaded(seeding="batch", **{**options, "in_order": True})
    expected = [[*batches(whole)], [*batches(whole)]]
    loader = loaded(seeding="batch", **options, skip_steps=[0, 3, 4, (0, 9), (1, 2)])
    for of_epoch, gone in zip(expected, ([0, 3, 4, 9], [2]), strict=True):
        left = [batch for step, batch in enumerate(of_epoch) if step not in gone]
        assert sorted(batches(loader), key=str) == sorted(left, key=str)


@pytest.mark.parametrize("workers", ["fork", "ray"])
def test_nobody_builds_them(tmp_path, workers, ray_session):
    def note(index):
        with (tmp_path / "built").open("a") as file:
            file.write(f"{index}\n")
        return index

    loader = DataLoader(Calls(note, 40), 4, num_workers=2, workers=workers, skip_steps=[1, 5])
    assert len(list(loader)) == 8
    built = sorted(map(int, (tmp_path / "built").read_text().split()))
    assert built == [*range(4), *range(8, 20), *range(24, 40)]


@pytest.mark.parametrize("kind", [stateful.StatefulStream, stateful.Shuffled])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_after_what_is_left_out_also_where_the_loader_that_goes_on_is_not_told(kind, num_workers):
    whole = [*batches(loaded(kind, num_workers=num_workers))]
    loader = loaded(kind, num_workers=num_workers, skip_steps=[1, 4])
    iterator = batches(loader)
    found, state = [next(iterator), next(iterator)], loader.state_dict()
    resumed = loaded(kind, seed=2, num_workers=num_workers)
    resumed.load_state_dict(state)
    assert [*found, *batches(resumed)] == [batch for step, batch in enumerate(whole) if step not in (1, 4)]


def test_an_epoch_that_was_broken_off_counts():
    loader = loaded()
    next(iter(loader))
    next(iter(loader))
    resumed = loaded(skip_steps=[(1, 6)])
    resumed.load_state_dict(loader.state_dict())
    assert len([*resumed]) == 8  # but for the step that was taken
    assert resumed.state_dict()["epoch"] == 2
