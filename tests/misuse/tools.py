"""Tools that are wrong, cannot be found or described, or are called in no known format."""

from tests.misuse.probe import QUICK, Probe

OWN = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b

def silent(a: int) -> int:
    return a

def untyped(a):
    """Do something.

    Args:
        a: with this
    """

def unexplained(a: int) -> int:
    """Do something."""
    return a

class Game:
    def reset(self, level, **row):
        pass

    def poke(self, what: str) -> str:
        """Poke something.

        Args:
            what: this
        """
        return what

    def get_reward(self):
        return 1.0

class Still:
    def poke(self) -> str:
        """Poke."""
'''
RECIPE = (
    "model: {{class_path: litgrpo.GRPO, init_args: {{"
    "environment: {{class_path: litgrpo.environments.Tools, init_args: {{{settings}}}}},"
    " episode: {{turn_format: inline}}, rewards: {{environment: {{weight: 1.0}}}}}}}}\n"
)
BASE = QUICK.replace("{recipe}", "{recipe} -c recipes/mine.yaml")
BASE += " --model.check_invariants false"


def given(name: str, settings: str, *says: str, code: int = 2, quick: bool = False) -> Probe:
    """Tools of a recipe whose module lies beside it."""
    files = {"recipes/my_tools.py": OWN, "recipes/mine.yaml": RECIPE.format(settings=settings)}
    return Probe(name, BASE, says, code=code, files=files, quick=quick)


PROBES = [
    given("a tool beside the recipe", "functions: [my_tools.multiply], call_format: tags", code=0),
    given(
        "a tool that is nowhere",
        "functions: [my_tools.multply]",
        *("tool 'my_tools.multply'", "did you mean 'multiply'"),
        quick=True,
    ),
    given("a module that is nowhere", "functions: [my_tool.f]", "looked in", "recipes"),
    given("no import path", "functions: [multiply]", "is not an import path"),
    given("no list", "functions: my_tools.multiply", "functions"),
    given("no tools at all", "functions: []", "Tools has no tools"),
    given("no docstring", "functions: [my_tools.silent]", "'silent'", "no docstring", "Args:"),
    given("no types", "functions: [my_tools.untyped]", "'untyped'", "missing a type hint"),
    given("no word about an argument", "functions: [my_tools.unexplained]", "no description for"),
    given(
        "an unknown format",
        "functions: [my_tools.multiply], call_format: json",
        "call_format",
    ),
    given("a class among functions", "functions: [my_tools.Game]", "my_tools.Game"),
    given("a class that cannot begin", "factory: my_tools.Still", "Still has no method reset"),
    given("a column that is not there", "factory: my_tools.Game", "needs the column 'level'"),
    given("a wrong key", "function: [my_tools.multiply]", "functions"),
    given("a negative cost", "factory: my_tools.Game, call_cost: -1", "call_cost is -1"),
]
