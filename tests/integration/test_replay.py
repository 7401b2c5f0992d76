"""Any batch of a run again: `DataLoader.batch_at` and `rayloader replay`, for runs of all kinds."""

import json
import random
import re

import pytest

import replay_data as data
from checkpoint_data import plain
from probes import oversubscribed
from rayloader import StateError
from rayloader.replay import provenance
from rayloader.resume.digest import digest_of

pytestmark = oversubscribed

FORKS = {"workers": "fork"}


class Run:
    """What a run has delivered, by epochs and steps, and all that it has saved."""

    def __init__(self, loader, epochs=2, save_after=(3, 6)):
        self.epochs, self.states = [], [through_json(loader.state_dict())]
        for _ in range(epochs):
            steps, iterator = {}, iter(loader)
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except ValueError as error:
                    batch = error
                steps[iterator.position.step_of(iterator.last_task.task_id)] = batch
                if len(steps) in save_after:
                    self.states.append(through_json(loader.state_dict()))
            self.epochs.append(steps)
        self.states.append(through_json(loader.state_dict()))


def through_json(state):
    return json.loads(json.dumps(state))


def run_of(dataset=data.Augmented, num_workers=2, **options):
    data.seed(1)
    epochs = options.pop("epochs", 2)
    return Run(data.make(dataset, num_workers, **{**FORKS, **options}), epochs)


def again(dataset=data.Augmented, num_workers=2, **options):
    """A loader of another program."""
    data.seed(2)
    return data.make(dataset, num_workers, **{**FORKS, **options})


def same(batch, other):
    if isinstance(other, Exception):
        return type(batch) is type(other) and str(batch) == str(other)
    return plain(batch) == plain(other)


def built(loader, *place, **sources):
    """The batch, or the error that the dataset raised."""
    try:
        return loader.batch_at(*place, **sources)
    except ValueError as error:
        return error


KINDS = {
    "worker seeding": {},
    "one worker": {"num_workers": 1},
    "batch seeding": {"seeding": "batch"},
    "batch seeding without workers": {"seeding": "batch", "num_workers": 0},
    "batch seeding and a generator of the dataset's": {"seeding": "batch", "dataset": data.WithGenerator},
    "persistent workers": {"persistent_workers": True},
    "skips": {"skip_steps": [2, (0, 5), (1, 0)]},
    "a sample that raises": {"dataset": data.Raising},
    "dynamic scheduling": {"seeding": "batch", "scheduling": "dynamic"},
    "a stream": {"dataset": data.Stream},
    "a stream with state": {"dataset": data.StreamWithState},
    "a stream with skips": {"dataset": data.Stream, "skip_steps": [1, 4]},
    "a stream without workers, seeded by batch": {"dataset": data.Stream, "num_workers": 0, "seeding": "batch"},
    "batching off": {"batch_size": None},
}
# Modules of these tests hold random generators, from which samples might draw.
OF_SOME_STATES = {
    "persistent workers",
    "dynamic scheduling",
    "batch seeding without workers",
    "a stream without workers, seeded by batch",
}
# States alone are of no use for these.
NEEDS_LOG = {"batches as they come": {"in_order": False}, "no workers": {"num_workers": 0}}


def make_kind(options):
    return {key: value for key, value in options.items() if key != "skip_steps"}


@pytest.mark.parametrize("kind", [*KINDS, *NEEDS_LOG])
def test_any_step_of_a_run_is_built_again_by_its_log(kind, tmp_path):
    options, path = {**KINDS, **NEEDS_LOG}[kind], tmp_path / "run.arrows"
    run = run_of(**options, provenance=path)
    for epoch, steps in enumerate(run.epochs):
        for step in random.Random(epoch).sample(sorted(steps), 3):
            batch = built(again(**make_kind(options)), epoch, step, log=path)
            assert same(batch, steps[step])
            assert provenance.read(path).row(epoch, step)["digest"] == digest_of(
                *((None, batch) if isinstance(batch, Exception) else (batch,))
            )


@pytest.mark.parametrize("kind", KINDS)
def test_any_step_of_a_run_is_built_again_from_each_state_of_its_epoch_that_suits(kind):
    options = KINDS[kind]
    run, tried, refused = run_of(**options), 0, []
    for state in run.states:
        epoch = state["epoch"]
        for step in random.Random(epoch).sample(sorted(run.epochs[epoch]), 2) if epoch < 2 else ():
            tried += 1
            try:
                batch = built(again(**make_kind(options)), epoch, step, state=state)
            except StateError as error:
                refused.append(str(error))
            else:
                assert same(batch, run.epochs[epoch][step])
    assert len(refused) < tried
    assert not refused or kind in OF_SOME_STATES
    assert all(re.search("was saved after step|no state says which", error) for error in refused)
