"""Recipes that are no recipes, values that are no values, and the environment of the program."""

from pathlib import Path

from tests.misuse.probe import QUICK, Probe

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TEMPLATE_RECIPE = "data:\n  template: {{ prompt }}\n"
BASE = QUICK.replace("{recipe}", "{recipe} -c mine.yaml")


def recipe(name: str, content: str, *says: str, quick: bool = False) -> Probe:
    """A second recipe with this content."""
    return Probe(name, BASE, ("mine.yaml", *says), files={"mine.yaml": content}, quick=quick)


def raw_recipe(name: str, content: bytes, *says: str) -> Probe:
    """A second recipe with these bytes."""

    def write(folder: Path) -> None:
        (folder / "mine.yaml").write_bytes(content)

    return Probe(name, BASE, ("mine.yaml", *says), before=write)


def said_by_terminal(text: str, *says: str, code: int = 0) -> Probe:
    """A template on the command line, which arrives as it was typed."""
    return Probe(
        f"template {text}",
        f"{QUICK} --data.template '{text}'",
        says,
        code=code,
        after=lambda folder: check_template(folder, text) if code == 0 else "",
    )


def check_template(folder: Path, text: str) -> str:
    """Return a fault if the run's configuration has another template."""
    import yaml

    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    found = config["data"]["init_args"]["template"]
    return "" if found == text else f"the template is {found!r}"


PROBES = [
    recipe("an empty recipe", "", "is an empty recipe", quick=True),
    recipe("a recipe of comments", "# nothing\n", "is an empty recipe"),
    recipe("a list for a recipe", "- model\n- data\n", "list"),
    recipe("a number for a recipe", "5\n", "int"),
    recipe("a number for a key", "5: 6\n", "is not a key"),
    recipe("a tab", "model:\n\tgroup_size: 4\n", "line 2", "indent with spaces", quick=True),
    recipe("a bracket left open", "model: [1, 2\ndata: {}\n", "line 2"),
    recipe("a colon in a text", "data: {chat: {}}\nrun_dir: a: b\n", "line 2", "quote"),
    recipe("a template without quotes", TEMPLATE_RECIPE, "line 2", "quote a text with braces"),
    recipe("a YAML bomb", BOMB, "more than 100,000 values", quick=True),
    recipe("10,000 brackets", "a: " + "[" * 10_000, "more than 64 nested", quick=True),
    recipe("10,000 braces", "a: " + "{a: " * 10_000, "more than 64 nested"),
    recipe("1,000 levels", "- " * 1_000 + "x\n", "more than 64 nested"),
    recipe("a list in itself", "a: &a [*a]\n", "contains itself"),
    recipe("a Python object", "a: !!python/object:os.system {}\n", "not valid YAML"),
    recipe("a number of 5,000 digits", f"run_dir: {'9' * 5_000}\n", "not valid YAML"),
    raw_recipe("a recipe in UTF-16", "model: {}\n".encode("utf-16"), "UTF-8"),
    raw_recipe("a recipe in UTF-16 without a mark", "model: {}\n".encode("utf-16-le"), "YAML"),
    raw_recipe("random bytes", bytes(range(256)), "UTF-8"),
    raw_recipe("control characters", b"model: \x00\x01\n", "not valid YAML"),
    Probe(
        "a recipe that is a folder",
        "fit -c here",
        ("is a folder",),
        before=lambda folder: (folder / "here").mkdir(),
    ),
    Probe("a name that no file can have", f"fit -c {'x' * 5_000}", ("cannot be a file",)),
    Probe("an unknown recipe", "fit -c nothing_like_it", ("not found",), never=("icepop",)),
    Probe(
        "brackets on the command line", f"{QUICK} --model.rewards {'[' * 10_000}", ("64 nested",)
    ),
    *(
        Probe(f"seed {seed}", f"{QUICK} --seed_everything {seed}", ("seed_everything is",))
        for seed in (-1, 10**20)
    ),
    said_by_terminal("{{ prompt }}"),
    said_by_terminal("Q: {{ prompt }}"),
    said_by_terminal("Question: {{ prompt }}\\nAnswer:", "a backslash and an n", code=2),
    said_by_terminal("[{{ prompt }}] # yes"),
    said_by_terminal("- {{ prompt }}"),
    said_by_terminal("5", "write `{{ prompt }}`", code=2),
    said_by_terminal("{{ prompt", "template", code=2),
    Probe(
        "clip_low 5",
        f"{QUICK} --model.objective.surrogate Clipped --model.objective.surrogate.clip_low 5",
        ("clip_low is 5",),
    ),
    Probe("kl_coef nan", f"{QUICK} --model.objective.kl_coef .nan", ("kl_coef is nan",)),
    Probe(
        "a loss of observations without an environment",
        f"{QUICK} --model.objective.observation_nll_coef 0.1",
        ("observation_nll_coef is 0.1", "model.environment"),
    ),
    Probe(
        "kl_in_reward of 0",
        f"{QUICK} --model.objective.kl_in_reward.coef 0",
        ("kl_in_reward.coef is 0",),
    ),
    Probe(
        "50 mini-batches of 2 groups",
        f"{QUICK} --model.update.num_mini_batches 50",
        ("num_mini_batches is 50", "2 groups"),
        quick=True,
    ),
    Probe(
        "completions of 100,000,000 tokens",
        QUICK.replace("_length 8", "_length 100000000"),
        ("model.max_completion_length",),
        quick=True,
    ),
    Probe(
        "100,000,000 completions per prompt",
        QUICK.replace("group_size 2", "group_size 1000000000"),
        ("model.group_size", "GiB"),
    ),
    *(
        Probe(
            f"accelerator {name}",
            QUICK.replace("accelerator cpu", f"accelerator {name}"),
            (said,),
        )
        for name, said in {
            **{name: f"trainer.accelerator is '{name}'" for name in ("gpu", "cuda", "gpuu")},
            "mps": "Set trainer.accelerator: cpu",
        }.items()
    ),
    Probe(
        "an impossible setting after an override",
        f"{QUICK} -c algorithms/grpo --model.objective.gamma 2",
        ("gamma is 2.0; it must be from 0 to 1",),
        never=("unknown class", "Traceback"),
    ),
    Probe(
        "a fast_dev_run",
        f"{QUICK} --trainer.fast_dev_run true",
        ("no files were written",),
        code=0,
        never=("results are in", "Traceback"),
    ),
    Probe(
        "a class in place of a reward",
        f"{QUICK} --model.rewards.correct.function fractions.Fraction",
        ("class fractions.Fraction", "class_path"),
    ),
    Probe(
        "an option of fit for compare",
        "compare quickstart --data.batch_size 0 --seeds [0,1] --algorithms [plain,dr_grpo]",
        ("batch_size",),
    ),
    Probe(
        "a warning of a run",
        "predict --model.pretrained builtin:tiny-gemma2 --data.prompts 'What is 3+4?'"
        " --trainer.accelerator cpu",
        ("warning: The longest row",),
        code=0,
        never=("UserWarning", "Traceback"),
    ),
    Probe(
        "one prompt without a list",
        "predict -c {recipe} --data.prompts 'What is 3+4?'"
        " --model.max_completion_length 2 --trainer.accelerator cpu",
        ("What is 3+4?",),
        code=0,
    ),
]
