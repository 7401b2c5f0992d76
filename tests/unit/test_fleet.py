"""Which process hosts which worker, and when they are told so, without Ray: processes come and fail as tests say."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from rayloader import WorkerStartError
from rayloader.actors import actors as actors_module
from rayloader.actors import pool
from rayloader.actors.actors import Actors
from rayloader.epoch import hosts
from rayloader.errors import own_notes
from rayloader.protocol import Replica
from rayloader.resume.journal import Journal
from rayloader.workers.connection import NeverStarts, ProcessLost
from rayloader.workers.fleet import Fleet, Worker


class Process:
    """Stands for an `Actor` and its lane, on a node from the start, or later."""

    tells_start, calls, options, cause = True, 0, {"num_cpus": 1}, staticmethod(str)

    def __init__(self, node_id=None):
        self.lane, self.worker_id, self.hosted, self.address = self, -1, None, None
        self.no_line, self.lost, self.never = "", False, None
        self.started = []  # sources, one for each start
        self.hello = SimpleNamespace(ref=SimpleNamespace(future=Future))
        if node_id is not None:
            self.comes(node_id)

    def comes(self, node_id):
        self.address = SimpleNamespace(node_id=node_id, location=(node_id, "machine"))

    @property
    def is_near(self):
        return self.address is not None and self.address.node_id == "here"

    def start(self, source, setup, state):
        self.started.append(source)
        return SimpleNamespace(succeeded=True)

    def host(self, image, contents):
        self.hosted = image.address.name, SimpleNamespace(ref=f"of {id(self)}")

    def has_started(self):
        if self.never is not None:
            raise self.never
        return self.address is not None


class World(set):
    """A fleet of actors on named nodes; None: they have not come, and their workers are away.

    This object is the pool, with its placement, and the mailbox of the workers: the set of the processes whose channels
    are open.
    """

    def __init__(self, *nodes):
        self.new, self.killed, self.told = [], [], []
        self.hopeless = False  # there is no room for those that wait
        self.without_lines = set()
        self.placement, self.check, self.later = self, lambda: None, lambda job: None
        self.begin_lease, self.to, self.kill = lambda *_: self, lambda process: process, self.killed.append
        self.actors = Actors(self, SimpleNamespace(ray_remote_args={}, uses_lines=True))
        self.actors._lines = False
        self.fleet = Fleet(self.actors)
        self.fleet.mailbox = self
        self.fleet.hosts = [Process(node) for node in nodes]
        self.fleet.workers = [
            Worker(SimpleNamespace(worker_id=number), Journal(), process, self)
            for number, process in enumerate(self.fleet.hosts)
        ]
        for worker in self.fleet.workers:
            worker.away = worker.host.address is None
        self.update(self.fleet.hosts)

    def hosts(self):
        """Of each worker."""
        return [worker.host for worker in self.fleet.workers]

    def with_image(self, name="image"):
        """Another epoch is to begin, with a replica of this image."""
        self.actors.replica = SimpleNamespace(address=SimpleNamespace(name=name), content=lambda: b"content"), []
        for worker in self.fleet.workers:
            worker.away = True
        self.clear()
        return self

    def revive(self):
        return [worker.worker_id for worker in self.fleet.revive()]

    # ---- the pool's

    def end(self, lease, *, busy, reuse):
        self.killed += self.new

    def lend(self, lease, remote_args, count, *, fresh):
        assert fresh, "idle ones may be on the same node"
        self.new += [Process() for _ in range(count)]
        return self.new[-count:]

    def check_pending(self, pending, of):
        if self.hopeless:
            raise WorkerStartError(f"{len(pending)} of {of}")

    def tell(self, pending, count):
        self.told.append(pending)

    # ---- the mailbox's

    def add(self, channel):
        super().add(channel.process)

    def remove(self, process):
        self.discard(process)

    def close(self):
        pass


# ---- processes that do not come


def test_while_there_is_hope_they_are_waited_for_and_that_is_told_once():
    world = World("here", None)
    missing = world.hosts()[1]
    world.fleet.check_started()
    assert world.told == [], "not at once"
    world.actors._notice_at = 0.0
    for _ in range(3):
        world.fleet.check_started()
    assert world.told == [[missing]]


@pytest.mark.parametrize(("nodes", "error"), [(["here", "a"], None), (["here", None], "1 of 2")])
def test_where_there_is_no_room_for_one_it_is_an_error_also_if_others_have_come(nodes, error):
    world = World(*nodes)
    world.hopeless = True
    if error is None:
        world.fleet.check_started()
    else:
        with pytest.raises(WorkerStartError, match=error):
            world.fleet.check_started()


def test_one_that_cannot_start_is_lost_and_replaced():
    world = World("here", None)
    present, missing = world.hosts()
    missing.never = NeverStarts("as planned")
    with pytest.raises(ProcessLost, match="as planned") as caught:
        world.fleet.check_started()
    assert caught.value.process is missing
    world.fleet.lose(missing)
    world.hopeless = True
    world.fleet.check_started()  # nobody waits for it any more
    assert (world.killed, world) == ([missing], {present})
    assert [world.fleet.replace(worker) for worker in world.fleet.workers] == [False, True]
    assert world.hosts() == world.fleet.hosts == [present, *world.new]
    assert world.fleet.awaited == world.new


# ---- to begin, and to begin again


@pytest.fixture
def stored(monkeypatch):
    """What went into Ray's store."""
    stored = []
    monkeypatch.setattr(actors_module.ray, "put", lambda content: stored.append(content) or f"object {len(stored)}")
    monkeypatch.setattr(actors_module.session, "node_id", lambda: "here")  # it would start a Ray
    return stored


def test_those_that_have_come_begin_and_the_others_are_awaited(stored):
    """However late they come, the image goes into the store once, and does not stay there when all have begun."""
    world = World("a", None, "a").with_image()
    first, missing, third = world.hosts()
    third.lost = True
    assert world.revive() == [0]
    assert world.fleet.awaited == [missing]
    assert world.revive() == []
    missing.comes("b")
    assert world.revive() == [1]
    assert [process.started[0].content for process in (first, missing)] == [["object 1"]] * 2
    assert (world.fleet.awaited, len(stored), world.actors._contents) == ([], 1, [])


def test_one_process_of_each_other_node_has_the_image_for_all_there(stored):
    """And it is not sent again where a node has it."""
    world = World("here", "a", "a", "b", "a").with_image()
    processes = world.hosts()
    first, other = processes[1], processes[3]
    for epoch in range(2):
        assert world.revive() == [0, 1, 2, 3, 4]
        sources = [process.started[epoch] for process in processes]
        assert (sources[0].content, sources[0].hosted) == (None, None)
        assert [process.hosted is not None for process in processes] == [False, True, False, True, False]
        assert [source.content for source in sources[1:]] == [["object 1"] if epoch == 0 else [None]] * 4
        ref, others = first.hosted[1].ref, other.hosted[1].ref
        assert [source.hosted for source in sources[1:]] == [[ref], [ref], [others], [ref]]
        world.with_image()
    world.with_image("another").revive()
    assert len(stored) == 2
    assert first.hosted[0] == "another"


def test_where_a_line_is_refused_the_worker_begins_again_and_it_is_told_once_for_a_machine(caplog):
    world = World("a", "a", "b")
    for worker, told in zip(world.fleet.workers, (1, 1, 2), strict=True):
        process = worker.host
        world.fleet.fall_back(worker, "as planned")
        assert process not in world
        assert (process.no_line, worker.away, worker.host) == ("as planned", True, process), "it itself is well"
        assert len(caplog.records) == told
    assert world.without_lines == {("a", "machine"), ("b", "machine")}


def test_a_dataset_that_ray_cannot_send_is_an_error_that_names_the_part_and_forks(monkeypatch):
    world = World()
    monkeypatch.setattr(pool, "get_pool", lambda: world)
    options = SimpleNamespace(fresh_processes=True, ray_remote_args={}, uses_lines=True)
    with pytest.raises(TypeError) as caught:
        hosts._actors(SimpleNamespace(_label="its name"), Replica(threading.Lock(), list, None, {}), options, 2, None)
    assert len(world.new) == len(world.killed) == 2, "they were to start meanwhile"
    assert caught.value.__notes__[0].startswith("It cannot be sent to the workers: dataset: _thread.lock")
    assert 'use workers="fork"' in own_notes(caught.value)[-1]
