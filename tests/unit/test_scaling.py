"""What `benchmarks/scaling.py` makes of measured figures."""

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest

NAMES = ["rates", "thread", "process", "aims", "held-against", "simulated", "without", "schedule"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes the tables."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("scaling_table")


@pytest.mark.parametrize("name", NAMES)
def test_the_page_holds_the_generated_tables(module: Any, name: str) -> None:
    import tables

    assert list(module.TABLES) == NAMES
    made = module.table(name, module.known())
    assert tables.found(module.PAGE, f"{module.COMMAND} {name}") == made, f"run: {module.COMMAND} --write"


def test_what_misses_its_aim_is_said_to(module: Any) -> None:
    figures = module.known()
    changed = copy.deepcopy(figures)
    for figure in changed:
        if (figure["implementation"], figure["metric"]) == ("remote", "batches/s"):
            figure["median"] /= 10
    rates = [
        [line for line in module.table("aims", found).splitlines() if "rate of 16, tiny" in line]
        for found in (figures, changed)
    ]
    assert [row[0].split(" | ")[-1] for row in rates] == ["yes |", "no |"]


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
    metrics |= {"steps in all": sum(seconds.values()) + rest, "waits a batch": 0.5}
    names = {"implementation": "local", "case": "tiny", "workers": workers}
    return [{**names, "metric": metric, "median": value} for metric, value in metrics.items()]


def test_costs_are_what_made_the_figures(scaling: Any) -> None:
    figures = [
        figure for workers in (1, 4, 16) for figure in measured(workers, wake=6e-5, wake_per_worker=7e-6, rest=8e-5)
    ]
    costs = scaling.costs_of(figures, "local", "tiny", 7e-6)
    made = {"draw": 1e-5, "schedule": 2e-5, "send": 3e-5, "open": 4e-5, "wake": 6e-5, "receive": 8e-5}
    assert {name: getattr(costs, name) for name in made} == pytest.approx(made)
    assert costs == scaling.Costs(**{name: getattr(costs, name) for name in made}, wake_per_worker=7e-6)


def test_what_the_process_takes_beside_the_users_thread_is_what_reading_costs(scaling: Any) -> None:
    """With the most workers; the same for each large batch, and the rest for its bytes. Small ones need no reading."""

    def figures_of(case: str, beside: dict[int, float]) -> list[dict[str, Any]]:
        metrics = {f"step {step}": dict.fromkeys(beside, 1e-5) for step in ("draw", "schedule", "send", "open")}
        metrics |= {"waits a batch": dict.fromkeys(beside, 0.0), "steps in all": dict.fromkeys(beside, 9e-5)}
        metrics["CPU of the user's thread"] = dict.fromkeys(beside, 1e-3)
        metrics["CPU of the process"] = {workers: 1e-3 + seconds for workers, seconds in beside.items()}
        names = {"implementation": "remote", "case": case}
        return [
            {**names, "metric": metric, "workers": workers, "median": seconds}
            for metric, values in metrics.items()
            for workers, seconds in values.items()
        ]

    beside = {case: 5e-4 + 3e-10 * scaling.scale.NBYTES[case] for case in ("medium", "large")}
    figures = figures_of("tiny", {1: 9e-4, 16: 2e-5})
    figures += [f for case, seconds in beside.items() for f in figures_of(case, {1: 1e-2, 16: seconds})]
    tiny, medium, large = (scaling.costs_of(figures, "remote", case, 7e-6) for case in ("tiny", "medium", "large"))
    assert (tiny.ahead, tiny.read_per_byte) == (0.0, 0.0)
    for costs in (medium, large):
        assert (costs.ahead, costs.read_per_byte) == (pytest.approx(5e-4), pytest.approx(3e-10))
    assert (tiny.wake, tiny.receive) == (0.0, pytest.approx(5e-5))


def test_without_a_cost_the_limit_is_where_the_others_put_it(scaling: Any) -> None:
    costs = scaling.Costs(receive=1e-3, send=1e-3)
    figures = scaling.extrapolate({("local", "tiny"): costs}, (16, 64))
    rates = {(figure["metric"], figure["workers"]): figure["median"] for figure in figures}
    assert rates["rate", 16] == pytest.approx(400, rel=0.05), "as many as they build"
    assert rates["rate", 64] == pytest.approx(500, rel=0.01)
    assert rates["rate without send", scaling.WITHOUT] == pytest.approx(1000, rel=0.01)
