import os
import subprocess
import sys

from litgrpo.cli.console import survive_closed_output
from tests.support.command_line import ROOT

SCRIPT = """
import sys
from litgrpo.cli.console import survive_closed_output
survive_closed_output()
for n in range(20000):
    print(n)
sys.stdout.flush()
print("done", file=sys.stderr)
"""


def test_a_program_continues_after_its_output_is_closed():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    talk = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    with subprocess.Popen(talk, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == "done\n"
    assert process.returncode == 0


def test_streams_that_a_notebook_or_test_replaced_are_left_alone(capsys):
    before = sys.stdout, sys.stderr
    survive_closed_output()
    assert before == (sys.stdout, sys.stderr)
