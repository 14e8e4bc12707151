"""YAML that would exhaust the stack or the memory is rejected before it is composed."""

from pathlib import Path

import pytest

from litgrpo.text.yaml_limits import MAX_DEPTH, MAX_NODES, TooLarge, check_limits

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
