"""The public names of this room, and where they are."""

# {module: public names}. Imported when asked for, because a worker process needs `marks`, and a
# user's function needs `correctness`, without torch, which takes a second.
CLASSES = {
    "parts": ("Reward",),
    "scorer": ("Scorer",),
    "reward_model": ("Judge", "RewardModel"),
    "rubric": ("Criterion", "Rubric"),
    "llm_judge": ("LLMJudge",),
    "runner.marks": ("pure", "whole_batch"),
    "runner.runner": ("RewardRunner",),
    "runner.troubles": ("RewardFailure",),
    "runner.in_process": ("InProcessRunner",),
    "runner.process_runner": ("ProcessRunner",),
}
FUNCTIONS = {
    "builtin.math": ("correctness", "gsm8k", "exact", "closeness"),
    "builtin.verify": ("math_verify",),
    "builtin.format": (
        *("reasoning_answer", "think_format", "length", "soft_overlong", "repetition"),
    ),
    "builtin.length": ("cosine_length",),
    "builtin.reasoning": ("steps", "connectives", "arithmetic", "relevance", "coherence"),
    "builtin.quality": ("explanation_quality", "quality"),
    "builtin.safety": ("safety",),
    "builtin.sentiment": ("cheerful",),
    "builtin.structured": ("json_fields",),
    "builtin.diversity": ("distinct", "group_diversity"),
    "code": ("unit_tests",),
    "builtin.reasoning_gym": ("reasoning_gym",),
    "builtin.dialogue": ("f1", "rouge_l", "bleu", "lapdog"),
}
PATHS = {
    name: f"litgrpo.rewards.{module}.{name}"
    for module, names in (CLASSES | FUNCTIONS).items()
    for name in names
}
