"""The import rules of the design: folders say where code runs, Ray stays in few files, and nothing goes in circles.

Folders are told from what a file imports when it is imported itself. The other rules hold for every import statement,
also one inside a function or under `TYPE_CHECKING`: what a file names, it depends on.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import programs

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "rayloader"
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_of(path) for path in SOURCES}
# The parts around the core: it imports each where a program uses it, never at module level.
PARTS = {"actors", "cli", "data", "frameworks", "gpu", "observe", "plans"}
# What of them every program uses: each loader measures.
ALWAYS = {"rayloader.observe", "rayloader.observe.recorder"}
# How many files of the library a program imports that has workers which are forks, and uses no part.
MOST_FILES = 50

# Which folders the files of a folder may import from; "" is the package itself.
MAY_IMPORT = {
    "": {"epoch", "observe", "random", "resume", "transport"},
    "actors": {"", "gpu", "host", "observe", "random", "resume", "transport", "workers"},
    "cli": {"", "actors", "observe", "resume", "transport"},
    "data": {"", "host", "observe", "random", "resume", "transport"},
    "epoch": {"", "host", "observe", "random", "resume", "transport", "workers"},
    "frameworks": {"", "epoch", "observe", "resume"},
    "gpu": {"", "epoch"},
    "host": {"", "observe", "random", "resume", "transport"},
    "observe": {""},
    "plans": {"", "data", "host", "resume"},
    "random": {"", "transport"},
    "resume": {"", "random", "transport"},
    "transport": {""},
    "workers": {"", "resume", "transport"},
}
# What crosses these lines, and why.
EXCEPTIONS = {
    ("rayloader/loader.py", "rayloader.workers.ray_use"): "it must see each fork from the import of the package on",
    ("rayloader/sharing.py", "rayloader.host.shard_info"): "to know whether a stream is divided",
}
MAY_IMPORT_RAY = {"actors"}


def names_in(source: str, at_once: bool = False) -> set[str]:
    """The modules, and names in modules, that a source imports; `at_once`: only when it is imported itself."""
    found, bodies = set(), [[ast.parse(source)]]
    for body in bodies:  # the list grows meanwhile
        for node in body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{'rayloader' if node.level else node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Call) and re.search(r"\b(import_module|__import__)$", ast.unparse(node.func)):
                found |= {str(part.value) for part in node.args if isinstance(part, ast.Constant)}
            is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if at_once and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                bodies.append(node.orelse)
            elif not (at_once and is_later):
                bodies.append(list(ast.iter_child_nodes(node)))
    return found


@cache
def imported(path: str, at_once: bool = False) -> set[str]:
    """The modules of the package that a file of it names."""
    names = [name for name in names_in((ROOT / path).read_text(), at_once) if name.split(".")[0] == "rayloader"]
    return {name if name in MODULES else name.rpartition(".")[0] or name for name in names}


def is_of(names: set[str], package: str) -> bool:
    return any(name.split(".")[0] == package for name in names)


def folder(module: str) -> str:
    """Where a module of the package is."""
    parts = module.split(".")[1:]
    return parts[0] if parts and (len(parts) > 1 or PACKAGE.joinpath(*parts).is_dir()) else ""


def test_a_file_imports_from_the_folders_that_its_own_may_import_from() -> None:
    """When it is imported; a function may import what it uses."""
    for path in set(SOURCES) - {"rayloader/__main__.py"}:
        for module in imported(path, at_once=True):
            allowed = MAY_IMPORT[folder(module_of(path))] | {folder(module_of(path))}
            assert folder(module) in allowed or (path, module) in EXCEPTIONS, f"{path} imports {module}"


def test_the_core_imports_parts_only_where_they_are_used() -> None:
    core = [path for path in SOURCES if folder(module_of(path)) not in PARTS and path != "rayloader/__main__.py"]
    found = {(path, module) for path in core for module in imported(path, at_once=True) - ALWAYS}
    assert {(path, module) for path, module in found if folder(module) in PARTS} == set()


def in_circles(needs: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left once all has gone that needs nothing of what is left."""
    while free := {one for one, others in needs.items() if not others & needs.keys() - {one}}:
        needs = {one: others for one, others in needs.items() if one not in free}
    return needs


def test_no_folders_and_no_imports_go_in_circles() -> None:
    assert not in_circles({here: others - {""} for here, others in MAY_IMPORT.items() if here})
    assert not in_circles({module_of(path): imported(path) for path in SOURCES})
    assert in_circles({"a": {"b"}, "b": {"a"}})


def private_names(source: str) -> set[str]:
    """Private modules, and private names of modules, of the packages that rayloader is built on."""
    names = names_in(source) | {
        ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    }
    return {name for name in names if re.match(r"(torch|ray|cloudpickle)\..*?\b_(?!_)", name)}


def test_private_names_of_others_are_in_the_compat_files() -> None:
    """Ray's are texts there: see test_compat_ray.py."""
    for source in ("from torch import _utils", "import ray._private", "x = torch._C.f()", "from torch._utils import f"):
        assert private_names(source)
    assert [path for path in SOURCES if private_names((ROOT / path).read_text())] == ["rayloader/_compat.py"]


def test_only_the_folders_that_know_ray_import_it() -> None:
    others = [path for path in SOURCES if folder(module_of(path)) not in MAY_IMPORT_RAY]
    assert [path for path in others if is_of(names_in((ROOT / path).read_text()), "ray")] == []


def test_the_schedule_imports_the_standard_library_only() -> None:
    pure = {f"rayloader.epoch.{name}" for name in ("schedule", "messages")} | {"rayloader.task"}
    for path in [f"{module.replace('.', '/')}.py" for module in pure]:
        names = {name.split(".")[0] for name in names_in((ROOT / path).read_text())}
        assert "typing" in names or "dataclasses" in names
        assert names <= sys.stdlib_module_names | {"rayloader"}
        assert imported(path) <= pure


def test_a_program_with_forks_imports_the_core_alone_and_nothing_of_ray() -> None:
    program = """
import sys
import rayloader

def imported(*_):
    return sorted(name for name in sys.modules if name.split(".")[0] in ("rayloader", "ray"))

in_forks = list(rayloader.DataLoader(range(20), 10, num_workers=2, collate_fn=imported))
assert {*in_forks[0], *in_forks[1]} <= {*imported()}, "in a fork"
print(*imported())
assert len(list(rayloader.DataLoader(range(4), batch_size=2))) == 2
assert "ray" not in imported(), "num_workers=0"
import ray
assert "ray" in imported()
"""
    done = programs.run(program)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert {module for module in modules if folder(module) in PARTS} == ALWAYS
    assert not is_of(modules, "ray")
    assert "rayloader.epoch.engine" in modules
    assert len(modules) <= MOST_FILES


def test_nobody_waits_within_ray():
    """NOTE [waiting] in workers/connection.py: what signal handlers raise there ends as SystemError, or is lost.

    Without a time limit or with one of 0, in the user's thread or in another.
    """
    waiting = re.compile(r"ray\.(get|wait)\(")
    files = [name for name in SOURCES if waiting.search((ROOT / name).read_text())]
    assert files == ["rayloader/actors/process.py"], "this is an actor, without handlers"
