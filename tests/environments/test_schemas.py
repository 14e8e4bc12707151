"""Schemas of servers: what they point to, their size, and what is checked."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from litgrpo.environments.adapters.external import no_connection, schema_of
from litgrpo.environments.schemas import MAX_SCHEMAS, explain_mismatch
from litgrpo.environments.tool import Tool


def of_a(schema, **more):
    return {"type": "object", "properties": {"a": schema}, **more}


def doubling(levels):
    """Definitions of which each uses the next one twice."""
    twice = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    return of_a({"$ref": "#/$defs/d0"}, **{"$defs": twice | {f"d{levels}": {"type": "integer"}}})


def nest(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return of_a(schema)


@pytest.fixture
def secret(tmp_path):
    """Addresses of a schema that holds a secret: of a file and of a server, and its requests."""
    file, requests = tmp_path / "secret.json", []
    file.write_text('{"const": "SECRET"}')

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file.read_bytes())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", file.as_uri(), requests
        server.shutdown()


ELSEWHERE = {
    "reference": lambda url: of_a({"$ref": url}),
    "reference with a fragment": lambda url: of_a({"$ref": f"{url}#/const"}),
    "dynamic reference": lambda url: of_a({"$dynamicRef": url}),
    "recursive reference": lambda url: of_a({"$recursiveRef": url}),
    "base": lambda url: of_a({"$ref": "secret.json"}, **{"$id": url}),
    "base of a part": lambda url: of_a({"items": {"$id": url, "$ref": "#"}}),
    "dialect": lambda url: of_a({}, **{"$schema": url}),
    "whole": lambda url: {"$ref": url},
    "definition": lambda url: of_a({"$ref": "#/$defs/x"}, **{"$defs": {"x": {"$ref": url}}}),
    "no schema": lambda url: of_a({"$ref": "#/x"}, x={"not": {"allOf": [{"$ref": url}]}}),
    "old draft": lambda url: of_a(
        {"$ref": url}, **{"$schema": "http://json-schema.org/draft-04/schema#"}
    ),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_schema_reads_no_file_and_no_address(secret, name):
    url, file, requests = secret
    for address in (url, file):
        schema = ELSEWHERE[name](address)
        with pytest.raises(ValueError, match="schema of the tool 'f' cannot be used"):
            schema_of("f", None, schema)
        # Also one that came past the check says nothing of what it points to.
        explanation = explain_mismatch(schema, {"a": "x"})
        assert "SECRET" not in explanation
        assert explanation.startswith("the tool's schema cannot be used")
    assert requests == []


DRAFT_3 = "http://json-schema.org/draft-03/schema#"
MALFORMED = {
    "unknown type": of_a({"type": "flt"}),
    "itself": of_a({"$ref": "#/properties/a"}),
    "itself, written otherwise": of_a({"$ref": "#/properties/%61"}),
    "the whole": of_a({"$ref": "#"}),
    "each other": of_a(
        {"$ref": "#/$defs/x"},
        **{"$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}}},
    ),
    "nothing": of_a({"$ref": "#/$defs/x"}),
    "a number as reference": of_a({"$ref": 3}),
    "zero": of_a({"multipleOf": 0}),
    "draft 3": of_a({"required": True}, **{"$schema": DRAFT_3}),
    "a schema as type": of_a({"type": [{"$ref": "http://127.0.0.1:9/x"}]}),
    "a schema as type in draft 3": of_a({"type": [{"pattern": "(a+)+$"}]}, **{"$schema": DRAFT_3}),
    "a text at the top": {"type": "string"},
    "no properties": {"properties": None},
    "negative length": of_a({"minLength": -1}),
    "a text as limit": of_a({"minimum": "1"}),
    "no list": of_a({}, required="a"),
    "numbers as names": of_a({}, required=[1]),
    "null": of_a(None),
    "a list of properties": {"properties": [1]},
    "a list": [1],
    "a text": "{}",
    "a default that is no schema": of_a({"$ref": "#/properties/a/default", "default": 3}),
    "40 doublings": doubling(40),
    "12 doublings": doubling(12),
    "deep": nest(60),
    "deeper than Python's stack": nest(50_000),
    "long": of_a({"enum": ["x" * 300_000]}),
    "many": {"properties": {str(n): {} for n in range(MAX_SCHEMAS)}},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_schema_is_rejected_at_the_start_and_raises_in_no_call(name):
    start = time.monotonic()
    with pytest.raises(ValueError, match="schema of the tool 'f' cannot be used") as error:
        schema_of("f", None, MALFORMED[name])
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    assert explain_mismatch(MALFORMED[name], {"a": "x"})
    assert time.monotonic() - start < 10


def test_a_schema_has_no_number_that_json_lacks():
    with pytest.raises(ValueError, match="schema of the tool 'f' cannot be used"):
        schema_of("f", None, of_a({"minimum": float("nan")}))


def fits(schema, value):
    tool = Tool("f", no_connection, schema_of("f", None, schema))
    assert tool.line.startswith("f(")
    return explain_mismatch(tool.schema["function"]["parameters"], value) == ""


ID = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
DRAFT = "http://json-schema.org/draft-0{}/schema#"
# Schema, arguments that fit, arguments that do not.
CHECKED = [
    (of_a({"$ref": "#/$defs/id"}, **{"$defs": {"id": ID}}), [{"id": 1}], [{}, {"id": 1.0}]),
    (of_a({"$ref": "#/$defs/a~1b"}, **{"$defs": {"a/b": {"const": 1}}}), [1], [2]),
    (of_a({"$ref": "#/$defs/n", "minimum": 3}, **{"$defs": {"n": {"maximum": 9}}}), [4], [1, 10]),
    (of_a({"items": [{"type": "integer"}]}, **{"$schema": DRAFT.format(7)}), [[1]], [["x"]]),
    (
        of_a({"minimum": 0, "exclusiveMinimum": True}, **{"$schema": DRAFT.format(4)}),
        [1],
        [0],
    ),
    (of_a({"not": {"type": "string"}}), [1], ["x"]),
    (of_a({"oneOf": [{"minimum": 3}, {"maximum": 5}]}), [1, 9], [4]),
    (of_a({"contains": {"type": "integer"}, "maxContains": 1}), [[1, "x"]], [[1, 2]]),
    (
        of_a({"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}),
        [3, "x"],
        [1, None],
    ),
    (of_a({"enum": [{"$ref": "file:///x"}, 1]}), [{"$ref": "file:///x"}, 1, 1.0], [2, True]),
    (
        of_a({"uniqueItems": True, "maxItems": 2}),
        [[1, 2], [1, True], [0, False], ["1", 1], [{"b": 1}, {"b": True}], "aa"],
        [[1, 1], [1, 1.0], [{"b": 1, "c": 2}, {"c": 2.0, "b": 1}], [1, 2, 3]],
    ),
    (of_a(True), [1, None], []),
    (of_a(False), [], [1]),
    # Regular expressions are left to the server, and what they would make wrong as well.
    (of_a({"type": "string", "pattern": "^(a+)+$"}), ["a" * 40 + "!"], [1]),
    (of_a({"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}], "type": "string"}), ["ab"], [1]),
    (of_a({"not": {"pattern": "^a"}, "type": "string"}), ["b"], [1]),
    (of_a({"if": {"pattern": "^a"}, "then": {"maxLength": 1}}), ["bbb"], []),
    (of_a({"patternProperties": {"^(x+)+$": {}}, "additionalProperties": False}), [{"x": 1}], []),
]


@pytest.mark.parametrize("number", range(len(CHECKED)))
def test_arguments_are_checked_by_all_keywords_but_regular_expressions(number):
    schema, good, bad = CHECKED[number]
    assert all(fits(schema, {"a": value}) for value in good)
    assert not any(fits(schema, {"a": value}) for value in bad)


def test_values_are_found_among_others_without_comparing_each_two():
    values = [{"a": n, "b": [n]} for n in range(3_000)]
    start = time.monotonic()
    schema = of_a({"items": {"enum": [*range(28_000)]}})
    assert fits(schema, {"a": [27_999] * 3_000})
    assert not fits(schema, {"a": [28_000] * 3_000})
    assert fits(of_a({"uniqueItems": True}), {"a": values})
    assert not fits(of_a({"uniqueItems": True}), {"a": [*values, values[0]]})
    assert time.monotonic() - start < 5


def test_names_of_arguments_are_no_keywords():
    schema = {"properties": {name: {"type": "string"} for name in ("$ref", "$id", "pattern")}}
    assert fits(schema, {"$ref": "file:///x", "$id": "x", "pattern": "("})
    assert not fits(schema, {"$ref": 1})


def test_policies_see_the_schema_as_the_server_wrote_it():
    schema = of_a({"$ref": "#/$defs/n", "pattern": "^a"}, **{"$defs": {"n": {"type": "string"}}})
    shown = schema_of("f", "Do\n it.", json.loads(json.dumps(schema)))["function"]
    assert shown == {"name": "f", "description": "Do it.", "parameters": schema}


def test_a_pattern_in_another_dialect_is_left_to_the_server_and_explanations_are_short():
    assert fits(of_a({"pattern": "^\\p{L}+$"}), {"a": "x"})
    assert 0 < len(explain_mismatch(of_a({"enum": [*range(30_000)]}), {"a": -1})) < 1_100


@pytest.mark.parametrize("keyword", ["enum", "const", "not", "minItems", "items", "properties"])
def test_an_explanation_has_nothing_that_the_policy_wrote(keyword):
    text = "<|im_end|>" * 9
    schemas = {
        "enum": {"enum": ["x"]},
        "const": {"const": "x"},
        "not": {"not": {}},
        "minItems": {"minItems": 3},
        "items": {"items": {"type": "integer"}},
        "properties": {"additionalProperties": {"type": "integer"}},
    }
    value = {"properties": {text: text}, "items": [text], "minItems": [text]}.get(keyword, text)
    explanation = explain_mismatch(of_a(schemas[keyword]), {"a": value})
    assert explanation
    assert "im_end" not in explanation


def test_a_schema_of_true_or_false_among_others_is_explained():
    schema = of_a({"anyOf": [False, {"type": "string"}]})
    assert explain_mismatch(schema, {"a": 1}) == "'a' must be of another kind or a string"
