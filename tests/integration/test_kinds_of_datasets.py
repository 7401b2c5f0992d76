"""Kinds of datasets that real programs hold, by torch's workers, by forks and by actors: see kinds.py.

Each side is a program of its own; torch's and that of forks never import Ray, and that of actors joins the tests'. They
run side by side.
"""

import pickle

import pytest

from kinds import KINDS
from programs import Program
from test_scripts import FOLDER, finish, start

SIDES = "torch", "fork", "ray"


@pytest.fixture(scope="module")
def results(ray_session, tmp_path_factory):
    """What came of each kind, by side and name."""
    folder, programs, results = tmp_path_factory.mktemp("kinds"), {}, {}
    for side in SIDES:
        (folder / side).mkdir()
        arguments = side, folder / f"{side}.pickle", folder / side
        if side == "ray":
            programs[side] = start("script_kinds.py", *arguments, joined=True)
        else:
            programs[side] = Program(FOLDER / "script_kinds.py", *arguments)
    ended = {side: finish(program) for side, program in programs.items()}
    for side, (_, errors) in ended.items():
        assert programs[side].returncode == 0, errors
        assert "Traceback" not in errors
        assert (folder / side / "ended").read_text() == "True\n"  # an `atexit` callback of the program's: there alone
        results[side] = pickle.loads((folder / f"{side}.pickle").read_bytes())
    return results


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_forks_give_what_torchs_workers_give_and_actors_the_same_or_a_clear_error(kind, results):
    torchs, forks, actors = (results[side][kind.name] for side in SIDES)
    assert not (isinstance(torchs, dict) and "error" in torchs), torchs
    assert forks == torchs
    kind.actors.check(torchs, actors)
