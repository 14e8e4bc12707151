"""An engine for servers that are not vLLM's, and the server: all that another kind needs.

Its interface is invented: `GET /status`, and `POST` of JSON to `/weights`, `/draw`, `/encode` and
`/score`. `OtherServer` and `OtherEngine` are what a user would write; litgrpo does not name them.
"""

import json
import threading
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from pydantic import BaseModel

from litgrpo.argument_types import check_field_types
from litgrpo.models.loading.load import load_policy, resolve_pretrained
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.rollout.servers.client import SampleResult, ServerFailure, ServerUnavailable
from litgrpo.rollout.servers.external import RemoteEngine
from litgrpo.rollout.servers.http_client import HttpServer
from litgrpo.types import PromptBatch

# --- the engine ---


class Status(BaseModel):
    weights: str
    longest_row: int


class Drawn(BaseModel):
    weights: str
    tokens: list[int]
    scores: list[float]
    ended: bool


class Encoded(BaseModel):
    tokens: list[int]


class Scores(BaseModel):
    scores: list[float]


class OtherServer(HttpServer):
    def status(self):
        return self.read(Status, "GET", "/status")

    def check(self):
        if self.status().longest_row < 2:
            raise ServerFailure(f"{self.url} takes no prompts")

    def has(self, weights):
        return self.status().weights == weights.version

    def load(self, weights):
        body = {"name": weights.version, "folder": weights.folder, "go_on": weights.in_flight}
        self.post("/weights", body)

    def sample(self, request, weights):
        body = {
            "tokens": request.ids,
            "budget": request.max_tokens,
            "ends": list(request.end_ids),
            "greedy": request.temperature == 0,
            "numbers": request.uniforms,
        }
        drawn = self.read(Drawn, "POST", "/draw", body)
        reason = "stop" if drawn.ended else "length"
        return SampleResult(drawn.tokens, drawn.scores, reason, [(drawn.weights, 0)])

    def tokenize(self, text):
        return self.read(Encoded, "POST", "/encode", {"text": text}).tokens, 256

    def prompt_logprobs(self, ids, start, top_k=0):
        assert not top_k, "this server lists no other tokens"
        scores = self.read(Scores, "POST", "/score", {"tokens": ids}).scores
        if len(scores) != len(ids) - 1:
            raise ServerUnavailable(self.url)
        return [{token: score} for token, score in zip(ids[1:], scores, strict=True)][start - 1 :]


@check_field_types
@dataclass(frozen=True)
class OtherEngine(RemoteEngine):
    """Samples with servers of the invented interface, by litgrpo's random numbers."""

    takes_uniforms = True

    def connect(self, url):
        return OtherServer(url, self.timeout_s, self.allow_public)


# --- the server ---


class Running(ThreadingHTTPServer):
    """Serves a model, at first with weights of no version.

    Args:
        model: folder or built-in model.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.policy, self.version = load_policy(resolve_pretrained(model)).eval(), "none"
        self.lock, self.seen = threading.Lock(), []
        self.url = "http://{}:{}".format(*self.server_address)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Connections break at the end."""

    def answer(self, path, body):
        self.seen.append(path)
        return getattr(self, path.strip("/"))(**body)

    def status(self):
        return {"weights": self.version, "longest_row": 256}

    def weights(self, name, folder, go_on):
        self.policy, self.version = load_policy(folder).eval(), name
        return {}

    def encode(self, text):
        return {"tokens": self.policy.tokenizer(text, add_special_tokens=False).input_ids}

    def score(self, tokens):
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logits = self.policy.dense_logits(ids[:, :1], torch.ones(1, 1).bool(), ids[:, 1:])
        scores = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return {"scores": scores.tolist()}

    def draw(self, tokens, budget, ends, greedy, numbers):
        prompt = torch.tensor([tokens])
        batch = PromptBatch(prompt, torch.ones_like(prompt).bool(), [""], {}, torch.zeros(1).long())
        uniforms = torch.tensor([numbers or [0.0] * budget], dtype=torch.float64)
        sampling = Sampling(temperature=0.0 if greedy else 1.0, stop_token_ids=tuple(ends))
        rollout = LocalEngine().generate(RolloutRequest(self.policy, batch, 1, uniforms, sampling))
        return {
            "weights": self.version,
            "tokens": rollout.token_lists()[0],
            "scores": rollout.sampler_logprobs[0].tolist(),
            "ended": not bool(rollout.truncated[0]),
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body):
        with self.server.lock:
            content = json.dumps(self.server.answer(self.path, body)).encode()
        with suppress(ConnectionError):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_):
        """Nothing."""
