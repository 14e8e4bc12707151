"""A language model behind an OpenAI-compatible address as judge of completions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import sqlite3
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai
import torch
from pydantic import AliasPath, BaseModel, Field

from litgrpo.argument_types import check_argument_types
from litgrpo.arguments import above, at_least, require
from litgrpo.http import (
    MIB,
    LimitedClient,
    MalformedReply,
    describe_error,
    describe_response,
    is_tls_mistake,
    read_reply,
)
from litgrpo.rewards.reward_model import Judge
from litgrpo.rewards.rubric import Criterion, Mark, check_criteria
from litgrpo.text.answers import prompt_text_of, text_of
from litgrpo.text.secrets import find_masked, mask_settings, mask_text, remember_secret
from litgrpo.text.visible import excerpt
from litgrpo.workers.failures import FailureCounter

log = logging.getLogger(__name__)

TEMPLATE = """\
You judge one answer by one criterion.

Criterion: {criterion}

Question:
{prompt}

Answer:
{completion}

Explain your judgement in a sentence or two. Then end with one line, and nothing after it:
Score: N
where N is a number from 0 (not at all) to {max_score:g} (fully)."""
# The last line of a reply, such as "Score: 7", "**Score: 7.5**" or "Score: 7/10".
SCORE = re.compile(r"^\W*score\W*?[:=]\W*?(-?\d+(?:\.\d+)?)(?:\s*/\s*(\d+(?:\.\d+)?))?\W*$", re.I)
RETRIED = (408, 409, 429)  # and 5xx: by the client, so that they may pass
NO_ACCESS = (401, 403)
HEADERS = ("Host", "Content-Length", "Content-Type", "Accept")  # of a request, kept
MAX_NAME = 40  # characters of a variable's name
MAX_REPLY_BYTES = 4 * MIB
MAX_SCORE_LINE = 200  # characters
CACHE_FILE = "replies.sqlite3"
CACHE_TIMEOUT_S = 10.0  # that another process may write


class ChatCompletion(BaseModel):
    """Response of an OpenAI-compatible server; `content` is the text of the first choice."""

    choices: list[Any]
    content: str = Field(validation_alias=AliasPath("choices", 0, "message", "content"))


class RequestRejected(ValueError):
    """The server rejected the first request, so the configuration is wrong."""


class Abstained(openai.OpenAIError):
    """A request is not sent; the client retries only after errors of its own types."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(problem)
        self.reason = reason


class JudgeClient(LimitedClient):
    """Client in which a judge counts each try and checks its response."""

    def __init__(self, judge: LLMJudge, key: str | None) -> None:
        super().__init__(MAX_REPLY_BYTES, judge.timeout_s)
        self.judge = judge
        self.authorization = {} if key is None else {"Authorization": f"Bearer {key}"}

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request that may be sent, and check that the response is a chat completion."""
        self.judge.count_try()
        # Others are for another address: keys and names of OPENAI_ADMIN_KEY, OPENAI_ORG_ID, ...
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        request.headers = httpx2.Headers(headers | self.authorization)
        response = await super().send(request, **options)
        if response.is_success:
            self.judge.read(response)
        return response


class LLMJudge(Judge):
    """The weighted mean of the marks that a model behind an OpenAI-compatible address gives.

    Each completion costs one request for each criterion, to `base_url` + `/chat/completions`. A
    request that fails after all retries, a reply without a score, and `max_requests` make the
    completion abstain; they are counted in the metrics `reward/judge_...`.

    Args:
        base_url: up to and with `/v1`, such as `https://api.openai.com/v1`.
        model: its name there.
        criteria: {name: what to look at and how much it counts}.
        template: what is asked: `{criterion}`, `{prompt}`, `{completion}`, `{max_score}` and names
            of columns are put in. The reply's last line must be `Score: N`.
        max_score: the best mark; the reward is the weighted mean divided by it.
        max_tokens: of a reply.
        temperature: of the judge.
        extra_body: further fields of each request, such as `{seed: 0}`.
        max_concurrent_requests: requests at the same time.
        timeout_s: of one request, from the connection to the last byte of its reply.
        max_retries: after a time-out, a lost connection, a malformed reply, or status 408, 409, 429
            or 5xx; the client `openai` waits longer each time, up to 8 s, or as long as the server
            says in `Retry-After`, up to 2 minutes.
        max_requests: requests that each process of a run may send; the rest abstains.
        cache_dir: folder in which replies are kept in a file, by a hash of everything that was
            asked; null keeps none. It can be shared by runs.
        api_key_env: environment variable that holds the key; null for a server without keys. The
            key itself is read when it is sent, and is masked in files, logs and checkpoints.

    Example:
        >>> judge = LLMJudge(
        ...     "http://127.0.0.1:8000/v1",
        ...     "Qwen/Qwen2.5-7B-Instruct",
        ...     {"correct": Criterion("Is the result correct?"), "brief": Criterion(weight=0.5)},
        ...     api_key_env=None,
        ... )
        >>> list(judge.criteria)
        ['correct', 'brief']
    """

    in_process = True
    isolated = False
    whole_batch = True  # it looks after single failures itself

    @check_argument_types()
    def __init__(  # noqa: PLR0913 (each is a line of a recipe)
        self,
        base_url: str,
        model: str,
        criteria: Mapping[str, Criterion],
        *,
        template: str = TEMPLATE,
        max_score: float = 10.0,
        max_tokens: int = 512,
        temperature: float = 0.0,
        extra_body: dict[str, Any] | None = None,
        max_concurrent_requests: int = 8,
        timeout_s: float = 60.0,
        max_retries: int = 5,
        max_requests: int | None = None,
        cache_dir: str | None = "~/.cache/litgrpo/judge",
        api_key_env: str | None = "OPENAI_API_KEY",
    ) -> None:
        check_criteria(criteria, max_score)
        _check_address(base_url)
        self.columns = _fields(template) - {"criterion", "prompt", "completion", "max_score"}
        at_least("judge: max_tokens", max_tokens, 1)
        at_least("judge: max_concurrent_requests", max_concurrent_requests, 1)
        at_least("judge: max_retries", max_retries, 0)
        at_least("judge: temperature", temperature, 0)
        at_least("judge: max_requests", max_requests, 0)
        above("judge: timeout_s", timeout_s, 0)
        require(
            api_key_env is None or is_variable_name(api_key_env),
            "judge: api_key_env must be the name of an environment variable in capital letters,"
            " such as OPENAI_API_KEY, not the key itself; the value is not shown, it may be a key",
        )
        self.url = base_url.rstrip("/")
        self.body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self.body |= extra_body or {}
        mask_settings({"extra_body": extra_body})  # remembers its keys
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"judge: extra_body is not JSON: {excerpt(str(error))}") from error
        self.criteria, self.max_score = dict(criteria), max_score
        self.template, self.max_concurrent_requests = template, max_concurrent_requests
        self.timeout_s, self.max_retries, self.max_requests = timeout_s, max_retries, max_requests
        self.replies = None if cache_dir is None else Replies(Path(cache_dir).expanduser())
        self.api_key_env = api_key_env
        self.counts: Counter[str] = Counter()  # since the start of the run
        self.abstentions: defaultdict[str, FailureCounter] = defaultdict(FailureCounter)
        self.lost_in_a_row = 0
        self.asking = asyncio.Semaphore(max_concurrent_requests)

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but requests in flight: tasks cannot be pickled."""
        asking = asyncio.Semaphore(self.max_concurrent_requests)
        return self.__dict__ | {"asking": asking}

    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """See that there are a key and a file for the replies.

        Raises:
            ValueError: the variable is empty, the file cannot be used, or a key was masked.
        """
        self._key()
        require(
            not find_masked(self.body),
            "judge: a key in extra_body is masked, as keys are in every config.yaml; use the"
            " original recipe, or write the value back",
        )
        if self.replies is not None:
            self.replies.prepare()

    def state_dict(self) -> dict[str, int]:
        """Return the counts, for a checkpoint."""
        return dict(self.counts)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume with the counts of a checkpoint."""
        self.counts = Counter(state)

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[Any]:
        """Ask for every criterion; see `Rubric`.

        Raises:
            ValueError: the template names a column that there is not, or the server rejected
                the first request (key, address, model).
        """
        missing = sorted(self.columns - columns.keys())
        require(not missing, f"judge: the template names {missing}, which are no columns")
        texts = [
            [
                self.template.format(
                    prompt=prompt_text_of(prompt),
                    completion=text_of(completion),
                    criterion=criterion.text or name,
                    max_score=self.max_score,
                    **{column: columns[column][row] for column in self.columns},
                )
                for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
            ]
            for name, criterion in self.criteria.items()
        ]
        self.lost_in_a_row = 0
        try:
            # Equal texts are asked once.
            async with self._client() as client, asyncio.TaskGroup() as group:
                marks = {
                    text: group.create_task(self._mark(client, text))
                    for text in dict.fromkeys(text for listed in texts for text in listed)
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if log_metric is not None:
            for name in ("calls", "cached", "failed", "unparsed", "over_budget"):
                log_metric(f"judge_{name}", self.counts[name])
        rows = zip(*([marks[text].result() for text in listed] for listed in texts), strict=True)
        return [self._mean(row) for row in rows]

    def _mean(self, marks: Sequence[Mark]) -> float | None:
        """Return the reward, or None if a mark is missing: fewer criteria are not comparable."""
        weights = [criterion.weight for criterion in self.criteria.values()]
        weighted = [mark * w for mark, w in zip(marks, weights, strict=True) if mark is not None]
        if len(weighted) < len(weights):
            return None
        return sum(weighted) / sum(weights) / self.max_score

    def _client(self) -> openai.AsyncOpenAI:
        """The client of the API, which tries again what may work later."""
        return openai.AsyncOpenAI(
            base_url=self.url,
            api_key="",
            admin_api_key="",  # needed without a key; `JudgeClient` sends the judge's
            max_retries=self.max_retries,
            http_client=JudgeClient(self, self._key()),
        )

    def count_try(self) -> None:
        """Count a request that is about to be sent; raise `Abstained` if it must not be sent."""
        if self.max_requests is not None and self.counts["calls"] >= self.max_requests:
            raise Abstained("over_budget", "max_requests is spent")
        # Waiting for each of the others would be of no use.
        if self.lost_in_a_row >= self.max_concurrent_requests:
            raise Abstained("failed", "the server is down")
        self.counts["calls"] += 1

    def read(self, response: httpx2.Response) -> str:
        """Return the text of a chat completion; for anything else the client tries again."""
        try:
            reply = read_reply(response.content, ChatCompletion)
        except MalformedReply as error:
            raise httpx2.DecodingError(f"no chat completion: {error}") from error
        if len(reply.choices) != (expected := self.body.get("n", 1)):
            raise httpx2.DecodingError(f"{len(reply.choices)} choices; expected {expected}")
        return reply.content

    async def _mark(self, client: openai.AsyncOpenAI, text: str) -> Mark:
        """The mark of one text."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self._count("failed", f"the prompt, completion or a column is not Unicode: {error}")
            return None
        body = self.body | {"messages": [{"role": "user", "content": text}]}
        everything = json.dumps([self.url, body], sort_keys=True)
        key = hashlib.sha256(everything.encode()).hexdigest()
        if self.replies is not None:
            earlier = await asyncio.to_thread(self.replies.get, key)
            if earlier is not None:
                self.counts["cached"] += 1
                return self._score(earlier)
        async with self.asking:
            reply = await self._ask(client, body)
        if reply is None:
            return None
        mark = self._score(reply)
        if mark is None:
            self._count("unparsed", f"no line 'Score: N' at the end of {excerpt(reply[-200:])!r}")
        elif self.replies is not None:
            await asyncio.to_thread(self.replies.put, key, reply)
        return mark

    async def _ask(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> str | None:
        """The reply without keys; None if there is none after all retries."""
        try:
            response = await client.post("/chat/completions", body=body, cast_to=httpx2.Response)
        except Abstained as error:
            self._count(error.reason, str(error))
            return None
        except Exception as error:  # also of types that only a hostile server causes
            self._count_failure(error)
            return None
        self.lost_in_a_row = 0
        self.counts["answered"] += 1
        return mask_text(self.read(response))

    def _count_failure(self, error: Exception) -> None:
        """Count a request that failed after all retries."""
        # If no request worked so far, and a retry would not help, it is a mistake in the recipe.
        if isinstance(error, openai.APIStatusError):
            problem, status = describe_response(error.response), error.status_code
            may_pass = status in RETRIED or error.response.is_server_error
            if status in NO_ACCESS:
                where = (
                    f"the environment variable {self.api_key_env}" if self.api_key_env else "none"
                )
                problem += f" (the key is from api_key_env: {where})"
        else:
            problem = describe_error(error.__cause__ or error)
            may_pass = not is_tls_mistake(error)
        if not may_pass and not self.counts["answered"]:
            raise RequestRejected(f"judge: {self.url} rejected the first request: {problem}")
        self.lost_in_a_row += may_pass
        self._count("failed", problem)

    def _score(self, reply: str) -> Mark:
        """The number of the last line, or None if it holds no score within the scale."""
        last_line = (reply.strip().splitlines() or [""])[-1].strip()
        match = SCORE.match(last_line) if len(last_line) <= MAX_SCORE_LINE else None
        if match is None or (match[2] is not None and float(match[2]) != self.max_score):
            return None
        mark = float(match[1])
        return mark if 0 <= mark <= self.max_score else None

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "")
        require(
            bool(key),
            f"judge: the environment variable {self.api_key_env} is not set; export the key there,"
            " or give api_key_env: null for a server without keys",
        )
        require(
            key.isascii() and key.isprintable() and " " not in key,
            f"judge: the environment variable {self.api_key_env} holds characters that no key has,"
            " such as a space or a line break",
        )
        remember_secret(key)
        return key

    def _count(self, what: str, why: str) -> None:
        """Count an abstention; log the first, and each time their number has doubled."""
        self.counts[what] += 1
        is_due = self.abstentions[what].add([what])
        if is_due and (what != "over_budget" or self.counts[what] == 1):  # that one once
            number = self.counts[what]
            log.warning("judge: %d %s so far, left out: %s", number, what, excerpt(why, 400))


def is_variable_name(name: str) -> bool:
    """Return True for the name of a variable; a key given in its place must not pass as a name.

    Example:
        >>> is_variable_name("OPENAI_API_KEY"), is_variable_name("AKIAIOSFODNN7EXAMPLE")
        (True, False)
    """
    # Keys have lower case, or are long, or mix letters with digits.
    if len(name) > MAX_NAME or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        return False
    return all(len(word) <= (16 if word.isalpha() else 8) for word in name.split("_"))


class Replies:
    """Replies in a file of SQLite, which processes can share."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CACHE_FILE
        self.failed = False  # the file could not be used

    def prepare(self) -> None:
        """Make the file; raise ValueError if it cannot be made, or is something else."""
        try:
            require(not self.path.is_symlink(), f"judge: cache_dir: {self.path} is a link")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._run("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT)")
            self._run("SELECT key, reply FROM replies LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ValueError(
                f"judge: cache_dir: {self.path} cannot be used ({error}); move it elsewhere, or"
                " give another folder"
            ) from error

    def get(self, key: str) -> str | None:
        """The reply under a key, if there is one."""
        rows = self._try("SELECT reply FROM replies WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def put(self, key: str, reply: str) -> None:
        """Keep a reply."""
        self._try("INSERT OR REPLACE INTO replies VALUES (?, ?)", key, reply)

    def _try(self, statement: str, *values: str) -> list[Any]:
        """Run a statement; a file that fails during a run is warned about once."""
        try:
            return self._run(statement, *values)
        except sqlite3.Error as error:
            if not self.failed:
                log.warning("judge: cache_dir: %s cannot be used: %s", self.path, error)
            self.failed = True
            return []

    def _run(self, statement: str, *values: str) -> list[Any]:
        # A connection for each, since none may be used in another thread or after a fork. Not WAL:
        # hosts may share the folder. A killed process loses nothing, but the machine's end may.
        with closing(sqlite3.connect(self.path, CACHE_TIMEOUT_S)) as connection, connection:
            connection.execute("PRAGMA synchronous = OFF")
            return connection.execute(statement, values).fetchall()


def _fields(template: str) -> set[str]:
    """The names in a template's braces."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(
            f"judge: template: {error}; a brace that is no name is written twice: {{{{"
        ) from error
    require(
        "completion" in names and all(name.isidentifier() for name in names),
        f"judge: the template names {sorted(names)}; it must name completion, and columns by plain"
        " names; a brace that is no name is written twice: {{",
    )
    return names


def _check_address(base_url: str) -> None:
    try:
        parts = urlsplit(base_url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        is_address = False
    require(
        is_address,
        f"judge: base_url {excerpt(base_url)!r:.100} is no address such as https://api.openai.com/v1",
    )
    require(
        "@" not in parts.netloc and not parts.query,
        "judge: base_url must not hold a name, a key or a query; give the key by api_key_env",
    )
