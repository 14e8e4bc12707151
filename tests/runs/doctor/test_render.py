from litgrpo.runs.doctor.finding import Diagnosis, Finding
from litgrpo.runs.doctor.render import NO_PROBLEMS, render_markdown, render_text

FINDING = Finding(
    rule="truncated",
    problem="The limit cuts off completions.",
    severity="critical",
    first_iteration=7,
    evidence=("completion/truncated_frac: 0.5",),
    samples=({"prompt": "a\nb", "completion": "c" * 500, "reward": 0.0},),
    setting="model.max_completion_length",
    value="64",
    command="python cli.py fit -c runs/a/config.yaml --model.max_completion_length 64",
    symptoms=(Finding("too_hard", "No completion is correct.", "warning", 9),),
)


def test_the_text_has_evidence_setting_command_and_symptoms():
    text = render_text(
        Diagnosis((FINDING,), {"double_begin": "One begin."}, {"too_easy": "needs x"}, 30)
    )
    for part in (
        *("iteration 7", *FINDING.evidence, FINDING.setting, FINDING.value, FINDING.command),
        *(FINDING.symptoms[0].problem, FINDING.doc),
    ):
        assert part in text
    assert "passed:\n  double_begin: One begin." in text
    assert "not checked:\n  too_easy: needs x" in text
    assert max(map(len, text.splitlines())) < 250


def test_a_run_without_findings_is_reported():
    assert NO_PROBLEMS in render_text(Diagnosis((), {}, {}))
    assert render_markdown(Diagnosis((), {}, {})) == NO_PROBLEMS


def test_a_diagnosis_counts_the_rules_that_could_be_checked():
    passed, missing = (
        {"double_begin": "One begin."},
        {"too_easy": "needs x", "collapsed": "reward"},
    )
    text = render_text(Diagnosis((), passed, missing, 1, "reward 'right' >= 1"))
    assert "1 iteration; correct: reward 'right' >= 1 (model.evaluation.success_reward)" in text
    assert "No problems found, but only 1 of 3 rules could be checked" in text
    text = render_text(Diagnosis((), missing, passed))
    assert "No problems found by 2 of 3 rules; the other 1 could not be checked." in text
    assert "No result: none of the 2 rules" in render_text(Diagnosis((), {}, missing))
