"""Sources of emitted tokens, for the requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor

from paceline.actors.engine.request import SUFFIX, SamplingParams, SourceKind, TokenSource
from paceline.actors.engine.sequence import Sequence
from paceline.actors.speculation.rejection_sampler import (
    Proposal,
    RejectionSampleOutput,
    acceptance_probability,
)


def token_sources(
    batch: Items[Sequence],
    proposal: Proposal,
    sampled: RejectionSampleOutput,
    logits: Tensor,
    emitted: Items[Items[int]],
) -> list[list[TokenSource]]:
    """Return the sources of a round's tokens, with their target probabilities.

    Args:
        batch: B sequences, before the round's tokens are appended.
        proposal: their draft tokens.
        sampled: output of the rejection sampler.
        logits: float ``[B, k + 1, V]``, the target's, unprocessed.
        emitted: per row the round's tokens, at most k + 1.

    Returns:
        per row an entry per emitted token, empty if not requested; ``text_offset`` is 0.
    """
    rows = [i for i, sequence in enumerate(batch) if sequence.request.token_sources]
    sources: list[list[TokenSource]] = [[] for _ in batch]
    if not rows:
        return sources
    target_probs = iter(_target_probabilities(logits, rows, emitted))
    acceptance = _acceptance_probabilities(proposal, sampled, rows)
    drafts, drafted = proposal.token_ids.tolist(), proposal.num_drafted.tolist()
    accepted, forced = sampled.num_accepted.tolist(), proposal.num_forced or [0] * len(batch)
    suffix = proposal.num_suffix or [0] * len(batch)
    for at, i in enumerate(rows):
        is_random = _accepts_at_random(batch[i].request.sampling)
        own = acceptance[at] if acceptance and is_random else []
        proposed = drafts[i][: drafted[i] - forced[i]]
        for step in range(len(emitted[i])):
            sources[i].append(
                _source(batch[i], step, proposed, accepted[i], next(target_probs), own)
            )
        if suffix[i]:
            sources[i] = [_of_suffix(source) for source in sources[i]]
    return sources


def _of_suffix(source: TokenSource) -> TokenSource:
    """Return the source of a round in which suffixes drafted: the rejected token stays secret."""
    if source.draft is None:
        return source
    known = source.acceptance_probability if source.kind == "accepted" else None
    return replace(
        source,
        draft=SUFFIX,
        weight_version=None,
        rejected_token_id=None,
        acceptance_probability=known,
    )


def _source(
    sequence: Sequence,
    step: int,
    proposed: Items[int],
    accepted: int,
    target_probability: float,
    acceptance: Items[float],
) -> TokenSource:
    drafted = len(proposed)
    kind = _kind(step, drafted, accepted)
    by_draft = kind not in ("plain", "forced")
    return TokenSource(
        kind=kind,
        draft=sequence.request.draft if by_draft else None,
        weight_version=sequence.weight_version if by_draft else None,
        target_probability=target_probability,
        acceptance_probability=acceptance[step] if acceptance and step < drafted else None,
        rejected_token_id=proposed[step] if accepted <= step < drafted else None,
    )


def _kind(step: int, drafted: int, accepted: int) -> SourceKind:
    if step < accepted:
        return "accepted" if step < drafted else "forced"
    if not drafted:
        return "plain"
    return "bonus" if accepted >= drafted else "recovered"


def _accepts_at_random(sampling: SamplingParams) -> bool:
    """Greedy and seeded requests accept a draft token if it is the one they would take."""
    return not sampling.greedy and sampling.seed is None


def _target_probabilities(
    logits: Tensor, rows: Items[int], emitted: Items[Items[int]]
) -> list[float]:
    at = [(i, step, token) for i in rows for step, token in enumerate(emitted[i])]
    indices, steps, tokens = torch.tensor(at, device=logits.device).T
    probs = torch.softmax(logits[indices, steps].float(), dim=-1)
    target_probs: list[float] = probs.gather(-1, tokens[:, None])[:, 0].tolist()
    return target_probs


def _acceptance_probabilities(
    proposal: Proposal, sampled: RejectionSampleOutput, rows: Items[int]
) -> list[list[float]] | None:
    """Return min(1, p/q) of every drafted token, as the rejection sampler computed it."""
    drafted = proposal.token_ids.shape[1]
    if sampled.probs is None or drafted == 0:
        return None
    at = torch.tensor(rows, device=proposal.token_ids.device)
    tokens = proposal.token_ids[at]
    p_draft = sampled.probs[at, :drafted].of(tokens.unsqueeze(-1)).squeeze(-1)
    inside = torch.arange(drafted, device=at.device) < proposal.num_drafted[at, None]
    q_draft = proposal.draft_probs[at].masked_fill(~inside, 1.0)
    found: list[list[float]] = acceptance_probability(p_draft.double(), q_draft.double()).tolist()
    return found
