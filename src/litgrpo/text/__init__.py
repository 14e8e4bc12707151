"""Reading texts: answers and numbers (`answers`), likeness and variety (`overlap`)."""

from litgrpo.text.answers import (
    Message,
    answer_claims,
    extract_answer,
    extract_reasoning,
    list_answers,
    parse_number,
    text_of,
)

__all__ = [
    "Message",
    "answer_claims",
    "extract_answer",
    "extract_reasoning",
    "list_answers",
    "parse_number",
    "text_of",
]
