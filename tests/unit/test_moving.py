"""Which process hosts which worker when nodes are drained and processes come or fail, without Ray."""

from typing import Any

import pytest
from ray.exceptions import RayError

from rayloader.workers.answers import NONE_YET
from rayloader.workers.moving import MOST_FAILED_STARTS, Moving
from rayloader.workers.worker_slot import WorkerSlot


class Address:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id


class Process:
    """Stands for an `Actor`."""

    def __init__(self, node_id: str | None = None) -> None:
        self.address = None if node_id is None else Address(node_id)
        self.hello = self.ref = self  # its answer, and the reference to that
        self.answer: Any = NONE_YET
        self.placed = self.lost = self.vanished = False
        self.asked = 0  # how often Ray was asked for its place
        self.options = {"num_cpus": 1}

    def comes(self, node_id: str) -> None:
        self.answer, self.address = "hello", Address(node_id)

    def is_placed(self) -> bool:
        self.asked += 1
        return self.placed

    def has_started(self) -> bool:
        if isinstance(self.answer, RayError):
            raise self.answer
        return self.answer is not NONE_YET


class World:
    """A crew whose processes are on named nodes. This object is its loan, pool, channels and answers too.

    Attributes:
        drained: nodes, with how late their workers are: 0 not at all, 1 unless room is found elsewhere, 2 in any case.
        new: the processes that were asked for.
        killed: processes that were ended.
        hurried: workers, where their process was told that another one will be these soon.
        left: workers, where their process was told that it is these no longer.
    """

    def __init__(self, *nodes: str) -> None:
        self.drained: dict[str, int] = {}
        self.new: list[Process] = []
        self.killed: list[Process] = []
        self.hurried: list[int] = []
        self.left: list[int] = []
        self.free = 0  # CPUs of nodes that have joined
        self.pool = self.draining = self
        everything: Any = self
        self.moving = Moving(everything, everything, everything)
        processes: list[Any] = [Process(node) for node in nodes]
        nothing: Any = None  # what a worker is told is of no concern here
        self.moving.actors = processes
        self.moving.slots = [
            WorkerSlot(number, nothing, nothing, process, away=False) for number, process in enumerate(processes)
        ]
        self.open = {*processes}

    def hosts(self) -> list[Any]:
        """Of each worker."""
        return [slot.host for slot in self.moving.slots]

    def spread(self) -> list[int]:
        """The workers that move; their new processes are told so."""
        before = self.hosts()
        moved = self.moving.spread()
        assert moved == [slot for slot in moved if slot.away]
        assert {slot.worker_id for slot in moved} == {
            number for number, (old, new) in enumerate(zip(before, self.hosts(), strict=True)) if old is not new
        }
        for slot in moved:
            slot.away = False
        self.open |= {*self.hosts()}
        return [slot.worker_id for slot in moved]

    # ---- the loan's

    def lend(self, count: int, *, fresh: bool | None = None) -> list[Process]:
        assert fresh, "idle ones may be on the same node"
        self.new += [Process() for _ in range(count)]
        return self.new[-count:]

    def lend_on_joined(self, count: int) -> list[Process]:
        return self.lend(min(count, self.free), fresh=True) if self.free else []

    # ---- the pool's

    def is_draining(self, process: Process) -> bool:
        return process.address is not None and process.address.node_id in self.drained

    def is_late(self, node_id: str, *, at_last: bool) -> bool:
        return self.drained[node_id] >= 1 + at_last

    def __bool__(self) -> bool:
        return bool(self.drained)

    def kill(self, process: Process) -> None:
        self.killed.append(process)

    # ---- the channels'

    def __contains__(self, process: Process) -> bool:
        return process in self.open

    def leave(self, slot: WorkerSlot) -> None:
        self.left.append(slot.worker_id)

    def hurry(self, slot: WorkerSlot) -> None:
        self.hurried.append(slot.worker_id)

    def hang_up(self, process: Process) -> None:
        self.open.discard(process)

    # ---- the answers'

    def forget(self, ref: Process) -> None:
        pass


def test_without_a_notice_there_is_nothing_to_do() -> None:
    world = World("here", "a")
    assert not world.moving.due
    assert world.spread() == []
    assert not world.new


def test_workers_that_share_cpus_move_to_a_node_that_has_joined_as_far_as_it_has_room() -> None:
    world = World("here", "here", "here")
    own, first, second = before = world.hosts()
    first.options = second.options = {"num_cpus": 0}
    world.moving.use_joined_nodes()
    assert not world.moving.due
    world.free = 1
    world.moving.use_joined_nodes()
    (new,) = world.new
    assert world.spread() == []
    assert world.hosts() == before, "they work on until it has come"
    new.comes("joined")
    assert world.spread() == [1]
    assert world.hosts() == [own, new, second]
    assert world.killed == [first]
    assert not world.moving.due


def test_a_process_on_a_drained_node_works_on_until_another_has_come() -> None:
    world = World("here", "a", "b")
    stays, goes, _ = before = world.hosts()
    world.drained = {"a": 0}
    assert world.moving.due
    for _ in range(3):
        assert world.spread() == []
    (new,) = world.new
    assert world.hurried == [1]
    assert world.hosts() == before
    assert not world.killed
    new.comes("b")
    assert world.spread() == [1]
    assert world.hosts() == [stays, new, before[2]]
    assert (world.left, world.killed) == ([1], [goes])
    assert goes not in world.open
    assert world.moving.actors == world.hosts()
    assert world.spread() == []
    assert len(world.new) == 1


def test_where_there_is_no_room_others_host_the_workers_until_there_is() -> None:
    world = World("here", "a", "a")
    stays, *gone = world.hosts()
    world.drained = {"a": 0}
    assert world.spread() == []
    world.drained = {"a": 1}
    assert world.spread() == [1, 2]
    assert world.hosts() == [stays] * 3
    assert world.killed == gone
    world.drained = {}
    assert world.moving.due
    for new in world.new:
        new.comes("b")
    assert world.spread() == [1, 2]
    assert world.hosts() == [stays, *world.new]
    assert world.killed == gone


def test_who_has_found_room_is_waited_for_until_the_node_goes() -> None:
    world = World("here", "a")
    stays, _ = world.hosts()
    world.drained = {"a": 0}
    world.spread()
    world.new[0].placed = True
    world.drained = {"a": 1}
    assert world.spread() == []
    world.drained = {"a": 2}
    assert world.spread() == [1]
    assert world.hosts() == [stays, stays]


@pytest.mark.parametrize("nodes", [("a",), ("a", "b")], ids=["one node", "all nodes"])
def test_where_nobody_stays_the_processes_work_on(nodes: tuple[str, ...]) -> None:
    world = World(*nodes)
    before = world.hosts()
    world.drained = dict.fromkeys(nodes, 2)
    for _ in range(3):
        assert world.spread() == []
    assert world.hosts() == before
    assert [process.asked for process in world.new] == [0] * len(nodes), "a call to Ray for each batch"


def test_who_comes_to_a_node_that_is_drained_by_then_moves_on() -> None:
    world = World("here", "a")
    world.drained = {"a": 0}
    world.spread()
    world.new[0].comes("b")
    world.drained = {"a": 0, "b": 0}
    assert world.spread() == [1]
    assert world.spread() == []
    world.new[1].comes("c")
    assert world.spread() == [1]
    assert world.hosts()[1] is world.new[1]


@pytest.mark.parametrize("vanished", [False, True], ids=["died", "vanished"])
def test_others_host_the_workers_of_one_that_dies_before_its_successor_comes(vanished: bool) -> None:
    world = World("here", "a")
    stays, goes = world.hosts()
    world.drained = {"a": 0}
    world.spread()
    goes.vanished = vanished
    world.moving.lose(goes)
    assert world.moving.replace(world.moving.slots[1])
    assert world.hosts() == [stays, stays]
    assert len(world.new) == 1, "one was asked for already"
    world.new[0].comes("b")
    assert world.spread() == [1]


def test_one_that_dies_and_has_nobody_to_help_out_is_replaced() -> None:
    world = World("a")
    (goes,) = world.hosts()
    world.drained = {"a": 0}
    world.spread()
    world.moving.lose(goes)
    assert world.moving.replace(world.moving.slots[0])
    coming, instead = world.new
    assert world.hosts() == [instead]
    world.moving.slots[0].away = False
    instead.comes("b")
    coming.comes("c")
    assert world.spread() == [0]
    assert world.hosts() == [coming]
    assert world.killed == [goes, instead]


def test_a_drained_process_leaves_also_whom_it_hosts_for_others() -> None:
    world = World("a", "b")
    helps, lost = world.hosts()
    lost.vanished = True
    world.moving.lose(lost)
    assert world.moving.replace(world.moving.slots[1])
    world.moving.slots[1].away = False
    assert world.hosts() == [helps, helps]
    world.drained = {"a": 1}
    assert world.spread() == []
    others, own = world.new
    own.comes("c")
    assert world.spread() == [0, 1]
    assert world.hosts() == [own, own]
    assert world.killed == [lost, helps]
    others.comes("d")
    assert world.spread() == [1]
    assert world.hosts() == [own, others]


def test_a_successor_that_cannot_start_is_asked_for_a_few_times() -> None:
    world = World("here", "a")
    stays, _ = world.hosts()
    world.drained = {"a": 0}
    for _ in range(2 * MOST_FAILED_STARTS):
        assert world.spread() == []
        world.new[-1].answer = RayError("as planned")
    assert len(world.new) == 1 + MOST_FAILED_STARTS
    world.drained = {"a": 1}
    assert world.spread() == [1]
    assert world.hosts() == [stays, stays]
