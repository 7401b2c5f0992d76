"""Loaders that frameworks create: how they become ours.

Promise: while a patch is installed, all code that calls torch's DataLoader, under whatever name, gets a loader of ours.
When the last patch is removed, torch's class is what it was before the first.

NOTE [The class stays]: frameworks import torch's class by name, check `isinstance` against it, derive from it, and may
be imported before or after a patch. So no name is replaced: the class remains torch's, and its constructor turns the
object into one of ours, whose class derives from it; for torchdata's class that is a class of its own. A loader of a
subclass keeps its class, and gets our iterators: see `adopted.py`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader as TorchDataLoader

from rayloader.frameworks import adopted
from rayloader.frameworks.readers import check_dispatch
from rayloader.loader import DataLoader, WorkerCount, lost_state
from rayloader.options import OwnArguments
from rayloader.resume.ranks import Ranks

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
        if not adopted.patches:
            adopted.exchange_iterators()
            for loader_class, our_class in _REPLACED.items():
                _replace_constructor(loader_class, our_class)
        if self not in adopted.patches:
            adopted.patches.append(self)

    def remove(self) -> None:
        """Ends the patch; others stay. Loaders that were created remain ours. It may be called more than once."""
        if self in adopted.patches:
            adopted.patches.remove(self)
        if not adopted.patches:
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
    DataLoader((), timeout=1, **{**adopted.defaults(), **defaults})  # checks them
    return Patch(defaults)


def _replace_constructor(loader_class: type, our_class: type[DataLoader[Any]]) -> None:
    before: Any = vars(loader_class)["__init__"]

    @functools.wraps(before)
    def make_ours(loader: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(loader, DataLoader) or not adopted.patches:
            before(loader, *args, **kwargs)
            return
        own = _own_arguments((*args, *kwargs.values()))
        if type(loader) is loader_class:
            loader.__class__ = our_class
            DataLoader.__init__(loader, *args, **{**own, **kwargs})  # type: ignore[arg-type]
            return
        adopted.adopt(loader, own)
        before(loader, *args, **kwargs)

    loader_class.__init__ = make_ours  # type: ignore[misc]
    _constructors[loader_class] = before, make_ours


def _own_arguments(given: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of our loader that is being rebuilt; the defaults of the patches if there is none.

    Raises:
        StateError: that loader has loaded a state, which would be lost.
        ValueError: see `check_dispatch`.
    """
    source = next((value.loader() for value in given if isinstance(value, WorkerCount)), None)
    if source is None:
        return adopted.defaults()
    if source._state is not None:
        raise lost_state()
    check_dispatch(source)
    names = _OWN if source._ranks is not None else _OWN - set(Ranks._fields)
    return {name: getattr(source, name) for name in names}
