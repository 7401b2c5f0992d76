"""Which nodes are left, and when: without Ray, and without waiting."""

from types import SimpleNamespace

import pytest

from rayloader.actors import placement
from rayloader.actors.placement import INTERVAL_S, MARGIN_S, Draining

PATIENCE = 15.0


@pytest.fixture
def world(monkeypatch):
    """What Ray says, how often it was asked, and what time it is."""
    world = SimpleNamespace(drained={}, asked=0, now=100.0)
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: world.now, time=lambda: world.now))

    def ask():
        world.asked += 1
        if world.drained is None:
            raise ConnectionError("as planned")
        return world.drained

    world.draining = Draining(ask)
    world.look = lambda actors: world.draining.look(actors, PATIENCE)
    return world


def test_ray_is_asked_only_where_actors_are_elsewhere(world):
    assert world.look({}) is None
    assert world.asked == 0
    assert not world.draining


def test_ray_is_asked_once_in_an_interval(world):
    assert world.look({"a": 1}) == INTERVAL_S
    world.now += INTERVAL_S / 4
    assert world.look({"a": 1}) == pytest.approx(INTERVAL_S * 3 / 4)
    assert world.asked == 1
    world.now += INTERVAL_S
    assert world.look({"a": 1}) == INTERVAL_S
    assert world.asked == 2


def test_a_node_that_is_drained_is_said_once_and_left_when_it_is_late(world, caplog):
    world.drained = {"a": 0, "without actors": 0}
    for _ in range(2):
        world.look({"a": 2, "b": 1})
        assert world.draining
        assert [node in world.draining for node in ("a", "b", "without actors")] == [True, False, False]
        world.now += INTERVAL_S
    assert caplog.messages == [
        "rayloader: Ray drains the node a; its 2 worker processes are replaced by others elsewhere"
    ]
    assert not world.draining.is_late("a", at_last=False)
    world.now = 100 + PATIENCE
    assert world.draining.is_late("a", at_last=False)
    assert not world.draining.is_late("a", at_last=True), "it does not say when it goes"
    assert not world.draining.is_late("b", at_last=False)


@pytest.mark.parametrize(
    ("left", "patient", "at_last"),
    [
        pytest.param(60, PATIENCE, 60 - MARGIN_S, id="long"),
        pytest.param(10, 10 - MARGIN_S, 10 - MARGIN_S, id="short"),
        pytest.param(1, 0, 0, id="at once"),
    ],
)
def test_a_node_is_left_before_it_goes(world, caplog, left, patient, at_last):
    world.drained = {"a": int(1000 * (world.now + left))}
    world.look({"a": 1})
    assert caplog.messages == [
        f"rayloader: Ray drains the node a, which goes in {left} s; its 1 worker processes are replaced by others "
        "elsewhere"
    ]
    for when, moment in ((False, patient), (True, at_last)):
        if moment:
            world.now = 100 + moment - 0.01
            assert not world.draining.is_late("a", at_last=when)
        world.now = 100 + moment
        assert world.draining.is_late("a", at_last=when)


def test_an_earlier_end_that_is_told_later_counts(world):
    world.drained = {"a": 0}
    world.look({"a": 1})
    world.now += INTERVAL_S
    world.drained = {"a": int(1000 * (world.now + MARGIN_S + 1))}
    world.look({"a": 1})
    world.now += 1
    assert world.draining.is_late("a", at_last=True)


def test_what_ray_does_not_answer_changes_nothing(world):
    world.drained = {"a": 0}
    world.look({"a": 1})
    world.now += INTERVAL_S
    world.drained = None
    assert world.look({"a": 1}) == INTERVAL_S
    assert "a" in world.draining


@pytest.mark.parametrize("actors", [{}, {"b": 1}], ids=["none", "elsewhere"])
def test_a_node_without_actors_is_forgotten(world, actors):
    world.drained = {"a": 0}
    world.look({"a": 1})
    world.now += INTERVAL_S
    world.look(actors)
    assert not world.draining
    assert not world.draining.is_late("a", at_last=False)
