"""A torch whose classes have other type parameters, or whose loader knows more keywords, works too.

The type parameters differ between torch's versions, and mean nothing when a program runs. Here torch's loader is
compiled with another head of its class.
"""

import subprocess
import sys

import pytest

HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises

PARAMETERS = """
import sys
from importlib.machinery import SourceFileLoader

get_code = SourceFileLoader.get_code

def other(self, name):
    if name != "torch.utils.data.dataloader":
        return get_code(self, name)
    source, head = self.get_source(name), "\\nclass DataLoader(Generic[_T_co]):\\n"
    assert head in source
    new = f"\\n_B = TypeVar('_B')\\nclass DataLoader({sys.argv[1]}):\\n"
    return compile(source.replace(head, new), self.path, "exec", dont_inherit=True)

SourceFileLoader.get_code = other

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

for kind in rayloader.DataLoader, rayloader.DataLoader[int], rayloader.DataLoader[int, str], OfInt, OfAny[int]:
    for workers in 0, 1:
        loader = kind(range(2), 2, num_workers=workers, num_replicas=1, rank=0)
        assert isinstance(loader, data.DataLoader)
        assert loader.state_dict()
        assert [batch.tolist() for batch in loader] == [[0, 1]]
print(len(getattr(data.DataLoader, "__parameters__", ())))
"""

KEYWORDS = """
import inspect
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

for workers in 0, 1:
    loader = rayloader.DataLoader(range(4), num_workers=workers, worker_method="process")
    assert loader.worker_method == "process"
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
assert "worker_method" in inspect.signature(rayloader.DataLoader).parameters
for named in {"worker_method": "x"}, {"unknown": 1}:
    assert message(rayloader.DataLoader, **named) == message(data.DataLoader, **named) != None, named
kind, text = message(rayloader.DataLoader, worker_method="thread")
assert kind == "ValueError" and "rayloader has processes" in text
"""


@pytest.mark.parametrize(
    ("program", "argument", "printed"),
    [(PARAMETERS, "", "0"), (PARAMETERS, "Generic[_T_co, _B]", "2"), (KEYWORDS, "", "")],
    ids=["no type parameters", "two", "keywords that only torch's class knows"],
)
def test_the_loader_works_with_the_next_torch(program: str, argument: str, printed: str) -> None:
    command = [sys.executable, "-c", program, argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_LIMIT)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr
