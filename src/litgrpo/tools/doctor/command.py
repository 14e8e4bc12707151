"""The verb `doctor`: what is wrong with a run, since when, and what to change."""

from __future__ import annotations

from typing import Literal

from litgrpo.text.visible import visible
from litgrpo.tools.doctor.diagnosis import examine
from litgrpo.tools.doctor.run_files import read
from litgrpo.tools.doctor.telling import page


def doctor(run: str, fail_on: Literal["info", "warning", "critical"] = "critical") -> None:
    """Look at a run: what is wrong, what is fine, what could not be checked.

    The exit code is 0 if nothing is as severe as `fail_on`, 1 if something is, 2 if the run cannot
    be read.

    Args:
        run: a run folder; or TRL's trainer_state.json, a console log of verl, a metrics.csv.
        fail_on: exit with 1 where a finding is at least so severe.
    """
    diagnosis = examine(read(run))
    print(visible(page(diagnosis)))
    if any(each.at_least(fail_on) for each in diagnosis.every):
        raise SystemExit(1)
