import pytest
from transformers import AutoConfig

from litgrpo.models.architectures import ARCHITECTURES, has_known_layers, list_rope_types
from litgrpo.models.decode.fused import is_supported
from tests.support.models import tiny_model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_entry_is_a_model_type_of_the_library(name):
    config = AutoConfig.for_model(name)
    assert config.is_encoder_decoder == ARCHITECTURES[name].encoder_decoder


def test_supported_features_of_a_model_are_those_of_its_entry(architecture):
    model, entry = tiny_model(architecture), ARCHITECTURES[architecture]
    assert has_known_layers(model) != entry.encoder_decoder
    assert is_supported(model) == (entry.fused is not None)


def test_layers_of_another_kind_are_not_known():
    model = tiny_model("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"]
    assert not has_known_layers(model)


def test_rotary_embeddings_of_all_layer_types_are_found():
    assert list_rope_types(None) == set()
    assert list_rope_types({"rope_type": "yarn", "factor": 2.0}) == {"yarn"}
    of_each = {"full_attention": {"rope_type": "linear"}, "sliding_attention": {}}
    assert list_rope_types(of_each) == {"linear"}
