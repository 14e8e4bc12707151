"""Agents that call the policy through the OpenAI API, and how a worker process runs them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from litgrpo.argument_types import check_field_types
from litgrpo.arguments import at_least, import_object, require
from litgrpo.environments.base import FailedEpisode
from litgrpo.environments.episode import seed_rngs
from litgrpo.environments.tool import resolve
from litgrpo.environments.tool_calls import CallFormat, format_of
from litgrpo.workers.failures import cause_of
from litgrpo.workers.process import Send

MAX_OUTPUT = 1_000_000  # bytes of an answer, and of what a command may print to stdout
RESULT = (
    "expected None, a text (the answer), a number (the reward), or a dict with `completion` and "
    "`reward`"
)


class AgentRequest(NamedTuple):
    """Request to a worker to run the agent on one row."""

    row: dict[str, Any]  # {column: value}
    seed: int  # of the global random generators
    base_url: str  # of the API, such as `http://127.0.0.1:41234/v1`
    api_key: str  # key of the row


@dataclass(frozen=True)
class AgentResult:
    """Return value of an agent."""

    reward: float | None = None  # of the episode; None: the agent gives none
    # answer that reward functions get; None: the text of the policy's last reply
    completion: str | None = None

    @staticmethod
    def read(value: Any) -> AgentResult:
        """Convert the return value of an agent; the reward must be finite."""
        if isinstance(value, Mapping):
            unknown = [name for name in value if name not in ("reward", "completion")]
            require(not unknown, f"the agent returned a dict with {unknown[:1]}; {RESULT}")
            reward, completion = value.get("reward"), value.get("completion")
        elif isinstance(value, str):
            reward, completion = None, value
        else:
            reward, completion = value, None
        if not (completion is None or isinstance(completion, str)):
            raise TypeError(f"completion of the agent is {completion!r:.60}, expected a text")
        many = f"the agent returned an answer of more than {MAX_OUTPUT:,} characters"
        require(completion is None or len(completion) <= MAX_OUTPUT, many)
        if reward is None:
            return AgentResult(None, completion)
        try:
            number = float(reward)
        except (TypeError, ValueError) as error:
            raise TypeError(f"the agent returned {reward!r:.60}; {RESULT}") from error
        require(math.isfinite(number), f"the reward of the agent is {number}, expected a number")
        return AgentResult(number, completion)


@check_field_types
@dataclass(eq=False)
class Agent:
    """Trains the policy inside an agent that calls it through the OpenAI API.

    Each episode runs the agent on one row, in a worker process. Everything that the policy
    generates for it is trained on, and nothing else. Calls whose messages begin with all messages
    of an earlier call and its reply continue the same token sequence; other calls (sub-agents,
    edited histories, parallel samples) become further segments of the same row, with its reward.

    Args:
        function: `function(row, base_url, api_key)`, plain or async, or its import path. `row` has
            the columns of the data; with `data.chat` its `prompt` is the last message. It returns
            None, the answer as a text, the reward as a number, or a dict with `completion` and
            `reward`.
        command: program and arguments instead of a function. It gets the row as JSON on stdin and
            `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment, and prints its answer; or a
            JSON object with `completion` and `reward`.
        call_format: how the policy writes tool calls if the agent sends `tools`: `hermes`, `tags`
            or `python`, or a format object; see `Tools`.
        max_prompt_tokens: maximal tokens of the messages that begin a segment; a longer request is
            rejected (HTTP 400, `context_length_exceeded`).

    Example:
        >>> def solve(row, base_url, api_key):
        ...     client = openai.OpenAI(base_url=base_url, api_key=api_key)
        ...     messages = [{"role": "user", "content": row["prompt"]}]
        ...     reply = client.chat.completions.create(model="policy", messages=messages)
        ...     return reply.choices[0].message.content
        >>> Agent(solve).max_prompt_tokens
        2048
    """

    function: Callable | str | None = None
    command: list[str] = field(default_factory=list)
    call_format: str | CallFormat = "hermes"
    max_prompt_tokens: int = 2048

    def __post_init__(self) -> None:
        require(
            (self.function is None) != (not self.command),
            "Agent needs either function (my_agent.solve) or command ([python, my_agent.py]).",
        )
        at_least("max_prompt_tokens", self.max_prompt_tokens, 1)
        self.calls = format_of(self.call_format)
        # Imported here, so that unpickling imports the agent's libraries once for all workers.
        self._function = None
        if self.function is not None:
            self._function = import_object("function", self.function)
        require(
            self.function is None or callable(self._function),
            f"function is {self.function!r}; it must be a function, or its import path.",
        )

    def run(self, request: AgentRequest) -> AgentResult:
        """Run the agent on one row; any exception of the agent propagates."""
        keys = {"OPENAI_BASE_URL": request.base_url, "OPENAI_API_KEY": request.api_key}
        seed_rngs(request.seed)
        os.environ.update(keys)
        if self.command:
            return read_output(run_command(self.command, json.dumps(request.row, default=str)))
        assert self._function is not None
        returned = self._function(request.row, request.base_url, request.api_key)
        return AgentResult.read(resolve(returned))


def run_command(command: Sequence[str], text: str) -> str:
    """Run a command in the worker's process group, with `text` as stdin, and return its stdout.

    Example:
        >>> run_command(["cat"], "hello")
        'hello'
    """
    # A file as stdin: a pipe would block if the command reads nothing and prints much.
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "replace"))
        file.seek(0)
        try:
            process = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE)
        except OSError as error:
            raise RuntimeError(f"{command[0]}: {error.strerror or error}") from error
        with process:
            assert process.stdout is not None
            printed = process.stdout.read(MAX_OUTPUT + 1)
            if len(printed) > MAX_OUTPUT:
                process.kill()
                raise RuntimeError(f"{command[0]} printed more than {MAX_OUTPUT:,} bytes")
            code = process.wait()
    if code:
        how = f"died of signal {-code}" if code < 0 else f"exited with {code}"
        raise RuntimeError(f"{command[0]} {how}")
    return printed.decode("utf-8", "replace")


def read_output(text: str) -> AgentResult:
    """Convert what a command printed: a JSON object, or the answer as a text.

    Example:
        >>> read_output('{"reward": 0.5}').reward, read_output("42").completion
        (0.5, '42')
    """
    text = text.strip()
    if text.startswith("{"):
        try:
            return AgentResult.read(json.loads(text))
        except (json.JSONDecodeError, RecursionError):
            return AgentResult.read(text)
    return AgentResult.read(text)


def run_agent(agent: Agent, request: AgentRequest, send: Send) -> AgentResult | FailedEpisode:
    """Answer a request in a worker."""
    try:
        return agent.run(request)
    except BaseException as error:  # an agent may raise anything, also SystemExit
        return FailedEpisode(cause_of(error))
