"""The default in a program that does not use Ray: nothing of Ray is there. What comes of programs: see kinds.py."""

import json

from programs import Program
from test_scripts import FOLDER, finish


def test_in_a_long_epoch_nothing_listens_and_nothing_of_ray_is_there():
    output, errors = finish(script := Program(FOLDER / "script_default.py"))
    assert script.returncode == 0, errors
    facts = json.loads(output[-1])
    assert facts.pop("forks") == 3, "two workers, and the process that forks them"
    assert not [name for name, value in facts.items() if value], facts
