"""Keywords that only the next torch's loader knows are handed on to it, or are its errors."""

import subprocess
import sys

HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises

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
    loader = rayloader.DataLoader[int](range(4), num_workers=workers, worker_method="process")
    assert loader.worker_method == "process"
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
assert "worker_method" in inspect.signature(rayloader.DataLoader).parameters
for named in {"worker_method": "x"}, {"unknown": 1}:
    assert message(rayloader.DataLoader, **named) == message(data.DataLoader, **named) != None, named
kind, text = message(rayloader.DataLoader, worker_method="thread")
assert kind == "ValueError" and "rayloader has processes" in text
"""


def test_keywords_that_only_torchs_class_knows_are_handed_on_to_it() -> None:
    done = subprocess.run([sys.executable, "-c", KEYWORDS], capture_output=True, text=True, timeout=HANG_LIMIT)
    assert done.returncode == 0, done.stderr
