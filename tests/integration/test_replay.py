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
from checkpoint_data import plain
from documents import ROOT, blocks_of, commands_of
from probes import oversubscribed
from rayloader import RayloaderError, ReplayError, StateError
from rayloader.cli import application
from rayloader.rebuild import rebuilt
from rayloader.resume import checkpoint
from rayloader.resume.digest import digest_of
from rayloader.resume.state import State

pytestmark = oversubscribed

FORKS = {"workers": "fork"}


class Run:
    """What a run has delivered, by epochs and steps, and all that it has saved."""

    def __init__(self, loader, epochs=2, save_after=(3, 6)):
        self.epochs, self.states = [], [copied(loader.state_dict())]
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
                    self.states.append(copied(loader.state_dict()))
            self.epochs.append(steps)
        self.states.append(copied(loader.state_dict()))


def copied(state):
    return copy.deepcopy(state)


def loaded(states):
    return [State.load(one) for one in states]


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


def make_kind(options):
    return {key: value for key, value in options.items() if key != "skip_steps"}


SAMPLED = ["worker seeding", "batch seeding", "persistent workers", "skips", "a stream", "a stream with state"]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SAMPLED else pytest.mark.full) for kind in KINDS]
)
@pytest.mark.parametrize("apart", [3, pytest.param(1, marks=pytest.mark.full)])
def test_any_step_of_a_run_is_built_again_from_each_state_of_its_epoch_that_suits(kind, apart):
    options = KINDS[kind]
    run, tried, refused = run_of(**options), 0, []
    for state in run.states[::apart]:
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


def test_where_workers_take_what_comes_no_state_says_what_they_have_built():
    run = run_of(in_order=False, epochs=1)
    with pytest.raises(StateError, match="no state says which; use seeding='batch'"):
        again(in_order=False).batch_at(0, 7, state=run.states)
    run = run_of(in_order=False, seeding="batch", epochs=1)
    assert len(run.epochs[0]) == 10


def test_without_workers_the_program_s_generators_need_a_state_from_right_before_the_step():
    data.seed(1)
    loader = data.make(num_workers=0)
    iterator = iter(loader)
    [next(iterator) for _ in range(3)]
    state, fourth, fifth = copied(loader.state_dict()), next(iterator), next(iterator)
    assert same(again(num_workers=0).batch_at(0, 3, state=state), fourth)
    with pytest.raises(StateError, match="samples draw from the program's own random generators"):
        again(num_workers=0).batch_at(0, 4, state=state)
    assert fifth is not None


def test_a_stateless_dataset_without_randomness_needs_no_generator():
    run = run_of(data.Indices, num_workers=0)
    assert same(again(data.Indices, num_workers=0).batch_at(0, 7, state=run.states[1]), run.epochs[0][7])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_nothing_of_the_program_changes(num_workers):
    run = run_of(num_workers=num_workers, seeding="batch")
    loader = again(num_workers=num_workers, seeding="batch")
    iterator = iter(loader)
    first = next(iterator)
    before = torch.get_rng_state(), random.getstate(), repr(loader.state_dict())
    loader.batch_at(0, 5, state=run.states[0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), repr(loader.state_dict()))
    assert len([first, *iterator]) == len(loader)


def test_a_state_of_eight_workers_suits_a_loader_of_one():
    run = run_of(num_workers=8, epochs=1)
    for state in run.states[:3]:
        assert same(again(num_workers=1).batch_at(0, 9, state=state), run.epochs[0][9])


def test_the_nearest_state_counts(monkeypatch):
    run = run_of(epochs=1)
    built_before = [rebuilt(again(), loaded(run.states[:count]), 0, 9).before for count in (1, 2, 3)]
    assert built_before == sorted(built_before, reverse=True)
    assert built_before[0] > built_before[2]


def test_a_batch_seeded_by_itself_is_built_at_once(monkeypatch):
    monkeypatch.setattr(checkpoint, "generators_of", lambda _: [])  # modules of other tests hold generators
    run = run_of(seeding="batch", epochs=1)
    for state in run.states[:3]:
        found = rebuilt(again(seeding="batch"), loaded([state]), 0, 8)
        assert found.before == 0
        assert same(found.batch, run.epochs[0][8])


@pytest.mark.parametrize("rank", [0, 3])
def test_one_of_four_ranks_is_built_again_from_the_list_of_all_states(rank):
    states, steps = [], {}
    for one in range(4):
        data.seed(one)
        loader = data.of_rank(one, 4)
        iterator = iter(loader)
        first, state = next(iterator), copied(loader.state_dict())
        states.append(state)
        steps[one] = dict(enumerate([first, *iterator]))
    data.seed(9)
    for step, batch in steps[rank].items():
        assert same(data.of_rank(rank, 4).batch_at(0, step, state=states), batch)


def test_a_run_in_which_a_worker_was_killed(tmp_path):
    mark = tmp_path / "killed"
    run = run_of(data.KillsOnce(mark), epochs=1)
    assert mark.exists()
    for step, batch in run.epochs[0].items():
        assert same(again(data.KillsOnce(mark)).batch_at(0, step, state=run.states), batch)


def test_a_run_that_was_resumed_with_a_step_left_out():
    data.seed(1)
    loader = data.make(**FORKS)
    iterator = iter(loader)
    [next(iterator) for _ in range(3)]
    state = copied(loader.state_dict())
    spiked = [*iterator]
    resumed = again(skip_steps=[5])
    resumed.load_state_dict(state)
    run = Run(resumed, epochs=1)
    rest, [state] = run.epochs[0], [one for one in run.states if one["skip_steps"] and one["epoch"] == 0][:1]
    assert {*rest} == {3, 4, 6, 7, 8, 9}
    assert same(rest[4], spiked[1])  # of the other worker
    assert not same(rest[7], spiked[4])  # whose worker has not drawn for step 5
    for step, batch in rest.items():
        assert same(again().batch_at(0, step, state=state), batch)
    with pytest.raises(StateError, match="never delivered"):
        again().batch_at(0, 5, state=state)


def test_actors_deliver_what_forks_build_again(ray_session):
    run = run_of(workers="ray", epochs=1)
    for step in (1, 8):
        assert same(again(workers="ray").batch_at(0, step, state=run.states), run.epochs[0][step])


def test_the_loader_s_own_state_is_the_default():
    loader = data.make(**FORKS)
    iterator = iter(loader)
    first, second = next(iterator), next(iterator)
    assert same(loader.batch_at(0, 0), first)
    assert same(loader.batch_at(0, 1), second)


def rescaled():
    dataset = data.Augmented()
    dataset.scale = 2.0
    return dataset


def test_another_transform_is_an_error_where_the_state_has_a_batch_of_that_worker():
    run = run_of(epochs=1)
    with pytest.raises(ReplayError, match="differs"):
        again(rescaled()).batch_at(0, 8, state=run.states[2])


def test_the_exception_of_a_sample_is_the_batch_s():
    run = run_of(data.Raising, epochs=1)
    [(step, error)] = [(step, one) for step, one in run.epochs[0].items() if isinstance(one, ValueError)]
    with pytest.raises(ValueError, match=re.escape(str(error))):
        again(data.Raising).batch_at(0, step, state=run.states)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((5, 0), "a state of that epoch"),
        ((0, 400), "never delivered"),
        ((0, -1), "step must be a whole number >= 0"),
        ((0, "1"), "step must be a whole number >= 0"),
    ],
)
def test_a_place_that_does_not_exist(place, message):
    run = run_of(epochs=1)
    with pytest.raises((StateError, ValueError, TypeError), match=message):
        again().batch_at(*place, state=run.states[0])


class Dies(data.Augmented):
    """Ends the process that rebuilds it, not a worker's."""

    def __len__(self):
        if multiprocessing.current_process().name == "rayloader-replay":
            os.kill(os.getpid(), signal.SIGKILL)
        return data.LENGTH


def test_a_process_that_dies_is_an_error():
    run = run_of(epochs=1)
    with pytest.raises(RayloaderError, match="has died, with exit code -9"):
        again(Dies).batch_at(0, 4, state=run.states[0])


def test_samplers_that_draw_one_by_one(tmp_path):
    """Earlier steps than the state's are drawn with the generators of the epoch's start, later ones not by guess."""
    options = {"shuffle": None, "num_workers": 2}

    def replacing():
        generator = torch.Generator().manual_seed(3)
        return RandomSampler(range(data.LENGTH), replacement=True, num_samples=80, generator=generator)

    def drawing():
        return data.DrawsOneByOne()

    refused = []
    for sampler in (replacing, drawing):
        run = run_of(sampler=sampler(), epochs=1, **options)
        for state in run.states[1:3]:
            for step in (0, 1, 2, 5, 7):
                try:
                    batch = again(sampler=sampler(), **options).batch_at(0, step, state=state)
                except StateError as error:
                    refused.append((sampler, step >= state["position"]["next_task"], str(error)))
                else:
                    assert same(batch, run.epochs[0][step])
    assert {one[:2] for one in refused} == {(drawing, True)}
    assert all("the sampler draws from the program's own random generators" in error for _, _, error in refused)


def test_a_step_without_end_is_refused_at_once():
    run = run_of(epochs=1)
    for step in (10**7, 10**9, 10**30):
        with pytest.raises(StateError, match="never delivered"):
            again().batch_at(0, step, state=run.states[0])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_classes_of_a_function_are_the_program_s_own(num_workers):
    class Own:
        def __init__(self, index):
            self.index = index

    class OwnError(Exception):
        pass

    class Objects(data.Augmented):
        def __getitem__(self, index):
            if index == 5:
                raise OwnError
            return Own(index)

    loader = data.make(Objects(), num_workers, collate_fn=list, shuffle=False, **FORKS)
    state, iterator = loader.state_dict(), iter(loader)
    first = next(iterator)
    with pytest.raises(OwnError):
        next(iterator)
    assert [type(one) for one in first] == [Own] * 4
    assert [type(one) for one in loader.batch_at(0, 0, state=state)] == [Own] * 4
    with pytest.raises(OwnError):
        loader.batch_at(0, 1, state=state)


# ---- the command


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `rayloader replay`; returns its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        result = CliRunner().invoke(application(), ["replay", *map(str, arguments)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


@pytest.fixture
def saved(tmp_path):
    """A run of two epochs, with a checkpoint in each."""
    run = run_of(epochs=2)
    torch.save({"model": {}, "loader": run.states[1]}, tmp_path / "checkpoint.pt")
    [second] = [state for state in run.states if state["epoch"] == 1][:1]
    torch.save(second, tmp_path / "second.pt")
    return run


def test_the_command_builds_a_step_from_a_checkpoint(command, saved, tmp_path):
    code, printed = command(
        *(tmp_path / "checkpoint.pt", "--loader", "replay_data:plain", "--step", 7),
        *("--save", tmp_path / "batch.pt"),
    )
    assert code == 0
    assert "Step 7 of epoch 0, of worker 1" in printed
    batch = saved.epochs[0][7]
    assert same(torch.load(tmp_path / "batch.pt"), batch)
    assert str(batch[0].tolist()) in printed


def test_the_command_takes_the_state_of_the_epoch_and_prints_json(command, saved, tmp_path):
    sources = tmp_path / "checkpoint.pt", tmp_path / "second.pt"
    code, printed = command(*sources, "--loader", "replay_data:plain", "--step", 7, "--epoch", 1, "--json")
    found = json.loads(printed[printed.index("{") :])
    assert code == 0
    assert found["indices"] == saved.epochs[1][7][0].tolist()
    assert found["digest"] == f"{digest_of(saved.epochs[1][7]):08x}"
    assert (found["epoch"], found["step"], found["worker"]) == (1, 7, 1)


def test_the_command_makes_the_loader_of_a_rank(command, tmp_path):
    data.seed(3)
    loader = data.of_rank(3, 4)
    iterator = iter(loader)
    batches = [next(iterator)]
    torch.save(loader.state_dict(), tmp_path / "state.pt")
    batches += iterator
    arguments = (tmp_path / "state.pt", "--loader", "replay_data:of_rank", "--step", 2, "--save", tmp_path / "b.pt")
    assert command(*arguments, "--rank", 3, "--world", 4)[0] == 0
    assert same(torch.load(tmp_path / "b.pt"), batches[2])
    assert "raised TypeError" in command(*arguments)[1]


WRONG = {
    "no epoch, of two": (("--step", 1), "say which epoch"),
    "no function of that name": (("--step", 1, "--epoch", 0, "--loader", "replay_data:nobody"), "can't be found"),
    "no loader": (("--step", 1, "--epoch", 0, "--loader", "replay_data:noise"), "must be or return a rayloader"),
    "a rank that the function does not take": (
        ("--step", 1, "--epoch", 0, "--rank", 1, "--loader", "replay_data:of_nobody"),
        "replay_data:of_nobody(rank=1) raised TypeError",
    ),
    "a rank of a loader": (
        ("--step", 1, "--epoch", 0, "--rank", 1, "--loader", "replay_data:LOADER"),
        "replay_data:LOADER(rank=1) raised TypeError",
    ),
    "no such step": (("--step", 99, "--epoch", 0), "never delivered"),
    "no such epoch": (("--step", 1, "--epoch", 7), "a state of that epoch is needed; got states of epochs [0, 1]"),
    "no folder": (("--step", 1, "--epoch", 0, "--save", "none/batch.pt"), "there is no folder none"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_command_cannot_do_is_said_in_one_line(command, saved, tmp_path, case):
    arguments, message = WRONG[case]
    if "--loader" not in arguments:
        arguments += "--loader", "replay_data:plain"
    code, printed = command(tmp_path / "checkpoint.pt", tmp_path / "second.pt", *arguments)
    assert (code, message in printed) == (2, True), printed


def test_a_rank_that_the_sources_are_not_of(command, tmp_path):
    data.seed(3)
    torch.save(data.of_rank(1, 4).state_dict(), tmp_path / "state.pt")
    arguments = (tmp_path / "state.pt", "--loader", "replay_data:of_rank", "--step", 2, "--rank", 3, "--world", 4)
    code, printed = command(*arguments)
    assert (code, "a state of that epoch and of rank 3 is needed" in printed) == (2, True)


def test_a_step_that_raised_raises_in_one_line(command, tmp_path):
    path = tmp_path / "state.pt"
    run = run_of(data.Raising, epochs=1)
    torch.save(run.states[0], path)
    [step] = [step for step, one in run.epochs[0].items() if isinstance(one, ValueError)]
    code, printed = command(path, "--loader", "replay_data:raising", "--step", step)
    assert (code, "raised, and no batch came, as in the run: ValueError" in printed) == (2, True)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_step_is_told_as_it_is_counted(num_workers):
    loader = again(num_workers=num_workers, skip_steps=[0, 3], shuffle=False)
    assert loader.last_step is None
    for batch in loader:
        assert loader.last_step == (0, batch[0][0].item() // 4)
    assert loader.last_step == (0, 9)
    next(iter(loader))
    assert loader.last_step == (1, 0)


@pytest.mark.skipif(os.name != "posix", reason="the commands are those of a shell")
def test_the_story_of_the_page_runs_as_it_stands(tmp_path, command, monkeypatch):
    """Each command in its turn, as a reader would."""
    page = (ROOT / "docs" / "howto" / "replay.md").read_text()
    story = page[: page.index("## In a program")]
    [block] = blocks_of("replay.md", story)
    (tmp_path / "train.py").write_text(block.code)
    commands = commands_of(story)
    assert [line.split()[0] for line in commands] == ["python", "rayloader", "python"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "train", None)  # so that the program's is gone afterwards
    del sys.modules["train"]
    printed = []
    for line in commands:
        program, *arguments = shlex.split(line)
        if program == "rayloader":
            assert arguments.pop(0) == "replay"
            code, output = command(*arguments)
        else:
            line = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", line)
            done = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, timeout=500)
            code, output = done.returncode, done.stdout
        assert code == 0, output
        printed.append(output)
    assert printed[0].startswith("step 19: loss")
    assert "123" in printed[1][printed[1].index("indices") :].split("]")[0]
    assert printed[2] == ""  # the same run without the step has no spike
    assert torch.load(tmp_path / "spike.pt")[0].max() > 99
