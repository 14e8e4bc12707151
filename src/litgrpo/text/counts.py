"""Counts with their nouns."""


def plural(count: int, noun: str) -> str:
    """Return a number with its noun.

    Example:
        >>> plural(1, "iteration"), plural(2000, "iteration")
        ('1 iteration', '2,000 iterations')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
