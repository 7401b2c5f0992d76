"""The documents of the repository, and the Python code in them: each block is a whole program.

A comment before a block says where it differs: `<!-- run with: python -->` names a command (it runs in a process of its
own, in `make test-full`), and `<!-- not run: it needs ... -->` tells why only its imports are tried.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIRED = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/decisions.md"]
DOCUMENTS = sorted({*REQUIRED, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))})

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
HOW = re.compile(r"<!-- (run with|not run): ([^\n]+) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """A block of Python code.

    Attributes:
        document: the file, from the root.
        line: of the document, where the code begins.
        code: with as many empty lines before it, so that tracebacks name lines of the document.
        command: what runs it; "" is the process of the tests, and None nothing.
    """

    document: str
    line: int
    code: str
    command: str | None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks_of(document: str, text: str) -> Iterator[Block]:
    """The blocks of Python code in a document's text."""
    for fence in FENCE.finditer(text):
        if fence[2] == "python":
            before = text.count("\n", 0, fence.start(3))
            how = HOW.search(text, 0, fence.start())
            command = "" if how is None else how[2] if how[1] == "run with" else None
            yield Block(document, before + 1, "\n" * before + textwrap.dedent(fence[3]), command)


def commands_of(text: str) -> list[str]:
    """The lines of the blocks of shell commands in a document's text."""
    blocks = [textwrap.dedent(code) for _, language, code in FENCE.findall(text) if language == "sh"]
    return [line for block in blocks for line in block.splitlines() if line]


BLOCKS = [block for name in DOCUMENTS for block in blocks_of(name, (ROOT / name).read_text())]
