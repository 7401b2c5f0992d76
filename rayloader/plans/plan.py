"""What all plans have in common, and what each says of itself: a few lines, and one picture.

Promise: a plan is a function. From the same arguments, seed and epoch it gives the same items in any process, for any
number of workers; nothing has to be saved but the epoch. It does not import Ray, and its order is made when it is first
asked for, once an epoch.

NOTE [Readers]. Several iterators and threads may read a plan at once. What is kept for the next one that asks for the
same is a whole that never changes, with its key, and is exchanged in one step (`Latest`); what moves, such as the part
of a mixture at which a reader is, belongs to that reader. And what is made for an epoch never asks the plan which epoch
it is: another thread may have set the next one.

NOTE [Ranks]. An order is made for a number of ranks: a step of the training is `num_replicas` items side by side, one
for each rank, and the order is a whole number of steps. Who deals the items out is none of the plan's business: a
loader's `num_replicas` and `rank`, `Plan.for_rank` for torch's own loader, or a framework that takes the whole order
and knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rayloader.options import check_whole
from rayloader.plans.picture import Panel, write_picture
from rayloader.resume.ranks import Shard
from rayloader.resume.samplers import Planned

Array = npt.NDArray[Any]

_SMALL = 1 << 12  # orders of so many places are drawn at once
_BLOCK = 1 << 16  # places that are shuffled together: they fit into the processor's cache


def shuffled(places: Array, count: int, *key: int) -> Array:
    """What is at these places of a random order of `range(count)`: each time the same, in any part and any process.

    It takes no memory for the order: a place becomes the number at it by steps that can be undone, multiplication by
    an odd number, addition, and `x ^ (x >> half)`, within the next power of two; who falls outside of `count` takes
    the same steps again (cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    Args:
        places: from 0 on, below `count`.
        count: of what is ordered.
        key: which order: seed, epoch and so on, from 0 on.

    Returns:
        Numbers below `count`, as unsigned 64 bits.
    """
    if count <= _SMALL:
        return np.random.default_rng(key).permutation(count)[places.astype(np.int64)].astype(np.uint64)
    bits = (count - 1).bit_length()
    constants = np.random.SeedSequence(key).generate_state(8, np.uint64).reshape(4, 2)
    found = places.astype(np.uint64)
    for begin in range(0, len(found), _BLOCK):
        part = found[begin : begin + _BLOCK]
        _mix(part, bits, constants)
        while (outside := np.flatnonzero(part >= count)).size:
            again = part[outside]
            _mix(again, bits, constants)
            part[outside] = again
    return found


def _mix(numbers: Array, bits: int, constants: Array) -> None:
    mask, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for factor, term in constants:
        numbers *= factor | np.uint64(1)
        numbers += term
        numbers &= mask
        numbers ^= numbers >> half


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Latest(Generic[_Key, _Value]):
    """What was made last, for whoever asks for the same again; see NOTE [Readers]."""

    def __init__(self) -> None:
        self._held: tuple[_Key, _Value] | None = None

    def of(self, key: _Key, make: Callable[[_Key], _Value]) -> _Value:
        """What `make` makes from this key."""
        held = self._held
        if held is None or held[0] != key:
            self._held = held = key, make(key)
        return held[1]


class Order(Sequence[Any]):
    """The items of an epoch, made when they are read.

    Args:
        reader: makes what gives the item at a place. Each iterator has one of its own.
        places: of the items.
    """

    def __init__(self, reader: Callable[[], Callable[[int], Any]], places: range) -> None:
        self._reader, self._places = reader, places
        self._item = reader()

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, key: Any) -> Any:
        return Order(self._reader, self._places[key]) if isinstance(key, slice) else self._item(self._places[key])

    def __iter__(self) -> Iterator[Any]:
        return map(self._reader(), self._places)


class Plan(Planned):
    """A sampler, or a batch sampler, that is a function of its arguments and the epoch.

    Args:
        seed: of the random order, together with the epoch; from 0 on.
        num_replicas: for how many ranks the order is made, where something else than rayloader's loader deals it out.
        drop_last: leave out what does not fill a step of all ranks.

    Attributes:
        epoch: that `iter()` gives next.
    """

    def __init__(self, seed: int, num_replicas: int, drop_last: bool) -> None:
        self.seed, self.num_replicas = check_whole("seed", seed, 0), check_whole("num_replicas", num_replicas, 1)
        self.drop_last = drop_last
        self.epoch = 0
        self._ordered: Latest[tuple[int, int], Order] = Latest()

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next `iter()` gives: each has another order."""
        self.epoch = check_whole("epoch", epoch, 0)

    def order_for(self, num_replicas: int) -> Sequence[Any]:
        """All items of this epoch, made for that number of ranks: rank `r` gets `[r::num_replicas]` of it."""
        return self._ordered.of((self.epoch, num_replicas), self._order)

    def for_rank(self, num_replicas: int, rank: int) -> Shard:
        """This rank's part, for loaders that deal nothing out, such as torch's: one of torch's DistributedSamplers.

        rayloader's loader takes the plan itself, and `num_replicas` and `rank`.
        """
        rank, num_replicas = check_whole("rank", rank, 0), check_whole("num_replicas", num_replicas, rank + 1)
        return Shard(self, num_replicas, rank, seed=self.seed, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order_for(self.num_replicas))

    def __len__(self) -> int:
        return len(self.order_for(self.num_replicas))

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made of the arguments, which copies make themselves."""
        return {name: Latest() if isinstance(value, Latest) else value for name, value in vars(self).items()}

    def describe(self, picture: str | None = None) -> str:
        """What is in this epoch, in words, and on request in one picture.

        Args:
            picture: the path of a PNG file to be written. This needs matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if picture is not None:
            write_picture(self._panels(), picture)
        lines = self._facts()
        width = max(map(len, lines))
        return "\n".join(f"{heading:<{width}}  {line}" for heading, line in lines.items())

    def _order(self, key: tuple[int, int]) -> Order:
        """The order of an epoch, for a number of ranks."""
        raise NotImplementedError

    def _facts(self) -> dict[str, str]:
        """What is told of this epoch: lines, by their headings."""
        raise NotImplementedError

    def _panels(self) -> list[Panel]:
        """What the picture of this epoch shows."""
        raise NotImplementedError


class Batches(NamedTuple):
    """The batches of an epoch, before they are dealt out.

    Attributes:
        take: gives the items between two bounds.
        bounds: where each batch begins in the order of the epoch, in samples or tokens; and the end of the last one.
        costs: of each batch, in any unit: how long it keeps a rank busy.
        tokens: in each batch.
        room: in each batch, padding included.
    """

    take: Callable[[int, int], list[Any]]
    bounds: Array
    costs: Array
    tokens: Array
    room: Array


def taking(samples: Array) -> Callable[[int, int], list[Any]]:
    """How batches are taken of samples that lie one after the other."""
    return lambda begin, end: samples[begin:end].tolist()


class BatchPlan(Plan):
    """A batch sampler: the batches of a step cost nearly the same in all ranks."""

    _gives_batches = True

    def __init__(self, seed: int, num_replicas: int, drop_last: bool) -> None:
        super().__init__(seed, num_replicas, drop_last)
        self._made: Latest[int, Batches] = Latest()

    @property
    def sampler(self) -> BatchPlan:
        """Itself: a batch sampler's sampler is where frameworks look for what they tell the epoch."""
        return self

    def _batches_of(self, epoch: int) -> Batches:
        """The batches of an epoch, in no particular order."""
        return self._made.of(epoch, self._batches)

    def balance(self) -> Array:
        """For each step, the cost of its most expensive batch by the mean cost of its batches: all wait for that one.

        Returns:
            Numbers from 1 on, one a step.
        """
        _, _, costs = self._steps(self.epoch, self.num_replicas)
        return np.asarray(costs.max(axis=1) / costs.mean(axis=1))

    def _steps_in_words(self) -> str:
        """How many steps there are, and how equal the batches of a step are."""
        balance = self.balance()
        if self.num_replicas == 1:
            return f"{len(balance):,} for one rank"
        return (
            f"{len(balance):,} for {self.num_replicas} ranks; the most expensive batch of a step costs "
            f"{balance.mean():.4f} times the mean of the step on average, {balance.max():.3f} at most"
        )

    def _panels(self) -> list[Panel]:
        if self.num_replicas == 1:
            return []
        across = "% by which its most expensive batch costs more than the mean of its batches"
        title, excess = "How unequal the ranks' batches of a step are", {"steps": 100 * (self.balance() - 1)}
        return [Panel(title, across, "steps", excess)]

    def _order(self, key: tuple[int, int]) -> Order:
        begins, ends, _ = self._steps(*key)
        take, begins, ends = self._batches_of(key[0]).take, begins.ravel(), ends.ravel()
        return Order(lambda: lambda place: take(int(begins[place]), int(ends[place])), range(len(begins)))

    def _steps(self, epoch: int, num_replicas: int) -> tuple[Array, Array, Array]:
        """Groups of batches of nearly the same cost, in random order: a row is a step.

        Returns:
            Where each batch begins, where it ends, and what it costs.
        """
        made = self._batches_of(epoch)
        begins, ends, costs = made.bounds[:-1], made.bounds[1:], made.costs.astype(np.float64)
        if not self.drop_last:
            begins, ends, costs = _filled(begins, ends, costs, -len(costs) % num_replicas)
        if not (steps := len(costs) // num_replicas):
            raise ValueError(f"with drop_last each rank must have a batch, got {len(costs)} for {num_replicas} ranks")
        by_cost = np.argsort(-costs, kind="stable")[: steps * num_replicas]
        order = by_cost.reshape(steps, num_replicas)[shuffled(np.arange(steps), steps, self.seed, epoch, 1)]
        return begins[order], ends[order], costs[order]

    def _batches(self, epoch: int) -> Batches:
        """Makes the batches of an epoch."""
        raise NotImplementedError


def _filled(begins: Array, ends: Array, costs: Array, missing: int) -> tuple[Array, Array, Array]:
    """So many batches more: those with the most samples are halved; where only single samples are left, some repeat."""
    while missing:
        sizes = ends - begins
        largest = np.argsort(-sizes, kind="stable")[:missing]
        halved = largest[sizes[largest] > 1]
        if not len(halved):
            repeated = np.arange(len(begins) + missing) % len(begins)
            return begins[repeated], ends[repeated], costs[repeated]
        middle = (begins[halved] + ends[halved]) // 2
        rest = costs[halved] * ((ends[halved] - middle) / sizes[halved])
        begins, ends = np.append(begins, middle), np.append(ends, ends[halved])
        ends[halved], costs = middle, np.append(costs, rest)
        costs[halved] -= rest
        missing -= len(halved)
    return begins, ends, costs
