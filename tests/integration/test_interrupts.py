"""KeyboardInterrupt at any point of next() and iter(): no hang, no batch lost or given twice, an error that is clear.

Every test goes on with what an interrupt has left: the batch that comes next is the right one, or `next()` says that
the iterator has lost its place, and a new `iter()` works. The state is right in both cases.
"""

import contextlib

import psutil
import pytest
import torch

import rayloader.actors.pool
from inside import live_actor_pids
from interrupts import HANG_LIMIT, each_point
from probes import Calls, Stream
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
full = pytest.mark.full


def make_loader(dataset=None, **options):
    return DataLoader(dataset or Calls(torch.tensor, LENGTH), **{"batch_size": None, "num_workers": 2, **options})


WAITING = {"num_workers": 1, "prefetch_factor": 1}  # each batch is asked for when it is needed
KINDS = {
    "in order": {},
    "each waited for": WAITING,
    "iterable": {"dataset": Stream(lambda worker: iter(torch.arange(LENGTH))), "num_workers": 1, "prefetch_factor": 2},
    "pinned": {"pin_memory": True},
    "on a device": {"device": "cuda"},
    "persistent": {"persistent_workers": True},
    "dynamic": {"seeding": "batch", "scheduling": "dynamic"},
}
POINTS_OF_NEXT = [
    *((name, 10) for name in ("each waited for", "pinned", "on a device", "persistent")),
    # Where next() draws, an Exception that a handler raises is the sampler's error: see NOTE [interrupts], rule 6.
    ("in order", 5),
    *(pytest.param(name, 1, marks=full) for name in KINDS),
]


def next_or_error(iterator):
    try:
        return next(iterator).item()
    except RayloaderError as error:
        return str(error)


@pytest.mark.parametrize(("name", "stride"), POINTS_OF_NEXT)
def test_an_interrupted_next_loses_nothing_and_hangs_nowhere(accelerator, monkeypatch, name, stride):
    if name == "on a device":
        SimulatedAccelerator(at_each_query=1).install(monkeypatch)
    loader = make_loader(**KINDS[name])
    iterator, expected = iter(loader), 0
    for interrupt in each_point(stride):
        if expected >= LENGTH - 2:
            iterator, expected = iter(loader), 0
        try:
            with interrupt:
                batch = next(iterator)
        except KeyboardInterrupt:
            assert interrupt.fired
        else:
            assert batch.item() == expected
            expected += 1
        assert loader.state_dict()["position"]["next_task"] == expected, interrupt.where
        after = next_or_error(iterator)
        if after == expected:
            expected += 1
        else:
            assert "this iterator was interrupted" in str(after), interrupt.where
            assert next_or_error(iterator) == after, interrupt.where
            iterator, expected = iter(loader), 0
    assert [batch.item() for batch in loader] == list(range(LENGTH))


@pytest.mark.parametrize(
    ("persistent", "stride"),
    [(True, 101), *(pytest.param(*kind, marks=full) for kind in ((False, 101), (False, 7), (True, 7)))],
)
def test_after_an_interrupted_iter_the_next_one_works(persistent, stride):
    loader = make_loader(persistent_workers=persistent)
    for interrupt in each_point(stride):
        try:
            with interrupt:
                iterator = iter(loader)
        except KeyboardInterrupt:
            iterator = iter(loader)
        assert [next(iterator).item(), next(iterator).item()] == [0, 1], interrupt.where
        del iterator


@pytest.mark.parametrize("pin_memory", [pytest.param(False, marks=full), True])
@pytest.mark.parametrize("stride", [47, pytest.param(3, marks=full)])
def test_after_an_interrupted_close_the_next_one_ends_the_iterator(accelerator, pin_memory, stride):
    loader = make_loader(pin_memory=pin_memory)
    for interrupt in each_point(stride):
        iterator = iter(loader)
        assert next(iterator).item() == 0
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            close_all()
        close_all()
        with pytest.raises(RayloaderError, match=r"call iter\(\) on the loader again"):
            next(iterator)
        assert loader.state_dict()["position"]["next_task"] == 1, interrupt.where
        assert next(iter(loader)).item() == 0


def test_after_an_interrupted_close_of_an_arena_the_next_one_unlocks_it():
    accelerator = SimulatedAccelerator()
    for interrupt in each_point():
        lane = ArenaLane()
        lane.accelerator = accelerator
        lent, room = lane.lend()
        where = WorkerLane().open(room).reserve(SMALL_BYTES)
        lent.arena.view(where, lent.leases)
        for _ in range(2):
            lent.leases[where[0][0]].page_lock()
        del lent
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            lane.close()
        lane.close()
        while accelerator.registered:
            unlocker.ring()


@pytest.mark.parametrize("stride", [41, pytest.param(5, marks=full)])
def test_after_an_interrupted_shutdown_the_next_one_ends_every_actor(monkeypatch, stride):
    """Of a pool of its own: the session's Ray is to go on."""
    monkeypatch.setattr(rayloader.actors.pool, "_pool", None)
    loader = make_loader(**WAITING)
    for interrupt in each_point(stride):
        iterator = iter(loader)
        assert next(iterator).item() == 0
        pool = rayloader.actors.pool.get_pool()
        (pid,) = live_actor_pids(pool)
        with contextlib.suppress(KeyboardInterrupt), interrupt:
            pool.shutdown()
        pool.shutdown()
        assert live_actor_pids(pool) == set()
        with pytest.raises(RayloaderError, match=r"call iter\(\) on the loader again"):
            list(iterator)
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(HANG_LIMIT)
    rayloader.actors.pool.get_pool().shutdown()
