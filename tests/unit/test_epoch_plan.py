"""How epochs begin, without workers."""

from __future__ import annotations

import pytest

from rayloader.epoch.iterator import Begin, plan_epoch


@pytest.mark.parametrize(
    ("facts", "begin", "starts"),
    [
        ({}, Begin.FRESH, True),
        ({"lives": True}, Begin.NEXT, False),
        ({"lives": True, "finished": True}, Begin.NEXT, False),
        ({"saved": True}, Begin.RESUMED, True),
        ({"saved": True, "finished": True}, Begin.NEXT, True),
    ],
)
def test_where_an_epoch_begins(facts, begin, starts):
    found = plan_epoch(**{**dict.fromkeys(("lives", "saved", "finished"), False), **facts})
    assert (found.begin, found.starts_workers) == (begin, starts)
