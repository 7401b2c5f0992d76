"""What the documents name exists: links, files, functions, make targets.

Checked are README.md, CHANGELOG.md, CONTRIBUTING.md and docs/**/*.md:

- relative links lead to a file, their anchors to a heading of it;
- back-ticked paths (`rayloader/epoch/engine.py`, `engine.py`) are files, globs match some;
- back-ticked names are defined: `epoch.py:EpochIterator.close`, `rayloader.DataLoader`, `pool.Pool`,
  `EpochIterator.close` where rayloader defines the class;
- `make x` is a target, in fenced blocks too;
- fenced python blocks parse, and pass mypy; tests/integration/test_documents.py runs them.

Other words in back-ticks (arguments, torch's and Ray's names) are free.
"""

import ast
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from documents import BLOCKS, DOCUMENTS, FENCE, ROOT, commands_of

SOURCE_FOLDERS = ("rayloader", "tests", "examples", "benchmarks")
FOLDERS = (*SOURCE_FOLDERS, "docs", ".ci")

LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"


# --- what the sources define


@cache
def source_files() -> dict[str, Path]:
    """All Python sources by path from the root."""
    files = [*ROOT.glob("*.py"), *(path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path for path in files}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def targets_of(node: ast.AST) -> Iterator[str]:
    """Names that one statement binds; for `self.x = ...` it is `x`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name):
                    yield part.id
                elif isinstance(part, ast.Attribute):
                    yield part.attr


def find_class(name: str) -> ast.ClassDef | None:
    """A class that rayloader defines at top level."""
    for key, path in source_files().items():
        for node in tree(path).body if key.startswith("rayloader/") else []:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
    return None


def has_attribute(owner: ast.ClassDef, name: str) -> bool:
    """Whether a class, or a base of it in rayloader, binds the name.

    What is public and not found may come from a base outside of rayloader.
    """
    if any(name in targets_of(node) for node in ast.walk(owner)):
        return True
    bases = [re.sub(r"\[.*", "", ast.unparse(base)) for base in owner.bases]
    found = [find_class(base) for base in bases if base not in ("Generic", "Protocol")]
    if any(base and has_attribute(base, name) for base in found):
        return True
    return None in found and not name.startswith("_")


def defines(path: Path, dotted: str) -> bool:
    """Whether a source file defines, or imports from rayloader, a dotted name such as `Class.method`."""
    first, *rest = dotted.split(".")
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    owner = find_class(alias.name)
                    return not rest or owner is None or has_attribute(owner, rest[0])
        elif first in targets_of(node):
            return not rest or not isinstance(node, ast.ClassDef) or has_attribute(node, rest[0])
    return False


def resolves(dotted: str) -> bool:
    """Whether `rayloader.a.b.Name` is a module, or a name in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        stem = "/".join(parts[:cut])
        for path in (ROOT / f"{stem}.py", ROOT / stem / "__init__.py"):
            if path.exists():
                return cut == len(parts) or defines(path, ".".join(parts[cut:]))
    return False


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


# --- what the documents say


def outside_fences(text: str) -> str:
    return FENCE.sub("", text)


def anchors(text: str) -> set[str]:
    """Anchors that headings get: lower case, punctuation dropped, blanks to hyphens."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", outside_fences(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def link_problem(target: str, document: Path, text: str) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    name, _, anchor = target.partition("#")
    path = document.parent / name if name else document
    if name and not path.exists():
        return f"link to {target}: no such file"
    if anchor and anchor not in anchors(path.read_text() if name else text):
        return f"link to {target}: no such heading"
    return None


def span_problem(span: str) -> str | None:
    """What is wrong with one back-ticked piece of text, or None."""
    span = span.removesuffix("()")
    if match := re.fullmatch(r"make ([a-z][\w-]*)", span):
        return None if match[1] in make_targets() else f"{span}: no such target in the Makefile"

    if match := re.fullmatch(rf"([\w./-]+\.py):({DOTTED})", span):
        files = [path for key, path in source_files().items() if f"/{key}".endswith(f"/{match[1]}")]
        return None if any(defines(path, match[2]) for path in files) else f"{span}: not defined there"
    if re.fullmatch(r"\w+\.py", span):
        known = {path.name for path in source_files().values()}
        return None if span in known else f"{span}: no such file"
    if re.fullmatch(r"[\w.*/-]+", span) and span.split("/")[0] in FOLDERS and "/" in span:
        return None if any(ROOT.glob(span.rstrip("/"))) else f"{span}: no such file"

    if not re.fullmatch(DOTTED, span):
        return None
    first, *rest = span.split(".")
    if first == "rayloader":
        return None if resolves(span) else f"{span}: not defined"
    if rest and rest[0][0].isupper():
        modules = list((ROOT / "rayloader").rglob(f"{first}.py"))
        if modules and not any(defines(path, ".".join(rest)) for path in modules):
            return f"{span}: not defined there"
    if rest and (owner := find_class(first)) and not has_attribute(owner, rest[0]):
        return f"{span}: {first} has no such attribute"
    return None


def problems(text: str, document: Path) -> list[str]:
    """All that a document names and that does not exist."""
    found = []
    for _, language, code in FENCE.findall(text):
        if language == "python":
            try:
                ast.parse(textwrap.dedent(code))
            except SyntaxError as error:
                found.append(f"python block does not parse: {error}")
        for target in re.findall(r"^\s*(?:\$ )?make ([a-z][\w-]*)", code, re.MULTILINE):
            found.append(span_problem(f"make {target}"))
    prose = outside_fences(text)
    found += [link_problem(target, document, text) for target in LINK.findall(prose)]
    found += [span_problem(span) for span in SPAN.findall(prose)]
    return [problem for problem in found if problem]


# --- the commands in the documents

# What runs each command of the documents: a test, `make`, or nothing, and then why.
COMMANDS = {
    "make ": "the targets exist, see above; CI runs `make test`, and `make test` the demo's program",
    "pip install .": "tests/versions/test_versions.py",
    ".venv/bin/python -m pytest tests/versions": "make test-full",
    "RAYLOADER_OLD_PYTHON=": "it needs an old torch, which takes gigabytes",
    "rayloader doctor": "tests/integration/test_cli.py",
    "rayloader bench": "tests/integration/test_cli.py",
    "rayloader show": "tests/unit/test_inspecting.py",
    "rayloader diff": "tests/unit/test_inspecting.py",
    "rayloader replay": "tests/integration/test_replay.py",
    "python train.py": "tests/integration/test_replay.py",
    "torchrun ": "tests/integration/test_documents.py",
    "ray get-auth-token": "tests/multinode/test_cluster_job.py",
    "ray up cluster.yaml": "tests/unit/test_cluster_yaml.py",
    "ray dashboard cluster.yaml": "needs the machines of a cloud",
    "ray down cluster.yaml": "needs the machines of a cloud",
    "RAY_AUTH_MODE=token ray job submit": "tests/multinode/test_cluster_job.py",
    "ray job submit": "tests/multinode/test_cluster_job.py",
    "export RAY_AUTH_": "needs Kubernetes",
    "docker build": "needs Docker",
    "kubectl ": "needs Kubernetes",
    "python benchmarks/gpu.py": "tests/integration/test_gpu_benchmark.py",
}


# --- tests


@pytest.mark.parametrize("name", DOCUMENTS)
def test_each_command_is_run_by_a_test_or_it_is_known_why_none_can(name: str) -> None:
    for command in commands_of((ROOT / name).read_text()):
        runners = [runner for begin, runner in COMMANDS.items() if command.startswith(begin)]
        assert runners, f"{command}: nothing runs it"
        for path in re.findall(r"^tests/\S+\.py$", runners[0]):
            assert (ROOT / path).exists(), path


def test_every_way_to_run_a_command_is_used() -> None:
    commands = [command for name in DOCUMENTS for command in commands_of((ROOT / name).read_text())]
    assert [begin for begin in COMMANDS if not any(command.startswith(begin) for command in commands)] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_exists(name: str) -> None:
    assert problems((ROOT / name).read_text(), ROOT / name) == []


TYPED = """
import torch

import rayloader

loader = rayloader.DataLoader([1.5], seeding="batch", on_error="skip")
samples: torch.utils.data.Dataset[float] = loader.dataset
for batch in loader:
    print(batch)
iter(loader).nothing  # type: ignore[attr-defined]
rayloader.DataLoader([1], seeding="bath")  # type: ignore[arg-type]
rayloader.DataLoader(1)  # type: ignore[arg-type]
with rayloader.patch(scheduling="dynamic", seeding="batch"):
    pass
rayloader.patch(on_timeout="restat")  # type: ignore[arg-type]
rayloader.patch(nothing=1)  # type: ignore[call-arg]
"""


def test_the_library_and_the_code_in_the_documents_pass_mypy(tmp_path: Path) -> None:
    """In one run, for mypy spends most of its time on torch. It also complains of a `type: ignore` without need."""
    (tmp_path / "typed.py").write_text(TYPED)
    for block in BLOCKS:
        (tmp_path / f"{re.sub(r'[^a-z]', '_', block.document)}_{block.line}.py").write_text(
            "# mypy: allow-subclassing-any" + block.code  # classes of frameworks, which mypy skips
        )
    sources = ["rayloader", *sorted(tmp_path.iterdir())]
    done = subprocess.run([sys.executable, "-m", "mypy", *sources], cwd=ROOT, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    assert len(sources) > 6


@pytest.mark.full
def test_the_readmes_code_passes_pyright(tmp_path: Path) -> None:
    """In the form that comes as a wheel; and the calls above, where a `type: ignore` must hide an error."""
    (tmp_path / "typed.py").write_text(TYPED)
    for block in BLOCKS:
        if block.document == "README.md":
            (tmp_path / f"readme_{block.line}.py").write_text(block.code)
    rules = {"typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(rules))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stderr, done.returncode) == ("", 0), done.stdout
    assert done.stdout.splitlines()[-1] == "0 errors, 0 warnings, 0 notes"
    assert len(list(tmp_path.iterdir())) > 4


@pytest.mark.parametrize(
    "wrong",
    [
        "[text](docs/nowhere.md)",
        "[text](#no-such-heading)",
        "`rayloader/nowhere.py`",
        "`nowhere.py`",
        "`tests/nowhere/*.py`",
        "`schedule.py:nowhere`",
        "`rayloader/epoch/schedule.py:Schedule.nowhere()`",
        "`rayloader.Nowhere`",
        "`rayloader.nowhere.DataLoader`",
        "`rayloader.DataLoader._nowhere`",
        "`schedule.Nowhere`",
        "`Schedule.nowhere`",
        "`make nowhere`",
        "```sh\nmake nowhere\n```",
        "```python\nfor x in:\n```",
    ],
)
def test_a_wrong_name_is_a_problem(wrong: str) -> None:
    assert len(problems(f"# Title\n\n{wrong}\n", ROOT / "README.md")) == 1


def test_right_names_and_free_words_are_none() -> None:
    text = """
# The title: `code`, and more

[here](#the-title-code-and-more) [there](LICENSE) [net](https://example.org/nowhere#x)
`rayloader/epoch/schedule.py` `schedule.py` `rayloader/` `rayloader/*.py` `make test` `make it so` `a/b`
`schedule.py:Schedule.handle()` `schedule.Schedule` `Schedule.handle` `rayloader.loader.DataLoader`
`rayloader.DataLoader` `DataLoader.batch_size` `loader.batch_size` `torch.utils.data.DataLoader` `ray.get`

```python
from rayloader import DataLoader
```

```sh
make demo
```

```text
`rayloader/nowhere.py` for x in:
```
"""
    assert problems(text, ROOT / "README.md") == []
