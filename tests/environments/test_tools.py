"""Episodes with tools: functions, and classes with TRL's contract."""

import asyncio
import copy
import json
import pickle
import random

import pytest

from litgrpo.environments import Environment, StepResult, TagFormat, Tools

MADE: list[str] = []  # what instances did, where a test looks


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


async def greet(name: str) -> str:
    """Say hello.

    Args:
        name: whom
    """
    await asyncio.sleep(0)
    return f"hello {name}"


class Increment:
    """Example from TRL's documentation of `environment_factory`."""

    def __init__(self) -> None:
        MADE.append("made")
        self._counter = 0

    def reset(self, target, **row) -> str | None:
        self._counter, self.target, self.row = 0, target, row
        return f" Count to {target}."

    def get_reward(self) -> float:
        return float(self._counter == self.target)

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: by how much
        """
        if step > 9:
            raise ValueError("Game over.")
        self._counter += step
        return self._counter

    async def look(self) -> str:
        """Look at the counter."""
        return str(self._counter)

    def _hidden(self) -> None: ...

    def close(self) -> None:
        MADE.append("closed")


class Dice:
    """Has no `get_reward`, and an attribute that holds the reward."""

    def reset(self, seed: int) -> None:
        self.dice, self.reward = random.Random(seed), 0.0

    def throw(self) -> int:
        """Throw a die."""
        self.reward += 0.5
        return self.dice.randint(1, 10**9)


class Judge(Dice):
    """Asks for its reward asynchronously, and abstains at first."""

    async def get_reward(self) -> float | None:
        MADE.append("asked")
        return self.reward or None


def call(name: str, /, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said_by(heard: StepResult) -> list[str]:
    return [each["content"] for each in heard.observation]


def begun(tools: Tools, **row) -> Tools:
    episode = copy.deepcopy(tools)
    episode.reset({"prompt": "q"} | row, 0)
    return episode


def test_calls_are_answered_and_a_turn_without_one_ends_the_episode():
    episode = begun(Tools(functions=[multiply, greet]))
    assert isinstance(episode, Environment)
    heard = episode.step(call("multiply", a=347, b=82) + call("greet", name=1) + call("sing"))
    assert heard.observation == [
        {"role": "tool", "name": "multiply", "content": "28454"},
        {"role": "tool", "name": "greet", "content": "error: greet: 'name' must be a string"},
        {
            "role": "tool",
            "name": "unknown",
            "content": "error: unknown tool 'sing'; tools: multiply, greet",
        },
    ]
    assert heard.calls == {"multiply": (1, 0), "greet": (1, 1), "unknown": (1, 1)}
    assert (heard.reward, heard.done) == (0.0, False)
    assert episode.step("It is 28454.") == StepResult(done=True)


def test_what_the_template_shows_are_the_schemas():
    names = [each["function"]["name"] for each in Tools(functions=[multiply, greet]).tools]
    assert names == ["multiply", "greet"]


def test_the_tools_are_told_in_the_prompt_where_it_is_asked_for():
    tools = Tools(functions=["litgrpo.environments.examples.calculate"], call_format="tags")
    assert tools.reset({}, 0) == ""
    tools.list_tools_in_prompt = True
    assert tools.reset({}, 0) == (
        "\n\nTools:\n- calculate(expression: string): Compute a value from numbers, + - * / and "
        "parentheses.\nCall a tool like this: <call>expression</call>\n"
    )


def test_the_calculator_of_the_demonstration_is_heard_inline():
    tools = Tools(functions=["litgrpo.environments.examples.calculate"], call_format="tags")
    heard = begun(tools).step("<call>347*82")  # </call> ended the turn
    assert (heard.observation, heard.calls) == ("<res>28454</res>", {"calculate": (1, 0)})
    brief = Tools(
        ["litgrpo.environments.examples.calculate"], call_format=TagFormat("c", "r"), error_text="?"
    )
    assert begun(brief).step("<c>347**82").observation == "<r>?</r>"
    assert begun(brief).step("<call>347*82").done


def test_a_class_of_trl_runs_unchanged():
    tools = Tools(factory=Increment)
    assert [each["function"]["name"] for each in tools.tools] == ["increment", "look"]
    episode = copy.deepcopy(tools)
    assert episode.reset({"prompt": "q", "target": 5, "level": 2}, 0) == " Count to 5."
    assert episode._instance.row == {"prompt": "q", "level": 2}
    heard = episode.step(call("increment", step=2) + call("look") + call("increment", step=3))
    # Plain methods first, as in TRL; the answers in the order of the calls.
    assert said_by(heard) == ["2", "5", "5"]
    assert heard.reward == 1.0
    over = episode.step(call("increment", step=10) + call("_hidden") + call("get_reward"))
    assert said_by(over)[0] == "error: Game over."
    assert all(text.startswith("error: unknown tool") for text in said_by(over)[1:])
    assert episode.step("done") == StepResult(done=True)


def test_the_rewards_of_the_turns_add_up_to_the_last_wherever_the_episode_is_cut_off():
    episode = begun(Tools(factory=Increment, call_cost=0.25), target=2)
    steps = [1, 1, 1]
    rewards = [episode.step(call("increment", step=each)).reward for each in steps]
    assert rewards == [-0.25, 0.75, -1.25]


def test_a_class_without_get_reward_has_rewards_of_zero():
    assert begun(Tools(factory=Dice)).step(call("throw")).reward == 0.0


def test_a_reward_may_be_awaited_and_may_abstain():
    MADE.clear()
    episode = begun(Tools(factory=Judge))
    assert episode.step(call("throw", x=1)).reward is None
    assert episode.step(call("throw")).reward == 0.5
    assert MADE == ["asked", "asked"]
    assert begun(Tools(factory=Judge, call_cost=0.125)).step(call("fly")).reward == -0.125


def test_an_episode_is_a_function_of_row_seed_and_what_was_said():
    tools = Tools(factory=Dice)
    first, other = copy.deepcopy(tools), copy.deepcopy(tools)
    first.reset({}, 7)
    other.reset({}, 8)
    heard = [first.step(call("throw")), other.step(call("throw"))]
    assert heard[0] != heard[1]
    first.step(call("throw"))
    first.reset({}, 7)  # again, with the same object: nothing is left of the episode before
    assert first.step(call("throw")) == heard[0]
    # A column of that name is the class's own.
    other.reset({"seed": 7}, 8)
    assert other.step(call("throw")) == heard[0]


def test_instances_are_made_for_each_episode_closed_and_never_copied():
    MADE.clear()
    tools = Tools(factory=Increment)
    assert MADE == ["made", "closed"]  # to see what it has
    episode = begun(tools, target=1)
    assert copy.deepcopy(episode)._instance is None
    assert pickle.loads(pickle.dumps(episode))._instance is None
    episode.reset({"target": 1}, 0)
    episode.close()
    episode.close()
    assert MADE == ["made", "closed"] * 3


def test_functions_and_methods_are_tools_side_by_side():
    episode = begun(Tools(functions=[multiply], factory=Increment), target=1)
    assert said_by(episode.step(call("multiply", a=2, b=3) + call("increment", step=1))) == [
        "6",
        "1",
    ]
    with pytest.raises(ValueError, match="several tools have the name 'multiply'; rename one"):
        Tools(functions=[multiply, multiply])


def test_a_column_names_the_class_of_a_row():
    tools = Tools(functions=[multiply], factory={"count": Increment, "dice": Dice})
    names = [each["function"]["name"] for each in tools.tools]
    assert names == ["multiply", "increment", "look", "throw"]
    episode = begun(tools, target=1, environment="count")
    assert episode._instance.row == {"prompt": "q"}
    assert said_by(episode.step(call("throw"))) == [
        "error: unknown tool 'throw'; tools: multiply, increment, look"
    ]
    assert not begun(tools, environment="dice").step(call("throw")).calls["throw"][1]
    with pytest.raises(ValueError, match="environment of a row is 'chess'"):
        begun(tools, environment="chess")
    with pytest.raises(ValueError, match="environment of a row is None"):
        begun(tools)


def test_a_class_takes_arguments_and_a_column_called_environment_where_there_is_one_class(tmp_path):
    facts = tmp_path / "facts.txt"
    facts.write_text("one\ntwo\n")
    path = "litgrpo.environments.examples.Search"
    tools = Tools(factory=path, kwargs={"path": str(facts)})
    assert said_by(begun(tools, environment="x").step(call("search", words="two"))) == ["two"]
    with pytest.raises(ValueError, match=r"factory Search: TypeError: .*'path'. Check kwargs"):
        Tools(factory=path)


def test_calls_above_the_limits_are_not_made():
    episode = begun(
        Tools(factory=Increment, max_calls_per_turn=2, max_calls=3, call_cost=1), target=9
    )
    heard = episode.step(call("increment", step=1) * 5)
    assert said_by(heard) == ["1", "2", "error: at most 2 calls; 3 were left out"]
    assert (heard.calls, heard.reward) == ({"increment": (3, 1)}, -5.0)
    assert said_by(episode.step(call("increment", step=1))) == ["3"]
    assert said_by(episode.step(call("increment", step=1))) == ["error: no calls are left"]
    assert said_by(episode.step(call("fly") * 2)) == ["error: no calls are left"]
    assert episode.step("done").done


def test_a_long_answer_is_cut_in_the_middle_and_says_so():
    episode = begun(Tools(functions=[greet], max_result_chars=20))
    (text,) = said_by(episode.step(call("greet", name="x" * 99 + "y")))
    assert text == "hello xxxx ... (86 characters left out) ... xxxxxxxxxy"


def test_what_cannot_be_encoded_is_replaced():
    episode = begun(Tools(functions=[greet]))
    (text,) = said_by(episode.step(call("greet", name="\ud800")))
    assert text == "hello ?"


class NoReset:
    def f(self) -> int:
        """Do."""
        return 1


class Wants:
    def reset(self, *, level: int, hard: bool = False) -> None: ...

    def f(self) -> int:
        """Do."""
        return 1


class Lists(Wants):
    def reset(self) -> list[int]:  # type: ignore[override]
        return [1]


class Undescribed(Wants):
    def g(self, x):
        """Do."""


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, r"Tools has no tools; give functions"),
        ({"factory": NoReset}, r"factory: NoReset has no method reset\(self, \*\*columns\)"),
        ({"factory": "math.pi"}, "must be a class, or make instances"),
        (
            {"factory": Undescribed},
            "tool 'g' cannot be described: Argument x is missing a type hint",
        ),
        ({"functions": ["nowhere.f"]}, "tool 'nowhere.f': cannot import module 'nowhere'"),
        (
            {"functions": [multiply], "call_format": "json"},
            "call_format is 'json'",
        ),
        ({"functions": [multiply], "call_cost": -1}, "call_cost is -1; it must be at least 0"),
        ({"functions": [multiply], "max_calls": 0}, "max_calls is 0"),
        ({"functions": [multiply], "max_calls_per_turn": 0}, "max_calls_per_turn is 0"),
        ({"functions": [multiply], "max_result_chars": 0}, "max_result_chars is 0"),
        ({"functions": [multiply], "kwargs": {"a": 1}}, "kwargs are arguments of factory"),
        ({"functions": "my.f"}, "functions is 'my.f'; it must be a list"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(settings, says):
    with pytest.raises(ValueError, match=says) as raised:
        Tools(**settings)
    assert "\n" not in str(raised.value)


def test_a_row_that_a_class_cannot_begin_with_is_refused():
    assert begun(Tools(factory=Wants), level=1)
    with pytest.raises(
        ValueError, match="reset of Wants needs the column 'level'; the data have: "
    ):
        begun(Tools(factory=Wants))
    with pytest.raises(ValueError, match=r"reset.*returned \[1\]"):
        begun(Tools(factory=Lists))
