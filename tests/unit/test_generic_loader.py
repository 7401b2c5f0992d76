"""torch's loader may have another number of type parameters in other versions: ours has one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANG_LIMIT = 120  # seconds; on expiry subprocess.run kills the program and raises

PROGRAM = """
from typing import Generic, TypeVar

import torch.utils.data

T, B = TypeVar("T"), TypeVar("B")
plain = torch.utils.data.DataLoader
{variant}
torch.utils.data.DataLoader = DataLoader

import rayloader

assert issubclass(rayloader.DataLoader, DataLoader)
class Own(rayloader.DataLoader[int]):
    pass
for loader in (rayloader.DataLoader, rayloader.DataLoader[int], Own):
    assert [batch.tolist() for batch in loader(range(4), batch_size=2)] == [[0, 1], [2, 3]]
try:
    rayloader.DataLoader[int, str]
except TypeError:
    print("checked")
"""
VARIANTS = {
    "none": "class DataLoader(plain): pass",
    "one": "class DataLoader(plain, Generic[T]): pass",
    "two": "class DataLoader(plain, Generic[T, B]): pass",
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_loader_is_generic_in_its_samples_whatever_torchs_class_is(variant: str) -> None:
    program = PROGRAM.format(variant=VARIANTS[variant])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG_LIMIT, check=False
    )
    assert (done.stdout, done.returncode) == ("checked\n", 0), done.stderr
