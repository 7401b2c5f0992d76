"""The mutants that `make mutants` makes: each differs in one place, and none where no mutant is asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "mutants"))
import mutation

SOURCE = '''
from __future__ import annotations


class Counter:
    def __init__(self, lock):
        self.lock = lock
        self.seen = []

    def add(self, number):
        """Adds it, unless it is as large as the limit."""
        with self.lock:
            if number < 5:
                self.seen.append(number)
        return self.seen
'''
PROGRAM = """
import json
from rayloader.epoch.counter import Counter

class Lock:
    taken = 0
    def __enter__(self):
        self.taken += 1
    def __exit__(self, *error):
        pass

try:
    counter = Counter(Lock())
    found = [counter.add(number) for number in (4, 5)][-1], counter.lock.taken
except AttributeError:
    found = "no attribute"
print(json.dumps(found))
"""
EXPECTED = {
    "a statement is dropped: self.lock = lock": "no attribute",
    "a statement is dropped: self.seen = []": "no attribute",
    "a statement is dropped: self.seen.append(number)": [[], 2],
    "a comparison is turned: number < 5": [[4, 5], 2],
    "a constant is moved: 5": [[4, 5], 2],
    "a function returns at once: def add": [None, 0],
    "a lock is not taken: with self.lock:": [[4], 0],
}


@pytest.fixture
def library(tmp_path):
    library = tmp_path / "rayloader"
    (library / "epoch").mkdir(parents=True)
    for name in ("__init__.py", "epoch/__init__.py"):
        (library / name).touch()
    (library / "epoch" / "counter.py").write_text(SOURCE)
    return library


def run(library, **variables):
    environment = {**os.environ, "PYTHONPATH": str(library.parent), **variables}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=library.parent, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def test_each_mutant_differs_and_the_original_does_not(library):
    assert len(mutation.choose(library, 3, seed=1)) == 3
    assert mutation.choose(library, 3, seed=1) == mutation.choose(library, 3, seed=1)
    chosen = mutation.choose(library, 100, seed=0)
    assert {f"{site.kind}: {site.text}" for site in chosen} == set(EXPECTED)
    mutation.write(library, chosen)
    reached = library / "reached"
    reached.write_bytes(bytes(65536))
    assert run(library, **{mutation.REACHED: str(reached)}) == [[4], 2]
    assert sum(reached.read_bytes()) == len(chosen)
    found = {
        f"{site.kind}: {site.text}": run(library, **{mutation.ACTIVE: str(number)})
        for number, site in enumerate(chosen)
    }
    assert found == EXPECTED
