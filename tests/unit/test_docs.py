"""What the documents name exists: links, files, functions, make targets; their tables and programs are those of today.

Checked are README.md, CHANGELOG.md, CONTRIBUTING.md and docs/**/*.md:

- relative links lead to a file, their anchors to a heading of it;
- back-ticked paths (`rayloader/epoch/engine.py`, `engine.py`) are files, globs match some;
- back-ticked names are defined: `epoch.py:EpochIterator.close`, `rayloader.DataLoader`, `pool.Pool`;
- `make x` is a target, in fenced blocks too;
- fenced python blocks pass mypy, and so they parse; tests/integration/test_documents.py runs them;
- tables are what the results in benchmarks/results give.

Other words in back-ticks (arguments, torch's and Ray's names) are free.
"""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from documents import BLOCKS, DOCUMENTS, FENCE, ROOT

FOLDERS = ("rayloader", "tests", "examples", "benchmarks", "docs", ".ci")
SOURCES = sorted(path for name in (*FOLDERS[:4], "docs") for path in (ROOT / name).rglob("*.py"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))

LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"


def resolves(dotted: str) -> bool:
    """Whether `rayloader.a.b.Name.attribute` is a module, a name in one, or what a class has or gives its objects."""
    owner, _, name = dotted.rpartition(".")
    try:
        found = pkgutil.resolve_name(owner) if owner else None
        if isinstance(found, type):
            bases = [base for base in found.__mro__ if base.__module__.startswith(("rayloader", "torch"))]
            given = any(re.search(rf"(self\.|^    |\"){name}\b", inspect.getsource(base), re.M) for base in bases)
            return given or hasattr(found, name)
        return bool(pkgutil.resolve_name(dotted))
    except (ImportError, AttributeError):
        return False


def defines(path: Path, dotted: str) -> bool:
    """Whether a source file defines a dotted name such as `Class.method`."""
    names, text = dotted.split("."), path.read_text()
    return all(re.search(rf"(def|class) {one}\b|^ *(self\.)?{one}\b.*( = |: )", text, re.M) for one in names)


def anchors(text: str) -> set[str]:
    """Anchors that headings get: lower case, punctuation dropped, blanks to hyphens."""
    headings = re.findall(r"^#{1,6} +(.+?) *#*$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(target: str, document: Path, text: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    name, _, anchor = target.partition("#")
    path = document.parent / name
    return path.exists() and (not anchor or anchor in anchors(path.read_text() if name else text))


def is_there(span: str) -> bool:
    """Whether one back-ticked piece of text names what exists, if it names anything."""
    span = span.removesuffix("()")
    if match := re.fullmatch(r"make ([a-z][\w-]*)", span):
        return match[1] in TARGETS
    if match := re.fullmatch(rf"([\w./-]+\.py):({DOTTED})", span):
        return any(defines(path, match[2]) for path in SOURCES if f"{path}".endswith(f"/{match[1]}"))
    if re.fullmatch(r"\w+\.py", span):
        return (ROOT / span).exists() or any(path.name == span for path in SOURCES)
    if re.fullmatch(r"[\w.*/-]+", span) and span.split("/")[0] in FOLDERS and "/" in span:
        return any(ROOT.glob(span.rstrip("/")))
    first, *rest = span.split(".") if re.fullmatch(DOTTED, span) else [""]
    if first == "rayloader":
        return resolves(span)
    files = [path for path in SOURCES if path.name == f"{first}.py" and ROOT / "rayloader" in path.parents]
    return not (rest and rest[0][0].isupper() and files) or any(defines(path, ".".join(rest)) for path in files)


def problems(text: str, document: Path) -> Iterator[str]:
    """All that a document names and that does not exist."""
    for _, _, code in FENCE.findall(text):
        yield from (
            f"make {one}" for one in re.findall(r"^\s*(?:\$ )?make ([a-z][\w-]*)", code, re.M) if one not in TARGETS
        )
    prose = FENCE.sub("", text)
    yield from (target for target in LINK.findall(prose) if not leads_somewhere(target, document, text))
    yield from (span for span in SPAN.findall(prose) if not is_there(span))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_document_names_exists(name: str) -> None:
    assert [*problems((ROOT / name).read_text(), ROOT / name)] == []


def test_a_wrong_name_is_a_problem_and_a_right_one_or_a_free_word_is_none() -> None:
    wrong = "docs/nowhere.md", "#no-such-heading"
    assert [*problems(" ".join(f"[text]({one})" for one in wrong), ROOT / "README.md")] == [*wrong]
    assert [*problems("[a](LICENSE) [b](#b--c) [c](https://x.org/y#z)\n## B: `c`\n", ROOT / "README.md")] == ["#b--c"]
    names = ["rayloader/nowhere.py", "nowhere.py", "tests/nowhere/*.py", "schedule.py:nowhere", "rayloader.Nowhere"]
    names += ["rayloader/epoch/schedule.py:Schedule.nowhere()", "rayloader.nowhere.DataLoader", "make nowhere"]
    names += ["rayloader.DataLoader._nowhere", "schedule.Nowhere"]
    assert [name for name in names if is_there(name)] == []
    names = ["rayloader/epoch/schedule.py", "schedule.py", "rayloader/*.py", "schedule.py:Schedule.handle()", "a/b"]
    names += ["schedule.Schedule", "rayloader.loader.DataLoader", "rayloader.DataLoader.batch_size", "ray.get"]
    assert [name for name in [*names, "make test", "make it so"] if not is_there(name)] == []


@pytest.mark.parametrize("name", ["readme_table", "shared", "gpu", "cache", "plans"])
def test_tables_are_those_of_the_measured_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module, tables = map(importlib.import_module, (name, "tables"))
    table = module.table(json.loads(module.RESULTS.read_text()))
    assert tables.found(module.DOCUMENT, module.COMMAND) == table, f"run: {module.COMMAND}"


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
