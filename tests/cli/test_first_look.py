"""What is refused before anything slow is imported, and what is left to the parser."""

import dataclasses
import inspect
import subprocess
import sys

import pytest
from lightning.pytorch import Trainer

from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.cli import first_look
from litgrpo.cli.first_look import MODULES, PACKAGE, Source, arguments_of, refuse_mistakes
from litgrpo.cli.recipes import brought

RECIPES = brought()


@pytest.fixture
def recipe(tmp_path):
    def written(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return ["-c", str(path)]

    return written


@pytest.mark.parametrize("module", [GRPO, SFT, PromptData, PairData])
def test_the_source_has_the_arguments_that_the_class_has(module):
    file = PACKAGE / f"{MODULES[module.__name__]}.py"
    found = arguments_of(file, module.__name__)
    assert list(found) == list(inspect.signature(module).parameters)


def test_the_source_of_each_dataclass_has_its_fields():
    found = arguments_of(PACKAGE / "training" / "grpo.py", "GRPO")
    grpo = Source(PACKAGE / "training" / "grpo.py", "GRPO", "GRPO")
    inner = {name: source for name in found if (source := grpo.dataclass_of(name))}
    assert {"objective", "sampling", "update", "evaluation", "lora", "precision"} <= inner.keys()
    for source in inner.values():
        module = ".".join(["litgrpo", *source.file.relative_to(PACKAGE).with_suffix("").parts])
        fields = dataclasses.fields(vars(sys.modules[module])[source.name])
        assert list(source.arguments) == [each.name for each in fields if each.init]


def test_the_source_of_the_trainer_has_its_arguments():
    source = first_look.trainer()
    assert list(source.arguments) == list(inspect.signature(Trainer).parameters)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_that_we_bring_pass(name):
    refuse_mistakes(["-c", str(RECIPES[name])])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["--model.grup_size", "4"], "'model.group_size'"),
        (["--model.init_args.grup_size=4"], "'model.group_size'"),
        (["--model.sampling.temp=1"], "'model.sampling.temperature'"),
        (["--model.objective.kl_cof", "1"], "'model.objective.kl_coef'"),
        (["--model.lr", "1"], "it is 'model.optimizer.lr'"),
        (["--data.bach_size", "1"], "'data.batch_size'"),
        (["--trainer.max_epoch", "1"], "'trainer.max_epochs'"),
        (["--model.repetition_penalty", "1"], "litgrpo.rewards.repetition"),
        (["--model", "SFT", "--model.group_size", "8"], "(of SFT)"),
        (["--model=litgrpo.SFT", "--model.max_grad_nrm", "8"], "'model.max_grad_norm'"),
    ],
)
def test_a_misspelled_key_on_the_command_line_is_refused(words, meant):
    with pytest.raises(ValueError, match="there is no key") as refused:
        refuse_mistakes(words)
    assert meant in str(refused.value)


def test_a_misspelled_key_in_a_recipe_is_refused(recipe):
    text = "model:\n  class_path: litgrpo.GRPO\n  init_args:\n    update: {inner_epoch: 2}\n"
    with pytest.raises(ValueError, match=r"'model.update.epochs_per_rollout'"):
        refuse_mistakes(recipe(text))
    with pytest.raises(ValueError, match=r"'trainer.max_epochs'"):
        refuse_mistakes(recipe("trainer: {max_epoch: 2}"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.group_size", "four"], "model.group_size is 'four', expected int"),
        (["--model.max_iterations=many"], "model.max_iterations is 'many', expected int or null"),
        (["--model.sampling.top_p", "all"], "model.sampling.top_p is 'all', expected float"),
        (["--data.batch_size=2x"], "data.batch_size is '2x', expected int"),
    ],
)
def test_a_text_for_a_number_is_refused_as_the_parser_would(words, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        refuse_mistakes(words)


def test_a_text_for_a_number_in_a_recipe_is_refused(recipe):
    text = "model: {init_args: {update: {epochs_per_rollout: two}}}"
    with pytest.raises(
        ValueError, match=r"^model\.update\.epochs_per_rollout is 'two', expected int$"
    ):
        refuse_mistakes(recipe(text))


@pytest.mark.parametrize(
    "word",
    [
        *("--model.group_size=8", "--model.objective.kl_coef=1e-3", "--model.max_iterations=null"),
        *("--model.sampling.temperature=.5", "--model.soft_overlong=inf", "--model.seed=1_000"),
        *("--model.check_invariants=false", "--model.pretrained=many", "--data.chat=no"),
        "--model.group_size=",
    ],
)
def test_what_may_be_a_number_is_left_to_the_parser(word):
    refuse_mistakes([word])


@pytest.mark.parametrize(
    "text",
    [
        "model: {class_path: mine.GRPO, init_args: {anything: 1}}",
        "model: {init_args: {engine: {class_path: mine.Engine, init_args: {anything: 1}}}}",
        "model: {init_args: {rewards: {mine: {function: mine.f, anything: 1}}}}",
        "model: {init_args: {optimizer: {anything: 1}}}",
        "model: {init_args: {check_invariants: 'false', group_size: '8', max_iterations: 'null'}}",
        "model: null",
        "data: [1]",
        "just text",
        "a: [broken",
    ],
)
def test_what_is_not_sure_is_left_to_the_parser(recipe, text):
    refuse_mistakes(recipe(text))


def test_words_that_are_no_keys_of_these_classes_are_left_to_the_parser():
    refuse_mistakes(["--model.help", "--model.lora.help", "--model.rewards+={a: b}"])
    refuse_mistakes(["--model", "mine.Module", "--model.anything", "1"])
    refuse_mistakes(["--run_dir", "model.x", "--foo.bar", "1", "--model.engine.x=1"])


def test_nothing_slow_is_imported():
    code = (
        "import sys; sys.argv = ['litgrpo', 'fit', '-c', 'quickstart', '--model.grup_size', '4']\n"
        "from litgrpo.program import main\n"
        "code = main()\n"
        "slow = {'torch', 'lightning', 'jsonargparse', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "did you mean 'model.group_size'?" in ran.stderr
