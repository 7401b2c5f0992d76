"""Modules that the program has although a worker's import does not find them: they are loaded from their files.

A program may load a module from any file and put it into `sys.modules`, and may change `sys.path` after an import. A
forked worker has such a module; an actor's process asks this file last, when no other finder knows the name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence

from rayloader.namespaces import own_modules

File = tuple[str, "list[str] | None"]  # its path, and where the modules of a package are


def loaded_files() -> dict[str, File]:
    """The files of the program's modules in this process, by the modules' names."""
    files: dict[str, File] = {}
    for name, attributes in own_modules():
        folders = attributes.get("__path__")
        files[name] = os.path.abspath(attributes["__file__"]), None if folders is None else [*map(str, folders)]
    return files


def adopt(files: Mapping[str, File]) -> None:
    """In a worker: finds these modules, and no longer those of an earlier call."""
    _finder.files = files
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


class _FileFinder(importlib.abc.MetaPathFinder):
    """Comes after the other finders."""

    files: Mapping[str, File]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file, folders = self.files.get(fullname, ("", None))
        if not os.path.exists(file):
            return None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)


_finder = _FileFinder()
