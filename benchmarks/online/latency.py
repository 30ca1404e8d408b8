"""What a block of open-loop traffic comes to: percentiles, goodput, acceptance over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from online.open_loop import Outcome


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client still calls fast: seconds to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float

    def met(self, outcome: Outcome) -> bool:
        """Whether an answer came whole and fast."""
        if outcome.error is not None or outcome.ttft_s is None:
            return False
        per_token = outcome.tpot_s if outcome.tpot_s is not None else 0.0
        return outcome.ttft_s <= self.ttft_s and per_token <= self.tpot_s


def limits_from(quiet: Sequence[Outcome], times: float) -> Limits:
    """So many times what an idle server needs, by the median of its answers.

    Raises:
        ValueError: none of them has two tokens.
    """
    whole = [o for o in quiet if o.error is None and o.ttft_s is not None and o.tpot_s is not None]
    if not whole:
        raise ValueError("no answer of an idle server to measure by")
    first = float(np.median([o.ttft_s for o in whole if o.ttft_s is not None]))
    after = float(np.median([o.tpot_s for o in whole if o.tpot_s is not None]))
    return Limits(times * first, times * after)


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """p50, p99 and mean of those that are there; None where none is."""
    known = [value for value in values if value is not None]
    if not known:
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(known, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "mean": float(np.mean(known))}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Speculation of some requests; None where nothing was drafted.

    ``first`` is the share of rounds whose first token was accepted: the one figure that does not
    move with the number of tokens drafted in a round.
    """

    acceptance_rate: float | None
    mean_acceptance_length: float | None
    first: float | None
    drafted: int


def acceptance(outcomes: Sequence[Outcome]) -> Acceptance:
    """All rounds of these requests together."""
    rounds = sum(o.rounds for o in outcomes)
    drafted = sum(o.drafted for o in outcomes)
    accepted = sum(o.accepted for o in outcomes)
    first = sum(o.first_accepted for o in outcomes)
    return Acceptance(
        accepted / drafted if drafted else None,
        1.0 + accepted / rounds if rounds else None,
        first / rounds if rounds else None,
        drafted,
    )


def over_time(outcomes: Sequence[Outcome], parts: int) -> list[dict[str, Any]]:
    """Acceptance of the requests that were due in each of so many equal parts of the block."""
    lasts = max((o.due_s for o in outcomes), default=0.0) or 1.0
    grouped: list[list[Outcome]] = [[] for _ in range(parts)]
    for outcome in outcomes:
        grouped[min(parts - 1, int(parts * outcome.due_s / lasts))].append(outcome)
    return [
        {"until_s": lasts * (part + 1) / parts} | asdict(acceptance(group))
        for part, group in enumerate(grouped)
    ]


def by_topic(outcomes: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Tokens, rounds that drafted, and those whose first draft was accepted, by true topic."""
    found: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        own = found.setdefault(outcome.topic, {"tokens": 0, "rounds": 0, "first_accepted": 0})
        for name in own:
            own[name] += getattr(outcome, name)
    return dict(sorted(found.items()))


def summary(outcomes: Sequence[Outcome], limits: Limits, parts: int = 6) -> dict[str, Any]:
    """The figures of a block.

    ``goodput`` is in requests and ``tokens_per_s`` in tokens per second of the block, which ends
    with its last answer; latencies are of the answers that came whole.
    """
    whole = [o for o in outcomes if o.error is None]
    lasts = max((o.due_s + o.e2e_s for o in whole), default=0.0) or 1.0
    good = sum(map(limits.met, outcomes))
    versions = {(o.draft, o.weight_version) for o in whole if o.weight_version}
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(whole),
        "seconds": lasts,
        "tokens_per_s": sum(o.tokens for o in whole) / lasts,
        "goodput": good / lasts,
        "within_limits": good / max(len(outcomes), 1),
        "ttft_s": percentiles([o.ttft_s for o in whole]),
        "tpot_s": percentiles([o.tpot_s for o in whole]),
        "e2e_s": percentiles([o.e2e_s for o in whole]),
        "pause_s": percentiles([o.pause_s for o in whole]),
        "lag_s": percentiles([o.lag_s for o in outcomes]),
        "answer_tokens": percentiles([float(o.tokens) for o in whole]),
        "versions_used": len(versions),
        "acceptance": asdict(acceptance(whole)),
        "by_topic": by_topic(whole),
        "over_time": over_time(whole, parts),
    }
