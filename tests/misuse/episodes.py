"""Environments that are none, break, hang or contradict the rest of a recipe."""

from tests.misuse.probe import QUICK, Probe

OWN = """
import os, time
from litgrpo.environments import StepResult

class NoStep:
    def reset(self, row, seed):
        return ""

class Raises:
    def reset(self, row, seed):
        raise RuntimeError("no board")
    def step(self, said):
        return StepResult()

class Says(Raises):
    def reset(self, row, seed):
        return ""
    def step(self, said):
        return "higher"

class Hangs(Says):
    def step(self, said):
        time.sleep(60)

class Kills(Says):
    def step(self, said):
        os._exit(3)

class Good(Says):
    def step(self, said):
        return StepResult("more")
"""
RECIPE = "model: {{class_path: litgrpo.GRPO, init_args: {{{settings}}}}}\n"
BASE = (
    QUICK.replace("{recipe}", "{recipe} -c recipes/mine.yaml") + " --model.check_invariants false"
)
INLINE = "turn_format: inline, max_turn_tokens: 4"
OWN_REWARD = "rewards: {environment: {weight: 1.0}}"


def given(
    name: str,
    environment: str,
    *says: str,
    episode: str = INLINE,
    more: str = "",
    quick: bool = False,
) -> Probe:
    """An environment of a module that lies beside the recipe."""
    settings = f"environment: {environment}, episode: {{{episode}}}, {OWN_REWARD}{more}"
    files = {"recipes/my_game.py": OWN, "recipes/mine.yaml": RECIPE.format(settings=settings)}
    return Probe(name, BASE, says, files=files, quick=quick)


def alone(name: str, settings: str, *says: str) -> Probe:
    """Settings of episodes without an environment."""
    return Probe(name, BASE, says, files={"recipes/mine.yaml": RECIPE.format(settings=settings)})


PROBES = [
    given("a number as environment", "7", "environment is 7", "reset(row, seed)"),
    given("a class without step", "my_game.NoStep", "`reset(row, seed)`"),
    given("a class that is nowhere", "my_game.Goood", "has no 'Goood'"),
    given("arguments without a class", "{init_args: {a: 1}}", "names the class again"),
    given("reset raises for every row", "my_game.Raises", "no board", quick=True),
    given("step returns a text", "my_game.Says", "step returned str instead of StepResult"),
    given("a step that hangs", "my_game.Hangs", "timed out", episode=f"{INLINE}, timeout_s: 0.5"),
    given("a step that ends its process", "my_game.Kills", "exited with 3, twice"),
    given("a template without chat", "my_game.Good", "chat: true", episode="max_turns: 2"),
    given("no turns", "my_game.Good", "max_turns is 0", episode=f"{INLINE}, max_turns: 0"),
    given("an unknown limit", "my_game.Good", "max_turn", episode=f"{INLINE}, max_turn: 3"),
    alone("limits without an environment", f"episode: {{{INLINE}}}", "episode is set"),
    alone("its reward without an environment", OWN_REWARD, "environment is not set"),
]
