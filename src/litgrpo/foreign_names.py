"""Names of options in TRL, verl and transformers, for messages that name those of litgrpo."""

import csv
from pathlib import Path


def _read_table() -> dict[str, str]:
    path = Path(__file__).parent / "assets" / "foreign_names.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return {row["name"]: row["option"] for row in csv.DictReader(file) if row["option"]}


# {name: option}. The last segments of what a user writes count: `num_generations`,
# `model.num_generations` and `actor_rollout_ref.rollout.n`, which the file splits into a `prefix`
# and the `name` that is enough. Its rows with a `table` are those of docs/howto/coming_from_trl.md
# and coming_from_verl.md; `python -m tests.tables` writes them there.
OTHER_NAMES = _read_table()
