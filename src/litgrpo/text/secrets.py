"""Keys and passwords: out of environment variables, and masked in settings and texts.

Nothing of them reaches a file or the terminal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "<masked>"
# Options whose values are all masked: a header has any name and is often a key.
HEADERS = ("headers", "extra_headers")
# Options whose fields are sent to a service or program: every name that could be a key counts.
FREE_FORM = ("extra_body", "env", "args")
WORDS = (
    r"secret|authori[sz]ation|passw|passphrase|(^|_)(pass|pwd|pat|bearer|jwt)$|credential|cookie"
)
ANY_SECRET = re.compile(rf"key|token|{WORDS}|signature|^sig$|(^|_)auth$")
# In the rest of a recipe "key" and "token" also name columns and special tokens.
SECRET = re.compile(
    r"(api|access|private|secret|auth|account|service|subscription|license"
    r"|anthropic|azure|deepseek|gemini|mistral|openai|openrouter|tavily|together|wandb)_?key"
    rf"|{WORDS}"
    r"|((^|_)(access|api|auth|bearer|hf|hub|id|refresh|session|wandb)_|^)token$"
)
NOT_SECRET = re.compile(r"_env(_var)?$|^(max|min|num)_|tokenizer|keyboard|keyword")
# Keys of well-known services; the name of the option does not matter. If each "sk-" looked ahead
# without a limit, or each "-eyJ" could begin a token, a long repetition would take quadratic time.
KEY_LIKE = (
    r"\b(?:sk|pk|rk|gsk|hf|xai|gh[oprsu]|github_pat|glpat|nvapi|npm|pypi|tvly|xox[a-z]|r8)"
    r"[-_](?=[\w-]{0,40}\d)[\w-]{12,}|\b(?:AIza|AKIA|ASIA|ya29\.)[\w-]{12,}"
    r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # JSON web token
)
# User and password of an address, or a key in place of them; a value of its query.
IN_ADDRESS = (
    re.compile(r"(?<=://)(?:[^\s/@:]+:[^\s/@]+|[^\s/@:]{16,})(?=@)"),
    re.compile(
        r"(?i)(?<=[?&;])((?:[\w.%-]*(?:key|token|secret|auth|password|signature)"
        r"|(?:[\w.%-]*[_.-])?(?:sig|pass|pat|pwd|jwt))=)([^\s&;#\"']+)"
    ),
)
# An argument of a program, such as --api-key=VALUE.
ARGUMENT = re.compile(r"--?([\w-]+)(?:=(.+))?", re.DOTALL)
# Names with values inside of an argument: API_KEY=VALUE, X-Api-Key: VALUE, --key VALUE.
IN_ARGUMENT = re.compile(
    r"(?i)([a-z][\w-]*)[\"']?\s*[=:]\s*[\"']?(?=((?:bearer |basic )?[^\s\"',;{}]+))"
    r"|(?<!\S)--?([a-z][\w-]*)\s+([^\s\"',;{}]+)"
)
IN_TEXT = (
    (re.compile(KEY_LIKE), MASK),
    (IN_ADDRESS[0], MASK),
    (IN_ADDRESS[1], rf"\1{MASK}"),
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
# A value that names an environment variable instead of holding a key.
VARIABLE = re.compile(r"\$\{(\w+)\}")
NAMES_VARIABLE = re.compile(rf"(?:\w+ )?{VARIABLE.pattern}")
_known: set[str] = set()


def remember_secret(value: str) -> None:
    """Mask a value in every later text of this process; short words are not masked."""
    mixed = len(value) >= SHORTEST and value.isalnum() and not value.isalpha()
    if (mixed or len(value) >= WINDOW) and value != MASK:
        _known.add(value)


def fill_variables(value: Any) -> Any:
    """Replace each `${NAME}` in a text, or in the values of a list or mapping, by the variable.

    The variables' values are masked in every later text of this process.
    """
    if isinstance(value, Mapping):
        return {key: fill_variables(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [fill_variables(inner) for inner in value]
    return VARIABLE.sub(_read_variable, value) if isinstance(value, str) else value


def _read_variable(match: re.Match[str]) -> str:
    value = os.environ.get(match[1], "")
    if not value:
        raise ValueError(f"the environment variable {match[1]} is not set; export it")
    remember_secret(value)
    return value


def mask_settings(settings: Any) -> Any:
    """Return settings in which keys and passwords are masked, and remember their values."""
    return _mask_value(settings, name="", free_form=False)


def _mask_value(value: Any, *, name: str, free_form: bool) -> Any:
    """Mask a value; `name` is the name of the secret that it belongs to, or empty."""
    if isinstance(value, Mapping):
        return {
            key: _mask_value(
                inner,
                name=str(key) if is_secret_name(str(key), free_form) else name,
                free_form=free_form or key in FREE_FORM,
            )
            if key not in HEADERS
            else _mask_value(inner, name=str(key), free_form=True)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        names = [name, *(name or _name_of_next(inner, free_form) for inner in value)]
        masked = [
            _mask_value(inner, name=owner, free_form=free_form)
            for inner, owner in zip(value, names, strict=False)
        ]
        return type(value)(masked)
    # YAML reads a key of digits as a number; `budget_tokens: 512` is a limit.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) and NAMES_VARIABLE.fullmatch(value):
        return value
    if name and (isinstance(value, str) or (is_number and "token" not in name.lower())):
        remember_secret(str(value))
        return MASK
    return _mask_in_text(value, free_form) if isinstance(value, str) else value


def _name_of_next(value: Any, free_form: bool) -> str:
    """Return the name of an argument such as --api-key, whose value follows; else ""."""
    argument = ARGUMENT.fullmatch(value) if isinstance(value, str) else None
    if argument is None or argument[2] is not None or not is_secret_name(argument[1], free_form):
        return ""
    return str(value)


def _mask_in_text(value: str, free_form: bool) -> str:
    """Mask keys in a text of a recipe: in addresses, in arguments, and those of known services."""
    argument = ARGUMENT.fullmatch(value)
    secrets = [argument[2]] if argument and argument[2] and is_secret_name(argument[1]) else []
    secrets += re.findall(KEY_LIKE, value)
    if free_form:
        for match in IN_ARGUMENT.finditer(value):
            name, secret = filter(None, match.groups())
            if is_secret_name(name, free_form) and "$" not in secret:  # no ${VARIABLE}
                secrets.append(secret)
    secrets += IN_ADDRESS[0].findall(value) + [secret for _, secret in IN_ADDRESS[1].findall(value)]
    for secret in secrets:
        remember_secret(secret)
        value = value.replace(secret, MASK)
    return value


def is_secret_name(name: str, free_form: bool = False) -> bool:
    """Return True if an option of this name holds a key or a password.

    Example:
        >>> is_secret_name("X-Api-Key", free_form=True), is_secret_name("api_key_env")
        (True, False)
    """
    # `free_form` says that it is a field of a request to a service.
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    return not NOT_SECRET.search(words) and bool(
        (ANY_SECRET if free_form else SECRET).search(words)
    )


def find_masked(settings: Any, path: str = "") -> list[str]:
    """Return the dotted names of values that were masked."""
    if isinstance(settings, Mapping):
        parts = [
            (f"{path}.{name}" if path else str(name), inner) for name, inner in settings.items()
        ]
    elif isinstance(settings, list | tuple):
        parts = [(path, inner) for inner in settings]
    else:
        return [path] if settings == MASK else []
    return [name for inner_path, inner in parts for name in find_masked(inner, inner_path)]


def mask_text(text: str) -> str:
    """Return a text without the secrets that were remembered, and without texts like keys."""
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
    for window in {
        sought[position : position + size] for position in range(len(sought) - size + 1)
    }:
        position = lowered.find(window)
        while position >= 0:
            hidden.update(range(position, position + size))
            position = lowered.find(window, position + 1)
    if not hidden:
        return text
    marked = "".join(
        "\0" if position in hidden else character for position, character in enumerate(text)
    )
    return re.sub("\0+", MASK, marked)
