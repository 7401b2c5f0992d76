"""Where a system lacks what our workers need, torch's own are at work: programs of their own, without these means."""

import pytest

from taken_away import WAYS
from test_scripts import finish, start


@pytest.mark.parametrize("way", WAYS)
def test_a_program_loads_with_torchs_own_workers(way):
    output, errors = finish(script := start("script_without_linux.py", way))
    assert (script.returncode, output[-1:]) == (0, ["the end"]), errors
