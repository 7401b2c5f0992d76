"""Makes mutants of the library: many small faults in one copy of its sources, of which a process has one, or none.

A site is an expression or statement in a function, and its mutant is what stands there in the process whose environment
names the site's number. The original asks `hit`, which also notes in a file that the site was reached: so one run of
the tests without a mutant shows which tests can notice which one.
"""

import ast
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

MUTATED = "epoch", "host", "resume", "transport", "workers"  # folders of the library, unless others are given
ACTIVE = "RAYLOADER_MUTANT"  # the variable with the number of the site whose mutant a process has
REACHED = "RAYLOADER_MUTANTS_REACHED"  # the variable with the file that holds a byte for each site

HIT = f'''"""Whether a site has its original; written by tests/mutants/mutation.py."""

import contextlib
import mmap
import os

nothing = contextlib.nullcontext
_active = int(os.environ.get("{ACTIVE}", -1))
_reached = bytearray(65536)
if path := os.environ.get("{REACHED}"):
    with open(path, "r+b") as file:
        _reached = mmap.mmap(file.fileno(), 0)


def hit(number):
    _reached[number] = 1
    return number != _active
'''

TURNED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Site:
    """Where a mutant differs.

    Attributes:
        file: of the library, from its root.
        line: in that file.
        column: in that line.
        kind: what is done there.
        text: the source that is changed.
    """

    file: str
    line: int
    column: int
    kind: str
    text: str

    def __str__(self):
        return f"{self.file}:{self.line}: {self.kind}: {self.text}"


def kind_of(node):
    """What can be done to a node in a function's body; None: nothing."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            return "a comparison is turned"
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            return "a constant is moved"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            return "a statement is dropped"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "a statement is dropped"
        case ast.FunctionDef(body=[_, _, *_]) if node.name != "__init__":
            return "a function returns at once"
        case ast.With(items=[ast.withitem(context_expr=lock, optional_vars=None)]) if "lock" in ast.unparse(lock):
            return "a lock is not taken"
    return None


def mutated(node, kind, hit):
    """The node that is the original where the expression `hit` is true."""
    match kind:
        case "a comparison is turned":
            turned = ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
            return ast.IfExp(hit, node, turned)
        case "a constant is moved":
            return ast.IfExp(hit, node, ast.Constant(node.value + 1))
        case "a statement is dropped":
            return ast.If(hit, [node], [])
        case "a function returns at once":
            node.body.insert(1 if ast.get_docstring(node) is not None else 0, ast.If(hit, [ast.Pass()], [ast.Return()]))
            return node
    item = node.items[0]
    nothing = ast.parse("_mutants.nothing()", mode="eval").body
    return ast.With([ast.withitem(ast.IfExp(hit, item.context_expr, nothing))], node.body)


class Walk(ast.NodeTransformer):
    """Visits what can be changed in the functions of a file.

    Args:
        file: its name.
        chosen: numbers of sites; the others stay as they are.
    """

    def __init__(self, file, chosen=None):
        self.file, self.chosen, self.sites, self.inside = file, chosen or {}, [], 0

    def visit(self, node):
        kind = kind_of(node) if self.inside or isinstance(node, ast.FunctionDef) else None
        site = None
        if kind is not None:
            text = f"def {node.name}" if isinstance(node, ast.FunctionDef) else ast.unparse(node).splitlines()[0]
            site = Site(self.file, node.lineno, node.col_offset, kind, text[:100])
            self.sites.append(site)
        node = self.parts(node)
        if site in self.chosen:
            hit = ast.parse(f"_mutants.hit({self.chosen[site]})", mode="eval").body
            return mutated(node, kind, hit)
        return node

    def parts(self, node):
        """Visits what a node consists of: of a function its body alone, of an f-string and a pattern nothing."""
        if isinstance(node, ast.FunctionDef):
            self.inside += 1
            node.body = [self.visit(statement) for statement in node.body]
            self.inside -= 1
        elif isinstance(node, ast.ClassDef):
            inside, self.inside = self.inside, 0
            node.body = [self.visit(statement) for statement in node.body]
            self.inside = inside
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                node.value = self.visit(node.value)
        elif isinstance(node, ast.match_case):
            node.body = [self.visit(statement) for statement in node.body]
        elif not isinstance(node, ast.JoinedStr):
            return self.generic_visit(node)
        return node


def sites_of(library, folders=MUTATED):
    """All sites of these folders."""
    found = []
    for path in sorted(path for folder in folders for path in (library / folder).glob("*.py")):
        walk = Walk(str(path.relative_to(library)))
        walk.visit(ast.parse(path.read_text()))
        found += walk.sites
    return found


def choose(library, count, seed, folders=MUTATED):
    """So many sites of these folders, as many of each kind as there are, drawn by a seed: by number."""
    chance, by_kind = random.Random(seed), defaultdict(list)
    for site in sites_of(library, folders):
        by_kind[site.kind].append(site)
    for sites in by_kind.values():
        chance.shuffle(sites)
    chosen, kinds = [], sorted(by_kind)
    while len(chosen) < count and any(by_kind.values()):
        for kind in kinds:
            if by_kind[kind] and len(chosen) < count:
                chosen.append(by_kind[kind].pop())
    return chosen


def write(library: Path, chosen):
    """Puts the mutants of these sites into the library's files."""
    numbers = {site: number for number, site in enumerate(chosen)}
    (library / "_mutants.py").write_text(HIT)
    for file in {site.file for site in chosen}:
        path = library / file
        tree = Walk(file, numbers).visit(ast.parse(path.read_text()))
        after = 1 + max(i for i, node in enumerate(tree.body) if getattr(node, "module", "") == "__future__")
        tree.body.insert(after, ast.parse("from rayloader import _mutants").body[0])
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)) + "\n")
