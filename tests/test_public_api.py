"""The public API is a short list of documented names, and every one of them exists."""

import ast
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import litgrpo
from tests.house.source import files_of

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


# Exceptions that are to be removed: no entry may be added.
WITHOUT_EXAMPLE: set[str] = {"Reward", "LLMJudge", "Rubric", "RewardModel", "Criterion"}
DEFINED_TWICE: set[str] = {"Line", "Policy"}


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


@pytest.mark.parametrize("name", sorted({*NAMES} - WITHOUT_EXAMPLE))
def test_a_public_name_has_an_example(name):
    documented = inspect.getdoc(getattr(litgrpo, name))
    assert re.search(r"^Examples?:$", documented, re.MULTILINE)


def test_no_class_name_is_defined_twice():
    places = defaultdict(list)
    for file in files_of(Path(litgrpo.__file__).parent):
        for node in file.nodes:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file.name)
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not {name: files for name, files in twice.items() if name not in DEFINED_TWICE}
