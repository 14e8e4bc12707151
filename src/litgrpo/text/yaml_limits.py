"""Limits on YAML that a recipe or an option may hold, checked before it is composed."""

from __future__ import annotations

import yaml

MAX_DEPTH = 64  # a recipe has about 8; the parser of YAML recurses
MAX_NODES = 100_000  # with every alias expanded; the longest built-in recipe has about 150


class TooLarge(yaml.YAMLError):
    """YAML whose nesting or whose aliases would exhaust the stack or the memory."""


def check_limits(text: str) -> None:
    """Check the nesting and the number of values of a YAML text, without composing it.

    Aliases are counted as often as they are used: nine lines of nine aliases each are a billion
    values.

    Raises:
        TooLarge: the text is beyond the limits.
        yaml.YAMLError: it is not valid YAML.

    Example:
        >>> check_limits("a: [1, 2]")
        >>> check_limits("[" * 10_000)
        Traceback (most recent call last):
        ...
        litgrpo.text.yaml_limits.TooLarge: line 1: more than 64 nested lists or mappings
    """
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
