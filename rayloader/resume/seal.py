"""Tells whether a state is complete and unchanged since `state_dict()`.

Promise: pure. A sealed state that torch has saved and loaded, even with `weights_only` and to another device, has
the same seal; if a part was lost, replaced or changed, the error names it. Without that a damaged state leads to an
error far from its cause, or, if a number has become another number, to another stream of batches.

NOTE [Same parts]. Some frameworks request a state before every batch, and most of a state is unchanged since the last
batch. So the checksum of a part with parts inside is computed from theirs, and unchanged data is a `Part`: its checksum
is known, and all states share its content if it is immutable, such as bytes or a tuple of them.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
import zlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from rayloader._compat import untyped_in
from rayloader.errors import StateError

_T = TypeVar("_T")

# Types whose values are covered completely. Of an object of another type, the user's own, only its place counts.
_PLAIN = {int, float, complex, str, bool, type(None)}
_CONSTANT = {*_PLAIN, bytes}
_TEXT = {str}
_BINARY = {kind: zlib.crc32(kind.__name__.encode()) for kind in (bytes, bytearray)}
_SHORT = _PLAIN - {int}
_LEAST, _MOST = -(10**600), 10**600  # whole numbers beyond have digits that Python may refuse to show
_REMEMBERED = 64  # names per dict; the user's own may have millions


class Part:
    """A part of states, created once; see NOTE [Same parts].

    Args:
        value: its content, which is not changed from now on; a dict may contain parts. No number, text or
            None: these are sealed directly by their container.
        known: its checksum, if known.
    """

    __slots__ = ("checksum", "is_constant", "own")

    def __init__(self, value: Any, known: int | None = None) -> None:
        self.checksum = checksum(value) if known is None else known
        self.own: Callable[[], Any]  # returns the content for a state; changes by the program affect no other state
        self.is_constant = False
        if type(value) is dict and all(map(_is_constant, value.values())):
            self.own = owned(value).copy
        elif type(value) is dict and Part in map(type, value.values()):
            self.own = functools.partial(owned, value)
        elif type(value) is torch.Tensor:
            self.own = value.clone
        elif _is_constant(value):
            self.is_constant, self.own = True, functools.partial(_same, value)
        else:
            self.own = functools.partial(copy.deepcopy, value)

    @classmethod
    def made_by(cls, own: Callable[[], Any], known: int) -> Part:
        """One whose content this function makes anew for each state, and whose checksum is known."""
        part = cls.__new__(cls)
        part.own, part.checksum, part.is_constant = own, known, False
        return part


class Parts:
    """The parts of one object's states, each valid as long as its source stays the same."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Part]] = {}
        self._once: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], _T]) -> _T:
        """Returns what `make` created for the first of these states."""
        if name not in self._once:
            self._once[name] = make()
        value: _T = self._once[name]
        return value

    def part(
        self, name: str, made_of: _T, make: Callable[[], Any], same: Callable[[_T, _T], bool] = operator.is_
    ) -> Part:
        """The part with this name.

        Args:
            name: of the part.
            made_of: its source, which is not changed from now on.
            make: returns the content of the part.
            same: whether the source equals that of the last part with this name, which is then still valid.
        """
        known = self._known.get(name)
        if known is None or not same(made_of, known[0]):
            self._known[name] = known = made_of, Part(make())
        return known[1]


def are_same(these: Iterable[Any], those: Iterable[Any]) -> bool:
    """Whether the objects are pairwise identical."""
    return all(map(operator.is_, these, those))


def _is_constant(value: Any) -> bool:
    if type(value) is Part:
        return value.is_constant
    return type(value) in _CONSTANT or copy.deepcopy(value) is value


def _same(value: Any) -> Any:
    return value


def owned(part: Any) -> Any:
    """The content of a part for a state, with new dicts and lists around the contents of each `Part`."""
    kind = type(part)
    if kind is Part:
        return part.own()
    if kind is dict:
        return {
            key: value if (kind := type(value)) in _PLAIN else value.own() if kind is Part else owned(value)
            for key, value in part.items()
        }
    if kind is list:
        return [value if type(value) in _PLAIN else owned(value) for value in part]
    return part


def sealed(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The state, with new checksums of the parts with these names; other entries are the program's."""
    return {**owned(state), "seal": _seals(state, names)}


def _seals(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The seal of each of these parts: a number or text itself, in a list, otherwise its checksum."""
    return {
        name: [part]
        if (kind := type(part := state[name])) in _PLAIN
        else part.checksum
        if kind is Part
        else checksum(part)
        for name in names
        if name != "seal"
    }


def check_seal(state: dict[str, Any], names: set[str], *unsealed: str) -> None:
    """Raises StateError unless the parts with these names exist, and all except `unsealed` match their seals.

    Other entries of the state are the program's.
    """
    if missing := sorted(names.union(unsealed) - state.keys()):
        raise StateError(
            f"the state must have all that state_dict() gives, and lacks {', '.join(missing)}; load it as it was saved"
        )
    found = _seals(state, names)
    saved = state["seal"] if isinstance(state["seal"], dict) else {}
    names = found.keys() | saved.keys()
    damaged = sorted(str(name) for name in names if checksum(found.get(name)) != checksum(saved.get(name)))
    if damaged:
        raise StateError(
            f"the state is not what state_dict() gave: {', '.join(damaged)} was changed or lost since; load "
            "it as it was saved, or an earlier state"
        )


def checksum(part: Any) -> int:
    """Of everything in a part of a state; lists and tuples are equal if a state has gone through JSON."""
    kind = type(part)
    if kind is Part:
        return part.checksum  # type: ignore[no-any-return]
    if kind in _PLAIN:
        shown = repr(part) if kind is not int or _LEAST < part < _MOST else hex(part)
        return zlib.crc32(shown.encode())
    if isinstance(part, dict):
        if isinstance(part, collections.OrderedDict):
            return zlib.crc32(_shown((*part, *part.values())), zlib.crc32(b"OrderedDict"))
        if {*map(type, part)} <= _TEXT:
            in_order = _in_order if len(part) <= _REMEMBERED else _in_order.__wrapped__
            names, before = in_order(tuple(part))
            return checksum_of_values(map(part.__getitem__, names), before)
        return zlib.crc32(repr(sorted([(checksum(key), checksum(value)) for key, value in part.items()])).encode())
    if isinstance(part, (list, tuple)):
        return zlib.crc32(_shown(part))
    if kind in _BINARY:
        return zlib.crc32(part, _BINARY[kind])
    if isinstance(part, torch.Tensor):
        return _of_tensor(part)
    if isinstance(part, (set, frozenset)):
        return zlib.crc32(repr(sorted(map(checksum, part))).encode(), zlib.crc32(b"set"))
    if isinstance(part, (torch.TypedStorage, torch.UntypedStorage)):
        untyped = untyped_in(part) if isinstance(part, torch.TypedStorage) else part
        return _of_tensor(torch.empty(0, dtype=torch.uint8).set_(untyped.cpu()))
    return zlib.crc32(b"object")


def _of_tensor(tensor: torch.Tensor) -> int:
    is_simple = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not is_simple or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return checksum(tensor.__reduce_ex__(2)[1])  # pickle's arguments to build it: simple tensors, sizes, scales
    content = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    before = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(content.view(torch.uint8).numpy().data, before)


def checksum_of_names(names: tuple[str, ...]) -> int:
    """Of those of a dict; see `checksum_of_values`."""
    return _in_order(names)[1]


def checksum_of_values(values: Iterable[Any], before: int) -> int:
    """Of a dict with few entries: its values in the order of its names, after the checksum of the names."""
    return zlib.crc32(_shown(values), before)


def _shown(values: Iterable[Any]) -> bytes:
    """A complete description of some values: the values themselves, or their checksums."""
    shown = [
        value
        if ((kind := type(value)) is int and _LEAST < value < _MOST) or kind in _SHORT
        else [value.checksum if kind is Part else checksum(value)]
        for value in values
    ]
    return repr(shown).encode()


@functools.lru_cache(maxsize=64)
def _in_order(names: tuple[str, ...]) -> tuple[list[str], int]:
    """The names of a dict, and their checksum, which does not depend on their order."""
    ordered = sorted(names)
    return ordered, zlib.crc32(repr(ordered).encode())
