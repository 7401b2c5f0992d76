"""Objects of classes that no import finds, as those of a script, in indices and in states: they stay of these classes.

Run as a program, this file prints what a loader gives to the program that it is, where its classes are `__main__`'s:

python test_own_classes.py MAKE WORKERS NUM_WORKERS FILE   saves a state in mid-epoch, or goes on from it
"""

import dataclasses
import enum
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from rayloader import DataLoader

LIMIT = 500  # seconds for a program; on expiry the test fails
KINDS = [("fork", 2), ("ray", 2), ("fork", 0)]


def classes():
    """Two classes that only this call has made."""

    class Kind(enum.Enum):
        ONE = 1

    @dataclasses.dataclass(frozen=True)
    class Record:
        number: int
        kind: Kind

    return Kind, Record


Kind, Record = classes()
for one in Kind, Record:  # those of the program are where their names say
    one.__qualname__ = one.__name__


class Records(Dataset):
    """Says of each index whether it is of its classes."""

    def __init__(self, kind, record):
        self.kind, self.record = kind, record

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return index.number, isinstance(index, self.record), index.kind is self.kind.ONE


class Stream(IterableDataset):
    """Has a state of its classes, and says whether it still is."""

    def __init__(self, kind, record):
        self.kind, self.record = kind, record
        self.at = record(0, kind.ONE)

    def __iter__(self):
        while self.at.number < 12:
            now, self.at = self.at, dataclasses.replace(self.at, number=self.at.number + 1)
            yield now.number, isinstance(now, self.record), now.kind is self.kind.ONE

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def indexed(kind, record, **options):
    """A loader whose sampler yields objects of the classes."""
    return DataLoader(
        Records(kind, record), 2, sampler=[record(n, kind.ONE) for n in range(12)], collate_fn=list, **options
    )


def streamed(kind, record, **options):
    """A loader of a stream whose state has some."""
    return DataLoader(Stream(kind, record), 2, collate_fn=list, **options)


def expected(number):
    return number, True, True


@pytest.mark.parametrize(("workers", "num_workers"), KINDS)
def test_indices(ray_session, workers, num_workers):
    """Of the first loader that meets the classes, and of the next one."""
    kind, record = classes()
    for _ in range(2):
        loader = indexed(kind, record, workers=workers, num_workers=num_workers)
        assert [sample for batch in loader for sample in batch] == [*map(expected, range(12))]


@pytest.mark.parametrize(("workers", "num_workers"), [("fork", 1), ("ray", 1), ("fork", 0)])
def test_the_state_of_a_dataset(ray_session, workers, num_workers):
    kind, record = classes()
    for _ in range(2):
        loader = streamed(kind, record, workers=workers, num_workers=num_workers)
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
        again = streamed(kind, record, workers=workers, num_workers=num_workers)
        again.load_state_dict(state)
        rest = [*again]
        assert [sample for batch in [*taken, *rest] for sample in batch] == [*map(expected, range(12))]
        del iterator


def test_the_state_with_which_a_fork_is_replaced(tmp_path):
    kind, record = classes()
    told = tmp_path / "pid"

    class Killed(Stream):
        def __iter__(self):
            for sample in super().__iter__():
                if sample[0] == 8 and not told.exists():
                    told.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                yield sample

    loader = DataLoader(Killed(kind, record), 2, collate_fn=list, num_workers=1, workers="fork")
    assert [sample for batch in loader for sample in batch] == [*map(expected, range(12))]
    assert loader.stats().epoch.restarts == 1


@pytest.mark.parametrize(("workers", "num_workers"), KINDS)
@pytest.mark.parametrize("make", ["indexed", "streamed"])
def test_a_state_leads_on_in_another_run_of_the_program(tmp_path, make, workers, num_workers):
    """There the classes have other ids."""
    said = []
    for _ in range(2):
        command = [sys.executable, Path(__file__), make, workers, str(num_workers), tmp_path / "state"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
        assert done.returncode == 0, done.stderr
        said += done.stdout.splitlines()[-1].split()
    each = [str(number) for number in range(12)]
    if make == "streamed" and num_workers == 2:  # both workers read all of it
        each = sorted(each * 2, key=int)
        said = sorted(said, key=int)
    assert said == each


def main(make, workers, num_workers, path):
    torch.manual_seed(3)
    loader = globals()[make](Kind, Record, workers=workers, num_workers=int(num_workers))
    if Path(path).exists():
        loader.load_state_dict(torch.load(path, weights_only=False))
        batches = [*loader]
    else:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(2)]
        torch.save(loader.state_dict(), path)
    samples = [sample for batch in batches for sample in batch]
    assert all(right for _, *each in samples for right in each), samples
    print(*[number for number, *_ in samples])


if __name__ == "__main__":
    main(*sys.argv[1:])
