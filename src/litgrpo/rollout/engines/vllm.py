"""Rollouts from vLLM: servers over HTTP, or vLLM in the trainer's own process.

litgrpo applies limits, turns and random numbers; vLLM holds weights, caches and batches.

Source: vLLM 0.32, `vllm/entrypoints/rl/online` and `vllm/entrypoints/scale_out`.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import queue
import shutil
import socket
import tempfile
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from litgrpo.arguments import above, at_least, require
from litgrpo.distributed.collectives import all_gather_object, broadcast_object, is_distributed
from litgrpo.distributed.messages import log, rank
from litgrpo.models.adapters import merge_adapter
from litgrpo.models.export import export
from litgrpo.models.policy import Policy
from litgrpo.models.sharded_weights import gather_weights
from litgrpo.rollout.engines.base import RolloutEngine, RolloutRequest
from litgrpo.types import Rollout

LOOK_S = 0.02  # between looks for answers while an environment is waited for, too


@dataclass(frozen=True)
class SampleRequest:
    """What a row asks for.

    Args:
        row: its number.
        prompt: of the row, which the rows of a group share a server by.
        ids: everything that it has read and said so far.
        params: `SamplingParams` of vLLM as plain values.
    """

    row: int
    prompt: int
    ids: list[int]
    params: dict[str, Any]


@dataclass(frozen=True)
class SampleResult:
    """What was sampled for a row: token ids and their log-probabilities, one or more."""

    ids: list[int]
    logprobs: list[float]


class SampleChannel(ABC):
    """Asks go in, answers come out in any order."""

    @abstractmethod
    def put(self, asks: Sequence[SampleRequest]) -> None:
        """SampleRequest for these rows."""

    @abstractmethod
    def take(self, timeout_s: float | None) -> list[tuple[int, SampleResult]]:
        """Answers that are there, each with its row; waits for the first, None: however long."""


class ServedEngine(RolloutEngine):
    """Asks another sampler, row by row; turns keep what was said as the next prompt's beginning."""

    # A row's random numbers go to the sampler instead of a seed made of them.
    takes_uniforms = False

    @property
    def exact_logprobs(self) -> bool:
        """Where it draws with our numbers; its log-probabilities then count as the policy's."""
        return self.takes_uniforms

    @property
    def supports_episodes(self) -> bool:
        """The prefix of a row stays in the sampler's cache between its turns."""
        return True

    @abstractmethod
    def channel(self, requests: RolloutRequest) -> AbstractContextManager[SampleChannel]:
        """Where the rows of a rollout ask."""

    @torch.no_grad()
    def generate(self, requests: RolloutRequest) -> Rollout:
        """Sample completions; see `RolloutEngine.generate`.

        Raises:
            ValueError: the sampling, or the kind of model, is not one that others can compute.
        """
        check_request(requests, self.takes_uniforms)
        rows = ServedRows(requests, self.takes_uniforms)
        with self.channel(requests) as channel:
            channel.put([rows.ask(row) for row in range(requests.num_rows)])
            asked = set(range(requests.num_rows))
            while asked or rows.waiting:
                answers = channel.take(LOOK_S if rows.waiting else None) if asked else []
                for row, answer in answers:
                    rows.spoke(row, answer)
                again = rows.heard(wait=not asked)
                asked = asked.difference([row for row, _ in answers]).union(again)
                channel.put([rows.ask(row) for row in again])
        return rows.rollout()


def check_request(requests: RolloutRequest, takes_uniforms: bool) -> None:
    """Refuse what an engine of others cannot sample so that it can be learned from.

    Raises:
        ValueError: filters, whose remaining tokens are not told; a temperature beside 1 with our
            numbers; an encoder-decoder.
    """
    sampling = requests.sampling
    require(
        not sampling.truncated,
        f"sampling has top_k {sampling.top_k}, top_p {sampling.top_p}, min_p {sampling.min_p}, but "
        "the server does not tell which tokens they left. Take them out (0, 1.0, 0.0), or sample "
        "with LocalEngine.",
    )
    require(
        not takes_uniforms or sampling.temperature in (0, 1),
        f"sampling.temperature is {sampling.temperature}, but engine.send_uniforms needs 1: the "
        "server's log-probabilities are those before temperature then. Set it to false.",
    )
    require(
        not requests.policy.bare_model.config.is_encoder_decoder,
        "An encoder-decoder is not sampled by a server. Give engine: {class_path: LocalEngine}.",
    )


@dataclass
class ServedRow:
    """A row so far.

    Args:
        prompt: its token ids.
        ids: of the completion.
        logprobs: of the same; 0 where it heard.
        turns: of the same; -1 where it heard.
        turn: number of the turn that it is in.
        cut: a limit ended its last turn.
    """

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    turn: int = 0
    cut: bool = False

    def add(self, ids: Sequence[int], logprobs: Sequence[float], turn: int) -> None:
        """Tokens of a turn, or heard ones: -1."""
        self.ids += ids
        self.logprobs += logprobs
        self.turns += [turn] * len(ids)


class NoStops:
    """No text ends a row; see `StopStrings`."""

    def length(self, ids: list[int]) -> int:
        """All of them."""
        return len(ids)

    def completed(self, ids: list[int]) -> bool:
        """Nothing is."""
        return False


class ServedRows:
    """The rows of a rollout while they are sampled.

    Args:
        requests: of the rollout.
        takes_uniforms: the sampler draws with our numbers.
    """

    def __init__(self, requests: RolloutRequest, takes_uniforms: bool) -> None:
        self.requests, self.takes_uniforms = requests, takes_uniforms
        prompts, group = requests.prompts, requests.group_size
        pairs = zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)
        read = [ids[mask].tolist() for ids, mask in pairs]
        self.rows = [ServedRow(ids) for ids in read for _ in range(group)]
        self.uniforms: list[list[float]] = requests.uniforms.tolist()
        self.waiting: set[int] = set()  # for what they hear

    @property
    def turn_tokens(self) -> int:
        """Of a turn at most."""
        listener = self.requests.listener
        return len(self.uniforms[0]) if listener is None else listener.max_turn_tokens

    def ask(self, row: int) -> SampleRequest:
        """What a row asks for next; its seed is a function of its random numbers."""
        here, requests, numbers = self.rows[row], self.requests, self.uniforms[row]
        done = len(here.ids)
        params: dict[str, Any] = {
            "max_tokens": min(self.turn_tokens, len(numbers) - done),
            "temperature": requests.sampling.temperature,
            "stop_token_ids": list(requests.end_ids),
            "ignore_eos": True,  # the model's own ends are among these
            "seed": int(numbers[done] * 2**31),
            "logprobs": 0,
            # A server would take what is not given from the model's generation_config.json.
            **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        }
        if self.takes_uniforms and not requests.sampling.greedy:
            params["extra_args"] = {"uniforms": numbers[done : done + params["max_tokens"]]}
        if requests.stops is not None:
            more = {"stop": list(requests.stops.stops), "include_stop_str_in_output": True}
            params |= {**more, "skip_special_tokens": False}
        return SampleRequest(row, row // requests.group_size, here.prompt + here.ids, params)

    def spoke(self, row: int, answer: SampleResult) -> None:
        """A turn of a row has come; who listens hears it."""
        here, stops = self.rows[row], self.requests.stops or NoStops()
        said = stops.length(answer.ids)
        ids = answer.ids[:said]
        here.add(ids, answer.logprobs[:said], here.turn)
        here.cut = ids[-1] not in self.requests.end_ids and not stops.completed(ids)
        if self.requests.listener is not None:
            self.requests.listener.on_turn_end(row, ids, truncated=here.cut)
            self.waiting.add(row)

    def heard(self, *, wait: bool) -> list[int]:
        """Rows that have heard and go on."""
        listener = self.requests.listener
        if listener is None or not self.waiting:
            return []
        answers = listener.take_observations(wait=wait)
        self.waiting -= answers.keys()
        told = {row: ids for row, ids in answers.items() if ids is not None}
        for row, ids in told.items():
            self.rows[row].add(ids, [0.0] * len(ids), -1)
            self.rows[row].turn += 1
        return list(told)

    def rollout(self) -> Rollout:
        """The finished rollout, where the prompts are."""
        requests, longest = self.requests, max(len(each.ids) for each in self.rows)
        device = requests.prompts.prompt_ids.device

        def filled(name: str, empty: float, dtype: torch.dtype) -> Tensor:
            """[N, C] with padding on the right."""
            lists = [vars(each)[name] for each in self.rows]
            whole = [values + [empty] * (longest - len(values)) for values in lists]
            return torch.tensor(whole, dtype=dtype, device=device)

        turns = filled("turns", -1, torch.int16)
        lengths = torch.tensor([len(each.ids) for each in self.rows], device=device)
        mask = torch.arange(longest, device=device) < lengths[:, None]
        return Rollout(
            prompts=requests.prompts,
            group_size=requests.group_size,
            completion_ids=filled("ids", requests.policy.pad_id, torch.long),
            completion_mask=mask,
            sampler_logprobs=filled("logprobs", 0.0, torch.float32),
            truncated=torch.tensor([each.cut for each in self.rows], device=device),
            loss_mask=turns >= 0,
            turns=None if requests.listener is None else turns,
        )


GENERATE = "/inference/v1/generate"
START = (
    "Start it with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out, as "
    "docs/scale.md shows."
)


class ServerFailure(RuntimeError):
    """A server does not do what a rollout needs; names it, in one line."""

    exit_code = 2


class ServersUnavailable(ServerFailure):
    """No server answers; the same command may go on when one is there again."""

    exit_code = 75  # EX_TEMPFAIL: start again later, nothing is lost


class ServerUnavailable(ConnectionError):
    """A server cannot be reached, or is not itself at the moment; it may come back."""


class StaleWeights(Exception):
    """A server answered with other weights than those that it was given.

    Args:
        found: the version that it named.
    """

    def __init__(self, found: object) -> None:
        super().__init__(found)
        self.found = found


def normalize_url(url: str, allow_public: bool) -> str:
    """The address without a slash at its end; names are looked up where they are used first.

    Raises:
        ValueError: it is none, or public.
    """
    parts = urlsplit(url)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"engine.urls has {url!r:.100}, which is no address such as http://127.0.0.1:8000",
    )
    try:
        public = not allow_public and ipaddress.ip_address(str(parts.hostname)).is_global
    except ValueError:  # a name
        public = False
    reject_public_url(url, public)
    return url.rstrip("/")


def reject_public_url(url: str, public: bool) -> None:
    """Refuse a server that anybody can reach.

    Raises:
        ValueError: it is public.
    """
    require(
        not public,
        f"engine.urls has {url}, a public address. The routes that take weights let anybody who "
        "reaches them run code: keep servers in a private network, or behind a tunnel, or set "
        "engine.allow_public: true.",
    )


class Server:
    """A vLLM server.

    Args:
        url: its address.
        timeout_s: seconds that an answer may take.
        allow_public: its address may be a public one.
    """

    def __init__(self, url: str, timeout_s: float = 600.0, allow_public: bool = False) -> None:
        self.url, self.timeout_s, self.allow_public = url, timeout_s, allow_public

    @cached_property
    def client(self) -> httpx.Client:
        """ServerChannel that stay open; no proxy stands between."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        timeout = httpx.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        client = httpx.Client(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)
        weakref.finalize(self, client.close)
        return client

    @cached_property
    def is_private(self) -> bool:
        """Whether its name stands for no public address.

        Raises:
            ServerUnavailable: nobody knows the name.
        """
        parts = urlsplit(self.url)
        try:
            found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ServerUnavailable(f"{self.url} ({error})") from error
        return not any(ipaddress.ip_address(each[4][0]).is_global for each in found)

    def call(self, method: str, path: str, body: Any = None, **params: str) -> Any:
        """What a route answers.

        Raises:
            ServerUnavailable: it cannot be reached, breaks off, or says that the fault is its own.
            ServerFailure: it refuses.
        """
        reject_public_url(self.url, not (self.allow_public or self.is_private))
        try:
            response = self.client.request(method, path, json=body, params=params)
            if response.is_server_error:
                raise ServerUnavailable(
                    f"{self.url}{path} (status {response.status_code}: {_said(response)})"
                )
            if response.is_client_error:
                hint = f" {START}" * (response.status_code in (404, 405))
                raise ServerFailure(
                    f"{self.url}{path} refuses (status {response.status_code}): "
                    f"{_said(response)}.{hint}"
                )
            return response.json() if response.content else {}
        except httpx.TransportError as error:  # time-outs among them
            raise ServerUnavailable(f"{self.url} ({type(error).__name__}: {error})") from error
        except ValueError as error:
            raise ServerFailure(f"{self.url}{path} answers with no JSON: {error}") from error

    def post(self, path: str, body: Any = None, **params: str) -> Any:
        """What a route answers to this body; see `call`."""
        return self.call("POST", path, body, **params)

    @property
    def version(self) -> str:
        """Of its weights."""
        return str(self.call("GET", "/weight_info")["weight_version"])

    def check_logprobs(self, mode: str) -> None:
        """Refuse log-probabilities of another distribution than the one that was drawn from.

        Args:
            mode: that the server has to be started with.

        Raises:
            ServerFailure: it was started with another.
        """
        config = self.call("GET", "/server_info", config_format="json")["vllm_config"]
        found = config["model_config"]["logprobs_mode"]
        if found != mode:
            raise ServerFailure(f"{self.url} has --logprobs-mode {found}: start it with {mode}.")

    @contextmanager
    def exchanging(self, version: str) -> Iterator[None]:
        """Give it new weights within: it finishes what it samples, and forgets what it cached."""
        self.post("/pause", mode="wait")
        try:
            yield
            self.post("/reset_prefix_cache")
            self.post("/update_weight_version", {"new_version": version})
        finally:
            self.post("/resume")

    def complete(self, ask: SampleRequest, version: str) -> SampleResult:
        """What it samples for a row.

        Args:
            ask: of the row.
            version: of the weights that have to sample.

        Raises:
            StaleWeights: other weights sampled.
            ServerUnavailable: it broke off.
            ServerFailure: the answer is not one to this row.
        """
        body = {"token_ids": ask.ids, "sampling_params": ask.params}
        found = self.post(GENERATE, body)
        choice = found["choices"][0]
        ids, spans = choice["token_ids"] or [], choice["weight_versions"] or []
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServerUnavailable(f"{self.url} (it ended a row by {choice['finish_reason']!r})")
        versions = {span["version"] for span in spans} or {None}
        if versions != {version}:
            raise StaleWeights(" and ".join(map(str, sorted(versions, key=str))))
        entries = choice["logprobs"]["content"]
        same = found["usage"]["prompt_tokens"] == len(ask.ids)
        if not (same and ids and [each["token_id"] for each in entries] == ids):
            raise ServerFailure(f"{self.url} answers another prompt, or without log-probabilities.")
        if choice["finish_reason"] == "length" and len(ids) != ask.params["max_tokens"]:
            raise ServerFailure(
                f"{self.url} ends a row after {len(ask.ids) + len(ids)} tokens: start it with "
                f"--max-model-len {len(ask.ids) + ask.params['max_tokens']} or more."
            )
        return SampleResult(ids, [each["logprob"] for each in entries])


def _said(response: httpx.Response) -> str:
    """The reason in a refusal, short."""
    return " ".join(response.text.split())[:200]


Dtype = Literal["float32", "bfloat16", "float16"]


class WeightSender(ABC):
    """Holds the weights that servers have to have, until there are newer ones.

    `place`: what the senders of other processes need to know of them.
    """

    place: Any = None

    @abstractmethod
    def prepare(self, policy: Policy, version: str) -> None:
        """Put the weights together; every process takes part, and the first keeps them."""

    @abstractmethod
    def send(self, server: Server) -> None:
        """Let a server that does not sample take them.

        Raises:
            ServerUnavailable: it cannot now.
        """


class WeightTransfer(ABC):
    """A way for weights, as a recipe names it."""

    @abstractmethod
    def sender(self) -> WeightSender:
        """What sends them, for one run."""


@dataclass(frozen=True)
class FolderTransfer(WeightTransfer):
    """Transfer weights through a folder that trainer and servers see under the same path.

    Args:
        path: folder for the versions; each has a subfolder that is kept until the next version is
            loaded. None: a temporary folder, for servers on the same machine.
        dtype: of the weights in the files; None: as they are trained. Servers convert to their own.
    """

    path: str | None = None
    dtype: Dtype | None = None

    def sender(self) -> WeightSender:
        """Writes and names folders."""
        return FolderSender(self)


class FolderSender(WeightSender):
    """Writes a folder in Hugging Face's format, which servers read in place of their model's.

    Args:
        settings: where, and as what.
    """

    def __init__(self, settings: FolderTransfer) -> None:
        self.settings, self.place = settings, ""
        self.written: list[Path] = []

    @cached_property
    def root(self) -> Path:
        """Where versions go; a temporary folder goes with this object."""
        if self.settings.path is None:
            temporary = Path(tempfile.mkdtemp(prefix="litgrpo-weights-"))
            temporary.chmod(0o755)
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            return temporary
        Path(self.settings.path).mkdir(parents=True, exist_ok=True)
        return Path(self.settings.path).resolve()

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`.

        Divided weights are written by all processes, each its part; no process has them whole.

        Raises:
            ValueError: a process that should write its part does not see the folder.
        """
        if is_sharded(policy):
            folder = self._seen_by_all(version)
            export(policy, folder, self.settings.dtype)
        elif rank() != 0:
            return
        else:
            folder = self.root / version
            export(policy, folder, self.settings.dtype)
        for before in self.written:
            shutil.rmtree(before, ignore_errors=True)
        self.written, self.place = [folder] * (rank() == 0), str(folder)

    def _seen_by_all(self, version: str) -> Path:
        """The folder of a version, which the first process makes."""
        mine = None if rank() else self.root / version
        if mine is not None:
            mine.mkdir(parents=True)
        folder: Any = broadcast_object(mine)
        require(
            all(all_gather_object(folder.is_dir())),
            f"engine.weight_transfer writes {folder}, which not all processes see: give "
            f"engine.weight_transfer.path"
            " a folder that all machines share.",
        )
        return Path(folder)

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        kwargs = {"weights_path": self.place}
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})


def is_sharded(policy: Policy) -> bool:
    """Whether processes have parts of the policy, or of the one that it is a copy of.

    Its units tell, and not its weights: these may be gathered at the moment.
    """
    return any(isinstance(part, FSDPModule) for part in policy.modules())


def gather_to_host(policy: Policy) -> dict[str, Tensor] | None:
    """{name: whole tensor} where processes hold shards, on the host of the first; else None.

    The others have one whole tensor at a time. Adapters are merged.
    """
    if not is_sharded(policy):
        return None
    first = rank() == 0
    return {n: each.detach().cpu() for n, each in gather_weights(policy.model) if first}


@dataclass(frozen=True)
class NcclTransfer(WeightTransfer):
    """Send weights from GPU to GPU with vLLM's own transfer classes, over NCCL.

    Needs vLLM in the trainer's environment, and servers that were started with
    `--weight-transfer-config '{"backend": "nccl"}'`. Built against vLLM 0.32, whose
    classes do the transfer; NCCL was not run.

    Args:
        master_address: address of this machine, as servers see it; None: its host name.
    """

    master_address: str | None = None

    def sender(self) -> WeightSender:
        """Sends by NCCL."""
        return NcclSender(self)


class NcclSender(WeightSender):
    """One transfer group for each server, in which the trainer's first process is rank 0.

    Args:
        settings: who is reached how.
    """

    def __init__(self, settings: NcclTransfer) -> None:
        require(
            torch.cuda.is_available(),
            "engine.weight_transfer is NcclTransfer, which sends by NCCL from a GPU, but there "
            "is none. Take "
            "litgrpo.rollout.engines.vllm.FolderTransfer.",
        )
        self.settings, self.trainers = settings, dict[str, Any]()
        self.state: dict[str, Tensor] = {}

    def prepare(self, policy: Policy, version: str) -> None:
        """See `WeightSender.prepare`."""
        state = gather_to_host(policy)
        if state is None and rank() == 0:
            model = merge_adapter(policy.model) if policy.has_adapter else policy.model
            state = {name: each.detach().cpu() for name, each in model.state_dict().items()}
        self.state = drop_tied_head(state or {}, policy)

    def send(self, server: Server) -> None:
        """See `WeightSender.send`."""
        if rank() != 0:
            raise ServerUnavailable(f"{server.url} (it waits for the weights of the first process)")
        # One that began anew is without its group.
        if server.url not in self.trainers or server.version == "default":
            self.trainers[server.url] = self._joined(server)
        self.trainers[server.url].source.state = self.state
        self.trainers[server.url].send_weights()

    def _joined(self, server: Server) -> Any:
        """The sender to a server, by vLLM, which holds no weights yet."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        workers = server.call("GET", "/get_world_size")["world_size"]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = self.settings.master_address or socket.gethostbyname(socket.gethostname())
        info = NCCLTrainerInitInfo(address, port, workers + 1, rank=0)
        client = HTTPVLLMWeightSyncClient(server.url, server.timeout_s)
        return NCCLTrainerWeightTransferEngine.trainer_init(
            info, client=client, source=make_weight_source(self.state)
        )


def make_weight_source(state: dict[str, Tensor]) -> Any:
    """For vLLM a view of {name: tensor on the host}: described first, then sent one by one."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class OnHost(WeightSource):
        """`state` may be replaced between two transfers."""

        def __init__(self) -> None:
            self.state = state

        def metadata(self) -> list[Any]:
            """Names, types and shapes."""
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.state.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            """Each on the device that sends."""
            return ((name, tensor.cuda()) for name, tensor in self.state.items())

    return OnHost()


def drop_tied_head(state: dict[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """Without the head where it is the embedding, which a server ties itself."""
    tied = policy.bare_model.config.tie_word_embeddings
    return {name: each for name, each in state.items() if not (tied and name == "lm_head.weight")}


PAUSE_S = 0.5  # between two attempts where all servers are away
# {send_uniforms: vLLM's `--logprobs-mode`}; a server that draws with our numbers leaves one token.
MODES = {False: "processed_logprobs", True: "raw_logprobs"}
AWAY_S = 5.0  # for which a server that is away is not asked while others are there


@dataclass(frozen=True)
class ServerEngine(ServedEngine):
    """Samples with vLLM servers, which receive the policy's weights before each rollout.

    Every answer names the version of the weights that sampled it, and answers of another version
    are rejected. A restarted server gets the weights again, and its rows are requested again.
    Servers need VLLM_SERVER_DEV_MODE=1 and --enable-scale-out; see docs/scale.md.

    Args:
        urls: addresses of the servers, in a private network; prompts are distributed over them.
        weight_transfer: how servers receive the weights.
        send_uniforms: send each row's random numbers to servers that sample with them
            (`vllm_uniforms`): tokens are then those of `LocalEngine` up to rounding, and
            log-probabilities count as the policy's own, which holds in float32. By default each
            row gets a seed derived from its random numbers.
        timeout_s: seconds that an answer or a weight update may take.
        wait_s: if no server answers, retry for this many seconds.
        retries: how often a server with stale weights gets them again, per row.
        max_concurrent_requests: maximal rows requested at the same time by this process; servers
            queue them.
        allow_public: allow public addresses. Anyone who reaches such a server can run code there.
    """

    urls: list[str]
    weight_transfer: WeightTransfer = FolderTransfer()
    send_uniforms: bool = False
    timeout_s: float = 600.0
    wait_s: float = 300.0
    retries: int = 2
    max_concurrent_requests: int = 256
    allow_public: bool = False

    def __post_init__(self) -> None:
        """Check addresses and ranges."""
        require(bool(self.urls), "engine.urls is empty; give the address of a vLLM server.")
        for url in self.urls:
            normalize_url(url, self.allow_public)
        above("engine.timeout_s", self.timeout_s, 0)
        at_least("engine.wait_s", self.wait_s, 0)
        at_least("engine.retries", self.retries, 0)
        at_least("engine.max_concurrent_requests", self.max_concurrent_requests, 1)

    @property
    def samples_elsewhere(self) -> bool:
        """Servers keep the weights of the last `sync_weights`."""
        return True

    @property
    def takes_uniforms(self) -> bool:  # type: ignore[override]
        """As `send_uniforms`."""
        return self.send_uniforms

    @cached_property
    def fleet(self) -> ServerPool:
        """The servers."""
        urls = [normalize_url(url, self.allow_public) for url in self.urls]
        servers = [Server(url, self.timeout_s, self.allow_public) for url in urls]
        mode = MODES[self.send_uniforms]
        return ServerPool(servers, self.weight_transfer.sender(), mode, self.wait_s, self.retries)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Publish the weights; see `RolloutEngine.sync_weights`.

        Raises:
            ServerFailure: no server takes them.
        """
        self.fleet.publish(policy, version)

    @contextmanager
    def channel(self, requests: RolloutRequest) -> Iterator[SampleChannel]:
        """Open one connection per row, at most `max_concurrent_requests`."""
        with ServerChannel(
            self.fleet, min(self.max_concurrent_requests, requests.num_rows)
        ) as connections:
            yield connections


class ServerChannel(SampleChannel):
    """Asks a fleet from threads.

    Args:
        fleet: answers.
        number: threads at most.
    """

    def __init__(self, fleet: ServerPool, number: int) -> None:
        self.fleet, self.stop = fleet, threading.Event()
        self.threads = ThreadPoolExecutor(number, thread_name_prefix="litgrpo-asks")
        self.done: queue.SimpleQueue[tuple[int, Future[SampleResult]]] = queue.SimpleQueue()

    def __enter__(self) -> ServerChannel:
        """Open."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody waits for what was asked and is not needed any more."""
        self.stop.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def put(self, asks: Sequence[SampleRequest]) -> None:
        """See `SampleChannel.put`."""
        for ask in asks:
            future = self.threads.submit(self.fleet.answer, ask, self.stop)
            future.add_done_callback(lambda done, row=ask.row: self.done.put((row, done)))  # type: ignore[misc]

    def take(self, timeout_s: float | None) -> list[tuple[int, SampleResult]]:
        """See `SampleChannel.take`."""
        found = []
        try:
            found.append(self.done.get(timeout=timeout_s))
            while True:
                found.append(self.done.get_nowait())
        except queue.Empty:
            return [(row, future.result()) for row, future in found]


class ServerPool:
    """Servers of equal weights.

    Args:
        servers: one or more.
        sender: has the weights.
        mode: of their log-probabilities.
        wait_s: for one of them to come back.
        retries: publishes to a server that has other weights, for one row.
    """

    def __init__(
        self, servers: list[Server], sender: WeightSender, mode: str, wait_s: float, retries: int
    ) -> None:
        self.servers, self.sender, self.mode = servers, sender, mode
        self.unchecked = {server.url for server in servers}
        self.wait_s, self.retries = wait_s, retries
        self.version = ""
        self.away: dict[str, float] = {}  # until when nobody asks
        self.locks = {server.url: threading.Lock() for server in servers}

    def publish(self, policy: Policy, number: int) -> None:
        """Give all servers the policy's weights; every process takes part.

        A server that is away gets them when it answers again.

        Args:
            policy: has them.
            number: of finished iterations.

        Raises:
            ServerFailure: no server takes them.
        """
        # No other publish has this name, in this run or another one.
        version = broadcast_object(f"{number}-{uuid.uuid4().hex[:12]}")
        failure: ServerFailure | None = None
        self.sender.prepare(policy, version)
        self.version = version
        if rank() == 0:
            try:
                self._send_to_all()
            except ServerFailure as error:
                failure = error
        self.sender.place, failure = broadcast_object((self.sender.place, failure))
        if failure is not None:
            raise failure

    def _send_to_all(self) -> None:
        waits = RetryTimer(self.wait_s, threading.Event())
        with ThreadPoolExecutor(len(self.servers)) as threads:
            while not any(threads.map(self._reached, self.servers)):
                waits.again(self._told_away())

    def _reached(self, server: Server, said: str = "") -> bool:
        """Whether a server has the weights; says why they are given, where they are."""
        try:
            self.give(server, said)
        except ServerUnavailable as error:
            self._note_away(server, error)
            return False
        return True

    def give(self, server: Server, said: str = "") -> None:
        """Let a server take the weights, if it has others.

        Args:
            server: one of these.
            said: to the user, if it does.

        Raises:
            ServerUnavailable: it cannot now.
        """
        with self.locks[server.url]:
            for url in self.unchecked & {server.url}:
                server.check_logprobs(self.mode)
                self.unchecked.discard(url)
            if server.version != self.version:
                with server.exchanging(self.version):
                    self.sender.send(server)
                log.log(logging.WARNING if said else logging.DEBUG, "%s%s", server.url, said)
            self.away.pop(server.url, None)

    def answer(self, ask: SampleRequest, stop: threading.Event) -> SampleResult:
        """The answer to a row, from whichever server can give it.

        Args:
            ask: of the row.
            stop: nobody needs the answer any more.

        Raises:
            ServerFailure: no server could for `wait_s`, or one keeps other weights.
        """
        waits, healed = RetryTimer(self.wait_s, stop), 0
        while True:
            server = self._choice(ask.prompt)
            try:
                return server.complete(ask, self.version)
            except StaleWeights as stale:
                healed += 1
                self._check_heals(server, stale, healed)
                self._reached(server, f" had weights of version {stale.found}; published again")
            except ServerUnavailable as error:
                self._note_away(server, error)
                if all(map(self._is_away, self.servers)):
                    waits.again(self._told_away())

    def _check_heals(self, server: Server, stale: StaleWeights, healed: int) -> None:
        if healed > self.retries:
            raise ServerFailure(
                f"{server.url} answers with weights of version {stale.found}, but {self.version} "
                f"were published to it {healed} times: nothing was learned from them. Restart it."
            )

    def _choice(self, prompt: int) -> Server:
        """The server of a prompt, or the next one that is not known to be away."""
        first = prompt % len(self.servers)
        ring = self.servers[first:] + self.servers[:first]
        return min(ring, key=self._is_away)

    def _is_away(self, server: Server) -> bool:
        return self.away.get(server.url, 0.0) > time.monotonic()

    def _note_away(self, server: Server, error: ServerUnavailable) -> None:
        if server.url not in self.away:
            log.warning("vLLM server is away: %s", error)
        self.away[server.url] = time.monotonic() + AWAY_S

    def _told_away(self) -> str:
        return ", ".join(self.away)


class RetryTimer:
    """How long servers were waited for.

    Args:
        limit_s: seconds at most, since the first time.
        stop: ends the waiting.
    """

    def __init__(self, limit_s: float, stop: threading.Event) -> None:
        self.limit_s, self.stop = limit_s, stop
        self.began = math.inf

    def again(self, who: str) -> None:
        """Wait a little.

        Raises:
            ServersUnavailable: it was too long.
        """
        now = time.monotonic()
        self.began = min(now, self.began)
        if now - self.began >= self.limit_s or self.stop.wait(PAUSE_S):
            raise ServersUnavailable(
                f"No vLLM server answers: {who} away for {now - self.began:.0f} s "
                f"(engine.wait_s {self.limit_s:g}). Start it again, then go on with --auto_resume "
                "true: nothing was learned from this rollout."
            )


@dataclass(frozen=True)
class ColocatedEngine(ServedEngine):
    """Samples with vLLM inside the trainer's process.

    Needs `pip install vllm` in the trainer's environment, and a single process. Prompt and
    completion together have at most `max_model_len` tokens.

    Args:
        gpu_memory_utilization: fraction of the device's memory for vLLM.
        max_model_len: maximal tokens of a row; None: the model's limit.
        enable_sleep_mode: release vLLM's memory during training; GPUs only.
        engine_args: further arguments of vLLM's `LLM`.
    """

    gpu_memory_utilization: float = 0.4
    max_model_len: int | None = None
    enable_sleep_mode: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(
            0 < self.gpu_memory_utilization < 1,
            f"engine.gpu_memory_utilization is {self.gpu_memory_utilization}; it must be "
            f"between 0 and 1.",
        )
        at_least("engine.max_model_len", self.max_model_len, 1)

    @cached_property
    def sender(self) -> FolderSender:
        """Writes the weights where vLLM reads them."""
        return FolderSender(FolderTransfer())

    @cached_property
    def llm(self) -> Any:
        """The sampler, started with the weights that were published first.

        Raises:
            ValueError: it is not installed, or several processes train.
        """
        require(
            not is_distributed(), "ColocatedEngine is for one process. Take a server for several."
        )
        # One process: it would start another for itself, which could not see the trainer's device.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            from vllm import LLM
        except ImportError as error:
            raise ValueError(
                f"ColocatedEngine needs vLLM in this environment ({error}): pip install vllm, or "
                "take litgrpo.rollout.engines.vllm.ServerEngine."
            ) from error
        given: dict[str, Any] = {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
        }
        given |= {
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": self.enable_sleep_mode,
        }
        return LLM(self.sender.place, **given | self.engine_args)

    def sync_weights(self, policy: Policy, version: int) -> None:
        """Let vLLM read the policy's weights; see `RolloutEngine.sync_weights`."""
        self.sender.prepare(policy, str(version))
        if "llm" not in vars(self):
            return  # it starts with them
        with self.awake() as llm:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": self.sender.place})
            llm.reset_prefix_cache()

    @contextmanager
    def awake(self) -> Iterator[Any]:
        """The sampler with its memory; without it afterwards."""
        llm = self.llm
        if self.enable_sleep_mode:
            llm.wake_up()
        try:
            yield llm
        finally:
            if self.enable_sleep_mode:
                llm.sleep(level=1)

    @contextmanager
    def channel(self, requests: RolloutRequest) -> Iterator[SampleChannel]:
        """See `ServedEngine.channel`."""
        with self.awake() as llm:
            yield ColocatedChannel(llm)


class ColocatedChannel(SampleChannel):
    """Samples what was asked since the last look, all at once.

    Args:
        llm: vLLM.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.asked: list[SampleRequest] = []

    def put(self, asks: Sequence[SampleRequest]) -> None:
        """See `SampleChannel.put`."""
        self.asked += asks

    def take(self, timeout_s: float | None) -> list[tuple[int, SampleResult]]:
        """See `SampleChannel.take`."""
        from vllm import SamplingParams

        asked, self.asked = self.asked, []
        prompts = [{"prompt_token_ids": ask.ids} for ask in asked]
        params = [SamplingParams(**ask.params) for ask in asked]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            (ask.row, to_sample_result(output)) for ask, output in zip(asked, outputs, strict=True)
        ]


def to_sample_result(output: Any) -> SampleResult:
    """What vLLM sampled for a row."""
    (choice,) = output.outputs
    ids = list(choice.token_ids)
    return SampleResult(
        ids, [found[token].logprob for token, found in zip(ids, choice.logprobs, strict=True)]
    )
