"""What actors ask for, where they run, how long they wait for that, and what is said of those that find no room."""

import math
from types import SimpleNamespace

import pytest
from ray.util.scheduling_strategies import (
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rayloader import WorkerStartError
from rayloader.actors import placement, session
from rayloader.actors.placement import (
    LONG_START_TIMEOUT_S,
    START_TIMEOUT_S,
    START_TIMEOUT_VARIABLE,
    ClusterStatus,
    Node,
    Placement,
    Want,
    _coming,
)

NOW = 1000.0
HERE, AWAY = "a" * 56, "b" * 56
GIB = 1 << 30


class Pending:
    """The part of an `Actor` that is looked at."""

    created_at = NOW - 900

    def __init__(self, *, had_room=None, **options):
        self.had_room = had_room
        self.options = {"num_cpus": 1, **options}


def node(node_id=HERE, ip="10.0.0.1", free=None, labels=None, **total):
    return Node(node_id, ip, total, {**total, **(free or {})}, labels or {})


def status(*nodes, demand=(), **more):
    return ClusterStatus(nodes or (node(CPU=2.0, free={"CPU": 0.0}),), demand, at=NOW, **more)


@pytest.fixture
def place(monkeypatch):
    """Makes a placement in a cluster with such a status; `place.now` is what the clock says."""
    monkeypatch.delenv(START_TIMEOUT_VARIABLE, raising=False)
    clock = SimpleNamespace(now=NOW)
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(session, "node_id", lambda: HERE)
    monkeypatch.setattr(Placement, "_ask", lambda self: None)
    monkeypatch.setattr(Placement, "_look", lambda self: self.status)

    def make(known):
        made = Placement(lambda: True, lambda: None)
        made.status, made.clock = known, clock
        return made

    return make


def gives_up(placement, pending, waited):
    try:
        placement.check(pending, 2, waited)
    except WorkerStartError:
        return True
    return False


# ---- what they ask for


@pytest.mark.parametrize(
    ("total", "remote_args", "asked"),
    [
        ({"CPU": 4.0}, {}, 1),
        ({"CPU": 1.0}, {"num_cpus": 0.25}, 0.25),
        ({"CPU": 0.0}, {}, 1),
        ({"CPU": 4.0, session.OVERSUBSCRIBE_RESOURCE: 1.0}, {}, 0),
        ({"CPU": 4.0, session.OVERSUBSCRIBE_RESOURCE: 1.0}, {"num_cpus": 2}, 2),
    ],
    ids=["joined", "the user's", "a head that is to stay free", "ours", "the user's in ours"],
)
def test_each_asks_for_what_it_is_told_and_otherwise_for_a_cpu(place, total, remote_args, asked):
    assert place(status(node(**total))).options(remote_args)["num_cpus"] == asked


@pytest.mark.parametrize(
    ("options", "starting", "near"),
    [
        ({"num_cpus": 1}, 0, 2),
        ({"num_cpus": 1}, 1, 1),
        ({"num_cpus": 1}, 9, 0),
        ({"num_cpus": 0}, 0, 0),
        ({"num_cpus": 0, "resources": {"disk": 2}}, 0, 1),
        ({"num_cpus": 1, "label_selector": {"place": "away"}}, 0, 0),
        ({"num_cpus": 1, "label_selector": {"place": None}}, 0, 0),
        ({"num_cpus": 1, "label_selector": "what Ray refuses"}, 0, 2),
    ],
)
def test_as_many_as_have_room_here_are_here_and_no_other_names_a_node(place, options, starting, near):
    """Ray tells no autoscaler of those that name one."""
    here = node(CPU=8.0, disk=3.0, free={"CPU": 2.0})
    where = place(status(here, node(AWAY, CPU=8.0))).where(options, 3, starting)
    places = [place["scheduling_strategy"] for place, _ in where]
    assert [getattr(place, "node_id", place) for place in places] == [HERE] * near + ["DEFAULT"] * (3 - near)
    assert [had_room for _, had_room in where] == [True] * near + [None] * (3 - near)


@pytest.mark.parametrize(
    ("strategy", "had_room"),
    [("SPREAD", None), (NodeAffinitySchedulingStrategy(AWAY, soft=False), [True, False])],
    ids=["spread", "a node"],
)
def test_the_users_strategy_stays(place, strategy, had_room):
    where = place(status(node(CPU=1.0), node(AWAY, CPU=1.0))).where(
        {"num_cpus": 1, "scheduling_strategy": strategy}, 2, 0
    )
    assert where == [({}, one) for one in had_room or [None] * 2]


# ---- how long they wait

LACKS = ((Want({"CPU": 1.0}), 2),)
OTHERS = ((Want({"GPU": 1.0}), 2),)
ONE = ((Want({"CPU": 1.0}), 1),)


@pytest.mark.parametrize(
    ("known", "pending", "limit"),
    [
        (status(demand=LACKS), [Pending(), Pending()], START_TIMEOUT_S),
        (status(demand=ONE), [Pending(), Pending()], START_TIMEOUT_S),
        (status(demand=()), [Pending(), Pending()], LONG_START_TIMEOUT_S),
        (status(demand=OTHERS), [Pending(), Pending()], LONG_START_TIMEOUT_S),
        (status(demand=LACKS, coming=1), [Pending(), Pending()], LONG_START_TIMEOUT_S),
        (status(demand=()), [Pending(had_room=False)], START_TIMEOUT_S),
        (status(demand=()), [Pending(had_room=True)], LONG_START_TIMEOUT_S),
        (status(demand=LACKS), [Pending(num_cpus=0)], LONG_START_TIMEOUT_S),
    ],
    ids=[
        "no room",
        "no room for one",
        "they start",
        "others have no room",
        "nodes come",
        "a node that is full",
        "a node with room",
        "nothing asked for",
    ],
)
def test_one_limit_longer_where_something_happens(place, known, pending, limit):
    assert not gives_up(place(known), pending, limit - 1)
    assert gives_up(place(known), pending, limit)


def test_nodes_that_have_just_come_may_be_given_work(place):
    """The autoscaler starts none any more, and Ray has placed nobody yet."""
    placement = place(status(demand=LACKS, coming=1))
    assert not gives_up(placement, [Pending()], 90)
    placement.status = status(demand=LACKS)
    assert not gives_up(placement, [Pending()], 91)
    placement.clock.now += START_TIMEOUT_S + 1
    assert gives_up(placement, [Pending()], 152)


@pytest.mark.parametrize("known", [status(demand=LACKS), status(demand=()), status(demand=LACKS, coming=1)])
def test_the_users_limit_counts_for_all(place, monkeypatch, known):
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "3")
    assert not gives_up(place(known), [Pending()], 2)
    assert gives_up(place(known), [Pending()], 3)


def test_before_ray_has_said_where_they_are_the_error_says_that(place):
    young = Pending()
    young.created_at = NOW
    for known, said in ((status(demand=()), "node 10.0.0.1 has CPU 0 free"), (None, "Ray's GCS does not answer")):
        assert not gives_up(place(known), [young], LONG_START_TIMEOUT_S - 1)
        with pytest.raises(WorkerStartError, match=f"not said yet whether there is room: each asks for CPU 1; {said}"):
            place(known).check([young], 1, LONG_START_TIMEOUT_S)


# ---- what is said


def said(place, known, *pending, of=2):
    with pytest.raises(WorkerStartError) as caught:
        place(known).check(list(pending), of, math.inf)
    return str(caught.value)


def test_the_error_says_what_no_node_has_and_what_to_change(place):
    nodes = node(CPU=2.0, free={"CPU": 0.0}), node(AWAY, "10.0.0.2", CPU=16.0), node("c" * 56, CPU=2.0)
    text = said(place, status(*nodes, demand=((Want({"CPU": 32.0}), 2),)), Pending(num_cpus=32), Pending(num_cpus=32))
    assert text == (
        "2 of 2 DataLoader workers did not start within 60 s. Ray has found no room for 2 of them: each asks for CPU "
        "32; each of 2 nodes has CPU 2 in all, node 10.0.0.2 has CPU 16 in all. Remedies: lower num_workers, end what "
        "holds these resources, ask for others in ray_remote_args (num_cpus=0 shares CPUs), or raise the environment "
        "variable RAYLOADER_START_TIMEOUT (seconds) if nodes or processes are still starting"
    )


GROUP = SimpleNamespace(id=SimpleNamespace(hex=lambda: "9f2c"))


def in_group(index):
    strategy = PlacementGroupSchedulingStrategy(None, index)
    strategy.placement_group = GROUP
    return strategy


@pytest.mark.parametrize(
    ("nodes", "options", "parts"),
    [
        (
            [node(CPU=2.0, free={"CPU": 0.0})],
            {},
            ["asks for CPU 1; node 10.0.0.1 has CPU 0 free of 2"],
        ),
        (
            [node(CPU=2.0, memory=8.0 * GIB, free={"memory": 1.0 * GIB})],
            {"num_cpus": 0, "memory": 4 * GIB},
            ["asks for memory 4 GiB; node 10.0.0.1 has memory 1 GiB free of 8 GiB"],
        ),
        (
            [node(CPU=2.0)],
            {"num_cpus": 0, "num_gpus": 1},
            ["asks for GPU 1; node 10.0.0.1 has GPU 0 in all"],
        ),
        (
            [node(CPU=2.0), node(AWAY, CPU=2.0, disk=1.0, free={"disk": 0.0})],
            {"num_cpus": 0, "resources": {"disk": 1}},
            ["node 10.0.0.1 has disk 0 in all", "node 10.0.0.1 has disk 0 free of 1"],
        ),
        ([node(CPU=2.0)], {"accelerator_type": "A100"}, ["asks for CPU 1, accelerator_type:A100 0.001; node"]),
        (
            [
                node(CPU=2.0, labels={"place": "earth"}),
                node(AWAY, CPU=2.0, labels={"place": "moon"}, free={"CPU": 0.0}),
            ],
            {"label_selector": {"place": "in(moon, mars)"}},
            ["node 10.0.0.1 has other labels", "node 10.0.0.1 has CPU 0 free of 2"],
        ),
        (
            [node(CPU=2.0, labels={"place": "earth"})],
            {"label_selector": {"place": "!earth"}},
            ["has other labels"],
        ),
        (
            [node(CPU=2.0), node(AWAY, CPU=2.0, free={"CPU": 0.0})],
            {"scheduling_strategy": NodeAffinitySchedulingStrategy(AWAY, soft=False)},
            [f"asks for CPU 1, node {AWAY}; ", "node 10.0.0.1 is another", "has CPU 0 free of 2"],
        ),
        (
            [node(CPU=2.0, CPU_group_9f2c=1.0, free={"CPU_group_9f2c": 0.0})],
            {"scheduling_strategy": in_group(-1)},
            [
                "asks for CPU_group_9f2c 1; ",
                "has CPU_group_9f2c 0 free of 1",
            ],
        ),
        ([node(CPU=2.0)], {"scheduling_strategy": in_group(1)}, ["asks for CPU_group_1_9f2c 1, CPU_group_9f2c 1; "]),
        (
            [node(CPU=2.0)],
            {"scheduling_strategy": "SPREAD"},
            ["asks for CPU 1; node 10.0.0.1 has room, if the scheduling_strategy allows it"],
        ),
        (
            [node(CPU=2.0)],
            {"scheduling_strategy": NodeLabelSchedulingStrategy(hard={"place": In("moon")})},
            ["node 10.0.0.1 has room, if the scheduling_strategy allows it"],
        ),
    ],
    ids=[
        "cpu",
        "memory",
        "gpu",
        "resource",
        "accelerator",
        "label",
        "not-label",
        "node",
        "group",
        "bundle",
        "spread",
        "node-label",
    ],
)
def test_whatever_lacks_is_named(place, nodes, options, parts):
    text = said(place, status(*nodes), Pending(had_room=False, **options))
    for part in parts:
        assert part in text
    assert "object at 0x" not in text


def test_nodes_that_come_and_a_cluster_without_any_are_said(place):
    assert "an autoscaler is starting 3 more. Remedies" in said(place, status(demand=LACKS, coming=3), Pending())
    text = said(place, ClusterStatus((), LACKS, at=NOW), Pending())
    assert "each asks for CPU 1; Ray has no live node" in text


def test_those_that_have_a_place_and_do_not_start_are_another_matter(place):
    text = said(place, status(demand=()), Pending())
    assert text.startswith("1 of 2 DataLoader workers did not start within 600 s. 1 of them have their place: ")
    assert "no room" not in text


def test_what_is_waited_for_is_said_and_what_starts_is_no_lack_of_room(place, caplog):
    """Four hold the last CPUs and start, two wait for some."""
    full = node(CPU=6.0, free={"CPU": 0.0})
    pending = [*[Pending(had_room=True)] * 3, *[Pending()] * 3]
    place(status(full, demand=LACKS)).tell(pending, 8)
    place(status(full)).tell(pending, 8)
    assert caplog.messages == [
        "rayloader: waiting for 6 of 8 worker processes. Ray has found no room for 2 of them: each asks for "
        "CPU 1; node 10.0.0.1 has CPU 0 free of 6. 4 of them have their place: Ray is starting these processes, and "
        "they import torch",
        "rayloader: waiting for 6 of 8 worker processes. 6 of them have their place: Ray is starting these processes, "
        "and they import torch",
    ]


# ---- which nodes are coming


def version_2(requests=(), instances=0):
    return SimpleNamespace(
        pending_instance_requests=[SimpleNamespace(count=count) for count in requests],
        pending_instances=[None] * instances,
    )


@pytest.mark.parametrize(
    ("state", "report", "coming"),
    [
        (version_2(), {}, 0),
        (version_2([2, 1], 1), {}, 4),
        (version_2(), {"pending_launches": {"data": 2}, "pending_nodes": [["10.0.0.3", "data", "setting-up"]]}, 3),
        (version_2(), {"pending_launches": {}, "pending_nodes": [["10.0.0.3", "node_ffff", "up-to-date"]]}, 0),
        (version_2(), None, 0),
    ],
    ids=["none", "version 2", "version 1", "one that only watches", "one that has not begun"],
)
def test_both_autoscalers_are_asked_what_they_start(monkeypatch, state, report, coming):
    monkeypatch.setattr("rayloader.actors.placement.time", SimpleNamespace(time=lambda: NOW))
    assert _coming(state, {"time": NOW - 1, "autoscaler_report": report}) == coming
    ended = _coming(state, {"time": NOW - 1000, "autoscaler_report": report})
    assert ended == _coming(state, {}), "a report of an autoscaler that has ended"
