"""docs/troubleshooting.md quotes what the sources say, and what it quotes is what a user meets.

A message of the page is in back-ticks at the beginning of a table's row; `...` stands for what differs. The page has
all that the sources say but what explains itself: a rule with the value that was given, `... must be ..., got ...`.
"""

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import rayloader
from documents import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
EXPLAINS_ITSELF = re.compile(r"\bmust\b.*\bgot\b", re.DOTALL).search
SOURCES = sorted((ROOT / "rayloader").rglob("*.py"))

GAP = "..."
PLACEHOLDER = re.compile(r"%[-.\d]*[sdgfr]")  # of logging

# The constructors of what a user meets, and the functions that are given a text for the user.
PUBLIC = {name for name in rayloader.__all__ if name.endswith("Error")}
SAYS = PUBLIC | {"TypeError", "ValueError", "AssertionError", "IndexError", "FileNotFoundError", "ImportError"}
SAYS |= {"NotImplementedError", "UnpicklingError", "PicklingError"}
SAYS |= {"CommandError"}  # of the commands
SAYS |= {"warn", "warning", "info", "add_note", "refusal"}

# What these say that is not for users, or stands elsewhere.
NOT_ON_THE_PAGE = {
    "SingleProcessIterator requires timeout == 0": "torch's own text",
    "decode needs the skeleton's ... buffers": "an assertion of the code",
    "... on node ... is another file": "goes on after `The dataset refers to`",
    "... node ... does not have": "goes on after `The dataset refers to`",
    "it is of another format, or of another number of samples": "goes on after `the cache ... can't be used`",
    "keep the object that it is a view of": "goes on after `cannot pickle`",
    "a descriptor of this process": "goes on after `cannot pickle`",
    "a file of this process": "goes on after `cannot pickle`",
    "torch.compile has made it": "goes on after `cannot pickle`",
}


def template(node: ast.AST) -> list[str]:
    """The texts that an expression may give, with gaps for what is not known here; none if it is no text."""
    if isinstance(node, ast.Constant):
        return [PLACEHOLDER.sub(GAP, node.value)] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        parts = [template(part) if isinstance(part, ast.Constant) else gaps(part) for part in node.values]
        return ["".join(choice) for choice in itertools.product(*parts)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [
            "".join(pair) for pair in itertools.product(template(node.left) or [GAP], template(node.right) or [GAP])
        ]
    if isinstance(node, ast.IfExp):
        return template(node.body) + template(node.orelse)
    return []


def gaps(node: ast.expr) -> list[str]:
    """A value within a text: a gap, or the text of a constant of rayloader's."""
    assert isinstance(node, ast.FormattedValue)
    name = ast.unparse(node.value)
    return [constants().get(name, GAP)]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def constants() -> dict[str, str]:
    """Names in capitals that stand for one text."""
    return {
        node.targets[0].id: node.value.value
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


@cache
def all_texts() -> list[str]:
    """Whatever text the library may put together."""
    return [text for path in SOURCES for node in nodes(path) for text in template(node)]


def said() -> Iterator[tuple[str, str]]:
    """Where, and what: the texts of errors, warnings, notes and log lines."""
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SAYS:
                for argument in node.args:
                    texts = [text for text in template(argument) if " " in text]
                    yield from ((f"{path.relative_to(ROOT)}:{node.lineno}", text) for text in texts)
                    if texts:
                        break


@cache
def beginning(message: str) -> Callable[[str], re.Match[str] | None]:
    """Matches what begins as a message does; a gap of the one may be anything in the other."""
    return re.compile("(.|\n)*".join(map(re.escape, message.removesuffix(GAP).strip().split(GAP)))).match


def test_the_messages_of_the_page_are_in_the_sources() -> None:
    assert [message for message in MESSAGES if not any(map(beginning(message), all_texts()))] == []


def test_what_the_sources_say_is_on_the_page() -> None:
    known = [*MESSAGES, *NOT_ON_THE_PAGE]
    others = [(place, text) for place, text in said() if not EXPLAINS_ITSELF(text)]
    assert [(place, text) for place, text in others if not any(beginning(message)(text) for message in known)] == []
    assert len(others) > 100


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+Error)$", rayloader.errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name in drawn} == PUBLIC | {"RuntimeError"}
    above: list[str] = []
    for branch, name in drawn:
        above[len(branch) // 4 :] = [name]
        assert above[-2:-1] in ([], [getattr(rayloader, name, RuntimeError).__base__.__name__])
