"""Paths from an object to the random generators that it holds; another process can follow them.

Promise: `walk` visits everything that an object holds, however many and however deep, without running the user's code.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import itertools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from rayloader.namespaces import is_a, names_in, namespace_of
from rayloader.random.generator_kinds import KINDS

Step = tuple[str, Any] | None  # None: a step that another process can't take
Path = tuple[Step, ...]
Node = tuple[Any, Step] | None  # the parent's node, and the step from there

ATOMS = {type(None), bool, int, float, complex, str, bytes, bytearray, type, types.ModuleType, torch.Tensor, range}
ATOMS |= {torch.dtype, torch.device, torch.Size, types.CodeType, np.dtype}
_PLAIN = (ATOMS - {type}) | {kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)}
_CONTAINERS = {dict, list, tuple, set, frozenset, collections.deque}
_MOST_NESTED = 10  # levels of nested containers
_SEQUENCES = list, tuple, collections.deque
_METHODS = types.MethodType, types.BuiltinMethodType
_WITHOUT_ATTRIBUTES = (*_METHODS, staticmethod, classmethod, types.CellType, np.ndarray)  # that are looked at
_OF_PYTHON = (*_WITHOUT_ATTRIBUTES, types.FunctionType, property, functools.partial)
_LRU_CACHE = type(functools.lru_cache(lambda: None))


def walk(
    roots: Iterable[tuple[Node, Any]],
    *,
    passed: Callable[[Any], bool],
    reads: Callable[[types.FunctionType], bool] | None = None,
    met: Callable[[Node, Any], object] | None = None,
    most: int = sys.maxsize,
    longest: int = sys.maxsize,
) -> Iterator[tuple[Path, Any]]:
    """The generators that are reached from some objects, with each path to them, the shortest first.

    Args:
        roots: the objects, with their nodes.
        passed: whether to skip the attributes of a class; also asked for each function, which is skipped as a whole.
        reads: whether to search what a function's code names too (see `named_by`); None: of no function.
        met: called with each object that is visited, except for the contents of containers of plain values.
        most: how many objects to visit, and items of one container.
        longest: containers with more items are data: generators among the items are found, but not within these.
    """
    queue = collections.deque(roots)
    seen: set[int] = set()
    slots: dict[type, list[str]] = {}
    keep: list[Any] = []  # temporary objects, so that no identity is used twice
    while queue and len(seen) < most:
        node, obj = queue.popleft()
        if is_a(obj, KINDS):
            yield path_of(node), obj
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        keep.append(obj)
        if met is not None:
            met(node, obj)
        # With a limit the contents are cut off sooner than they can all be looked at.
        if longest == sys.maxsize and plain_containers(obj) is not None:
            continue
        children = _children(obj, slots, passed, reads, most)
        if type(obj) in _CONTAINERS and len(obj) > longest:
            children = ((step, child) for step, child in children if is_a(child, KINDS))
        nodes = (((node, step), child) for step, child in children if _has_parts(child, passed))
        queue.extend(itertools.islice(nodes, most))


def _has_parts(obj: Any, passed: Callable[[Any], bool]) -> bool:
    kind = type(obj)
    return not passed(obj) if kind is type or kind is types.FunctionType else kind not in ATOMS


def plain_containers(obj: Any) -> list[Any] | None:
    """A container with those in it, if they hold nothing but plain values; None for anything else.

    In C, because a dataset may have a million of them in a list.
    """
    held, found = [obj], []
    for _ in range(_MOST_NESTED):
        if not _CONTAINERS.issuperset(map(type, held)):
            return None
        found += held
        held = gc.get_referents(*held)
        held = list(itertools.compress(held, map(operator.not_, map(_PLAIN.__contains__, map(type, held)))))
        held = list(dict(zip(map(id, held), held, strict=True)).values())  # many may share one
        if not held:
            return found
    return None


def path_of(node: Node) -> Path:
    """The steps that lead to a node of a walk."""
    steps: list[Step] = []
    while node is not None:
        node, step = node
        steps.append(step)
    return tuple(reversed(steps))


def _children(
    obj: Any,
    slots: dict[type, list[str]],
    passed: Callable[[Any], bool],
    reads: Callable[[types.FunctionType], bool] | None,
    most: int,
) -> Iterator[tuple[Step, Any]]:
    kind = type(obj)
    if is_a(obj, (type, types.ModuleType)):
        if is_a(obj, type) and not passed(obj):
            yield from ((("attribute", name), value) for name, value in list(vars(obj).items()))
            yield from ((("base", n), base) for n, base in enumerate(obj.__bases__))
            if kind is not type and not passed(kind):
                yield ("class", None), kind
        return
    if is_a(obj, (torch.Tensor, *KINDS[1:])):
        return
    if not passed(kind):
        yield ("class", None), kind
    if is_a(obj, dict):
        items = list(itertools.islice(dict.items(obj), most))
        yield from ((("key", k) if _is_plain(k) else None, value) for k, value in items)
        if is_a(obj, collections.defaultdict):
            yield ("factory", None), obj.default_factory
    elif (iterator := _iterator(obj)) is not None:
        values = list(itertools.islice(iterator, most))  # in one operation: another thread may change a set meanwhile
        if not ATOMS.issuperset(map(type, values)):  # a long list of numbers is skipped in C
            named = is_a(obj, _SEQUENCES)
            yield from ((("item", number) if named else None, value) for number, value in enumerate(values))
    elif is_a(obj, _OF_PYTHON):
        yield from _of_python(obj, reads)
    if not is_a(obj, _WITHOUT_ATTRIBUTES):
        yield from _of_attributes(obj, slots)


def _of_python(obj: Any, reads: Callable[[types.FunctionType], bool] | None) -> Iterator[tuple[Step, Any]]:
    """What objects of Python's own kinds, and arrays, hold besides their attributes."""
    if is_a(obj, np.ndarray):
        if obj.dtype.hasobject:
            yield from ((None, value) for value in obj.flat)
    elif is_a(obj, types.FunctionType):
        yield from _of_function(obj)
        if reads is not None and reads(obj):
            yield from ((None, value) for value in named_by(obj))
    elif is_a(obj, types.CellType):
        with contextlib.suppress(ValueError):  # empty
            yield ("contents", None), obj.cell_contents
    elif is_a(obj, _METHODS):
        yield ("self", None), obj.__self__
        yield ("function", None), getattr(obj, "__func__", None)
    elif is_a(obj, (staticmethod, classmethod)):
        yield ("function", None), obj.__func__
    elif is_a(obj, property):
        yield from ((("property", name), getattr(obj, name)) for name in ("fget", "fset", "fdel"))
    elif is_a(obj, functools.partial):
        yield ("partial", "func"), obj.func
        yield ("partial", "args"), obj.args
        yield ("partial", "keywords"), obj.keywords


def _of_attributes(obj: Any, slots: dict[type, list[str]]) -> Iterator[tuple[Step, Any]]:
    kind, attributes = type(obj), attributes_in(obj)
    if kind not in slots:
        slots[kind] = slots_of(kind)
    for name in slots[kind]:
        with contextlib.suppress(AttributeError):  # not set
            yield ("attribute", name), object.__getattribute__(obj, name)
    if attributes is not None:
        yield from ((("attribute", name), value) for name, value in list(attributes.items()))
    if is_opaque(obj, attributes, slots[kind]):
        yield from ((None, value) for value in gc.get_referents(obj) if not is_a(value, type))


def is_opaque(obj: Any, attributes: dict[str, Any] | None, slots: list[str]) -> bool:
    """Whether only the garbage collector can tell what an object holds."""
    if is_a(obj, _LRU_CACHE):  # its attributes are those of its function
        return True
    return attributes is None and not slots and not is_a(obj, tuple(_CONTAINERS))


def slots_of(kind: type) -> list[str]:
    """The names of the attributes that objects of a class have in `__slots__`."""
    return [
        name
        for base in kind.__mro__
        if vars(base).get("__slots__")
        for name, member in vars(base).items()
        if is_a(member, types.MemberDescriptorType)
    ]


def functions_of(value: Any) -> list[types.FunctionType]:
    """The functions behind an attribute of a class, if it is a method, a property or the like."""
    if is_a(value, types.FunctionType):
        return [value]
    found: tuple[Any, ...] = ()
    if is_a(value, (staticmethod, classmethod)):
        found = (value.__func__,)
    elif is_a(value, functools.cached_property):
        found = (value.func,)
    elif is_a(value, property):
        found = value.fget, value.fset, value.fdel
    return [one for one in found if is_a(one, types.FunctionType)]


def held_by(function: types.FunctionType) -> list[Any]:
    """What a function keeps from its definition: cells and defaults."""
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            held.append(cell.cell_contents)
    return held


def _of_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    yield from ((("closure", n), cell) for n, cell in enumerate(function.__closure__ or ()))
    yield from ((("default", n), value) for n, value in enumerate(function.__defaults__ or ()))
    yield from ((("kwdefault", name), value) for name, value in (function.__kwdefaults__ or {}).items())
    module = sys.modules.get(function.__globals__.get("__name__", ""))
    if namespace_of(module) is not function.__globals__:  # it was pickled by value
        globals_ = list(function.__globals__.items())
        yield from ((("global", name), value) for name, value in globals_ if name != "__builtins__")


def named_by(function: types.FunctionType) -> Iterator[Any]:
    """Objects that its code names without holding them: globals, its imports, and attributes of modules among these."""
    for space, names in spaces_of(function):
        yield from (value for name in names if (value := space.get(name)) is not None)


def spaces_of(function: types.FunctionType) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The globals of its module and of modules that its code imports or names, each with the names in the code."""
    names = list(dict.fromkeys(names_in(function.__code__)))
    spaces = [function.__globals__]
    known = set(map(id, spaces))
    for module in modules_of(function):
        _add_space(sys.modules.get(module), spaces, known)
    for space in spaces:  # the list grows meanwhile
        yield space, names
        for name in names:
            _add_space(space.get(name), spaces, known)


def modules_of(function: types.FunctionType) -> Iterator[str]:
    """Names of modules, perhaps missing, that its code may import: `from ..settings import RNG` gives `settings`."""
    package = str(function.__globals__.get("__package__") or "")
    around = itertools.accumulate(package.split("."), "{}.{}".format)
    parents = [f"{one}." for one in around][::-1]
    for name in dict.fromkeys(names_in(function.__code__)):
        yield from (parent + name for parent in ("", *parents))


def _add_space(value: Any, spaces: list[dict[str, Any]], known: set[int]) -> None:
    if is_a(value, types.ModuleType) and id(namespace := namespace_of(value)) not in known:
        known.add(id(namespace))
        spaces.append(namespace)


def _iterator(obj: Any) -> Iterator[Any] | None:
    """An iterator over the items of a list, tuple, deque or set; None for anything else.

    A class of the user's may do anything when it is iterated: packages fill lazy containers then, with imports.
    """
    for container in (*_SEQUENCES, set, frozenset):
        if is_a(obj, container):
            return container.__iter__(obj)
    return None


def attributes_in(obj: Any) -> dict[str, Any] | None:
    """The attributes in an object's `__dict__`, read without running the user's code."""
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        return None
    return attributes if is_a(attributes, dict) else None


def _is_plain(key: Any) -> bool:
    return type(key) in (str, int, float, bool, bytes, type(None)) or (
        type(key) is tuple and all(map(_is_plain, key))
    )  # fmt: skip


# What a step of each kind leads to.
GET: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda obj, name: _get_attribute(obj, name),
    "key": lambda obj, key: dict.__getitem__(obj, key),
    "item": lambda obj, number: next(itertools.islice(_iterator(obj) or (), number, None)),
    "closure": lambda obj, number: obj.__closure__[number],
    "contents": lambda obj, _: obj.cell_contents,
    "default": lambda obj, number: obj.__defaults__[number],
    "kwdefault": lambda obj, name: obj.__kwdefaults__[name],
    "global": lambda obj, name: obj.__globals__[name],
    "self": lambda obj, _: obj.__self__,
    "function": lambda obj, _: obj.__func__,
    "partial": getattr,
    "factory": lambda obj, _: obj.default_factory,
    "class": lambda obj, _: type(obj),
    "base": lambda obj, number: obj.__bases__[number],
    "property": getattr,
}


def _get_attribute(obj: Any, name: str) -> Any:
    if is_a(obj, types.ModuleType):
        return namespace_of(obj)[name]
    if is_a(obj, type):
        return vars(obj)[name]
    attributes = attributes_in(obj)
    return attributes[name] if attributes and name in attributes else object.__getattribute__(obj, name)


def follow(path: Path, replica: dict[str, Any] | None = None) -> Any:
    """The object at the end of a path, from the modules or from the replica's objects; None if there is none."""
    obj: Any = None
    try:
        for step in path:
            if step is None:
                return None
            kind, key = step
            if kind == "root":
                obj = (replica or {})[key]
            elif kind == "module":
                obj = sys.modules[key]
            else:
                obj = GET[kind](obj, key)
    except Exception:  # depends on the object that is there instead
        return None
    return obj


def put(obj: Any, step: Step, value: Any) -> None:
    """Makes the step from an object lead to a value.

    Raises:
        TypeError: it can't be put there.
    """
    match step:
        case ("attribute", name):
            if isinstance(obj, (type, types.ModuleType)) or attributes_in(obj) is None:
                setattr(obj, name, value)
            else:
                attributes_in(obj)[name] = value  # type: ignore[index]
        case ("key", key) if isinstance(obj, dict):
            dict.__setitem__(obj, key, value)
        case ("item", number) if isinstance(obj, list) and number <= len(obj):
            obj[number : number + 1] = [value]  # a list that is one item short is extended
        case ("contents", None):
            obj.cell_contents = value
        case ("global", name):
            obj.__globals__[name] = value
        case _:
            raise TypeError("it can't be put there")


def in_words(path: Path) -> str:
    """A path as the user would write it."""
    words = ""
    for step in path:
        match step:
            case None:
                words += ".?"
            case ("root" | "module", name):
                words += name
            case ("attribute", name):
                words += f".{name}"
            case ("key" | "item", key):
                words += f"[{key!r}]"
            case (kind, None):
                words += f".<{kind}>"
            case (kind, key):
                words += f".<{kind} {key}>"
    return words
