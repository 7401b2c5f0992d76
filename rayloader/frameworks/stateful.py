"""Our loader in the place of torchdata's StatefulDataLoader: an instance of that class too.

Promise: `isinstance` and `issubclass` find torchdata's class, since trainers ask by it whether a loader keeps its
position, and leave others out of their checkpoints without a word. Nothing else is found there: in the order of the
classes it comes after ours and torch's, which have all of its methods.
"""

from __future__ import annotations

from torch.utils.data import DataLoader as TorchDataLoader
from torchdata.stateful_dataloader import StatefulDataLoader as TorchdatasLoader

from rayloader.loader import DataLoader


class _TorchsFirst(type):
    def mro(cls) -> list[type]:
        order = super().mro()
        order.remove(TorchdatasLoader)
        order.insert(order.index(TorchDataLoader) + 1, TorchdatasLoader)
        return order


class StatefulDataLoader(DataLoader, TorchdatasLoader, metaclass=_TorchsFirst):  # type: ignore[misc,type-arg]
    """What torchdata's class makes while a patch is in force."""
