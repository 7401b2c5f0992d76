"""`rayloader show` and `rayloader diff`: what they print, as text of 80 columns and as JSON, and how they end."""

import json
import re
import shlex

import pytest
import torch
from typer.testing import CliRunner

from documents import ROOT, commands_of
from rayloader import DataLoader
from rayloader.cli.commands import app
from rayloader.replay.describe import described
from states import of_ranks, saved


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder of the test's, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        result = CliRunner().invoke(app, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert all(len(line) <= 80 for line in result.output.splitlines() if not line.startswith((" ", "{", "[")))
        return result

    return run


def words(text):
    return " ".join(text.split())


def write(state, name):
    with open(name, "w") as file:
        json.dump(state.pack(), file)


def logged(name, *, seed=1, stop=None, dataset=range(40)):
    """A run of two epochs without workers, with a log."""
    torch.manual_seed(seed)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, provenance=name)
    for epoch in range(2):
        for step, _ in enumerate(loader):
            if (epoch, step) == stop:
                return


# ---- show


def test_show_tells_what_a_state_is(run):
    write(saved(3, shuffle=True, skip_steps=[7]), "state.json")
    result = run("show", "state.json")
    assert result.exit_code == 0
    assert "next epoch: 0, step: 3, between_epochs: False" in words(result.stdout)
    assert "skip_steps [[0; 7]]" in words(result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_show_tells_everything_as_json(run):
    state = saved(3, shuffle=True)
    write(state, "state.json")
    assert json.loads(run("show", "state.json", "--json").stdout) == described(state)


def test_show_tells_the_states_of_all_ranks(run):
    states = of_ranks(4)
    torch.save([state.pack() for state in states], "ranks.pt")
    told = words(run("show", "ranks.pt").stdout)
    assert "num_replicas: 4, rank: 0 (rank 0; --json tells the others)" in told
    assert json.loads(run("show", "ranks.pt", "--json").stdout) == list(map(described, states))


def test_show_takes_a_key(run):
    torch.save({"loaders": {"train": saved(1).pack(), "val": saved(2).pack()}}, "checkpoint.pt")
    result = run("show", "checkpoint.pt")
    assert result.exit_code == 2
    assert words(result.stderr) == (
        "rayloader: checkpoint.pt holds 2 states; choose one by --key: loaders.train, loaders.val"
    )
    assert "epoch: 0, step: 2" in words(run("show", "checkpoint.pt", "--key", "loaders.val").stdout)


def test_show_tells_what_a_log_is(run):
    logged("run.arrows")
    told = words(run("show", "run.arrows").stdout)
    assert "iteration 0 loader: range, epoch: 0" in told
    assert "first_step: 0, last_step: 9, steps: 10, outcomes: batch: 10" in told
    found = json.loads(run("show", "run.arrows", "--json").stdout)
    assert [one["steps"] for one in found["iterations"]] == [10, 10]


def test_what_cannot_be_read_is_an_error(run, tmp_path):
    (tmp_path / "run.arrows").write_bytes(b"\xff\xff\xff\xff and then something else")
    (tmp_path / "old.json").write_text(json.dumps({**saved().pack(), "version": 1}))
    for name, text in (
        ("run.arrows", "is no provenance log"),
        ("old.json", "the state has version 1"),
        ("x", "x can't"),
    ):
        result = run("show", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert text in words(result.stderr)


def test_the_commands_of_the_page_run_as_they_stand(run):
    torch.save({"loader": saved(40, dataset=range(1000)).pack()}, "checkpoint.pt")
    logged("run-a.arrows")
    logged("run-b.arrows", seed=2)
    commands = [
        line
        for line in commands_of((ROOT / "docs/howto/replay.md").read_text())
        if re.match("rayloader (show|diff)", line)
    ]
    assert len(commands) == 2
    for command in commands:
        _, *arguments = shlex.split(command)
        assert run(*arguments).exit_code == (arguments[0] == "diff")


# ---- diff


def test_the_logs_of_the_same_runs(run):
    logged("a.arrows")
    logged("b.arrows", stop=(1, 4))
    result = run("diff", "a.arrows", "b.arrows")
    assert result.exit_code == 0, result.output
    assert re.match(r"1[45] steps are in both logs. The runs had the same batches.\n$", result.stdout)


def test_logs_that_part_ways(run):
    logged("a.arrows")
    logged("b.arrows", seed=2)
    logged("c.arrows", dataset=[-n for n in range(40)])
    result = run("diff", "a.arrows", "b.arrows")
    assert result.exit_code == 1
    assert "The runs part ways in epoch 0 at step 0, in: indices." in words(result.stdout)
    result = run("diff", "a.arrows", "c.arrows", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["same"], found["partings"][0]["column"], found["partings"][0]["epoch"]) == (False, "digest", 0)


def test_logs_without_a_step_in_common_are_not_compared(run):
    logged("a.arrows")
    state = DataLoader(range(40), batch_size=4, shuffle=True).state_dict()
    loader = DataLoader(range(40), batch_size=4, shuffle=True, provenance="b.arrows")
    loader.load_state_dict({**state, "epoch": 5})
    list(loader)
    result = run("diff", "a.arrows", "b.arrows")
    assert (result.exit_code, words(result.stderr)) == (2, "rayloader: the logs have no step in common")


def test_loaders_of_one_log_are_told_apart(run):
    for name in ("train", "val"):
        list(DataLoader(range(8), batch_size=4, name=name, provenance="both.arrows"))
    result = run("diff", "both.arrows", "both.arrows")
    assert result.exit_code == 2
    assert "is of several loaders; choose one by --key: train, val" in words(result.stderr)
    assert run("diff", "both.arrows", "both.arrows", "--key", "val").exit_code == 0
    result = run("show", "both.arrows", "--key", "test")
    assert "is of no loader test; choose one by --key: train, val" in words(result.stderr)


def test_states_are_not_compared(run):
    logged("a.arrows")
    write(saved(), "a.json")
    result = run("diff", "a.arrows", "a.json")
    assert result.exit_code == 2
    assert "a.json holds a state, and diff compares provenance logs" in words(result.stderr)


@pytest.mark.parametrize("char", ["\x1b", "\x07", "\x9b", "\r", "\u202e", "\ud800"])
def test_what_a_file_holds_does_not_reach_the_terminal_as_a_command(run, char):
    """Neither to move its cursor, nor to set its title, nor to write from right to left."""
    escaped = char.encode("unicode_escape").decode()
    state = saved(num_workers=0)
    odd = state._replace(versions={f"a{char}]2;": f"{char}[2J"}, fits=state.fits._replace(seeding=f"x{char}"))
    write(odd, "odd.json")
    result = run("show", "odd.json")
    assert char not in result.stdout
    assert f"{escaped}[2J" in result.stdout
    torch.save({"name": [odd.pack(), f"x{char}"], f"k{char}": odd.pack()}, "two.pt")
    result = run("show", "two.pt")
    assert char not in result.stderr
    assert f"k{escaped}" in words(result.stderr)
    list(DataLoader(range(8), batch_size=4, name=f"l{char if char != chr(0xD800) else ''}", provenance="log"))
    assert char not in run("show", "log").stdout


def test_text_in_a_state_is_no_markup(run):
    write(saved()._replace(versions={"[bold]x[/]": "[red]1"}), "a.json")
    assert "[bold]x[/]: [red]1" in words(run("show", "a.json").stdout)
