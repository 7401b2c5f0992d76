"""Worker processes are forks of one that has imported everything, and cannot be told from those that Ray starts."""

import json

import pytest

from test_scripts import finish, start

pytestmark = pytest.mark.full

# What two processes may differ in, whoever starts them.
OWN = {"pid", "parent", "draw", "listens"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What `script_fork_server.py` has found."""
    path = tmp_path_factory.mktemp("fork server") / "steps"
    _, errors = finish(script := start("script_fork_server.py", path))
    assert script.returncode == 0, errors
    return {name: value for line in path.read_text().splitlines() for name, value in json.loads(line).items()}


def test_workers_are_forks(steps):
    server, _ = steps["server"]
    assert [fact["parent"] for fact in steps["forked"]] == [server] * 2
    assert len({fact["pid"] for fact in steps["forked"]}) == 2
    assert len({fact["draw"] for fact in steps["forked"]}) == 2


def test_strings_have_one_hash_in_all_workers_whoever_starts_them(steps):
    names = "forked", "own environment", "started", "forked again"
    assert len({fact["hash"] for name in names for fact in steps[name]}) == 1


def test_a_fork_is_like_a_process_that_ray_has_started(steps):
    forked, started = steps["forked"][0], steps["started"][0]
    assert started["parent"] != steps["server"][0]
    differs = {name: (forked[name], started[name]) for name in forked.keys() - OWN if forked[name] != started[name]}
    assert not differs


def test_the_process_that_ray_has_started_ends_with_the_worker(steps):
    assert steps["left"] == []


def test_a_worker_with_an_environment_of_its_own_imports_everything_itself(steps):
    server, _ = steps["server"]
    assert {fact["environment"]["OF_THE_USER"] for fact in steps["own environment"]} == {"1"}
    assert server not in {fact["parent"] for fact in steps["own environment"]}
    assert steps["again"] == [server] * 2


def test_without_the_fork_server_workers_start_slowly_and_that_is_said_once(steps):
    (said,) = steps["said"]
    assert said == (
        "rayloader: there is no fork server, so new worker processes start slowly: it has died, with exit status -9"
    )


def test_the_fork_server_ends_with_its_ray_and_the_next_ray_has_another(steps):
    assert steps["children"] == []
    assert len({fact["parent"] for fact in steps["forked again"]}) == 1
    assert steps["gone"] == 0
