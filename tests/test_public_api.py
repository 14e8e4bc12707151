"""The public API is a short list of documented names, and every one of them exists."""

import ast
import doctest
import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import litgrpo
from tests.support.pages import ROOT, blocks, name_of, pages

PAGE = ROOT / "docs" / "reference" / "api.md"
# What notebooks and pages may import from: of the others, only what `__all__` names.
PUBLIC_PACKAGES = {"", ".rewards", ".environments", ".environments.examples", ".data"}
PUBLIC_PACKAGES |= {".evaluation", ".text"}
# Adding or removing a name is a decision: change this list and docs/reference/api.md with it.
NAMES = [
    "GRPO",
    "SFT",
    "Ahead",
    "Chat",
    "Clipped",
    "ColocatedEngine",
    "Criterion",
    "DataCompletions",
    "DialogueScores",
    "EntropyTarget",
    "EpisodeSettings",
    "Evaluation",
    "ImportanceCorrection",
    "InFlight",
    "KLTarget",
    "LLMJudge",
    "LoRA",
    "LocalEngine",
    "Normalized",
    "Objective",
    "OnPolicy",
    "PairData",
    "PlainStepper",
    "Precision",
    "Progress",
    "PromptBatch",
    "PromptData",
    "ReferenceSync",
    "Reward",
    "RewardModel",
    "Rubric",
    "Sampling",
    "SaveRollouts",
    "Scratch",
    "ServerEngine",
    "Source",
    "StaticEngine",
    "StoredRollouts",
    "Summary",
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
def test_a_public_name_is_documented_with_an_example(name):
    assert re.search(r"^Examples?:$", inspect.getdoc(getattr(litgrpo, name)), re.MULTILINE)
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="Learner"):
        litgrpo.Learner  # noqa: B018


@pytest.mark.parametrize("module", ["litgrpo", "litgrpo.data", "litgrpo.data.messages"])
def test_importing_the_package_does_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_type_checkers_read_its_annotations():
    assert (Path(litgrpo.__file__).parent / "py.typed").exists()


def public_code() -> dict[str, str]:
    """Return {name: code} of the notebooks, README and the pages for users."""
    code = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        code[path.name] = "\n".join(sources)
    for page in pages():
        if name_of(page) == "docs/project/contributing.md":  # shows where in the library code goes
            continue
        for number, block in enumerate(blocks(page, "python")):
            is_session = block.startswith(">>>")
            code[f"{name_of(page)}-{number}"] = (
                doctest.script_from_examples(block) if is_session else block
            )
    return code


CODE = public_code()


@pytest.mark.parametrize("name", CODE)
def test_notebooks_and_pages_import_public_names_only(name):
    for node in ast.walk(ast.parse(CODE[name])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("litgrpo"):
            module = node.module.removeprefix("litgrpo")
            assert module in PUBLIC_PACKAGES, node.module
            public = import_module(node.module).__all__
            assert not {alias.name for alias in node.names} - {*public}
        if isinstance(node, ast.Import):
            assert not [a.name for a in node.names if a.name.startswith("litgrpo.")]
