"""Who drafts for a prompt: the router's rules, and those that they are measured against. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.actors.router.hedge import Hedge
from paceline.actors.router.policy import GENERAL, MinConfidence, choose_topic, route


@dataclass(frozen=True, slots=True)
class Tally:
    """One draft on one answer: speculative rounds, drafted and accepted tokens, and its gain.

    ``gain`` is the share of the answer's tokens that the draft would have proposed, teacher-forced:
    what the scorer measures.
    """

    rounds: int
    drafted: int
    accepted: int
    gain: float


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, what the classifier thinks of it, and what every expert brings.

    ``label`` is its topic by the data set, None where that is none of the experts'.
    """

    key: str
    label: str | None
    probabilities: Mapping[str, float]
    tallies: Mapping[str, Tally]


class Policy(Protocol):
    """A function from a prompt to an expert's name, that may learn from what came of it."""

    def pick(self, case: Case) -> str:
        """The expert; must not look at the tallies, unless it is an oracle."""
        ...

    def learn(self, case: Case) -> None:
        """The answer is there."""
        ...


class _Fixed:
    """Policies that learn nothing."""

    def learn(self, case: Case) -> None:
        """Nothing."""


class Always(_Fixed):
    """One draft for all."""

    def __init__(self, draft: str) -> None:
        """Take its name."""
        self._draft = draft

    def pick(self, case: Case) -> str:  # noqa: ARG002
        """Always the same."""
        return self._draft


class Rule(_Fixed):
    """The classifier's likeliest topic, ``general`` where that is unsure."""

    def __init__(self, experts: Collection[str], min_confidence: MinConfidence) -> None:
        """See :func:`paceline.actors.router.policy.choose_topic`."""
        self._experts, self._min_confidence = experts, min_confidence

    def pick(self, case: Case) -> str:
        """See Policy."""
        return choose_topic(case.probabilities, self._experts, self._min_confidence)


class Label(_Fixed):
    """An oracle that knows every prompt's data set; ``general`` where no expert is for it."""

    def __init__(self, experts: Collection[str]) -> None:
        """Take the experts' names."""
        self._experts = experts

    def pick(self, case: Case) -> str:
        """See Policy."""
        return case.label if case.label in self._experts else GENERAL


class Hindsight(_Fixed):
    """An oracle that has seen the answer: the best expert for it, or the worst one."""

    def __init__(self, *, worst: bool = False) -> None:
        """The best, unless told otherwise."""
        self._sign = -1.0 if worst else 1.0

    def pick(self, case: Case) -> str:
        """The expert with most (or fewest) accepted tokens a round; of equal ones the first."""

        def length(name: str) -> float:
            tally = case.tallies[name]
            return self._sign * tally.accepted / max(tally.rounds, 1)

        return max(sorted(case.tallies), key=length)


class Chance(_Fixed):
    """Any expert, all equally likely; the same one for a prompt in every order."""

    def __init__(self, experts: Collection[str], seed: int) -> None:
        """Take the experts' names."""
        self._experts, self._seed = sorted(experts), seed

    def pick(self, case: Case) -> str:
        """See Policy."""
        return self._experts[int(len(self._experts) * share_of(case.key, self._seed))]


class Measured:
    """What the server does: the rule, corrected by acceptance measured on some requests."""

    def __init__(
        self,
        experts: Collection[str],
        min_confidence: MinConfidence,
        sample_share: float,
        seed: int,
    ) -> None:
        """Start with the prior alone.

        Args:
            experts: ``general`` included.
            min_confidence: of the rule.
            sample_share: of the requests, on which every expert is scored.
            seed: of which those are.
        """
        self._experts, self._min_confidence = experts, min_confidence
        self._share, self._seed = sample_share, seed
        self._hedge = Hedge(experts)
        self._weights: Mapping[str, Mapping[str, float]] = {}

    def pick(self, case: Case) -> str:
        """See Policy."""
        found = route(case.probabilities, self._experts, self._min_confidence, self._weights)
        return found.draft

    def learn(self, case: Case) -> None:
        """Score every expert on the answer, where it is among those that are sampled."""
        if share_of(case.key, self._seed) < self._share:
            self.score(case)

    def score(self, case: Case) -> None:
        """The answer is among those that are sampled: score every expert on it."""
        topic = choose_topic(case.probabilities, self._experts, self._min_confidence)
        self._hedge.add_row(topic, case.key)
        for expert, tally in case.tallies.items():
            self._hedge.add_gain(topic, case.key, expert, tally.gain)
        self._weights = self._hedge.table()["weights"]


def share_of(key: str, seed: int) -> float:
    """A number in [0, 1) that depends on key and seed alone."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def picks_of(policy: Policy, cases: Sequence[Case]) -> list[str]:
    """The policy's choices along a stream; after each it learns what came of it."""
    picks = []
    for case in cases:
        picks.append(policy.pick(case))
        policy.learn(case)
    return picks


def replayed(agrees: Sequence[bool], k: int, max_tokens: int) -> Tally:
    """What greedy speculation with ``k`` tokens a round would have done, exactly.

    A draft's tokens are the target's as long as they are accepted, so that whether it agrees
    position by position, teacher-forced, decides every round.

    Args:
        agrees: per output token whether the draft's best one is the target's.
        k: tokens drafted per round.
        max_tokens: that the request allowed: a round does not draft beyond them.
    """
    at, rounds, drafted, accepted = 0, 0, 0, 0
    while at < len(agrees):
        tried = min(k, max_tokens - at - 1)
        run = 0
        while run < min(tried, len(agrees) - at) and agrees[at + run]:
            run += 1
        if tried > 0:
            rounds, drafted, accepted = rounds + 1, drafted + tried, accepted + run
        at += run + 1
    gain = math.fsum(map(float, agrees)) / len(agrees) if len(agrees) else 0.0
    return Tally(rounds, drafted, accepted, gain)
