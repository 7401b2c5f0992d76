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
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert ["position", "epoch 0, 3 batches taken; step 3 comes next"] in [[one[0], one[1].strip()] for one in lines]
    assert "epoch 0: 7" in words(result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_show_tells_everything_as_json(run):
    state = saved(3, shuffle=True)
    write(state, "state.json")
    assert json.loads(run("show", "state.json", "--json").stdout) == described(state)


def test_show_tells_the_states_of_all_ranks(run):
    states = of_ranks(4)
    torch.save([state.pack() for state in states], "ranks.pt")
    assert "ranks 0 to 3, of one loader" in words(run("show", "ranks.pt").stdout)
    assert json.loads(run("show", "ranks.pt", "--json").stdout) == list(map(described, states))


def test_show_takes_a_key(run):
    torch.save({"loaders": {"train": saved(1).pack(), "val": saved(2).pack()}}, "checkpoint.pt")
    result = run("show", "checkpoint.pt")
    assert result.exit_code == 2
    assert words(result.stderr) == (
        "rayloader: checkpoint.pt holds 2 states; choose one by --key: loaders.train, loaders.val"
    )
    assert "2 batches taken" in run("show", "checkpoint.pt", "--key", "loaders.val").stdout


def test_show_tells_what_a_log_is(run):
    logged("run.arrows")
    told = words(run("show", "run.arrows").stdout)
    assert "provenance log 20 rows" in told
    assert "epoch 0 steps 0 to 9 epoch 1 steps 0 to 9" in told
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
    for name, step in (("checkpoint.pt", 40), ("later.pt", 60)):
        torch.save({"loader": saved(step, dataset=range(1000)).pack()}, name)
    logged("run-a.arrows")
    logged("run-b.arrows", seed=2)
    commands = [
        line
        for line in commands_of((ROOT / "docs/howto/replay.md").read_text())
        if re.match("rayloader (show|diff)", line)
    ]
    assert len(commands) == 3
    for command in commands:
        _, *arguments = shlex.split(command)
        assert run(*arguments).exit_code == (arguments[0] == "diff")


# ---- diff


def test_states_that_are_the_same(run):
    write(saved(), "a.json")
    result = run("diff", "a.json", "a.json")
    assert (result.exit_code, result.stdout) == (0, "The states are the same.\n")
    assert json.loads(run("diff", "a.json", "a.json", "--json").stdout) == {
        "same": True,
        "states": [{"rank": None, "relation": "", "differences": []}],
    }


def test_states_that_differ(run):
    write(saved(3), "a.json")
    write(saved(4), "b.json")
    result = run("diff", "a.json", "b.json")
    assert result.exit_code == 1
    assert result.stdout.startswith("They are of the same epoch with the same seeds and order, at steps 3 and 4.")
    assert "position.next_step 3 4" in words(result.stdout)
    result = run("diff", "a.json", "b.json", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert {"name": "position.next_step", "a": 3, "b": 4} in found["states"][0]["differences"]


def test_the_states_of_all_ranks_are_compared_by_rank(run):
    states = of_ranks(3)
    torch.save([state.pack() for state in states], "a.pt")
    later = saved(4, num_replicas=3, rank=1, shuffle=True)
    torch.save([states[0].pack(), later.pack(), states[2].pack()], "b.pt")
    write(later, "later.json")
    assert run("diff", "a.pt", "a.pt").stdout == "The states of all 3 ranks are the same.\n"
    assert run("diff", "a.pt", "b.pt").stdout.startswith("Rank 1: They are of the same epoch")
    assert run("diff", "b.pt", "later.json").exit_code == 0
    assert run("diff", "a.pt", "later.json").exit_code == 1
    write(saved(), "alone.json")
    result = run("diff", "a.pt", "alone.json")
    assert result.exit_code == 2
    assert "these are the states of other ranks" in words(result.stderr)


def test_many_differences_are_told_in_short(run):
    versions = [{f"package{n}": f"{m}" for n in range(25)} for m in range(2)]
    for name, one in zip("ab", versions, strict=True):
        write(saved()._replace(versions=one), f"{name}.json")
    result = run("diff", "a.json", "b.json")
    assert result.stdout.rstrip().endswith("and 5 more; --json lists all")
    assert len(json.loads(run("diff", "a.json", "b.json", "--json").stdout)["states"][0]["differences"]) == 25


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
    assert "seeds.now.torch_seed" in result.stdout
    result = run("diff", "a.arrows", "c.arrows", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert (found["same"], found["partings"][0]["column"], found["partings"][0]["epoch"]) == (False, "digest", 0)
    assert "parts.dataset" in [one["name"] for one in found["causes"]]


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


def test_a_state_and_a_log_are_not_compared(run):
    logged("a.arrows")
    write(saved(), "a.json")
    result = run("diff", "a.arrows", "a.json")
    assert result.exit_code == 2
    assert "one of a.arrows and a.json is a state, and the other a log" in words(result.stderr)


@pytest.mark.parametrize("char", ["\x1b", "\x07", "\x9b", "\r", "\u202e", "\ud800"])
@pytest.mark.parametrize("command", ["show", "diff"])
def test_what_a_file_holds_does_not_reach_the_terminal_as_a_command(run, command, char):
    """Neither to move its cursor, nor to set its title, nor to write from right to left."""
    escaped = char.encode("unicode_escape").decode()
    state = saved(num_workers=0)
    odd = state._replace(versions={f"a{char}]2;": f"{char}[2J"}, fits=state.fits._replace(seeding=f"x{char}"))
    write(odd, "odd.json")
    write(state, "plain.json")
    result = run(command, "odd.json", *["plain.json"] * (command == "diff"))
    assert char not in result.stdout
    assert f"{escaped}[2J" in result.stdout
    torch.save({"name": [odd.pack(), f"x{char}"], f"k{char}": odd.pack()}, "two.pt")
    result = run(command, "two.pt", *["plain.json"] * (command == "diff"))
    assert char not in result.stderr
    assert f"k{escaped}" in words(result.stderr)
    list(DataLoader(range(8), batch_size=4, name=f"l{char if char != chr(0xD800) else ''}", provenance="log"))
    assert char not in run("show", "log").stdout


def test_text_in_a_state_is_no_markup(run):
    write(saved()._replace(versions={"[bold]x[/]": "[red]1"}), "a.json")
    assert "[bold]x[/] [red]1" in words(run("show", "a.json").stdout)
