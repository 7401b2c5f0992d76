"""How epochs begin, without workers and without a sampler."""

from __future__ import annotations

import pytest
from rayloader.epoch.depth import MAX_DEPTH

from rayloader.epoch.iterator import Begin, EpochPlan, plan_epoch
from rayloader.options import Options


def options(**changed: object) -> Options:
    given: dict[str, object] = {
        "prefetch_factor": 2,
        "automatic_depth": True,
        "prefetch_bytes": 1,
        "in_order": True,
        "timeout": 0,
        "seeding": "worker",
        "scheduling": "static",
        "max_worker_restarts": 3,
        "on_timeout": "raise",
        "on_error": "raise",
        "max_skipped": 100,
        "arenas": True,
        "workers": "auto",
        "fresh_processes": False,
        "ray_remote_args": {},
        "needs_actors": False,
    }
    return Options(**{**given, **changed})  # type: ignore[arg-type]


def planned(given: Options | None = None, *, may: bool = True, **facts: bool) -> EpochPlan:
    usual = dict.fromkeys(("lives", "saved", "finished", "redealt", "persistent", "remembers"), False)
    return plan_epoch(given or options(), **{**usual, **facts}, may_draw_ahead=lambda goes_on: may)


@pytest.mark.parametrize(
    ("facts", "begin", "starts", "goes_on"),
    [
        ({}, Begin.FRESH, True, False),
        ({"lives": True}, Begin.NEXT, False, False),
        ({"lives": True, "finished": True}, Begin.NEXT, False, False),
        ({"saved": True}, Begin.RESUMED, True, True),
        ({"saved": True, "finished": True}, Begin.NEXT, True, False),
        ({"redealt": True}, Begin.FRESH, True, True),
    ],
)
def test_where_an_epoch_begins(facts, begin, starts, goes_on):
    found = planned(**facts)
    assert (found.begin, found.starts_workers, found.goes_on) == (begin, starts, goes_on)


@pytest.mark.parametrize(
    ("changed", "facts", "elastic"),
    [
        ({}, {}, True),
        ({"automatic_depth": False}, {}, False),
        ({"in_order": False}, {}, False),
        ({"in_order": False, "scheduling": "dynamic", "seeding": "batch"}, {}, True),
        ({}, {"persistent": True}, True),
        ({}, {"remembers": True}, True),
        ({}, {"persistent": True, "remembers": True}, False),
    ],
)
def test_who_may_prefetch_deeper_than_torch(changed, facts, elastic):
    assert planned(options(**changed), **facts).elastic is elastic
    assert not planned(options(**changed), may=False, **facts).elastic


def test_the_sampler_is_asked_early_only_if_that_works_from_where_it_is():
    seen = []
    facts = dict.fromkeys(("lives", "finished", "redealt", "persistent", "remembers"), False)
    plan_epoch(options(), saved=True, **facts, may_draw_ahead=lambda goes_on: bool(seen.append(goes_on)))
    assert seen == [True]


def test_what_was_built_too_early_is_undone_where_it_would_show():
    assert planned().max_undone == MAX_DEPTH
    assert planned(options(automatic_depth=False)).max_undone == 0
    assert planned(options(seeding="batch")).max_undone == MAX_DEPTH
    assert planned(options(seeding="batch", scheduling="dynamic")).max_undone == 0
