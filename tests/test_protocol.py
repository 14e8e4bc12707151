"""The modules, and the stand-in of these tests, have what callbacks read."""

from lightning import LightningModule
from lightning.pytorch import Trainer

from litgrpo.modules.sft import SFT
from litgrpo.protocol import RolloutModule, TrainedModule
from tests.support.standin import StandIn
from tests.support.training import module


def test_modules_have_what_callbacks_read():
    sft = SFT("builtin:tiny-calculator")
    sft.trainer = Trainer(logger=False, accelerator="cpu")  # it counts the iterations of SFT
    for each in (module(), sft, StandIn()):
        assert isinstance(each, TrainedModule)
    grpo = module()
    grpo.configure_model()
    assert isinstance(grpo, RolloutModule)


def test_another_module_does_not():
    assert not isinstance(LightningModule(), TrainedModule)
