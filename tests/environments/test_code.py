import pickle

import pytest
from transformers.utils import get_json_schema

from litgrpo.environments import code
from litgrpo.environments.code import run_python
from litgrpo.environments.tools import Tools
from litgrpo.workers import sandbox
from litgrpo.workers.sandbox import bubblewrap

PATH = "litgrpo.environments.code.run_python"
in_sandbox = pytest.mark.skipif(
    not sandbox.available(), reason=f"sandbox: {sandbox.unavailable_reason()}"
)


@in_sandbox
def test_a_tool_runs_code_and_says_what_it_printed_or_why_it_ended(monkeypatch):
    tool = run_python
    assert tool("print(3 * 4)") == "12"
    assert tool("1 / 0") == "ZeroDivisionError: division by zero"
    assert tool("raise SystemExit(3)") == "[exit code 3]"
    cut = "[output cut off after 2,000 characters]"
    assert tool("print('x' * 10_000_000)") == "x" * 2_000 + "\n" + cut
    assert tool("print('x' * 10_000_000)\n1 / 0") == "ZeroDivisionError: division by zero"
    assert "No such file" in tool("open('/etc/passwd')")
    monkeypatch.setattr(code, "TIMEOUT_S", 2.0)
    assert tool("while True: print('x' * 99)").endswith(
        "[output cut off after 2,000 characters]\n[killed: exceeded the limit of seconds]"
    )


@in_sandbox
def test_its_signature_and_docstring_are_a_tools_and_it_can_be_sent_to_a_worker():
    tool = run_python
    schema = get_json_schema(tool)["function"]
    assert schema["name"] == "run_python"
    assert list(schema["parameters"]["properties"]) == ["code"]
    assert pickle.loads(pickle.dumps(tool)) is tool


def test_without_a_sandbox_the_tool_is_rejected_at_construction(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    bubblewrap.unavailable_reason.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"run_python .*apt install"):
            Tools(functions=[PATH])
    finally:
        bubblewrap.unavailable_reason.cache_clear()
