"""Pages of the site that are made from the classes; `.ci/nightly site` builds the site itself."""

import re

import litgrpo
from tests.support.pages import ROOT


def test_the_reference_has_every_option_and_every_public_name(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import reference

    pages = {name: "\n".join(lines) for name, lines in reference.pages()}
    options = "| `group_size` | `int` | `8` | completions per prompt, G (TRL: num_generations). |"
    assert options in pages["reference/model_keys"]
    for table in re.findall(r"(?:^\|.*\n)+", "".join(pages.values()), re.MULTILINE):
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table
    documented = re.findall(r"auto\w+:: litgrpo\.(\w+)$", "".join(pages.values()), re.MULTILINE)
    assert set(litgrpo.PUBLIC) == set(documented)
