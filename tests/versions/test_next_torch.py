"""The type parameters of torch's classes differ between its versions, and mean nothing when a program runs.

Here torch's loader is compiled with another head of its class, in the program and in its workers.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HANG_LIMIT = 240  # seconds; on expiry subprocess.run kills the program and raises

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


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("parameters", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_the_loader_works_with_any_number_of_type_parameters(tmp_path: Path, parameters: int, num_workers: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (program := tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, program, str(num_workers)],
        env={**os.environ, "PYTHONPATH": path, "PARAMETERS": str(parameters)},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([parameters, parameters])] * 5
