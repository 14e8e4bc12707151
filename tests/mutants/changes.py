"""Small changes of a source file: the automatic ones, found in its syntax tree."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Place: TypeAlias = tuple[int, int]  # first and last offset in a text
Change: TypeAlias = tuple[Place, str]
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "litgrpo"
COMPARE: dict[type, tuple[str, str]] = {
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in")},
    **{ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is")},
}
ARITHMETIC: dict[type, tuple[str, str]] = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")},
    **{ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.Pow: ("**", "*")},
    **{ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&")},
}
OPPOSITE = {"min": "max", "max": "min", "all": "any", "any": "all"}
OPPOSITE |= {"amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}


@dataclass(frozen=True)
class Mutant:
    """A source file with one change.

    Args:
        file: path below `src/litgrpo`.
        start: offset of the replaced text in the file.
        old: the replaced text.
        new: what it is replaced with.

    Example:
        `if n < 2:` becomes `if n <= 2:`::

            Mutant(file="tensors.py", start=812, old="n < 2", new="n <= 2")
    """

    file: str
    start: int
    old: str
    new: str

    @property
    def path(self) -> Path:
        """Path of the file in the repository."""
        return Path("src", "litgrpo", self.file)

    def text(self) -> str:
        """The whole file after the change."""
        text = (SOURCE / self.file).read_text(encoding="utf-8")
        assert text[self.start :].startswith(self.old)
        return text[: self.start] + self.new + text[self.start + len(self.old) :]

    def line(self) -> int:
        """Number of the first changed line."""
        before = (SOURCE / self.file).read_text(encoding="utf-8")[: self.start]
        return before.count("\n") + 1

    def lines(self) -> tuple[str, str]:
        """The first changed line, before and after."""
        number = self.line() - 1
        before = (SOURCE / self.file).read_text(encoding="utf-8").splitlines()[number]
        return before.strip(), self.text().splitlines()[number].strip()

    def __str__(self) -> str:
        before, after = self.lines()
        return f"src/litgrpo/{self.file}:{self.line()} {before} -> {after}"


def files(package: str) -> list[str]:
    """Paths below `src/litgrpo` of the source files of a package, or of a single module."""
    folder = SOURCE / package
    found = sorted(folder.rglob("*.py")) if folder.is_dir() else [SOURCE / f"{package}.py"]
    return [path.relative_to(SOURCE).as_posix() for path in found]


def automatic(file: str) -> list[Mutant]:
    """All automatic changes of a file, in order, each of which still parses."""
    text = (SOURCE / file).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)

    def offset(line: int, column: int) -> int:
        # Columns of the syntax tree count bytes.
        own = len(lines[line - 1].encode()[:column].decode())
        return sum(map(len, lines[: line - 1])) + own

    def place(node: Any) -> tuple[int, int]:
        first = offset(node.lineno, node.col_offset)
        return first, offset(node.end_lineno, node.end_col_offset)

    found = {}
    for node in _walk(ast.parse(text)):
        for (start, end), new in _changes(node, text, place):
            mutant = Mutant(file, start, text[start:end], new)
            if mutant.old != new and _parses(text[:start] + new + text[end:]):
                found[start, end, new] = mutant
    return [found[key] for key in sorted(found)]


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes that decide behavior: without annotations, texts, errors and assertions."""
    is_strict = isinstance(node, ast.keyword) and node.arg == "strict"  # zip's assertion
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or is_strict:
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _changes(node: ast.AST, text: str, place: Callable[[Any], Place]) -> Iterator[Change]:
    """Yield (place, replacement) for a node of the source `text`."""
    yield from _operators(node, text, place)
    match node:
        case ast.Constant(value=bool(value)):
            yield place(node), str(not value)
        case ast.Constant(value=int(value)):
            yield place(node), str(value + 1)
        case ast.Constant(value=float(value)):
            yield place(node), str(value * 2 if value else 1.0)
        case ast.IfExp(body=body, orelse=orelse):
            yield place(node), _part(text, place(body))
            yield place(node), _part(text, place(orelse))
        case ast.If(test=test):
            yield place(test), "True"
            yield place(test), "False"
        case ast.Name(id=name) if name in OPPOSITE:
            yield place(node), OPPOSITE[name]
        case ast.Attribute(value=value, attr=name) if name in OPPOSITE:
            yield place(node), f"{_part(text, place(value))}.{OPPOSITE[name]}"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Delete():
            yield place(node), "pass"
        case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name[:1].islower():
            yield place(node), _part(text, place(first))


def _operators(node: ast.AST, text: str, place: Callable[[Any], Place]) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield _swap(text, place(left)[1], place(right)[0], *COMPARE[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
            yield _swap(text, place(left)[1], place(right)[0], *ARITHMETIC[type(op)])
        case ast.BoolOp(op=op, values=[*_, left, right]):
            words = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield _swap(text, place(left)[1], place(right)[0], *words)
        # The last dimension, -1, often is 1.
        case ast.UnaryOp(operand=operand) if not isinstance(operand, ast.Constant):
            yield place(node), _part(text, place(operand))


def _part(text: str, place: Place) -> str:
    return f"({text[slice(*place)]})"


def _swap(text: str, start: int, end: int, old: str, new: str) -> Change:
    """Replace the operator that is between two operands, which may be in parentheses."""
    return (start, end), text[start:end].replace(old, new, 1)
