"""The command `doctor`: diagnose a run and suggest changes."""

from __future__ import annotations

from litgrpo.runs.doctor.finding import Severity
from litgrpo.runs.doctor.render import render_text
from litgrpo.runs.run import Run
from litgrpo.text.visible import visible


def doctor(run: str, fail_on: Severity = "critical") -> None:
    """Diagnose a run: the problem, its first iteration, the evidence, the setting to change.

    The exit code is 0 if no finding is as severe as `fail_on`, 1 if one is, 2 if the run cannot be
    read.

    Args:
        run: a run folder; or TRL's trainer_state.json, a console log of verl, a metrics.csv.
        fail_on: exit with 1 if a finding has at least this severity.
    """
    from litgrpo.runs.doctor.diagnosis import examine  # imports pandas, which --help need not

    diagnosis = examine(Run.read(run))
    print(visible(render_text(diagnosis)))
    if any(finding.at_least(fail_on) for finding in diagnosis.all_findings):
        raise SystemExit(1)
