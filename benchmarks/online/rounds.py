"""Rounds of greedy speculation, replayed on recorded answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.speculation.suffix.estimates import SuffixEstimate, bins_of
from paceline.actors.speculation.suffix.index import SEPARATOR, Match, SuffixIndex

_TOKENS = 2**17  # of a topic's answers
_CONTEXT = 2**12  # of a request
_PROMPT = 16  # tokens that are kept before an answer
_WINDOW = 100.0  # rounds of the draft of a model, of which its expected accepted tokens are known
Agreement = NDArray[np.bool_]  # see Evaluator.agreements


@dataclass(frozen=True, slots=True)
class Tally:
    """One draft on one answer: rounds, drafted and accepted tokens, and the scorer's gain.

    ``gain`` is the share of the answer's tokens that the draft proposes, teacher-forced.
    """

    rounds: int
    drafted: int
    accepted: int
    gain: float


def replayed(agrees: Agreement, k: int, max_tokens: int) -> Tally:
    """Outcome of greedy speculation with ``k`` tokens a round; exact for causal LMs.

    A draft's tokens are the target's as long as they are accepted, so teacher-forced agreement
    decides every round. Where the CPU's kernels compute an answer's first token with its prompt, no
    draft proposes it: those who want just these rounds leave it out.

    Args:
        agrees: bool ``[S, N]``; a round's later tokens use its last step.
        k: drafted tokens.
        max_tokens: of the answer; the last one is not drafted for.
    """
    count = agrees.shape[1]
    at, rounds, drafted, accepted = 0, 0, 0, 0
    while at < count:
        tried = min(k, max_tokens - at - 1)
        run = _accepted(agrees, at, tried)
        if tried > 0:
            rounds, drafted, accepted = rounds + 1, drafted + tried, accepted + run
        at += run + 1
    return Tally(rounds, drafted, accepted, float(agrees.mean()) if count else 0.0)


def _accepted(agrees: Agreement, at: int, tried: int) -> int:
    """Accepted tokens of so many that are drafted from a position on."""
    steps, count = agrees.shape
    run = 0
    while run < min(tried, count - at) and agrees[min(run, steps - 1), at + run]:
        run += 1
    return run


def _matching(tokens: Iterable[int], output: Sequence[int]) -> int:
    """First tokens that are those of an output."""
    pairs = zip(tokens, output, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _learn(topic: SuffixIndex, record: ReplayRecord) -> None:
    """Add an answer to those of its topic."""
    prompt, output = record.prompt_token_ids.tolist(), record.output_token_ids.tolist()
    topic.extend([*prompt[-_PROMPT:], *output, SEPARATOR])


def _context(record: ReplayRecord) -> SuffixIndex:
    """The tokens of a request before its answer."""
    own = SuffixIndex(_CONTEXT)
    own.extend(record.prompt_token_ids.tolist())
    return own


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
    for record in known:
        _learn(topic, record)
    for record in records:
        own, output = _context(record), record.output_token_ids.tolist()
        at = rounds = drafted = accepted = 0
        while at < len(output):
            tried, run = min(k, max_tokens - at - 1), 0
            matches = [own.find(own, tried), topic.find(own, tried)] if tried > 0 else []
            match = max((m for m in matches if m), key=lambda m: m.length, default=None)
            if match is not None:
                run = _matching(match.tokens, output[at:])
                drafted, accepted = drafted + len(match.tokens), accepted + run
            rounds += 1
            own.extend(output[at : at + run + 1])
            at += run + 1
        found.append(Tally(rounds, drafted, accepted, accepted / max(len(output), 1)))
        _learn(topic, record)
    return found


class Both:
    """The draft of a model and suffixes together, one request of a topic after the other.

    Each round that promises more accepted tokens drafts: what a suffix promises is what the server
    expects of it, what the draft promises is its mean over its last rounds.

    Args:
        k: drafted tokens of a round, at most.
        max_tokens: of an answer; the last one is not drafted for.
    """

    def __init__(self, k: int, max_tokens: int) -> None:
        self._k, self._max_tokens = k, max_tokens
        self._topic = SuffixIndex(_TOKENS)
        self._estimates = SuffixEstimate(), SuffixEstimate()  # of the request, of the topic
        self._rounds, self._accepted = 1.0, 1.0  # of the draft, decayed

    def replayed(self, record: ReplayRecord, agrees: Agreement) -> Tally:
        """Outcome of greedy speculation on an answer, which is then known.

        Args:
            record: of the answer.
            agrees: bool ``[S, N]``, of the draft.
        """
        own, output = _context(record), record.output_token_ids.tolist()
        at = rounds = drafted = accepted = 0
        while at < len(output):
            tried = min(self._k, self._max_tokens - at - 1)
            matches = [index.find(own, tried) for index in (own, self._topic)] if tried > 0 else []
            suffix = self._best(matches)
            if suffix is not None:
                tried, run = len(suffix.tokens), _matching(suffix.tokens, output[at:])
            else:
                run = _accepted(agrees, at, tried)
                self._observe_draft(tried, run)
            rounds, drafted, accepted = rounds + 1, drafted + max(tried, 0), accepted + run
            emitted = output[at : at + run + 1]
            for match, estimate in zip(matches, self._estimates, strict=False):
                if match is not None:
                    estimate.observe(bins_of(match), match.tokens, emitted)
            own.extend(emitted)
            at += run + 1
        _learn(self._topic, record)
        return Tally(rounds, drafted, accepted, accepted / max(len(output), 1))

    def _best(self, matches: Sequence[Match | None]) -> Match | None:
        """The match that promises most, and more than the draft; None without any."""
        best, promised = None, self._accepted / self._rounds
        for match, estimate in zip(matches, self._estimates, strict=False):
            if match is not None:
                expected = estimate.expected_accepted(bins_of(match))[-1]
                if expected > promised:
                    best, promised = match, expected
        return best

    def _observe_draft(self, tried: int, run: int) -> None:
        if tried == self._k:
            keep = 1.0 - 1.0 / _WINDOW
            self._rounds, self._accepted = keep * self._rounds + 1.0, keep * self._accepted + run
