"""The reference has every key and every public name, and its tables are whole."""

import re
from inspect import signature

import pytest

import litgrpo
from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.algorithms.losses import SAPO
from litgrpo.callbacks.guards import Watchdog
from litgrpo.rollout.engines.vllm import ServerEngine
from litgrpo.training.controllers import KLTarget
from tests.site import recipes, reference
from tests.site.text import cell


@pytest.fixture(scope="module")
def pages():
    return dict(reference.pages())


def keys_of(page: str, name: str) -> list[str]:
    """The first cells of the table of a class."""
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "owner"),
    [
        ("model", GRPO),
        ("model", SFT),
        ("model", SAPO),
        ("model", KLTarget),
        ("model", ServerEngine),
        ("data", PromptData),
        ("data", PairData),
        ("run", Watchdog),
    ],
)
def test_a_class_is_there_with_all_its_keys(page, owner, pages):
    assert keys_of(pages[f"reference/{page}_keys"], owner.__name__) == list(
        signature(owner).parameters
    )


def test_a_key_has_its_type_its_default_and_what_it_is(pages):
    line = "| `group_size` | `int` | `8` | completions per prompt, G (TRL: num_generations). |"
    assert line in pages["reference/model_keys"]
    assert "| `pretrained` | `str` | required | model to train:" in pages["reference/model_keys"]


def test_every_row_of_a_table_has_as_many_cells_as_its_head(pages):
    for page in pages.values():
        for table in re.findall(r"(?:^\|.*\n)+", page, flags=re.MULTILINE):
            widths = {len(re.split(r"(?<!\\)\|", row)) for row in table.splitlines()}
            assert len(widths) == 1, table


def test_every_public_name_is_documented(pages):
    groups = reference.api_groups()
    assert sorted(name for names in groups.values() for name in names) == sorted(litgrpo.PUBLIC)
    assert "autoclass:: litgrpo.Tools\n" in pages["reference/api/07_multi-turn_episodes"]
    for module, names in reference.API.items():
        documented = re.findall(r"auto\w+:: \S+\.(\w+)", pages[f"reference/{module}"])
        assert documented or not names
    assert "autofunction:: litgrpo.rewards.correctness" in pages["reference/litgrpo.rewards"]


def test_every_recipe_has_a_page_and_a_row():
    pages = dict(recipes.pages())
    files = list(recipes.CONFIGS.rglob("*.yaml"))
    assert len(pages) == len(files) + len(recipes.FOLDERS) + 1
    for file in files:
        name = recipes.page_of(file).removeprefix("recipes/")
        folder = file.parent.relative_to(recipes.CONFIGS).as_posix()
        assert f"({name}.md)" in pages[recipes.group_of(folder)]
        assert f"-c {recipes.name_of(file)}" in pages[f"recipes/{name}"]


def test_a_cell_is_one_line_and_keeps_code_as_it_is():
    assert cell("a | b\n<c> `<d> * e` * f") == r"a \| b \<c> `<d> * e` \* f"
