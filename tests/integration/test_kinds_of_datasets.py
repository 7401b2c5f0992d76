"""Kinds of datasets that real programs hold, by torch's workers, by forks and by actors: see kinds.py.

Each side is a program of its own; torch's and that of forks never import Ray, and that of actors joins the tests'. They
run side by side.
"""

import pickle

import pytest

from kinds import KINDS
from programs import Program
from test_scripts import FOLDER, finish, kill_group, start

SIDES = "torch", "spawn", "fork", "ray"


@pytest.fixture(scope="module", autouse=True)
def programs(ray_session, tmp_path_factory):
    """The programs, by their names; those of the sides with the files that they write."""
    folder = tmp_path_factory.mktemp("kinds")
    for side in SIDES:
        (folder / side).mkdir()
    arguments = {side: ("script_kinds.py", side, folder / f"{side}.pickle", folder / side) for side in SIDES}
    programs = {"ray": start(*arguments.pop("ray"), joined=True)}
    programs |= {side: Program(FOLDER / script, *more) for side, (script, *more) in arguments.items()}
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
    torchs, forks, actors = (results[side][kind.name] for side in ("torch", "fork", "ray"))
    assert not (isinstance(torchs, dict) and "error" in torchs), torchs
    assert forks == torchs
    kind.actors.check(results["spawn"][kind.name] if kind.actors.method == "spawn" else torchs, actors)


@pytest.mark.parametrize("side", SIDES)
def test_what_multiprocessing_finalizes_is_finalized_once_in_each_worker(side, programs, results):
    folder, _ = programs
    assert sorted((folder / side / "finalized" / "workers").read_text().split()) == ["0", "1"]
