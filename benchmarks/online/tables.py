"""Markdown tables and the figures in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, places: int = 3) -> str:
    """A figure, or a dash."""
    return "-" if value is None else f"{value:.{places}f}"


def interval(found: dict[str, Any], places: int = 3) -> str:
    """A figure with its 95 % interval."""
    if found["low"] is None:
        return number(found["value"], places)
    ends = f"{number(found['low'], places)} to {number(found['high'], places)}"
    return f"{number(found['value'], places)} ({ends})"
