"""What a shell offers after a script of `completion`."""

import shutil
import subprocess

import pytest

from litgrpo import GRPO, PromptData
from litgrpo.cli.key_help import keys_of
from litgrpo.cli.verbs import COMMANDS, LIGHTNING_VERBS
from litgrpo.tools import completion

pytest.importorskip("shtab", reason="shtab is not installed")
ASK = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_litgrpo litgrpo "${{COMP_WORDS[$COMP_CWORD]}}" "" 2> /dev/null
echo "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    import shtab

    path = tmp_path_factory.mktemp("shell") / "litgrpo"
    path.write_text(shtab.complete(completion.parser(), "bash"))
    return path


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fi", "fit"),
        ("fit --model.group", "--model.group_size"),
        (
            "fit --model.objective.surrogate.cl",
            "--model.objective.surrogate.clip_low --model.objective.surrogate.clip_high",
        ),
        ("fit -c quickstart_", "quickstart_sft"),
        ("fit --overwrite ''", "true false"),
        ("plan --chi", "--chip --chips"),
        ("doctor --fail_on wa", "warning"),
        ("doctor --model.gr", ""),
    ],
)
def test_what_bash_offers(script, words, offered):
    asked = ASK.format(script=script, words=f"litgrpo {words}")
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == offered


def test_every_verb_and_every_key_of_model_and_data_is_offered(script):
    text = script.read_text()
    assert f"_subparsers=({' '.join([*LIGHTNING_VERBS, *COMMANDS])})" in text
    keys = [*keys_of(GRPO, "model"), *keys_of(PromptData, "data")]
    assert all(f" --{key.name} " in text for key in keys)


def test_the_script_is_printed_for_the_shell_that_is_asked_for(capsys):
    completion.completion("zsh")
    assert capsys.readouterr().out.startswith("#compdef litgrpo")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(completion, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'litgrpo\[completion\]'"):
        completion.completion()
