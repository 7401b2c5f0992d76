"""What to do about workers that do not start: who waits for a place, and who only for time."""

import types

import pytest

from rayloader.actors import placement
from rayloader.actors.placement import Placement
from rayloader.workers.processes import Verdict


class Pending:
    """The part of an `Actor` that is looked at."""

    key = b""

    def __init__(self, *, placed=False, had_room=False, **options):
        self.placed_at = 0.0 if placed else None
        self.had_room = had_room
        self.options = {"num_cpus": 1, **options}

    def is_placed(self):
        return self.placed_at is not None


LACKS, SLOW, UNKNOWN = Pending(), Pending(placed=True), Pending(had_room=True)


@pytest.mark.parametrize(
    ("free", "waited", "who", "others", "verdict"),
    [
        (0, 4, [LACKS], False, Verdict.WAIT),
        (1, 6, [LACKS], False, Verdict.WAIT),
        (0, 11, [LACKS], False, Verdict.SHARE_CPUS),
        (0, 11, [SLOW, LACKS], False, Verdict.SHARE_CPUS),
        (1, 11, [LACKS], False, Verdict.WAIT),
        (1, 61, [LACKS], False, Verdict.GIVE_UP),
        (1, 14, [LACKS], True, Verdict.WAIT),
        (1, 15, [LACKS], True, Verdict.GIVE_UP),
        (0, 11, [UNKNOWN], False, Verdict.WAIT),
        (0, 61, [UNKNOWN], False, Verdict.SHARE_CPUS),
        (0, 61, [SLOW], False, Verdict.WAIT),
        (0, 601, [SLOW], False, Verdict.GIVE_UP),
    ],
)
def test_only_workers_without_a_place_have_something_done_about_them(monkeypatch, free, waited, who, others, verdict):
    monkeypatch.delenv(placement.START_TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(placement, "ray", types.SimpleNamespace(available_resources=lambda: {"CPU": free}))
    assert Placement().verdict(who, waited, {}, others=others) is verdict


def test_the_users_limit_counts_for_both(monkeypatch):
    monkeypatch.setenv(placement.START_TIMEOUT_VARIABLE, "3")
    monkeypatch.setattr(placement, "ray", types.SimpleNamespace(available_resources=lambda: {"CPU": 1}))
    for who in (LACKS, SLOW):
        assert Placement().verdict([who], 3, {}, others=False) is Verdict.GIVE_UP
    text = str(Placement().error([SLOW], 2))
    assert text.startswith("1 of 2 DataLoader workers have a process in the Ray cluster that did not start within 3 s")


@pytest.mark.parametrize(
    ("placed", "cpus", "said"),
    [
        (False, 1, "no room for 1 of them so far. Each asks for CPU 1; free now: CPU 0 of 2, TPU 1 of 1"),
        (False, 0, "Ray is starting them"),
        (True, 1, "Ray is starting them"),
    ],
)
def test_what_is_waited_for_is_said(monkeypatch, caplog, placed, cpus, said):
    """Without the names that Ray gives to what a placement group has."""
    total = {"CPU": 2.0, "TPU": 1.0, "CPU_group_0_3f2a": 1.0, "bundle_group_3f2a": 1000.0, "node:10.0.0.1": 1.0}
    free = {"TPU": 1.0, "CPU_group_0_3f2a": 1.0}
    ray = types.SimpleNamespace(cluster_resources=lambda: total, available_resources=lambda: free)
    monkeypatch.setattr(placement, "ray", ray)
    Placement().tell([Pending(placed=placed, num_cpus=cpus), Pending(placed=True, num_cpus=cpus)], 3)
    (text,) = caplog.messages
    assert text.startswith("rayloader: waiting for 2 of 3 worker processes. ")
    assert said in text
    assert "group" not in text
