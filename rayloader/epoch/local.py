"""What `iter()` returns without workers: torch's own iterator in this process, which can be saved and resumed.

Promise: it draws, fetches and raises as torch's iterator does, and Ray is not imported. The program's own objects do
the work, so their part of a state (the global generators, the dataset's own, its `state_dict`) is restored in
`load_state_dict`, as for samplers; see NOTE [What a state moves] in `samplers.py`. A state is made only on request.
Until then, an epoch costs a checksum of each batch's indices, or, for a stream without a state of its own, a
digest of each batch.
"""

from __future__ import annotations

import contextlib
import random
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from rayloader import fetching
from rayloader._compat import (
    BaseIterator,
    DatasetKind,
    SingleProcessIterator,
    begin_streams,
    loading_streams,
    numpy_seed,
)
from rayloader.epoch.reports import describe_here
from rayloader.errors import OfOneProcess, ReplayError, SkipLimitError, add_note
from rayloader.host.shard_info import Reader, ranks_told
from rayloader.options import Options, target_of
from rayloader.random.generators import RandomState, seed_all, seed_torch
from rayloader.resume.checkpoint import capture_random, continuation, generators_of
from rayloader.resume.digest import chain, digest, digest_of, drawn
from rayloader.resume.position import new_position
from rayloader.resume.samplers import Resuming, trains_in_a_group
from rayloader.resume.saved import move_to
from rayloader.resume.snapshot import end_again, has_state, load_state
from rayloader.resume.state import State, Stream
from rayloader.task import SkipSteps, Task


class LocalIterator(OfOneProcess, SingleProcessIterator):
    """Iterates over a loader's batches in this process.

    Args:
        loader: without workers.
        state: loaded, for this iterator to continue from; None: it begins an epoch.
        skips: what it skips in place of the loader's `skip_steps`.

    Attributes:
        last_task: whose indices were drawn last.
    """

    last_task: Any = None
    _watch: Any = None  # of what its first batches show, see `undivided.py`

    def __init__(self, loader: Any, state: State | None, skips: SkipSteps | None = None) -> None:
        self._options = Options.of(loader)  # before torch draws anything
        self._target = target_of(self._options.device)
        saved, _ = continuation(loader, state, 0)
        self._iterable = loader._dataset_kind == DatasetKind.Iterable
        earlier = loader._position
        self.position = position = new_position(loader, state, 0, 0)
        if saved is None:
            position.begins(False)
            position.read_skips(loader, skips)
        # torch's constructor creates the dataset's iterator before our attributes exist, so it is skipped.
        BaseIterator.__init__(self, loader if saved is None else Resuming(loader))  # type: ignore[arg-type]
        self._index_sampler = loader._index_sampler
        self._batch_size = getattr(loader.batch_sampler, "batch_size", None)
        if self._timeout != 0:
            raise AssertionError("SingleProcessIterator requires timeout == 0")
        if isinstance(self._dataset, IterDataPipe) and loader._ranks is not None:
            self._world_size, self._rank, _ = loader._ranks  # otherwise those of torch.distributed
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            apply_sharding(self._dataset, self._world_size, self._rank)
        self._given = types.SimpleNamespace(dataset=loader.dataset, collate_fn=loader.collate_fn)
        self._reader = Reader(ranks_told(loader))
        self._failure: SkipLimitError | None = None
        if earlier is not None and state is None:
            position.loaded = earlier.loaded
            broken_off = not earlier.finished and (earlier.delivered > 0 or earlier.follows_break)
            position.follows_break = self._iterable and has_state(self._dataset) and broken_off
        elif state is not None and state.process is not None:
            position.loaded = state.process.dataset
        if saved is None:
            position.is_seeded(int(self._base_seed), self._shared_seed)
            if state is not None and state.redeal is not None:
                self._sampler_iter = position.redeals(state.redeal)
            begin_streams(self._dataset)
            begin = capture_random(self._given) if self._is_read_again else None
            self._settle()
            self._iterate(Stream(begin))
            if skips is None and not self._iterable and trains_in_a_group():
                from rayloader.epoch.undivided import watch_of_ranks

                self._watch = watch_of_ranks(loader)
        else:
            self._sampler_iter = move_to(position, saved)
            self._base_seed, self._shared_seed = position.begin.base_seed, position.begin.shared_seed
            position.read_skips(loader, skips)
            self._num_yielded = position.delivered
            self._settle()
            self._go_on(Stream() if saved.stream is None else replace(saved.stream))
        self._tally = loader._recorder.begins(self, 0, epoch=position.epoch_of_run)
        self._samples = 0  # number of samples in the last batch
        self._drawn = position.next_task  # tasks whose indices were drawn
        self._checksum = position.checksum  # of their indices
        self._asked = saved is not None and saved.draws > 0  # the sampler's iterator

    # ---- the dataset's iterator

    @property
    def _is_read_again(self) -> bool:
        """Whether a resumption must read the stream from its start; not if its iterator has a state."""
        return self._iterable and not has_state(self._dataset)

    def _iterate(self, stream: Stream) -> None:
        """Lets the dataset create its iterator."""
        with self._seeded_as_worker(), self._reader.reads():
            self._dataset_fetcher = fetching.create_fetcher(
                self._dataset_kind, self._dataset, self._auto_collation, self._drop_last
            )
        if self._iterable and has_state(self._dataset_fetcher.dataset_iter):
            stream.begin, stream.iterator = None, self._dataset_fetcher.dataset_iter
            if stream.iterator is self._dataset:
                stream.state = self.position.loaded
        self._stream = self.position.stream = stream

    def _settle(self) -> None:
        """Lets a stream that has loaded the state of the end of its last epoch take that over."""
        position = self.position
        if not self._iterable or position.loaded is None or position.delivered or not position.epoch_of_run:
            return
        held = generators_of(self._given)
        before = RandomState.capture(held=held)
        try:
            self._iterate(Stream())
            self._end_again()
        finally:
            before.restore((), held)

    def _end_again(self) -> None:
        with self._reader.reads(), loading_streams(self._dataset):
            if end_again(self._dataset_fetcher, self.position.loaded, None):
                self.position.loaded = None

    def _go_on(self, stream: Stream) -> None:
        """Brings the dataset's iterator to where it was. The program's generators keep their states."""
        held = generators_of(self._given)
        before = RandomState.capture(held=held)
        if isinstance(self._dataset, IterDataPipe):
            shuffling = torch.Generator()
            shuffling.manual_seed(self._shared_seed)  # type: ignore[arg-type]
            self._dataset = apply_random_seed(self._dataset, shuffling)
        try:
            if stream.begin is not None:
                stream.begin.restore((), held)
            self._iterate(stream)
            if stream.iterator is not None:
                with self._reader.reads():
                    load_state(stream.iterator, stream.state)
            elif self._is_read_again:
                self._read_again()
            if self._iterable:
                self._dataset_fetcher.ended = stream.ended
                if not self._dataset_fetcher.taken:  # it was not read again
                    self._dataset_fetcher.taken = self.position.next_task * (self._batch_size or 1)
            if stream.ended and self.position.loaded:
                self._end_again()
        finally:
            before.restore((), held)

    def _read_again(self) -> None:
        expected, self._stream.digest = self._stream.digest, 0
        count = self.position.next_task
        with contextlib.suppress(StopIteration):
            for task in range(count):
                with contextlib.suppress(fetching.NothingLeft):
                    self._build_again(task)
                count -= 1
        if count or self._stream.digest != expected:
            raise ReplayError(
                f"the iterable dataset was read again up to batch {self.position.next_task}, and gave something "
                "else than before; to be resumed, a dataset must give the same each time that it is read, whatever "
                "else draws from the global random generators, or have state_dict() and load_state_dict()"
            )

    def _build_again(self, task: int) -> None:
        try:
            self._build(task, next(self._sampler_iter), [])
        except (StopIteration, fetching.NothingLeft):
            raise
        except Exception:  # the user's own: it was raised the first time too
            pass

    # ---- batches

    def __next__(self) -> Any:
        asked = perf_counter()
        if self._watch is not None:
            watch, self._watch = self._watch, None  # its warning may be raised
            self._watch = watch.saw(self.last_task)
        try:
            data = super().__next__()
        except BaseException:  # the end, an error of the user's or Ctrl-C: all are counted
            self._tally.raised(asked)
            raise
        self._tally.gave(asked, self._drawn - 1, self._samples, _nbytes(data))
        return data

    def _next_data(self) -> Any:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        data = fetching.NOTHING
        while data is fetching.NOTHING:
            task, indices, checksum = self._draw()
            if not self.position.has(task):
                data = self._take(task, indices, checksum)
        return data

    def _draw(self) -> tuple[int, Any, int]:
        """Returns number, indices and checksum of the next task."""
        position = self.position
        if not self._asked:
            self._asked = True
            position.first_draw(self._sampler_iter)
        try:
            if self._drawn >= position.skips.end:
                raise StopIteration
            indices = self._next_index()  # type: ignore[no-untyped-call]
        except StopIteration:
            position.sampler_ended(self._drawn)
            position.ends()
            raise
        task, self._drawn = self._drawn, self._drawn + 1
        self.last_task = Task(task, None)
        if self._iterable:  # its indices carry no information
            return task, indices, 0
        try:
            self.last_task.indices = drawn(indices, self._checksum)
            self._checksum = self.last_task.indices.checksum
        except Exception:  # here they need not be picklable
            position.error = f"the indices of batch {task} cannot be pickled:\n{traceback.format_exc()}"
        position.drawn(task, self._sampler_iter, indices, self._checksum)
        return task, indices, self._checksum

    def _take(self, task: int, indices: Any, checksum: int) -> Any:
        """The batch, or `NOTHING`. The task counts as the user's in any case, unless the stream has ended."""
        skipped: list[fetching.Skipped] = []
        ended = False
        try:
            data = self._build(task, indices, skipped)
            if self._watch is not None:
                self.last_task.digest = digest_of(data)
            if self.position.leaves_out:
                return fetching.NOTHING
            if self._pin_memory:
                from rayloader.gpu.to_device import pinned

                data = pinned(data, self._pin_memory_device)
            if self._target is None:
                return data
            from rayloader.gpu.to_device import moved_here

            return moved_here(data, self._target[0])
        except fetching.NothingLeft:
            return fetching.NOTHING
        except BaseException as error:
            ended = self._iterable and isinstance(error, StopIteration)
            if isinstance(error, Exception) and not ended:
                add_note(error, describe_here(self.last_task, fetching.raised_by(error)))
            raise
        finally:
            if ended:
                self.position.ends()
            else:
                self.position.taken(0, task, checksum)
            self._stream.ended = getattr(self._dataset_fetcher, "ended", False)
            self._count_skipped(skipped)

    def _build(self, task: int, indices: Any, skipped: list[fetching.Skipped]) -> Any:
        left_out = skipped if self._options.skips_errors else None
        # A dataset may pass a state that it has loaded on to others only when it is iterated.
        loading = loading_streams(self._dataset) if self.position.loaded else contextlib.nullcontext()
        if not getattr(self._dataset_fetcher, "ended", False):
            self.position.loaded = self._stream.state = None
        with self._seeded(task), self._reader.reads(), loading:
            samples, self._samples = fetching.fetch(self._dataset_fetcher, self._dataset_kind, indices, left_out)
            data = self._collate_fn(samples)
            del samples
        if self._iterable and task == 0:
            self._reader.has_read(self._dataset)
        if self._stream.begin is not None:
            self._stream.digest = chain(digest(data), self._stream.digest)
        return data

    def _count_skipped(self, skipped: list[fetching.Skipped]) -> None:
        self._tally.skipped += len(skipped)
        try:
            self.position.skip(skipped, self._options.max_skipped)
        except SkipLimitError as error:
            self._failure = error
            raise

    # ---- `seeding="batch"`: as in a worker; the program's generators are restored afterwards
    # `contextlib.contextmanager` would set the traceback of a passing exception, which a frozen dataclass refuses.

    def _seeded(self, task: int) -> contextlib.ExitStack:
        undo = contextlib.ExitStack()
        if self._options.seeds_batches:
            undo.callback(RandomState.capture([]).restore, [])
            seed_all(self.position.begin.base_seed, self.position.begin.epoch, task)
        return undo

    def _seeded_as_worker(self) -> contextlib.ExitStack:
        """A stream may draw when it begins: seeds as for the only worker."""
        undo = contextlib.ExitStack()
        if self._options.seeds_batches and self._iterable:
            undo.callback(RandomState.capture([]).restore, [])
            base_seed = self.position.begin.base_seed
            random.seed(base_seed)
            seed_torch(base_seed)
            np.random.seed(numpy_seed(base_seed, 0))
        return undo


def _nbytes(batch: Any, depth: int = 4) -> int:
    """Bytes of dense tensors and arrays, in nested lists, tuples and dicts; calls no code of the user's."""
    kind = type(batch)
    if kind is np.ndarray:
        return int(batch.nbytes)
    if kind is torch.Tensor and batch.layout is torch.strided and not batch.is_nested:
        return int(batch.nbytes)
    if depth:
        for container, parts in _PARTS:
            if isinstance(batch, container):
                return sum([_nbytes(part, depth - 1) for part in parts(batch)])
    return 0


# Also for subclasses of the user's, for instance a namedtuple.
_PARTS: tuple[tuple[type, Callable[[Any], Iterable[Any]]], ...] = (
    (dict, dict.values),
    (list, list.__iter__),
    (tuple, tuple.__iter__),
)
