"""Reward functions that are wrong, cannot be found, or end badly."""

from tests.misuse.probe import QUICK, Probe

OWN = """
import os, sys, time
from beside_it import SCALE

def right(prompts, completions, log_metric, log_extra, **columns):
    log_metric("letters", sum(map(len, completions)))
    log_extra("first_letter", [text[:1] for text in completions])
    return [SCALE * len(text) for text in completions]

def raises(completions):
    return [{}[len(text)] for text in completions]

def leaves(completions):
    sys.exit(4)

def crashes(completions):
    os._exit(3)

def hangs(completions):
    time.sleep(1000)

def imports(completions):
    import nothing_of_that_name

def nans(completions):
    return [float("nan")] * len(completions)

def texts(completions):
    return ["1"] * len(completions)

def lists(completions):
    return [[1.0]] * len(completions)

def short(completions):
    return [1.0] * 3

def huge(completions):
    return [1e38 * n for n in range(1, 1 + len(completions))]
"""
# The module lies beside the second recipe, and neither folder is the working folder.
FILES = {
    "recipes/my_rewards.py": OWN,
    "recipes/beside_it.py": "SCALE = 2.0\n",
    "recipes/mine.yaml": "model: {class_path: litgrpo.GRPO, init_args: {rewards: {mine: {function: "
    "my_rewards.right}}}}\n",
    "here.py": "def f(completions):\n    return [0.0] * len(completions)\n",
    "needs.py": "import nothing_of_that_name\n",
    "raises.py": "x = {}['a']\n",
}
BASE = QUICK.replace("{recipe}", "{recipe} -c recipes/mine.yaml")
BASE += (
    " --model.check_invariants false --model.reward_runner ProcessRunner"
    " --model.reward_runner.timeout_s 3"
)
PART = "--model.rewards.mine.function"
JUDGE = "base_url: 'http://127.0.0.1:9/v1', model: m, criteria: {a: {text: b}}"
CLASS = QUICK + " --model.rewards.correct.function '{class_path: litgrpo.rewards.%s}'"


def failing(function: str, *says: str, quick: bool = False) -> Probe:
    """A recipe whose reward fails for all rows."""
    words = f"{BASE} {PART} my_rewards.{function}"
    return Probe(f"a reward that {function}", words, says, files=FILES, quick=quick)


def given(name: str, of_class: str, *says: str) -> Probe:
    """Return a probe with a reward whose class rejects its settings."""
    return Probe(name, CLASS % of_class, says, files=FILES)


PROBES = [
    failing("raises", "4 of 4 completions failed", "of prompt", "KeyError", "my_rewards.py, line"),
    failing("leaves", "SystemExit: 4", "my_rewards.py"),
    failing("crashes", "exited with 3", quick=True),
    failing("hangs", "TimeoutError"),
    failing("imports", "nothing_of_that_name"),
    failing("nans", "returned nan: 4"),
    failing("texts", "returned str: 4"),
    failing("lists", "returned list: 4"),
    failing("short", "returned 3 rewards for"),
    failing("huge", "beyond 1e+15"),
    Probe(
        "a reward beside the recipe, with a module beside it",
        BASE,
        ("results are in",),
        code=0,
        files=FILES,
        after=lambda f: (
            ""
            if "reward/letters" in (f / "run/metrics.csv").read_text()
            and "first_letter" in (f / "run/samples/iteration-000001.jsonl").read_text()
            else "what the function logged is not there"
        ),
    ),
    Probe("a reward in the working folder", f"{BASE} {PART} here.f", code=0, files=FILES),
    Probe(
        "a reward module that is nowhere",
        f"{BASE} {PART} no_such_rewards.f",
        ("looked in", "recipes", "PYTHONPATH"),
        never=("did you mean", "Traceback"),
        files=FILES,
        quick=True,
    ),
    Probe("its module lacks a module", f"{BASE} {PART} needs.f", ("needs.py line 1",), files=FILES),
    Probe("its module raises", f"{BASE} {PART} raises.f", ("KeyError: 'a'", "line 1"), files=FILES),
    given("a rubric of nothing", "Rubric, init_args: {criteria: {}, judge: here.f}", "criterion"),
    given(
        "a reward model's wrong size",
        "RewardModel, init_args: {pretrained: x, max_length: -1}",
        "max_length is -1",
    ),
    given("a reward model's wrong key", "RewardModel, init_args: {pretraind: x}", "did you mean"),
    given(
        "a judge without its key",
        f"LLMJudge, init_args: {{{JUDGE}, api_key_env: LITGRPO_UNSET}}",
        "LITGRPO_UNSET is not set",
    ),
    given(
        "a judge's key in place of its name",
        f"LLMJudge, init_args: {{{JUDGE}, api_key_env: sk-1-2}}",
        "not the key itself",
    ),
    Probe(
        "a runner's setting without its class",
        f"{QUICK} --model.reward_runner.timeout_s 20",
        ("--model.reward_runner CLASS", "ProcessRunner"),
        quick=True,
    ),
]
