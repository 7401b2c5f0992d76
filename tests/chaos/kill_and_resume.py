"""Random kills and resumptions: every batch must be that of the undisturbed run.

Motive: tests of faults strike where somebody thought of it; nobody had thought of the last batches of an epoch, and of
the moment between two epochs.
Method: one random story after the other, each of its own seed: map-style datasets and streams, with and without state,
among them streams that take over a loaded position only when their generator first runs; fresh and persistent workers;
two to four epochs, some broken off. First the story is told undisturbed. Then workers, or the process that forks them,
get SIGKILL, most of them near the beginning or the end of an epoch or between two; and the run is saved and goes on in
a new loader, in the last epoch with another number of workers. Workers are forks: actors are `chaos.py`'s.
Command: python tests/chaos/kill_and_resume.py [--seconds N] [--seed N] [--only N]; --only repeats one story.
Results with --seconds 1800: in docs/decisions.md, "Stories of kills and resumptions".
Exit status: 0 if some process was killed, some run resumed, and each story was right; else 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import logging
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from rayloader import DataLoader

STORY_LIMIT_S = 300  # on expiry it counts as hanging
pause = 0.0  # seconds for a sample


class Drawing(Dataset[Any]):
    """Samples with random numbers of all three global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(pause)
        return torch.tensor([index, float(torch.rand(())), random.random(), np.random.rand()])


class Counting(Drawing):
    """Its samples depend on how many it has given, which is its state."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.calls)])])

    def state_dict(self) -> Any:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = state["calls"]


class Stream(IterableDataset[Any]):
    """The streams of a loader's workers are not equally long."""

    def __init__(self, length: int) -> None:
        self.length = length

    def _sample(self, number: int) -> Any:
        time.sleep(pause)
        return torch.tensor([number, float(torch.rand(()))])

    def _numbers(self, first: int = 0) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        return iter(range(worker, self.length + self.length // 5 * worker, workers)[first:])

    def __iter__(self) -> Iterator[Any]:
        return map(self._sample, self._numbers())


class Late(Stream):
    """It takes over a loaded position when its generator first runs, and tells the old one until then."""

    position, loaded = 0, None

    def __iter__(self) -> Iterator[Any]:
        self.position, self.loaded = self.loaded or 0, None
        for number in self._numbers(self.position):
            self.position += 1
            yield self._sample(number)
        self.position = 0

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state["position"]


KINDS = {kind.__name__: kind for kind in (Drawing, Counting, Stream, Late)}


@dataclass
class Story:
    """What is done; what disturbs it is by (epoch, step), where a step of -1 is before `iter()`."""

    kind: str
    length: int
    seed: int
    shuffle: bool | None
    options: dict[str, Any]
    epochs: int
    breaks: dict[int, int] = field(default_factory=dict)  # steps after which epochs are broken off
    kills: dict[tuple[int, int], str] = field(default_factory=dict)
    resumes: dict[tuple[int, int], int] = field(default_factory=dict)  # with so many workers
    killed: int = 0
    resumed: int = 0

    def loader(self, **other: Any) -> Any:
        dataset = KINDS[self.kind](self.length)
        return DataLoader(dataset, shuffle=self.shuffle, workers="fork", **{**self.options, **other})

    def tell(self, choice: random.Random) -> list[list[Any]]:
        """The batches of each epoch."""
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        np.random.seed(self.seed)
        loader, found = self.loader(), []
        for epoch in range(self.epochs):
            self._disturb((epoch, -1), choice)
            iterator, batches = iter(loader), []
            while len(batches) != self.breaks.get(epoch):
                at = epoch, len(batches)
                self._disturb(at, choice)
                if at in self.resumes:
                    state = loader.state_dict()
                    loader = self.loader(num_workers=self.resumes[at])
                    loader.load_state_dict(state)
                    iterator = iter(loader)
                    self.resumed += 1
                if (batch := next(iterator, None)) is None:
                    break
                batches.append(batch.tolist())
            found.append(batches)
            del iterator
        return found

    def _disturb(self, at: tuple[int, int], choice: random.Random) -> None:
        zygotes = copies(psutil.Process())
        forks = [fork for zygote in zygotes for fork in copies(zygote)]
        victims = {
            "": [],
            "one": choice.sample(forks, min(1, len(forks))),
            "two": choice.sample(forks, min(2, len(forks))),
            "all": forks,
            "zygote": zygotes,
        }[self.kills.get(at, "")]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                victim.send_signal(signal.SIGKILL)
        self.killed += len(victims)


def copies(process: psutil.Process) -> list[psutil.Process]:
    """The children of a process that are forks of this one."""
    found = []
    try:
        for child in process.children():
            if child.status() != psutil.STATUS_ZOMBIE and child.cmdline() == psutil.Process().cmdline():
                found.append(child)
    except psutil.NoSuchProcess:
        pass
    return found


def invented(choice: random.Random) -> Story:
    """A story of which nothing is disturbed yet."""
    kind, length = choice.choice(list(KINDS)), choice.choice([6, 25, 60, 150])
    options = {
        "batch_size": choice.choice([1, 1, 3]),
        "num_workers": choice.choice([1, 2, 3]),
        "prefetch_factor": choice.choice([9, 2, 1, 2]),
        "persistent_workers": choice.random() < 0.7,
        "max_worker_restarts": 50,
    }
    if kind == "Drawing" and choice.random() < 0.3:
        options |= {"seeding": "batch", "scheduling": choice.choice(["static", "dynamic"])}
    epochs = choice.choice([2, 3, 4])
    breaks = {epoch: choice.choice([1, 2, 5, length // 2]) for epoch in range(epochs) if choice.random() < 0.2}
    shuffle = choice.random() < 0.5 if kind in ("Drawing", "Counting") else None
    return Story(kind, length, choice.randrange(1000), shuffle, options, epochs, breaks)


def disturb(story: Story, lengths: list[int], choice: random.Random) -> None:
    """Kills and resumptions, most of them near the beginnings and ends of epochs."""
    for epoch, length in enumerate(lengths):
        near = [-1, 0, 1, length - 1, length, max(0, length - choice.randrange(1, 13)), choice.randrange(length + 1)]
        for _ in range(choice.choice([0, 1, 1, 2])):
            story.kills[epoch, choice.choice(near)] = choice.choice(["one"] * 6 + ["two", "two", "all", "zygote"])
        if choice.random() < 0.4 and epoch not in story.breaks:
            at = max(0, choice.choice(near))
            if 0 < at < length:  # before the first batch, streams of late positions are warned of
                # The number of the state's workers holds for its epoch; later ones depend on the loader's own.
                is_last = epoch == len(lengths) - 1
                story.resumes[epoch, at] = choice.choice([1, 2, 3]) if is_last else story.options["num_workers"]


def told(number: int, *, only: bool) -> tuple[str, Story]:
    """How a story has ended."""
    global pause
    choice = random.Random(number)
    story, pause = invented(choice), 0.0
    try:
        signal.alarm(STORY_LIMIT_S)
        right = story.tell(choice)
        pause = choice.choice([0.0, 0.0003, 0.001])
        disturb(story, list(map(len, right)), choice)
        return ("right" if story.tell(choice) == right else "WRONG"), story
    except Exception as error:
        if only:
            traceback.print_exc()
        return f"{type(error).__name__}: {str(error)[:200]}", story
    finally:
        signal.alarm(0)


def hangs(*_: object) -> None:
    faulthandler.dump_traceback(all_threads=True)
    raise TimeoutError("it hangs")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="the number of one story")
    asked = parser.parse_args()
    only = asked.only is not None
    warnings.simplefilter("ignore")
    logging.getLogger("rayloader").setLevel(logging.WARNING if only else logging.ERROR)
    signal.signal(signal.SIGALRM, hangs)
    ends: collections.Counter[str] = collections.Counter()
    number, until, killed, resumed = 100_000 * asked.seed, time.monotonic() + asked.seconds, 0, 0
    while time.monotonic() < until:
        end, story = told(asked.only if only else number, only=only)
        ends[end] += 1
        killed, resumed, number = killed + story.killed, resumed + story.resumed, number + 1
        if end != "right":
            print(f"story {asked.only if only else number - 1}: {end}\n  {story}", flush=True)
        if only:
            break
    print(f"{sum(ends.values())} stories, {killed} processes killed, {resumed} runs resumed: {dict(ends)}")
    return int(set(ends) != {"right"} or not (only or (killed and resumed)))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
