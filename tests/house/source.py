"""Count properties of source files without running them."""

import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LIBRARIES = ("lightning", "transformers", "torch")
PRIVATE = re.compile(r"_(?!_)\w+")  # not __future__ or __version__
XLA = re.compile(r"xla|spmd|pjrt", re.IGNORECASE)


@dataclass(frozen=True)
class Class:
    """Counts of one class.

    Args:
        name: name of the class.
        file: its file, relative to the root package.
        bases: names of its bases, without modules.
        methods: names of the methods it defines.
        abstract: number of abstract methods.
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
        path: path of the file.
        root: folder of the root package.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        self.name = path.relative_to(root).as_posix()
        # Top-level package, or the module itself: "rollout", "types".
        self.package = path.relative_to(root).parts[0].removesuffix(".py")
        self.parents = (root.name, *path.relative_to(root).parent.parts)
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
        """Number of if statements and if expressions."""
        return sum(isinstance(node, ast.If | ast.IfExp) for node in self.nodes)

    @property
    def functions(self) -> Iterator[tuple[str, int]]:
        """Name and number of lines of every function, without its docstring."""
        for node in self.nodes:
            if isinstance(node, FUNCTIONS):
                size = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    size -= node.body[0].end_lineno - node.body[0].lineno + 1
                yield node.name, size

    @cached_property
    def docstrings(self) -> list[ast.Expr]:
        """Docstrings of the module, its classes and its functions."""
        owners = (n for n in self.nodes if isinstance(n, ast.Module | ast.ClassDef | FUNCTIONS))
        return [owner.body[0] for owner in owners if ast.get_docstring(owner) is not None]

    def shares(self) -> Counter[str]:
        """Count lines of code, docstrings, comments and blank lines."""
        of_docstrings = {
            number for node in self.docstrings for number in range(node.lineno, node.end_lineno + 1)
        }
        return Counter(
            _kind_of_line(line, number in of_docstrings)
            for number, line in enumerate(self.text.splitlines(), start=1)
        )

    def imports(self, *, in_functions: bool = True) -> Iterator[str]:
        """Yield every imported module or name, dotted, with relative imports resolved.

        Args:
            in_functions: include imports that run when a function is called. Imports for type
                checkers are always included.
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
                above = self.parents[: len(self.parents) - node.level + 1] if node.level else ()
                module = ".".join((*above, *filter(None, [node.module])))
                yield from (f"{module}.{alias.name}" for alias in node.names)

    @cached_property
    def trailing_comments(self) -> int:
        """Number of comments after code on the same line."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = (token for token in tokens if token.type == tokenize.COMMENT)
        return sum(bool(token.line[: token.start[1]].strip()) for token in comments)

    @property
    def num_any(self) -> int:
        """Number of uses of `Any` in annotations."""
        return sum(isinstance(node, ast.Name) and node.id == "Any" for node in self.nodes)

    @cached_property
    def own_private_names(self) -> set[str]:
        """Private names that the file defines: functions, classes, attributes, constants."""
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.ClassDef | FUNCTIONS):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                # Setting an attribute of another object does not define it.
                and ast.unparse(node.value) in ("self", "cls")
            ):
                names.add(node.attr)
        return {name for name in names if PRIVATE.fullmatch(name)}

    def foreign_private_uses(self, own: set[str]) -> Iterator[tuple[str, str]]:
        """Yield (library, name) for each use of a private name of a library.

        Args:
            own: private names that litgrpo defines. A private attribute with another name belongs
                to the first of lightning, transformers and torch that the file imports.
        """
        library = next((name for name in LIBRARIES if self.imports_package(name)), None)
        for name in self.imports():
            source, *parts = name.split(".")
            if source in LIBRARIES and any(PRIVATE.fullmatch(part) for part in parts):
                yield source, name
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
                of_python = ast.unparse(node.value) in ("os", "sys")
                if library and node.attr not in own and not of_python:
                    yield library, node.attr

    def imports_package(self, *packages: str) -> bool:
        """Return whether one of these packages is imported."""
        return any(name.split(".")[0] in packages for name in self.imports())

    @cached_property
    def knows_xla(self) -> bool:
        """True if its code, without docstrings and comments, has a name of XLA."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS) and ast.get_docstring(node):
                node.body[0] = ast.Pass()
        return XLA.search(ast.unparse(tree)) is not None

    def classes(self) -> Iterator[Class]:
        """Yield every class with its counts."""
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                methods = [inner for inner in node.body if isinstance(inner, FUNCTIONS)]
                yield Class(
                    node.name,
                    self.name,
                    tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases),
                    frozenset(method.name for method in methods),
                    sum("abstractmethod" in map(ast.unparse, m.decorator_list) for m in methods),
                    frozenset(name for method in methods for name in _names_set_on_self(method)),
                )


def _kind_of_line(line: str, in_docstring: bool) -> str:
    if in_docstring:
        return "docstring"
    if not line.strip():
        return "blank"
    return "comment" if line.lstrip().startswith("#") else "code"


def _names_set_on_self(method: ast.AST) -> Iterator[str]:
    for node in ast.walk(method):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.value) == "self":
            yield node.attr


def files_of(root: Path) -> list[File]:
    """Return every source file of a package."""
    return [File(path, root) for path in sorted(root.rglob("*.py"))]


def with_bases(classes: Iterable[Class]) -> Iterator[tuple[Class, int, int]]:
    """Yield each class with the number of methods and attributes, including those of its bases."""
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


def import_cycles(files: list[File]) -> list[list[str]]:
    """Return groups of modules that import each other, directly or indirectly."""
    known = {file.module for file in files}
    imports: dict[str, set[str]] = defaultdict(set)
    for file in files:
        for name in file.imports(in_functions=False):
            module = name if name in known else name.rpartition(".")[0]
            if module in known - {file.module}:
                imports[file.module].add(module)
    reach = {module: _reachable(module, imports) for module in known}
    groups = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in known
        if module in reach[module]
    }
    return sorted(map(list, groups))


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports[module]
    return found
