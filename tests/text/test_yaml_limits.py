"""YAML that would exhaust the stack or the memory is rejected before it is composed."""

from pathlib import Path

import pytest

from litgrpo.text.yaml_limits import (
    MAX_DEPTH,
    MAX_NODES,
    TooLarge,
    check_limits,
    check_values,
    has_written_break,
)

CONFIGS = Path(__file__).parents[2] / "configs"


def bomb(levels: int, width: int) -> str:
    """Lines of aliases of the line before: `width ** levels` values."""
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (bomb(9, 9), r"line \d: more than 100,000 values, counting aliases"),
        (bomb(40, 2), r"line \d+: more than 100,000 values"),
        ("a: &a {b: [1, *a]}", "line 1: 'a' contains itself"),
        ("\n" + "[" * 10_000, "line 2: more than 64 nested"),
        ("\n".join(" " * n + "a:" for n in range(MAX_DEPTH + 1)), "line 65: more than 64 nested"),
        (f"[{'x, ' * (MAX_NODES + 1)}]", "more than 100,000 values"),
    ],
    ids=["nine lines", "doubling", "itself", "brackets", "mappings", "values"],
)
def test_yaml_beyond_the_limits_is_named_by_its_line(text: str, message: str) -> None:
    with pytest.raises(TooLarge, match=message):
        check_limits(text)


def test_yaml_within_the_limits_passes():
    for recipe in CONFIGS.rglob("*.yaml"):
        check_limits(recipe.read_text())
    check_limits(bomb(4, 9))
    check_limits("base: &base {rate: 1}\nfirst: *base\nsecond: {<<: *base, rate: 2}")
    check_limits("[" * MAX_DEPTH + "]" * MAX_DEPTH)


def test_values_of_the_built_in_recipes_are_what_they_look_like():
    for recipe in CONFIGS.rglob("*.yaml"):
        check_values(recipe.read_text())


@pytest.mark.parametrize(
    ("text", "is_meant"),
    [
        (r"Q: {{ prompt }}\nA:", True),
        (r"\n\n", True),
        (r"{{ prompt }}\nothers", True),
        (r"a \neq b and \nu, \not= \nabla", False),
        (r"{% if x == '\n' %}{{ prompt }}{% endif %}", False),
        ("two\nlines", False),
    ],
)
def test_a_written_line_break_is_told_from_latex_and_jinja(text, is_meant):
    assert has_written_break(text) is is_meant
