"""Tables in documents that are made of measured results, each between two markers.

tests/unit/test_docs.py holds each of them to its results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

END = "<!-- end of table -->"


def found(document: Path, command: str) -> str:
    """The table that this command makes, as it is in the document."""
    return _block(command).search(document.read_text())[1]  # type: ignore[index]


def put(document: Path, command: str, table: str) -> None:
    """Puts the table into the document, in place of the one that is there."""
    text = document.read_text()
    begin, end = _block(command).search(text).span(1)  # type: ignore[union-attr]
    document.write_text(text[:begin] + table + text[end:])


def tell(document: Path, command: str, make: Callable[[], str]) -> None:
    """Prints a table; with --write among the program's arguments, which `make` does not see, also `put`s it."""
    write = "--write" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--write"]
    made = make()
    if write:
        put(document, command, made)
    print(made)


def markdown(rows: list[list[str]]) -> str:
    """A table of these rows, the first of which is its header: text to the left, numbers to the right."""
    header, *others = rows
    numeric = [all(cell[:1].isdigit() or cell in ("-", "") for cell in column) for column in zip(*others, strict=True)]
    aligned = ["---:" if right else "---" for right in numeric]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, aligned, *others))


def _block(command: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- table: {re.escape(command)} -->\n(.*?)\n{END}", re.DOTALL)
