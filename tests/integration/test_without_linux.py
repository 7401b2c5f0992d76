"""Where a system lacks what our workers need, torch's own are at work: programs of their own, without these means."""

import pytest

import rayloader.options
from rayloader import DataLoader, StateError
from taken_away import WAYS
from test_scripts import finish, start


@pytest.mark.parametrize("way", WAYS)
def test_a_program_loads_with_torchs_own_workers(way):
    output, errors = finish(script := start("script_without_linux.py", way))
    assert (script.returncode, output[-1:]) == (0, ["the end"]), errors


def test_a_state_of_persistent_workers_is_refused_where_they_cannot_go_on(monkeypatch):
    loader, other = (DataLoader([*range(4)], num_workers=1, persistent_workers=True) for _ in range(2))
    assert len([*loader]) == 4
    state = loader.state_dict()
    monkeypatch.setattr(rayloader.options, "lacking", lambda: "no forks")
    other.load_state_dict(state)
    with pytest.raises(StateError, match="what persistent workers have built can't be continued with torch's own"):
        iter(other)
