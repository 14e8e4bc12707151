"""The migration page names every option of the system it replaces."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = next(
    (
        path
        for folder in ROOT.parents
        if (path := folder / "shared" / "design" / "replaced_systems.md").is_file()
    ),
    None,
)


def test_every_option_of_lapdog_is_on_its_page():
    if LIST is None:
        pytest.skip("the list of options is not beside this clone")
    section = LIST.read_text().partition("## C.")[2]
    options = re.findall(r"`([a-z_]+)", section)
    assert len(options) > 10
    page = (ROOT / "docs" / "coming_from_lapdog.md").read_text()
    assert not [option for option in options if f"`{option}" not in page]
