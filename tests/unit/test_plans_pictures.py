"""What plans tell of themselves: lines, and a picture."""

import sys
import types

import numpy as np
import pytest

from rayloader.plans import Mixture, Packing, TokenBudget

SIZES = [1 + 7 * number % 19 for number in range(60)]


class Drawn:
    """What is drawn of a picture, without matplotlib."""

    def __init__(self, **_):
        self.said = []
        self.axes = []
        self.xaxis = self.yaxis = self

    def subplots(self, count, **_):
        self.axes = [Drawn() for _ in range(count)]
        return np.array(self.axes, object)[:, None]

    def __getattr__(self, name):
        if name.startswith("__"):  # NumPy asks what it puts into an array
            raise AttributeError(name)
        return lambda *values, **named: self.said.append((name, values, named))

    def told(self, name):
        return [(values, named) for said, values, named in self.said if said == name]


@pytest.fixture
def pictures(monkeypatch):
    found = []

    class Figure(Drawn):
        def __init__(self, **named):
            super().__init__(**named)
            found.append(self)

    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    module = types.ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    return found


def titles(picture):
    return [axes.told("set_title")[0][0][0] for axes in picture.axes]


def test_a_picture_shows_cumulative_shares_against_their_targets(pictures):
    weights = [(0, {"web": 3, "books": 1}), (60, {"web": 1, "books": 1})]
    plan = Mixture({"web": 50, "books": 50}, weights, epoch_size=100)
    plan.describe("plan.png")
    shares = pictures[0].axes[0]
    assert titles(pictures[0])[0] == "Share of each source so far"
    (steps, web), (_, books), (_, target, _), (_, of_books, _) = (values for values, _ in shares.told("plot"))
    labels = [named["label"] for _, named in shares.told("plot")]
    assert labels == ["source web", "source books", "target", None]
    assert (steps[59], web[59], target[59]) == (60, 75, 75)
    assert (web[-1], target[-1], books[-1], of_books[-1]) == (65, 65, 35, 35)
    assert np.abs(steps * (web - target) / 100).max() <= 1


@pytest.mark.parametrize("make", [lambda **of: TokenBudget(SIZES, 60, **of), lambda **of: Packing(SIZES, 60, **of)])
def test_a_picture_has_no_panel_of_ranks_for_one(make, pictures):
    assert "for one rank" in make().describe("plan.png")
    assert "for 2 ranks; the most expensive batch" in make(num_replicas=2).describe("plan.png")
    ranks = "How unequal the ranks' batches of a step are"
    assert [*titles(pictures[0]), ranks] == titles(pictures[1])


def test_axes_are_linear_from_zero_and_named(pictures):
    plans = [TokenBudget(SIZES, 60, num_replicas=2), Packing(SIZES, 60), Mixture([40] * 12, [1] * 12)]
    for plan in plans:
        plan.describe("plan.png")
    for axes in [axes for picture in pictures for axes in picture.axes]:
        assert axes.told("set_xlim") == [((), {"left": 0})]
        assert axes.told("set_ylim") == [((), {"bottom": 0})]
        assert all(axes.told(name)[0][0][0] for name in ("set_title", "set_xlabel", "set_ylabel"))
        assert not axes.told("set_xscale") + axes.told("set_yscale")
        assert all("log" not in named for _, named in axes.told("hist"))
    labels = [named.get("label") for _, named in pictures[-1].axes[0].told("plot")]
    assert len([label for label in labels if label]) == 8 + len(["target"])


@pytest.mark.full  # which imports matplotlib
def test_what_they_tell_of_themselves(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    budget = TokenBudget(lengths, 300, num_replicas=2)
    picture = tmp_path / "plan.png"
    text = budget.describe(str(picture))
    assert "samples  500\n" in text
    assert f"{len(budget) // 2:,} for 2 ranks" in text
    assert f"{budget.padding:.2%} of the tokens" in text
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "efficiency" in Packing(lengths, 300).describe(str(picture))


def test_a_picture_needs_matplotlib(monkeypatch):
    plan = Packing([3, 4, 5], 8)
    assert "12 tokens" in plan.describe()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="the picture of a plan needs matplotlib"):
        plan.describe("plan.png")
