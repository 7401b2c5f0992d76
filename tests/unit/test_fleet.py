"""Which process hosts which worker, and when they are told so, without Ray: processes come and fail as tests say."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from rayloader import WorkerStartError
from rayloader.actors import actors as actors_module
from rayloader.actors import pool
from rayloader.actors.actors import Actors
from rayloader.epoch import hosts
from rayloader.errors import own_notes
from rayloader.protocol import NONE_YET, Replica
from rayloader.resume.journal import Journal
from rayloader.workers.connection import Channel, NeverStarts, ProcessLost
from rayloader.workers.fleet import Fleet, Worker


class Address:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.location = node_id, "machine"


@dataclass
class Setup:
    """The part of the real one that is looked at."""

    worker_id: int


class Process:
    """Stands for an `Actor`."""

    def __init__(self, node_id: str | None = None, *, world: World | None = None) -> None:
        self._world = world
        self.lane = self
        self.address = None if node_id is None else Address(node_id)
        self.tells_start = True
        self.answer: Any = NONE_YET
        self.placed = self.lost = False
        self.worker_id = -1
        self.options = {"num_cpus": 1}
        self.no_line = ""
        self.calls = 0
        self.hosted: Any = None
        self.started: list[Any] = []  # sources, one for each start
        self.hello = SimpleNamespace(ref=SimpleNamespace(future=Future))

    def comes(self, node_id: str) -> None:
        self.answer, self.address = "hello", Address(node_id)

    @property
    def is_near(self) -> bool:
        return self.address is not None and self.address.node_id == "here"

    def start(self, source: Any, setup: Setup, state: object) -> Any:
        self.started.append(source)
        return SimpleNamespace(succeeded=True)

    def host(self, image: Any, contents: object) -> None:
        self.hosted = image.address.name, SimpleNamespace(succeeded=True, value="address", ref=f"of {id(self)}")

    def has_started(self) -> bool:
        if isinstance(self.answer, NeverStarts):
            raise self.answer
        return self.answer is not NONE_YET

    def cause(self, error: Exception | None) -> str:
        return str(error)


class World:
    """A fleet of actors on named nodes. This object is the pool, with its placement, and the mailbox of the workers.

    Attributes:
        new: the processes that were asked for.
        killed: processes that were ended.
    """

    def __init__(self, *nodes: str) -> None:
        self.new: list[Process] = []
        self.killed: list[Process] = []
        self.placement = self
        self.closed = False
        everything: Any = self
        self.actors = Actors(everything, SimpleNamespace(ray_remote_args={}, uses_lines=True))
        self.fleet = Fleet(self.actors)
        self.fleet.mailbox = everything
        processes: list[Any] = [Process(node, world=self) for node in nodes]
        for process in processes:
            process.answer = "hello"
        setups: list[Any] = [Setup(number) for number in range(len(nodes))]
        self.fleet.hosts = processes
        self.fleet.workers = [
            Worker(setup, Journal(), process, everything) for setup, process in zip(setups, processes, strict=True)
        ]
        for worker in self.fleet.workers:
            worker.away = False
        self.open: set[Any] = {*processes}
        self.hopeless = False  # there is no room for those that wait
        self.told: list[list[Process]] = []  # who is waited for
        self.without_lines: set[tuple[str, str]] = set()

    def hosts(self) -> list[Any]:
        """Of each worker."""
        return [worker.host for worker in self.fleet.workers]

    # ---- the pool's

    def begin_lease(self, *_: object) -> object:
        return self

    def check(self) -> None:
        pass

    def end(self, lease: object, *, busy: bool, reuse: bool) -> None:
        self.killed += self.new

    def lend(self, lease: object, remote_args: object, count: int, *, fresh: bool) -> list[Process]:
        assert fresh, "idle ones may be on the same node"
        self.new += [Process(world=self) for _ in range(count)]
        return self.new[-count:]

    def kill(self, process: Process) -> None:
        self.killed.append(process)

    def check_pending(self, pending: list[Process], of: int) -> None:
        if self.hopeless:
            raise WorkerStartError(f"{len(pending)} of {of}")

    def lacking(self, pending: list[Process]) -> int:
        return sum(not process.placed for process in pending)

    def tell(self, pending: list[Process], count: int) -> None:
        self.told.append(pending)

    def later(self, job: object) -> None:
        pass

    def tidy(self) -> None:
        pass

    # ---- the mailbox's

    def add(self, channel: Channel) -> None:
        self.open.add(channel.process)

    def __contains__(self, process: Process) -> bool:
        return process in self.open

    def to(self, process: Process) -> Process:
        return process

    def remove(self, process: Process) -> None:
        self.open.discard(process)


# ---- processes that do not come


def waiting(*nodes: str | None) -> World:
    """Of these processes, those without a node have not come; their workers are away."""
    world = World(*[node or "nowhere" for node in nodes])
    for node, process, worker in zip(nodes, world.hosts(), world.fleet.workers, strict=True):
        if node is None:
            process.answer, process.address = NONE_YET, None
            worker.away = True
    return world


def test_while_there_is_hope_they_are_waited_for_and_that_is_told_once() -> None:
    world = waiting("here", None)
    _, missing = before = world.hosts()
    world.fleet.check_started()
    assert world.told == [], "not at once"
    world.actors._notice_at = 0.0
    for _ in range(3):
        world.fleet.check_started()
    assert world.told == [[missing]]
    assert world.hosts() == before


def test_where_all_have_come_nothing_is_asked() -> None:
    world = waiting("here", "a")
    world.hopeless = True
    world.fleet.check_started()


def test_where_there_is_no_room_for_one_it_is_an_error_also_if_others_have_come() -> None:
    world = waiting("here", None)
    world.hopeless = True
    with pytest.raises(WorkerStartError, match="1 of 2"):
        world.fleet.check_started()


def test_one_that_cannot_start_is_lost() -> None:
    world = waiting("here", None)
    missing = world.hosts()[1]
    missing.answer = NeverStarts("as planned")
    with pytest.raises(ProcessLost, match="as planned") as caught:
        world.fleet.check_started()
    assert caught.value.process is missing
    world.fleet.lose(missing)
    world.hopeless = True
    world.fleet.check_started()  # nobody waits for it any more


# ---- to begin, and to begin again


@pytest.fixture
def somewhere(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Workers may be on other nodes; gives what went into Ray's store."""
    stored: list[object] = []

    def put(content: object) -> str:
        stored.append(content)
        return f"object {len(stored)}"

    monkeypatch.setattr(actors_module.ray, "put", put)
    monkeypatch.setattr(actors_module.session, "node_id", lambda: "here")  # it would start a Ray
    return stored


def with_image(world: World, name: str = "image") -> None:
    image: Any = SimpleNamespace(address=SimpleNamespace(name=name), content=lambda: b"content")
    world.actors.replica, world.actors._lines = (image, []), False
    for worker in world.fleet.workers:
        worker.away = True
    world.open.clear()


def test_those_that_have_come_begin_and_the_others_are_awaited(somewhere: list[object]) -> None:
    world = waiting("here", None, "here")
    with_image(world)
    first, missing, third = world.hosts()
    third.lost = True
    assert [worker.worker_id for worker in world.fleet.revive()] == [0]
    assert world.fleet.awaited == [missing]
    assert not first.started[0].content
    assert world.fleet.revive() == []
    missing.comes("here")
    assert [worker.worker_id for worker in world.fleet.revive()] == [1]
    assert world.fleet.awaited == []
    assert not somewhere


def test_one_process_of_each_other_node_has_the_image_for_all_there(somewhere: list[object]) -> None:
    world = World("here", "a", "a", "b", "a")
    with_image(world)
    assert len(world.fleet.revive()) == 5
    here, first, second, other, third = world.hosts()
    sources = [process.started[0] for process in world.hosts()]
    assert len(somewhere) == 1, "the content went into the store once"
    assert (sources[0].content, sources[0].hosted) == (None, None)
    assert [process.hosted is not None for process in (here, first, second, other, third)] == [
        False,
        True,
        False,
        True,
        False,
    ]
    for source, host in ((1, first), (2, first), (4, first), (3, other)):
        assert sources[source].content == ["object 1"]
        assert sources[source].hosted == [host.hosted[1].ref]


def test_an_image_goes_into_the_store_once_however_late_the_other_nodes_come(somewhere: list[object]) -> None:
    """And does not stay there when all have begun."""
    world = waiting("a", None)
    with_image(world)
    late = world.hosts()[1]
    assert [worker.worker_id for worker in world.fleet.revive()] == [0]
    late.comes("b")
    assert [worker.worker_id for worker in world.fleet.revive()] == [1]
    assert [process.started[0].content for process in world.hosts()] == [["object 1"]] * 2
    assert len(somewhere) == 1
    assert world.actors._contents == []


def test_an_image_that_a_node_has_is_not_sent_again(somewhere: list[object]) -> None:
    world = World("a", "a")
    with_image(world)
    world.fleet.revive()
    with_image(world)
    world.fleet.revive()
    first, second = world.hosts()
    assert len(somewhere) == 1
    for process in (first, second):
        assert process.started[1].content == [None]
        assert process.started[1].hosted == [first.hosted[1].ref]
    with_image(world, "another")
    world.fleet.revive()
    assert len(somewhere) == 2
    assert first.hosted[0] == "another"


def test_where_a_line_is_refused_the_worker_begins_again_and_it_is_told_once_for_a_machine(
    somewhere: list[object], caplog: pytest.LogCaptureFixture
) -> None:
    world = World("a", "a", "b")
    world.actors._lines = False
    first, second, other = world.fleet.workers
    world.fleet.fall_back(first, "as planned")
    assert first.host not in world.open
    assert first.host.no_line == "as planned"
    assert first.away
    assert world.hosts()[0] is first.host, "the process itself is well"
    world.fleet.fall_back(second, "as planned")
    assert len(caplog.records) == 1
    world.fleet.fall_back(other, "as planned")
    assert len(caplog.records) == 2
    assert world.without_lines == {("a", "machine"), ("b", "machine")}


# ---- a dataset that cannot be sent


def test_a_dataset_that_ray_cannot_send_is_an_error_that_names_the_part_and_forks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    monkeypatch.setattr(pool, "get_pool", lambda: world)
    options: Any = SimpleNamespace(fresh_processes=True, ray_remote_args={}, uses_lines=True)
    replica = Replica(threading.Lock(), list, None, {})
    with pytest.raises(TypeError) as caught:
        hosts._actors(SimpleNamespace(_label="its name"), replica, options, 2, None)
    assert len(world.new) == len(world.killed) == 2, "they were to start meanwhile"
    assert caught.value.__notes__[0].startswith("It cannot be sent to the workers: dataset: _thread.lock")
    assert 'use workers="fork"' in own_notes(caught.value)[-1]
