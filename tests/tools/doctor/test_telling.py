from litgrpo.tools.doctor.finding import Diagnosis, Finding
from litgrpo.tools.doctor.telling import as_markdown, page

FOUND = Finding(
    "truncated",
    "The limit cuts.",
    "critical",
    7,
    ("completion/truncated_frac: 0.5",),
    ({"prompt": "a\nb", "completion": "c" * 500, "reward": 0.0},),
    "model.max_completion_length",
    "64",
    "python cli.py fit -c runs/a/config.yaml --model.max_completion_length 64",
    (Finding("too_hard", "Nothing is right.", "warning", 9),),
)


def test_a_page_has_what_shows_it_what_to_change_and_what_it_explains():
    text = page(Diagnosis((FOUND,), {"loops": "No loops."}, {"kl_blowup": "needs kl"}, 30))
    for said in ("CRITICAL since iteration 7", "0.5", "-> 64", "python cli.py fit", "explains: "):
        assert said in text
    assert "fine:\n  loops: No loops." in text
    assert "not checked:\n  kl_blowup: needs kl" in text
    assert max(map(len, text.splitlines())) < 250


def test_nothing_found_is_said():
    assert "Nothing is wrong." in page(Diagnosis((), {}, {}))
    assert as_markdown(Diagnosis((), {}, {})) == "Nothing is wrong."
