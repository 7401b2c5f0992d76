"""The Python code in README.md and docs/ runs as it is printed; see `documents.py`.

Blocks that need a process of their own join this process's Ray. All, also what is not run, pass mypy: see test_docs.py.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from documents import BLOCKS, ROOT, Block
from rayloader.frameworks import patching

COMMANDS = {
    "python": [],
    "pytest": ["-m", "pytest", "-p", "no:cacheprovider"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
HANG_LIMIT = 500  # seconds; on expiry subprocess.run kills the program and raises

pytestmark = pytest.mark.usefixtures("ray_session")


def write(block: Block, folder: Path) -> Path:
    path = folder / "block.py"
    path.write_text(block.code)
    return path


@pytest.fixture
def unpatched() -> Iterator[None]:
    """Ends what a program patches to its end, and puts back the start method that it has set."""
    method = multiprocessing.get_start_method(allow_none=True)
    yield
    multiprocessing.set_start_method(method, force=True)
    for patch in list(patching._patches):
        patch.remove()


@pytest.mark.usefixtures("unpatched")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.command == ""], ids=str)
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = str(write(block, tmp_path))
    monkeypatch.setattr(sys, "argv", [program])  # without arguments
    runpy.run_path(program, run_name="__main__")


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in BLOCKS if block.command], ids=str)
def test_a_block_runs_in_a_process_of_its_own(block: Block, tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, *COMMANDS[block.command or ""], write(block, tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
