"""Fetching separated from collating, which torch's fetchers do together; optionally skips samples that raise.

Promise: samples, order and errors are torch's. A `CacheError` is no sample's: it says that other batches would come, so
it is never skipped.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from typing import Any

from rayloader._compat import DatasetKind
from rayloader.errors import CacheError, SkipLimitError

logger = logging.getLogger("rayloader")

# Replaces a batch in which nothing was left.
NOTHING = object()

# Entries of torch's collate map, by the type of samples, that run no code of the user's. A part of rayloader that adds
# an entry to that map adds it here too.
collates: dict[Any, Any] = {}

# A sample that was left out: its index (None for an iterable dataset), and a description of the exception.
Skipped = tuple[str, str]


class NothingLeft(Exception):
    """Every sample of the batch was left out."""


def create_fetcher(kind: int, dataset: Any, auto_collation: bool, drop_last: bool) -> Any:
    """Torch's fetcher for a dataset, but without collating; its iterator is created here."""
    return DatasetKind.create_fetcher(kind, dataset, auto_collation, lambda samples: samples, drop_last)


def fetch(fetcher: Any, kind: int, indices: Any, skipped: list[Skipped] | None) -> tuple[Any, int]:
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
    samples = fetcher.fetch(indices) if skipped is None else _fetch_some(fetcher, kind, indices, skipped)
    if not fetcher.auto_collation:
        return samples, 1
    if kind == DatasetKind.Iterable:
        return samples, len(samples)
    try:
        return samples, len(indices) - len(skipped or ())  # `__getitems__` may return anything
    except Exception:  # and so may a sampler
        return samples, 1


def _fetch_some(fetcher: Any, kind: int, indices: Any, skipped: list[Skipped]) -> Any:
    """As torch's `fetcher.fetch`, but samples that raise are left out."""
    wanted = indices if fetcher.auto_collation else [indices]
    samples = (_of_stream if kind == DatasetKind.Iterable else _by_index)(fetcher, wanted, skipped)
    if not samples:
        raise NothingLeft
    return samples if fetcher.auto_collation else samples[0]


def _by_index(fetcher: Any, indices: Any, skipped: list[Skipped]) -> list[Any]:
    if fetcher.auto_collation and getattr(fetcher.dataset, "__getitems__", None):
        try:
            return list(fetcher.dataset.__getitems__(indices))
        except CacheError:
            raise
        except Exception:  # fetching one by one shows which of them raised
            pass
    samples = []
    for index in indices:
        try:
            samples.append(fetcher.dataset[index])
        except CacheError:
            raise
        except Exception as error:  # any error: leaving such samples out was requested
            skipped.append((reprlib.repr(index), _in_words(error)))
    return samples


def _of_stream(fetcher: Any, wanted: Any, skipped: list[Skipped]) -> list[Any]:
    if fetcher.ended:
        raise StopIteration
    samples = []
    for _ in wanted:
        try:
            samples.append(next(fetcher.dataset_iter))
        except StopIteration:
            fetcher.ended = True
            break
        except CacheError:
            raise
        except Exception as error:  # any error, as above; a generator has ended with it, other iterators may go on
            skipped.append(("None", _in_words(error)))
    if fetcher.ended and (not samples or (fetcher.drop_last and fetcher.auto_collation)):
        raise StopIteration
    return samples


def tell(skipped: Sequence[Skipped], count: int, max_skipped: int) -> None:
    """Logs the samples that were left out.

    Args:
        skipped: samples that are new.
        count: how many in this epoch so far.
        max_skipped: of the loader.

    Raises:
        SkipLimitError: these are too many.
    """
    for index, reason in skipped:
        logger.warning("rayloader: skipped sample %s: %s", index, reason)
    if skipped and count > max_skipped:
        raise SkipLimitError(
            f"{count} samples have raised in this epoch, max_skipped={max_skipped} are skipped at most; the last is "
            f"sample {skipped[-1][0]}: {skipped[-1][1]}. Correct the data, or raise max_skipped"
        )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
