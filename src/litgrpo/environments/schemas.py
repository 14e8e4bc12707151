"""Check arguments of tools against their JSON schemas.

The schema of a server is a program of a stranger: `$ref` reads files and addresses, a reference to
itself never ends, a few definitions that use each other twice are millions of checks, and a regular
expression can take years. So arguments are checked against a copy, made once: references, which
must point into the schema itself, are replaced by what they point to, within limits, and regular
expressions are left out. The server still checks its own schema.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any
from urllib.parse import unquote

from litgrpo.arguments import require, summarize_error

MAX_CHARS = 200_000  # of a schema as JSON
MAX_DEPTH = 50  # nested schemas, references included
MAX_SCHEMAS = 2_000  # schemas in a schema, references included
MAX_EXPLANATION = 1_000  # characters of an explanation, which may quote the schema
TYPES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
VALUES = (
    *("type", "enum", "const", "multipleOf", "maximum", "exclusiveMaximum", "minimum"),
    *("exclusiveMinimum", "maxLength", "minLength", "maxItems", "minItems", "uniqueItems"),
    *("maxContains", "minContains", "maxProperties", "minProperties", "required"),
    "dependentRequired",
)
# Keywords that accept more values if a schema in them accepts fewer. Without a regular expression
# in it, such a keyword would reject arguments that the server accepts, so it is left out as well.
OPPOSITE = ("not", "oneOf", "if", "contains")
PARTS = (
    *("properties", "dependentSchemas", "allOf", "anyOf", "prefixItems", "items"),
    *("additionalProperties", "propertyNames", "then", "else", *OPPOSITE),
)
FOR_SERVER = (
    *("pattern", "patternProperties", "unevaluatedItems", "unevaluatedProperties"),
    *("dependencies", "additionalItems"),
)
ELSEWHERE = ("$id", "$dynamicRef", "$recursiveRef")
DIALECTS = ("Draft4", "Draft6", "Draft7", "Draft201909", "Draft202012")  # an older one: other words


def explain_mismatch(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str:
    """Explain to the policy why arguments do not match a schema; "" if they do."""
    # The words are fixed: the policy's own text does not come back into its prompt.
    # Types are exact: "3" and 3.0 are not integers, true is not a number; an integer is a number. A
    # value that training converts would fail wherever the model is served without the conversion.
    from jsonschema.exceptions import relevance

    try:
        validator = validator_for(json.dumps(schema))
        error = max(validator.iter_errors(dict(arguments)), key=relevance, default=None)
    except Exception as error:  # the schema may be a server's: any exception may come out
        return f"the tool's schema cannot be used: {summarize_error(error)}"
    if error is None:
        return ""
    keyword, limit = str(error.validator), error.validator_value
    if keyword in ("type", "anyOf", "enum"):
        reason = f"must be {_describe(error.schema)}"
    elif keyword == "required":
        reason = f"needs {', '.join(name for name in limit if name not in error.instance)}"
    else:
        reason = f"must satisfy {keyword}: {json.dumps(limit)}"
    path = ".".join(map(str, error.absolute_path))
    if path:
        reason = f"{quote_name(path, otherwise='a value')} {reason}"
    return reason[:MAX_EXPLANATION]


def _describe(schema: Any) -> str:
    """Describe the values that a schema allows, by its choices or types."""
    if not isinstance(schema, Mapping):
        return "of another kind"
    if "enum" in schema:
        return f"one of {', '.join(map(repr, schema['enum']))}"
    alternatives = schema.get("anyOf", [])
    if alternatives:
        return " or ".join(dict.fromkeys(map(_describe, alternatives)))
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    return " or ".join(TYPES[name] for name in names) or "of another kind"


def quote_name(name: str, otherwise: str) -> str:
    """Quote a name that the policy wrote, if it has at most 40 plain characters.

    The text goes back into the prompt, where a long or special name could pass for other text.
    """
    return repr(name) if re.fullmatch(r"[\w.-]{1,40}", name, re.ASCII) else otherwise


@functools.lru_cache(maxsize=1024)
def validator_for(schema: str) -> Any:
    """Return the `jsonschema` validator of an object's schema, which is given as JSON."""
    # A schema that refers to itself or to anything outside, or is too large, is rejected.
    require(len(schema) <= MAX_CHARS, f"it has more than {MAX_CHARS:,} characters")
    parsed = json.loads(schema)
    import jsonschema  # slow

    try:
        kind = _validator_class(str(parsed.get("$schema", "")))
        closed, _ = _Copy(parsed).make(parsed, (), 0)
        kind.check_schema(closed)
        return kind(closed)
    except ValueError:
        raise
    except jsonschema.SchemaError as error:
        path = ".".join(map(str, error.absolute_path))
        raise ValueError(f"it is malformed: {path}: {error.message:.100}") from error
    except Exception as error:  # of jsonschema: any, such as RecursionError
        raise ValueError(f"it is malformed: {summarize_error(error)}") from error


class _Copy:
    """Copies schemas of a document without references and regular expressions."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document, self.number = document, 0

    def make(self, schema: Any, references: tuple[str, ...], depth: int) -> tuple[Any, bool]:
        """Return the copy, and True if it accepts exactly what the schema accepts."""
        # `references` are those that are being replaced; `depth` counts the schemas around this
        # one.
        self.number += 1
        require(depth <= MAX_DEPTH, f"it is nested more than {MAX_DEPTH} deep")
        require(self.number <= MAX_SCHEMAS, f"it contains more than {MAX_SCHEMAS:,} schemas")
        if isinstance(schema, bool):
            return schema, True
        require(isinstance(schema, Mapping), f"{schema!r:.60} is not a schema")
        for name in ELSEWHERE:
            require(name not in schema, f"{name} ({schema.get(name)!r:.60}) is not allowed")
        # In the drafts before the fourth, `type` may hold schemas.
        kinds = schema.get("type", "object")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        require(all(isinstance(kind, str) for kind in kinds), f"type is {kinds!r:.60}")
        exact = not any(name in schema for name in FOR_SERVER)
        copy = {name: schema[name] for name in VALUES if name in schema}
        if isinstance(copy.get("enum"), list):
            copy["enum"] = _Choices(copy["enum"])
        if schema.get("nullable") is True and "type" in copy:  # OpenAPI's word, of transformers
            copy["type"] = [*kinds, "null"]
        for name in PARTS:
            # Names that match a pattern are no additional ones.
            if name == "additionalProperties" and "patternProperties" in schema:
                continue
            if name in schema:
                part, same = self._copy_parts(schema[name], references, depth, name)
                exact &= same
                if same or name not in OPPOSITE:
                    copy[name] = part
        if "$ref" in schema:
            part, same = self._follow(schema["$ref"], references, depth)
            exact &= same
            copy = copy | {"allOf": [*copy.get("allOf", []), part]} if copy else part
        return copy, exact

    def _copy_parts(
        self, part: Any, references: tuple[str, ...], depth: int, name: str
    ) -> tuple[Any, bool]:
        """Copy the value of a keyword: a schema, several, or {name: schema}."""
        if isinstance(part, list):
            copies = [self.make(one, references, depth + 1) for one in part]
            return [one for one, _ in copies], all(same for _, same in copies)
        if name in ("properties", "dependentSchemas"):
            by_key = {key: self.make(one, references, depth + 1) for key, one in part.items()}
            return {key: one for key, (one, _) in by_key.items()}, all(
                same for _, same in by_key.values()
            )
        return self.make(part, references, depth + 1)

    def _follow(self, reference: Any, references: tuple[str, ...], depth: int) -> tuple[Any, bool]:
        """Copy what a reference points to."""
        require(reference not in references, f"{reference!r:.60} refers to itself")
        inside = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
        require(inside, f"$ref ({reference!r:.60}) must point into it, such as #/$defs/name")
        target: Any = self.document
        for step in reference.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(key) if isinstance(target, list) else key]
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"$ref ({reference!r:.60}) points to nothing") from error
        return self.make(target, (*references, reference), depth + 1)


@functools.cache
def _validator_class(dialect: str) -> Any:
    """Return the validator of a dialect; its integers and numbers are those of Python and JSON."""
    import jsonschema  # slow

    base = jsonschema.Draft202012Validator
    if dialect:
        base = jsonschema.validators.validator_for({"$schema": dialect}, default=None)
    supported = [getattr(jsonschema, f"{name}Validator") for name in DIALECTS]
    require(
        base in supported,
        f"$schema ({dialect:.60}) is not draft 4, 6, 7, 2019-09 or 2020-12 of JSON schema",
    )
    exact = {
        "integer": lambda _, value: type(value) is int,
        "number": lambda _, value: (
            type(value) is int or (isinstance(value, float) and isfinite(value))
        ),
    }
    checker = base.TYPE_CHECKER.redefine_many(exact)
    # Those of jsonschema compare each two values, which takes minutes for some thousands.
    linear = {"uniqueItems": _check_unique, "enum": _check_choice}
    return jsonschema.validators.extend(base, linear, type_checker=checker)


class _Choices(list[Any]):
    """The values of `enum`."""

    @functools.cached_property
    def keys(self) -> set[str]:
        return set(map(_json_key, self))


def _check_choice(_: Any, choices: _Choices, value: Any, __: Any) -> Iterator[Exception]:
    from jsonschema import ValidationError

    if _json_key(value) not in choices.keys:
        yield ValidationError("none of the values")


def _check_unique(_: Any, is_unique: bool, values: Any, __: Any) -> Iterator[Exception]:
    from jsonschema import ValidationError

    if is_unique and isinstance(values, list) and len(set(map(_json_key, values))) < len(values):
        yield ValidationError("equal values")


def _json_key(value: Any) -> str:
    """Return a text that equal values share: 1.0 is 1, and true is not."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_integer_if_equal), sort_keys=True)


def _integer_if_equal(number: str) -> float:
    value = float(number)
    return int(value) if value.is_integer() else value
