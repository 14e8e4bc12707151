import enum
from importlib.metadata import version

import pytest
import torch

from litgrpo.checkpointing.manifest import digest, manifest_of, on_host, rebuilt
from tests.support.io import state


def test_the_manifest_names_parts_shapes_versions_config_and_data():
    manifest = manifest_of(state())
    assert list(manifest["parts"]) == list(state())
    assert manifest["shapes"] == {"a": [2, 3], "b": [4]}
    assert manifest["versions"]["torch"] == version("torch")
    assert manifest["config"] == digest("a: 1")
    assert manifest["data"] == [{"prompts": "abc", "seed": 0}]


def test_a_digest_depends_on_every_value_and_on_nothing_else():
    known = digest(state())
    assert digest(rebuilt(state(), torch.clone)) == known
    for name, part in {
        "state_dict": {"a": torch.arange(6.0), "b": torch.ones(4, dtype=torch.bfloat16)},
        "optimizer_states": [],
        "lr_schedulers": [{"last_epoch": 3.0}],
    }.items():
        assert digest(state(**{name: part})) != known
    # A list of two is not two lists of one, 1 is not "1" nor True.
    assert len({digest(x) for x in ([1, 1], [[1], [1]], [1, "1"], [1, True], [1, 1.0])}) == 5


def test_an_enumeration_is_no_plain_value():
    kind = enum.IntEnum("kind", "A")
    with pytest.raises(TypeError, match="a checkpoint cannot hold a kind"):
        digest([kind.A])


def test_a_tokenizer_as_text_or_bytes_is_part_of_the_digest():
    texts = ({"tokenizer.json": "{}"}, {"tokenizer.json": b"{}"}, {"tokenizer.json": "{ }"})
    assert len({digest(each) for each in texts}) == 3


def test_copies_on_the_host_share_no_memory_and_no_container():
    inner = {"a": [torch.zeros(2)], "b": (1, "x")}
    copied = on_host(inner)
    inner["a"][0] += 1
    inner["a"].append(2)
    assert copied["b"] == (1, "x")
    assert len(copied["a"]) == 1
    assert copied["a"][0].sum() == 0


def test_tied_weights_are_in_a_file_once(tmp_path):
    table, other = torch.zeros(1000, 50), torch.ones(1000, 50)
    weights = {"embedding": table, "head": table.detach(), "other": other}
    for name, state_dict in {"tied": weights, "twice": weights | {"head": table.clone()}}.items():
        torch.save(on_host(state_dict), tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("tied", "twice")]
    assert sizes[1] - sizes[0] >= table.nbytes
    found = torch.load(tmp_path / "tied", weights_only=True)
    assert digest(found) == digest(weights)
