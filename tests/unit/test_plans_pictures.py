"""What plans tell of themselves: lines, and a picture."""

import itertools
import sys
import types

import numpy as np
import pytest

from rayloader.plans import Mixture, Packing, TokenBudget

SIZES = [1 + 7 * number % 19 for number in range(60)]


class Drawn:
    """What is drawn of a picture, without matplotlib."""

    def __init__(self, **_):
        self.said = {}
        self.xaxis = self.yaxis = self

    def subplots(self, count, **_):
        self.axes = np.array([Drawn() for _ in range(count)], object)
        return self.axes[:, None]

    def __getattr__(self, name):
        if name.startswith("__"):  # NumPy asks what it puts into an array
            raise AttributeError(name)
        return lambda *values, **named: self.said.setdefault(name, []).append((values, named))


@pytest.fixture
def pictures(monkeypatch):
    """The axes of each picture."""
    found = []
    module = types.ModuleType("matplotlib.figure")
    module.Figure = lambda **_: found.append(Drawn()) or found[-1]
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    return found


def test_a_picture_shows_cumulative_shares_against_their_targets(pictures):
    weights = [(0, {"web": 3, "books": 1}), (60, {"web": 1, "books": 1})]
    plan = Mixture({"web": 50, "books": 50}, weights, epoch_size=100)
    plan.describe("plan.png")
    lines = pictures[0].axes[0].said["plot"]
    (steps, web), (_, books), (_, target, _), (_, of_books, _) = (values for values, _ in lines)
    assert [named["label"] for _, named in lines] == ["source web", "source books", "target", None]
    assert (steps[59], web[59], target[59]) == (60, 75, 75)
    assert (web[-1], target[-1], books[-1], of_books[-1]) == (65, 65, 35, 35)


def test_axes_are_linear_from_zero_and_named_and_ranks_have_a_panel_if_there_are_some(pictures):
    plans = [TokenBudget(SIZES, 60, num_replicas=2), TokenBudget(SIZES, 60), Packing(SIZES, 60, num_replicas=2)]
    for plan in (*plans, Packing(SIZES, 60), Mixture([40] * 12, [1] * 12)):
        plan.describe("plan.png")
    said = [[axes.said for axes in picture.axes] for picture in pictures]
    for axes in itertools.chain(*said):
        assert (axes["set_xlim"], axes["set_ylim"]) == ([((), {"left": 0})], [((), {"bottom": 0})])
        assert all(axes[name][0][0][0] for name in ("set_title", "set_xlabel", "set_ylabel"))
        assert not axes.keys() & {"set_xscale", "set_yscale"}
        assert all("log" not in named for _, named in axes.get("hist", []))
    assert [len(picture) for picture in said] == [3, 2, 2, 1, 1]
    assert said[0][-1]["set_title"][0][0][0] == "How unequal the ranks' batches of a step are"
    ((excess,),), _ = said[0][-1]["hist"][0]
    assert excess.tolist() == (100 * (plans[0].balance() - 1)).tolist()
    labels = [named.get("label") for _, named in said[4][0]["plot"]]
    assert len([label for label in labels if label]) == 8 + len(["target"])


@pytest.mark.parametrize("picture", [False, pytest.param(True, marks=pytest.mark.full)])  # which imports matplotlib
def test_what_they_tell_of_themselves(picture, tmp_path, monkeypatch):
    path = tmp_path / "plan.png"
    budget = TokenBudget(SIZES, 300, num_replicas=2)
    text = budget.describe(str(path) if picture else None)
    packing, skipping = Packing([3, 4, 5], 8), Packing([5, 25, 10], 10, too_long="skip")
    for plan, said in {
        text: ("samples  60\n", f"{len(budget) // 2:,} for 2 ranks; the most", f"{budget.padding:.2%} of the tokens"),
        packing.describe(): ("efficiency", "for one rank", "12 tokens"),
        skipping.describe(): ("1 longer than 10 tokens: left out", "25 tokens"),
    }.items():
        assert all(words in plan for words in said)
    if picture:
        assert path.read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="the picture of a plan needs matplotlib"):
        packing.describe("plan.png")
