"""What a case does with its loader: consumption scripts, each a function of (recorder, loader).

A script puts back whatever it changes in the process, so that cases don't depend on each other.
"""

import contextlib
import decimal
import os
import sys
import tempfile
import threading
import time

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from conformance_callables import MAP_EXTENSION, to_tuple
from conformance_record import describe_text


def epochs(count):
    def script(rec, loader):
        for epoch in range(count):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            rec.epoch(loader)

    script.epochs = count  # a plain run: see disturbances.py
    return script


def dataset_epochs(rec, loader):
    """The dataset's own `set_epoch` before each epoch."""
    for epoch in range(3):
        loader.dataset.set_epoch(epoch)
        rec.epoch(loader)


def abandon(*takes):
    """Epochs that stop after so many batches (None: to the end); a stopped iterator is dropped at once."""

    def script(rec, loader):
        for take in takes:
            rec.epoch(loader, take=take)

    return script


def abandon_holding(rec, loader):
    """A new epoch begins while the variable still holds the abandoned iterator."""
    iterator = rec.start(loader, "first")
    rec.take(iterator, 2, "first")
    rec.epoch(loader)
    del iterator
    rec.epoch(loader)


def interleave(rec, loader):
    """Two live iterators of one loader, the second begun when the first is under way, ending apart."""
    first = rec.start(loader, "first")
    rec.take(first, 1, "first")
    second = rec.start(loader, "second")
    more = [True, True]
    for turn in range(40):
        if not any(more):
            break
        if more[0]:
            more[0] = rec.take(first, 1, "first", first=1 + turn)
        if more[1] and turn % 2 == 0:
            more[1] = rec.take(second, 1, "second", first=turn // 2)
        rec.generators(loader, f"turn {turn}")
    del first, second
    rec.epoch(loader)


def same_iterator(rec, loader):
    """`iter` of a loader with persistent workers is one object, reset by each call."""
    first = iter(loader)
    rec.take(first, 2, "first")
    second = iter(loader)
    rec.note("same object", first is second)
    rec.take(second, 1, "second")
    rec.take(first, None, "both", first=1)
    rec.generators(loader, "end")
    rec.take(second, 1, "ended")
    del first, second
    rec.epoch(loader)


def first_come(rec, loader):
    """Without order among the workers, each worker's batches still come in its own order, and none is lost.

    Batches are of pairs (index, worker), of ascending indices. Many epochs: it is a race that might be lost.
    """
    for epoch in range(12):
        batches = [(int(workers[0]), indices.tolist()) for indices, workers in loader]
        for worker in sorted({worker for worker, _ in batches}):
            own = [indices for found, indices in batches if found == worker]
            rec.note(f"epoch {epoch}: worker {worker} in order", own == sorted(own))
        rec.note(f"epoch {epoch}: samples", sorted(index for _, indices in batches for index in indices))


def past_the_end(rec, loader):
    """`next` goes on after StopIteration: the real end stays an end, a StopIteration of user code does not."""
    iterator = iter(loader)
    for attempt in range(12):
        rec.take(iterator, None, f"attempt {attempt}")
    rec.generators(loader, "end")


def first_errors(count):
    """Only the first `count` events of one epoch."""

    def script(rec, loader):
        rec.epoch(loader, take=count)

    return script


def until_an_error(rec, loader):
    """Only the first error's text: how many batches come before it is a matter of time; ours is a subclass."""
    try:
        for _ in loader:
            pass
    except RuntimeError as error:
        rec.note("runtime error", describe_text(str(error)))
        error.__traceback__ = None


def iterate_in_a_thread(rec, loader):
    for _ in range(2):
        thread = threading.Thread(target=rec.epoch, args=(loader,))
        thread.start()
        thread.join()


def draw_between_batches(rec, loader):
    """The training loop draws from the global generator and from the loader's between batches."""

    def use(batch):
        rec.note("drawn by the loop", torch.rand(2))
        if loader.generator is not None:
            rec.note("drawn from the loader's generator", torch.rand(1, generator=loader.generator))

    for _ in range(2):
        rec.epoch(loader, use=use)


def reseed_between_batches(rec, loader):
    """The loop seeds the global generator in mid-epoch."""
    rec.epoch(loader, use=lambda batch: torch.manual_seed(5))
    rec.epoch(loader)


def change_while_drawing(*changes):
    """In mid-epoch, after so many batches each time, `change(loader)` is called."""

    def script(rec, loader):
        for _ in range(2):
            taken = []

            def use(batch, taken=taken):
                taken.append(batch)
                for when, change in changes:
                    if len(taken) == when:
                        change(loader)

            rec.epoch(loader, use=use)
        rec.epoch(loader, take=30)
        rec.epoch(loader)

    return script


def set_batch_size(batch_size):
    return lambda loader: setattr(loader.batch_sampler, "batch_size", batch_size)


def reverse_subset(loader):
    """The indices of a SubsetRandomSampler, in their place."""
    loader.sampler.indices[:] = loader.sampler.indices[::-1]


def write_into_batches(rec, loader):
    """What the loop writes into a batch is its own affair; other batches, kept, don't change."""

    def leaves(batch):
        if isinstance(batch, torch.Tensor):
            yield batch
        elif isinstance(batch, dict):
            for item in batch.values():
                yield from leaves(item)
        elif isinstance(batch, list | tuple):
            for item in batch:
                yield from leaves(item)

    kept = []

    def use(batch):
        kept.append(batch)
        for number, leaf in enumerate(leaves(batch)):
            leaf.zero_().add_(number + len(kept))

    for _ in range(2):
        rec.epoch(loader, use=use)
    rec.note("kept", kept)


def change_dataset(rec, loader):
    """Changes made to the dataset between epochs: seen by fresh workers, not by persistent ones."""
    rec.epoch(loader)
    loader.dataset.scale = 5
    loader.dataset.offset += 1
    rec.epoch(loader, take=2)
    loader.dataset.scale = 7
    loader.dataset.offset[0] = -3
    rec.epoch(loader)
    rec.note("the driver's own copy", vars(loader.dataset))


def shared_cache(rec, loader):
    """What workers write to a shared tensor, the driver and the workers of the next epoch see."""
    for _ in range(2):
        rec.epoch(loader)
        rec.note("the driver's cells", loader.dataset.cells.clone())
    loader.dataset.cells.fill_(10)
    rec.epoch(loader)


def change_collate(rec, loader):
    rec.epoch(loader)
    loader.collate_fn = to_tuple
    rec.epoch(loader)


def default_dtype(rec, loader):
    """The default dtype at `iter()` is the workers'."""
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            rec.epoch(loader)
    finally:
        torch.set_default_dtype(before)


def modes(rec, loader):
    """The thread's grad and inference modes and the use of deterministic algorithms at `iter()` are the workers'."""
    with torch.no_grad():
        rec.epoch(loader)
    with torch.inference_mode():
        rec.epoch(loader)
    torch.use_deterministic_algorithms(True)
    try:
        rec.epoch(loader)
    finally:
        torch.use_deterministic_algorithms(False)
    rec.epoch(loader)


def settings(rec, loader):
    """Settings of torch, NumPy and Python at `iter()` are the workers', and are put back."""
    rec.epoch(loader)
    before = sys.getrecursionlimit()
    umask = os.umask(0o027)
    try:
        with (
            torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
            np.errstate(all="raise"),
            np.printoptions(precision=2),
            decimal.localcontext() as context,
        ):
            context.prec = 5
            os.environ["TZ"] = "CONFORMANCE-9"
            time.tzset()
            torch.set_flush_denormal(True)
            torch.set_float32_matmul_precision("medium")
            torch.set_printoptions(precision=2)
            sys.setrecursionlimit(before + 1000)
            rec.epoch(loader)
    finally:
        os.umask(umask)
        del os.environ["TZ"]
        time.tzset()
        torch.set_flush_denormal(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_printoptions(profile="default")
        sys.setrecursionlimit(before)
    rec.epoch(loader)


def surroundings(rec, loader):
    """Working folder and environment at `iter()` are the workers'."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.getcwd()
        try:
            rec.epoch(loader)
            for name in ("one", "two"):
                path = os.path.join(folder, name)
                os.mkdir(path)
                os.chdir(path)
                os.environ["CONFORMANCE_VARIABLE"] = name
                rec.epoch(loader)
            del os.environ["CONFORMANCE_VARIABLE"]
            rec.epoch(loader)
        finally:
            os.chdir(before)
            os.environ.pop("CONFORMANCE_VARIABLE", None)


def affinity(rec, loader):
    """Workers may use the cores that the driver may use at `iter()`."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        rec.epoch(loader)
    finally:
        os.sched_setaffinity(0, before)
    rec.epoch(loader)


@contextlib.contextmanager
def extended_collate_map():
    """The user extends `default_collate_fn_map`, as torch documents it."""
    before = dict(default_collate_fn_map)
    default_collate_fn_map.update(MAP_EXTENSION)
    try:
        yield
    finally:
        default_collate_fn_map.clear()
        default_collate_fn_map.update(before)
