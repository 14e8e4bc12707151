"""Render messages with a tokenizer's chat template, which may be broken or hostile.

transformers runs templates in Jinja's sandbox, which limits what they reach, but neither their time
nor their memory: a template may loop without end or write gigabytes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from litgrpo.text.visible import excerpt

MAX_SECONDS = 10.0
MAX_CHARS = 10_000_000
# Memory that the first rendering of a template may take. Later ones have no limit: it holds for the
# whole process, and by then other threads allocate memory.
MAX_BYTES = 2 * 2**30
_tried: set[str] = set()


class TemplateError(ValueError):
    """A chat template rejects the messages, or takes too much time or memory."""


class TimeIsUp(BaseException):
    """A time limit has passed; not an Exception, because Jinja catches those and continues."""


def render_messages(
    tokenizer: Any,
    messages: Any,
    *,
    # function that templates call for the time; by default they read the clock
    strftime_now: Callable[[str], str] | None = None,
    **options: Any,
) -> str:
    """Return messages as text, in the chat format of a tokenizer."""
    # The limit of time holds in the main thread, where prompts are rendered before training.
    template = str(tokenizer.chat_template)
    try:
        with ExitStack() as limits:
            if threading.current_thread() is threading.main_thread():
                if template not in _tried:
                    limits.enter_context(limit_memory(MAX_BYTES))
                limits.enter_context(limit_time(MAX_SECONDS))
            if strftime_now is not None:
                _set_clock(tokenizer.get_chat_template(None, options.get("tools")), strftime_now)
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        _tried.add(template)
    except TimeIsUp as error:
        raise TemplateError(f"it did not finish within {MAX_SECONDS:g} s") from error
    except MemoryError as error:
        raise TemplateError(f"it needs more than {MAX_BYTES // 2**20} MiB of memory") from error
    except Exception as error:  # it runs foreign code: any exception may come out
        raise TemplateError(excerpt(f"{type(error).__name__}: {error}")) from error
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        raise TemplateError(f"it wrote more than {MAX_CHARS:,} characters")
    return text


def _set_clock(template: str, strftime_now: Callable[[str], str]) -> None:
    """Replace the function by which a chat template reads the clock."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # slow to import

    # transformers caches the compiled template, and makes a text of a function among the options.
    _compile_jinja_template(template).globals["strftime_now"] = strftime_now


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise in the block after some time; only in the main thread, where signals are handled."""

    def stop(*_: Any) -> None:
        if running:
            raise TimeIsUp

    running = True
    before = signal.signal(signal.SIGALRM, stop)
    # It fires again: code that runs when Python ignores exceptions (`__del__`) loses the first.
    # Others may use the timer, as pytest-timeout does.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def limit_memory(num_bytes: int) -> Iterator[None]:
    """Raise MemoryError in the block if this process takes this much more memory (Linux only)."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statistics.read_text().split()[0]) * resource.getpagesize()
    lowest = used + num_bytes if soft < 0 else min(soft, used + num_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
