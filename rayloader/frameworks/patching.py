"""Loaders that frameworks create: how they become ours.

Promise: while a patch is installed, all code that calls torch's DataLoader, under whatever name, gets a loader of ours.
When the last patch is removed, torch's class is what it was before the first. A loader of a subclass of torch's class
is *adopted*: it keeps its class, its methods and its attributes, and so do its copies and pickles, and wherever torch's
code, the subclass or a library makes one of torch's own iterators of it, that object becomes one of ours. Where that
cannot be, the iterator is torch's, and one warning for each class says so. Iterators of classes that derive from
torch's may do anything, and stay as they are.

NOTE [The class stays]: frameworks import torch's class by name, check `isinstance` against it, derive from it, and may
be imported before or after a patch. So no name is replaced: the class remains torch's, and its constructor turns the
object into one of ours, whose class derives from it; for torchdata's class that is a class of its own.

NOTE [The iterator's constructor]: subclasses override `__iter__` and `_get_iterator`, and some libraries call the class
of torch's iterators themselves, by a name that they imported. All of them end in the constructors of these classes, so
this is where torch's iterators are exchanged. For loaders of torch's own iterators these constructors are unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader as TorchDataLoader

from rayloader._compat import MultiProcessIterator, SingleProcessIterator
from rayloader.epoch.local import LocalIterator
from rayloader.errors import level_outside
from rayloader.frameworks.readers import ADOPTED, check_dispatch, is_adopted
from rayloader.loader import DataLoader, WorkerCount, lost_state, no_loader
from rayloader.observe.recorder import Recorder
from rayloader.options import OwnArguments, check, check_whole, lacking
from rayloader.resume.ranks import Ranks
from rayloader.resume.samplers import note_first_attributes

if TYPE_CHECKING:
    from typing_extensions import Unpack

_OWN = OwnArguments.__annotations__.keys()

# The classes that a patch stands in for, and ours, of which each derives from the one in whose place it is.
_REPLACED: dict[type, type[DataLoader[Any]]] = {TorchDataLoader: DataLoader}
with contextlib.suppress(ImportError):
    from torchdata.stateful_dataloader import StatefulDataLoader as TorchdatasLoader

    class _TorchsFirst(type):
        """Puts torchdata's class after ours and torch's, which have all of its methods: nothing else is found there."""

        def mro(cls) -> list[type]:
            order = super().mro()
            order.remove(TorchdatasLoader)
            order.insert(order.index(TorchDataLoader) + 1, TorchdatasLoader)
            return order

    class StatefulDataLoader(DataLoader, TorchdatasLoader, metaclass=_TorchsFirst):  # type: ignore[misc,type-arg]
        """What torchdata's class makes while a patch is in force.

        It is an instance of that class too: by it trainers ask whether a loader keeps its position, and leave others
        out of their checkpoints without a word.
        """

    _REPLACED[TorchdatasLoader] = StatefulDataLoader

_patches: list[Patch] = []  # those in force, in the order of their installation
_constructors: dict[type, tuple[Any, Any]] = {}  # of patched classes: the one before the first patch, and ours


class Patch:
    """A patch, in force until `remove` is called or the `with` block ends. Created by `patch`.

    Attributes:
        defaults: the arguments that `patch` was given.
    """

    def __init__(self, defaults: OwnArguments) -> None:
        self.defaults = defaults
        self.install()

    def install(self) -> None:
        """Puts it in force (again), on top of the patches that are."""
        if not _patches:
            exchange_iterators()
            for loader_class, our_class in _REPLACED.items():
                _replace_constructor(loader_class, our_class)
        if self not in _patches:
            _patches.append(self)

    def remove(self) -> None:
        """Ends the patch; others stay. Loaders that were created remain ours. It may be called more than once."""
        if self in _patches:
            _patches.remove(self)
        if not _patches:
            for loader_class, (before, ours) in _constructors.items():
                if vars(loader_class)["__init__"] is ours:  # otherwise other code has wrapped it, and will restore it
                    loader_class.__init__ = before  # type: ignore[misc]
            _constructors.clear()

    def __enter__(self) -> Patch:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def patch(**defaults: Unpack[OwnArguments]) -> Patch:
    """Makes every framework of this process create loaders of ours in place of torch's.

    From this call on, `torch.utils.data.DataLoader(...)` returns a `rayloader.DataLoader`, under whatever name it is
    called, and so does torchdata's `StatefulDataLoader(...)`; it is an instance of the class that was called, too. A
    loader of ours that a framework rebuilds keeps its own arguments. Loaders of subclasses of torch's class keep their
    class, and get our iterators, and so does what else torch's iterators are created from; where that is impossible, a
    warning says so. Loaders that exist already are left alone, and so are iterators of other classes. For instance::

        with rayloader.patch(seeding="batch"):
            trainer.train()

    Without `with`, the patch holds until its `remove()` is called. Several may be in force: each default comes from the
    latest patch that has it.

    Args:
        defaults: arguments that torch's DataLoader does not have, for loaders that are created as torch's.

    Raises:
        TypeError: one is not an argument of `DataLoader`, or is torch's; or its value is of the wrong type.
        ValueError: a value is out of range, or contradicts another.
    """
    if wrong := sorted(defaults.keys() - _OWN):
        raise TypeError(
            f"patch() takes arguments that rayloader.DataLoader has and torch's has not, got {', '.join(wrong)}; "
            f"choose from {', '.join(sorted(_OWN))}"
        )
    DataLoader((), timeout=1, **{**_own_defaults(), **defaults})  # checks them
    return Patch(defaults)


def _replace_constructor(loader_class: type, our_class: type[DataLoader[Any]]) -> None:
    before: Any = vars(loader_class)["__init__"]

    @functools.wraps(before)
    def make_ours(loader: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(loader, DataLoader) or not _patches:
            before(loader, *args, **kwargs)
            return
        own = _own_arguments((*args, *kwargs.values()))
        if type(loader) is loader_class:
            loader.__class__ = our_class
            DataLoader.__init__(loader, *args, **{**own, **kwargs})  # type: ignore[arg-type]
            return
        vars(loader)[ADOPTED] = Adopted(own)
        before(loader, *args, **kwargs)

    loader_class.__init__ = make_ours  # type: ignore[misc]
    _constructors[loader_class] = before, make_ours


def _own_defaults() -> dict[str, Any]:
    """Our own arguments for loaders that are created as torch's."""
    return {name: value for patch in _patches for name, value in patch.defaults.items()}


def _own_arguments(given: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of our loader that is being rebuilt; the defaults of the patches if there is none.

    Raises:
        StateError: that loader has loaded a state, which would be lost.
        ValueError: see `check_dispatch`.
    """
    source = next((value.loader() for value in given if isinstance(value, WorkerCount)), None)
    if source is None:
        return _own_defaults()
    if source._state is not None:
        raise lost_state()
    check_dispatch(source)
    names = _OWN if source._ranks is not None else _OWN - set(Ranks._fields)
    return {name: getattr(source, name) for name in names}


# ---- loaders of other classes, which get our iterators

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DataLoader.__init__).parameters.items()
    if name in OwnArguments.__annotations__
}


class Adopted:
    """A loader as our iterators see it: its own attributes, besides those that only our class has.

    Args:
        own: rayloader's own arguments; defaults for those that are missing.
    """

    _label = DataLoader._label
    __slots__ = ("__weakref__", "_dataset_epoch", "_loader", "_position", "_ranks", "_recorder", "own")

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = {**_DEFAULTS, **own}
        self._loader: Callable[[], Any] = no_loader
        self._recorder = Recorder()
        self._ranks = self._dataset_epoch = self._position = None

    def __reduce__(self) -> tuple[Any, ...]:  # a copy belongs to another loader
        return adopted_anew, (self.own,)

    def __getattr__(self, name: str) -> Any:
        if name in self.own:
            return self.own[name]
        loader = self._loader()
        may_lack = name in ("batch_size", "batch_sampler")  # of what torch's iterators are made of
        return getattr(loader, name, None) if may_lack else getattr(loader, name)

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

        num_workers = check_whole("num_workers", self.num_workers, 0)
        iterator.__class__, iterator._adopted = EpochIterator, self
        EpochIterator.__init__(iterator, self, num_workers, None)
        self._position = iterator.position


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
    elif _patches and not isinstance(loader, DataLoader) and loader.num_workers > 0:
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
    if not _patches or isinstance(loader, TorchDataLoader) or not hasattr(loader, "__dict__"):
        return None
    return Adopted(_own_defaults()).of(loader)
