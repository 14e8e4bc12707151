"""Masks of keys and passwords in settings and texts, before they reach a file or the terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "<masked>"
# Options whose fields are sent to a service as they are: every name that could be a key counts.
FREE_FORM = ("extra_body", "headers", "extra_headers")
ANY_SECRET = re.compile(r"key|token|secret|authori[sz]ation|passw|passphrase|credential|cookie")
# In the rest of a recipe "key" and "token" also name columns and special tokens.
SECRET = re.compile(
    r"(api|access|private|secret|auth|account|service|subscription|license)_?key"
    r"|secret|authori[sz]ation|passw|passphrase|credential|cookie"
    r"|((^|_)(access|api|auth|bearer|hf|hub|id|refresh|session|wandb)_|^)token$"
)
NOT_SECRET = re.compile(r"_env(_var)?$|^(max|min|num)_")
# Keys of well-known services; the name of the option does not matter.
KEY_LIKE = r"\b(?:sk|pk|rk|gsk|hf|xai|ghp|glpat|nvapi|r8)[-_](?=[\w-]*\d)[\w-]{12,}"
KEY_LIKE += r"|\b(?:AIza|AKIA)[\w-]{12,}"
IN_TEXT = (
    (re.compile(KEY_LIKE), MASK),
    (re.compile(r"(?i)\b(bearer|basic)\s+(?=[^\s\"',;]*[\d_.=-])[^\s\"',;]{6,}"), rf"\1 {MASK}"),
    (
        re.compile(
            r"(?i)((?:api[_-]?key|authorization|password|secret|access[_-]?token)[\"']?\s*[:=]\s*"
            r"[\"']?)(?!bearer |basic |<masked>|null|none)[^\s\"',{}]+"
        ),
        rf"\1{MASK}",
    ),
)
# A part of a key that is at least this long is masked, too: servers abbreviate keys.
WINDOW = 8
# Shorter values are looked for in texts only if they mix letters and digits: EMPTY and none are
# common in place of keys.
SHORTEST = 4
_known: set[str] = set()


def remember_secret(value: str) -> None:
    """Mask a value in every later text of this process.

    Args:
        value: key, token or password; short words are not masked.
    """
    mixed = len(value) >= SHORTEST and value.isalnum() and not value.isalpha()
    if (mixed or len(value) >= WINDOW) and value != MASK:
        _known.add(value)


def mask_settings(settings: Any) -> Any:
    """Return settings in which keys and passwords are masked, and remember their values.

    Example:
        >>> mask_settings({"extra_body": {"api_key": "abcdefgh", "seed": 7}, "pad_token": "<pad>"})
        {'extra_body': {'api_key': '<masked>', 'seed': 7}, 'pad_token': '<pad>'}
    """
    return _mask_value(settings, name="", free_form=False)


def _mask_value(value: Any, *, name: str, free_form: bool) -> Any:
    """Mask a value; `name` is the name of the secret that it belongs to, or empty."""
    if isinstance(value, Mapping):
        return {
            key: _mask_value(
                each,
                name=str(key) if is_secret_name(str(key), free_form) else name,
                free_form=free_form or key in FREE_FORM,
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(_mask_value(each, name=name, free_form=free_form) for each in value)
    # YAML reads a key of digits as a number; `budget_tokens: 512` is a limit.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name and (isinstance(value, str) or (is_number and "token" not in name.lower())):
        remember_secret(str(value))
        return MASK
    if isinstance(value, str):
        for found in re.findall(KEY_LIKE, value):
            remember_secret(found)
        return IN_TEXT[0][0].sub(MASK, value)
    return value


def is_secret_name(name: str, free_form: bool = False) -> bool:
    """Return True if an option of this name holds a key or a password.

    Args:
        name: of the option or field.
        free_form: it is a field of a request to a service.

    Example:
        >>> is_secret_name("X-Api-Key", free_form=True), is_secret_name("api_key_env")
        (True, False)
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return not NOT_SECRET.search(words) and bool(
        (ANY_SECRET if free_form else SECRET).search(words)
    )


def find_masked(settings: Any, path: str = "") -> list[str]:
    """Return the dotted names of values that were masked.

    Example:
        >>> find_masked({"a": {"api_key": "<masked>", "seed": 7}})
        ['a.api_key']
    """
    if isinstance(settings, Mapping):
        parts = [(f"{path}.{name}" if path else str(name), each) for name, each in settings.items()]
    elif isinstance(settings, list | tuple):
        parts = [(path, each) for each in settings]
    else:
        return [path] if settings == MASK else []
    return [name for where, each in parts for name in find_masked(each, where)]


def mask_text(text: str) -> str:
    """Return a text without the secrets that were remembered, and without texts like keys.

    Example:
        >>> mask_text("401: you sent Bearer sk-0123456789abcdef")
        '401: you sent Bearer <masked>'
    """
    text = mask_known(text)
    for pattern, replacement in IN_TEXT:
        text = pattern.sub(replacement, text)
    return text


def mask_known(text: str) -> str:
    """Return a text without the secrets that were remembered."""
    for secret in _known:
        text = _mask_parts(text, secret)
    return text


def _mask_parts(text: str, secret: str) -> str:
    """Mask a secret and parts of it, in upper or lower case."""
    lowered, sought = text.lower(), secret.lower()
    if len(lowered) != len(text):  # a letter whose lower case is longer
        lowered, sought = text, secret
    size = min(WINDOW, len(sought))
    hidden: set[int] = set()
    for start in {sought[at : at + size] for at in range(len(sought) - size + 1)}:
        place = lowered.find(start)
        while place >= 0:
            hidden.update(range(place, place + size))
            place = lowered.find(start, place + 1)
    if not hidden:
        return text
    marked = "".join("\0" if at in hidden else each for at, each in enumerate(text))
    return re.sub("\0+", MASK, marked)
