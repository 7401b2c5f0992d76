"""The default in a program that does not use Ray: as with torch's loader, and nothing of Ray is there.

See script_default.py, which each side runs in a process of its own.
"""

import json

import pytest

from programs import Program
from script_default import PROGRAMS
from test_scripts import FOLDER, finish


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """What the script has found, by the name of the loader."""
    scripts = {
        name: Program(FOLDER / "script_default.py", name, tmp_path_factory.mktemp(name))
        for name in ("torch", "rayloader")
    }
    found = {}
    for name, script in scripts.items():
        output, errors = finish(script)
        assert script.returncode == 0, errors
        found[name] = json.loads(output[-1])
    return found


@pytest.mark.parametrize("name", [run.__name__ for run in PROGRAMS])
def test_what_comes_of_a_program_is_the_same_as_with_torchs_loader(name, sides):
    assert sides["rayloader"]["found"][name] == sides["torch"]["found"][name]


def test_in_a_long_epoch_nothing_listens_and_nothing_of_ray_is_there(sides):
    facts = sides["rayloader"]["facts"]
    assert facts.pop("forks") == 3, "two workers, and the process that forks them"
    assert not [name for name, value in facts.items() if value], facts
