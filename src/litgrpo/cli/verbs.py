"""What the program can do: Lightning's four verbs, and functions."""

from __future__ import annotations

LIGHTNING_VERBS = {
    "fit": "train: a before/after table, checkpoints and the model in the run folder",
    "validate": "evaluate on the held-out validation problems",
    "test": "evaluate on the test problems",
    "predict": "answer prompts: print reasoning and answer, write JSONL",
}
# {verb: the module with the function of that name, what it does}
COMMANDS = {
    "export": ("litgrpo.cli.export", "write a checkpoint's policy as a Hugging Face folder"),
    "audit": (
        "litgrpo.tools.audit.command",
        "test the rewards of a recipe: fair to right answers, hard to game?",
    ),
    "plan": (
        "litgrpo.tools.plan.command",
        "what a recipe needs of memory, time and money, on which devices",
    ),
    "compare": (
        "litgrpo.tools.compare",
        "train by several algorithms and seeds; which gains are real?",
    ),
    "doctor": (
        "litgrpo.tools.doctor.command",
        "what is wrong with a run, since when, what to change",
    ),
    "replay": ("litgrpo.tools.replay", "print an episode of a run, turn by turn"),
    "report": (
        "litgrpo.tools.report.command",
        "write one HTML page that shows a run, or compares several",
    ),
}
