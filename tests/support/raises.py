"""Assertions on errors: their type and the setting they name, not their prose."""

import re
from typing import Any

import pytest

Errors = type[Exception] | tuple[type[Exception], ...]


def raises_for(*keys: str, error: Errors = ValueError) -> Any:
    """Expect an error whose message names every one of these settings, in this order.

    Args:
        keys: words that the message must contain, such as `group_size`.
        error: expected type, or several of which one is raised.

    Example:
        >>> with raises_for("group_size", "0"):
        ...     raise ValueError("group_size is 0; it must be at least 1.")
    """
    return pytest.raises(error, match=re.compile(".*".join(map(re.escape, keys)), re.DOTALL))
