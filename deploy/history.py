"""The gate's decisions in words."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from paceline.actors.weights.history import decision_time


def table(decisions: Sequence[dict[str, Any]]) -> str:
    """The decisions as lines of text under a heading."""
    heading = f"{'time':19}  {'topic':10}  {'outcome':9}  {'version':>7}  {'served':>7}  {'new':>7}"
    return "\n".join([heading, *map(_row, decisions)])


def _row(decision: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(decision_time(decision)).astimezone()
    served = decision.get("served_expected_acceptance")
    new = decision.get("candidate_expected_acceptance")
    return (
        f"{when:%Y-%m-%d %H:%M:%S}  {decision.get('topic', '?')!s:10}  "
        f"{decision.get('outcome', '?')!s:9}  {decision.get('version', '-')!s:>7}  "
        f"{_figure(served):>7}  {_figure(new):>7}"
    )


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
