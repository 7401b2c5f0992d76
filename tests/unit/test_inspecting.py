"""What a state is, in plain types; and `rayloader show`, which prints it as text of 80 columns and as JSON."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

from rayloader.cli import application
from rayloader.cli.states import described
from rayloader.resume.state import VERSION, State
from states import of_ranks, saved


def test_a_description_is_complete_and_of_plain_types():
    state = saved(3, shuffle=True, skip_steps=[7, (2, 5)], digests=[10, 11])
    found = described(state)
    assert found == json.loads(json.dumps(found)) == described(State.load(copy.deepcopy(state.pack())))
    assert found.keys() > {*State._fields}
    assert (found["epoch"], found["step"], found["version"]) == (0, 3, VERSION)
    assert found["fits"].items() >= {"batch_size": 4, "seeding": "worker", "dataset_length": 100}.items()
    assert found["position"]["delivered"] == 3
    assert len(found["position"]["workers"]) == found["num_workers"] == 2
    assert found["skip_steps"] == [[0, 7], [2, 5]]
    assert found["now"]["random"]["torch"].startswith("5056 bytes, checksum ")


# ---- the command


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder of the test's, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        result = CliRunner().invoke(application(), arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert all(len(line) <= 80 for line in result.output.splitlines() if not line.startswith((" ", "{", "[")))
        return result

    return run


def words(text):
    return " ".join(text.split())


def test_show_tells_what_a_state_is_and_those_of_all_ranks(run):
    state = saved(3, shuffle=True, skip_steps=[7])
    torch.save(state.pack(), "state.pt")
    result = run("show", "state.pt")
    assert result.exit_code == 0
    assert words(result.stdout).startswith('epoch 0 step 3 num_workers 2 fits {"batch_size": 4, ')
    assert "skip_steps [[0, 7]]" in words(result.stdout)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert json.loads(run("show", "state.pt", "--json").stdout) == json.loads(json.dumps(described(state)))
    states = of_ranks(4)
    torch.save([state.pack() for state in states], "ranks.pt")
    told = words(run("show", "ranks.pt").stdout)
    assert '"num_replicas": 4, "rank": 0} (rank 0; --json tells the others)' in told
    assert json.loads(run("show", "ranks.pt", "--json").stdout) == list(map(described, states))


def test_show_takes_a_key_and_says_what_it_cannot_read(run):
    torch.save({"loaders": {"train": saved(1).pack(), "val": saved(2).pack()}}, "checkpoint.pt")
    torch.save({**saved().pack(), "version": 1}, "old.pt")
    assert "epoch 0 step 2" in words(run("show", "checkpoint.pt", "--key", "loaders.val").stdout)
    for name, text in (
        ("checkpoint.pt", "checkpoint.pt holds 2 states; choose one by --key: loaders.train, loaders.val"),
        ("old.pt", "the state has version 1"),
        ("x", "x can't"),
    ):
        result = run("show", name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert text in words(result.stderr)


@pytest.mark.parametrize("char", ["\x1b", "\x07", "\x9b", "\r", "\u202e", "\ud800"])
def test_what_a_file_holds_does_not_reach_the_terminal_as_a_command(run, char):
    """Neither to move its cursor, nor to set its title, nor to write from right to left; nor is it markup."""
    state = saved(num_workers=0)
    odd = state._replace(fits=state.fits._replace(seeding={"[bold]x[/]": "[red]1"}, scheduling={f"a{char}]2;": char}))
    torch.save(odd.pack(), "odd.pt")
    result = run("show", "odd.pt")
    assert char not in result.stdout
    assert json.dumps(char)[1:-1] in result.stdout
    assert '"[bold]x[/]": "[red]1"' in words(result.stdout)
    torch.save({"name": [odd.pack(), f"x{char}"], f"k{char}": odd.pack()}, "two.pt")
    result = run("show", "two.pt")
    assert char not in result.stderr
    assert f"k{char.encode('unicode_escape').decode()}" in words(result.stderr)
