"""Fetching separated from collating, which torch's fetchers do together; optionally skips samples that raise.

Promise: samples, order and errors are torch's.
"""

from __future__ import annotations

from typing import Any

from rayloader import skipping
from rayloader._compat import DatasetKind


def create_fetcher(kind: int, dataset: Any, auto_collation: bool, drop_last: bool) -> Any:
    """Torch's fetcher for a dataset, but without collating; its iterator is created here."""
    return DatasetKind.create_fetcher(kind, dataset, auto_collation, _as_they_are, drop_last)


def fetch(fetcher: Any, kind: int, indices: Any, skipped: list[skipping.Skipped] | None) -> tuple[Any, int]:
    """The argument for `collate_fn`: a list of samples, or one sample without automatic batching.

    Args:
        fetcher: from `create_fetcher`.
        kind: of the dataset.
        indices: from the sampler.
        skipped: collects samples that raised, which are left out; None: their exceptions are raised.

    Returns:
        The samples, and how many they are.

    Raises:
        NothingLeft: every sample was left out.
        StopIteration: the iterable dataset has ended.
        Exception: raised by a sample.
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
