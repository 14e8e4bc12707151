"""A language model behind an OpenAI-compatible address as judge of completions."""

from __future__ import annotations

import asyncio
import email.utils
import hashlib
import inspect
import json
import logging
import os
import random
import re
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from torch import distributed

from litgrpo.argument_types import check_argument_types, check_field_types
from litgrpo.arguments import above, at_least, require
from litgrpo.http_client import (
    MIB,
    ConnectionLost,
    MalformedReply,
    Reply,
    TLSFailed,
    make_client,
    parse_json,
    read_field,
    send,
)
from litgrpo.rewards.calls import run_coroutines
from litgrpo.rewards.reward_model import Judge
from litgrpo.text.answers import prompt_text_of, text_of
from litgrpo.text.secrets import find_masked, mask_settings, mask_text, remember_secret
from litgrpo.text.visible import excerpt

Mark = float | None


@check_field_types
@dataclass(frozen=True)
class Criterion:
    """One line of a rubric.

    Args:
        text: the instruction for the judge; default: the criterion's name.
        weight: how much it counts, relative to the others.

    Example:
        >>> Criterion("Is every step of the reasoning correct?", weight=2.0).weight
        2.0
    """

    text: str | None = None
    weight: float = 1.0


class Rubric(Judge):
    """The weighted mean of a judge's marks for several criteria.

    The judge is asked once for each criterion. A mark of None says that a criterion does not apply;
    the others then share its weight. A mark that is not a number, or outside of 0 to `max_score`,
    masks its completion.

    Args:
        criteria: {name: what to look at and how much it counts}.
        judge: `f(prompts, completions, criterion, **columns) -> list[float | None]`: a function, a
            coroutine function (all criteria are then asked together), or an object with such a
            `__call__`. It gets the columns that its signature names.
        max_score: the best mark; the reward is the mean divided by it.

    Example:
        >>> def count_words(prompts, completions, criterion):
        ...     return [float(len(text.split())) for text in completions]
        >>> rubric = Rubric({"detail": Criterion()}, judge=count_words, max_score=10.0)
        >>> rubric(["Why?"], ["Because it rained all night."])
        [0.5]
    """

    @check_argument_types()
    def __init__(
        self, criteria: Mapping[str, Criterion], judge: Callable[..., Any], max_score: float = 1.0
    ) -> None:
        weights = {name: criterion.weight for name, criterion in criteria.items()}
        require(
            bool(weights) and all(0 < weight < inf for weight in weights.values()),
            f"rubric: needs at least one criterion, each with a weight above 0, got {weights}",
        )
        require(0 < max_score < inf, f"rubric: max_score is {max_score}; it must be above 0")
        parameters = inspect.signature(judge).parameters
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.named = set(parameters)
        require(
            "criterion" in self.named or self.takes_all,
            "rubric: the judge has no parameter `criterion`, so it could not distinguish criteria;"
            " it is called as judge(prompts, completions, criterion=text)",
        )
        self.criteria = dict(criteria)
        self.judge = judge
        self.max_score = max_score

    @property
    def in_process(self) -> bool:  # type: ignore[override]
        """True if the judge holds weights, which are too large to copy."""
        return isinstance(self.judge, Judge)

    @property
    def isolated(self) -> bool:
        """True if the judge is foreign code that may hang."""
        return not self.in_process

    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """Load the judge, if it is one that holds weights."""
        if isinstance(self.judge, Judge):
            self.judge.load(device, policy)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        """Ask for every criterion.

        Args:
            prompts: N prompts.
            completions: N completions.
            columns: what else is known of them.

        Returns:
            N rewards from 0 to 1; None where no criterion applies.
        """
        rows = {**columns, "prompts": prompts, "completions": completions}
        known = {name: rows[name] for name in rows if self.takes_all or name in self.named}
        asked = [
            self.judge(**known | {"criterion": criterion.text or name})
            for name, criterion in self.criteria.items()
        ]
        if inspect.isawaitable(asked[0]):
            asked = run_coroutines(asked)
        dtypes = [marks.dtype for marks in asked if isinstance(marks, torch.Tensor)]
        listed = [
            self._check_marks(name, marks, len(completions))
            for name, marks in zip(self.criteria, asked, strict=True)
        ]
        means = [self._mean(marks) for marks in zip(*listed, strict=True)]
        if not dtypes:
            return means
        coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)  # equal up to rounding
        return [mean if mean is None else torch.tensor(mean, dtype=coarsest) for mean in means]

    def _check_marks(self, name: str, marks: Any, num_rows: int) -> list[Mark]:
        listed = marks.tolist() if isinstance(marks, torch.Tensor) else marks
        require(
            isinstance(listed, list | tuple) and len(listed) == num_rows,
            f"rubric: for {num_rows} completions the judge gave {marks!r:.60} as marks of"
            f" criterion '{name}'; it must be a list of one number (or None) for each",
        )
        return [mark if mark is None else float(mark) for mark in listed]

    def _mean(self, marks: Sequence[Mark]) -> Mark:
        pairs = zip(marks, self.criteria.values(), strict=True)
        given = [(mark, criterion.weight) for mark, criterion in pairs if mark is not None]
        if not given:
            return None
        if not all(isfinite(mark) and 0 <= mark <= self.max_score for mark, _ in given):
            return nan
        return sum(m * w for m, w in given) / sum(w for _, w in given) / self.max_score


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
AGAIN = (408, 409, 425, 429)  # and 5xx: worth another try
NO_ACCESS = (401, 403)
LONGEST_WAIT_S = 60.0
JITTER = random.Random()  # separate, so that retries do not change the run's random numbers
PROCESSES = "processes"  # among what a checkpoint holds of a budget
CHARS_PER_TOKEN = 4  # where a server does not count
MAX_NAME = 40  # characters of a variable's name
MAX_REPLY_BYTES = 4 * MIB
MAX_SCORE_LINE = 200  # characters
TEMPLATE_TOKENS = 4096  # tokens that a server adds to a request: its system prompt
THOUGHTS = 8  # times max_tokens that a reply may have cost


class RequestRejected(ValueError):
    """The server rejected the first request, so the configuration is wrong."""


class TryAgain(Exception):
    """A request failed that may work later.

    Args:
        problem: what happened.
        wait_s: when, as the server says.
    """

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


class GaveUp(Exception):
    """A completion will get no mark.

    Args:
        what: it is counted as.
        why: in words.
    """

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what, self.why = what, why


class LLMJudge(Rubric):
    """The weighted mean of the marks that a model behind an OpenAI-compatible address gives.

    Each completion costs one request for each criterion, to `base_url` + `/chat/completions`. A
    request that fails after all retries, a reply without a score, and a budget that is spent make
    the completion abstain; they are counted in the metrics `reward/judge_...`.

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
        max_retries: after a time-out, a lost connection, or status 429 or 5xx.
        backoff_s: wait before the first retry, doubled for each further one, up to 60 s, with
            jitter; what the server says in `Retry-After` goes before.
        max_requests: requests in all that a run may send; the rest abstains. Several processes have
            equal shares.
        max_total_tokens: tokens in all, of requests and replies; requests on their way
            when it is spent are answered.
        cache_dir: folder in which replies are kept, by a hash of everything that was asked; null
            keeps none. It can be shared by runs.
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
    has_budget = True
    whole_batch = True  # it looks after single failures itself
    runs_in_background = True

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
        max_retries: int = 4,
        backoff_s: float = 1.0,
        max_requests: int | None = None,
        max_total_tokens: int | None = None,
        cache_dir: str | None = "~/.cache/litgrpo/judge",
        api_key_env: str | None = "OPENAI_API_KEY",
    ) -> None:
        super().__init__(criteria, self._marks, max_score)
        _check_address(base_url)
        self.columns = _fields(template) - {"criterion", "prompt", "completion", "max_score"}
        at_least("judge: max_tokens", max_tokens, 1)
        at_least("judge: max_concurrent_requests", max_concurrent_requests, 1)
        at_least("judge: max_retries", max_retries, 0)
        at_least("judge: temperature", temperature, 0)
        at_least("judge: max_requests", max_requests, 0)
        at_least("judge: max_total_tokens", max_total_tokens, 0)
        above("judge: timeout_s", timeout_s, 0)
        above("judge: backoff_s", backoff_s, 0)
        require(
            api_key_env is None or is_variable_name(api_key_env),
            "judge: api_key_env must be the name of an environment variable in capital letters,"
            " such as OPENAI_API_KEY, not the key itself; the value is not shown, it may be a key",
        )
        self.url = base_url.rstrip("/") + "/chat/completions"
        self.body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self.body |= extra_body or {}
        mask_settings({"extra_body": extra_body})  # remembers its keys
        try:
            json.dumps(self.body, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"judge: extra_body is not JSON: {excerpt(str(error))}") from error
        self.template, self.max_concurrent_requests = template, max_concurrent_requests
        self.timeout_s, self.max_retries, self.backoff_s = timeout_s, max_retries, backoff_s
        self.max_requests, self.max_total_tokens = max_requests, max_total_tokens
        self.replies = Replies(cache_dir)
        self.api_key_env = api_key_env
        self.counts: Counter[str] = Counter()  # since the start of the run
        self.lost_in_a_row = 0
        self.rank, self.num_processes = 0, 1
        self.begun: tuple[list[Any], Future[tuple[list[Any], Counter[str]]]] | None = None
        self.thread: threading.Thread | None = None

    def load(self, device: torch.device | str | None = None, policy: str | None = None) -> None:
        """See that there are a key and a folder for the replies; learn how many processes ask.

        Raises:
            ValueError: the variable is empty, the folder cannot be made, or a key was masked.
        """
        self._key()
        require(
            not find_masked(self.body),
            "judge: a key in extra_body is masked, as keys are in every config.yaml; use the"
            " original recipe, or write the value back",
        )
        self.replies.prepare()
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.num_processes = distributed.get_rank(), distributed.get_world_size()

    def state_dict(self) -> dict[str, int]:
        """Return the requests and tokens spent, for a checkpoint."""
        return dict(self.counts) | {PROCESSES: self.num_processes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume with the budget of a checkpoint, which holds what one of its ranks spent."""
        before = state.get(PROCESSES, self.num_processes)
        spent = {name: -(-n * before // self.num_processes) for name, n in state.items()}
        self.counts = Counter({name: max(0, n) for name, n in spent.items() if name != PROCESSES})

    def __call__(
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
        begun_for, _ = self.begun or ([], None)
        if begun_for != [*prompts, *completions]:
            self.begin(prompts, completions, **columns)
        assert self.begun is not None
        (_, answers), self.begun = self.begun, None
        rewards, counts = answers.result()
        names = ("calls", "tokens", "cached", "failed", "unparsed", "over_budget")
        if log_metric is not None:
            for name in names:
                log_metric(f"judge_{name}", counts[name])
        return rewards

    def begin(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> None:
        """Send the requests in a thread, after those that were begun before.

        The thread is a daemon: it does not delay the end of a run.
        """
        answers: Future[tuple[list[Any], Counter[str]]] = Future()
        before, self.begun = self.thread, ([*prompts, *completions], answers)

        def ask() -> None:
            if before is not None:
                before.join()
            try:
                rewards = self._rewards(prompts, completions, **columns)
                answers.set_result((rewards, self.counts.copy()))
            except Exception as error:  # raised where the rewards are asked for
                answers.set_exception(error)

        self.thread = threading.Thread(target=ask, daemon=True, name="litgrpo-judge")
        self.thread.start()

    def _rewards(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        missing = sorted(self.columns - columns.keys())
        require(not missing, f"judge: the template names {missing}, which are no columns")
        self.lost_in_a_row = 0
        self.asking = asyncio.Semaphore(self.max_concurrent_requests)
        self.pending: dict[str, asyncio.Task[Mark]] = {}
        return super().__call__(prompts, completions, **columns)

    def __getstate__(self) -> dict[str, Any]:
        """Copy everything but requests in flight: tasks and threads cannot be pickled."""
        kept = {k: v for k, v in self.__dict__.items() if k not in ("asking", "pending")}
        return kept | {"begun": None, "thread": None}

    def _mean(self, marks: Sequence[Mark]) -> Mark:
        """Return None if a mark is missing: a mean of fewer criteria is not comparable."""
        return None if None in marks else super()._mean(marks)

    async def _marks(
        self, prompts: Sequence[Any], completions: Sequence[Any], criterion: str, **columns: Any
    ) -> list[Mark]:
        """The marks of N completions for one criterion."""
        used = [{name: columns[name][row] for name in self.columns} for row in range(len(prompts))]
        async with make_client() as client:
            asked = [
                self.template.format(
                    prompt=prompt_text_of(prompt),
                    completion=text_of(completion),
                    criterion=criterion,
                    max_score=self.max_score,
                    **row,
                )
                for prompt, completion, row in zip(prompts, completions, used, strict=True)
            ]
            return list(await asyncio.gather(*(self._once(client, text) for text in asked)))

    async def _once(self, client: httpx.AsyncClient, text: str) -> Mark:
        """The mark of one text; equal ones wait for the same answer."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self._count("failed", f"the prompt, completion or a column is not Unicode: {error}")
            return None
        body = self.body | {"messages": [{"role": "user", "content": text}]}
        everything = json.dumps([self.url, body], sort_keys=True)
        key = hashlib.sha256(everything.encode()).hexdigest()
        if key not in self.pending:
            self.pending[key] = asyncio.ensure_future(self._mark(client, key, body))
        return await self.pending[key]

    async def _mark(self, client: httpx.AsyncClient, key: str, body: dict[str, Any]) -> Mark:
        kept = self.replies.get(key)
        if kept is not None:
            self.counts["cached"] += 1
            return self._score(kept)
        async with self.asking:
            reply = await self._reply(client, body)
        if reply is None:
            return None
        mark = self._score(reply)
        if mark is None:
            self._count("unparsed", f"no line 'Score: N' at the end of {excerpt(reply[-200:])!r}")
        else:
            self.replies.put(key, reply)
        return mark

    async def _reply(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str | None:
        """Return the reply of the server, or None after all retries."""
        problem = ""
        try:
            for attempt in range(self.max_retries + 1):
                try:
                    return await self._try(client, body)
                except TryAgain as error:
                    problem = str(error)
                    backoff_s = min(LONGEST_WAIT_S, self.backoff_s * 2**attempt)
                    jittered_s = backoff_s * JITTER.uniform(0.5, 1.0)
                    wait_s = jittered_s if error.wait_s is None else error.wait_s
                await asyncio.sleep(wait_s * (attempt < self.max_retries))
            self.lost_in_a_row += 1
            raise GaveUp("failed", problem)
        except GaveUp as error:
            self._count(error.what, error.why)
            return None

    async def _try(self, client: httpx.AsyncClient, body: dict[str, Any]) -> str:
        """The reply to one request.

        Raises:
            TryAgain: it may work later.
            GaveUp: it will not.
            RequestRejected: it never worked, or TLS fails.
        """
        if self._spent():
            raise GaveUp("over_budget", "max_requests or max_total_tokens is spent")
        # Waiting for each of the others would be of no use.
        if self.lost_in_a_row >= self.max_concurrent_requests:
            raise GaveUp("failed", "the server is down")
        self.counts["calls"] += 1
        headers = _headers(self._key())
        limits: Any = {"timeout_s": self.timeout_s, "max_bytes": MAX_REPLY_BYTES}
        try:
            reply = await send(client, "POST", self.url, body=body, headers=headers, **limits)
        except TLSFailed as error:
            if not self.counts["answered"]:
                raise RequestRejected(f"judge: {self.url} cannot be reached: {error}") from error
            raise TryAgain(str(error)) from error
        except (ConnectionLost, MalformedReply) as error:
            raise TryAgain(str(error)) from error
        if not reply.is_success:
            self._refuse(reply)
            raise TryAgain(reply.describe(), _retry_after(reply.headers))
        self.lost_in_a_row = 0
        try:
            return self._content(reply, body)
        except MalformedReply as error:
            raise TryAgain(f"the reply is not a chat completion: {error}") from error

    def _refuse(self, reply: Reply) -> None:
        """End for a status that another try does not change."""
        if reply.is_server_error or reply.status in AGAIN:
            return
        if not self.counts["answered"]:  # a mistake in the recipe
            where = f"the environment variable {self.api_key_env}" if self.api_key_env else "none"
            hint = f" (the key is from api_key_env: {where})" if reply.status in NO_ACCESS else ""
            raise RequestRejected(
                f"judge: {self.url} rejected the first request: {reply.describe()}{hint}"
            )
        raise GaveUp("failed", reply.describe())

    def _content(self, reply: Reply, body: dict[str, Any]) -> str:
        """The text of a reply without keys, after counting its tokens.

        Raises:
            MalformedReply: it is not a chat completion.
        """
        asked = body["messages"][0]["content"]
        most_written = self._max_tokens() or len(reply.content)
        written = min(len(reply.content) // CHARS_PER_TOKEN, most_written)
        estimate = len(asked) // CHARS_PER_TOKEN + written + 1
        # A token has at least a byte. Some servers do not count thoughts against max_tokens.
        most = len(asked.encode()) + THOUGHTS * most_written + TEMPLATE_TOKENS
        used: object = None
        try:
            found = reply.json()
            if isinstance(found, dict) and isinstance(found.get("usage"), dict):
                used = found["usage"].get("total_tokens")
            choices, expected = read_field(found, "choices", list), self.body.get("n", 1)
            if len(choices) != expected:
                raise MalformedReply(f"{len(choices)} choices; expected {expected}")
            text: str = read_field(read_field(choices[0], "message", dict), "content", str)
        finally:  # a malformed reply costs tokens, too
            counts = type(used) is int and 0 < used <= most
            self.counts["tokens"] += used if counts else estimate  # type: ignore[operator]
        self.counts["answered"] += 1
        return mask_text(text)

    def _max_tokens(self) -> int:
        limits = (self.body.get(name) for name in ("max_tokens", "max_completion_tokens"))
        return max((each for each in limits if isinstance(each, int)), default=0)

    def _spent(self) -> bool:
        limits = {"calls": self.max_requests, "tokens": self.max_total_tokens}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        place = (self.rank, self.num_processes)
        return any(self.counts[name] >= share(limit, *place) for name, limit in given.items())

    def _score(self, reply: str) -> Mark:
        """The number of the last line, or None if it holds no score within the scale."""
        last = (reply.strip().splitlines() or [""])[-1].strip()
        found = SCORE.match(last) if len(last) <= MAX_SCORE_LINE else None
        if found is None or (found[2] is not None and float(found[2]) != self.max_score):
            return None
        mark = float(found[1])
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
        """Count an abstention; log a warning each time the count has doubled."""
        self.counts[what] += 1
        told = self.counts[what] if what == "over_budget" else 1  # that one once
        if self.counts[what].bit_count() == told == 1:
            number = self.counts[what]
            log.warning("judge: %d %s so far, left out: %s", number, what, excerpt(why, 400))


def share(limit: int, rank: int, num_processes: int) -> int:
    """Return the share of one rank in a budget; the shares add up to the budget.

    Example:
        >>> [share(5, rank, 3) for rank in range(3)]
        [2, 2, 1]
    """
    return (limit + num_processes - 1 - rank) // num_processes


def is_variable_name(name: str) -> bool:
    """Return True for the name of a variable; a key given in its place must not pass as a name.

    Keys have lower case, or are long, or mix letters with digits.

    Example:
        >>> is_variable_name("OPENAI_API_KEY"), is_variable_name("AKIAIOSFODNN7EXAMPLE")
        (True, False)
    """
    if len(name) > MAX_NAME or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        return False
    return all(len(word) <= (16 if word.isalpha() else 8) for word in name.split("_"))


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class Replies:
    """Replies kept in a folder, a file for each; without a folder nothing is kept.

    Args:
        folder: where.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.failed = False  # a reply could not be kept

    def prepare(self) -> None:
        """Make the folder.

        Raises:
            ValueError: it cannot be made.
        """
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"judge: cache_dir {str(self.folder)!r}: {error.strerror}") from error

    def get(self, key: str) -> str | None:
        """The reply under a key, if there is one."""
        if self.folder is None:
            return None
        try:
            kept = parse_json((self.folder / key[:2] / f"{key}.json").read_bytes())
            return str(read_field(kept, "reply", str))
        except (OSError, MalformedReply):  # none yet, or half a file
            return None

    def put(self, key: str, reply: str) -> None:
        """Keep a reply; a file gets its name when it is complete."""
        if self.folder is None:
            return
        path = self.folder / key[:2] / f"{key}.json"
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps({"reply": reply}))
            unfinished.replace(path)
        except OSError as error:
            if not self.failed:
                log.warning("judge: cache_dir %s cannot be written: %s", self.folder, error)
            self.failed = True


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
    parts = urlsplit(base_url)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"judge: base_url {excerpt(base_url)!r:.100} is no address such as https://api.openai.com/v1",
    )
    require(
        "@" not in parts.netloc and not parts.query,
        "judge: base_url must not hold a name, a key or a query; give the key by api_key_env",
    )


def _retry_after(headers: httpx.Headers) -> float | None:
    """Seconds to wait, as the server says by a number or a date; None where it says nothing."""
    said = headers.get("retry-after", "")
    try:
        wait_s = float(said)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(said).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return max(0.0, min(wait_s, LONGEST_WAIT_S))
