import pytest
import torch
from transformers import AutoModelForCausalLM

from litgrpo.callbacks.export import Export
from tests.callbacks.fitting import fit
from tests.standin import StandIn

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def test_plain_transformers_loads_the_final_model_with_equal_logits(tmp_path):
    module = fit(tmp_path, Export(every_n_iterations=2), module=StandIn(3))
    exports = [path.name for path in (tmp_path / "exports").iterdir()]
    assert exports == ["iteration-000002"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final_model", dtype=torch.float32)
    ids = torch.arange(3, 13).view(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.eval()(ids).logits, module.policy.model.eval()(ids).logits, rtol=0, atol=0
        )
