"""States of loaders with and without workers, made without processes."""

import torch
from torch.utils.data import IterableDataset

from rayloader import DataLoader
from rayloader.resume.snapshot import WorkerState
from rayloader.resume.state import SavedWorker, State, WorkerStart


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(100))


def saved(taken=3, *, seed=1, dataset=range(100), batch_size=4, num_workers=2, digests=(), **options):
    """The state after so many batches, as a loader with so many workers would have saved it.

    Args:
        taken: batches.
        seed: of the program.
        dataset, batch_size, num_workers, **options: of the loader.
        digests: of the batches that were taken last, which worker 0 builds again.
    """
    torch.manual_seed(seed)
    loader = DataLoader(dataset, batch_size=batch_size, **options)
    batches = iter(loader) if taken else None
    for _ in range(taken):
        next(batches)
    state = State.load(loader.state_dict())
    if not num_workers:
        return state
    first = taken - len(digests)
    replay = tuple((first + number, digest) for number, digest in enumerate(digests))
    start = WorkerStart(WorkerState(tasks=first, last_task=first - 1))
    workers = (SavedWorker(start, False, replay), *[SavedWorker()] * (num_workers - 1))
    place = None if state.position is None else state.position._replace(workers=workers, stream=None)
    return state._replace(num_workers=num_workers, process=None, position=place)


def of_ranks(count, **options):
    """The states of all ranks of a loader."""
    return [saved(num_replicas=count, rank=rank, seed=1, shuffle=True, **options) for rank in range(count)]
