"""Fetching separated from collating, which torch's fetchers do together; optionally skips samples that raise.

Promise: samples, order and errors are torch's. `raised_by` names the sample that raised an error, which costs nothing
until there is one: the frames of its traceback have the `Turns` of the batch. A `CacheError` is no sample's: it says
that other batches would come, so it is never skipped.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import reprlib
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import Subset

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


class Turns:
    """The indices of a batch, for a loop that asks for their samples in turn; knows how far that has come.

    Args:
        indices: of the samples.
        asked: what to ask for in their place, in the same order: their indices in a part of the dataset.
    """

    __slots__ = ("_left", "asked", "indices")

    def __init__(self, indices: Any, asked: Any = None) -> None:
        self.indices = indices
        self.asked = indices if asked is None else asked
        self._left: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._left = iter(self.asked)
        return self._left

    def __len__(self) -> int:
        return len(self.asked)

    @property
    def position(self) -> int | None:
        """Of the index that was given last; None if it is not known."""
        left = -1 if self._left is None else operator.length_hint(self._left, -1)
        position = len(self) - left - 1
        return position if left >= 0 <= position else None


def create_fetcher(kind: int, dataset: Any, auto_collation: bool, drop_last: bool) -> Any:
    """Torch's fetcher for a dataset, but without collating; its iterator is created here.

    Its attribute `taken` counts the samples that were taken from a stream.
    """
    fetcher = DatasetKind.create_fetcher(kind, dataset, auto_collation, lambda samples: samples, drop_last)
    fetcher.taken = 0
    return fetcher


def ask(dataset: Any, indices: Any) -> Any:
    """The samples of a batch, which a map-style dataset is asked for as torch's fetcher asks it.

    Torch's own `Subset` asks its dataset one by one, if that can't be asked for several.
    """
    turns = Turns(indices)
    if not getattr(dataset, "__getitems__", None):
        return one_by_one(dataset, indices)
    while _is_subset(dataset):
        if not callable(getattr(dataset.dataset, "__getitems__", None)):
            return dataset.__getitems__(turns)
        turns = Turns(indices, [dataset.indices[index] for index in turns])  # as its `__getitems__` does
        dataset = dataset.dataset
    return dataset.__getitems__(turns.asked)


def one_by_one(dataset: Any, indices: Any) -> list[Any]:
    """The samples, each of which the dataset is asked for."""
    turns = Turns(indices)
    return [dataset[index] for index in turns]


def _is_subset(dataset: Any) -> bool:
    """Whether a dataset is torch's `Subset`, and asked for several samples by torch's own method."""
    if type(dataset) is not Subset or "__getitems__" in vars(dataset):
        return False
    return bool(Subset.__getitems__.__module__ == Subset.__module__)


def raised_by(error: BaseException) -> str:
    """Names the sample that has raised an error out of `fetch`, and its position in the batch; "" if it is not known.

    Of nested datasets it is the index in the outermost. Positions count from 0, and so do the samples of a stream.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    try:
        begin = next(number for number, frame in enumerate(frames) if frame.f_code is fetch.__code__)
        known = frames[begin].f_locals
        fetcher, indices = known["fetcher"], known["indices"]
        of_stream = known["kind"] == DatasetKind.Iterable
        if not fetcher.auto_collation:
            return f"sample {fetcher.taken - 1} of the stream" if of_stream else f"sample {_in_short(indices)}"
        found = [frame.f_locals["turns"] for frame in frames[begin:] if frame.f_code in _ASKING]
        position = _position(found)
        if position is None:
            return ""
        index = f"{fetcher.taken - 1} of the stream" if of_stream else _in_short(_at(indices, position))
        return f"sample {index}, position {position} of {len(indices)}"
    except Exception:  # of the user's indices; or it was not raised out of `fetch`
        return ""


def _position(found: Sequence[Turns]) -> int | None:
    """In the outermost batch, of the sample that was asked for in the innermost."""
    wanted = position = None
    for turns in reversed(found):
        position = turns.position
        if position is None and wanted is not None:
            position = next((number for number, index in enumerate(turns.asked) if index == wanted), None)
        wanted = None if position is None else _at(turns.indices, position)
    return position


def _at(indices: Any, position: int) -> Any:
    return next(islice(iter(indices), position, None))


def _in_short(index: Any) -> str:
    with contextlib.suppress(Exception):  # it may be anything
        index = operator.index(index)  # of NumPy's numbers and of tensors
    return reprlib.repr(index)


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
    if kind == DatasetKind.Iterable:
        samples = _from_stream(fetcher, indices, skipped)
        return samples, len(samples) if fetcher.auto_collation else 1
    if skipped is not None:
        samples = _by_index(fetcher, indices, skipped)
    else:
        samples = ask(fetcher.dataset, indices) if fetcher.auto_collation else fetcher.fetch(indices)
    if not fetcher.auto_collation:
        return samples, 1
    try:
        return samples, len(indices) - len(skipped or ())  # `__getitems__` may return anything
    except Exception:  # and so may a sampler
        return samples, 1


def _left_in(samples: list[Any], fetcher: Any) -> Any:
    """The result of a fetch that has left samples out."""
    if not samples:
        raise NothingLeft
    return samples if fetcher.auto_collation else samples[0]


def _by_index(fetcher: Any, indices: Any, skipped: list[Skipped]) -> Any:
    """As torch's `fetcher.fetch`, but samples that raise are left out."""
    turns = Turns(indices if fetcher.auto_collation else [indices])
    if fetcher.auto_collation and getattr(fetcher.dataset, "__getitems__", None):
        try:
            return _left_in(list(ask(fetcher.dataset, indices)), fetcher)
        except (CacheError, NothingLeft):
            raise
        except Exception:  # fetching one by one shows which of them raised
            pass
    samples = []
    for index in turns:
        try:
            samples.append(fetcher.dataset[index])
        except CacheError:
            raise
        except Exception as error:  # any error: leaving such samples out was requested
            skipped.append((_in_short(index), _in_words(error)))
    return _left_in(samples, fetcher)


def _from_stream(fetcher: Any, wanted: Any, skipped: list[Skipped] | None) -> Any:
    turns = Turns(wanted if fetcher.auto_collation else [wanted])
    try:
        if skipped is None:
            return fetcher.fetch(turns)
        return _left_in(_of_stream(fetcher, turns, skipped), fetcher)
    finally:
        position = turns.position if fetcher.auto_collation else 0
        fetcher.taken += 0 if position is None else position + 1


def _of_stream(fetcher: Any, turns: Turns, skipped: list[Skipped]) -> list[Any]:
    """As torch's `fetcher.fetch`, but samples that raise are left out."""
    if fetcher.ended:
        raise StopIteration
    samples = []
    for _ in turns:
        try:
            samples.append(next(fetcher.dataset_iter))
        except StopIteration:
            fetcher.ended = True
            break
        except CacheError:
            raise
        except Exception as error:  # any error, as above; a generator has ended with it, other iterators may go on
            skipped.append((f"{fetcher.taken + (turns.position or 0)} of the stream", _in_words(error)))
    if fetcher.ended and (not samples or (fetcher.drop_last and fetcher.auto_collation)):
        raise StopIteration
    return samples


_ASKING = {function.__code__ for function in (ask, one_by_one, _by_index, _from_stream)}  # each has `turns`


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
