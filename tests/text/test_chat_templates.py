"""Chat templates that are broken, hostile or without end."""

import threading
import time

import pytest

from litgrpo.data.rendering import Chat, apply_chat_template
from litgrpo.text import chat_templates
from litgrpo.text.chat_templates import TemplateError, TimeIsUp, limit_time, render_messages
from tests.support.models import byte_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDLESS = {
    "nested loops": LOOP + "{% endfor %}{% endfor %}",
    "loops that write": LOOP + "x{% endfor %}{% endfor %}",
    "loops over a text": "{% set t = 'x' * 99999 %}{% for a in t %}{% for b in t %}{% endfor %}"
    "{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a filter in a loop": "{% for a in range(99999) %}{% set x = range(99999) | list | sort %}"
    "{% endfor %}",
}
HUGE = {
    "3 GB": "{{ 'x' * 3000000000 }}",
    "doubling": "{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}"
    "{% endfor %}",
    "a centered text": "{{ 'x' | center(4000000000) }}",
    "a format": "{{ '%4000000000d' | format(1) }}",
    "a list": "{% set t = (range(99999) | list) * 9999 %}",
    "many characters": "{{ 'x' * 10000001 }}",
}
BROKEN = {
    "its own error": "{{ raise_exception('\x1b[2J\nerror: your disk is full') }}",
    "no such field": "{{ messages[0].content.a.b }}",
    "division": "{{ 1 // 0 }}",
    "types": "{{ 'a' + 1 }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an index": "{{ messages[7].role }}",
    "syntax": "{% for %}",
    "an attribute of Python": "{{ ''.__class__.__mro__[1].__subclasses__()[0]() }}",
    "a large power": "{{ (2 ** 99999) | string }}",
}


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


# The first signal may come while Python runs a destructor, whose exceptions it ignores.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(name, monkeypatch):
    monkeypatch.setattr("litgrpo.text.chat_templates.MAX_SECONDS", 0.3)
    with pytest.raises(TemplateError, match=r"within 0\.3 s|MemoryError|MiB"):
        render_messages(tokenizer_with(ENDLESS[name]), MESSAGES)


def run_and_ignore_exceptions():
    """Ignore every Exception, as Jinja does, and one of any other kind, as `__del__` does."""
    ignored = []
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue
        except BaseException as error:
            if ignored:
                raise
            ignored.append(error)


@pytest.mark.timeout(60)
def test_the_time_limit_holds_in_code_that_ignores_exceptions():
    with pytest.raises(TimeIsUp), limit_time(0.05):
        run_and_ignore_exceptions()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HUGE)
def test_a_template_that_writes_gigabytes_is_stopped(name, monkeypatch):
    monkeypatch.setattr(chat_templates, "MAX_SECONDS", 50.0)  # which a busy machine may need
    with pytest.raises(TemplateError, match=r"MiB of memory|characters"):
        render_messages(tokenizer_with(HUGE[name]), MESSAGES)


@pytest.mark.parametrize("name", BROKEN)
def test_an_error_of_a_template_is_one_visible_line(name):
    with pytest.raises(ValueError, match="chat template") as caught:
        apply_chat_template(MESSAGES, Chat(), tokenizer_with(BROKEN[name]))
    assert str(caught.value).isprintable()


def test_the_limits_are_removed_after_a_rendering():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert render_messages(tokenizer_with("{{ messages[0].content }}"), MESSAGES) == "hi"
    with pytest.raises(TemplateError):
        render_messages(tokenizer_with(HUGE["3 GB"]), MESSAGES)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_other_threads_render_without_a_limit_of_time():
    found = []
    tokenizer = tokenizer_with("{{ messages[0].content }}")
    thread = threading.Thread(target=lambda: found.append(render_messages(tokenizer, MESSAGES)))
    thread.start()
    thread.join()
    assert found == ["hi"]
