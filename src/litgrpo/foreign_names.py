"""Names of options in TRL, verl and transformers, for messages that name those of litgrpo."""

import csv
import re
from pathlib import Path

LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def _read_table() -> list[dict[str, str]]:
    path = Path(__file__).parent / "assets" / "foreign_names.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


_ROWS = _read_table()
# {name: option}. The last segments of what a user writes count: `num_generations`,
# `model.num_generations` and `actor_rollout_ref.rollout.n`, which the file splits into a `prefix`
# and the `name` that is enough. Its rows with a `table` are those of docs/howto/coming_from_trl.md
# and coming_from_verl.md; `python -m tests.tables` writes them there.
OTHER_NAMES = {row["name"]: row["option"] for row in _ROWS if row["option"]}


def _plain_remarks(*, with_option: bool) -> dict[str, str]:
    return {
        row["name"]: LINK.sub(r"\1", row["remark"]).replace("`", "")
        for row in _ROWS
        if bool(row["option"]) == with_option
    }


# {name: what litgrpo does instead} of those without an option, as plain text.
REMARKS = _plain_remarks(with_option=False)
_NOTES = _plain_remarks(with_option=True)


def note_on(name: str) -> str:
    """Return ` (what is different)` of a name with an option; "" if nothing is.

    Example:
        >>> note_on("per_device_train_batch_size"), note_on("beta")
        (' (prompts of all devices: completions / group_size)', '')
    """
    return f" ({note})" if (note := _NOTES.get(name)) else ""
