"""What an expert keeps of a sequence, and the drafts of one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.actors.decoding.pool.wire import Float32, Int32
from paceline.actors.decoding.proposer import DraftRow
from paceline.actors.decoding.request import SamplingParams
from paceline.actors.decoding.verification import Proposal


@dataclass(slots=True)
class Drafts:
    """One row's proposal: ``[k]`` tokens and probabilities, ``[k, S]`` supports."""

    token_ids: Int32
    token_probs: Float32
    support_ids: Int32
    support_probs: Float32

    def part(self, start: int, stop: int) -> Drafts:
        """Positions from ``start`` up to ``stop``."""
        at = slice(start, stop)
        return Drafts(
            self.token_ids[at], self.token_probs[at], self.support_ids[at], self.support_probs[at]
        )


@dataclass(slots=True)
class Known:
    """A sequence as the expert knows it.

    ``guess`` are the drafts last answered, from which drafting ahead goes on. ``ahead`` was
    drafted behind ``assumed``, the tokens that are to follow the present ones.
    """

    key: str
    draft: str
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    num_output: int = 0
    guess: tuple[int, ...] = ()
    assumed: tuple[int, ...] = ()
    ahead: Drafts | None = None

    def row(self, num_draft_tokens: int, further: tuple[int, ...] = ()) -> DraftRow:
        """What the stack is asked, with tokens behind the present ones."""
        return DraftRow(
            request_id=self.key,
            draft=self.draft,
            tokens=[*self.tokens, *further],
            num_output=self.num_output + len(further),
            num_draft_tokens=num_draft_tokens,
            sampling=self.sampling,
        )


def split(rows: Sequence[DraftRow], proposal: Proposal) -> dict[str, Drafts]:
    """The drafts of every row that has some."""
    counts = proposal.num_drafted.tolist()
    token_ids = proposal.token_ids.int().cpu().numpy()
    token_probs = proposal.token_probs.float().cpu().numpy()
    support_ids = proposal.support_ids.int().cpu().numpy()
    support_probs = proposal.support_probs.float().cpu().numpy()
    return {
        row.request_id: Drafts(
            token_ids[i, :count],
            token_probs[i, :count],
            support_ids[i, :count],
            support_probs[i, :count],
        )
        for i, (row, count) in enumerate(zip(rows, counts, strict=True))
        if count
    }


def padded(found: Sequence[Drafts | None]) -> dict[str, Any]:
    """Rows of different lengths as the arrays of an Answer, by their names; None is no drafts."""
    lengths = [0 if part is None else len(part.token_ids) for part in found]
    width = max((part.support_ids.shape[1] for part in found if part is not None), default=0)
    rows, steps = len(found), max(lengths, default=0)
    token_ids, token_probs = np.zeros((rows, steps), np.int32), np.zeros((rows, steps), np.float32)
    support_ids = np.zeros((rows, steps, width), np.int32)
    support_probs = np.zeros((rows, steps, width), np.float32)
    for i, part in enumerate(found):
        if part is not None:
            count, own = part.support_ids.shape
            token_ids[i, :count] = part.token_ids
            token_probs[i, :count] = part.token_probs
            support_ids[i, :count, :own] = part.support_ids
            support_probs[i, :count, :own] = part.support_probs
    return {
        "num_drafted": np.asarray(lengths, dtype=np.int32),
        "token_ids": token_ids,
        "token_probs": token_probs,
        "support_ids": support_ids,
        "support_probs": support_probs,
    }
