"""The public API is a short list of documented names, and every one of them exists."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import litgrpo

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
# Adding or removing a name is a decision: change this list and docs/api.md with it.
NAMES = [
    "Chat",
    "Clipped",
    "ColocatedEngine",
    "Controllers",
    "Criterion",
    "DialogueScores",
    "EntropyTarget",
    "EpisodeSettings",
    "Evaluation",
    "GRPO",
    "ImportanceCorrection",
    "KLTarget",
    "LLMJudge",
    "LoRA",
    "LocalEngine",
    "Normalized",
    "Objective",
    "PairData",
    "Precision",
    "PromptData",
    "ReferenceSync",
    "Reward",
    "RewardModel",
    "Rubric",
    "SFT",
    "Sampling",
    "Scratch",
    "ServerEngine",
    "Source",
    "StaticEngine",
    "Tools",
    "UpdateConfig",
    "WarmupCosine",
    "WarmupLinear",
    "export",
]


def test_the_public_names_are_these():
    assert sorted(litgrpo.__all__) == sorted(NAMES)
    assert set(litgrpo.PUBLIC) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name):
    assert inspect.getdoc(getattr(litgrpo, name))
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="Learner"):
        litgrpo.Learner  # noqa: B018


def test_importing_the_package_does_not_import_torch():
    code = "import sys, litgrpo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_type_checkers_read_its_annotations():
    assert (Path(litgrpo.__file__).parent / "py.typed").exists()
