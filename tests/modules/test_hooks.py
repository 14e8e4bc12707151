"""A subclass that replaces what litgrpo does in a hook ends in an error."""

import pytest
from lightning import LightningModule
from lightning.pytorch.utilities import grad_norm

from litgrpo import GRPO, SFT, PairData, PromptData
from litgrpo.modules.hooks import HOOKS
from litgrpo.modules.language_module import LanguageModule
from tests.support.training import letters, train

MODEL = "builtin:tiny-gemma2"
SETTINGS = dict(group_size=2, max_completion_length=4, max_iterations=1, check_invariants=False)
PAIRS = [{"prompt": "1+1?", "completion": "2"}, {"prompt": "1+2?", "completion": "3"}]


def fit(kind):
    if issubclass(kind, SFT):
        return train(
            kind(MODEL, max_iterations=1),
            PairData(PAIRS, val=[{"prompt": "2+2?", "completion": "4"}], batch_size=2),
        )
    data = PromptData(["a", "b"], val=["c"], batch_size=2)
    return train(kind(MODEL, [letters], **SETTINGS), data)


def test_the_list_has_every_hook_that_the_modules_implement():
    others = {
        # Steps and objects that a subclass may well replace.
        *("training_step", "validation_step", "test_step", "predict_step", "configure_optimizers"),
        # Lightning calls them with the work to do, so that one that is replaced does it itself.
        *("backward", "optimizer_zero_grad", "log", "load_from_checkpoint"),
    }
    own = {name for kind in (LanguageModule, GRPO, SFT) for name in vars(kind)}
    hooks = {name for name in own & {*dir(LightningModule)} if not name.startswith("_")}
    assert hooks - others - {"tokenizer", "policy"} == {*HOOKS}


@pytest.mark.parametrize("base", [GRPO, SFT])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_without_super_is_an_error(base, name):
    owners = [kind for kind in base.__mro__ if name in vars(kind)]
    if owners[0].__module__.startswith("lightning"):
        pytest.skip("this module does nothing there")
    calls = []

    def hook(self, *args, **kwargs):
        calls.append(name)
        return [] if name == "configure_callbacks" else None

    kind = type("Own", (base,), {name: hook})
    with pytest.raises(RuntimeError, match=rf"Own.{name} .* call super\(\).{name}"):
        call(kind, name)
    assert calls == [name]


def call(kind, name):
    if name in ("on_test_epoch_end", "on_load_checkpoint", "on_save_checkpoint"):
        module = kind(MODEL) if issubclass(kind, SFT) else kind(MODEL, [letters], **SETTINGS)
        getattr(module, name)(*[{}] if "checkpoint" in name else [])
    fit(kind)


def test_hooks_with_super_work_as_in_lightning_also_from_a_mixin():
    class LogsNorms:
        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            self.log_dict(grad_norm(self.policy, norm_type=2))

    class Own(LogsNorms, GRPO):
        def configure_callbacks(self):
            return super().configure_callbacks()

    logged = fit(Own).logged_metrics
    assert {"grad_2.0_norm_total", "optim/grad_norm"} <= logged.keys()

    class Forgets:
        def on_before_optimizer_step(self, optimizer):
            """Does nothing."""

    with pytest.raises(RuntimeError, match="on_before_optimizer_step"):
        fit(type("Own", (Forgets, GRPO), {}))
