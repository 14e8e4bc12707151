"""Limits on YAML in a recipe or an option, and values that do not mean what they look like."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

MAX_DEPTH = 64  # a recipe has about 8; the parser of YAML recurses
MAX_NODES = 100_000  # with every alias expanded; the longest built-in recipe has about 150

# Texts without quotes that YAML 1.1 reads as something else than they look like: as what.
MISREAD = {
    re.compile(r"[-+]?0[0-9_]*[0-9][0-9_]*"): "an octal number; leave out leading zeros",
    re.compile(
        r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
    ): "a number in base 60; write seconds",
    re.compile("yes|no|on|off", re.IGNORECASE): "true or false; write one of them",
}
# Escapes of double quotes that are not meant in a text: `"\\boxed"` begins with a backspace.
CONTROLS = {"\a": "a", "\b": "b", "\f": "f", "\v": "v", "\x1b": "e", "\0": "0"}


class TooLarge(yaml.YAMLError):
    """YAML whose nesting or whose aliases would exhaust the stack or the memory."""


def check_limits(text: str) -> None:
    """Check the nesting and the number of values of a YAML text, without composing it."""
    # Aliases are counted as often as they are used: nine lines of nine aliases each are a billion
    # values.
    sizes: dict[str, int] = {}  # nodes below each anchor
    open_nodes: list[tuple[str | None, int]] = []  # (anchor, nodes before it)
    total = 0
    for event in yaml.parse(text):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _ in open_nodes]:
                raise TooLarge(f"line {line}: {event.anchor!r} contains itself")
            total += sizes.get(event.anchor, 0)
        elif isinstance(event, yaml.ScalarEvent):
            total += 1
            if event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, total))
            total += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = total - before
        if len(open_nodes) > MAX_DEPTH:
            raise TooLarge(f"line {line}: more than {MAX_DEPTH} nested lists or mappings")
        if total > MAX_NODES:
            raise TooLarge(f"line {line}: more than {MAX_NODES:,} values, counting aliases")


class Misread(yaml.YAMLError):
    """A value that YAML reads as something else than it looks like."""


def check_values(text: str) -> None:
    """Check that the values of a YAML text are what they look like; the error names the key."""
    for key, node in find_scalars(yaml.compose(text)):
        place = f"line {node.start_mark.line + 1}: {key or 'the value'}"
        reading = misreading(node)
        if reading:
            raise Misread(
                f"{place} is written {node.value}, which YAML reads as {reading}, or quote a text"
            )
        letters = [CONTROLS[character] for character in node.value if character in CONTROLS]
        if node.style == '"' and letters:
            raise Misread(
                f"{place} has \\{letters[0]} in double quotes, which is a control character: use "
                f"single quotes, or write \\\\{letters[0]}"
            )


def misreading(node: yaml.ScalarNode) -> str:
    """Return as what YAML reads a text without quotes, if it looks like something else; else ""."""
    if node.style is not None:
        return ""
    return next((what for look, what in MISREAD.items() if look.fullmatch(node.value)), "")


def is_misread(text: str) -> bool:
    """Return True for a single value that YAML reads as something else than it looks like."""
    return any(look.fullmatch(text.strip()) for look in MISREAD)


def find_scalars(node: yaml.Node | None, key: str = "") -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield (dotted key, node) of each scalar below a node, keys of mappings among them."""
    if isinstance(node, yaml.ScalarNode):
        yield key, node
    elif isinstance(node, yaml.SequenceNode):
        for inner in node.value:
            yield from find_scalars(inner, key)
    elif isinstance(node, yaml.MappingNode):
        for name, inner in node.value:
            yield from find_scalars(name, key)
            yield from find_scalars(inner, ".".join(filter(None, [key, str(name.value)])))


# A backslash and an n outside of Jinja's braces, other than a command of LaTeX such as `\\neq`.
JINJA = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
WRITTEN_BREAK = re.compile(
    r"\\n(?!(abla|atural|ce|e|earrow|eg|eq|ewline|exists|geq|i|leq|mid|ot|otin|parallel|u|warrow)"
    r"(?![a-z]))"
)


def has_written_break(text: str) -> bool:
    """Return True if a text has a backslash and an n where a line break must be meant."""
    return WRITTEN_BREAK.search(JINJA.sub("", text)) is not None
