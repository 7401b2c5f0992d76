"""Which nodes are left, and when: without Ray, and without waiting."""

from types import SimpleNamespace

import pytest

from rayloader.workers import placement
from rayloader.workers.placement import INTERVAL_S, Draining


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
    world.look = world.draining.look
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


def test_a_node_that_is_drained_is_said_once(world, caplog):
    world.drained = {"a": 0, "without actors": 0}
    for _ in range(2):
        world.look({"a": 2, "b": 1})
        assert world.draining
        assert [node in world.draining for node in ("a", "b", "without actors")] == [True, False, False]
        world.now += INTERVAL_S
    assert caplog.messages == [
        "rayloader: Ray drains the node a; its 2 worker processes are replaced by others elsewhere"
    ]


@pytest.mark.parametrize("left", [60, 1])
def test_when_a_node_goes_is_said(world, caplog, left):
    world.drained = {"a": int(1000 * (world.now + left))}
    world.look({"a": 1})
    assert caplog.messages == [
        f"rayloader: Ray drains the node a, which goes in {left} s; its 1 worker processes are replaced by others "
        "elsewhere"
    ]


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
