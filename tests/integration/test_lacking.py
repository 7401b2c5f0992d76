"""A Ray that lacks private names is used by its public ones: programs of their own lack all of them, or one."""

import pytest

from rayloader.actors._compat_ray import _OF_TRAIN, COSTS
from test_scripts import finish, start

NAMES = [name for name in COSTS if name != _OF_TRAIN]


@pytest.mark.parametrize("names", [NAMES, *(pytest.param([name], id=name, marks=pytest.mark.full) for name in NAMES)])
def test_a_program_loads_without_private_names_of_ray(names):
    output, errors = finish(script := start("script_lacking.py", *names))
    assert (script.returncode, output[-1:]) == (0, ["the end"]), errors
    told = [name for name in names if COSTS[name]]
    assert len(told) == sum("lacks the private name" in line for line in output)
    assert all(any(name in line and COSTS[name] in line for line in output) for name in told)
