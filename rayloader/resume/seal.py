"""Checksums of what states hold, to tell whether a state is what it was when `state_dict()` returned it.

Promise: pure. A value that torch has saved and loaded, even with `weights_only` and to another device, or that has gone
through JSON, has the same checksum. Of the user's own values, plain ones and tensors of every kind are covered; of an
object of another type only its place counts.

NOTE [Same parts]. Some frameworks request a state before every batch, and most of a state is unchanged since the last
batch. What stays the same is a `Part`: it is packed once, and its checksum is known. All states share its content if
nobody can change it, such as a text or a tuple of texts.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from rayloader._compat import untyped_in

_T = TypeVar("_T")

_SHORT = {int, float, bool, complex, type(None)}
_TEXT, _DICT, _BINARY, _OBJECT = map(zlib.crc32, (b"text", b"dict", b"binary", b"object"))


class Part:
    """A part of states that is packed once; see NOTE [Same parts].

    Args:
        value: its content, of plain types, which nobody changes.
        known: its checksum, if known.
        is_constant: whether nobody can change it, if known.
    """

    __slots__ = ("checksum", "is_constant", "value")

    def __init__(self, value: Any, known: int | None = None, *, is_constant: bool | None = None) -> None:
        self.value = value
        self.checksum = checksum(value) if known is None else known
        self.is_constant = copy.deepcopy(value) is value if is_constant is None else is_constant

    def own(self) -> Any:
        """The content for one state, whose changes no other state sees."""
        return self.value if self.is_constant else copy.deepcopy(self.value)


class Parts:
    """The parts of one object's states, each valid as long as its source stays the same."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def part(
        self, name: Hashable, source: _T, pack: Callable[[_T], Any], same: Callable[[_T, _T], bool] = operator.is_
    ) -> Part:
        """The part with this name.

        Args:
            name: of the part.
            source: what it is packed from; it is not changed from now on.
            pack: returns the content of the part.
            same: whether the source equals that of the last part with this name, which is then still valid.
        """
        known = self._known.get(name)
        if known is None or not same(source, known[0]):
            self._known[name] = known = source, Part(pack(source))
        part: Part = known[1]
        return part


def checksum(value: Any) -> int:
    """Of everything in a value; lists and tuples are equal, for JSON has no tuples."""
    if isinstance(value, str):
        return checksum_of_text(value)
    if isinstance(value, dict):
        items = sorted([(checksum(key), checksum(part)) for key, part in value.items()])
        return zlib.crc32(repr(items).encode(), _DICT)
    if isinstance(value, (list, tuple)):
        return checksum_of_all([part if type(part) in _SHORT else [checksum(part)] for part in value])
    if isinstance(value, (bytes, bytearray)):
        return zlib.crc32(value, _BINARY)
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (torch.TypedStorage, torch.UntypedStorage)):
        untyped = untyped_in(value) if isinstance(value, torch.TypedStorage) else value
        return _of_tensor(torch.empty(0, dtype=torch.uint8).set_(untyped.cpu()))
    return zlib.crc32(repr(value).encode()) if type(value) in _SHORT else _OBJECT


def checksum_of_text(text: str, before: int = _TEXT) -> int:
    """Of a text, or with the checksum of another, of both joined."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass"), before)


def checksum_of_all(values: Sequence[Any]) -> int:
    """Of numbers, booleans and None, and the checksums of other values."""
    return zlib.crc32(repr(values).encode())


def _of_tensor(tensor: torch.Tensor) -> int:
    is_simple = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if not is_simple or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return checksum(tensor.__reduce_ex__(2)[1])  # pickle's arguments to build it: simple tensors, sizes, scales
    content = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    before = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    return zlib.crc32(content.view(torch.uint8).numpy().data, before)


NONE = Part(None)
