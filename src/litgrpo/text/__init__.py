"""Reading texts.

Answers and numbers (`answers`), Unicode spelling (`normalization`), likeness and variety
(`overlap`).
"""

from litgrpo.text.answers import (
    Message,
    answer_claims,
    extract_answer,
    extract_reasoning,
    list_answers,
    parse_number,
    text_of,
)
from litgrpo.text.normalization import normalize

__all__ = [
    "Message",
    "answer_claims",
    "extract_answer",
    "extract_reasoning",
    "list_answers",
    "normalize",
    "parse_number",
    "text_of",
]
