"""An environment from a path, from a class with arguments, or as an object."""

from dataclasses import dataclass

import pytest
from jsonargparse import Namespace

from litgrpo.environments import TagFormat, Tools
from litgrpo.instantiate import instantiate_environment

TOOLS = "litgrpo.environments.Tools"
CALCULATE = "litgrpo.environments.examples.calculate"


@dataclass
class Plain:
    """Takes an argument, or none."""

    size: int = 3


def test_an_object_is_taken_as_it_is():
    plain = Plain()
    assert instantiate_environment(plain) is plain


def test_a_path_and_a_class_with_arguments_are_made():
    assert instantiate_environment(f"{__name__}.Plain") == Plain(3)
    assert instantiate_environment({"class_path": f"{__name__}.Plain"}) == Plain(3)
    tags = {"class_path": "litgrpo.environments.TagFormat", "init_args": {"call_tag": "calc"}}
    arguments = Namespace(functions=[CALCULATE], call_format=tags)
    made = instantiate_environment(Namespace(class_path=TOOLS, init_args=arguments))
    assert isinstance(made, Tools)
    assert made.call_format == TagFormat(call_tag="calc")


def test_arguments_may_be_beside_the_class_and_a_public_class_may_be_named_alone():
    beside = {"class_path": "Tools", "functions": [CALCULATE], "call_cost": 0.5}
    below = {"class_path": TOOLS, "init_args": {"functions": [CALCULATE], "call_cost": 0.5}}
    assert vars(instantiate_environment(beside))["call_cost"] == 0.5
    assert instantiate_environment(beside).tools == instantiate_environment(below).tools


def test_a_function_is_no_environment():
    with pytest.raises(ValueError, match=r"math\.sqrt is not a class"):
        instantiate_environment("math.sqrt")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"functions": ["litgrpo.environments.examples.calculat"]}, "did you mean 'calculate'"),
        (
            {"function": []},
            r"has no argument 'function' \(did you mean 'functions'\?\); it takes f",
        ),
        ({"functions": [CALCULATE], "call_cost": "much"}, "call_cost.*much"),
        ({}, "Tools has no tools"),
    ],
)
def test_a_class_that_refuses_its_arguments_says_why(arguments, says):
    with pytest.raises(ValueError, match=says):
        instantiate_environment({"class_path": TOOLS, "init_args": arguments})


def test_a_class_that_is_nowhere_is_named():
    with pytest.raises(ValueError, match="has no 'Nothing'"):
        instantiate_environment({"class_path": "litgrpo.environments.Nothing"})


def test_an_overlay_without_the_class_is_refused_with_what_to_write():
    with pytest.raises(ValueError, match="names the class again"):
        instantiate_environment({"init_args": {"call_cost": 0.1}})
