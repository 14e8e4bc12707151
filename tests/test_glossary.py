"""Docstrings, comments, messages and pages use the field's words."""

import json

import pytest

from tests.house import glossary


def test_the_repository_uses_the_words_of_the_field():
    found = [hit for file in glossary.files(glossary.PATHS) for hit in glossary.hits(file)]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('"""Whether the engine hears."""\n', ["Whether", "hears"]),  # glossary: ok
        ("def loaded():\n    pass\n", ["def loaded"]),
        ("@property\ndef loaded(self):\n    pass\n", []),
        ("def seed_everything():\n    pass  # at most 3 seeds\n", []),
        ("x = 1  # so many, at most\n", ["at most", "so many"]),  # glossary: ok
        ("x = 'anew'  # glossary: ok\n", []),
        ("heard = 1  # `heard` is a name\n", []),  # glossary: ok
    ],
)
def test_home_made_words_are_found(text, words, tmp_path):
    file = tmp_path / "file.py"
    file.write_text(text)
    assert sorted(hit.found for hit in glossary.hits(file)) == sorted(words)


def test_home_made_words_in_a_notebook_are_found(tmp_path):
    file = tmp_path / "notebook.ipynb"
    word = "anew"  # glossary: ok
    cells = [{"source": ["x = 1\n", "y = 2"], "outputs": [word]}, {"source": [f"# {word}"]}]
    file.write_text(json.dumps({"cells": cells}))
    assert [(hit.line, hit.found) for hit in glossary.hits(file)] == [(3, word)]
