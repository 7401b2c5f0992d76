"""docs/api.md holds exactly what is public: the names in `__all__`, and what their classes offer.

Sphinx builds the page, and is not needed here: the directives say what it shows.
"""

import dataclasses
import importlib
import inspect
import re

import pytest

import rayloader
from documents import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()
DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|autofunction|autoclass|automodule):: ([\w.]+).*\n((?:   :.*\n)*)", re.MULTILINE
)
PUBLIC_MODULES = ("rayloader", "rayloader.errors", "rayloader.observe.stats", "rayloader.plans")
NEEDS_PYARROW = {"ArrowDataset", "ParquetStream"}  # why these are not in `__all__`


def shown():
    """What the page shows: the objects, each with the members that it lists; None: all of them."""
    found, module = {}, None
    for kind, name, options in DIRECTIVE.findall(PAGE):
        members = re.search(r"^   :members:(.*)$", options, re.MULTILINE)
        listed = [one.strip() for one in members[1].split(",")] if members and members[1].strip() else None
        if kind == "currentmodule":
            module = importlib.import_module(name)
        elif kind == "automodule":
            assert members
            found.update(
                (getattr(importlib.import_module(name), one), []) for one in importlib.import_module(name).__all__
            )
        else:
            owner = getattr(module, name)
            assert owner not in found, name
            found[owner] = listed if members else []
    return found


SHOWN = shown()
CLASSES = [one for one in SHOWN if inspect.isclass(one) and not issubclass(one, Exception)]


def own_bases(kind):
    return [base for base in kind.__mro__ if base.__module__.startswith("rayloader")]


def offered(kind):
    """What a class offers: its public attributes, without those that are arguments of its constructor."""
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {*()}
    fields |= set(getattr(kind, "_fields", ()))
    names = {name for base in own_bases(kind) for name in vars(base) if not name.startswith("_")} - fields
    return names - inspect.signature(kind).parameters.keys(), fields


def test_the_page_has_the_public_names_and_no_others():
    public = [
        getattr(module, name)
        for module in map(importlib.import_module, PUBLIC_MODULES)
        for name in {*module.__all__, *(NEEDS_PYARROW if module is rayloader else ())}
    ]
    assert {*public} == SHOWN.keys()
    assert {*rayloader._MODULES} - {*rayloader.__all__} == NEEDS_PYARROW
    assert {*rayloader.errors.__all__} <= {*rayloader.__all__}
    assert all(map(inspect.getdoc, SHOWN))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_page_has_all_that_a_class_offers_and_nothing_else(kind):
    members, fields = offered(kind)
    listed = SHOWN[kind]
    assert listed is None or sorted(listed) == sorted(members | fields)
    assert all(inspect.getdoc(getattr(kind, name)) for name in members)
