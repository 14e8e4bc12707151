"""vLLM servers and LLM judges that cannot be reached, or are not those that were meant."""

from tests.misuse.probe import QUICK, ROOT, Probe, split

ENGINE = (
    "--model.check_invariants false --model.engine ServerEngine --model.engine.wait_s 1"
    " --model.engine.urls '[%s]'"
)
JUDGE = (
    "--model.rewards '{judge: {function: {class_path: litgrpo.rewards.LLMJudge, init_args:"
    ' {base_url: "%s", model: m, criteria: {good: {text: It is good}}, max_retries: 0,'
    " api_key_env: JUDGE_KEY}}}}'"
)
# A server in a thread answers every request with a status and a body, then the command is run.
WITH_SERVER = """
import os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        pass  # a run that ends closes its connections

class Handler(BaseHTTPRequestHandler):
    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = {body!r}.encode()
        self.send_response({status})
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_GET = do_POST = answer
    def log_message(self, *words):
        pass

server = Server(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["JUDGE_KEY"] = "sk-of-another-service-123456"
words = [word.replace("PORT", str(server.server_port)) for word in {words!r}]
sys.argv = ["cli.py", *words]
from litgrpo.cli.main import main
raise SystemExit(main())
"""


def write_script(words: str, status: int = 200, body: str = "{}") -> str:
    """Return a script with a server that gives one response, and a training that asks it."""
    recipe = str(ROOT / "configs" / "quickstart.yaml")
    start = split(QUICK.replace("{recipe}", recipe).replace("{folder}", "."))
    return WITH_SERVER.format(words=[*start, *split(words)], status=status, body=body)


SECRET = ("Traceback (most recent call last)", "sk-of-another-service-123456")
PROBES = [
    Probe(
        "a server at a wrong port",
        f"{QUICK} {ENGINE % 'http://127.0.0.1:9'}",
        ("127.0.0.1:9", "model.engine.wait_s"),
        code=75,
    ),
    Probe(
        "a server without its scheme",
        f"{QUICK} {ENGINE % '127.0.0.1:8000'}",
        ("model.engine.urls", "http://127.0.0.1:8000"),
    ),
    Probe(
        "https for a server of plain http",
        "",
        ("https://127.0.0.1", "Use http://"),
        script=write_script(ENGINE % "https://127.0.0.1:PORT"),
    ),
    Probe(
        "a server of something else",
        "",
        ("127.0.0.1", "404"),
        script=write_script(ENGINE % "http://127.0.0.1:PORT", 404, '{"error": "no such route"}'),
    ),
    Probe(
        "a server that needs a key",
        "",
        ("127.0.0.1", "401"),
        script=write_script(ENGINE % "http://127.0.0.1:PORT", 401, '{"error": "Unauthorized"}'),
    ),
    Probe(
        "a judge with a wrong key",
        "",
        ("401", "JUDGE_KEY"),
        script=write_script(
            JUDGE % "http://127.0.0.1:PORT/v1", 401, '{"error": "Incorrect API key"}'
        ),
        never=SECRET,
    ),
    Probe(
        "a judge of another model",
        "",
        ("404", "does not exist"),
        script=write_script(
            JUDGE % "http://127.0.0.1:PORT/v1", 404, '{"error": "The model m does not exist."}'
        ),
        never=SECRET,
    ),
    Probe(
        "https for a judge of plain http",
        "",
        ("https://127.0.0.1", "Use http://"),
        script=write_script(JUDGE % "https://127.0.0.1:PORT/v1"),
        never=SECRET,
    ),
]
