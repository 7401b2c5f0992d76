"""torch's own workers, where this system lacks what rayloader's need: Linux, and a Python that has its means.

Promise: nothing here, and nothing that a loader of such a system imports, needs them.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

from rayloader._compat import MultiProcessIterator
from rayloader.errors import StateError, level_outside
from rayloader.options import Options, check_means, lacking
from rayloader.resume.checkpoint import continuation

# Arguments that change batches, or ask for workers of a kind, with what they are where they ask for nothing.
_OWN = {
    "workers": "auto",
    "ray_remote_args": None,
    "seeding": "worker",
    "scheduling": "static",
    "on_timeout": "raise",
    "on_error": "raise",
    "device": None,
    "skip_steps": None,
}


def torchs_iterator(loader: Any) -> TorchsIterator:
    """An iterator of torch's workers for a loader of ours.

    Raises:
        ValueError: the loader asks for what torch's workers don't have.
        StateError: it has loaded a state from the middle of an epoch, or of persistent workers that had one.
    """
    Options.of(loader)
    for name, default in _OWN.items():
        value = getattr(loader, name)
        if value is not None and not (isinstance(value, (str, dict)) and value in (default, {})):
            check_means(f"{name}={value!r}")
    place = continuation(loader, loader._state, loader.num_workers)[0]
    if place is not None:
        raise no_place("can't be continued", persistent=place.finished)
    _warn(lacking())
    return TorchsIterator(loader)


BETWEEN = object()  # what a loader has as its epoch after one whose workers have ended with it


class TorchsIterator(MultiProcessIterator):
    """torch's iterator, which tells the loader whether its next epoch depends on what these workers have built.

    That is so in the middle of an epoch, and as long as persistent workers live: their random generators go on from
    epoch to epoch, and torch draws the seed for them once.
    """

    def __init__(self, loader: Any) -> None:
        self._reader = weakref.ref(loader)
        super().__init__(loader)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        loader._state = loader._position = None
        self._epoch = loader._torchs_epoch = object()
        super()._reset(loader, first_iter)

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            loader = self._reader()
            if loader is not None and loader._torchs_epoch is self._epoch and not self._persistent_workers:
                loader._torchs_epoch = BETWEEN  # otherwise another one is under way, or follows
            raise


def check_place(loader: Any) -> None:
    """Raises StateError if the loader's next epoch depends on what torch's workers have built."""
    if loader._torchs_epoch not in (None, BETWEEN):
        raise no_place("can't be saved", persistent=bool(loader.persistent_workers))


def no_place(what: str, *, persistent: bool) -> StateError:
    """The error for a state that depends on what torch's workers have built."""
    whose = "what persistent workers have built" if persistent else "the middle of an epoch"
    return StateError(
        f"{whose} {what} with torch's own workers, which are at work here because rayloader's can't be had: "
        f"{lacking()}; save states between epochs, without persistent_workers, or use num_workers=0"
    )


@functools.cache  # says it once
def _warn(why: str) -> None:
    warnings.warn(
        f"rayloader's own workers can't be had here: {why}. Batches come from torch's own workers: the same ones, but "
        "without the speed, the recovery, and the states in the middle of an epoch that rayloader has on Linux",
        stacklevel=level_outside("rayloader", "torch"),
    )
