"""What to do about workers that do not start: who waits for a place, and who only for time."""

import types

import pytest

from rayloader.workers import placement
from rayloader.workers.placement import Placement
from rayloader.workers.processes import Verdict

LACKS, SLOW, UNKNOWN = (
    {"homeless": True, "had_room": False, "others": False},
    {"homeless": False, "had_room": True, "others": False},
    {"homeless": True, "had_room": True, "others": False},
)
HELPED = {**LACKS, "others": True}


@pytest.mark.parametrize(
    ("free", "waited", "who", "verdict"),
    [
        (0, 4, LACKS, Verdict.WAIT),
        (1, 6, LACKS, Verdict.MAKE_ROOM),
        (0, 11, LACKS, Verdict.SHARE_CPUS),
        (1, 11, LACKS, Verdict.MAKE_ROOM),
        (1, 61, LACKS, Verdict.GIVE_UP),
        (1, 14, HELPED, Verdict.MAKE_ROOM),
        (1, 15, HELPED, Verdict.GIVE_UP),
        (0, 11, UNKNOWN, Verdict.MAKE_ROOM),
        (0, 61, UNKNOWN, Verdict.SHARE_CPUS),
        (0, 61, SLOW, Verdict.WAIT),
        (0, 601, SLOW, Verdict.GIVE_UP),
    ],
)
def test_only_workers_without_a_place_have_something_done_about_them(monkeypatch, free, waited, who, verdict):
    monkeypatch.delenv(placement.START_TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(placement, "ray", types.SimpleNamespace(available_resources=lambda: {"CPU": free}))
    assert Placement().verdict(waited, b"", {}, {"num_cpus": 1}, **who) is verdict


def test_the_users_limit_counts_for_both(monkeypatch):
    monkeypatch.setenv(placement.START_TIMEOUT_VARIABLE, "3")
    monkeypatch.setattr(placement, "ray", types.SimpleNamespace(available_resources=lambda: {"CPU": 1}))
    for who in (LACKS, SLOW):
        assert Placement().verdict(3, b"", {}, {"num_cpus": 1}, **who) is Verdict.GIVE_UP
    text = str(Placement().slow_error(1, 2))
    assert text.startswith("1 of 2 DataLoader workers have a process in the Ray cluster that did not start within 3 s")


@pytest.mark.parametrize(
    ("homeless", "options", "said"),
    [
        (1, {"num_cpus": 1}, "no room for 1 of them so far. Each asks for CPU 1; free now: CPU 0 of 2, TPU 1 of 1"),
        (1, {"num_cpus": 0}, "Ray is starting them"),
        (0, {"num_cpus": 1}, "Ray is starting them"),
    ],
)
def test_what_is_waited_for_is_said(monkeypatch, caplog, homeless, options, said):
    """Without the names that Ray gives to what a placement group has."""
    total = {"CPU": 2.0, "TPU": 1.0, "CPU_group_0_3f2a": 1.0, "bundle_group_3f2a": 1000.0, "node:10.0.0.1": 1.0}
    free = {"TPU": 1.0, "CPU_group_0_3f2a": 1.0}
    ray = types.SimpleNamespace(cluster_resources=lambda: total, available_resources=lambda: free)
    monkeypatch.setattr(placement, "ray", ray)
    Placement().tell(2, 3, homeless, options)
    (text,) = caplog.messages
    assert text.startswith("rayloader: waiting for 2 of 3 worker processes. ")
    assert said in text
    assert "group" not in text
