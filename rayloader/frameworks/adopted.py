"""Loaders of other classes that get our iterators: subclasses of torch's class, and what other code makes iterators of.

Promise: such a loader keeps its class, its methods and its attributes, and its copies and pickles are such loaders too.
Wherever torch's code, the subclass or a library makes one of torch's own iterators of it, that object becomes one of
ours. Where that cannot be, the iterator is torch's, and one warning for each class says so. Iterators of classes that
derive from torch's may do anything, and stay as they are.

NOTE [The iterator's constructor]: subclasses override `__iter__` and `_get_iterator`, and some libraries call the class
of torch's iterators themselves, by a name that they imported. All of them end in the constructors of these classes, so
this is where torch's iterators are exchanged. For loaders of torch's own iterators these constructors are unchanged.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from rayloader._compat import MultiProcessIterator, SingleProcessIterator
from rayloader.epoch.local import LocalIterator
from rayloader.errors import level_outside
from rayloader.frameworks.readers import ADOPTED, is_adopted
from rayloader.loader import DataLoader, no_loader
from rayloader.observe.recorder import Recorder
from rayloader.options import OwnArguments, check, checked_num_workers, lacking
from rayloader.resume.samplers import note_first_attributes

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name in OwnArguments.__annotations__
}
_MISSING = {"batch_size": None, "batch_sampler": None}  # what loaders may lack of which torch's iterators are made


class Adopted:
    """A loader as our iterators see it: its own attributes, besides those that only our class has.

    Args:
        own: rayloader's own arguments; defaults for those that are missing.
    """

    _label = DataLoader._label
    _live_iterator = DataLoader._live_iterator
    __slots__ = (
        *("__weakref__", "_dataset_epoch", "_last_iterator", "_loader", "_position", "_ranks", "_recorder", "own"),
    )

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = {**_DEFAULTS, **own}
        self._loader: Callable[[], Any] = no_loader
        self._recorder = Recorder()
        self._last_iterator: weakref.ref[Any] | None = None
        self._ranks = self._dataset_epoch = self._position = None

    def __reduce__(self) -> tuple[Any, ...]:  # a copy belongs to another loader
        return adopted_anew, (self.own,)

    def __getattr__(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        loader = self._loader()
        return getattr(loader, name, _MISSING[name]) if name in _MISSING else getattr(loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader(), name, value)

    def of(self, loader: Any) -> Adopted:
        """This one if it stands for that loader, otherwise another: a shallow copy of a loader has the original's."""
        if self._loader() is loader:
            return self
        own = self if self._loader is no_loader else Adopted(self.own)
        own._loader = weakref.ref(loader)
        vars(loader)[ADOPTED] = own
        note_first_attributes(own)
        return own

    def refusal(self) -> str | None:
        """Why it can't get our iterators, with the remedy; None if it can."""
        if self.own["num_replicas"] is not None or self.own["rank"] is not None:
            return "num_replicas and rank divide the data of a rayloader.DataLoader alone; create one in its place"
        if self.num_workers > 0 and (why := lacking()):
            return f"rayloader's own workers can't be had here: {why}"
        # Torch would refuse a context without workers.
        context = self.multiprocessing_context if self.num_workers > 0 else None
        if isinstance(context, BaseContext) and type(context).__module__ != BaseContext.__module__:
            return "the workers of its multiprocessing_context are no processes of multiprocessing's; leave it out"
        return None

    def become(self, iterator: Any) -> None:
        """Makes one of torch's iterators, which was not initialized yet, one of ours.

        Raises:
            ValueError: a default of the patch does not suit the loader.
        """
        check(self)
        if isinstance(iterator, SingleProcessIterator):
            iterator.__class__ = LocalIterator
            LocalIterator.__init__(iterator, self, None)  # type: ignore[arg-type]
            self._position = iterator.position  # type: ignore[attr-defined]
            return
        from rayloader.epoch.iterator import EpochIterator

        num_workers = checked_num_workers(self.num_workers)
        iterator.__class__, iterator._adopted = EpochIterator, self
        EpochIterator.__init__(iterator, self, num_workers, None)
        self._position, self._last_iterator = iterator.position, weakref.ref(iterator)


def adopt(loader: Any, own: dict[str, Any]) -> None:
    """Makes a loader one that gets our iterators; before it is initialized."""
    vars(loader)[ADOPTED] = Adopted(own)


def adopted_anew(own: dict[str, Any]) -> Adopted:
    """For a copy of such a loader, perhaps in another process."""
    exchange_iterators()
    return Adopted(own)


@functools.cache
def warn_of_torchs(kind: type, reason: str) -> None:
    """Says once that loaders of this class get torch's iterators although a patch is in force."""
    warnings.warn(
        f"rayloader.patch() does not reach this {kind.__module__}.{kind.__qualname__}: {reason}. Its batches come "
        "from torch's own workers",
        stacklevel=level_outside("rayloader", "torch", "torchdata"),
    )


patches: list[Any] = []  # those in force, in the order of their installation


def defaults() -> dict[str, Any]:
    """Our own arguments for loaders that are created as torch's."""
    return {name: value for patch in patches for name, value in patch.defaults.items()}


def exchange_iterators() -> None:
    """From now on, torch's iterators of loaders that were adopted are ours."""
    for iterator_class in (SingleProcessIterator, MultiProcessIterator):
        if not isinstance(vars(iterator_class)["__init__"], _Constructor):
            iterator_class.__init__ = _Constructor(iterator_class)  # type: ignore[method-assign,assignment]


class _Constructor:
    """`__init__` of a class of torch's iterators; it adds no frame to iterators of other classes, such as ours."""

    def __init__(self, iterator_class: type) -> None:
        self._class, self._init = iterator_class, vars(iterator_class)["__init__"]

    def __get__(self, iterator: Any, iterator_class: type | None = None) -> Any:
        init = self._init.__get__(iterator, iterator_class)
        return functools.partial(_construct, init, iterator) if type(iterator) is self._class else init


def _construct(init: Callable[[Any], None], iterator: Any, loader: Any) -> None:
    """The constructor of an iterator of torch's own class: ours where that is possible, else torch's, and a warning."""
    adopted = _adopted(loader)
    reason = None
    if adopted is not None:
        reason = adopted.refusal()
    elif patches and not isinstance(loader, DataLoader) and loader.num_workers > 0:
        reason = "it was created before, or without torch's constructor; call patch() at the start of the program"
    if reason is not None:
        warn_of_torchs(loader.__class__, reason)
    if adopted is None or reason is not None:
        init(loader)
    else:
        adopted.become(iterator)


def _adopted(loader: Any) -> Adopted | None:
    if is_adopted(loader):
        return vars(loader)[ADOPTED].of(loader)  # type: ignore[no-any-return]
    if not patches or isinstance(loader, TorchDataLoader) or not hasattr(loader, "__dict__"):
        return None
    return Adopted(defaults()).of(loader)
