"""What actors ask for, where they run, how long they wait for that, and what is said of those that find no room."""

import math
from types import SimpleNamespace

import pytest
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rayloader import WorkerStartError
from rayloader.actors import session, start
from rayloader.actors.cluster import ClusterStatus, Node
from rayloader.actors.placement import START_TIMEOUT_S, START_TIMEOUT_VARIABLE, Placement

NOW = 1000.0
HERE, AWAY = "a" * 56, "b" * 56
GIB = 1 << 30


class Pending:
    """The part of an `Actor` that is looked at."""

    created_at = NOW - 900

    def __init__(self, *, had_room=None, **options):
        self.had_room = had_room
        self.options = {"num_cpus": 1, **options}


def node(node_id=HERE, free=None, **total):
    return Node(node_id, total, {**total, **(free or {})})


def status(*nodes, demand=()):
    return ClusterStatus(nodes or (node(CPU=2.0, free={"CPU": 0.0}),), demand=demand, at=NOW)


@pytest.fixture
def place(monkeypatch):
    """Makes a placement in a cluster with such a status."""
    monkeypatch.delenv(START_TIMEOUT_VARIABLE, raising=False)
    monkeypatch.setattr(session, "node_id", lambda: HERE)

    def make(known):
        cluster = SimpleNamespace(status=known)
        cluster.look = cluster.ask = lambda: cluster.status
        return Placement(cluster)

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
        ({"CPU": 4.0, start.OVERSUBSCRIBE_RESOURCE: 1.0}, {}, 0),
        ({"CPU": 4.0, start.OVERSUBSCRIBE_RESOURCE: 1.0}, {"num_cpus": 2}, 2),
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

LACKS = (({"CPU": 1.0}, 2),)
OTHERS = (({"GPU": 1.0}, 2),)
ONE = (({"CPU": 1.0}, 1),)


@pytest.mark.parametrize("known", [status(demand=LACKS), status(demand=()), status(demand=None), None])
def test_there_is_one_limit_which_the_user_may_set(place, monkeypatch, known):
    assert not gives_up(place(known), [Pending()], START_TIMEOUT_S - 1)
    assert gives_up(place(known), [Pending()], START_TIMEOUT_S)
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, "3")
    assert not gives_up(place(known), [Pending()], 2)
    assert gives_up(place(known), [Pending()], 3)


def test_how_many_have_no_place_is_what_ray_says(place):
    young = Pending()
    young.created_at = NOW
    for known, pending, lacking in [
        (status(demand=LACKS), [Pending(), Pending()], 2),
        (status(demand=ONE), [Pending(), Pending()], 1),
        (status(demand=()), [Pending(), Pending()], 0),
        (status(demand=OTHERS), [Pending(), Pending()], 0),
        (status(demand=()), [Pending(had_room=False)], 1),
        (status(demand=()), [Pending(had_room=True)], 0),
        (status(demand=LACKS), [Pending(num_cpus=0)], 0),
        (status(demand=None), [Pending()], None),
        (status(demand=LACKS), [young], None),
        (None, [Pending()], None),
    ]:
        assert place(known).lacking(pending) == lacking


# ---- what is said


def said(place, known, *pending, of=2):
    with pytest.raises(WorkerStartError) as caught:
        place(known).check(list(pending), of, math.inf)
    return str(caught.value)


def test_the_error_says_what_nodes_have_and_what_to_change(place):
    nodes = node(CPU=2.0, free={"CPU": 0.0}), node(AWAY, CPU=16.0), node("c" * 56, CPU=2.0, free={"CPU": 0.0})
    text = said(place, status(*nodes, demand=(({"CPU": 32.0}, 2),)), Pending(num_cpus=32), Pending(num_cpus=32))
    assert text == (
        "2 of 2 DataLoader workers did not start within 300 s: Ray has no room for 2 of them; each asks for CPU 32; "
        "2 nodes have CPU 0 free of 2; 1 node has CPU 16 free of 16. Lower num_workers, ask for less in "
        'ray_remote_args ({"num_cpus": 0} shares CPUs), or raise RAYLOADER_START_TIMEOUT (seconds)'
    )


def in_group(index):
    strategy = PlacementGroupSchedulingStrategy(None, index)
    strategy.placement_group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "9f2c"))
    return strategy


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_cpus": 0, "memory": 4 * GIB}, "memory 4 GiB; 1 node has memory 1 GiB free of 8 GiB"),
        ({"num_cpus": 0, "num_gpus": 1}, "GPU 1; 1 node has GPU 0 free of 0"),
        ({"accelerator_type": "A100"}, "CPU 1, accelerator_type:A100 0.001; "),
        ({"label_selector": {"place": "moon"}}, "CPU 1, label_selector {'place': 'moon'}; "),
        ({"scheduling_strategy": "SPREAD"}, "CPU 1, scheduling_strategy SPREAD; "),
        ({"scheduling_strategy": in_group(1)}, "CPU_group_1_9f2c 1, scheduling_strategy PlacementGroupScheduling"),
    ],
)
def test_whatever_is_asked_for_is_named(place, options, text):
    one = node(CPU=2.0, memory=8.0 * GIB, free={"memory": 1.0 * GIB})
    assert text in said(place, status(one), Pending(had_room=False, **options))


def test_a_gcs_that_does_not_answer_and_processes_that_do_not_start_are_said(place):
    assert "each asks for CPU 1; Ray's GCS does not answer" in said(place, None, Pending())
    assert ": they have a place in the Ray cluster, and Ray is starting" in said(place, status(demand=()), Pending())


def test_what_is_waited_for_is_said(place, caplog):
    """Four hold the last CPUs and start, two wait for some."""
    full = node(CPU=6.0, free={"CPU": 0.0})
    place(status(full, demand=LACKS)).tell([*[Pending(had_room=True)] * 3, *[Pending()] * 3], 8)
    assert caplog.messages == [
        "rayloader: waiting for 6 of 8 worker processes: Ray has no room for 2 of them; each asks for CPU 1; 1 node "
        "has CPU 0 free of 6"
    ]
