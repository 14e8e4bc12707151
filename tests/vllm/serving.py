"""Starts a real vLLM server on a CPU, and ends it."""

import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import httpx2

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("LITGRPO_VLLM_PYTHON", "")
CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",  # the logits processor
}
FLAGS = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 64 --enable-scale-out"
UNIFORMS = "--logprobs-mode raw_logprobs --logits-processors"
UNIFORMS += " litgrpo.rollout.servers.vllm_uniforms:Uniforms"
PROCESSED = "--logprobs-mode processed_logprobs"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(model, folder, flags, host="127.0.0.1"):
    """The address of a server of a model folder; what it says is in `folder`."""
    port, log = free_port(), Path(folder) / "server.log"
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    words += ["--host", host, "--port", str(port), *FLAGS.split(), *flags.split()]
    with log.open("w") as said:
        process = subprocess.Popen(
            words, env=os.environ | CPU, cwd=folder, stdout=said, stderr=subprocess.STDOUT
        )
    url = f"http://{host}:{port}"
    try:
        wait(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait(url, process, log, limit_s=300):
    """Until it answers."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx2.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"no server after {limit_s} s: {log.read_text()[-3000:]}")
