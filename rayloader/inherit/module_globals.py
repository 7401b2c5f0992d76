"""Plain globals of the program's own modules: a forked worker would have them as the program has set them.

Promise: whenever a worker imports such a module, numbers (NumPy's too), strings, paths, and tuples, lists, sets, dicts
and namespaces of these are what they were in the driver at `iter()`, and so are objects of any class, dataclasses for
instance, whose attributes are such values. The same holds for the attributes of the classes and functions that the
module defines. Lists, sets, dicts and objects that are there already get the driver's contents, so that whatever refers
to them sees these. Other values are named in a log line if their kind, their size or, for functions and classes, their
name differs. Modules of the standard library and of installed packages are as the worker imports them, and so is
`__main__`, whose functions and classes bring along what they use.

NOTE [Imports]. Modules fill each other while they are imported: a decorator numbers what it is applied to, a registry
refuses a name that it has. In a forked worker these imports have happened, once. So the driver's values are set only
when an import is complete, with everything that it imports itself. And while a module of the driver's is imported
later, the other modules are as imports alone have left them; afterwards they are as they were before, since the
driver's values contain what that import did. If it fails, it is tried again with the others as they are: it may need
what the program had set before it imported that module. The import of a module that the driver does not have changes
the others as it would in a forked worker. While other threads run, nothing is set back, because they would see it.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import logging
import operator
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rayloader._compat import default_collate_fn_map
from rayloader.inherit.plain_values import (
    MUTABLE,
    Content,
    content_of,
    copied,
    described,
    empty_like,
    is_plain,
    same,
    set_content,
)
from rayloader.namespaces import attributes_of, functions_of, is_a, namespace_of, own_modules
from rayloader.random.generators import Located, Placed, located
from rayloader.random.search import search

logger = logging.getLogger("rayloader")

File = tuple[str, "list[str] | None"]  # its path, and where the modules of a package are
_Path = tuple[str, ...]  # the name of a global, or of a class or function and of its attribute
_NOTHING = object()  # bound to a name that does not exist


class _Sent(NamedTuple):
    """What a module of the driver's holds, by path: plain values, objects, descriptions of all that is not plain.

    An object is sent as its number in the driver, and its contents.
    """

    plain: dict[_Path, Any]
    objects: dict[_Path, tuple[int, Content]]
    others: dict[_Path, str]


@dataclass(frozen=True, slots=True)
class ModuleGlobals:
    """The globals of the driver's modules, at `iter()`.

    Attributes:
        sent: the modules by name, pickled: parts that they share are shared again.
        generators: random generators in values that are not plain.
    """

    sent: bytes
    generators: tuple[Located, ...]

    @classmethod
    def capture(cls) -> ModuleGlobals:
        """The globals in this process."""
        sent: dict[str, _Sent] = {}
        numbers: dict[int, int] = {}  # of objects, by their identity
        modules = dict(own_modules())
        for module_name, attributes in modules.items():
            plain, objects, others = sent[module_name] = _Sent({}, {}, {})
            for path, value in _set_in(module_name, attributes):
                if value is default_collate_fn_map:  # sent with the replica
                    continue
                if is_plain(value):
                    plain[path] = value
                    continue
                others[path] = described(value)
                if (content := content_of(value)) is not None and is_plain(content):
                    objects[path] = numbers.setdefault(id(value), len(numbers)), content
        found = [one for one in search({}, modules.items()) if not _is_of_a_device(one.generator)]
        return cls(pickle.dumps(sent, pickle.HIGHEST_PROTOCOL), located(found))

    def adopt(self) -> None:
        """In a worker: sets the globals of imported modules, and those of other modules when they are imported."""
        _finder.adopt(pickle.loads(self.sent), Placed(self.generators))


def _is_of_a_device(generator: Any) -> bool:
    return is_a(generator, torch.Generator) and generator.device.type != "cpu"


def _set_in(module_name: str, namespace: Mapping[str, Any]) -> Iterator[tuple[_Path, Any]]:
    """Globals of a module, and attributes of its classes and functions, except for unchanged methods."""
    scopes: list[tuple[_Path, str | None, Mapping[str, Any]]] = [((), None, namespace)]
    seen: set[int] = set()
    for owners, class_name, attributes in scopes:
        for name, value in list(attributes.items()):
            if name.startswith("__") or is_a(value, types.ModuleType):
                continue
            path = *owners, name
            of_function = is_a(value, types.FunctionType) and value.__module__ == module_name and value.__dict__
            if of_function and id(value) not in seen:
                seen.add(id(value))
                scopes.append((path, None, value.__dict__))
            functions = functions_of(value) if class_name is not None else ()
            if functions and all(one.__qualname__ == f"{class_name}.{name}" for one in functions):
                continue
            yield path, value
            if is_a(value, type) and not issubclass(value, enum.Enum) and id(value) not in seen:
                inner = attributes_of(value)
                if inner.get("__module__") == module_name:
                    seen.add(id(value))
                    scopes.append((path, value.__qualname__, inner))


class _Place(NamedTuple):
    """Where a value is bound: in a module, a class or a function; None if there is no such one."""

    owner: Any
    name: str

    @classmethod
    def at(cls, module: types.ModuleType, path: _Path) -> _Place:
        """The place that a path leads to."""
        owner: Any = module
        for name in path[:-1]:
            owner = _namespace(owner).get(name)
            if not is_a(owner, (type, types.FunctionType)):
                return cls(None, path[-1])
        return cls(owner, path[-1])

    def value(self) -> Any:
        """What is bound there."""
        return _namespace(self.owner).get(self.name, _NOTHING)

    def bind(self, value: Any) -> None:
        """Binds another object there, or nothing."""
        if self.owner is None:
            return
        if is_a(self.owner, type):
            type.__delattr__(self.owner, self.name) if value is _NOTHING else type.__setattr__(*self, value)
        elif value is _NOTHING:
            del _namespace(self.owner)[self.name]
        else:
            _namespace(self.owner)[self.name] = value


def _namespace(owner: Any) -> Any:
    if is_a(owner, types.FunctionType):
        return owner.__dict__
    return attributes_of(owner) if is_a(owner, type) else namespace_of(owner)


class _Kept(NamedTuple):
    """What is bound at a place at a certain time; `content`: of something plain that can change."""

    place: _Place
    value: Any
    content: Content | None

    def is_there(self) -> bool:
        """Whether it is as it was."""
        return self.place.value() is self.value and (self.content is None or same(content_of(self.value), self.content))

    def put_back(self) -> None:
        """Makes it so."""
        if self.place.value() is not self.value:
            self.place.bind(self.value)
        if self.content is not None:
            set_content(self.value, self.content)


class _Finder(importlib.abc.MetaPathFinder):
    """Comes before the other finders, and sets the globals of a module that one of them finds once it is imported."""

    def __init__(self) -> None:
        self._placed = Placed()
        self._sent: dict[str, _Sent] = {}
        self._here: dict[int, Any] = {}  # what represents a part of these here, by its identity
        self._objects: dict[int, Any] = {}  # what represents the driver's objects here, by their numbers
        self._taken: set[int] = set()  # identities of both
        self._as_imported: list[_Kept] = []  # see NOTE [Imports]
        self._reported: set[tuple[str, str]] = set()
        self._threads: set[threading.Thread] = set()  # that do not run the program's code
        self._thread = threading.local()  # `sought`: names; with `imported`: modules that are complete, within others

    def adopt(self, sent: dict[str, _Sent], placed: Placed) -> None:
        """Sets the driver's values, now and in the modules that are imported from now on."""
        self._placed, self._sent, self._here, self._objects, self._taken = placed, sent, {}, {}, set()
        self._threads = self._threads or set(threading.enumerate())
        here = {name: sys.modules[name] for name in sent if is_a(sys.modules.get(name), types.ModuleType)}
        known = {(id(kept.place.owner), kept.place.name) for kept in self._as_imported}
        places = (place for place, _ in self._sent_to(here, "plain", "objects"))
        self._as_imported += self._keep([place for place in places if (id(place.owner), place.name) not in known])
        self._complete(here)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        sought = vars(self._thread).setdefault("sought", set())
        if fullname in sought or fullname not in self._sent:
            return None
        sought.add(fullname)  # one of the others may ask all finders itself
        try:
            for finder in list(itertools.dropwhile(lambda one: one is not self, list(sys.meta_path)))[1:]:
                spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        spec.loader = _Loader(spec.loader)
                    return spec
            return None
        finally:
            sought.remove(fullname)

    def execute(self, module: types.ModuleType, name: str, loader: Any) -> None:
        """Executes a module's own code."""
        if hasattr(self._thread, "imported"):
            loader.exec_module(module)
            self._thread.imported[name] = module
            return
        sets_back = name in self._sent and self._threads.issuperset(threading.enumerate())
        try:
            with self._importing(sets_back, as_imported=True):
                self.execute(module, name, loader)
        except Exception:
            if not sets_back:
                raise
            with self._importing(sets_back, as_imported=False):
                self.execute(module, name, loader)

    @contextlib.contextmanager
    def _importing(self, sets_back: bool, *, as_imported: bool) -> Iterator[None]:
        """Around an import that is not part of another one; see NOTE [Imports].

        Args:
            sets_back: whether what is bound in other modules is afterwards as before.
            as_imported: whether it is meanwhile as imports have left it.
        """
        differing = [kept for kept in self._as_imported if sets_back and not kept.is_there()]
        before = self._keep([kept.place for kept in differing])
        for kept in differing if as_imported else ():
            kept.put_back()
        imported = self._thread.imported = {}
        try:
            with self._placed.as_imported():
                yield
        finally:
            del self._thread.imported
            if sets_back:
                self._set_back(before, as_imported=as_imported)
            self._as_imported += self._keep([place for place, _ in self._sent_to(imported, "plain", "objects")])
            self._complete(imported)

    def _set_back(self, before: list[_Kept], *, as_imported: bool) -> None:
        """After an import: notes how imports have left other modules, and sets them to what they were before."""
        there = {id(kept): kept.is_there() for kept in self._as_imported}
        changed = [kept for kept in self._as_imported if not there[id(kept)]]
        places = [kept.place for kept in changed]
        after = self._keep(places) if as_imported else []
        for kept in changed:
            kept.put_back()
        self._as_imported = [kept for kept in self._as_imported if there[id(kept)]]
        self._as_imported += after if as_imported else self._keep(places)
        for kept in before:
            kept.put_back()

    def _keep(self, places: list[_Place]) -> list[_Kept]:
        """What is bound at these places now."""
        bound = [(place, place.value()) for place in places]
        # A part that has a place itself is kept there.
        parts = {id(value): value for value in (*(kept.value for kept in self._as_imported), *(v for _, v in bound))}
        kept = []
        for place, value in bound:
            content = content_of(value)
            if content is not None:
                content = copied(content, parts) if is_plain(content) else None
            kept.append(_Kept(place, value, content))
        return kept

    def _sent_to(self, modules: Mapping[str, types.ModuleType], *kinds: str) -> Iterator[tuple[_Place, Any]]:
        """What was sent of these kinds for these modules, and the places for it."""
        for name, module in modules.items():
            for kind in kinds if name in self._sent else ():
                for path, value in getattr(self._sent[name], kind).items():
                    yield _Place.at(module, path), value

    def _complete(self, modules: Mapping[str, types.ModuleType]) -> None:
        """Sets the driver's values in modules that were imported."""
        plain = list(self._sent_to(modules, "plain"))
        filled = []
        for place, value in plain:
            here = place.value()
            fits = type(value) in MUTABLE and type(here) is type(value) and is_plain(here)
            if fits and id(value) not in self._here and id(here) not in self._taken:
                self._here[id(value)] = here
                self._taken.add(id(here))
                filled.append((here, content_of(value)))
        for place, value in plain:
            here = place.value()
            if type(value) in MUTABLE:
                if here is not (own := copy.deepcopy(value, self._here)):
                    place.bind(own)
            elif not same(here, value):
                place.bind(copy.deepcopy(value, self._here))
        filled += self._objects_in(modules)
        for here, content in filled:
            found = content_of(here)
            if found and content and found[0] == content[0] and not same(found, content):
                set_content(here, copied(content, self._here))
        sys.meta_path[:] = [self, *(finder for finder in sys.meta_path if finder is not self)]
        for name, module in modules.items():
            self._place_generators(name, module)

    def _objects_in(self, modules: Mapping[str, types.ModuleType]) -> Iterator[tuple[Any, Content]]:
        """Objects to be filled: one for each of the driver's, bound wherever that is; unchanged ones first."""
        fitting = []
        for place, (number, content) in self._sent_to(modules, "objects"):
            found = content_of(place.value())
            if found is not None and found[0] == content[0]:
                fitting.append((not same(found, content), place, number, content))
        for _, place, number, content in sorted(fitting, key=operator.itemgetter(0)):
            here, own = place.value(), self._objects.get(number)
            if own is None:
                own = empty_like(here) if id(here) in self._taken else here
                if own is None:
                    continue
                self._objects[number] = own
                self._taken.add(id(own))
                yield own, content
            if own is not here:
                place.bind(own)

    def _place_generators(self, module_name: str, module: types.ModuleType) -> None:
        """Places the generators, and logs what differs from the driver."""
        others = self._sent[module_name].others if module_name in self._sent else {}
        missing = [f"{path} (a random generator)" for path in self._placed.put_in(module_name)]
        missing += [
            f"{'.'.join(path)} ({kind})"
            for path, kind in others.items()
            if described(_Place.at(module, path).value()) != kind
        ]
        missing = [what for what in missing if (module_name, what) not in self._reported]
        self._reported.update((module_name, what) for what in missing)
        if missing:
            logger.warning(
                "rayloader: %s of the module %s differ in the workers from what the program has set, and only plain "
                "values such as numbers, strings and dicts of them travel; pass what the dataset needs to its "
                "constructor",
                ", ".join(missing),
                module_name,
            )


class _Loader(importlib.abc.Loader):
    """Replaces a module's loader while it is imported."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        _finder.execute(module, module.__spec__.name, self._loader)


_finder = _Finder()


# ---- modules that are loaded from their files


def loaded_files() -> dict[str, File]:
    """The files of the program's modules in this process, by the modules' names."""
    files: dict[str, File] = {}
    for name, attributes in own_modules():
        folders = attributes.get("__path__")
        files[name] = os.path.abspath(attributes["__file__"]), None if folders is None else [*map(str, folders)]
    return files


def adopt_files(files: Mapping[str, File]) -> None:
    """In a worker: finds these modules, and no longer those of an earlier call."""
    _files.files = files
    if _files not in sys.meta_path:
        sys.meta_path.append(_files)


class _FileFinder(importlib.abc.MetaPathFinder):
    """Comes after the other finders, for modules of the program that these do not find.

    A program may load a module from any file and put it into `sys.modules`, and may change `sys.path` after an import.
    A forked worker has such a module.
    """

    files: Mapping[str, File]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file, folders = self.files.get(fullname, ("", None))
        if not os.path.exists(file):
            return None
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=folders)


_files = _FileFinder()
