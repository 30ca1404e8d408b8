"""Rounds of greedy speculation, replayed on recorded answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.speculation.suffix.index import SEPARATOR, SuffixIndex

_TOKENS = 2**17  # of a topic's answers
_CONTEXT = 2**12  # of a request
_PROMPT = 16  # tokens that are kept before an answer


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


def replayed_suffixes(
    records: Iterable[ReplayRecord], k: int, max_tokens: int, known: Iterable[ReplayRecord] = ()
) -> list[Tally]:
    """Outcome of greedy speculation with what followed the last time; each answer is then known.

    The continuation of the longer match drafts, of the request itself if both are as long. A round
    without a match drafts nothing.

    Args:
        records: of one topic, in their order.
        k: drafted tokens of a round, at most.
        max_tokens: of an answer; the last one is not drafted for.
        known: records of answers that came before.
    """
    topic, found = SuffixIndex(_TOKENS), list[Tally]()

    def learn(record: ReplayRecord) -> None:
        prompt, output = record.prompt_token_ids.tolist(), record.output_token_ids.tolist()
        topic.extend([*prompt[-_PROMPT:], *output, SEPARATOR])

    for record in known:
        learn(record)
    for record in records:
        own, output = SuffixIndex(_CONTEXT), record.output_token_ids.tolist()
        own.extend(record.prompt_token_ids.tolist())
        at = rounds = drafted = accepted = 0
        while at < len(output):
            tried, run = min(k, max_tokens - at - 1), 0
            matches = [own.find(own, tried), topic.find(own, tried)] if tried > 0 else []
            match = max((m for m in matches if m), key=lambda m: m.length, default=None)
            if match is not None:
                pairs = zip(match.tokens, output[at:], strict=False)
                run = next((i for i, (a, b) in enumerate(pairs) if a != b), len(match.tokens))
                run = min(run, len(output) - at)
                drafted, accepted = drafted + len(match.tokens), accepted + run
            rounds += 1
            own.extend(output[at : at + run + 1])
            at += run + 1
        found.append(Tally(rounds, drafted, accepted, accepted / max(len(output), 1)))
        learn(record)
    return found
