"""Suffix drafts: what followed the last time, in the request itself or in recorded answers.

They need no model, so a request has them whatever its draft is, or if there is none. Each round
every row's continuation is looked up, in microseconds, and compared with what the target emitted:
see `estimates` for what comes of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.actors.engine.sequence import Sequence as RunningSequence
from paceline.actors.speculation.proposer import INITIAL_SUFFIX
from paceline.actors.speculation.suffix.estimates import SuffixEstimate, bins_of
from paceline.actors.speculation.suffix.index import Match, SuffixIndex
from paceline.actors.speculation.suffix.store import SuffixStore

_CONTEXT_TOKENS = 2**15  # of a request, the latest
_PROMPT_TOKENS = 16  # that are kept before a recorded answer, for matches at its start
_LEAST_ACCEPTANCE = 0.05  # of a first token that is worth weighing


class SuffixDraft(NamedTuple):
    """Tokens that may follow, and the expected accepted ones of the first 0, 1, ... of them."""

    tokens: list[int]
    expected: list[float]


class _Prediction(NamedTuple):
    estimates: tuple[SuffixEstimate, SuffixEstimate]
    bins: list[int]
    tokens: list[int]


@dataclass(slots=True)
class _Row:
    """A request's own tokens, ``seen`` of them, and what they were predicted to go on with."""

    index: SuffixIndex = field(default_factory=lambda: SuffixIndex(_CONTEXT_TOKENS))
    seen: int = 0
    predictions: list[_Prediction] = field(default_factory=list)


class SuffixArm:
    """Looks up the continuations of running requests. Used by the engine's thread alone.

    Attributes:
        store: recorded answers; None for drafts from the request's own tokens alone.
    """

    def __init__(self, store: SuffixStore | None) -> None:
        """Start without calibration."""
        self.store = store
        self._rows: dict[str, _Row] = {}
        # By whether it is sampled, and whether its tokens come from the store; by topic too.
        self._common: dict[tuple[bool, bool], SuffixEstimate] = {}
        self._estimates: dict[tuple[str, bool, bool], SuffixEstimate] = {}

    def look_up(self, batch: Sequence[RunningSequence], most: int) -> dict[int, SuffixDraft]:
        """Continuations that are worth weighing, by row; also learns from the latest tokens.

        Args:
            batch: B sequences.
            most: tokens per row.
        """
        found = {}
        for i, sequence in enumerate(batch):
            if sequence.suffix_drafts:
                row = self._follow(sequence)
                draft = self._predict(sequence, row, sequence.draft_budget(most))
                if draft is not None:
                    found[i] = draft
        return found

    def record(self, sequence: RunningSequence) -> None:
        """Add a finished answer to the store if later requests may repeat it."""
        request = sequence.request
        if self.store is None or request.background or not request.may_be_repeated:
            return
        start = max(len(request.prompt_token_ids) - _PROMPT_TOKENS, 0)
        if sequence.num_output:
            given = request.topic, request.cache_salt, request.request_id
            self.store.add(*given, sequence.tokens[start:])

    def release(self, request_id: str) -> None:
        """Forget a sequence; unknown ones are fine."""
        self._rows.pop(request_id, None)

    def _follow(self, sequence: RunningSequence) -> _Row:
        """Append a sequence's new tokens to its index, and compare them with the predicted ones."""
        row = self._rows.get(sequence.request_id)
        if row is None:
            row = self._rows[sequence.request_id] = _Row()
        new = sequence.tokens[row.seen :]
        row.index.extend(new)
        row.seen += len(new)
        for prediction in row.predictions:
            for estimate in prediction.estimates:
                estimate.observe(prediction.bins, prediction.tokens, new)
        row.predictions.clear()
        return row

    def _predict(self, sequence: RunningSequence, row: _Row, most: int) -> SuffixDraft | None:
        """Predict from the request and from the store; returns the better draft."""
        if most < 1:
            return None
        matches = row.index.find(row.index, most), self._recorded(sequence, row, most)
        best, gain = None, 0.0
        for shared, match in enumerate(matches):
            if match is None:
                continue
            estimates = self._estimates_of(sequence, shared=bool(shared))
            bins = bins_of(match)
            row.predictions.append(_Prediction(estimates, bins, match.tokens))
            expected = estimates[0].expected_accepted(bins)
            if expected[1] >= _LEAST_ACCEPTANCE and expected[-1] > gain:
                best, gain = SuffixDraft(match.tokens, expected), expected[-1]
        return best

    def _recorded(self, sequence: RunningSequence, row: _Row, most: int) -> Match | None:
        # Initial weights show what learning brings, of which recorded answers are a part.
        if self.store is None or sequence.draft.endswith(INITIAL_SUFFIX):
            return None
        with self.store.lock:
            index = self.store.index(sequence.request.topic, sequence.request.cache_salt)
            return None if index is None else index.find(row.index, most)

    def _estimates_of(
        self, sequence: RunningSequence, *, shared: bool
    ) -> tuple[SuffixEstimate, SuffixEstimate]:
        """Return the acceptance of a topic's drafts, which starts as that of all, and of all."""
        topic, sampled = sequence.request.topic, not sequence.request.sampling.greedy
        common = self._common.get((sampled, shared))
        if common is None:
            common = self._common[sampled, shared] = SuffixEstimate()
        own = self._estimates.get((topic, sampled, shared))
        if own is None:
            own = self._estimates[topic, sampled, shared] = SuffixEstimate(common)
        return own, common
