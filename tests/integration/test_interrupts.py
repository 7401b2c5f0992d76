"""KeyboardInterrupt at any point of next() and iter(): no hang, no batch lost or given twice, an error that is clear.

Every test goes on with what an interrupt has left: the batch that comes next is the right one, or `next()` says that
the iterator has lost its place, and a new `iter()` works. The state is right in both cases.
"""

import contextlib

import psutil
import pytest
import torch
from torch.utils.data import IterableDataset

import rayloader.actors.pool
from inside import live_actor_pids
from interrupts import HANG_LIMIT, interrupted_at, no_hang
from probes import Calls
from rayloader import DataLoader, RayloaderError
from rayloader.epoch.iterator import close_all
from rayloader.gpu.page_locks import unlocker
from rayloader.transport.lanes import SMALL_BYTES, ArenaLane, WorkerLane
from simulated_device import SimulatedAccelerator

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    # An interrupt right after a system call has returned a socket drops it; it closes itself.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"),
]

LENGTH = 40
POINTS = 2000  # more than any operation has


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(LENGTH))


def make_loader(kind, **options):
    options = {"num_workers": 1 if kind == "iterable" else 2, **options}
    if kind == "iterable":
        return DataLoader(Numbers(), batch_size=None, prefetch_factor=2, **options)
    if kind == "waiting":  # each batch is asked for when it is needed
        options |= {"num_workers": 1, "prefetch_factor": 1}
    return DataLoader(Calls(torch.tensor, LENGTH), batch_size=None, **options)


def numbers_of_points(stride):
    return range(1, POINTS, stride)


KINDS = {
    "in order": ("map", {}),
    "each waited for": ("waiting", {}),
    "iterable": ("iterable", {}),
    "pinned": ("map", {"pin_memory": True}),
    "pinned, each waited for": ("waiting", {"pin_memory": True}),
    "on a device": ("map", {"device": "cuda"}),
    "persistent": ("map", {"persistent_workers": True}),
    "timeout": ("map", {"timeout": 1000}),
    "dynamic": ("map", {"seeding": "batch", "scheduling": "dynamic"}),
}
SAMPLED = ("each waited for", "pinned", "on a device", "persistent")


POINTS_OF_NEXT = [
    *(pytest.param(name, KeyboardInterrupt, 10, id=f"{name}, every tenth point") for name in SAMPLED),
    # Where next() draws, an Exception that a handler raises is the sampler's error: see NOTE [interrupts], rule 6.
    pytest.param("in order", KeyboardInterrupt, 5, id="in order, every fifth point"),
    *(pytest.param(name, KeyboardInterrupt, 1, marks=pytest.mark.full, id=f"{name}, every point") for name in KINDS),
]


def next_or_error(iterator):
    try:
        return next(iterator).item()
    except RayloaderError as error:
        return str(error)


@pytest.mark.parametrize(("name", "error", "stride"), POINTS_OF_NEXT)
def test_an_interrupted_next_loses_nothing_and_hangs_nowhere(accelerator, monkeypatch, name, error, stride):
    kind, options = KINDS[name]
    if "device" in options:
        SimulatedAccelerator(at_each_query=1).install(monkeypatch)
    loader = make_loader(kind, **options)
    iterator, expected = iter(loader), 0
    for number in numbers_of_points(stride):
        if expected >= LENGTH - 2:
            iterator, expected = iter(loader), 0
        interrupt = None
        with no_hang(lambda: (name, interrupt.number, interrupt.where)):  # noqa: B023
            try:
                with interrupted_at(number, error) as interrupt:
                    batch = next(iterator)
            except error:
                assert interrupt.fired
            else:
                assert batch.item() == expected
                expected += 1
                if not interrupt.fired:
                    break
            where = (number, interrupt.where)
            assert loader.state_dict()["position"]["next_task"] == expected, where
            after = next_or_error(iterator)
            if after == expected:
                expected += 1
            else:
                assert "this iterator was interrupted" in str(after), where
                assert next_or_error(iterator) == after, where
                iterator, expected = iter(loader), 0
    else:
        pytest.fail("POINTS is too small")
    assert [batch.item() for batch in loader] == list(range(LENGTH))


@pytest.mark.parametrize(
    ("persistent", "stride"),
    [
        pytest.param(False, 101, marks=pytest.mark.full),
        pytest.param(False, 7, marks=pytest.mark.full),
        (True, 101),
        pytest.param(True, 7, marks=pytest.mark.full),
    ],
)
def test_after_an_interrupted_iter_the_next_one_works(persistent, stride):
    loader = make_loader("map", persistent_workers=persistent)
    for number in numbers_of_points(stride):
        interrupt = None
        with no_hang(lambda: (interrupt.number, interrupt.where)):  # noqa: B023
            try:
                with interrupted_at(number) as interrupt:
                    iterator = iter(loader)
            except KeyboardInterrupt:
                iterator = None
            if iterator is None:
                iterator = iter(loader)
            assert [next(iterator).item(), next(iterator).item()] == [0, 1], (number, interrupt.where)
            del iterator
        if not interrupt.fired:
            break


@pytest.mark.parametrize("pin_memory", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("stride", [47, pytest.param(3, marks=pytest.mark.full)])
def test_after_an_interrupted_close_the_next_one_ends_the_iterator(accelerator, pin_memory, stride):
    loader = make_loader("map", pin_memory=pin_memory)
    for number in numbers_of_points(stride):
        iterator, interrupt = iter(loader), None
        assert next(iterator).item() == 0
        with no_hang(lambda: (interrupt.number, interrupt.where)):  # noqa: B023
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as interrupt:
                close_all()
            close_all()
            with pytest.raises(RayloaderError, match=r"call iter\(\) on the loader again"):
                next(iterator)
            assert loader.state_dict()["position"]["next_task"] == 1, (number, interrupt.where)
            assert next(iter(loader)).item() == 0
        if not interrupt.fired:
            break
    else:
        pytest.fail("POINTS is too small")


def test_after_an_interrupted_close_of_an_arena_the_next_one_unlocks_it():
    accelerator = SimulatedAccelerator()
    for number in numbers_of_points(1):
        lane, interrupt = ArenaLane(), None
        lane.accelerator = accelerator
        lent, room = lane.lend()
        where = WorkerLane().open(room).reserve(SMALL_BYTES)
        lent.arena.view(where, lent.leases)
        for _ in range(2):
            lent.leases[where[0][0]].page_lock()
        del lent
        with no_hang(lambda: (interrupt.number, interrupt.where)):  # noqa: B023
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as interrupt:
                lane.close()
            lane.close()
            while accelerator.registered:
                unlocker.ring()
        if not interrupt.fired:
            break
    else:
        pytest.fail("POINTS is too small")


@pytest.mark.parametrize("stride", [41, pytest.param(5, marks=pytest.mark.full)])
def test_after_an_interrupted_shutdown_the_next_one_ends_every_actor(monkeypatch, stride):
    """Of a pool of its own: the session's Ray is to go on."""
    monkeypatch.setattr(rayloader.actors.pool, "_pool", None)
    loader = make_loader("waiting")
    for number in numbers_of_points(stride):
        iterator, interrupt = iter(loader), None
        assert next(iterator).item() == 0
        pool = rayloader.actors.pool.get_pool()
        (pid,) = live_actor_pids(pool)
        with no_hang(lambda: (interrupt.number, interrupt.where)):  # noqa: B023
            with contextlib.suppress(KeyboardInterrupt), interrupted_at(number) as interrupt:
                pool.shutdown()
            pool.shutdown()
            assert live_actor_pids(pool) == set()
            with pytest.raises(RayloaderError, match=r"call iter\(\) on the loader again"):
                list(iterator)
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).wait(HANG_LIMIT)
        if not interrupt.fired:
            break
    else:
        pytest.fail("POINTS is too small")
    rayloader.actors.pool.get_pool().shutdown()
