from litgrpo.models.offloaded_rows import CachedRowsAway
from tests.support.models import prompt_batch, tiny_policy


def test_rows_leave_where_the_cache_is_ours():
    prompts = prompt_batch("a")
    for name, can in (("llama", True), ("gemma2", True), ("t5", False)):
        policy = tiny_policy(name)
        _, state = policy.prefill(prompts.prompt_ids, prompts.prompt_mask, 2, 4)
        assert isinstance(policy.away(state), CachedRowsAway) == can
