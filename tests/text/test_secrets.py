"""Masks of keys in settings and texts."""

import pytest

from litgrpo.text.secrets import (
    MASK,
    fill_variables,
    find_masked,
    mask_settings,
    mask_text,
    remember_secret,
)

SECRETS = {
    "api_key": "aaaa-bbbb-1111",
    "apiKey": "aaaa-bbbb-2222",
    "X-Api-Key": "aaaa-bbbb-3333",
    "Authorization": "Bearer aaaa-bbbb-4444",
    "password": 12345678,
    "auth_token": "aaaa-bbbb-5555",
    "client_secret": ["aaaa-bbbb-6666"],
    "credentials": {"user": "aaaa-bbbb-7777"},
    "headers": {"cookie": "aaaa-bbbb-8888"},
}
PLAIN = {
    "max_tokens": 5,
    "budget_tokens": 512,
    "stop_token_ids": [2],
    "pad_token": "<pad>",
    "answer_key": "answer",
    "api_key_env": "OPENAI_API_KEY",
    "tokenizer": "gpt2",
    "key": "column",
    "seed": None,
    "stream": False,
}


@pytest.mark.parametrize("name", SECRETS)
def test_keys_and_passwords_are_masked_at_any_depth(name):
    found = str(mask_settings({"model": [{"init_args": {name: SECRETS[name]}}]}))
    assert "aaaa" not in found
    assert "12345678" not in found
    assert MASK in found


def test_other_settings_stay_as_they_are():
    assert mask_settings(PLAIN) == PLAIN


@pytest.mark.parametrize("name", ["key", "my_token", "keys", "tokens", "user_key", "Secret"])
def test_fields_of_a_request_are_masked_by_any_name_like_a_key(name):
    assert mask_settings({"extra_body": {name: "abc", "a": {name: "abc"}, "n": 1}}) == {
        "extra_body": {name: MASK, "a": {name: MASK}, "n": 1}
    }


@pytest.mark.parametrize(
    "value", ["sk-abcdef0123456789", "hf_AbCdEf0123456789", "gsk_0123456789abcdef"]
)
def test_values_that_look_like_keys_are_masked_under_any_name(value):
    assert mask_settings({"url": f"http://h/{value}"}) == {"url": f"http://h/{MASK}"}


@pytest.mark.parametrize(
    "settings",
    [
        {"mcp_servers": {"a": {"url": "https://h/mcp?profile=p&api_key=aaaa-bbbb-1"}}},
        {"url": "https://h/mcp?accessToken=aaaa-bbbb-2#x"},
        {"env": {"DATABASE_URL": "postgres://me:aaaa-bbbb-3@h/x", "MY_PAT": "aaaa-bbbb-4"}},
        {"headers": {"X-Session": "aaaa-bbbb-5", "X-Auth": "aaaa-bbbb-6"}},
        {"command": ["python", "agent.py", "--api-key", "aaaa-bbbb-7"]},
        {"args": ["--password=aaaa-bbbb-8"]},
        {"kwargs": {"openai_key": "aaaa-bbbb-9", "pwd": "aaaa-bbbb-10"}},
    ],
)
def test_keys_in_addresses_headers_and_arguments_of_programs_are_masked(settings):
    assert "aaaa" not in str(mask_settings(settings))


@pytest.mark.parametrize(
    "value",
    [
        "github_pat_11ABCDEFG0123456789",
        "gho_abcdefghijklmnop12",
        "xoxb-123456789012-abcdef",
        "ASIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk",
    ],
)
def test_keys_of_more_services_are_masked(value):
    assert mask_settings({"x": value}) == {"x": MASK}
    assert value[-6:] not in mask_text(f"got {value}.")


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "https://h/mcp?design=blue&author=me&keyword=python"},
        {"command": ["python", "run.py", "--max-tokens", "5", "--pad-token", "<pad>"]},
        {"args": ["--level=3", "--tokenizer", "gpt2"]},
    ],
)
def test_other_addresses_and_arguments_stay_as_they_are(settings):
    assert mask_settings(settings) == settings


def test_what_was_masked_once_is_masked_in_every_text():
    mask_settings({"api_key": "qwertz-uiop-9988"})
    assert mask_text("got 'qwertz-uiop-9988'; QWERTZ-UIOP") == f"got '{MASK}'; {MASK}"


@pytest.mark.parametrize("value", ["none", "EMPTY", "abc", ""])
def test_common_words_are_not_masked_in_texts(value):
    remember_secret(value)
    assert mask_text("NoneType: EMPTY abc") == "NoneType: EMPTY abc"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Bearer abc123def", "abc123def"),
        ('{"api_key": "zxcvbn-987"}', "zxcvbn-987"),
        ("password=hunter22", "hunter22"),
        ("Authorization: Basic dXNlcjpwYXNz0=", "dXNlcjpwYXNz0"),
    ],
)
def test_texts_like_keys_are_masked_without_knowing_them(text, left):
    assert left not in mask_text(text)


def test_masked_values_are_found_by_name():
    assert find_masked({"a": {"b": [1, {"c": MASK}]}, "d": "x"}) == ["a.b.c"]


def test_keys_come_from_environment_variables_that_files_name(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "mnbvc-lkjhg-31")
    settings = {"headers": {"Authorization": "Bearer ${MY_TOKEN}"}, "args": ["--n=3", 4]}
    assert mask_settings(settings) == settings
    assert fill_variables(settings)["headers"] == {"Authorization": "Bearer mnbvc-lkjhg-31"}
    assert fill_variables(settings)["args"] == ["--n=3", 4]
    assert mask_text("got mnbvc-lkjhg-31") == f"got {MASK}"
    # A key beside the name of a variable is still a key.
    assert "aaaa" not in str(mask_settings({"api_key": "aaaa-bbbb-1234${MY_TOKEN}"}))
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ValueError, match="environment variable MY_TOKEN is not set; export it"):
        fill_variables(settings)


@pytest.mark.parametrize("piece", ["sk-", "eyJ-", "AKIA-", "bearer ", "://a:", "?key", "secret:"])
def test_a_long_repetition_is_masked_in_linear_time(piece: str) -> None:
    # This takes a fraction of a second. A quadratic step would take minutes.
    mask_text(piece * (200_000 // len(piece)) + "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"args": ["run", "-e", "API_KEY=qwe-rty-7788", "image"]},
        {"args": ["--env=API_KEY=qwe-rty-7788"]},
        {"args": ["--header", "Authorization: Bearer qwe-rty-7788"]},
        {"args": ["-H", "X-Api-Key: qwe-rty-7788"]},
        {"args": ["--key", "qwe-rty-7788"]},
        {"args": ["-c", "server --api-key qwe-rty-7788"]},
        {"args": ['{"api_key": "qwe-rty-7788"}']},
        {"args": ["https://qwe-rty-7788-abcd@example.org/x"]},
        {"url": "https://example.org/?searchApiKey=qwe-rty-7788"},
        {"url": "https://example.org/?a=1;jwt=qwe-rty-7788"},
        {"env": {"DB_PASS": "qwe-rty-7788"}},
    ],
)
def test_keys_of_a_server_of_tools_are_masked_however_it_takes_them(entry):
    assert "qwe-rty-7788" not in str(mask_settings({"mcp_servers": {"a": entry}}))


def test_arguments_without_keys_stay_as_they_are():
    words = ["--max-tokens", "5", "--tokenizer=gpt2", "--folder", "{folder}", "-e", "KEY=${MY_KEY}"]
    words += ["https://example.org/p?format=json", "ssh://git@example.org", "Bearer ${TOKEN}"]
    words += ["serve --api-key ${MY_KEY}", "--env=API_KEY=${MY_KEY}"]
    assert mask_settings({"args": words}) == {"args": words}
