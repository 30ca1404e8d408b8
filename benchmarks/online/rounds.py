"""Rounds of greedy speculation, replayed on recorded answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Tally:
    """One draft on one answer: rounds, drafted and accepted tokens, and the scorer's gain.

    ``gain`` is the share of the answer's tokens that the draft proposes, teacher-forced.
    """

    rounds: int
    drafted: int
    accepted: int
    gain: float


def replayed(agrees: NDArray[np.bool_], k: int, max_tokens: int) -> Tally:
    """Outcome of greedy speculation with ``k`` tokens a round; exact for causal LMs.

    A draft's tokens are the target's as long as they are accepted, so teacher-forced agreement
    decides every round.

    Args:
        agrees: bool ``[S, N]``, see Evaluator.agreements; a round's later tokens use its last step.
        k: drafted tokens.
        max_tokens: of the answer; the last one is not drafted for.
    """
    steps, count = agrees.shape
    at, rounds, drafted, accepted = 0, 0, 0, 0
    while at < count:
        tried = min(k, max_tokens - at - 1)
        run = 0
        while run < min(tried, count - at) and agrees[min(run, steps - 1), at + run]:
            run += 1
        if tried > 0:
            rounds, drafted, accepted = rounds + 1, drafted + tried, accepted + run
        at += run + 1
    return Tally(rounds, drafted, accepted, float(agrees.mean()) if count else 0.0)
