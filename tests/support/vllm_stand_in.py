"""The routes of a vLLM server in plain Python, backed by litgrpo's local engine.

`python -m tests.support.vllm_stand_in FOLDER PORT [--keeps] [--dies_after ROWS]
[--at_once TOKENS] [--seconds_per_token SECONDS] [--host ADDRESS]` starts one as a process.
"""

import argparse
import json
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import torch

from litgrpo.models.adapters import LoRA
from litgrpo.models.loading.load import load_policy
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
        at_once: tokens of a row that are sampled before a pause can begin; None: all.
        seconds_per_token: it sleeps as long, as if it ran on another machine; needs `at_once`.
        host: address that it listens on.
        stalls_at: "/route:n"; from the n-th request of the route on, no request gets an answer.
    """

    daemon_threads = True
    request_queue_size = 128  # requests of a rollout connect at once; of 5 some would be reset

    def __init__(
        self,
        folder,
        port=0,
        *,
        faults=None,
        keeps=False,
        mode="raw_logprobs",
        dies_after=None,
        at_once=None,
        seconds_per_token=0.0,
        host="127.0.0.1",
        stalls_at="",
    ):
        super().__init__((host, port), Handler)
        self.folder, self.policy = str(folder), load_policy(str(folder)).eval()
        self.lock, self.running = threading.RLock(), threading.Event()
        self.running.set()
        self.version, self.seen, self.asked = "default", [], []
        self.faults, self.keeps, self.mode = faults or {}, keeps, mode
        self.alter = None  # what becomes of an answer
        self.device, self.inspection = "cuda", ""
        self.max_model_len, self.max_logprobs, self.adapters = 256, 20, {}
        self.connections, self.dies_after = [], dies_after
        self.at_once, self.seconds_per_token = at_once, seconds_per_token
        self.stalls_at = stalls_at

    @property
    def url(self):
        return "http://{}:{}".format(*self.server_address)

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
        route, _, number = self.stalls_at.partition(":")
        if route and self.seen.count(route) >= int(number):
            print("stalls", flush=True)
            threading.Event().wait()
        if self.faults.get(path):
            return self.faults[path].pop(0), {"error": "broken"}
        return ROUTES[path](self, body, query)

    def pause(self, body, query):
        (self.pause_mode,) = query["mode"]
        assert self.pause_mode in ("wait", "keep")
        self.running.clear()
        with self.lock:  # the current request finishes first
            return 200, {"status": "paused"}

    def resume(self, body, query):
        self.running.set()
        return 200, {}

    def call_workers(self, body, query):
        if body["method"] == "get_model_inspection":
            return 200, {"results": [self.inspection]}
        assert not self.running.is_set()
        assert body["method"] == "reload_weights"
        if not self.keeps:
            with LOADING:
                self.policy = load_policy(body["kwargs"]["weights_path"]).eval()
        return 200, {}

    def models(self, body, query):
        return 200, {"data": [{"id": name} for name in (self.folder, *self.adapters)]}

    def load_adapter(self, body, query):
        path = body["lora_path"]
        with LOADING:
            policy = load_policy(self.folder, lora=LoRA(adapter_path=path)).eval()
        self.adapters[body["lora_name"]] = policy
        return 200, "Success"

    def unload_adapter(self, body, query):
        del self.adapters[body["lora_name"]]
        return 200, "Success"

    def label(self, body, query):
        if not self.keeps:
            self.version = body["new_version"]
        return 200, {}

    def forgotten(self, body, query):
        assert not self.running.is_set()
        wanted = {"reset_running_requests": ["true"]} if self.pause_mode == "keep" else {}
        assert query == wanted
        return 200, {"success": True}

    def weight_info(self, body, query):
        return 200, {"weight_version": self.version}

    def info(self, body, query):
        assert query == {"config_format": ["json"]}
        config = {
            "model_config": {"logprobs_mode": self.mode},
            "device_config": {"device": self.device},
        }
        return 200, {"vllm_config": config}

    @contextmanager
    def unpaused(self):
        """Hold the lock while the server is not paused, so that a pause waits for the end."""
        while True:
            self.running.wait()
            with self.lock:
                if self.running.is_set():  # no pause began before the lock was taken
                    yield
                    return

    def generate(self, body, query):
        with self.unpaused():
            self.asked.append(body)
            if len(self.asked) == self.dies_after:
                os._exit(9)
            if "model" in body:
                if body["model"] not in self.adapters:
                    return 404, {"error": "The model does not exist."}
                return 200, self.sample(body, self.adapters[body["model"]])
            if self.at_once is None:
                return 200, self.sample(body)
        return 200, self.sample_in_parts(body)

    def sample_in_parts(self, body):
        """Do what `sample` does, with an update of the weights where one is asked for."""
        params, numbers = body["sampling_params"], random_numbers(body["sampling_params"])[0]
        ids, content, spans = [], [], []
        while True:
            most = min(self.at_once, params["max_tokens"] - len(ids))
            some = {"uniforms": numbers[len(ids) : len(ids) + most].tolist()}
            part = params | {"max_tokens": most, "extra_args": some}
            with self.unpaused():
                found = self.sample({"token_ids": body["token_ids"] + ids, "sampling_params": part})
            (choice,) = found["choices"]
            time.sleep(self.seconds_per_token * len(choice["token_ids"]))
            if not spans or spans[-1]["version"] != choice["weight_versions"][0]["version"]:
                spans.append(choice["weight_versions"][0] | {"start": len(ids)})
            ids += choice["token_ids"]
            content += choice["logprobs"]["content"]
            if choice["finish_reason"] == "stop" or len(ids) == params["max_tokens"]:
                break
        whole = {"token_ids": ids, "weight_versions": spans, "logprobs": {"content": content}}
        usage = {"prompt_tokens": len(body["token_ids"])}
        return {"choices": [choice | whole], "usage": usage}

    def tokenize(self, body, query):
        assert not body["add_special_tokens"]
        ids = self.policy.tokenizer(body["prompt"], add_special_tokens=False).input_ids
        return 200, {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len}

    def complete(self, body, query):
        """Log-probabilities of a prompt, as transformers' own forward pass computes them."""
        with self.lock:
            self.asked.append(body)
            top_k = body["prompt_logprobs"]
            assert body["max_tokens"] == 1
            if top_k > self.max_logprobs:
                return 400, {"error": {"message": f"greater than max allowed: {self.max_logprobs}"}}
            ids = body["prompt"]
            if len(ids) >= self.max_model_len:
                return 400, {"error": {"message": "maximum context length"}}
            prompt = torch.tensor([ids])
            with torch.no_grad():
                logits = self.policy.dense_logits(
                    prompt[:, :1], torch.ones(1, 1).bool(), prompt[:, 1:]
                )
            entries = []
            for token, logprobs in zip(ids[1:], logits[0, :-1].log_softmax(-1), strict=True):
                ranked = [token, *logprobs.topk(top_k).indices.tolist()]
                entries.append({str(one): {"logprob": float(logprobs[one])} for one in ranked})
            choice = {"index": 0, "finish_reason": "length", "prompt_logprobs": [None, *entries]}
            found = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}}
            return 200, self.alter(found) if self.alter else found

    def sample(self, body, policy=None):
        policy = policy or self.policy
        params, prompt = body["sampling_params"], torch.tensor([body["token_ids"]])
        temperature, numbers = params["temperature"], random_numbers(params)
        ends = tuple(params["stop_token_ids"])
        batch = PromptBatch(
            prompt, torch.ones_like(prompt).bool(), [""], {}, torch.zeros(1, dtype=torch.long)
        )
        sampling = Sampling(temperature=temperature, stop_token_ids=ends)
        eos, policy.eos_ids = policy.eos_ids, ()
        rollout = LocalEngine().generate(RolloutRequest(policy, batch, 1, numbers, sampling))
        policy.eos_ids = eos
        ids = rollout.token_lists()[0]
        logprobs = rollout.sampler_logprobs[0]
        if self.mode == "raw_logprobs":
            logprobs = policy.logprobs(rollout.tokens).logprobs[0]
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


def random_numbers(params):
    """[1, C] float64: those of the request, or of its seed."""
    if "extra_args" in params:
        return torch.tensor([params["extra_args"]["uniforms"]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(params["seed"])
    return torch.rand(1, params["max_tokens"], generator=generator, dtype=torch.float64)


class LLM:
    """VLLM's class of the same name: samples as the stand-in server does, in this process."""

    inspection = ""  # listing of the model's modules

    def __init__(self, model, **given):
        self.given, self.did, self.seeds, self.loaded = given, [], [], load_policy(model).eval()
        self.behind = SimpleNamespace(policy=self.loaded, version="", mode="")
        self.behind.alter = None

    def generate(self, prompts, params, *, use_tqdm):
        self.did.append("generate")
        assert self.behind.policy is not None, "asleep, or without weights"
        assert all(each["seed"] is None for each in params)  # vLLM would draw row by row
        self.seeds.append(torch.initial_seed())
        params = [each | {"seed": 5 + n} for n, each in enumerate(params)]  # of the stand-in
        return [self.one(p["prompt_token_ids"], q) for p, q in zip(prompts, params, strict=True)]

    def one(self, ids, params):
        found = StandIn.sample(self.behind, {"token_ids": ids, "sampling_params": params})
        (choice,) = found["choices"]
        logprobs = [
            {each["token_id"]: SimpleNamespace(logprob=each["logprob"])}
            for each in choice["logprobs"]["content"]
        ]
        return SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=choice["token_ids"],
                    logprobs=logprobs,
                    finish_reason=choice["finish_reason"],
                )
            ]
        )

    def collective_rpc(self, method, kwargs=None):
        if method == "get_model_inspection":
            return [self.inspection]
        return self.reload(method, kwargs)

    def reload(self, method, kwargs):
        assert "sleep" not in self.did or self.did.count("wake") == self.did.count("sleep")
        self.behind.policy = self.loaded
        if "weights_path" in kwargs:
            self.did.append(f"{method} from files")
            self.behind.policy = load_policy(kwargs["weights_path"]).eval()
            return
        self.did.append(method)
        given = dict(kwargs["weights_iterator"])
        self.received = list(given)
        if self.inspection:
            del given["lm_head.weight"]
        assert len(given) == len(list(self.loaded.model.parameters()))
        with torch.no_grad():
            for name, weight in given.items():  # raises for an unknown name, as vLLM does
                self.loaded.model.get_parameter(name).copy_(weight)

    def reset_prefix_cache(self):
        self.did.append("reset")

    def wake_up(self):
        self.did.append("wake")

    def sleep(self, level):
        assert level == 2
        self.behind.policy = None  # weights are dropped
        self.did.append("sleep")


ROUTES = {
    "/pause": StandIn.pause,
    "/resume": StandIn.resume,
    "/collective_rpc": StandIn.call_workers,
    "/reset_prefix_cache": StandIn.forgotten,
    "/update_weight_version": StandIn.label,
    "/server_info": StandIn.info,
    "/weight_info": StandIn.weight_info,
    "/v1/models": StandIn.models,
    "/v1/load_lora_adapter": StandIn.load_adapter,
    "/v1/unload_lora_adapter": StandIn.unload_adapter,
    "/inference/v1/generate": StandIn.generate,
    "/tokenize": StandIn.tokenize,
    "/v1/completions": StandIn.complete,
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
        data = (found if isinstance(found, str) else json.dumps(found)).encode()
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
    parser.add_argument("--at_once", type=int)
    parser.add_argument("--seconds_per_token", type=float, default=0.0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--stalls_at", default="")
    asked = vars(parser.parse_args())
    with StandIn(asked.pop("folder"), asked.pop("port"), **asked) as server:
        print(server.url, flush=True)
        server.thread.join()
