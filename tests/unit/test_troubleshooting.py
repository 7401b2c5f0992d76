"""docs/troubleshooting.md quotes what the sources say, and what it quotes is what a user meets.

A message of the page is in back-ticks at the beginning of a table's row; `...` stands for what differs. The page has
all that the sources say but what explains itself: a rule with the value that was given, `... must be ..., got ...`.
"""

import ast
import itertools
import os
import re
import socket
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.data import IterableDataset

import rayloader
from documents import ROOT
from rayloader import DataLoader, SharedList
from rayloader.transport import line

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


# --- what the sources say


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


def begins(text: str, message: str) -> bool:
    return beginning(message)(text) is not None


# --- calls that provoke messages


def looped(**attributes: object) -> None:
    """Sets attributes of a loader, as programs may, and begins an epoch."""
    loader = DataLoader(range(4), num_workers=1)
    vars(loader).update(attributes)
    iter(loader)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def unforked() -> None:
    from rayloader.workers.zygote import Zygote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fork", refused)
        Zygote(refused)  # type: ignore[arg-type]


def unpaired() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socketpair", refused)
        line.pair()


def refused() -> None:
    raise OSError("no more processes")


def with_references() -> None:
    from rayloader.workers.connection import LineCalls

    encoded = SimpleNamespace(skeleton=b"", buffers=[], carried=["a reference"])
    LineCalls.run(SimpleNamespace(process=None), SimpleNamespace(indices=SimpleNamespace(encoded=encoded)))  # type: ignore[arg-type]


def start_timeout() -> None:
    from rayloader.actors import placement

    placement._seconds("soon")


def lacking() -> None:
    loader = DataLoader(range(4))
    state = loader.state_dict()
    del state["position"]
    loader.load_state_dict(state)


def set_rank() -> None:
    DataLoader(range(4), num_replicas=2, rank=0).rank = 1


CALLS: dict[str, Callable[[], object]] = {
    "timeout must be": lambda: looped(timeout=-1),
    'on_timeout="restart"': lambda: DataLoader(range(4), on_timeout="restart"),
    'scheduling="dynamic" needs seeding="batch"': lambda: DataLoader(range(4), scheduling="dynamic"),
    "... must be ..., got ...": lambda: DataLoader(range(4), seeding="epoch"),
    "... must be a whole number >= ...": lambda: looped(num_workers=-1),
    "worker_method='thread' asks": lambda: DataLoader(range(4), worker_method="thread"),
    "prefetch_to_device=...": lambda: DataLoader(range(4), prefetch_to_device=1),
    "share() takes a loader without": lambda: rayloader.share(DataLoader(range(4), device="cpu"), consumers=1),
    "name must be": lambda: DataLoader(range(4), name=""),
    "ray_remote_args must be": lambda: DataLoader(range(4), ray_remote_args=[]),
    "ray_remote_args['resources']": lambda: DataLoader(range(4), ray_remote_args={"resources": 1}),
    "ray_remote_args must not": lambda: DataLoader(range(4), ray_remote_args={"name": "mine"}),
    "ray_remote_args: ...": lambda: DataLoader(range(4), ray_remote_args={"num_cpus": -1}),
    "RAYLOADER_START_TIMEOUT": start_timeout,
    'workers="fork" makes': lambda: looped(workers="fork", arenas=False),
    "this process could not be forked": unforked,
    "can't make a local socket": unpaired,
    "the sampler yields references": with_references,
    "SharedList index": lambda: SharedList("ab")[2],
    "cached() needs": lambda: rayloader.cached(object()),
    "max_bytes must": lambda: rayloader.cached([1], "much"),
    "... is of a folder": lambda: rayloader.cached([1], key="1"),
    "index ... is out of range": lambda: rayloader.cached([1])[1],
    "this is not a state of a rayloader.DataLoader": lambda: DataLoader(range(4)).load_state_dict({"epoch": 1}),
    "the state must have all": lacking,
    "... was given without": lambda: DataLoader(range(4), rank=0),
    "seed=...": lambda: DataLoader(range(4), seed=1),
    "... attribute should not": set_rank,
    "patch() takes arguments": lambda: rayloader.patch(num_workers=1),
    "share() takes a rayloader": lambda: rayloader.share([1], consumers=1),
}


# --- tests


def test_the_messages_of_the_page_are_in_the_sources() -> None:
    assert [message for message in MESSAGES if not any(map(beginning(message), all_texts()))] == []


def test_what_the_sources_say_is_on_the_page() -> None:
    known = [*MESSAGES, *NOT_ON_THE_PAGE]
    others = [(place, text) for place, text in said() if not EXPLAINS_ITSELF(text)]
    assert [(place, text) for place, text in others if not any(begins(text, message) for message in known)] == []
    assert [text for text in NOT_ON_THE_PAGE if not any(begins(other, text) for _, other in others)] == []


def test_the_page_is_short_and_leaves_out_what_explains_itself() -> None:
    assert PAGE.count("\n") <= 400
    assert [message for message in MESSAGES if EXPLAINS_ITSELF(message)] == []


@pytest.mark.parametrize("start", CALLS)
def test_a_call_provokes_the_message(start: str) -> None:
    messages = [text for text in all_texts() if begins(text, start)]
    with pytest.raises((Exception, UserWarning)) as caught:
        CALLS[start]()
    ends = str(caught.value), str(caught.value).rpartition(": ")[2]  # the reason of a refusal comes last
    assert any(begins(text, message) for text in ends for message in messages)


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+Error)$", rayloader.errors.__doc__ or "", re.MULTILINE)
    assert {name for _, name in drawn} == PUBLIC | {"RuntimeError"}
    above: list[str] = []
    for branch, name in drawn:
        above[len(branch) // 4 :] = [name]
        assert above[-2:-1] in ([], [getattr(rayloader, name, RuntimeError).__base__.__name__])


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("x", []),
        ("'a' 'b'", ["ab"]),
        ("f'a {b} c{d!r}'", ["a ... c..."]),
        ("'%d of %s, 100%%'", ["... of ..., 100%%"]),
        ("f'a {b}' + c", ["a ......"]),
        ("'a' if b else f'{c}'", ["a", "..."]),
    ],
)
def test_the_texts_of_an_expression(source: str, texts: list[str]) -> None:
    assert template(ast.parse(source, mode="eval").body) == texts


@pytest.mark.parametrize(
    ("text", "message", "does"),
    [
        ("no room for ... workers", "no room", True),
        ("no room for ... workers", "no room for ... work", True),
        ("no room for ... workers", "no room for ... actors", False),
        ("there is no room", "no room", False),
        ("got ...; leave it out", "got ...", True),
    ],
)
def test_how_a_text_begins(text: str, message: str, does: bool) -> None:
    assert begins(text, message) is does
