"""The decisions on weights in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from paceline.actors.weights.history import decision_time


def table(decisions: Sequence[Mapping[str, Any]]) -> str:
    """The decisions as lines of text under a heading.

    ``before`` and ``after`` are acceptances: the served draft's and the candidate's, on held-out
    records for the gate, on live requests for the canary, the slow and the fast mean for drift.
    """
    heading = (
        f"{'time':19}  {'topic':10}  {'outcome':11}  {'version':>7}  {'before':>7}  {'after':>7}"
    )
    return "\n".join([heading, *(_row(decision).rstrip() for decision in decisions)])


def outcome_words(decision: Mapping[str, Any]) -> str:
    """``published`` is said of what all requests get, ``canary`` of what is on trial first."""
    outcome = str(decision.get("outcome", "?"))
    return "canary" if outcome == "published" and decision.get("canary") else outcome


def acceptances(decision: Mapping[str, Any]) -> tuple[Any, Any]:
    """Before and after, by whatever the decision rests on; None where it does not say."""
    for before, after in (
        ("stable_acceptance", "canary_acceptance"),
        ("acceptance_before", "acceptance"),
        ("acceptance_slow", "acceptance_fast"),
    ):
        if before in decision or after in decision:
            return decision.get(before), decision.get(after)
    return (
        decision.get("served_expected_acceptance"),
        decision.get("candidate_expected_acceptance"),
    )


def _row(decision: Mapping[str, Any]) -> str:
    when = datetime.fromtimestamp(decision_time(decision)).astimezone()
    before, after = acceptances(decision)
    return (
        f"{when:%Y-%m-%d %H:%M:%S}  {decision.get('topic', '?')!s:10}  "
        f"{outcome_words(decision):11}  {decision.get('version', '-')!s:>7}  "
        f"{_figure(before):>7}  {_figure(after):>7}  {_evidence(decision)}"
    )


def _evidence(decision: Mapping[str, Any]) -> str:
    """How sure it is, on how much, and why."""
    parts = []
    for name in ("gain", "difference"):
        bounds = [decision.get(f"{name}_{side}_bound") for side in ("lower", "upper")]
        if any(isinstance(bound, int | float) for bound in bounds):
            low, high = (f"{b:+.3f}" if isinstance(b, int | float) else "?" for b in bounds)
            parts.append(f"{name} {low} to {high}")
    counts = ("records", "canary_requests", "stable_requests", "requests")
    parts += [
        f"{decision[name]} {name.replace('_', ' ')}"
        for name in counts
        if isinstance(decision.get(name), int)
    ]
    if decision.get("restored_from") is not None:
        parts.append(f"weights of version {decision['restored_from']}")
    if decision.get("reason") not in (None, "better"):
        parts.append(str(decision["reason"]))
    return ", ".join(parts)


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
