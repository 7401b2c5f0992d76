"""What actors ask for, where they run, how long they wait for that, and what is said of those that find no room."""

import math
from types import SimpleNamespace

import pytest
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
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


@pytest.mark.parametrize("cpus", [0.0, 4.0])  # a head may be to stay free
@pytest.mark.parametrize(("ours", "remote_args", "asked"), [(0, {}, 1), (1, {}, 0), (0, {"num_cpus": 0.25}, 0.25)])
def test_each_asks_for_what_it_is_told_and_otherwise_for_a_cpu(place, cpus, ours, remote_args, asked):
    total = {"CPU": cpus} | ({session.OVERSUBSCRIBE_RESOURCE: 1.0} if ours else {})
    assert place(status(node(**total))).options(remote_args)["num_cpus"] == asked
    assert place(status(node(**total))).options({"num_cpus": 2})["num_cpus"] == 2


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
        ({"num_cpus": 1, "scheduling_strategy": "SPREAD"}, 0, None),
    ],
)
def test_as_many_as_have_room_here_are_here_and_no_other_names_a_node(place, options, starting, near):
    """Ray tells no autoscaler of those that name one."""
    here = node(CPU=8.0, disk=3.0, free={"CPU": 2.0})
    where = place(status(here, node(AWAY, CPU=8.0))).where(options, 3, starting)
    if near is None:
        assert where == [({}, None)] * 3, "the user's strategy stays"
        return
    places = [place["scheduling_strategy"] for place, _ in where]
    assert [getattr(place, "node_id", place) for place in places] == [HERE] * near + ["DEFAULT"] * (3 - near)
    assert [had_room for _, had_room in where] == [True] * near + [None] * (3 - near)


def test_on_the_node_that_the_user_names_as_many_have_room_as_it_has_cpus(place):
    options = {"num_cpus": 1, "scheduling_strategy": NodeAffinitySchedulingStrategy(AWAY, soft=False)}
    assert place(status(node(CPU=1.0), node(AWAY, CPU=1.0))).where(options, 2, 0) == [({}, True), ({}, False)]


# ---- how long they wait

LACKS = ((Want({"CPU": 1.0}), 2),)
OTHERS = ((Want({"GPU": 1.0}), 2),)
ONE = ((Want({"CPU": 1.0}), 1),)
LIMITS = {
    "no room": (status(demand=LACKS), [Pending(), Pending()], START_TIMEOUT_S),
    "no room for one": (status(demand=ONE), [Pending(), Pending()], START_TIMEOUT_S),
    "they start": (status(), [Pending(), Pending()], LONG_START_TIMEOUT_S),
    "others have no room": (status(demand=OTHERS), [Pending(), Pending()], LONG_START_TIMEOUT_S),
    "nodes come": (status(demand=LACKS, coming=1), [Pending(), Pending()], LONG_START_TIMEOUT_S),
    "a node that is full": (status(), [Pending(had_room=False)], START_TIMEOUT_S),
    "a node with room": (status(), [Pending(had_room=True)], LONG_START_TIMEOUT_S),
    "nothing asked for": (status(demand=LACKS), [Pending(num_cpus=0)], LONG_START_TIMEOUT_S),
}


@pytest.mark.parametrize("name", LIMITS)
def test_one_limit_longer_where_something_happens_or_the_users(place, monkeypatch, name):
    known, pending, limit = LIMITS[name]
    assert not gives_up(place(known), pending, limit - 1)
    assert gives_up(place(known), pending, limit)
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "3")
    assert not gives_up(place(known), pending, 2)
    assert gives_up(place(known), pending, 3)


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_limit_that_is_none_is_refused(place, monkeypatch, text):
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, text)
    with pytest.raises(ValueError, match=rf"{START_TIMEOUT_VARIABLE} must be a number of seconds >= 0, got '{text}'"):
        place(status()).check([Pending()], 1, 1.0)


def test_nodes_that_have_just_come_may_be_given_work(place):
    """The autoscaler starts none any more, and Ray has placed nobody yet."""
    placement = place(status(demand=LACKS, coming=1))
    assert not gives_up(placement, [Pending()], 90)
    placement.status = status(demand=LACKS)
    assert not gives_up(placement, [Pending()], 91)
    placement.clock.now += START_TIMEOUT_S + 1
    assert gives_up(placement, [Pending()], 152)


# ---- what is said


def said(place, known, *pending, of=2):
    with pytest.raises(WorkerStartError) as caught:
        place(known).check(list(pending), of, math.inf)
    return str(caught.value)


def in_group(index):
    strategy = PlacementGroupSchedulingStrategy(None, index)
    strategy.placement_group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "9f2c"))
    return {"scheduling_strategy": strategy}


TWO = node(CPU=2.0)
LARGE = node(AWAY, "10.0.0.2", CPU=16.0)
FULL = node(AWAY, CPU=2.0, free={"CPU": 0.0})
EARTH = node(CPU=2.0, labels={"place": "earth"})
MOON = node(AWAY, CPU=2.0, labels={"place": "moon"}, free={"CPU": 0.0})
MEMORY = node(CPU=2.0, memory=8.0 * GIB, free={"memory": 1.0 * GIB})
DISK = node(AWAY, CPU=2.0, disk=1.0, free={"disk": 0.0})
GROUP = node(CPU=2.0, CPU_group_9f2c=1.0, free={"CPU_group_9f2c": 0.0})
NO_CPU = {"num_cpus": 0}
TO_AWAY = {"scheduling_strategy": NodeAffinitySchedulingStrategy(AWAY, soft=False)}
BY_LABEL = {"scheduling_strategy": NodeLabelSchedulingStrategy(hard={"place": In("moon")})}
ROOM = "node 10.0.0.1 has room, if the scheduling_strategy allows it"


@pytest.mark.parametrize(
    ("nodes", "options", "parts"),
    [
        (
            [FULL],
            {},
            [
                "asks for CPU 1; node 10.0.0.1 has CPU 0 free of 2",
                "Remedies: lower num_workers",
                "RAYLOADER_START_TIMEOUT (s",
            ],
        ),
        ([TWO, LARGE, FULL], {"num_cpus": 32}, ["each of 2 nodes has CPU 2 in all, node 10.0.0.2 has CPU 16 in all"]),
        ([MEMORY], {**NO_CPU, "memory": 4 * GIB}, ["asks for memory 4 GiB; node 10.0.0.1 has memory 1 GiB free of 8"]),
        ([TWO], {**NO_CPU, "num_gpus": 1}, ["asks for GPU 1; node 10.0.0.1 has GPU 0 in all"]),
        ([TWO, DISK], {**NO_CPU, "resources": {"disk": 1}}, ["1 has disk 0 in all", "1 has disk 0 free of 1"]),
        ([TWO], {"accelerator_type": "A100"}, ["asks for CPU 1, accelerator_type:A100 0.001; node"]),
        ([EARTH, MOON], {"label_selector": {"place": "in(moon, mars)"}}, ["has other labels", "has CPU 0 free of 2"]),
        ([EARTH], {"label_selector": {"place": "!earth"}}, ["has other labels"]),
        ([TWO, FULL], TO_AWAY, [f"asks for CPU 1, node {AWAY}; ", "node 10.0.0.1 is another", "has CPU 0 free of 2"]),
        ([GROUP], in_group(-1), ["asks for CPU_group_9f2c 1; ", "has CPU_group_9f2c 0 free of 1"]),
        ([TWO], in_group(1), ["asks for CPU_group_1_9f2c 1, CPU_group_9f2c 1; "]),
        ([TWO], {"scheduling_strategy": "SPREAD"}, [f"asks for CPU 1; {ROOM}"]),
        ([TWO], BY_LABEL, [ROOM]),
    ],
)
def test_whatever_lacks_is_named(place, nodes, options, parts):
    text = said(place, status(*nodes), Pending(had_room=False, **options))
    assert [part in text for part in parts] == [True] * len(parts), text
    assert "object at 0x" not in text


STARTING = "of them have their place: Ray is starting these processes, and they import torch"


def test_what_else_is_known_is_said(place):
    """Whether Ray has said where they are, and nodes that come, or that there is none."""
    assert "an autoscaler is starting 3 more. Remedies" in said(place, status(demand=LACKS, coming=3), Pending())
    assert "each asks for CPU 1; Ray has no live node" in said(place, ClusterStatus((), LACKS, at=NOW), Pending())
    young = Pending()
    young.created_at = NOW
    for known, part in ((status(), "node 10.0.0.1 has CPU 0 free"), (None, "Ray's GCS does not answer")):
        assert not gives_up(place(known), [young], LONG_START_TIMEOUT_S - 1)
        assert f"not said yet whether there is room: each asks for CPU 1; {part}" in said(place, known, young)


def test_what_is_waited_for_is_said_and_what_starts_is_no_lack_of_room(place, caplog):
    """Four hold the last CPUs and start, two wait for some."""
    full = node(CPU=6.0, free={"CPU": 0.0})
    pending = [*[Pending(had_room=True)] * 3, *[Pending()] * 3]
    place(status(full, demand=LACKS)).tell(pending, 8)
    place(status(full)).tell(pending, 8)
    lacking = "Ray has found no room for 2 of them: each asks for CPU 1; node 10.0.0.1 has CPU 0 free of 6. 4 "
    waiting = "rayloader: waiting for 6 of 8 worker processes. "
    assert caplog.messages == [f"{waiting}{lacking}{STARTING}", f"{waiting}6 {STARTING}"]
    text = said(place, status(), Pending())
    assert text.startswith(f"1 of 2 DataLoader workers did not start within 600 s. 1 {STARTING}")
    assert "no room" not in text


# ---- what Ray says of the cluster


def test_the_cluster_is_read_from_what_ray_answers(monkeypatch):
    reply = GetClusterStatusReply()
    state = reply.cluster_resource_state
    for number, alive in ((1, True), (2, False)):
        one = state.node_states.add(node_id=bytes([number]), node_ip_address="10.0.0.1", status=1 if alive else 2)
        one.total_resources["CPU"], one.available_resources["CPU"], one.labels["place"] = 4.0, 1.0, "earth"
    demand = state.pending_resource_requests.add(count=3)
    demand.request.resources_bundle["CPU"] = 2.0
    demand.request.label_selectors.add().label_constraints.add(label_key="place", label_values=["moon"], operator=1)
    state.pending_gang_resource_requests.add().requests.add().resources_bundle["GPU"] = 1.0
    monkeypatch.setattr(placement, "cluster_status", lambda ray, limit: (reply, {}))
    heard = Placement(lambda: True, lambda: None)
    heard._ask()
    assert heard.status == ClusterStatus(
        (Node("01", "10.0.0.1", {"CPU": 4.0}, {"CPU": 1.0}, {"place": "earth"}),),
        ((Want({"CPU": 2.0}, [[("place", frozenset({"moon"}), True)]]), 3),),
        (Want({"GPU": 1.0}, []),),
        at=heard.status.at,
    )


def version_2(requests=(), instances=0):
    return SimpleNamespace(
        pending_instance_requests=[SimpleNamespace(count=count) for count in requests],
        pending_instances=[None] * instances,
    )


@pytest.mark.parametrize(
    ("state", "report", "coming"),
    [
        (version_2([2, 1], 1), {}, 4),
        (version_2(), {"pending_launches": {"data": 2}, "pending_nodes": [["10.0.0.3", "data", "setting-up"]]}, 3),
        (version_2(), {"pending_launches": {}, "pending_nodes": [["10.0.0.3", "node_ffff", "up-to-date"]]}, 0),
        (version_2(), None, 0),
    ],
    ids=["version 2", "version 1", "one that only watches", "one that has not begun"],
)
def test_both_autoscalers_are_asked_what_they_start(monkeypatch, state, report, coming):
    monkeypatch.setattr("rayloader.actors.placement.time", SimpleNamespace(time=lambda: NOW))
    assert _coming(state, {"time": NOW - 1, "autoscaler_report": report}) == coming
    ended = _coming(state, {"time": NOW - 1000, "autoscaler_report": report})
    assert ended == _coming(state, {}), "a report of an autoscaler that has ended"
