"""Expected acceptance of suffix drafts, and how many of their tokens to verify. Pure.

A predicted token is compared with the one that the target emits there, whether it was drafted or
not: calibration costs no verification, so drafts that stopped paying are noticed, and noticed again
when they would, without probes. For a sampled row the emitted token is drawn from p, and a draft
with q = 1 is accepted with probability p: the comparison estimates the acceptance there too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from paceline.actors.speculation.suffix.index import MAX_CONTINUATION, MAX_MATCH, Match

_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24)  # least match of each class
_AGREEMENTS = 5
NUM_BINS = len(_LENGTHS) * _AGREEMENTS
_CLASS_OF_LENGTH = [
    max(bisect_right(_LENGTHS, length) - 1, 0) * _AGREEMENTS
    for length in range(MAX_MATCH + MAX_CONTINUATION + 1)
]
_WINDOW = 100.0  # trials
_PRIOR_TRIALS = 4.0
_WORTH = 1.03  # required goodput over that of the round without suffix drafts


def bin_of(length: int, votes: int, voters: int) -> int:
    """The class of a predicted token.

    Args:
        length: tokens before it that match.
        votes: places that go on with it.
        voters: places that go on.
    """
    if voters == 1:
        agreement = 1
    elif votes * 10 >= voters * 9:
        agreement = 4 if voters > 3 else 3
    else:
        agreement = 2 if votes * 2 > voters else 0
    return _CLASS_OF_LENGTH[length] + agreement


def bins_of(match: Match) -> list[int]:
    """The class of every token of a match, each with those before it as matching."""
    given = zip(match.votes, match.voters, strict=True)
    return [bin_of(match.length + i, *own) for i, own in enumerate(given)]


class SuffixEstimate:
    """Decayed acceptance of predicted tokens by class.

    Attributes:
        acceptance: present estimate by class.
    """

    def __init__(self, like: SuffixEstimate | None = None) -> None:
        """Start with a prior: that of short matches is low.

        Args:
            like: its present estimate is the prior.
        """
        self._trials, self._hits = [0.0] * NUM_BINS, [0.0] * NUM_BINS
        self._prior: list[float] = _prior() if like is None else list(like.acceptance)
        self.acceptance: list[float] = list(self._prior)

    def observe(self, bins: Sequence[int], tokens: Sequence[int], emitted: Sequence[int]) -> None:
        """Compare predicted tokens with those that the target emitted there, up to the first miss.

        Args:
            bins: class per predicted token.
            tokens: predicted.
            emitted: perhaps fewer or more.
        """
        keep = 1.0 - 1.0 / _WINDOW
        for own, predicted, actual in zip(bins, tokens, emitted, strict=False):
            hit = predicted == actual
            trials = self._trials[own] = keep * self._trials[own] + 1.0
            hits = self._hits[own] = keep * self._hits[own] + hit
            prior = _PRIOR_TRIALS * self._prior[own]
            self.acceptance[own] = (hits + prior) / (trials + _PRIOR_TRIALS)
            if not hit:
                return

    def expected_accepted(self, bins: Sequence[int]) -> list[float]:
        """Expected accepted tokens of the first 0, 1, ... of these."""
        expected, reach, acceptance = [0.0], 1.0, self.acceptance
        for own in bins:
            reach *= acceptance[own]
            expected.append(expected[-1] + reach)
        return expected


def _prior() -> list[float]:
    share = (0.3, 0.7, 0.6, 0.9, 1.0)  # by agreement
    return [least / (least + 3.0) * own for least in _LENGTHS for own in share]


def choose_lengths(
    expected: Mapping[int, Sequence[float]],
    drafted: Sequence[float],
    round_s: Callable[[int, Collection[int]], float],
) -> dict[int, int]:
    """Tokens of suffix drafts to verify, by row, for the most expected tokens per second.

    Rows are verified in one padded forward: a longer draft costs every row. A row with a suffix
    draft gets no other draft. Suffixes take the place of drafts that promise more only where that
    leaves fewer rows to draft for, at best none.

    Args:
        expected: per row with a match, the expected accepted tokens of its first 0, 1, ... tokens.
        drafted: per row of the batch, the expected accepted tokens of its draft; 0 without one.
        round_s: seconds of a round in which so many suffix tokens per row are verified, and the
            given rows draft otherwise.
    """
    others = [i for i, own in enumerate(drafted) if own > 0.0]
    batch = len(drafted)
    best = _WORTH * (batch + sum(drafted)) / round_s(0, others)
    chosen: dict[int, int] = {}
    for tokens in range(1, max(map(len, expected.values()))):
        lengths = {i: min(tokens, len(own) - 1) for i, own in expected.items()}
        suffixes = [expected[i][n] for i, n in lengths.items()]
        if batch + sum(suffixes) + sum(drafted) <= best * round_s(tokens, ()):
            continue  # as in most rounds of large batches
        better = {i: n for i, n in lengths.items() if expected[i][n] > drafted[i]}
        for rows in (lengths, better) if len(better) < len(lengths) else (lengths,):
            left = [i for i in others if i not in rows]
            gained = sum(expected[i][n] for i, n in rows.items()) + sum(drafted[i] for i in left)
            goodput = (batch + gained) / round_s(tokens, left)
            if rows and goodput > best:
                best, chosen = goodput, rows
    return chosen


def choose_ragged_lengths(
    expected: Mapping[int, Sequence[float]],
    drafted: Sequence[float],
    round_s: Callable[[int, Collection[int]], float],
) -> dict[int, int]:
    """The same if verification computes each row's own tokens alone.

    A row's token is worth its time if it is accepted with more than the tokens that the round
    emits in that time.

    Args:
        expected: see :func:`choose_lengths`.
        drafted: see there.
        round_s: seconds of a round in which so many suffix tokens of all rows are verified, and
            the given rows draft otherwise.
    """
    others = [i for i, own in enumerate(drafted) if own > 0.0]
    batch, most = len(drafted), sum(len(own) - 1 for own in expected.values())
    best = _WORTH * (batch + sum(drafted)) / round_s(0, others)
    token_s = (round_s(most, ()) - round_s(0, ())) / most
    chosen: dict[int, int] = {}
    for only_better in (True, False) if others else (False,):
        lengths, least = {}, best * token_s
        for i, own in expected.items():
            reached = [after - before for before, after in pairwise(own)]
            tokens = next((n for n, p in enumerate(reached) if p <= least), len(reached))
            if own[tokens] > (drafted[i] if only_better else 0.0):
                lengths[i] = tokens
        left = [i for i in others if i not in lengths]
        gained = sum(expected[i][n] for i, n in lengths.items()) + sum(drafted[i] for i in left)
        goodput = (batch + gained) / round_s(sum(lengths.values()), left)
        if lengths and goodput > best:
            best, chosen = goodput, lengths
    return chosen
