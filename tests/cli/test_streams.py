import os
import subprocess
import sys

from litgrpo.cli.streams import outlive_readers
from tests.cli.running import ROOT

TALKS = """
import sys
from litgrpo.cli.streams import outlive_readers
outlive_readers()
for n in range(20000):
    print(n)
sys.stdout.flush()
print("done", file=sys.stderr)
"""


def test_a_program_goes_on_when_nobody_reads_it_any_more():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    talk = [sys.executable, "-c", TALKS]
    pipe = subprocess.PIPE
    with subprocess.Popen(talk, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == "done\n"
    assert process.returncode == 0


def test_streams_that_somebody_else_has_set_are_left_alone(capsys):
    before = sys.stdout, sys.stderr
    outlive_readers()
    assert before == (sys.stdout, sys.stderr)
