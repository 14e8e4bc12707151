import pytest

from litgrpo.learning.update_config import (
    BYTES_PER_OUTPUT,
    KEPT_BYTES,
    LEAST_TOKENS,
    MOST_LOGITS,
    MOST_TOKENS,
    DeviceSizes,
    UpdateConfig,
)
from litgrpo.tensors import FEW_LOGITS


@pytest.mark.parametrize(
    "name", ["epochs_per_rollout", "num_mini_batches", "micro_batch_size", "micro_batch_tokens"]
)
def test_settings_out_of_range_are_refused_by_their_name(name):
    with pytest.raises(ValueError, match=f"update.{name} is 0; it must be at least 1"):
        UpdateConfig(**{name: 0})
    with pytest.raises(ValueError, match=r"update\.max_grad_norm is -1"):
        UpdateConfig(max_grad_norm=-1)


def test_an_iteration_has_a_step_for_each_mini_batch_of_each_epoch():
    assert UpdateConfig(epochs_per_rollout=3, num_mini_batches=4).num_steps == 12


def test_auto_is_what_fits_a_small_model_and_never_less_than_its_least():
    fitted = UpdateConfig().resolve_auto(linear_outputs=1000)
    assert fitted.max_tokens == int(KEPT_BYTES / (BYTES_PER_OUTPUT * 1000)) > LEAST_TOKENS
    assert UpdateConfig().resolve_auto(linear_outputs=10**9).max_tokens == LEAST_TOKENS
    assert UpdateConfig().max_tokens == LEAST_TOKENS


def test_what_the_user_gave_stays_and_so_does_the_least_where_shapes_are_static():
    given = UpdateConfig(micro_batch_tokens=77)
    assert given.resolve_auto(linear_outputs=1) is given
    assert UpdateConfig(micro_batch_tokens=None).resolve_auto(1).max_tokens is None
    assert UpdateConfig().max_tokens == LEAST_TOKENS


def test_a_device_with_hardly_any_memory_gets_the_least_and_a_large_one_the_most():
    assert DeviceSizes.of(0, 2.0**20) == DeviceSizes(LEAST_TOKENS, FEW_LOGITS)
    assert DeviceSizes.of(2**50, 2.0**20) == DeviceSizes(MOST_TOKENS, MOST_LOGITS)
