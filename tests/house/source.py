"""What can be counted in source files without running them."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
XLA = re.compile(r"xla|spmd|pjrt", re.IGNORECASE)


@dataclass(frozen=True)
class Class:
    """Counts of one class.

    Args:
        name: of the class.
        file: in which it is, relative to the package.
        bases: last parts of the names of its bases.
        methods: names of its own methods.
        abstract: how many of them are abstract.
        attributes: names that its methods assign on `self`.
    """

    name: str
    file: str
    bases: tuple[str, ...]
    methods: frozenset[str]
    abstract: int
    attributes: frozenset[str]


class File:
    """One source file.

    Args:
        path: of the file.
        root: folder of the package.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.name = path.relative_to(root).as_posix()
        self.room = path.relative_to(root).parts[0].removesuffix(".py")
        self.package = (root.name, *path.relative_to(root).parent.parts)
        parts = path.relative_to(root).with_suffix("").parts
        self.module = ".".join((root.name, *parts)).removesuffix(".__init__")
        self.text = path.read_text(encoding="utf-8")
        self.lines = self.text.count("\n")
        self.tree = ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(self.tree))

    @property
    def ifs(self) -> int:
        """Statements and expressions that branch."""
        return sum(isinstance(node, ast.If | ast.IfExp) for node in self.nodes)

    @property
    def functions(self) -> Iterator[tuple[str, int]]:
        """Name and number of lines of every function."""
        for node in self.nodes:
            if isinstance(node, FUNCTIONS):
                yield node.name, node.end_lineno - node.lineno + 1

    @cached_property
    def docstrings(self) -> list[ast.Expr]:
        """The docstrings of the module, its classes and its functions."""
        owners = (n for n in self.nodes if isinstance(n, ast.Module | ast.ClassDef | FUNCTIONS))
        return [owner.body[0] for owner in owners if ast.get_docstring(owner) is not None]

    def shares(self) -> Counter[str]:
        """Lines of code, of docstrings, of comments alone, and blank ones."""
        of_docstrings = {
            number for node in self.docstrings for number in range(node.lineno, node.end_lineno + 1)
        }
        return Counter(
            _kind_of_line(line, number in of_docstrings)
            for number, line in enumerate(self.text.splitlines(), start=1)
        )

    def imports(self, *, in_functions: bool = True) -> Iterator[str]:
        """Every module or name that is imported, dotted, relative imports resolved.

        Args:
            in_functions: also what is imported when a function runs. What is imported for type
                checkers only counts always.
        """
        inside = {
            id(inner)
            for node in self.nodes
            if isinstance(node, FUNCTIONS) and not in_functions
            for inner in ast.walk(node)
        }
        for node in self.nodes:
            if id(node) in inside:
                continue
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = self.package[: len(self.package) - node.level + 1] if node.level else ()
                module = ".".join((*above, *filter(None, [node.module])))
                yield from (f"{module}.{alias.name}" for alias in node.names)

    def imports_package(self, *packages: str) -> bool:
        """Whether one of these packages is imported."""
        return any(name.split(".")[0] in packages for name in self.imports())

    @cached_property
    def knows_xla(self) -> bool:
        """Whether its code, without docstrings and comments, has a name of XLA in it."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node):
                node.body[0] = ast.Pass()
        return XLA.search(ast.unparse(tree)) is not None

    def classes(self) -> Iterator[Class]:
        """Every class with its counts."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                methods = [inner for inner in node.body if isinstance(inner, FUNCTIONS)]
                yield Class(
                    node.name,
                    self.name,
                    tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases),
                    frozenset(method.name for method in methods),
                    sum("abstractmethod" in map(ast.unparse, m.decorator_list) for m in methods),
                    frozenset(name for method in methods for name in _assigned_on_self(method)),
                )


def _kind_of_line(line: str, in_docstring: bool) -> str:
    if in_docstring:
        return "docstring"
    if not line.strip():
        return "blank"
    return "comment" if line.lstrip().startswith("#") else "code"


def _assigned_on_self(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.value) == "self":
            yield node.attr


def files_of(root: Path) -> list[File]:
    """Every source file of a package."""
    return [File(path, root) for path in sorted(root.rglob("*.py"))]


def inherited(classes: Iterable[Class]) -> Iterator[tuple[Class, int, int]]:
    """Each class with the methods and attributes of one object: its own and those of its bases."""
    known = {each.name: each for each in classes}

    def line(each: Class, seen: tuple[str, ...] = ()) -> Iterator[Class]:
        yield each
        for base in each.bases:
            if base in known and base not in seen:
                yield from line(known[base], (*seen, each.name))

    for each in known.values():
        above = list(line(each))
        methods = frozenset().union(*(one.methods for one in above))
        attributes = frozenset().union(*(one.attributes for one in above))
        yield each, len(methods), len(attributes)


def circles(files: list[File]) -> list[list[str]]:
    """Groups of modules that import each other, over however many steps."""
    known = {file.module for file in files}
    imports: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for name in file.imports(in_functions=False):
            module = name if name in known else name.rpartition(".")[0]
            if module in known - {file.module}:
                imports[file.module].add(module)
    reach = {module: _reached(module, imports) for module in known}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in known
        if module in reach[module]
    }
    return sorted(map(list, groups))


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports[module]
    return found
