from litgrpo.algorithms.kl import k1
from litgrpo.training.old_paths import current_path, longest_row
from litgrpo.training.saved_arguments import made


def test_the_longest_row_that_begins_a_name_counts():
    rows = {"a": 1, "a.b": 2}
    assert longest_row("a.b.c", rows) == "a.b"
    assert longest_row("a.bc", rows) == "a"
    assert longest_row("ab", rows) == ""
    assert current_path("torch.optim.AdamW") == "torch.optim.AdamW"


def test_arguments_in_a_checkpoint_are_found_at_their_old_paths():
    assert made({"kl": {"import_path": "litgrpo.objectives.kl.k1"}}) == {"kl": k1}
    old = {"class_path": "litgrpo.training.settings.Evaluation", "init_args": {"samples": 5}}
    assert made(old).samples == 5
