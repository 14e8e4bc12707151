"""The public names of this room, and where they are."""

# {module: public names}. Imported when asked for, because a worker process needs `marks`, and a
# user's function needs `correctness`, without torch, which takes a second.
CLASSES = {
    "parts": ("Reward",),
    "scorer": ("Scorer",),
    "models": ("Judge", "RewardModel"),
    "rubric": ("Criterion", "Rubric"),
    "remote_judge": ("RemoteJudge",),
    "runner.marks": ("pure", "whole_batch"),
    "runner.runner": ("RewardRunner",),
    "runner.troubles": ("RewardFailure",),
    "runner.in_process": ("InProcessRunner",),
    "runner.process_runner": ("ProcessRunner",),
}
FUNCTIONS = {
    "library.math": ("correctness", "gsm8k", "exact", "closeness"),
    "library.verify": ("math_verify",),
    "library.format": (
        *("reasoning_answer", "think_format", "length", "soft_overlong", "repetition"),
    ),
    "library.length": ("cosine_length",),
    "library.reasoning": ("steps", "connectives", "arithmetic", "relevance", "coherence"),
    "library.quality": ("explanation_quality", "quality"),
    "library.safety": ("safety",),
    "library.sentiment": ("cheerful",),
    "library.structured": ("json_fields",),
    "library.diversity": ("distinct", "group_diversity"),
    "code": ("unit_tests",),
    "library.reasoning_gym": ("reasoning_gym",),
    "library.dialogue": ("f1", "rouge_l", "bleu", "lapdog"),
}
PATHS = {
    name: f"litgrpo.rewards.{module}.{name}"
    for module, names in (CLASSES | FUNCTIONS).items()
    for name in names
}
