"""The simulation of a loader around the real schedule: what is known without it comes out."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

SIMULATE = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "simulate.py")))
Plan, Costs, NodeLoss, simulate = SIMULATE.Plan, SIMULATE.Costs, SIMULATE.NodeLoss, SIMULATE.simulate


@pytest.mark.parametrize("workers", [1, 3, 64])
@pytest.mark.parametrize("kind", [{}, {"in_order": False}, {"dynamic": True}, {"automatic": True}])
def test_where_nothing_costs_anything_the_workers_are_the_limit(workers: int, kind: dict[str, bool]) -> None:
    outcome = simulate(Plan(workers, 20 * workers, work=0.04, **kind))
    assert outcome.rate == pytest.approx(workers / 0.04, rel=0.1), "but for a round: all answer at the same time"
    assert sorted(outcome.order) == list(range(20 * workers))
    assert outcome.busy == 0


def test_every_cost_of_the_users_thread_counts() -> None:
    costs = Costs(draw=1e-4, schedule=2e-4, send=3e-4, receive=4e-4, open=5e-4, ahead=5e-4)
    outcome = simulate(Plan(100, 5000, work=0.01, costs=costs))
    assert outcome.rate == pytest.approx(1 / 2e-3, rel=0.01)
    assert outcome.busy == pytest.approx(5000 * 2e-3)


def test_a_wake_up_costs_by_the_worker() -> None:
    """A lone worker's results come one by one: each is waited for."""
    plan = Plan(1, 100, work=0.01, costs=Costs(wake=1e-4, wake_per_worker=2e-4))
    assert simulate(plan).busy == pytest.approx(100 * 3e-4)


def test_who_reads_from_the_network_is_a_limit_that_costs_the_users_thread_nothing() -> None:
    costs = Costs(receive=1e-4, read_per_byte=2e-9)
    outcome = simulate(Plan(64, 2000, work=0.01, costs=costs, nbytes=1_000_000))
    assert outcome.rate == pytest.approx(500, rel=0.01)
    assert outcome.busy == pytest.approx(2000 * 1e-4)


def test_the_network_link_is_a_limit() -> None:
    outcome = simulate(Plan(64, 2000, work=0.01, nbytes=1_000_000, bandwidth=1e9))
    assert outcome.rate == pytest.approx(1000, rel=0.01)


def test_the_training_step_is_a_limit() -> None:
    assert simulate(Plan(64, 2000, work=0.01, step=0.005)).rate == pytest.approx(200)


def test_what_is_told_ahead_hides_the_latency_and_no_more() -> None:
    """Two tasks of a worker are under way: while one travels both ways the other is built."""
    hidden = simulate(Plan(1, 200, work=0.04, latency=0.02))
    assert hidden.rate == pytest.approx(1 / 0.04)
    shown = simulate(Plan(1, 200, work=0.04, latency=0.06))
    assert shown.rate == pytest.approx(2 / (0.04 + 2 * 0.06), rel=0.01)


def test_the_automatic_depth_hides_the_latency_of_quick_batches() -> None:
    plan = {"workers": 4, "batches": 8000, "work": 1e-4, "latency": 1e-3}
    assert simulate(Plan(**plan)).rate < 0.15 * 4 / 1e-4
    assert simulate(Plan(**plan, automatic=True)).rate == pytest.approx(4 / 1e-4, rel=0.05)


@pytest.mark.parametrize("kind", [{}, {"in_order": False}, {"dynamic": True}, {"automatic": True}])
def test_a_lost_node_loses_and_repeats_no_batch(kind: dict[str, bool]) -> None:
    losses = [NodeLoss(1.0, range(4), notice=0.5, restart=2.0), NodeLoss(1.3, range(4, 6), notice=0.1, restart=1.0)]
    outcome = simulate(Plan(16, 4000, work=0.04, spread=0.3, latency=1e-3, nbytes=1000, losses=losses, **kind))
    assert sorted(outcome.order) == list(range(4000))
    if kind.get("in_order", True):
        assert outcome.order == list(range(4000))


def test_in_order_a_lost_node_stops_the_delivery_until_it_is_replaced() -> None:
    plan = {"workers": 8, "batches": 2000, "work": 0.04, "losses": [NodeLoss(1.0, range(2), notice=0.5, restart=2.0)]}
    stopped = simulate(Plan(**plan))
    assert 2.4 < stopped.longest_gap < 2.6
    assert stopped.rate == pytest.approx(8 / 0.04, rel=0.01), "it recovers"
    assert simulate(Plan(**plan, in_order=False)).longest_gap < 0.1


def test_the_same_plan_gives_the_same_outcome() -> None:
    plan = Plan(8, 400, work=0.01, spread=0.5, costs=Costs(send=1e-4))
    assert simulate(plan) == simulate(plan)
    assert simulate(plan) != simulate(Plan(8, 400, work=0.01, spread=0.5, costs=Costs(send=1e-4), seed=1))


def test_without_a_limit_the_link_takes_no_time() -> None:
    assert Plan(1, 1, work=1.0).bandwidth == math.inf
    assert simulate(Plan(1, 2, work=1.0, nbytes=10**9)).delivered == [1.0, 2.0]
