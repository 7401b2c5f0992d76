"""Kinds of datasets that real programs hold, by torch's workers, by forks and by actors: see kinds.py.

Each side is a program of its own; torch's and that of forks never import Ray, and that of actors joins the tests'. They
run side by side.
"""

import json
import pickle

import pytest

from kinds import KINDS
from test_scripts import finish, kill_group, start

SIDES = "torch", "fork", "ray"
MOVE_LIMIT = 540  # seconds for workers to move on a machine with other work; on expiry the test fails


@pytest.fixture(scope="module", autouse=True)
def programs(ray_session, tmp_path_factory):
    """The programs, by their names; those of the sides with the files that they write."""
    folder = tmp_path_factory.mktemp("kinds")
    for side in SIDES:
        (folder / side).mkdir()
    programs = {
        side: start("script_kinds.py", side, folder / f"{side}.pickle", folder / side, joined=side == "ray")
        for side in SIDES
    }
    yield folder, programs
    for program in programs.values():
        kill_group(program)
        program.communicate()


@pytest.fixture(scope="module")
def results(programs):
    """What came of each kind, by side and name."""
    folder, programs = programs
    results = {}
    for side in SIDES:
        _, errors = finish(programs[side])
        assert programs[side].returncode == 0, errors
        assert "Traceback" not in errors
        assert (folder / side / "ended").read_text() == "True\n"  # an `atexit` callback of the program's: there alone
        results[side] = pickle.loads((folder / f"{side}.pickle").read_bytes())
    return results


def without_what_is_missing():
    for kind in KINDS:
        reason = f"{', '.join(kind.missing)} is not installed"
        yield pytest.param(kind, id=kind.name, marks=pytest.mark.skipif(bool(kind.missing), reason=reason))


@pytest.mark.parametrize("kind", [*without_what_is_missing()])
def test_forks_give_what_torchs_workers_give_and_actors_the_same_or_a_clear_error(kind, results):
    torchs, forks, actors = (results[side][kind.name] for side in SIDES)
    assert not (isinstance(torchs, dict) and "error" in torchs), torchs
    assert forks == torchs
    kind.actors.check(torchs, actors)


def test_workers_move_to_actors_unless_the_dataset_cannot_be_pickled_which_the_log_says_once(results, tmp_path):
    assert results  # the programs that use all cores have ended
    output, errors = finish(program := start("script_moving.py", tmp_path), MOVE_LIMIT)
    assert program.returncode == 0, errors
    found = json.loads(output[-1])
    ((name, level, line),) = found["lines"]
    assert (name, level) == ("rayloader", "INFO")
    assert "the workers stay forks of this process" in line
    assert "dataset.epoch: multiprocessing.sharedctypes.Synchronized can't be sent to a worker" in line
    assert found["kinds"]["Numbers"][0] == ["fork"] * 2
    assert ["actor"] * 2 in found["kinds"]["Numbers"]
    assert found["kinds"]["Numbers"][-1] == ["fork"] * 2  # each epoch begins with forks, and the last is short
    assert set(map(tuple, found["kinds"]["Signalled"])) == {("fork",) * 2}
