"""Any batch of a run again: `DataLoader.batch_at` and `rayloader replay`, for runs of all kinds."""

import copy
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils.data import RandomSampler
from typer.testing import CliRunner

import replay_data as data
import stateful
from checkpoint_data import plain
from documents import ROOT, blocks_of, commands_of
from probes import oversubscribed
from rayloader import RayloaderError, ReplayError, StateError
from rayloader.cli import application
from rayloader.rebuild import rebuilt
from rayloader.resume import checkpoint
from rayloader.resume.digest import digest_of
from rayloader.resume.state import State
from stateful import PlannedError

pytestmark = oversubscribed

FORKS = {"workers": "fork"}


class Run:
    """What a run has delivered, by epochs and steps, and all that it has saved."""

    def __init__(self, loader, epochs=1, save_after=(3, 6)):
        self.epochs, self.states = [], [copy.deepcopy(loader.state_dict())]
        for _ in range(epochs):
            steps, iterator = {}, iter(loader)
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                except PlannedError as error:
                    batch = error
                steps[loader.last_step[1]] = batch
                if len(steps) in save_after:
                    self.states.append(copy.deepcopy(loader.state_dict()))
            self.epochs.append(steps)
        self.states.append(copy.deepcopy(loader.state_dict()))


def run_of(dataset=data.Augmented, num_workers=2, epochs=1, **options):
    data.seed(1)
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
    except PlannedError as error:
        return error


# What a run is given, and which states do not lead to each of its steps.
GENERATOR = torch.Generator()
BEFORE, BY_GUESS = "was saved after step|no state says which", "the sampler draws from the program's own random"
KINDS = {
    "worker seeding": ({}, None),
    "batch seeding": ({"seeding": "batch"}, None),
    "batch seeding without workers": ({"seeding": "batch", "num_workers": 0}, BEFORE),
    "persistent workers": ({"persistent_workers": True}, BEFORE),
    "skips": ({"skip_steps": [2, (0, 5), (1, 0)]}, None),
    "samples that raise": ({"dataset": stateful.Faulty}, None),
    "dynamic scheduling": ({"seeding": "batch", "scheduling": "dynamic"}, BEFORE),
    "a stream": ({"dataset": stateful.Shuffled}, None),
    "a stream with state": ({"dataset": stateful.StatefulStream}, None),
    "a stream without workers": ({"dataset": stateful.Shuffled, "num_workers": 0, "seeding": "batch"}, BEFORE),
    "actors, batching off": ({"workers": "ray", "batch_size": None}, None),
    "a sampler that draws one by one": ({"shuffle": None, "sampler": stateful.Lazy()}, BY_GUESS),
    "a sampler with a generator": ({"shuffle": None, "sampler": RandomSampler(range(9), True, 40, GENERATOR)}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_step_of_a_run_is_built_again_from_states_of_its_epoch_that_suit(kind, request):
    options, may_refuse = KINDS[kind]
    if "workers" in options:
        request.getfixturevalue("ray_session")

    run, tried, refused = run_of(**options, epochs=2), 0, []
    for state in run.states[::3]:
        epoch = state["epoch"]
        for step in random.Random(epoch).sample(sorted(run.epochs[epoch]), 2) if epoch < 2 else ():
            tried += 1
            try:
                loader = again(**{name: value for name, value in options.items() if name != "skip_steps"})
                batch = built(loader, epoch, step, state=state)
            except StateError as error:
                refused.append(str(error))
            else:
                assert same(batch, run.epochs[epoch][step])
    assert len(refused) < tried
    assert not refused or may_refuse
    assert all(re.search(may_refuse, error) for error in refused)


def test_where_workers_take_what_comes_no_state_says_what_they_have_built():
    with pytest.raises(StateError, match="no state says which; use seeding='batch'"):
        again(in_order=False).batch_at(0, 7, state=run_of(in_order=False).states)


def test_without_workers_the_program_s_generators_need_a_state_from_right_before_the_step():
    run = run_of(num_workers=0)
    assert same(again(num_workers=0).batch_at(0, 3, state=run.states[1]), run.epochs[0][3])
    with pytest.raises(StateError, match="samples draw from the program's own random generators"):
        again(num_workers=0).batch_at(0, 4, state=run.states[1])
    run = run_of(stateful.Indices, num_workers=0)  # which draws nothing
    assert same(again(stateful.Indices, num_workers=0).batch_at(0, 5, state=run.states[1]), run.epochs[0][5])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_of_the_program_changes_and_the_loader_s_own_state_is_the_default(num_workers):
    loader = again(num_workers=num_workers, seeding="batch")
    iterator = iter(loader)
    first, second = next(iterator), next(iterator)
    before = torch.get_rng_state().tolist(), random.getstate(), repr(loader.state_dict())
    if num_workers:
        assert same(loader.batch_at(0, 0), first)
        assert same(loader.batch_at(0, 1), second)
    fourth = loader.batch_at(0, 3)
    assert before == (torch.get_rng_state().tolist(), random.getstate(), repr(loader.state_dict()))
    rest = [*iterator]
    assert (len(rest), same(fourth, rest[1])) == (8, True)


def test_the_nearest_state_counts_and_a_batch_seeded_by_itself_is_built_at_once(monkeypatch):
    monkeypatch.setattr(checkpoint, "generators_of", lambda _: [])  # modules of other tests hold generators
    for seeding in ("worker", "batch"):
        run = run_of(seeding=seeding)
        states = [State.load(state) for state in run.states[:3]]
        found = [rebuilt(again(seeding=seeding), states[:count], 0, 9) for count in (1, 2, 3)]
        assert all(same(one.batch, run.epochs[0][9]) for one in found)
        before = [one.before for one in found]
        assert before == sorted(before, reverse=True)
        assert (before[0] > before[2]) if seeding == "worker" else not any(before)


def test_a_run_that_was_resumed_with_a_step_left_out():
    whole = run_of()
    resumed = again(skip_steps=[5])
    resumed.load_state_dict(whole.states[1])
    run = Run(resumed)
    rest, state = run.epochs[0], next(one for one in run.states if one["skip_steps"])
    assert [*rest] == [3, 4, 6, 7, 8, 9]
    assert same(rest[4], whole.epochs[0][4])  # of the other worker
    assert not same(rest[7], whole.epochs[0][7])  # whose worker has not drawn for step 5
    for step, batch in rest.items():
        assert same(again().batch_at(0, step, state=state), batch)
    with pytest.raises(StateError, match="never delivered"):
        again().batch_at(0, 5, state=state)


def test_another_transform_is_an_error_where_the_state_has_a_batch_of_that_worker():
    rescaled = data.Augmented()
    rescaled.scale = 2.0
    with pytest.raises(ReplayError, match="differs"):
        again(rescaled).batch_at(0, 8, state=run_of().states[2])


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((5, 0), "a state of that epoch"),
        *(((0, step), "never delivered") for step in (400, 10**30)),
        *(((0, step), "step must be a whole number >= 0") for step in (-1, "1")),
    ],
)
def test_a_place_that_does_not_exist(place, message):
    with pytest.raises((StateError, ValueError, TypeError), match=message):
        again().batch_at(*place, state=again().state_dict())


class Dies(data.Augmented):
    """Ends the process that rebuilds it, not a worker's."""

    def __len__(self):
        if multiprocessing.current_process().name == "rayloader-replay":
            os.kill(os.getpid(), signal.SIGKILL)
        return data.LENGTH


def test_a_process_that_dies_is_an_error():
    with pytest.raises(RayloaderError, match="has died, with exit code -9"):
        again(Dies).batch_at(0, 4, state=again().state_dict())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_classes_of_a_function_are_the_program_s_own(num_workers):
    class Own(Exception):
        pass

    class Objects(data.Augmented):
        def __getitem__(self, index):
            if index == 5:
                raise Own
            return Own()

    loader = data.make(Objects(), num_workers, collate_fn=list, shuffle=False, **FORKS)
    assert [type(one) for one in loader.batch_at(0, 0)] == [Own] * 4
    with pytest.raises(Own):
        loader.batch_at(0, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_step_is_told_as_it_is_counted(num_workers):
    loader = again(num_workers=num_workers, skip_steps=[0, 3], shuffle=False)
    assert loader.last_step is None
    for batch in loader:
        assert loader.last_step == (0, batch[0][0].item() // 4)
    assert loader.last_step == (0, 9)
    next(iter(loader))
    assert loader.last_step == (1, 0)


# ---- the command


@pytest.fixture
def command(monkeypatch):
    """Runs `rayloader replay`; returns its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        result = CliRunner().invoke(application(), ["replay", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two epochs, and files with a checkpoint of each."""
    run, folder = run_of(epochs=2), tmp_path_factory.mktemp("saved")
    second = next(state for state in run.states if state["epoch"] == 1)
    torch.save({"model": {}, "loader": run.states[1]}, folder / "checkpoint.pt")
    torch.save(second, folder / "second.pt")
    return run, (folder / "checkpoint.pt", folder / "second.pt")


def test_the_command_takes_the_state_of_the_epoch_and_prints_json(command, saved):
    run, files = saved
    code, printed = command(*files, "--loader", "replay_data:make", "--step", 7, "--epoch", 1, "--json")
    found = json.loads(printed[printed.index("{") :])
    assert code == 0
    assert found["indices"] == run.epochs[1][7][0].tolist()
    assert found["digest"] == f"{digest_of(run.epochs[1][7]):08x}"
    assert (found["epoch"], found["step"], found["worker"]) == (1, 7, 1)


def test_one_of_four_ranks_is_built_again_from_all_states_and_by_the_command_from_its_own(command, tmp_path):
    states = []
    for rank in range(4):
        data.seed(rank)
        run = Run(data.of_rank(rank, 4), save_after=(1,))
        states.append(run.states[1])
    for step, batch in run.epochs[0].items():
        assert same(data.of_rank(3, 4).batch_at(0, step, state=states), batch)
    torch.save(states[3], tmp_path / "state.pt")
    arguments = (tmp_path / "state.pt", "--loader", "replay_data:of_rank", "--step", 2, "--save", tmp_path / "b.pt")
    assert command(*arguments, "--rank", 3, "--world", 4)[0] == 0
    assert same(torch.load(tmp_path / "b.pt"), run.epochs[0][2])
    code, printed = command(*arguments, "--rank", 1, "--world", 4)
    assert (code, "a state of that epoch and of rank 1 is needed" in printed) == (2, True)


PLAIN = "--epoch", 0, "--loader", "replay_data:make"
WRONG = {
    "no epoch, of two": (("--step", 1, *PLAIN[2:]), "say which epoch"),
    "no loader": (("--step", 1, *PLAIN[:3], "replay_data:Augmented"), "must be or return a rayloader"),
    "a rank of a loader": (("--step", 1, "--rank", 1, *PLAIN[:3], "replay_data:LOADER"), "(rank=1) raised TypeError"),
    "no such step": (("--step", 99, *PLAIN), "never delivered"),
    "no such epoch": (("--step", 1, *PLAIN[2:], "--epoch", 7), "is needed; got states of epochs [0, 1]"),
    "no folder": (("--step", 1, *PLAIN, "--save", "none/batch.pt"), "there is no folder none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_command_cannot_do_is_said_in_one_line(command, saved, case):
    arguments, message = WRONG[case]
    code, printed = command(*saved[1], *arguments)
    assert (code, message in printed) == (2, True), printed


def test_a_step_that_raised_raises_in_one_line(command, tmp_path):
    run = run_of(stateful.Faulty)
    torch.save(run.states[0], tmp_path / "state.pt")
    step = next(step for step, one in run.epochs[0].items() if isinstance(one, PlannedError))
    code, printed = command(tmp_path / "state.pt", "--loader", "replay_data:raising", "--step", step)
    assert (code, "raised, and no batch came, as in the run: PlannedError" in printed) == (2, True)


def test_the_story_of_the_page_runs_as_it_stands(tmp_path, command, monkeypatch):
    """Each command in its turn, as a reader would."""
    page = (ROOT / "docs" / "howto" / "replay.md").read_text()
    story = page[: page.index("## In a program")]
    [block] = blocks_of("replay.md", story)
    (tmp_path / "train.py").write_text(block.code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "train", None)  # so that the program's is gone afterwards
    del sys.modules["train"]
    first, replay, last = map(shlex.split, commands_of(story))

    def python(_, *arguments):
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True).stdout

    assert python(*first).startswith("step 19: loss")
    code, printed = command(*replay[2:])
    assert (code, "Step 19 of epoch 0, of worker 1" in printed) == (0, True)
    assert "123" in printed[printed.index("indices") :].split("]")[0]
    assert torch.load(tmp_path / "spike.pt")[0].max() > 99
    assert python(*last) == ""  # the same run without the step has no spike
