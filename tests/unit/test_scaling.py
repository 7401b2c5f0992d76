"""What `benchmarks/scaling.py` makes of measured figures."""

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("scaling")


def measured(workers: int, *, wake: float, wake_per_worker: float, rest: float) -> list[dict[str, Any]]:
    """Figures of a loader whose thread waits for every second batch."""
    seconds = {"draw": 1e-5, "schedule": 2e-5, "send": 3e-5, "open": 4e-5}
    woken = 0.5 * (wake + wake_per_worker * workers)
    seconds |= {"wait": woken / 4, "receive": 3 * woken / 4}
    metrics = {f"step {step}": value for step, value in seconds.items()}
    metrics |= {"steps in all": sum(seconds.values()) + rest, "waits a batch": 0.5, "open, blocked": 9e-5}
    names = {"implementation": "remote", "case": "tiny", "workers": workers}
    return [{**names, "metric": metric, "median": value} for metric, value in metrics.items()]


def test_costs_are_what_made_the_figures(scaling: Any) -> None:
    figures = [
        figure for workers in (1, 4, 16) for figure in measured(workers, wake=6e-5, wake_per_worker=7e-6, rest=8e-5)
    ]
    costs = scaling.costs_of(figures, "remote", "tiny", 7e-6)
    made = {"draw": 1e-5, "schedule": 2e-5, "send": 3e-5, "open": 4e-5, "wake": 6e-5, "receive": 8e-5, "fetch": 9e-5}
    assert {name: getattr(costs, name) for name in made} == pytest.approx(made)
    assert costs.wake_per_worker == 7e-6


def test_without_a_cost_the_limit_is_where_the_others_put_it(scaling: Any) -> None:
    costs = scaling.Costs(receive=1e-3, send=1e-3)
    figures = scaling.extrapolate({("local", "tiny"): costs}, (16, 64))
    rates = {(figure["metric"], figure["workers"]): figure["median"] for figure in figures}
    assert rates["rate", 16] == pytest.approx(400, rel=0.05), "as many as they build"
    assert rates["rate", 64] == pytest.approx(500, rel=0.01)
    assert rates["rate without send", scaling.WITHOUT] == pytest.approx(1000, rel=0.01)
