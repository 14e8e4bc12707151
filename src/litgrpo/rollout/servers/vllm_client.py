"""Client of a vLLM server.

Source: vLLM 0.32, `vllm/entrypoints/rl/online` and `vllm/entrypoints/scale_out`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, AliasPath, BaseModel, Field
from torch import Tensor

from litgrpo.arguments import find_page
from litgrpo.http import MIB
from litgrpo.rollout.servers.client import (
    MAX_LOGPROB,
    SampleRequest,
    SampleResult,
    ServerFailure,
    ServerUnavailable,
    StaleWeights,
    Weights,
    WeightsRejected,
)
from litgrpo.rollout.servers.http_client import (
    MAX_BYTES_PER_CANDIDATE,
    MAX_BYTES_PER_TOKEN,
    HttpServer,
    InternalError,
    NotFound,
)
from litgrpo.rollout.servers.vllm_head import has_head, write_head
from litgrpo.text.visible import excerpt

MIN_LOGPROB = -1e4  # vLLM reports -9999 instead of minus infinity
MAX_TOTAL = 1 + 2 * MAX_LOGPROB  # of the probabilities at a position; above 1 by rounding only
GENERATE, RPC = "/inference/v1/generate", "/collective_rpc"
COMPLETIONS, TOKENIZE = "/v1/completions", "/tokenize"


# --- replies ---


def _check_logprob(value: float) -> float:
    if not MIN_LOGPROB <= value <= MAX_LOGPROB:
        raise ValueError(
            f"expected a log-probability from {MIN_LOGPROB:g} to 0 (--logprobs-mode raw_logprobs "
            "or processed_logprobs)"
        )
    return value


class Logprob(BaseModel):
    """Log-probability of a token of a prompt."""

    logprob: Annotated[float, AfterValidator(_check_logprob)]


class TokenLogprob(Logprob):
    """Log-probability of a generated token."""

    token_id: int


class WeightSpan(BaseModel):
    """Version of the weights that sampled tokens from `start` on."""

    version: str | None
    start: int | None


class Generated(BaseModel):
    """Response of `GENERATE`; an aborted request may have no tokens."""

    choices: list[Any] = Field(min_length=1, max_length=1)
    finish_reason: str | None = Field(validation_alias=AliasPath("choices", 0, "finish_reason"))
    token_ids: list[int] | None = Field(None, validation_alias=AliasPath("choices", 0, "token_ids"))
    logprobs: list[TokenLogprob] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "logprobs", "content")
    )
    weight_versions: list[WeightSpan] | None = Field(
        None, validation_alias=AliasPath("choices", 0, "weight_versions")
    )
    prompt_tokens: int | None = Field(None, validation_alias=AliasPath("usage", "prompt_tokens"))


class ScoredPrompt(BaseModel):
    """Response of `COMPLETIONS`: {token id: its values} for each token of the prompt."""

    entries: list[dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Logprob] | None] = Field(
        validation_alias=AliasPath("choices", 0, "prompt_logprobs")
    )


class Tokens(BaseModel):
    """Response of `TOKENIZE`."""

    tokens: list[int]
    max_model_len: int


class WeightInfo(BaseModel):
    """Version of the server's weights."""

    weight_version: str


class Model(BaseModel):
    """The model of a server, or one of its adapters."""

    id: str


class Models(BaseModel):
    """Everything that a server can sample with."""

    data: list[Model]


class LogprobsMode(BaseModel):
    """What the server was started with."""

    mode: str = Field(validation_alias=AliasPath("vllm_config", "model_config", "logprobs_mode"))


class Device(BaseModel):
    """Where the server computes."""

    device: str = Field(validation_alias=AliasPath("vllm_config", "device_config", "device"))


class CacheReset(BaseModel):
    """Whether the prefix cache was reset."""

    success: bool


class WorldSize(BaseModel):
    """Number of the server's workers."""

    world_size: int


# --- requests ---


def sampling_params(request: SampleRequest) -> dict[str, Any]:
    """Return vLLM's `SamplingParams` of a request."""
    params: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stop_token_ids": list(request.end_ids),
        "ignore_eos": True,  # `end_ids` contains the model's end tokens
        "seed": request.seed,
        "logprobs": 0,
        # vLLM takes missing values from the model's generation_config.json, so set all of them.
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    if request.uniforms is not None:
        params["extra_args"] = {"uniforms": request.uniforms}
    if request.stops:
        params["stop"] = list(request.stops)
        params["include_stop_str_in_output"] = True
        params["skip_special_tokens"] = False  # stop strings may be special tokens
    return params


class VllmServer(HttpServer):
    """Client of a vLLM server; see `ServerClient`.

    Args:
        url: address of the server.
        timeout_s: seconds that a request may take, to the last byte of the response.
        allow_public: allow a public address.
        logprobs_mode: `--logprobs-mode` that it must run with to sample.

    Example::

        server = VllmServer("http://10.0.0.2:8000")
        server.version  # of its weights, such as "12-13-5f0c9a1be2d4"
    """

    missing_route = (
        "Start the server with VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out; "
        f"see {find_page('docs/explanation/scale.md')}."
    )

    def __init__(
        self,
        url: str,
        timeout_s: float = 600.0,
        allow_public: bool = False,
        logprobs_mode: str = "processed_logprobs",
    ) -> None:
        super().__init__(url, timeout_s, allow_public)
        self.logprobs_mode = logprobs_mode
        self.nccl: tuple[Any, Any] | None = None  # vLLM's trainer of a group, and its source

    def may_miss(self, path: str) -> bool:
        """Return True if the route needs flags of the server."""
        return path not in (COMPLETIONS, TOKENIZE)

    @property
    def version(self) -> str:
        """Version of its weights."""
        return self.read(WeightInfo, "GET", "/weight_info").weight_version

    def list_models(self) -> list[str]:
        """Return the names of the model and of its adapters."""
        return [model.id for model in self.read(Models, "GET", "/v1/models").data]

    @cached_property
    def copies_head(self) -> bool:
        """True if it samples with a copy of the output head; see `vllm_head`."""
        config = {"config_format": "json"}
        if self.read(Device, "GET", "/server_info", params=config).device != "cpu":
            return False
        return has_head(self.post(RPC, {"method": "get_model_inspection"}).text)

    def check(self) -> None:
        """Check that the server returns log-probabilities of the distribution that it samples.

        Raises:
            ServerFailure: the server was started with another mode.
        """
        config = {"config_format": "json"}
        mode = self.read(LogprobsMode, "GET", "/server_info", params=config).mode
        if mode != self.logprobs_mode:
            raise ServerFailure(
                f"{self.url} runs with --logprobs-mode {excerpt(mode)}; start it with "
                f"--logprobs-mode {self.logprobs_mode}."
            )

    # --- weights ---

    def has(self, weights: Weights) -> bool:
        if weights.is_adapter:
            return weights.version in self.list_models()
        return self.version == weights.version

    def load(self, weights: Weights) -> None:
        """See `ServerClient.load`; for an adapter the server does not pause."""
        if weights.is_adapter:
            self._load_adapter(weights)
            return
        self.post("/pause", mode="keep" if weights.in_flight else "wait")
        try:
            self._load_model(weights)
            # The prefix cache holds keys and values of the old weights, so it is reset before the
            # version changes; those of running rows are computed again.
            options = {"reset_running_requests": "true"} if weights.in_flight else {}
            if not self.read(CacheReset, "POST", "/reset_prefix_cache", params=options).success:
                raise ServerUnavailable(f"{self.url} (it could not reset its prefix cache)")
            self.post("/update_weight_version", {"new_version": weights.version})
        finally:
            self.post("/resume")

    def _load_model(self, weights: Weights) -> None:
        if not weights.folder:
            self._send_tensors(weights)
            return
        if weights.tied_head is not None and self.copies_head:
            write_head(Path(weights.folder), weights.tied_head)
        kwargs = {"weights_path": weights.folder}
        self._post_weights(RPC, {"method": "reload_weights", "kwargs": kwargs})

    def _load_adapter(self, weights: Weights) -> None:
        """Load the adapter of a version, and unload those of earlier ones of the same run."""
        models = self.list_models()
        body = {"lora_name": weights.version, "lora_path": weights.folder}
        self._post_weights("/v1/load_lora_adapter", body)
        run = weights.version.rpartition("-")[2]
        for name in (name for name in models if name.rpartition("-")[2] == run):
            self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def _post_weights(self, path: str, body: Any) -> None:
        """Let the server load weights; an error in that is distinguished from a lost server."""
        try:
            self.post(path, body)
        except InternalError as error:
            raise WeightsRejected(str(error)) from error

    def _send_tensors(self, weights: Weights) -> None:
        """Send tensors over NCCL, in a group of the server's workers and rank 0 of the trainer."""
        # A restarted server has lost its group; it reports the version "default".
        if self.nccl is None or self.version == "default":
            self.nccl = self._join_group(weights)
        trainer, source = self.nccl
        source.tensors = weights.tensors
        trainer.send_weights()
        source.tensors = {}  # the policy's own, which change now

    def _join_group(self, weights: Weights) -> tuple[Any, Any]:
        """Create the NCCL group with the server; return vLLM's trainer for it, and its source."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerInitInfo,
            NCCLTrainerWeightTransferEngine,
        )

        workers = self.read(WorldSize, "GET", "/get_world_size").world_size
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address = weights.sender or socket.gethostbyname(socket.gethostname())
        info = NCCLTrainerInitInfo(address, port, workers + 1, rank=0)
        client = HTTPVLLMWeightSyncClient(self.url, self.timeout_s)
        source = make_weight_source(weights.tensors)
        trainer = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
        return trainer, source

    # --- samples ---

    def sample(self, request: SampleRequest, weights: Weights) -> SampleResult:
        body = {"token_ids": request.ids, "sampling_params": sampling_params(request)}
        if weights.is_adapter:
            body["model"] = weights.version
        max_bytes = MIB + MAX_BYTES_PER_TOKEN * (len(request.ids) + request.max_tokens)
        try:
            reply = self.read(Generated, "POST", GENERATE, body, max_bytes=max_bytes)
        except NotFound as error:
            if weights.is_adapter:
                raise StaleWeights("another adapter") from error
            raise
        if reply.finish_reason not in ("stop", "length"):
            reason = excerpt(str(reply.finish_reason))
            raise ServerUnavailable(f"{self.url} (finish_reason {reason!r})")
        ids, logprobs = reply.token_ids, reply.logprobs
        if ids is None or logprobs is None:
            raise self.invalid(GENERATE, "no token_ids or logprobs")
        if reply.prompt_tokens != len(request.ids) or [one.token_id for one in logprobs] != ids:
            raise self.invalid(
                GENERATE,
                f"tokens for another prompt ({reply.prompt_tokens} tokens instead of "
                f"{len(request.ids)}), or log-probabilities of other tokens",
            )
        if reply.finish_reason == "length" and len(ids) < request.max_tokens:
            raise self.invalid(
                GENERATE,
                f"a row that ends after {len(request.ids) + len(ids)} tokens; start the server "
                f"with --max-model-len {len(request.ids) + request.max_tokens} or more",
            )
        # A weight update during the request gives several versions. The reply to a request for an
        # adapter has none: the server would have rejected another name.
        spans = [(weights.version, 0)] if weights.is_adapter else _read_spans(reply)
        return SampleResult(ids, [one.logprob for one in logprobs], reply.finish_reason, spans)

    def tokenize(self, text: str) -> tuple[list[int], int]:
        body = {"prompt": text, "add_special_tokens": False}
        reply = self.read(Tokens, "POST", TOKENIZE, body)
        return reply.tokens, reply.max_model_len

    def prompt_logprobs(self, ids: list[int], start: int, top_k: int = 0) -> list[dict[int, float]]:
        """See `ServerClient.prompt_logprobs`.

        They are those of the whole softmax for any `--logprobs-mode` of log-probabilities: samplers
        and filters do not apply to a prompt.
        """
        assert start > 0
        # A server generates at least one token; it is not used.
        body = {"prompt": ids, "prompt_logprobs": top_k, "max_tokens": 1, "temperature": 0.0}
        max_bytes = MIB + (MAX_BYTES_PER_TOKEN + MAX_BYTES_PER_CANDIDATE * top_k) * len(ids)
        entries = self.read(ScoredPrompt, "POST", COMPLETIONS, body, max_bytes=max_bytes).entries
        if len(entries) != len(ids):
            raise self.invalid(
                COMPLETIONS, f"log-probabilities of {len(entries)} tokens, not {len(ids)}"
            )
        scores = []
        for token, entry in zip(ids[start:], entries[start:], strict=True):
            if entry is None or str(token) not in entry:
                raise self.invalid(COMPLETIONS, f"no log-probability of token {token}")
            if len(entry) < top_k:
                raise self.invalid(
                    COMPLETIONS, f"log-probabilities of {len(entry)} tokens, not of {top_k}"
                )
            logprobs = {int(candidate): value.logprob for candidate, value in entry.items()}
            total = sum(map(math.exp, logprobs.values()))
            if total > MAX_TOTAL:
                raise self.invalid(COMPLETIONS, f"probabilities that add up to {total:.3f}")
            scores.append(logprobs)
        return scores


def _read_spans(reply: Generated) -> list[tuple[str, int]]:
    """Return versions and their first tokens; -1 if the server does not say where one begins."""
    spans = reply.weight_versions or ()
    return [(str(span.version), -1 if span.start is None else span.start) for span in spans]


def make_weight_source(tensors: Mapping[str, Tensor] | None) -> Any:
    """Wrap tensors as vLLM's source of weights, sent one tensor at a time."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class Tensors(WeightSource):
        """The tensors of a publish."""

        def __init__(self) -> None:
            self.tensors = tensors or {}

        def metadata(self) -> list[Any]:
            """Return names, types and shapes."""
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            """Yield each tensor on the GPU that sends it."""
            return ((name, tensor.cuda()) for name, tensor in self.tensors.items())

    return Tensors()
