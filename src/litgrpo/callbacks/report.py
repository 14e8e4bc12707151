"""How an `evaluation_report` is read and shown."""

from __future__ import annotations

BOUNDS = ("_low", "_high")
PLACES_BELOW = {10: 3, 100: 1}


def plain_names(report: dict[str, float]) -> dict[str, float]:
    """The report with its names freed of the stage.

    Example:
        >>> plain_names({"val/loss": 1.0, "greedy": 0.5})
        {'loss': 1.0, 'greedy': 0.5}
    """
    return {name.rsplit("/", maxsplit=1)[-1]: float(value) for name, value in report.items()}


def entries(report: dict[str, float]) -> dict[str, str]:
    """Each number of the report as text, with its interval in brackets where it has one.

    Example:
        >>> entries({"avg@4": 0.5, "avg@4_low": 0.45, "avg@4_high": 0.55, "greedy": 0.6})
        {'avg@4': '0.500 [0.450, 0.550]', 'greedy': '0.600'}
    """

    def text(name: str) -> str:
        ends = [digits(report[name + end]) for end in BOUNDS if name + end in report]
        return digits(report[name]) + (f" [{', '.join(ends)}]" if ends else "")

    return {name: text(name) for name in report if not name.endswith(BOUNDS)}


def digits(value: float) -> str:
    """Three decimals below ten, one below a hundred, none above.

    Example:
        >>> digits(0.51234), digits(13.896), digits(15234.4)
        ('0.512', '13.9', '15234')
    """
    places = next((n for limit, n in PLACES_BELOW.items() if abs(value) < limit), 0)
    return f"{value:.{places}f}"
