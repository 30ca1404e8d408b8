"""Where emitted tokens come from, for the requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from paceline.actors.engine.request import Origin, SamplingParams, TokenOrigin
from paceline.actors.engine.sequence import Sequence
from paceline.actors.speculation.rejection_sampler import (
    Proposal,
    RejectionSampleOutput,
    acceptance_probability,
)


def token_origins(
    batch: Items[Sequence],
    proposal: Proposal,
    sampled: RejectionSampleOutput,
    logits: Tensor,
    emitted: Items[Items[int]],
) -> list[list[TokenOrigin]]:
    """Who wrote a round's tokens, and how sure of them the target was.

    Args:
        batch: B sequences, before they take the round's tokens.
        proposal: what was drafted for them.
        sampled: what rejection sampling accepted and added.
        logits: float ``[B, k + 1, V]``, the target's as they came.
        emitted: per row the tokens that the round added, at most k + 1.

    Returns:
        per row an entry per emitted token, empty where nothing is asked; ``text_offset`` is 0.
    """
    rows = [i for i, sequence in enumerate(batch) if sequence.request.origins]
    answers: list[list[TokenOrigin]] = [[] for _ in batch]
    if not rows:
        return answers
    sure = iter(_target_probabilities(logits, rows, emitted))
    chances = _acceptance_probabilities(proposal, sampled, rows)
    drafts, drafted = proposal.token_ids.tolist(), proposal.num_drafted.tolist()
    accepted = sampled.num_accepted.tolist()
    for at, i in enumerate(rows):
        own = chances[at] if chances and _tosses_coins(batch[i].request.sampling) else []
        proposed = drafts[i][: drafted[i]]
        for step in range(len(emitted[i])):
            answers[i].append(_told(batch[i], step, proposed, accepted[i], next(sure), own))
    return answers


def _told(
    sequence: Sequence,
    step: int,
    proposed: Items[int],
    accepted: int,
    sure: float,
    chances: Items[float],
) -> TokenOrigin:
    """One token of a sequence's round, in which ``proposed`` was drafted."""
    drafted = len(proposed)
    return TokenOrigin(
        origin=_origin(step, drafted, accepted),
        draft=sequence.request.draft if drafted else None,
        weight_version=sequence.weight_version if drafted else None,
        target_probability=sure,
        acceptance_probability=chances[step] if chances and step < drafted else None,
        rejected_token_id=proposed[step] if accepted <= step < drafted else None,
    )


def _origin(step: int, drafted: int, accepted: int) -> Origin:
    if not drafted:
        return "plain"
    if step < accepted:
        return "accepted"
    return "bonus" if step == drafted else "recovered"


def _tosses_coins(sampling: SamplingParams) -> bool:
    """Greedy and seeded requests accept a draft token where it is the one they would take."""
    return not sampling.greedy and sampling.seed is None


def _target_probabilities(
    logits: Tensor, rows: Items[int], emitted: Items[Items[int]]
) -> list[float]:
    at = [(i, step, token) for i in rows for step, token in enumerate(emitted[i])]
    where, steps, tokens = torch.tensor(at, device=logits.device).T
    laws = torch.softmax(logits[where, steps].float(), dim=-1)
    found: list[float] = laws.gather(-1, tokens[:, None])[:, 0].tolist()
    return found


def _acceptance_probabilities(
    proposal: Proposal, sampled: RejectionSampleOutput, rows: Items[int]
) -> list[list[float]] | None:
    """min(1, p/q) of every drafted token, as verification compared it with chance."""
    drafted = proposal.token_ids.shape[1]
    if sampled.probs is None or drafted == 0:
        return None
    at = torch.tensor(rows, device=sampled.probs.device)
    tokens = proposal.token_ids[at]
    p_draft = sampled.probs[at, :drafted].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    inside = torch.arange(drafted, device=at.device) < proposal.num_drafted[at, None]
    q_draft = proposal.token_probs[at]
    q_draft = torch.where(inside, q_draft, torch.ones_like(q_draft))
    chances: list[list[float]] = acceptance_probability(p_draft.double(), q_draft.double()).tolist()
    return chances
