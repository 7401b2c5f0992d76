"""Damages states in many ways, and uses what is left; run by itself, because an interpreter may crash.

`python damaging.py state|worker FIRST COUNT` prints, as JSON, what was raised that is no RayloaderError, by the
number of the case. Before each case its number goes to the standard error, so that a crash names the last one.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import random
import resource
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from rayloader import DataLoader, RayloaderError
from rayloader.cli.states import described
from rayloader.random.packed import checked, pack, unpack
from rayloader.random.random_state import RandomState
from rayloader.random.search import search
from rayloader.resume.state import State, as_saved

MEMORY = 2 << 30  # bytes of addresses that the cases may take together


class WithState(IterableDataset):
    """Its state holds what JSON has not."""

    def __iter__(self):
        return iter(range(6))

    def state_dict(self):
        return {"position": torch.tensor(3), 1: "one"}

    def load_state_dict(self, state):
        pass


# ---- states


class Holder(Dataset):
    """Holds generators of all kinds."""

    def __init__(self):
        self.held = [
            random.Random(1),
            np.random.RandomState(2),
            torch.Generator().manual_seed(3),
            *[np.random.Generator(kind(4)) for kind in (np.random.MT19937, np.random.PCG64, np.random.Philox)],
            np.random.SFC64(5),
        ]

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.held[0].gauss(0, 1), self.held[1].rand(), torch.rand(1, generator=self.held[2])
        return index, *[float(one.random()) for one in self.held[3:-1]]


def _numbers(samples: Any) -> list[Any]:
    return samples


def loaders() -> dict[str, Callable[[], DataLoader[Any]]]:
    """Loaders in this process."""
    return {
        "map": lambda: DataLoader(range(20), 4, shuffle=True, generator=torch.Generator().manual_seed(1)),
        "held": lambda: DataLoader(Holder(), 4, shuffle=True, collate_fn=_numbers),
        "ranks": lambda: DataLoader(range(20), 4, sampler=DistributedSampler(range(20), 2, 0)),
        "stream": lambda: DataLoader(WithState(), 2),
        "batch": lambda: DataLoader(range(20), 4, shuffle=True, seeding="batch"),
    }


def states() -> dict[str, Any]:
    """A state of each in the middle of an epoch, as JSON or torch read it."""
    found = {}
    for name, make in loaders().items():
        loader = make()
        iterator = iter(loader)
        next(iterator), next(iterator)
        found[name] = copy.deepcopy(loader.state_dict())
    return found


OTHERS = [None, True, -1, 0, 1, 5, 10**9, 2**63, -(2**63), 10**30, 1.5, float("nan"), "", "x", "os", "state", b""]
OTHERS += [b"x" * 5056, [], [1], {}, {"a": 1}, (), ("tuple",), ("bytes", ""), ("array", "O", "AAAA"), ("words", "AAAA")]


def places_in(obj: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all that a state holds."""
    items = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, (list, tuple)) else ()
    return [path] * bool(path) + [inner for key, value in items for inner in places_in(value, (*path, key))]


def replaced(obj: Any, path: tuple[Any, ...], change: Callable[[Any], Any]) -> Any:
    """The state with something else at a path."""
    if not path:
        return change(obj)
    key, *rest = path
    if isinstance(obj, dict):
        return {**obj, key: replaced(obj[key], tuple(rest), change)}
    return type(obj)([*obj[:key], replaced(obj[key], tuple(rest), change), *obj[key + 1 :]])


def damage_state(state: Any, rng: random.Random) -> Any:
    """The state with one value changed, left out, twice, or in another place."""

    def change(value: Any) -> Any:
        if isinstance(value, str) and value and rng.random() < 0.4:
            place = rng.randrange(len(value))
            return value[:place] + rng.choice("A/+=x0.") + value[place + 1 :]
        if type(value) is int and rng.random() < 0.4:
            return value + rng.choice([-1, 1, 1000, 2**31, -(2**31)])
        if isinstance(value, (list, tuple)) and value and rng.random() < 0.4:
            place = rng.randrange(len(value))
            return type(value)([*value[:place], *value[place + rng.randrange(2) * 2 :]])
        return rng.choice(OTHERS)

    return replaced(state, rng.choice(places_in(state)), change)


def state_cases() -> Callable[[random.Random], None]:
    """Loads one damaged state, and goes on from there."""
    saved, makers = states(), loaders()

    def case(rng: random.Random) -> None:
        name = rng.choice([*saved])
        state = damage_state(saved[name], rng)
        json.dumps(described(State.load(state)))
        loader = makers[name]()
        loader.load_state_dict(state)
        for count, _ in enumerate(loader):
            if count > 20:
                break
        for value in vars(loader.dataset).get("held", ()) if isinstance(loader.dataset, Holder) else ():
            value.random() if hasattr(value, "random") else None

    return case


def worker_cases() -> Callable[[random.Random], None]:
    """Puts generators of a damaged snapshot back, as a worker does."""
    holder = Holder()
    held = search({"dataset": holder})
    packed = pack(RandomState.capture([np.random.default_rng(1)], held=held))

    def case(rng: random.Random) -> None:
        with as_saved():
            found = checked(unpack(damage_state(packed, rng)))
            RandomState(held=found.held).restore((), held)
        for one in holder.held:
            one.random() if hasattr(one, "random") else None

    return case


CASES = {"state": state_cases, "worker": worker_cases}


def main(kind: str, first: int, count: int) -> None:
    """Prints what the cases raise that they must not."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    case, found = CASES[kind](), {}
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for number in range(first, first + count):
        print(number, file=sys.stderr, flush=True)
        try:
            case(random.Random(number))
        except RayloaderError:
            pass
        except BaseException:
            found[number] = traceback.format_exc()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
