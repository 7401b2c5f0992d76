"""The import rules of the design: Ray stays in two files, the schedule stays pure.

The rules hold for every import statement, also one inside a function or under `TYPE_CHECKING`: what a file
names, it depends on.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rayloader"
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))

LAYOUT = {
    "rayloader/__init__.py",
    "rayloader/loader.py",
    "rayloader/iterator.py",
    "rayloader/epoch.py",
    "rayloader/schedule.py",
    "rayloader/messages.py",
    "rayloader/session.py",
    "rayloader/crew.py",
    "rayloader/pool.py",
    "rayloader/lifetimes.py",
    "rayloader/placement.py",
    "rayloader/janitor.py",
    "rayloader/worker.py",
    "rayloader/process_state.py",
    "rayloader/errors.py",
    "rayloader/collate.py",
    "rayloader/shared_list.py",
    "rayloader/transport/codec.py",
    "rayloader/transport/raw.py",
    "rayloader/transport/bulk.py",
    "rayloader/transport/plain.py",
    "rayloader/transport/line.py",
    "rayloader/protocol.py",
    "rayloader/channel.py",
    "rayloader/pace.py",
    "rayloader/prefetch.py",
    "rayloader/random_state.py",
    "rayloader/transport/arena.py",
    "rayloader/transport/image.py",
    "rayloader/transport/mapped.py",
    "rayloader/transport/memory.py",
    "rayloader/transport/memory_file.py",
    "rayloader/transport/replica.py",
    "rayloader/transport/lanes.py",
    "rayloader/delivery/pinning.py",
}
IMPORT_CALL = re.compile(r"\b(import_module|__import__)$")
NEED_RAY = "session", "crew", "pool", "lifetimes", "placement", "worker", "protocol", "channel"
MAY_IMPORT_RAY = {f"rayloader/{name}.py" for name in NEED_RAY}


def imported(source: str) -> set[str]:
    """Top-level names of all modules that a source imports; a relative import counts as `rayloader`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("rayloader" if node.level else str(node.module))
        elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
            found |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
    return {name.split(".")[0] for name in found}


def imported_from_rayloader(source: str) -> set[str]:
    """The modules of the package that a source names."""
    nodes = ast.walk(ast.parse(source))
    found = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name for name in found if name.startswith("rayloader")}


@pytest.mark.parametrize(
    "source",
    [
        "import ray",
        "import torch, ray.util as u",
        "from ray.actor import ActorHandle",
        "def f():\n    if True:\n        import ray",
        "if TYPE_CHECKING:\n    from ray import ObjectRef",
        "importlib.import_module('ray.data')",
        "__import__('ray')",
    ],
)
def test_every_way_to_import_ray_is_seen(source: str) -> None:
    assert "ray" in imported(source)


def test_what_is_no_import_of_ray_is_not_taken_for_one() -> None:
    source = "from .ray import x\nimport rayloader\nimport torch.ray\nray = 'ray'"
    assert imported(source) == {"rayloader", "torch"}


def test_the_layout_is_there() -> None:
    assert set(SOURCES) >= LAYOUT


@pytest.mark.parametrize("path", sorted(set(SOURCES) | LAYOUT))
def test_only_the_files_that_know_ray_import_it(path: str) -> None:
    if path not in MAY_IMPORT_RAY:
        assert "ray" not in imported((ROOT / path).read_text())


def test_ray_is_used_where_it_may_be() -> None:
    """Else the rule above would pass on files that it does not understand."""
    assert "ray" in imported((PACKAGE / "pool.py").read_text())


def test_the_schedule_imports_the_standard_library_only() -> None:
    for name in ("schedule.py", "messages.py", "pace.py"):
        modules = imported((PACKAGE / name).read_text())
        assert modules
        assert modules <= sys.stdlib_module_names | {"rayloader"}
    assert imported_from_rayloader((PACKAGE / "schedule.py").read_text()) == {"rayloader.messages"}


def test_importing_rayloader_and_loading_in_process_leaves_ray_alone() -> None:
    program = """
import sys
import rayloader
assert "torch" in sys.modules
assert "ray" not in sys.modules, "import rayloader imports ray"
assert len(list(rayloader.DataLoader(range(4), batch_size=2))) == 2
assert "ray" not in sys.modules, "num_workers=0 imports ray"
import ray
assert "ray" in sys.modules
print("checked")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("checked\n", 0), done.stderr
