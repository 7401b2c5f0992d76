"""A version of another package that lacks a private name is one error that says so; for Ray's see test_compat_ray.py.

Copies of the `_compat*.py` files are executed while each name that they take from a package is missing.
"""

import ast
import importlib.metadata
import importlib.util
import pkgutil
import platform
import re
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.utils.data

from documents import ROOT
from lacking import Changed
from rayloader._compat import begin_streams, loading_streams
from rayloader.errors import TESTED

LACKS = r"^rayloader does not work with {} [\d.]+\S*, which lacks a private name that it uses \(.*{}.*\); install a"
# What the files call parts of torch.
ALIASES = {"_storages": "torch.UntypedStorage", "shared_cache": "torch.multiprocessing.reductions.shared_cache"}


def taken(file: str) -> list[str]:
    """The names that a file looks up in a block `with private_names_of(...)`, with their modules."""
    found = []
    for block in ast.walk(ast.parse((ROOT / "rayloader" / file).read_text())):
        if not isinstance(block, ast.With):
            continue
        inner = {id(node.value) for node in ast.walk(block) if isinstance(node, ast.Attribute)}
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and id(node) not in inner:
                found.append(re.sub(r"^\w+(?=\.)", lambda name: ALIASES.get(name[0], name[0]), ast.unparse(node)))
    return found


def executed(file: str) -> None:
    """Executes another copy of a file."""
    spec = importlib.util.spec_from_file_location("copy", ROOT / "rayloader" / file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


FILE = "_compat.py"
NAMES = [name for name in taken(FILE) if not name.startswith("stream.")]  # of an object, see below


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_is_missing_is_named_at_import(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(NAMES) > 35
    executed(FILE)
    owner, _, attribute = name.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    if name in sys.modules:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # so Python marks what cannot be imported
        monkeypatch.delattr(holder, attribute)
    elif isinstance(holder, ModuleType):
        monkeypatch.delattr(holder, attribute)
    else:  # a class, which may be one of C's, or an object
        above, _, place = owner.rpartition(".")
        monkeypatch.setattr(pkgutil.resolve_name(above), place, Changed(holder, attribute))
    package = name.partition(".")[0]
    package = "Python" if package in sys.stdlib_module_names else package
    with pytest.raises(ImportError, match=LACKS.format(package, attribute)):
        executed(FILE)


def test_a_stream_of_datasets_that_hides_its_position_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class IterableDataset(torch.utils.data.IterableDataset[Any]):
        """Of a version that keeps its position elsewhere."""

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    module = SimpleNamespace(IterableDataset=IterableDataset)
    monkeypatch.setitem(sys.modules, "datasets.iterable_dataset", module)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "9.0")
    for use in begin_streams, lambda stream: loading_streams(stream).__enter__():
        with pytest.raises(ImportError, match=LACKS.format("datasets", "_starting_state_dict")):
            use(IterableDataset())


def test_the_tested_versions_are_the_oldest_and_the_newest() -> None:
    pins = [
        dict(re.findall(r"^([a-z]+)==(\d+\.\d+)", file.read_text(), re.MULTILINE))
        for file in (ROOT / "tests" / "versions" / "oldest.txt", ROOT / "constraints.txt")
    ]
    pins[0]["Python"], pins[1]["Python"] = "3.11", "3.14"
    assert (3, 11) <= tuple(map(int, platform.python_version_tuple()[:2])) <= (3, 14)
    for package, tested in TESTED.items():
        oldest, newest = (pin.get(package) for pin in pins)
        if newest is None:
            newest = re.match(r"\d+\.\d+", importlib.metadata.version(package))[0]  # type: ignore[index]
            if newest == oldest:
                continue  # run with the oldest versions
        assert tested == " to ".join(filter(None, [oldest, newest]))
