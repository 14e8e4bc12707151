"""The house rules: who may import whom, how large things may be, and that every page is true."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from litgrpo.algorithm.objective import Objective, PerToken
from litgrpo.models.loading import Precision, as_policy
from litgrpo.rewards.runner.in_process import InProcessRunner
from litgrpo.rollout.engines.local import LocalEngine
from tests.conftest import byte_tokenizer, tiny_model
from tests.house import pages
from tests.house.__main__ import parts_of
from tests.house.iteration_trace import IterationTrace
from tests.house.source import File, circles, files_of
from tests.modules.test_grpo import batches, module, train, vowels

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "litgrpo"
FILES = files_of(SOURCE)
# A file imports its own room and rooms of a lower number, nothing else of the package.
LAYER = {
    **dict.fromkeys(("arguments", "types", "tensors", "text"), 0),
    **dict.fromkeys(("parallel", "processes", "sandbox"), 1),
    **dict.fromkeys(("algorithm", "models", "data", "environments"), 2),
    **dict.fromkeys(("rollout", "rewards"), 3),
    **dict.fromkeys(("learner", "evaluation"), 4),
    **dict.fromkeys(("checks", "doctor"), 5),
    "callbacks": 6,
    **dict.fromkeys(("modules", "checkpointing"), 7),
    "cli": 8,
    "tools": 9,
    "program": 10,
    "__main__": 11,
}
# {package: rooms, or files, that may import it}
MAY_IMPORT = {
    "lightning": (
        *("modules/", "callbacks/", "checkpointing/", "cli/", "tools/", "program.py"),
        *("parallel/xla/", "parallel/fsdp/"),
    ),
    "torch_xla": ("parallel/",),
    "vllm": ("rollout/engines/",),
    "multiprocessing": ("processes/", "parallel/xla/"),
    # Trainings of their own; what a reward's author gave to be run.
    "subprocess": (
        "sandbox/bubblewrap.py",
        "tools/compare.py",
        "tools/plan/measuring.py",
        "processes/",
        "sandbox/",
        "rewards/library/verify.py",
    ),
}
NAMELESS = {"utils", "common", "helpers", "base", "registry", "misc"}
# {file: the test that covers it, where that is not the file of its name}
TESTED_ELSEWHERE = {
    "__main__.py": "tests/test_program.py",
    "cli/verbs.py": "tests/test_program.py",
    "cli/plan_keys.py": "tests/tools/plan/test_command.py",
    # What a model computes does not depend on how: each kind of model is held against plain rows.
    "models/attention/cross.py": "tests/models/test_seq2seq.py",
    "models/attention/packed_flash.py": "tests/models/attention/test_packed_shared_prefix.py",
    "models/attention/static.py": "tests/rollout/engines/test_static.py",
    "models/causal_static.py": "tests/rollout/engines/test_static.py",
    "models/policy.py": "tests/models/test_causal.py",
    "models/static_decoder.py": "tests/rollout/engines/test_static.py",
    "models/reference.py": "tests/learner/test_schedules.py",
    "parallel/random_state.py": "tests/parallel/test_device.py",
    "data/files.py": "tests/data/test_sources.py",
    "algorithm/estimators.py": "tests/algorithm/test_advantages.py",
    "algorithm/weighting.py": "tests/algorithm/test_objective.py",
    "models/sharded.py": "tests/parallel/fsdp/test_strategy.py",
    "rollout/gathered.py": "tests/parallel/fsdp/test_strategy.py",
    "parallel/machine.py": "tests/parallel/test_device.py",
    "parallel/memory.py": "tests/parallel/test_device.py",
    "modules/optimizers.py": "tests/modules/test_trainer.py",
    "learner/skipped_steps.py": "tests/learner/test_learner.py",
    "rollout/filters.py": "tests/rollout/test_sampling.py",
    "rollout/engines/served.py": "tests/rollout/engines/test_server.py",
    "rollout/engines/vllm_server.py": "tests/rollout/engines/test_server.py",
    "rollout/engines/publishing.py": "tests/rollout/engines/test_server.py",
    "rollout/engines/vllm_uniforms.py": "tests/vllm/test_vllm.py",  # runs in vLLM only
    "rollout/engines/stopped.py": "tests/rollout/test_stop_strings.py",
    # They run in sandboxes only.
    "sandbox/examinee.py": "tests/rewards/test_code.py",
    "sandbox/inside.py": "tests/sandbox/test_bubblewrap.py",
    "sandbox/referee.py": "tests/rewards/test_code.py",
    "sandbox/scorer.py": "tests/rewards/library/test_reasoning_gym.py",
    "sandbox/system_calls.py": "tests/sandbox/test_bubblewrap.py",
    "rewards/public.py": "tests/rewards/test_lookup.py",
    "environments/failures.py": "tests/environments/test_worker_pool.py",
    "processes/failures.py": "tests/processes/test_worker.py",
    "rewards/runner/troubles.py": "tests/rewards/runner/test_runner.py",
    "rewards/runner/marks.py": "tests/rewards/runner/test_runner.py",
    "rewards/runner/coroutines.py": "tests/rewards/runner/test_in_process.py",
    "rewards/runner/event_loop.py": "tests/rewards/runner/test_in_process.py",
    "rewards/runner/calls.py": "tests/rewards/runner/test_runner.py",
    "rewards/parts.py": "tests/rewards/test_scorer.py",
    "rewards/shaping.py": "tests/rewards/test_scorer.py",
    "doctor/rule.py": "tests/doctor/test_diagnosis.py",
    "doctor/finding.py": "tests/doctor/test_diagnosis.py",
    **dict.fromkeys(
        [f"doctor/rules_{name}.py" for name in ("signal", "reward", "update", "text")],
        "tests/doctor/test_rules.py",
    ),
    "doctor/trend.py": "tests/doctor/test_rules.py",
    **dict.fromkeys(
        [f"tools/plan/{name}.py" for name in ("on_devices", "telling", "data_here")],
        "tests/tools/plan/test_command.py",
    ),
}
LINES_OF_FILE, LINES_OF_FUNCTION, METHODS, ABSTRACT = 600, 60, 20, 5
FILES_OF_ITERATION, LINES_OF_ITERATION = 20, 5_000
IFS, IFS_OF_CORE, CORE = 4.5, 3.5, ("algorithm", "learner", "rollout")
names = [file.name for file in FILES]
each_file = pytest.mark.parametrize("file", FILES, ids=names)


def forbidden(file: File) -> Iterator[str]:
    for name in file.imports():
        package = name.split(".")[0].replace("pytorch_lightning", "lightning")
        if package in MAY_IMPORT and not file.name.startswith(MAY_IMPORT[package]):
            yield f"{file.name} must not import {package}"
        if not name.startswith("litgrpo.") or file.room == "__init__":
            continue
        there = name.split(".")[1]
        if there != file.room and LAYER.get(there, 0) >= LAYER[file.room]:
            yield f"{file.name} must not import {name}"


def test_imports_point_down_and_large_packages_stay_in_their_rooms():
    assert not [line for file in FILES for line in forbidden(file)]


def test_an_import_that_points_up_is_found(tmp_path):
    bad = tmp_path / "rewards" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("from litgrpo.modules import grpo\nimport lightning\n")
    assert len(list(forbidden(File(bad, tmp_path)))) == 2


def test_no_files_import_each_other():
    assert not circles(FILES)


def test_a_circle_is_found_also_where_it_is_only_of_types(tmp_path):
    for name, content in {
        "a.py": "from litgrpo.b import x\n",
        "b.py": "if TYPE_CHECKING:\n    import litgrpo.c\n",
        "c.py": "from .a import y\n",
        "d.py": "def f():\n    import litgrpo.d\n    import litgrpo.a\n",
    }.items():
        (tmp_path / "litgrpo").mkdir(exist_ok=True)
        (tmp_path / "litgrpo" / name).write_text(content)
    assert circles(files_of(tmp_path / "litgrpo")) == [["litgrpo.a", "litgrpo.b", "litgrpo.c"]]


@each_file
def test_a_file_and_its_functions_can_be_read_at_a_sitting(file):
    assert file.lines <= LINES_OF_FILE
    assert file.path.stem not in NAMELESS
    long = {name: size for name, size in file.functions if size > LINES_OF_FUNCTION}
    assert not long


def test_classes_are_small_and_ask_little_of_their_subclasses():
    classes = [each for file in FILES for each in file.classes()]
    assert not {each.name: len(each.methods) for each in classes if len(each.methods) > METHODS}
    assert not {each.name: each.abstract for each in classes if each.abstract > ABSTRACT}


@pytest.mark.parametrize("room", [None, *CORE])
def test_code_branches_seldom(room):
    chosen = [file for file in FILES if room in (None, file.room)]
    ifs, lines = sum(file.ifs for file in chosen), sum(file.lines for file in chosen)
    assert 100 * ifs / lines <= (IFS if room is None else IFS_OF_CORE)


@each_file
def test_nothing_is_guessed_at_or_left_unfinished(file):
    assert not re.search(r"\bTODO\b|\bFIXME\b|NotImplementedError", file.text)
    for node in file.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hasattr"
            assert not (node.func.id == "getattr" and len(node.args) == 3)
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass))


def without_test() -> list[str]:
    """Files whose test neither mirrors their place nor is named above."""
    missing = []
    for file in FILES:
        path = Path(file.name)
        mirror = ROOT / "tests" / path.parent / f"test_{path.name}"
        other = ROOT / TESTED_ELSEWHERE.get(file.name, mirror)
        if path.name != "__init__.py" and not (mirror.exists() or other.exists()):
            missing.append(file.name)
    return missing


def test_every_file_has_its_test_file():
    assert not without_test()


def test_a_file_that_is_tested_elsewhere_is_there():
    assert not [name for name in TESTED_ELSEWHERE if name not in names]


def test_nothing_in_the_core_depends_on_what_is_beside_the_project():
    assert not [file.name for file in FILES if "../shared" in file.text]


def recipes() -> list[Path]:
    return sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("path", recipes(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_recipe_opens_with_what_machine_and_expected_result(path):
    lines = path.read_text().splitlines()
    assert all(line.startswith("# ") for line in lines[:3])
    assert not lines[3].startswith("#")
    assert yaml.safe_load(path.read_text())


def test_every_name_path_key_and_command_of_a_page_is_there():
    found = [f"{page.name}: {line}" for page in pages.pages() for line in pages.stale(page)]
    assert not found, "\n".join(found)


def broken(text: str) -> list[str]:
    """Lines after which a page is not shown as it was meant."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    cut = re.findall(r"^\|.*\|\n\n(\|.*\|)\n(?!\|[-|: ]+\|$)", text, flags=re.MULTILINE)
    glued = re.findall(r"^[^|\n].*\n(\*\*[^*\n]+\.\*\*.*)$", text, flags=re.MULTILINE)
    return cut + glued


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: path.name)
def test_tables_and_paragraphs_of_a_page_are_whole(page):
    assert not broken(page.read_text())


def test_a_table_in_two_parts_and_a_paragraph_without_its_blank_line_are_found():
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert broken(f"{table}\n| 3 | 4 |\n| 5 | 6 |\n") == ["| 3 | 4 |"]
    assert broken("One.\n**Two.** More.\n") == ["**Two.** More."]
    assert not broken(f"{table}\n{table}\nOne.\n\n**Two.** More.\n")


@pytest.mark.parametrize("page", pages.pages(), ids=lambda path: path.name)
def test_files_that_a_page_links_to_exist(page):
    linked = re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
    linked = [target for target in linked if not target.startswith("_made/")]  # of the site alone
    assert not [target for target in linked if not (page.parent / target).exists()]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("`litgrpo.nowhere.Thing` and `litgrpo.GRPO`", "import litgrpo.nowhere.Thing"),
        ("`objectives/objective.py` and `algorithm/objective.py`", "file objectives/objective.py"),
        ("`configs/none.yaml` and `configs/quickstart.yaml`", "file configs/none.yaml"),
        ("`model.learning.inner_epochs` and `model.update.inner_epochs`", "key model.learning"),
        ("`trainer.max_epoch: 1` and `--trainer.max_epochs 1`", "key trainer.max_epoch"),
        ("```bash\npython -m tests.nothing\npython -m tests.house\n```", "command 'python -m"),
        (
            "```bash\npython cli.py export a\npython cli.py export a b\n```",
            "command 'python cli.py export a': exit code 2",
        ),
        (
            "```bash\npython cli.py fit -c configs/quickstart.yaml --model.group_sise 2\n```",
            "command 'python cli.py fit",
        ),
    ],
)
def test_a_stale_name_is_found_and_a_good_one_is_not(text, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [])
    page = tmp_path / "page.md"
    page.write_text(text)
    (found,) = pages.stale(page)
    assert found.startswith(line)


def traced(folder: Path) -> dict[str, list[str]]:
    """Files of one iteration like the quickstart's, without what only makes it faster or safer."""
    grpo = module(
        reward=vowels,
        objective=Objective(weighting=PerToken()),
        engine=LocalEngine(fused=False),
        reward_runner=InProcessRunner(),
        lr_scheduler=torch.optim.lr_scheduler.ConstantLR,
        max_iterations=3,
    )
    plain = Precision(share_prompts=False, selective_recompute=False, kernels="plain")
    grpo.policy = as_policy(tiny_model("gemma2"), byte_tokenizer(), precision=plain)
    report = folder / "trace.json"
    trace = {"callbacks": [IterationTrace(str(report))]}
    train(grpo, batches("a", "hello there", "xyz"), **trace)
    found = json.loads(report.read_text())
    return parts_of(found["step"], found["around"])


def test_one_iteration_passes_through_few_files_and_lines(tmp_path):
    step = traced(tmp_path)["step"]
    lines = {file.name: file.lines for file in FILES}
    assert {"modules/grpo.py", "learner/learner.py", "tensors.py"} <= {*step}
    assert len(step) <= FILES_OF_ITERATION, step
    assert sum(lines[name] for name in step) <= LINES_OF_ITERATION
