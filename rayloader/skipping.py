"""Fetching with `on_error="skip"`: samples that raise are left out of their batch.

Promise: otherwise like torch's fetchers, which it replaces.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from typing import Any

from rayloader._compat import DatasetKind
from rayloader.errors import SkipLimitError

logger = logging.getLogger("rayloader")

# Replaces a batch in which nothing was left.
NOTHING = object()

# A sample that was left out: its index (None for an iterable dataset), and a description of the exception.
Skipped = tuple[str, str]


class NothingLeft(Exception):
    """Every sample of the batch was left out."""


def fetch(fetcher: Any, kind: int, indices: Any, skipped: list[Skipped]) -> Any:
    """The samples of one batch, or one sample without automatic batching.

    Args:
        fetcher: torch's for this dataset.
        kind: of the dataset.
        indices: as torch's fetcher gets them.
        skipped: collects the samples that were left out.

    Raises:
        NothingLeft: there is no sample left.
        StopIteration: the iterable dataset has ended.
    """
    wanted = indices if fetcher.auto_collation else [indices]
    samples = (_of_stream if kind == DatasetKind.Iterable else _by_index)(fetcher, wanted, skipped)
    if not samples:
        raise NothingLeft
    return samples if fetcher.auto_collation else samples[0]


def _by_index(fetcher: Any, indices: Any, skipped: list[Skipped]) -> list[Any]:
    if fetcher.auto_collation and getattr(fetcher.dataset, "__getitems__", None):
        try:
            return list(fetcher.dataset.__getitems__(indices))
        except Exception:  # fetching one by one shows which of them raised
            pass
    samples = []
    for index in indices:
        try:
            samples.append(fetcher.dataset[index])
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
