"""The routes of a vLLM server in plain Python, backed by litgrpo's local engine.

`python -m tests.support.vllm_stand_in FOLDER PORT [--keeps] [--dies_after ROWS]` starts one
as a process.
"""

import argparse
import json
import os
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import torch

from litgrpo.models.loading import load_policy
from litgrpo.rollout.engines.base import RolloutRequest
from litgrpo.rollout.engines.local import LocalEngine
from litgrpo.rollout.sampling import Sampling
from litgrpo.types import PromptBatch

# transformers switches tying off while it loads; two threads at once would leave it off.
LOADING = threading.Lock()


class StandIn(ThreadingHTTPServer):
    """Serves a model folder.

    Args:
        folder: as vLLM's `--model`.
        port: 0 takes a free one.
        faults: {path: statuses to answer with, one request each, before it works}.
        keeps: it says yes to new weights, and keeps those that it has: the label too.
        mode: `--logprobs-mode`, by which log-probabilities are before temperature or after it.
        dies_after: rows, with which the process ends.
    """

    daemon_threads = True

    def __init__(
        self, folder, port=0, *, faults=None, keeps=False, mode="raw_logprobs", dies_after=None
    ):
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.policy = str(folder), load_policy(str(folder)).eval()
        self.lock, self.running = threading.RLock(), threading.Event()
        self.running.set()
        self.version, self.seen, self.asked = "default", [], []
        self.faults, self.keeps, self.mode = faults or {}, keeps, mode
        self.alter = None  # what becomes of an answer
        self.connections, self.dies_after = [], dies_after

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def get_request(self):
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def handle_error(self, request, client_address):
        """Connections break where a server dies."""

    def __enter__(self):
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()
        for connection in self.connections:  # as of a process that has died
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.thread.join()

    def answer(self, path, body, query):
        """Status and what a route answers."""
        self.seen.append(path)
        if self.faults.get(path):
            return self.faults[path].pop(0), {"error": "broken"}
        return ROUTES[path](self, body, query)

    def pause(self, body, query):
        assert query == {"mode": ["wait"]}
        self.running.clear()
        with self.lock:  # the current request finishes first
            return 200, {"status": "paused"}

    def resume(self, body, query):
        self.running.set()
        return 200, {}

    def reload(self, body, query):
        assert not self.running.is_set()
        assert body["method"] == "reload_weights"
        if not self.keeps:
            with LOADING:
                self.policy = load_policy(body["kwargs"]["weights_path"]).eval()
        return 200, {}

    def label(self, body, query):
        if not self.keeps:
            self.version = body["new_version"]
        return 200, {}

    def forgotten(self, body, query):
        assert not self.running.is_set()
        return 200, {}

    def weight_info(self, body, query):
        return 200, {"weight_version": self.version}

    def info(self, body, query):
        assert query == {"config_format": ["json"]}
        return 200, {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}}

    def generate(self, body, query):
        self.running.wait()
        with self.lock:
            self.asked.append(body)
            if len(self.asked) == self.dies_after:
                os._exit(9)
            return 200, self.sample(body)

    def sample(self, body):
        params, prompt = body["sampling_params"], torch.tensor([body["token_ids"]])
        length, temperature = params["max_tokens"], params["temperature"]
        generator = torch.Generator().manual_seed(params["seed"])
        numbers = torch.rand(1, length, generator=generator, dtype=torch.float64)
        if "extra_args" in params:
            numbers = torch.tensor([params["extra_args"]["uniforms"]], dtype=torch.float64)
        ends = tuple(params["stop_token_ids"])
        batch = PromptBatch(
            prompt, torch.ones_like(prompt).bool(), [""], {}, torch.zeros(1, dtype=torch.long)
        )
        sampling = Sampling(temperature=temperature, stop_token_ids=ends)
        eos, self.policy.eos_ids = self.policy.eos_ids, ()
        rollout = LocalEngine().generate(RolloutRequest(self.policy, batch, 1, numbers, sampling))
        self.policy.eos_ids = eos
        ids = rollout.token_lists()[0]
        logprobs = rollout.sampler_logprobs[0]
        if self.mode == "raw_logprobs":
            logprobs = self.policy.logprobs(rollout.tokens).logprobs[0]
        pairs = zip(ids, logprobs.tolist(), strict=True)
        content = [{"token_id": token, "logprob": value} for token, value in pairs]
        choice = {
            "token_ids": ids,
            "finish_reason": "length" if bool(rollout.truncated[0]) else "stop",
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": content},
        }
        found = {"choices": [choice], "usage": {"prompt_tokens": prompt.shape[1]}}
        return self.alter(found) if self.alter else found


ROUTES = {
    "/pause": StandIn.pause,
    "/resume": StandIn.resume,
    "/collective_rpc": StandIn.reload,
    "/reset_prefix_cache": StandIn.forgotten,
    "/update_weight_version": StandIn.label,
    "/server_info": StandIn.info,
    "/weight_info": StandIn.weight_info,
    "/inference/v1/generate": StandIn.generate,
}


class Handler(BaseHTTPRequestHandler):
    """One connection, which stays open."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        parts, length = urlsplit(self.path), int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or "null")
        status, found = 404, {"detail": "Not Found"}
        if parts.path in ROUTES:
            status, found = self.server.answer(parts.path, body, parse_qs(parts.query))
        data = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        """Nothing is written."""


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("port", type=int)
    parser.add_argument("--keeps", action="store_true")
    parser.add_argument("--dies_after", type=int)
    asked = vars(parser.parse_args())
    with StandIn(asked.pop("folder"), asked.pop("port"), **asked) as server:
        print(server.url, flush=True)
        server.thread.join()
