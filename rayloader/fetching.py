"""Fetching apart from collating, as torch's fetchers do it together; with errors of samples left out if that is wished.

Promise: samples, order and errors are torch's.
"""

from __future__ import annotations

from typing import Any

from rayloader import skipping
from rayloader._compat import DatasetKind


def create_fetcher(kind: int, dataset: Any, auto_collation: bool, drop_last: bool) -> Any:
    """Torch's fetcher for a dataset, which does not collate; its iterator is made here."""
    return DatasetKind.create_fetcher(kind, dataset, auto_collation, _as_they_are, drop_last)


def fetch(fetcher: Any, kind: int, indices: Any, skipped: list[skipping.Skipped] | None) -> tuple[Any, int]:
    """What `collate_fn` is to be called with: a list of samples, or one sample without automatic batching.

    Args:
        fetcher: of `create_fetcher`.
        kind: of the dataset.
        indices: as the sampler gave them.
        skipped: gets the samples that raised, which are left out; None: what they raise is raised.

    Returns:
        That, and how many samples it is.

    Raises:
        NothingLeft: every sample was left out.
        StopIteration: the iterable dataset has ended.
        Exception: what a sample raised.
    """
    samples = fetcher.fetch(indices) if skipped is None else skipping.fetch(fetcher, kind, indices, skipped)
    if not fetcher.auto_collation:
        return samples, 1
    if kind == DatasetKind.Iterable:
        return samples, len(samples)
    try:
        return samples, len(indices) - len(skipped or ())  # `__getitems__` may return anything
    except Exception:  # and so may a sampler
        return samples, 1


def _as_they_are(samples: Any) -> Any:
    return samples
