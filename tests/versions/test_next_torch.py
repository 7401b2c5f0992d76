"""The type parameters of torch's classes differ between its versions, and mean nothing when a program runs.

Here torch's loader is compiled with another head of its class, in the program and in its workers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises

# Each process imports it first, because it is in a folder of PYTHONPATH.
SITECUSTOMIZE = """
import importlib.machinery, os, sys

class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        source, head = self.get_source(name), "\\nclass DataLoader(Generic[_T_co]):\\n"
        assert head in source
        parameters = ["", "Generic[_T_co]", "Generic[_T_co, _B]"][int(os.environ["PARAMETERS"])]
        other = f"\\n_B = TypeVar('_B')\\nclass DataLoader({parameters}):\\n"
        return compile(source.replace(head, other), self.path, "exec", dont_inherit=True)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torch.utils.data.dataloader":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = Loader(name, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
"""

PROGRAM = """
import sys
from typing import TypeVar
import torch.utils.data as data
from torch.utils.data import graph_settings

def refuse(kind, parameters):
    raise TypeError(f"{kind} has no type parameters")

for kind in data.Dataset, data.IterableDataset, data.Sampler, data.BatchSampler, data.DistributedSampler:
    kind.__class_getitem__ = classmethod(refuse)

import rayloader
import rayloader.cli.doctor

T = TypeVar("T")

class OfInt(rayloader.DataLoader[int]):
    pass

class OfAny(rayloader.DataLoader[T]):
    pass

class Parameters:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return len(getattr(data.DataLoader, "__parameters__", ()))

for kind in rayloader.DataLoader, rayloader.DataLoader[int], rayloader.DataLoader[int, str], OfInt, OfAny[int]:
    loader = kind(Parameters(), 2, num_workers=int(sys.argv[1]), num_replicas=1, rank=0)
    assert isinstance(loader, data.DataLoader)
    assert loader.state_dict()
    print(*[batch.tolist() for batch in loader])
"""


KEYWORDS = """
import inspect, sys
import torch.utils.data as data

init = data.DataLoader.__init__

def newer(self, *arguments, worker_method="process", **named):
    if worker_method not in ("process", "thread"):
        raise ValueError(f"worker_method is {worker_method!r}")
    self.worker_method = worker_method
    init(self, *arguments, **named)

data.DataLoader.__init__ = newer
import rayloader

def message(kind, **named):
    try:
        kind(range(4), **named)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)

loader = rayloader.DataLoader(range(4), num_workers=int(sys.argv[1]), worker_method="process")
assert loader.worker_method == "process"
assert "worker_method" in inspect.signature(rayloader.DataLoader).parameters
assert [int(batch) for batch in loader] == [0, 1, 2, 3]
for named in {"worker_method": "x"}, {"unknown": 1}:
    assert message(rayloader.DataLoader, **named) == message(data.DataLoader, **named) != None, named
kind, text = message(rayloader.DataLoader, worker_method="thread")
assert kind == "ValueError" and "rayloader has processes" in text
"""


def run(program: str, num_workers: int, **variables: str) -> str:
    """What a program prints."""
    command = [sys.executable, "-c", program, str(num_workers)]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("num_workers", [0, 1])
def test_keywords_that_only_torchs_class_knows_are_handed_on_to_it(num_workers: int) -> None:
    run(KEYWORDS, num_workers)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("parameters", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_the_loader_works_with_any_number_of_type_parameters(tmp_path: Path, parameters: int, num_workers: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    printed = run(PROGRAM, num_workers, PYTHONPATH=path, PARAMETERS=str(parameters))
    assert printed.splitlines() == [str([parameters, parameters])] * 5
