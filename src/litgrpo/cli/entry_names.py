"""The name of an entry, which jsonargparse leaves out of the key it complains of.

`model.rewards` is a dict of objects; of a wrong setting of one of them it says `rewards`, then the
setting. Which one was meant stands in what was given, at the end of its message.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

GIVEN = re.compile(r"^\s*Given value: (.+)$", re.MULTILINE)
NESTED = re.compile(r"NestedArg\(key='([\w.+-]+)', val=.*\)")
KEY = re.compile(r"\b(?:model|data)(?:\.\w+)+")


def with_entry(sentence: str, message: str) -> str:
    """The sentence, with the entry's name in the key that it is about.

    Args:
        sentence: what the user will read.
        message: what jsonargparse says.

    Example:
        >>> given = "Given value: NestedArg(key='rewards.right.wait', val='1')"
        >>> with_entry("there is no key 'model.rewards.wait'", given)
        "there is no key 'model.rewards.right.wait'"
    """
    key, given = KEY.search(sentence), GIVEN.findall(message)
    if key is None or not given:
        return sentence
    *above, setting = key[0].split(".")
    name = entry_of(given[-1], above[1:], setting, sentence)
    return sentence.replace(".".join(above) + ".", ".".join(filter(None, [*above, name])) + ".")


def entry_of(given: str, above: Sequence[str], setting: str, sentence: str) -> str:
    """The one entry that was given the setting; nothing where none or several were.

    Args:
        given: value of the first part of the key, as jsonargparse prints it.
        above: the other parts of the key, but for its last.
        setting: the last.
        sentence: of several entries, that whose value it quotes is meant.
    """
    if nested := NESTED.fullmatch(given):
        *parts, last = nested[1].split(".")
        return parts[-1] if parts and [*parts[:-1], last] == [*above, setting] else ""
    try:
        inside: Any = ast.literal_eval(given)
    except (ValueError, SyntaxError):  # objects in it
        return ""
    for part in above:
        inside = _settings(inside).get(part)
    settings = _settings(inside)
    if setting in settings:  # no entry between
        return ""
    entries = {name: _settings(entry) for name, entry in settings.items()}
    with_it = {name: entry[setting] for name, entry in entries.items() if setting in entry}
    quoted = [name for name, value in with_it.items() if repr(value) in sentence]
    found = list(with_it) if len(with_it) == 1 else quoted
    return found[0] if len(found) == 1 else ""


def _settings(value: Any) -> Mapping[str, Any]:
    """Settings of an object written as a dict, with a class or without; none of anything else."""
    inside = value if isinstance(value, Mapping) else {}
    return inside.get("init_args", inside)
