"""docs/doctor.md has a section for every rule, and findings say where."""

import re
from pathlib import Path

from litgrpo.tools.doctor.finding import Finding
from litgrpo.tools.doctor.rule import RULES

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def test_every_rule_has_its_section_in_the_order_of_causes():
    assert list(SECTIONS) == [rule.name for rule in RULES]
    assert Finding("loops", "", "info", 1).page.removeprefix("docs/doctor.md#") in SECTIONS


def test_a_section_says_what_it_looks_like_why_what_to_change_and_who_says_so():
    for name, text in SECTIONS.items():
        for said in ("*Looks like:*", "*Why:*", "*Change:*", "*Source:*"):
            assert said in text, f"{name} has no {said}"
