"""Objects of classes that no import finds, as those of a script, in indices and in states: they stay of these classes.

Run as a program, this file prints what a loader gives to the program that it is, where its classes are `__main__`'s:

python test_own_classes.py MAKE WORKERS FILE   saves a state in mid-epoch, or goes on from it
"""

import dataclasses
import enum
import functools
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from probes import Calls
from rayloader import DataLoader


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


def said(kind, record, one):
    """Whether an object is of these classes."""
    return one.number, isinstance(one, record), one.kind is kind.ONE


class Stream(IterableDataset):
    """Has a state of its classes, and says whether it still is; the first worker has it all, and kills itself once."""

    def __init__(self, kind, record, killed=None):
        self.kind, self.record, self.killed = kind, record, killed
        self.at = record(0, kind.ONE)

    def __iter__(self):
        while self.at.number < 12 and not getattr(torch.utils.data.get_worker_info(), "id", 0):
            now, self.at = self.at, dataclasses.replace(self.at, number=self.at.number + 1)
            if now.number == 8 and self.killed is not None and not self.killed.exists():
                self.killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield said(self.kind, self.record, now)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def indexed(kind, record, **options):
    """A loader whose sampler yields objects of the classes."""
    indices = [record(n, kind.ONE) for n in range(12)]
    dataset = Calls(functools.partial(said, kind, record))
    return DataLoader(dataset, 2, sampler=indices, collate_fn=list, **options)


def streamed(kind, record, killed=None, **options):
    """A loader of a stream whose state has some."""
    return DataLoader(Stream(kind, record, killed), 2, collate_fn=list, **options)


EXPECTED = [(number, True, True) for number in range(12)]


@pytest.mark.parametrize(("workers", "num_workers"), [("fork", 2), ("ray", 2), ("fork", 0)])
@pytest.mark.parametrize("make", [indexed, streamed])
def test_they_are_the_programs_own_after_a_state_too(ray_session, make, workers, num_workers):
    """Of the first loader that meets the classes, and of the next one."""
    kind, record = classes()
    for _ in range(2):
        loader, again = (make(kind, record, workers=workers, num_workers=num_workers) for _ in range(2))
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(3)]
        again.load_state_dict(loader.state_dict())
        assert [sample for batch in [*taken, *again] for sample in batch] == EXPECTED
        del iterator


def test_the_state_with_which_a_fork_is_replaced(tmp_path):
    loader = streamed(*classes(), tmp_path / "killed", num_workers=1, workers="fork")
    assert [sample for batch in loader for sample in batch] == EXPECTED
    assert loader.stats().epoch.restarts == 1


@pytest.mark.parametrize("workers", ["fork", "ray"])
@pytest.mark.parametrize("make", ["indexed", "streamed"])
def test_a_state_leads_on_in_another_run_of_the_program(tmp_path, make, workers):
    """There the classes have other ids."""
    import programs  # the program of this file does not find it

    found = []
    for _ in range(2):
        done = programs.run(Path(__file__), make, workers, tmp_path / "state")
        assert done.returncode == 0, done.stderr
        found += eval(done.stdout.splitlines()[-1])
    assert found == EXPECTED


def main(make, workers, path):
    loader = globals()[make](Kind, Record, workers=workers, num_workers=2)
    if Path(path).exists():
        loader.load_state_dict(torch.load(path, weights_only=False))
        batches = [*loader]
    else:
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(2)]
        torch.save(loader.state_dict(), path)
    print([sample for batch in batches for sample in batch])


if __name__ == "__main__":
    main(*sys.argv[1:])
