"""A Ray that lacks private names is used by its public ones: programs of their own lack all of them, or one."""

import pytest

from rayloader.actors._compat_ray import NAMES, OTHERS
from test_scripts import finish, start

ALL = [name for name in (*NAMES, *OTHERS) if not name.startswith("train.")]


@pytest.mark.parametrize("names", [ALL, *(pytest.param([name], id=name, marks=pytest.mark.full) for name in ALL)])
def test_a_program_loads_without_private_names_of_ray(names):
    output, errors = finish(script := start("script_lacking.py", *names))
    assert (script.returncode, output[-1:]) == (0, ["the end"]), errors
    told = [name for name in names if name in NAMES]
    assert bool(told) == sum("lacks private names" in line for line in output)
    assert all(any(name in line for line in output) for name in told)
