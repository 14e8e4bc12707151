"""House rules: import layers, no import cycles, and pages that name only what exists."""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from litgrpo import GRPO, SFT, PairData, PromptData
from tests.house import pages
from tests.house.source import File, files_of, import_cycles

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "litgrpo"
FILES = files_of(SOURCE)
MODULES = ("grpo", "sft", "hyper_parameters", "run_setup", "initial_policy")
# A file imports its own package and packages of a lower number, nothing else of litgrpo. A file
# that is named here has a separate number, also for files of its package.
LAYER = {
    **dict.fromkeys(("arguments", "foreign_names", "types", "tensors", "text", "temporary"), 0),
    **dict.fromkeys(("http_client", "argument_types"), 1),
    "training/lightning_compat": 0,
    **dict.fromkeys(("instantiate", "distributed", "workers"), 1),
    **dict.fromkeys(("xla", "algorithms", "models", "environments", "data"), 2),
    **dict.fromkeys(("rollout", "rewards"), 3),
    **dict.fromkeys(("training", "evaluation"), 4),
    "checks": 5,
    "callbacks": 6,
    "checkpointing": 7,
    # The modules, and what assembles them.
    **dict.fromkeys([f"training/{name}" for name in MODULES], 8),
    "cli": 9,
    "tools": 10,
    "cli/main": 11,
    "__main__": 12,
}
# Nothing in the core imports tools. The CLI registers one callback of theirs.
ALLOWED_UPWARD = {("cli/parser.py", "litgrpo.tools.doctor.callback.Doctor")}
# {library: packages, or files, that may import it}
MAY_IMPORT = {
    "lightning": (
        *("training/", "data/", "callbacks/", "checkpointing/", "cli/", "tools/"),
        *("xla/", "distributed/fsdp/"),
    ),
    "torch_xla": ("xla/",),
    "vllm": ("rollout/engines/",),
    "multiprocessing": ("workers/", "xla/"),
    # They start separate trainings, or run code from the author of a reward.
    "subprocess": (
        "workers/",
        "tools/compare.py",
        "tools/plan/measuring.py",
    ),
}
NAMELESS = {"utils", "common", "helpers", "registry", "misc"}
names = [file.name for file in FILES]
each_file = pytest.mark.parametrize("file", FILES, ids=names)


def layer_of(module: str) -> int:
    """Layer of a module's dotted path, without the package's name."""
    parts = module.split(".")
    return LAYER.get("/".join(parts[:2]), LAYER.get(parts[0], 0))


def forbidden(file: File) -> Iterator[str]:
    own_layer = layer_of(file.module.removeprefix("litgrpo."))
    for name in file.imports():
        package = name.split(".")[0].replace("pytorch_lightning", "lightning")
        if package in MAY_IMPORT and not file.name.startswith(MAY_IMPORT[package]):
            yield f"{file.name} must not import {package}"
        if not name.startswith("litgrpo.") or file.package == "__init__":
            continue
        module = name.removeprefix("litgrpo.")
        same_package = module.split(".")[0] == file.package
        if (file.name, name) in ALLOWED_UPWARD:
            continue
        if layer_of(module) > own_layer or (layer_of(module) == own_layer and not same_package):
            yield f"{file.name} must not import {name}"


def test_imports_point_down_and_large_libraries_stay_in_their_packages():
    assert not [line for file in FILES for line in forbidden(file)]


def test_an_import_that_points_up_is_found(tmp_path):
    bad = tmp_path / "rewards" / "bad.py"
    bad.parent.mkdir()
    bad.write_text("from litgrpo.training import grpo\nimport lightning\n")
    assert len(list(forbidden(File(bad, tmp_path)))) == 2


def test_no_files_import_each_other():
    # The package's own __init__ imports its names for type checkers only; they are loaded lazily.
    assert not import_cycles([file for file in FILES if file.name != "__init__.py"])


def test_an_import_cycle_is_found_even_if_it_is_for_types_only(tmp_path):
    for name, content in {
        "a.py": "from litgrpo.b import x\n",
        "b.py": "if TYPE_CHECKING:\n    import litgrpo.c\n",
        "c.py": "from .a import y\n",
        "d.py": "def f():\n    import litgrpo.d\n    import litgrpo.a\n",
    }.items():
        (tmp_path / "litgrpo").mkdir(exist_ok=True)
        (tmp_path / "litgrpo" / name).write_text(content)
    assert import_cycles(files_of(tmp_path / "litgrpo")) == [
        ["litgrpo.a", "litgrpo.b", "litgrpo.c"]
    ]


@each_file
def test_a_file_is_named_for_what_it_holds_and_nothing_is_left_unfinished(file):
    assert file.path.stem not in NAMELESS
    assert not re.search(r"\bTODO\b|\bFIXME\b|NotImplementedError", file.text)
    for node in file.nodes:
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass))


def test_every_package_has_tests():
    packages = {Path(name).parent for name in names if "/" in name}
    missing = [
        str(package)
        for package in packages
        if not list((ROOT / "tests" / package).glob("test_*.py"))
    ]
    assert not missing


def test_no_source_or_test_reads_a_folder_beside_the_repository():
    # Spelled in two parts, so that this file is not found itself.
    folder = re.compile(r"\.\./sha" r"red|parents?\b.*/ \"sha" r"red\"")
    files = [*FILES, *files_of(ROOT / "tests")]
    assert not [file.name for file in files if folder.search(file.text)]


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


OPTION = re.compile(r"(?<![\w./])(?:--)?((?:model|data|trainer|checkpoint)(?:\.[a-z_]\w*)+)")
PREFIXES = {
    name: prefix
    for prefix, owners in {"model": (GRPO, SFT), "data": (PromptData, PairData)}.items()
    for owner in owners
    for name in inspect.signature(owner).parameters
}
WITHOUT_PREFIX = re.compile(rf"(?<![\w./-])({'|'.join(PREFIXES)})\.([a-z_]\w*|$)")
NO_OPTIONS = {
    "model.lr_scheduler.step",
    "model.merge_and_unload",
    "model.resize_token_embeddings",
    "model.safetensors",
    "model.safetensors.index.json",
}


def wrong_options(file: File) -> Iterator[str]:
    """Yield the dotted options in messages of a file that a user cannot type like this."""
    inside = {
        part: isinstance(part, ast.Constant)
        for node in file.nodes
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    documented = {id(node.value) for node in file.nodes if isinstance(node, ast.Expr)}
    for node in file.nodes:
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        if id(node) in documented:  # docstrings name options relative to their class
            continue
        for name, rest in WITHOUT_PREFIX.findall(node.value):
            key = f"{PREFIXES[name]}.{name}" + f".{rest}" * bool(rest)
            before_a_field = bool(rest) or (node in inside and node.value.endswith(f"{name}."))
            whole_sentence = not rest and " " in node.value  # "... use a wider precision."
            known = pages.is_setting(key) and key not in NO_OPTIONS
            if before_a_field and not whole_sentence and known:
                yield f"{file.name}:{node.lineno}: {name}.{rest} is {key}"
        for key in OPTION.findall(node.value):
            known = key in NO_OPTIONS or pages.is_setting(key.removesuffix(".help"))
            if not known and key != node.value:
                yield f"{file.name}:{node.lineno}: {key} is not an option"


def test_every_option_in_a_message_can_be_typed_like_this():
    import_module("litgrpo.rollout.engines.vllm")  # classes that a recipe imports by their path
    import_module("litgrpo.rollout.engines.static")
    files = [file for file in FILES if file.name != "__init__.py"]  # which has dotted modules
    assert not [line for file in files for line in wrong_options(file)]


def test_an_option_without_its_prefix_and_an_unknown_one_are_found(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        '"""Docstrings say lora.rank."""\n'
        "x = 'lora.rank is 0', f'update.{x}', 'model.update.x is 1', 'Set --model.lora.rank'\n"
    )
    found = list(wrong_options(File(path, tmp_path)))
    assert sorted(line.partition(": ")[2] for line in found) == [
        "lora.rank is model.lora.rank",
        "model.update.x is not an option",
        "update. is model.update",
    ]


def test_every_file_that_a_script_of_ci_runs_exists():
    """`.ci/real` and `.ci/vllm` skip on most machines, so a moved test shows late."""
    scripts = [path for path in (ROOT / ".ci").iterdir() if path.is_file()]
    named = {
        (script.name, path)
        for script in scripts
        for path in re.findall(r"\btests/[\w/.]*\w", script.read_text())
    } | {
        (script.name, module.replace(".", "/"))
        for script in scripts
        for module in re.findall(r"-m (tests\.[\w.]+)", script.read_text())
    }
    assert named
    # `tests/xla/test_*.py` is a pattern.
    assert not [(script, path) for script, path in named if not list(ROOT.glob(f"{path}*"))]


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
    linked = [target for target in linked if "_made/" not in target]  # of the site alone
    assert not [target for target in linked if not (page.parent / target).exists()]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("`litgrpo.nowhere.Thing` and `litgrpo.GRPO`", "import litgrpo.nowhere.Thing"),
        ("`objectives/objective.py` and `algorithms/losses.py`", "file objectives/objective.py"),
        ("`configs/none.yaml` and `configs/quickstart.yaml`", "file configs/none.yaml"),
        (
            "`model.learning.epochs_per_rollout` and `model.update.epochs_per_rollout`",
            "key model.learning",
        ),
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


def test_private_names_of_libraries_are_counted(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(
        "import torch\nfrom torch._dynamo import config\n\n"
        "def _mine(x):\n    return x._cdata + x._mine\n"
    )
    file = File(path, tmp_path)
    uses = list(file.foreign_private_uses(file.own_private_names))
    assert uses == [("torch", "torch._dynamo.config"), ("torch", "_cdata")]
