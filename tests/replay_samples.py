"""Replay records made from nothing, for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paceline.actors.replay.record import ReplayRecord


def make_record(
    *,
    request_id: str = "r1",
    topic: str = "sql",
    length: int = 5,
    top: int = 4,
    vocab: int = 300,
    prompt: tuple[int, ...] = (1, 2, 3),
    temperature: float = 0.0,
    created: float = 1_000.0,
    seed: int = 0,
) -> ReplayRecord:
    """A record whose target distribution is peaked on the emitted token."""
    rng = np.random.default_rng(seed)
    ids = np.stack(
        [rng.choice(vocab, size=top, replace=False) for _ in range(length)] or [[0] * top]
    )
    ids = ids[:length].astype(np.int32).reshape(length, top)
    mass = -np.sort(-rng.dirichlet(np.full(top + 1, 0.3), size=length)[:, :top], axis=1)
    mass = np.clip(mass, 1e-6, None)
    logprobs = np.log(mass).astype(np.float16)
    drafted = rng.random(length) < 0.5
    return ReplayRecord(
        request_id=request_id,
        topic=topic,
        expert=topic,
        weight_version=0,
        created=created,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        output_token_ids=ids[:, 0].copy(),
        target_top_ids=ids,
        target_top_logprobs=logprobs,
        target_tail_mass=np.clip(1.0 - mass.sum(1), 0.0, None).astype(np.float32),
        draft_token_ids=np.where(drafted, ids[:, 0], -1).astype(np.int32),
        accepted=np.where(drafted, 1, -1).astype(np.int8),
        draft_logprobs=np.where(drafted, -0.5, np.nan).astype(np.float16),
        processed_top_probs=None if temperature == 0.0 else mass.astype(np.float16),
    )


def with_branches(
    record: ReplayRecord, branches: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0
) -> ReplayRecord:
    """The record with its draft rejected at these positions, where it went on with these tokens."""
    total = sum(len(tokens) for _, tokens in branches)
    behind = make_record(length=total, top=record.target_top_ids.shape[1], seed=seed + 1)
    draft_token_ids, accepted = record.draft_token_ids.copy(), record.accepted.copy()
    for position, tokens in branches:
        draft_token_ids[position], accepted[position] = tokens[0], 0
    return dataclasses.replace(
        record,
        draft_token_ids=draft_token_ids,
        accepted=accepted,
        branch_positions=np.array([at for at, _ in branches], dtype=np.int32),
        branch_lengths=np.array([len(tokens) for _, tokens in branches], dtype=np.int32),
        branch_token_ids=np.array([t for _, ts in branches for t in ts], dtype=np.int32),
        branch_top_ids=behind.target_top_ids,
        branch_top_logprobs=behind.target_top_logprobs,
        branch_tail_mass=behind.target_tail_mass,
    )
