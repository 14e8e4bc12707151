"""A judge behind an address: a local server that is slow, wrong, busy, and dies."""

import copy
import json
import logging
import pickle
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from litgrpo.event_loops import wait_for
from litgrpo.rewards import Criterion, LLMJudge, Reward, RewardFailure, Scorer
from litgrpo.rewards.llm_judge import CACHE_FILE, SCORE, Replies, RequestRejected
from tests.support.hostile_server import RESPONSES, HostileServer
from tests.support.hostile_server import reply as send_reply

CRITERIA = {"clear": Criterion("Is it clear?", 3.0), "short": Criterion("Is it short?", 1.0)}
KEY = "sk-very-secret"


class Server(ThreadingHTTPServer):
    """Answers requests by a function of their text and how often it was asked; notes all."""

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.keys, self.lock = answer, [], set(), threading.Lock()
        self.daemon_threads = True
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        """A client that did not wait."""

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        with self.server.lock:
            self.server.asked.append(text)
            self.server.keys.add(self.headers.get("Authorization"))
            times = self.server.asked.count(text)
        status, content, headers = self.server.answer(text, times)
        if status is None:  # the connection is lost
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        """Nothing."""


def reply(text, **headers):
    usage = {"total_tokens": 11}
    content = {"choices": [{"message": {"content": text}}], "usage": usage}
    return 200, json.dumps(content).encode(), headers


def grade(text, times):
    """8 for a clear answer, 4 for a short one."""
    return reply(f"Well.\n**Score: {8 if 'clear' in text else 4}/10**")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)


@pytest.fixture
def serve(monkeypatch):
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    monkeypatch.setenv("JUDGE_KEY", KEY)
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def judge(server, tmp_path, criteria=None, **settings):
    settings = {"cache_dir": str(tmp_path / "cache"), "max_retries": 2} | settings
    criteria = criteria or {"clear": CRITERIA["clear"]}
    found = LLMJudge(server.address, "m", criteria, api_key_env="JUDGE_KEY", **settings)
    found.load()
    return found


def ask(judge, *args, **columns):
    return wait_for(judge(*args, **columns), "rewards")


def read_files(folder):
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_the_reward_is_the_weighted_mean_of_the_marks_over_the_highest(serve, tmp_path):
    server = serve(grade)
    noted = {}
    asked = judge(server, tmp_path, CRITERIA)
    assert ask(asked, ["p", "q"], ["a", "b"], noted.__setitem__) == [0.7, 0.7]
    assert noted["judge_calls"] == 4
    assert all("Answer:\na" in text or "Answer:\nb" in text for text in server.asked)
    assert server.keys == {f"Bearer {KEY}"}


def test_what_was_asked_before_is_read_from_the_cache_and_equal_texts_are_asked_once(
    serve, tmp_path
):
    server = serve(grade)
    ask(judge(server, tmp_path), ["p"] * 4, ["a", "a", "a", "b"])
    assert len(server.asked) == 2
    again = judge(server, tmp_path)
    assert ask(again, ["p"], ["a"]) == [0.8]
    assert ask(judge(server, tmp_path, temperature=0.5), ["p"], ["a"]) == [0.8]
    assert (len(server.asked), again.counts["cached"], again.counts["calls"]) == (3, 1, 0)


@pytest.mark.parametrize(
    "first",
    [
        (429, b"slow down", {"Retry-After": "0"}),
        (500, b"oops", {}),
        (503, b"", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        (200, b"no json", {}),
        (200, b'{"choices": []}', {}),
        (200, b'{"choices": [{"message": {"content": null}}]}', {}),
        (None, b"", {}),
    ],
)
def test_what_may_pass_is_tried_again(serve, tmp_path, first):
    server = serve(lambda text, times: first if times == 1 else grade(text, times))
    asked = judge(server, tmp_path)
    assert ask(asked, ["p"], ["a"]) == [0.8]
    assert (len(server.asked), asked.counts["failed"]) == (2, 0)


def test_a_slow_server_costs_the_slow_rows_only(serve, tmp_path, caplog):
    never = threading.Event()

    def answer(text, times):
        if "slow one" in text:
            never.wait(20)
        return grade(text, times)

    asked = judge(serve(answer), tmp_path, timeout_s=1.0, max_retries=0)
    assert ask(asked, ["p"] * 2, ["slow one", "a"]) == [None, 0.8]
    never.set()
    assert asked.counts["failed"] == 1
    assert "no complete response within 1 s" in caplog.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", RESPONSES)
def test_a_completion_abstains_whatever_a_server_sends(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with HostileServer(RESPONSES[name]) as server:
        server.address = server.url + "/v1"
        asked = judge(server, tmp_path, timeout_s=0.5, max_retries=0, max_concurrent_requests=1)
        asked.counts["answered"] = 1  # a rejected first request would be a mistake in the recipe
        assert ask(asked, ["p"], ["a"]) == [None]
    assert asked.counts["failed"] == asked.counts["calls"] == 1
    assert KEY.encode() not in read_files(tmp_path)


CHAT = {"choices": [{"message": {"content": "Score: 8"}}], "usage": {"total_tokens": 11}}


@pytest.mark.parametrize(
    "changes",
    [
        {"choices": None},
        {"choices": []},
        {"choices": {}},
        {"choices": "Score: 8"},
        {"choices": CHAT["choices"] * 2},
        {"choices": [None]},
        {"choices": ["Score: 8"]},
        {"choices": [{}]},
        {"choices": [{"message": None}]},
        {"choices": [{"message": "Score: 8"}]},
        {"choices": [{"message": {}}]},
        {"choices": [{"message": {"content": None}}]},
        {"choices": [{"message": {"content": ["Score: 8"]}}]},
        {"choices": [{"message": {"content": 8}}]},
        {"choices": [{"message": {"content": "Score: 8 \ud800 out of \ud800"}}]},
        {"choices": [{"message": {"content": "Score" + ":" * 200_000 + "x"}}]},
        {"choices": [{"message": {"content": "Score: " + "9" * 100_000}}]},
        {"choices": [{"message": {"content": "Score: 1e999"}}]},
    ],
)
def test_a_malformed_chat_completion_abstains(changes, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with HostileServer(lambda: send_reply(CHAT | changes)) as server:
        server.address = server.url + "/v1"
        asked = judge(server, tmp_path, timeout_s=20.0, max_retries=0)
        assert ask(asked, ["p"], ["a"]) == [None]
    caplog.text.encode()  # no half characters in the log


@pytest.mark.parametrize("half", ["\ud83d", "a\udc00b"])
def test_half_a_character_costs_its_own_row(half, serve, tmp_path):
    server = serve(grade)
    asked = judge(server, tmp_path)
    assert ask(asked, [half, "p", "q"], ["a", half, "b"]) == [None, None, 0.8]
    assert (len(server.asked), asked.counts["failed"]) == (1, 2)


ECHOES = {
    "as it was sent": f"you sent Bearer {KEY}",
    "in capital letters": f"key {KEY.upper()} is unknown",
    "a part": f"no key begins with {KEY[:10]}",
    "in a dict": json.dumps({"headers": {"authorization": f"Bearer {KEY}"}}),
    "far behind": "x" * 195 + KEY,
}


@pytest.mark.parametrize("said", ECHOES)
@pytest.mark.parametrize("status", [401, 500, 200])
def test_a_key_that_a_server_repeats_is_masked(said, status, serve, tmp_path, caplog, capfd):
    text = ECHOES[said]
    first = reply(text + "\nScore: 8") if status == 200 else (status, text.encode(), {})
    asked = judge(serve(lambda *_: first), tmp_path, max_retries=0)
    problem = ""
    try:
        ask(asked, ["p"], ["a"])
        ask(asked, ["p"], ["b"])
    except ValueError as error:
        problem = str(error)
    files = read_files(tmp_path).decode(errors="replace")
    shown = (problem + files + caplog.text + "".join(capfd.readouterr())).lower()
    assert KEY[:9] not in shown
    assert status == 500 or "<masked>" in shown or said == "far behind"


@pytest.mark.parametrize(
    "given",
    [
        *("sk-123", "gsk_SECRETabcdefghijk", "secret", "Key", "a" * 20, "AKIAIOSFODNN7EXAMPLE"),
        *("ABCDEFGHIJKLMNOPQRSTUVWX", "A" * 41, "A1B2C3D4E5F6G7H8", "1KEY", "MINE ", "MINE\n", ""),
    ],
)
def test_a_key_in_place_of_its_variable_is_rejected_without_showing_it(given, tmp_path):
    with pytest.raises(ValueError, match="not the key itself") as caught:
        LLMJudge("http://h/v1", "m", CRITERIA, cache_dir=None, api_key_env=given)
    assert len(given) < 4 or given.strip() not in str(caught.value)


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret", "sk-sch\u00fcssel", "\x1bsk-secret"])
def test_a_key_that_no_header_can_carry_is_rejected_without_showing_it(key, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(ValueError, match="JUDGE_KEY holds characters") as caught:
        LLMJudge("http://h/v1", "m", CRITERIA, cache_dir=None, api_key_env="JUDGE_KEY").load()
    assert "sk" not in str(caught.value).replace("masked", "")


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"seed": float("nan")}, "not JSON"), ({"a": {1, 2}}, "not JSON")],
)
def test_extra_fields_that_are_not_json_are_rejected_at_the_start(extra, message):
    with pytest.raises(ValueError, match=message):
        LLMJudge("http://h/v1", "m", CRITERIA, extra_body=extra, cache_dir=None)


def test_a_masked_key_is_asked_for_again(tmp_path):
    extra = {"auth": {"api_key": "<masked>"}}
    made = LLMJudge("http://h/v1", "m", CRITERIA, extra_body=extra, api_key_env=None)
    with pytest.raises(ValueError, match="masked"):
        made.load()


@pytest.mark.parametrize("damage", ["other bytes", "a folder", "a link", "another table"])
def test_a_file_of_replies_that_cannot_be_used_is_named_and_left_as_it_is(
    damage, tmp_path, monkeypatch
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    path, other = tmp_path / "cache" / CACHE_FILE, tmp_path / "other"
    path.parent.mkdir()
    if damage == "other bytes":
        path.write_bytes(b"reply " * 1000)
    elif damage == "a folder":
        path.mkdir()
    elif damage == "a link":
        path.symlink_to(other)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE replies (name TEXT)")
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(ValueError, match=rf"cache_dir: {path}"):
        judge(SimpleNamespace(address="http://h/v1"), tmp_path)
    assert (path.read_bytes() if path.is_file() else b"") == before
    assert not other.exists()


def test_a_file_of_replies_that_is_damaged_during_a_run_costs_requests_only(
    serve, tmp_path, caplog
):
    server = serve(grade)
    asked = judge(server, tmp_path)
    (tmp_path / "cache" / CACHE_FILE).write_bytes(b"reply " * 1000)
    for text in "ab":
        assert ask(asked, ["p"], [text]) == [0.8]
    assert len(server.asked) == 2
    assert caplog.text.count("cannot be used") == 1


def test_writers_of_one_file_of_replies_lose_nothing(tmp_path):
    # Each statement has a connection, so that threads are to SQLite what processes are.
    replies, again = Replies(tmp_path), Replies(tmp_path)
    replies.prepare()
    again.prepare()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: (replies, again)[n % 2].put(str(n), f"reply {n}"), range(200)))
    assert [again.get(str(n)) for n in range(200)] == [f"reply {n}" for n in range(200)]
    assert not replies.failed


def test_rubbish_abstains_and_is_counted_and_not_kept(serve, tmp_path):
    said = ["I like it", "Score: 11", "Score: -1", "Score: 8/100", "Score: 5\nor 6", ""]
    server = serve(lambda text, times: reply(said[int(text[-1])]))
    texts = list(map(str, range(len(said))))
    asked = judge(server, tmp_path, template="{criterion} {completion}")
    for _ in range(2):
        assert ask(asked, ["p"] * len(said), texts) == [None] * len(said)
    assert asked.counts["unparsed"] == asked.counts["calls"] == 2 * len(said)


def test_one_missing_mark_leaves_the_completion_out(serve, tmp_path):
    asked = judge(serve(lambda text, times: reply("Score: 4" if "short" in text else "?")),
                  tmp_path, CRITERIA)  # fmt: skip
    assert ask(asked, ["p"], ["a"]) == [None]


def test_a_server_that_dies_is_given_up_after_a_few(serve, tmp_path):
    server = serve(grade)
    asked = judge(server, tmp_path, max_concurrent_requests=2, max_retries=1)
    assert ask(asked, ["p"], ["a"]) == [0.8]
    server.shutdown()
    server.server_close()
    assert ask(asked, ["p"] * 20, list(map(str, range(20)))) == [None] * 20
    assert asked.counts["failed"] == 20
    assert asked.counts["calls"] <= 1 + 3 * 2


def test_the_budget_ends_the_asking_with_a_line_and_survives_a_checkpoint(serve, tmp_path, caplog):
    server = serve(grade)
    asked = judge(server, tmp_path, max_requests=2, max_concurrent_requests=1)
    with caplog.at_level(logging.WARNING):
        rewards = ask(asked, ["p"] * 4, list("abcd"))
    assert sorted(map(str, rewards)) == ["0.8", "0.8", "None", "None"]
    assert caplog.text.count("is spent") == 1
    resumed = judge(server, tmp_path, max_requests=2)
    resumed.load_state_dict(asked.state_dict())
    assert ask(resumed, ["p"], ["new"]) == [None]
    assert len(server.asked) == 2


def test_each_try_again_counts_as_a_request(serve, tmp_path):
    server = serve(lambda text, times: (500, b"", {}))
    asked = judge(server, tmp_path, max_requests=2, max_retries=9)
    assert ask(asked, ["p"] * 2, ["a", "b"]) == [None] * 2
    assert (len(server.asked), asked.counts["over_budget"]) == (2, 2)


def test_a_server_gets_no_key_and_no_header_of_another_one(monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID"):
        monkeypatch.setenv(f"OPENAI_{name}", KEY)
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", f"Authorization: Bearer {KEY}\nX-Other: {KEY}")
    with HostileServer(lambda: send_reply(CHAT)) as server:
        asked = LLMJudge(server.url, "m", CRITERIA, cache_dir=None, api_key_env=None)
        assert ask(asked, ["p"], ["a"]) == [0.8]
    assert KEY.encode() not in b"".join(server.requests)


@pytest.mark.parametrize(
    "header",
    [
        b"Retry-After: " + value
        for value in (b"nan", b"-1", b"1e999", b"x" * 9000, b"\xff", b"9" * 99)
    ]
    + [b"Retry-After: Fri, 31 Dec 99999999999 23:59:59 GMT", b"x-should-retry: \xff"]
    + [b"Content-Type: \xff;;=", b"Location: http://[", b"Content-Encoding: \xff"],
)
@pytest.mark.parametrize("status", [b"200 \xff", b"307 a", b"429 a", b"999 a"])
def test_a_completion_abstains_whatever_headers_a_server_sends(status, header, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    answer = b"HTTP/1.1 " + status + b"\r\n" + header + b"\r\nContent-Length: 2\r\n\r\n{}"
    with HostileServer(lambda: [answer]) as server:
        asked = LLMJudge(server.url, "m", CRITERIA, cache_dir=None, api_key_env=None, max_retries=1)
        asked.counts["answered"] = 1
        assert ask(asked, ["p"], ["a"]) == [None]


def test_requests_are_on_their_way_before_the_rewards_are_needed(serve, tmp_path):
    arrived = threading.Event()

    def note(text, times):
        arrived.set()
        return grade(text, times)

    scorer = Scorer({"judge": Reward(judge(serve(note), tmp_path))})
    pending = scorer._start(
        {"prompts": ["p"] * 2, "completions": ["a", "b"]}, {}, 2, {}, 0, range(1)
    )
    assert arrived.wait(20)  # before any reward is requested
    assert pending.wait().total.tolist() == [[0.8, 0.8]]


def test_a_template_that_names_no_column_is_an_error(serve, tmp_path):
    asked = judge(serve(grade), tmp_path, template="{level} {prompt} {completion}")
    with pytest.raises(ValueError, match="which are no columns"):
        ask(asked, ["p"], ["a"])


def test_https_for_a_server_without_tls_ends_in_one_line(serve, tmp_path):
    asked = judge(serve(grade), tmp_path)
    asked.url = asked.url.replace("http://", "https://")
    with pytest.raises(RequestRejected, match="Use http:// for a server without TLS"):
        ask(asked, ["p"], ["a"])
    asked.counts["answered"] = 1  # a proxy may break later: the row is left out
    assert ask(asked, ["p"], ["a"]) == [None]


def test_a_server_that_refuses_ends_in_one_line_without_the_key(serve, tmp_path, capfd):
    server = serve(lambda text, times: (401, b"wrong key", {}))
    scorer = Scorer({"j": Reward(judge(server, tmp_path, max_concurrent_requests=2))})
    with pytest.raises(RewardFailure, match="401: wrong key") as caught:
        scorer(["p"] * 4, list("abcd"), {}, 2)
    printed = str(caught.value) + "".join(capfd.readouterr())
    assert "environment variable JUDGE_KEY" in printed
    assert KEY not in printed
    assert "never retrieved" not in printed
    assert "\n" not in str(caught.value)


def test_the_key_is_in_no_file_and_no_copy(serve, tmp_path):
    asked = judge(serve(grade), tmp_path)
    ask(asked, ["p"], ["a"])
    assert KEY.encode() not in pickle.dumps(copy.deepcopy(asked).__getstate__()["body"])
    assert KEY not in repr(vars(asked))
    files = read_files(tmp_path)
    assert b"Score: 8" in files
    assert KEY.encode() not in files


def test_columns_of_the_data_can_be_shown_to_the_judge(serve, tmp_path):
    server = serve(grade)
    asked = judge(server, tmp_path, template="{completion} or {answer}?")
    ask(asked, ["p"], ["a"], answer=["gold"])
    assert server.asked == ["a or gold?"]
    with pytest.raises(ValueError, match=r"names \['answer'\]"):
        ask(asked, ["p"], ["a"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_url": "api.openai.com"}, "is no address"),
        ({"base_url": "http://h:99999/v1"}, "is no address"),
        ({"base_url": "https://me:pass@host/v1"}, "must not hold"),
        ({"api_key_env": "sk-123"}, "not the key itself"),
        ({"api_key_env": "UNSET_KEY"}, "UNSET_KEY is not set"),
        ({"template": "{prompt}"}, "must name completion"),
        ({"template": "{completion} {"}, "brace"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests"),
        ({"cache_dir": "/proc/none/x"}, "cache_dir"),
        ({"criteria": {}}, "at least one criterion"),
    ],
)
def test_wrong_settings_are_refused_in_a_line(settings, message, tmp_path):
    known = {
        "base_url": "http://h/v1",
        "model": "m",
        "criteria": CRITERIA,
        "cache_dir": str(tmp_path),
    }
    with pytest.raises(ValueError, match=message) as caught:
        LLMJudge(**known | {"api_key_env": None} | settings).load()
    assert "sk-123" not in str(caught.value)


@pytest.mark.parametrize("line", ["Score: 7", "score = 7.0", "**Score:** 7/10", "- Score: 7 / 10."])
def test_a_score_is_read_however_it_is_dressed(line):
    found = SCORE.match(line)
    assert found is not None
    assert float(found[1]) == 7
