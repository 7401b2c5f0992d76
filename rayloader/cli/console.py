"""Where the commands print, and how they end when something is wrong."""

from __future__ import annotations

import json
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

out, err = Console(highlight=False), Console(stderr=True, highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON, and nothing else")]


def shown(text: str) -> str:
    """A text that may come from a file: no part of it moves the terminal's cursor, or is markup of rich's."""
    return escape("".join([char if char.isprintable() or char == "\n" else _as_escape(char) for char in text]))


def _as_escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def print_json(content: Any) -> None:
    """Prints JSON to the standard output."""
    print(json.dumps(content, indent=2))


def in_full(error: Exception) -> str:
    """What an error says, with the notes that name the sample or the remedy: its own, and those of its cause."""
    return "\n".join([str(error), *getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())])


def fail(error: Exception) -> NoReturn:
    """Says what is wrong, and ends the command with code 2."""
    err.print("[red]rayloader:[/]", shown(in_full(error)))
    raise typer.Exit(2) from error
