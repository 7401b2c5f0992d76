"""The public class: arguments, checks, attributes.

Iterators come from `iterator.py`, which is imported when the first one is created, so a loader without workers never
imports Ray.
"""

from __future__ import annotations

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

# Bound at import: at run time the attribute of torch.utils.data may have been replaced, even by our class.
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from rayloader import options
from rayloader._compat import BaseIterator
from rayloader.errors import StateError, shorten
from rayloader.observe.recorder import Recorder
from rayloader.resume.samplers import SHARDS, chain_of, check_plans, note_first_attributes, tell_epoch
from rayloader.task import Given
from rayloader.workers import ray_use  # noqa: F401  # which notes forks from now on

if TYPE_CHECKING:
    from rayloader.frameworks.readers import EarlierState
    from rayloader.observe.stats import LoaderStats
    from rayloader.observe.trace import Tracing
    from rayloader.resume.ranks import Ranks
    from rayloader.resume.state import State

_T_co = TypeVar("_T_co", covariant=True)
if TYPE_CHECKING:
    _TorchLoaderOf = TorchDataLoader
else:  # versions of torch differ in the number of its class's type parameters, which mean nothing at run time
    _TorchLoaderOf = {_T_co: TorchDataLoader}


# Modules whose code has habits when it reads a loader: see `readers.py`.
_READERS = {f"{package}.loops.fetchers" for package in ("lightning.pytorch", "pytorch_lightning")}
_READERS.add("ray.train.torch.train_loop_utils")
_OF_RANK = ("num_replicas", "rank", "seed")


class WorkerCount(int):
    """`num_workers` of a loader: identifies the loader, wherever the number is passed on. See `frameworks/`."""

    loader: weakref.ref[DataLoader[Any]]

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


class _Watched:
    """A method of torch's DataLoader that its constructor calls, and torchdata's too, which does not call torch's.

    It notices loaders whose `num_workers` was read from a loader of ours, and adds no frame between torch and its
    caller: torch's warnings name the same lines as before.
    """

    def __init__(self, method: Any) -> None:
        self._method = method

    def __get__(self, loader: Any, loader_class: type) -> Any:
        if loader is not None and isinstance(loader.num_workers, WorkerCount) and not isinstance(loader, DataLoader):
            from rayloader.frameworks.readers import note_rebuilt

            note_rebuilt(loader, loader.num_workers.loader(), source_of(loader.num_workers, loader.dataset)())
        return self._method.__get__(loader, loader_class)


TorchDataLoader.check_worker_number_rationality = _Watched(  # type: ignore[assignment,method-assign]
    TorchDataLoader.check_worker_number_rationality
)


def no_loader() -> None:
    """Stands for a weak reference whose loader is gone."""


def source_of(num_workers: Any, dataset: Any) -> Callable[[], DataLoader[Any] | None]:
    """The loader that this number of workers comes from, if it has the same dataset: then it is being rebuilt.

    Accelerate wraps iterable datasets.
    """
    source = num_workers.loader() if isinstance(num_workers, WorkerCount) else None
    if source is None or not any(source.dataset is own for own in (dataset, getattr(dataset, "dataset", None))):
        return no_loader
    return num_workers.loader  # type: ignore[no-any-return]


def lost_state() -> StateError:
    """The error for a rebuilt loader whose original had loaded a state."""
    return StateError(
        "load_state_dict() was called on a loader that a framework rebuilds, and the state would be lost; load it "
        "into the new loader, for instance into what prepare() returns"
    )


class DataLoader(_TorchLoaderOf[_T_co]):
    """torch's DataLoader with workers that are forks or Ray actors: the same arguments, the same batches, in order.

    All arguments up to `in_order` are torch's and are checked by torch.

    Without workers (`num_workers=0`) batches are built in this process, as torch builds them, and Ray is neither
    imported nor started. Of the further arguments those about workers have no effect then: `workers`,
    `ray_remote_args`, `fresh_processes`, `scheduling`, `max_worker_restarts`, `on_timeout`, `arenas` and
    `prefetch_to_device`. The others mean the same.

    With workers, these are Ray actors if the program uses Ray (`ray.init()` or `rayloader.init()` was called, or
    RAY_ADDRESS is set) or this loader asks for them; otherwise they are forks of this process, as torch's are, and the
    first batch comes at once. See `workers`. The actors are shared by all loaders of the process. They stay warm
    for a minute after their work, unless something else in the cluster waits for what they hold.

    Args:
        dataset: map-style or iterable-style dataset. Each worker has its own dataset object, a new one at each `iter()`
            unless `persistent_workers` is set. The memory of tensors, arrays and Arrow tables exists once per machine
            until a worker writes to it; memory-mapped files and shared memory stay shared. For other objects see
            `SharedList`.
        batch_size: samples per batch; None switches automatic batching off.
        shuffle: draw the samples in a new random order each epoch.
        sampler: gives the order of the samples; excludes `shuffle`.
        batch_sampler: yields a list of indices per batch; excludes `batch_size`, `shuffle`, `sampler` and `drop_last`.
        num_workers: number of workers, one process each.
        collate_fn: makes a batch from a list of samples; runs in the workers.
        pin_memory: deliver batches in page-locked memory. With CUDA the workers build large tensors in such memory,
            which takes no copy; other tensors are copied to it in a background thread.
        drop_last: drop the last incomplete batch (of each worker, for iterable datasets). With `num_replicas`, also
            drop samples that would make the ranks' parts unequal.
        timeout: seconds to wait for a batch at most, counted once its worker has started, and without the time in
            which memory is page-locked; 0 waits for ever.
        worker_init_fn: called in each worker with its id, after seeding and before loading.
        multiprocessing_context: with "spawn" or "forkserver" the workers of this loader are Ray actors.
        generator: random generator of the sampler, and of the workers' base seed.
        prefetch_factor: batches per worker that are submitted and not yet taken, at least 1; 2 by default. This is a
            strict bound, and indices are drawn when torch draws them.
        persistent_workers: keep the workers' dataset objects from epoch to epoch.
        pin_memory_device: deprecated in torch.
        in_order: deliver the batches in order; if False, as they are finished.

    Arguments of rayloader alone:
        workers: "fork": the workers are forks of this process, on this machine; what torch's loader takes under the
            start method "fork" works. "ray": they are Ray actors, on any machine of the cluster; Ray is joined, or
            started if there is none, and sends them the dataset, `collate_fn` and `worker_init_fn` by cloudpickle.
            "auto": actors if the program uses Ray, and otherwise forks, as long as the iterator lives.
        ray_remote_args: options of the worker actors, which the workers then are: `num_cpus` (per
            worker; by default 1 in a Ray that was already running, and 0, which shares CPUs, in one that was started
            for rayloader), `num_gpus`, `memory`, `resources`, `accelerator_type`, `label_selector`,
            `scheduling_strategy`, `runtime_env`.
        fresh_processes: start new actors for each `iter()` instead of reusing warm ones, in which stays what user code
            has left: module globals, settings of libraries, threads. That takes seconds instead of milliseconds. Forks
            are always new.
        seeding: "worker" gives each worker a random stream of its own, as torch does; "batch" seeds `random`, torch and
            NumPy before each batch, from the base seed, the epoch and the batch's number, so that random
            augmentation does not depend on the number of workers, or on whether there are any. Generators that the
            dataset holds are not seeded, and go on from batch to batch of their worker. An iterable dataset without
            workers is read as by one worker.
        scheduling: "static" deals batches out to the workers in turn, as torch does; "dynamic" gives the next one to
            whichever worker is idle, so that a slow sample does not delay the others. Batches still come in order.
            "dynamic" needs `seeding="batch"` and a map-style dataset.
        max_worker_restarts: how many times in a row, without a finished batch in between, a worker whose process died
            continues in a new one; with 0 the first death ends the epoch. The default is 3, because whatever kills a
            process again and again before it finishes anything will do so once more. Regardless of this number, a batch
            ends the epoch if its worker died five times while working on nothing else, or exited twice (`SystemExit`).
        on_timeout: "raise" an error after `timeout` seconds without the next batch, as torch does, or "restart" the
            worker whose batch is overdue: its process is killed and replaced like one that died.
        on_error: "raise" the exception of a sample, in its batch's turn, as torch does, or "skip" the sample: its batch
            becomes smaller, and is not delivered if it is empty. Exceptions of `collate_fn` are still raised.
        max_skipped: with `on_error="skip"`, how many samples may be skipped in an epoch, over all workers; see
            `skipped`.
        arenas: use local sockets for workers on this machine, and let them build batches in memory that this process
            has mapped, so that large tensors arrive without a copy; use TCP for workers elsewhere. If False, the
            workers are actors, and every task and every batch goes through Ray. RAYLOADER_ARENAS=0 in the environment
            does the same for all loaders.
        snapshot_every_n_steps: accepted for code that was written for torchdata's StatefulDataLoader, and without
            effect: a state always records the last batch that was taken, and a worker takes snapshots as often as that
            costs one percent of its time.
        name: what the loader is called where it is shown: in its `repr`, and in Ray's list of actors
            ("rayloader:train:0"). By default the name of the dataset's class.
        num_replicas: number of ranks (processes that train together) among which the data is divided. With only one of
            `num_replicas` and `rank`, the other comes from torch.distributed; with neither, nothing is divided. See
            the how-to page on ranks for what each rank gets. In short: without a sampler of yours the sampler is
            torch's `DistributedSampler`; of any other sampler rank r gets the samples, and of a batch sampler the
            batches, number r, r + num_replicas and so on. All ranks get the same number: the first items are repeated,
            or with `drop_last` the last ones are left out. An iterable dataset calls `get_shard_info()`.
        rank: of this process, from 0. All other arguments must be the same in all ranks.
        seed: of the order in which the ranks share the data, together with the epoch of `set_epoch`.
        device: move batches to this device, for instance "cuda" (the one that is current at `iter()`), before they are
            asked for; "cpu" and None leave them in main memory. Tensors are moved wherever they are in dicts, lists,
            tuples and dataclasses, other objects by their method `to`; the rest stays as it is. What the program
            queues on its current stream finds them there. Large tensors are copied from page-locked memory, so
            `pin_memory` is not needed. Without workers a batch is moved when it is asked for. A device that is not
            there is a ValueError from `iter()`.
        prefetch_to_device: how many batches are on the device, or on their way, before they are asked for; 2 by
            default. It needs a `device`.
        skip_steps: batches that are not built, nor delivered, as after a spike of the loss: numbers of steps of the
            first epoch, or pairs of an epoch and a step. Both count from 0; a step is a batch's number in the order of
            its epoch's sampler, so skipping one changes no other's. A batch of an iterable dataset is built, and
            dropped. All of it is part of `state_dict()`. All ranks must skip the same.

    Raises:
        ValueError: an argument is out of range, or contradicts another.
        TypeError: an argument is of the wrong type.

    While iterating, an exception of the dataset, the sampler or `collate_fn` arrives with its own type, as from torch's
    loader; its notes name the batch, the worker and the indices. `rayloader.RayloaderError` is the base class of the
    loader's own errors: `WorkerDiedError`, `BatchTimeoutError`, `WorkerStartError`, `RaySessionError`, `ReplicaError`,
    `ReplicaMemoryError`, `ReplayError`, `SkipLimitError`, `StateError`.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # takes any number of parameters

    # Class attributes, because a subclass may have others with these names.
    name: str | None = None
    num_replicas: int | None = None
    rank: int | None = None
    seed: int = 0
    device: torch.device | str | None = None
    _ranks: Ranks | None = None  # the meaning of these arguments, if they are this class's

    def __init__(
        self,
        dataset: Dataset[_T_co] | Sequence[_T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        workers: options.Workers = "auto",
        ray_remote_args: dict[str, Any] | None = None,
        fresh_processes: bool = False,
        seeding: options.Seeding = "worker",
        scheduling: options.Scheduling = "static",
        max_worker_restarts: int = 3,
        on_timeout: options.OnTimeout = "raise",
        on_error: options.OnError = "raise",
        max_skipped: int = 100,
        arenas: bool = True,
        snapshot_every_n_steps: int | None = 1,
        name: str | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        prefetch_to_device: int | None = None,
        skip_steps: Given = None,
        **of_newer_torch: Any,
    ) -> None:
        if of_newer_torch.get("worker_method") == "thread":
            raise ValueError("worker_method='thread' asks for threads, and rayloader has processes alone; leave it out")
        self._recorder = Recorder()
        self._position: Any = None  # of the last iterator
        self._state: State | None = None  # loaded, for the next iter()
        self._of_other_workers = False  # the last iterator's position came from a loader with another number of workers
        self._last_iterator: weakref.ref[Any] | None = None
        self._torchs_epoch: object = None  # the one that torch's own workers are in, see `epoch/torchs.py`
        self._before: EarlierState | None = None  # of the last iterator, if its reader may be ahead of the program
        # The loader from which a framework has rebuilt this one; and whether such a rebuilt one was read since.
        self._source = source_of(num_workers, dataset)
        self._read_anew = False
        self._dataset_epoch: int | None = None  # what the dataset was told, and persistent workers' copies not yet
        self.workers: options.Workers = workers
        self.ray_remote_args = ray_remote_args
        self.fresh_processes = fresh_processes
        self.seeding: options.Seeding = seeding
        self.scheduling: options.Scheduling = scheduling
        self.max_worker_restarts = max_worker_restarts
        self.on_timeout: options.OnTimeout = on_timeout
        self.on_error: options.OnError = on_error
        self.max_skipped = max_skipped
        self.arenas = arenas
        self.snapshot_every_n_steps = snapshot_every_n_steps
        if name is not None:  # otherwise it is the class's, which may be a subclass with a name of its own
            options.check_name(name)
            self.name = name
        if device is not None:  # likewise
            self.device = device
        self.prefetch_to_device = prefetch_to_device
        self.skip_steps = skip_steps
        if num_replicas is not None or rank is not None or type(seed) is not int or seed:
            from rayloader.resume.ranks import SameOrder, of_rank, ranks_of

            if (ranks := ranks_of(num_replicas, rank, seed)) is not None:
                self.num_replicas, self.rank, self.seed = ranks
                before = num_workers.loader() if isinstance(num_workers, WorkerCount) else None
                own = before._index_sampler if before is not None and before._ranks == ranks else None
                order = of_rank(dataset, shuffle, sampler, batch_sampler, drop_last, ranks=ranks, own=own)
                shuffle, sampler, batch_sampler = order
                self._same_order = SameOrder()
            self._ranks = ranks
        super().__init__(
            dataset,  # type: ignore[arg-type]  # torch takes sequences too, and does not say so
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
            **of_newer_torch,
        )
        if type(self.batch_sampler) in SHARDS:
            vars(self)["sampler"] = self.batch_sampler  # where frameworks look for a sampler whose epoch they set
        options.check(self)
        check_plans(self)
        note_first_attributes(self)
        self._sign_num_workers()

    def __repr__(self) -> str:
        shown: dict[str, Any] = {"num_workers": 0, "batch_size": None, "name": None}
        shown.update((key, value) for key in shown if isinstance(value := getattr(self, key, None), (int, str)))
        arguments = "".join(f", {key}={value!r}" for key, value in shown.items() if value is not None)
        dataset = type(getattr(self, "dataset", None)).__name__
        return f"{type(self).__module__.split('.')[0]}.{type(self).__name__}({dataset}{arguments})"

    def __setattr__(self, attr: str, val: Any) -> None:
        if attr in _OF_RANK and self._ranks is not None:
            raise ValueError(f"{attr} attribute should not be set after {type(self).__name__} is initialized")
        super().__setattr__(attr, val)

    def __iter__(self) -> BaseIterator:
        try:
            note_first_attributes(self)  # of samplers that were put in since the loader was created
            if self._ranks is not None:
                finished = self._state is None and self._position is not None and self._position.finished
                self._same_order.begins(self._index_sampler, finished=finished)
            self._before = None
            if _READERS.isdisjoint(sys.modules):
                return self._new_iterator()
            from rayloader.frameworks.readers import read

            return cast(BaseIterator, read(self))
        except KeyboardInterrupt as error:
            shorten(error, says_all=True)
            raise

    def _new_iterator(self) -> BaseIterator:
        if self._of_other_workers:  # the rest of an epoch that another number of workers began; they end with it
            self._iterator, self._of_other_workers = None, False
        self._note_reading()
        return super().__iter__()

    def _note_reading(self) -> None:
        """From now on the position is this loader's, and not that of the loader from which it was rebuilt."""
        self._read_anew = False
        source = self._source()
        while source is not None:
            if source._state is not None:
                raise lost_state()
            source._read_anew = True
            source = source._source()

    def _get_iterator(self) -> BaseIterator:
        if self.num_workers and options.lacking():
            from rayloader.epoch.torchs import torchs_iterator

            return torchs_iterator(self)
        iterator: Any
        if self.num_workers == 0:
            from rayloader.epoch.local import LocalIterator

            iterator = LocalIterator(self, self._state)
            self._of_other_workers, self._torchs_epoch, self._last_iterator = False, None, None
        else:
            from rayloader.epoch.iterator import EpochIterator

            # What the program has set since the loader was created takes effect at this `iter()`, as with torch.
            self.num_workers = options.check_whole("num_workers", self.num_workers, 0)
            self._sign_num_workers()
            self.check_worker_number_rationality()
            iterator = EpochIterator(self, int(self.num_workers), self._state)
            self._of_other_workers = iterator.num_workers != self.num_workers
            self._last_iterator = weakref.ref(iterator)
        self._state, self._position = None, iterator.position
        return iterator  # type: ignore[no-any-return]

    @property
    def _label(self) -> str:
        """The name by which this loader's workers are shown: its name, or else the class of its dataset."""
        return self.name if isinstance(self.name, str) and self.name else type(self.dataset).__name__

    @property
    def _live_iterator(self) -> Any:
        """The last iterator with workers, if it still exists."""
        return self._last_iterator() if self._last_iterator is not None else None

    @property
    def skipped(self) -> int:
        """How many samples were skipped in the current or last epoch, up to the last batch taken."""
        return self._position.skipped if self._position is not None else 0

    @property
    def last_step(self) -> tuple[int, int] | None:
        """Epoch and step of the batch that was taken last, as `batch_at` and `skip_steps` count them.

        Both count from 0: epochs over the whole run, also where it was resumed, and steps also where some were left
        out. None before the first batch of an iterator.
        """
        return None if self._position is None else self._position.last_step

    def stats(self) -> LoaderStats:
        """What this loader has measured, and its verdict: is it the loader or the model?

        The numbers are those of the current or last epoch, and of all epochs of all iterators of this object; they are
        no part of `state_dict()`, and a copy of the loader begins with none. Measuring takes two or three microseconds
        a batch. Any thread may call this, at any time: it never waits, and never raises. For instance::

            print(loader.stats())
        """
        from rayloader.data.cached import cache_in

        iterator = self._live_iterator
        return self._recorder.tell(
            bytes_under_way=iterator.bytes_under_way if iterator is not None else 0,
            bytes_held=iterator.bytes_held if iterator is not None else 0,
            dynamic=self.scheduling == "dynamic",
            iterable=isinstance(self.dataset, IterableDataset),
            cache=cache_in(self.dataset),
        )

    def trace(self, path: str | os.PathLike[str]) -> Tracing:
        """Records what workers and trainer do, and when, in a file for https://ui.perfetto.dev or chrome://tracing.

        For instance::

            with loader.trace("loader.json"):
                for batch in loader: ...

        Recording begins at once. It ends, and the file is written, with the block, even by an exception; without
        `with`, by `close()` on the returned object, and at the latest when the loader is dropped or the program ends.

        There is a lane for each worker, with the fetching, collating and transfer of each batch (with its number and
        indices), and one for the trainer, with its waits and steps. Times are those of the clock behind
        `time.perf_counter()`, in microseconds; those of workers on other machines are converted, using the times at
        which their batches came. Tracing costs some microseconds a batch, and a few hundred bytes of memory until the
        file is written.

        Args:
            path: of the file. As with torch's `export_chrome_trace`, an existing file is replaced, and one whose
                name ends with .gz is compressed.

        Raises:
            RayloaderError: this loader is being traced already.
            FileNotFoundError: the file's folder is missing.
        """
        return self._recorder.traced(Path(path), f"rayloader: {self._label}")

    def set_epoch(self, epoch: int) -> None:
        """Tells the sampler, the batch sampler and the dataset which epoch the next `iter()` begins.

        It calls `set_epoch` of these, and of the samplers that they wrap, where it exists, as in torch's
        `DistributedSampler`. With `num_replicas`, call it before every epoch, in all ranks: the order of an epoch
        depends on this number, and the same number means the same order.

        Workers get the dataset as it is at `iter()`; in persistent workers, which keep their copies, `set_epoch` is
        called when the next epoch begins.
        """
        if callable(getattr(self.dataset, "set_epoch", None)):
            self._dataset_epoch = epoch
        tell_epoch(
            [*chain_of(self._index_sampler, until=tuple(SHARDS)), self.dataset], epoch
        )  # a shard tells what it wraps

    def state_dict(self) -> dict[str, Any]:
        """The position of the user in this loader's stream of batches.

        It counts the batches that were taken from the last iterator; batches in progress do not count. The state
        consists of some kilobytes of primitives, bytes and tensors, to be saved with `torch.save` and loaded with
        `weights_only=True`, and of the results of `state_dict` of the dataset and sampler, where they have one. A call
        costs the same after many batches as after few, so it may be made before each batch.

        Raises:
            StateError: the state of a dataset or sampler could not be determined; or a framework has rebuilt this
                loader, and reads the new one.
        """
        if self._read_anew:
            raise StateError(
                "a framework has rebuilt this loader and reads the new one, which alone knows the position; call "
                "its state_dict() (rayloader.patch() gives it one), or create the loader with num_replicas and rank"
            )
        if self._state is None and self._before is not None and self._before.is_known:
            return self._before.state()
        return self._tell_state()

    def _tell_state(self) -> dict[str, Any]:
        """The position after the last batch that was drawn from this loader."""
        from rayloader.resume import checkpoint

        if self._state is not None:
            return checkpoint.still(self, self._state)
        if self._torchs_epoch is not None:
            from rayloader.epoch.torchs import check_place

            check_place(self)
        iterator = self._live_iterator
        if iterator is not None:
            iterator.tell_positions()
        return checkpoint.make_state(self, self._position, int(self.num_workers))

    def load_state_dict(self, state_dict: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Makes the next `iter()` continue where the state was saved: with the rest of that epoch, or a new one.

        Everything that belongs to the program is restored at once: the random generators from which samplers and seeds
        are drawn, and the samplers with their epoch. Changes that the program makes afterwards take effect; the next
        `iter()` advances no generator that torch's would not. If several loaders are loaded, the last one determines
        the global generators.

        Without workers, the objects that do the work are the program's own too. Then all global generators are
        restored, those that the dataset and `collate_fn` hold or the program's code behind them names, and the
        dataset's own `state_dict`. Such a state fits
        only a loader without workers, and a state saved with workers only a loader with some; with `seeding="batch"`
        and a map-style dataset that keeps no state, either fits both.

        The rest of the epoch depends on the loader that was saved, whatever `num_workers` and `persistent_workers` this
        one has: it has as many workers, each with a process of its own. Later epochs have this loader's own
        `num_workers`. With `seeding="batch"`, and a map-style dataset without state, so has the rest of the epoch. A
        live iterator is not affected; persistent workers are replaced by new ones at the next `iter()`.

        Args:
            state_dict: the result of `state_dict()`. With torch's DistributedSampler each rank saves its own. With the
                list of all of them, saved at the same step, the number of ranks may differ: the part of the epoch that
                no rank has taken is distributed again, with new random streams in the workers. After an empty dict,
                which torchdata's StatefulDataLoader accepts, the next `iter()` begins an epoch.

        Raises:
            StateError: the state does not fit this loader. If only the sampler's indices show it, `iter()` raises it.
        """
        from rayloader.resume import checkpoint
        from rayloader.resume.state import State

        if isinstance(state_dict, list):
            self._state = checkpoint.load(self, [State.load(one) for one in state_dict])
        else:
            self._state = checkpoint.load(self, State.load(state_dict)) if state_dict != {} else None
        self._iterator = self._before = None
        self._read_anew, self._torchs_epoch = False, None

    def batch_at(
        self,
        epoch: int,
        step: int,
        *,
        state: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
    ) -> Any:
        """Builds one batch of the run again: bit for bit the one that it delivered.

        It is built in a fork of this process, without Ray, and without the other workers' batches: with
        `seeding="batch"` and a dataset without state at once, otherwise after the batches that the same worker has
        built since the state. Of an iterable dataset, all workers' batches since the state are built.

        Args:
            epoch: of the run, from 0; epochs that were resumed count as one.
            step: number of the batch in the order of the epoch's sampler, from 0.
            state: from which to go on: a result of `state_dict()`, or several (also of all ranks), of which the
                nearest one counts. It must be of that epoch, or have been saved before it began. By default the
                loader's own.

        Returns:
            The batch, on the loader's `device`.

        Raises:
            StateError: there is no state of that epoch, the state does not fit, or such a batch was never delivered.
            ReplayError: a batch since the state came differently than in the run.
            Exception: raised by the dataset, as in the run.
        """
        from rayloader.rebuild import rebuilt_in_fork

        batch = rebuilt_in_fork(self, epoch, step, state).batch
        if (target := options.target_of(self.device)) is None:
            return batch
        from rayloader.gpu.to_device import moved_here

        return moved_here(batch, target[0])

    def _sign_num_workers(self) -> None:
        if isinstance(self.num_workers, int):
            self.num_workers = WorkerCount(self.num_workers)
            self.num_workers.loader = weakref.ref(self)

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to this process, and what this object has measured.
        own = dict.fromkeys(("_position", "_last_iterator", "_before", "_torchs_epoch"))
        return {**self.__dict__, **own, "_source": no_loader, "_read_anew": False, "_recorder": Recorder()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sign_num_workers()


def _tell_parameters(function: Any) -> None:
    """Shows the keywords of a newer torch by their names: frameworks rebuild a loader from what its signature names."""
    own, torchs = (inspect.signature(one).parameters for one in (function, TorchDataLoader.__init__))
    named = [one for one in own.values() if one.kind is not one.VAR_KEYWORD]
    newer = [one.replace(kind=one.KEYWORD_ONLY) for name, one in torchs.items() if name not in own]
    newer = [one for one in newer if torchs[one.name].kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    function.__signature__ = inspect.Signature([*named, *newer])


_tell_parameters(DataLoader.__init__)


def init(num_workers: int = 0, *, ray_remote_args: dict[str, Any] | None = None, **ray_options: Any) -> None:
    """Starts Ray on this machine, or uses the one that runs, and starts workers while the program continues.

    It is `ray.init(address="local", include_dashboard=False, **ray_options)`, unless the program is connected to Ray
    already, or RAY_ADDRESS names one. The workers of loaders are actors from then on. It returns when Ray runs; the
    first `iter()` of a loader waits for worker processes that do not run yet.

    Args:
        num_workers: worker processes to start, over all loaders that will work at the same time; they wait for their
            first loader without a limit.
        ray_remote_args: those of the loaders that will use these processes; loaders with others start their own.
        **ray_options: options of `ray.init`, for instance `num_cpus`, `address` or `include_dashboard`.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is of the wrong type.
        RaySessionError: Ray does not start, cannot be joined, or runs already, so that options come too late.
    """
    num_workers = options.check_whole("num_workers", num_workers, 0)
    options.check_remote_args(ray_remote_args)
    options.check_means("rayloader.init()")
    from rayloader.actors import pool

    pool.init(num_workers, dict(ray_remote_args or {}), ray_options)


def shutdown() -> None:
    """Ends every worker of this process's loaders, its shared loaders, and Ray if rayloader started it.

    Iterators that are still live raise `RaySessionError` afterwards; the next `iter()` starts new workers. A script
    need not call this at its end. It may be called more than once, but not from a signal handler.
    """
    for module, function in _ENDS:
        if (imported := sys.modules.get(f"rayloader.{module}")) is not None:
            getattr(imported, function)()


# What ends in turn, if it was imported.
_ENDS = (
    *(("epoch.iterator", "close_all"), ("sharing", "close_all")),
    *(("actors.pool", "shutdown"), ("workers.janitor", "end_forks")),
)
