"""Records that a tiny draft learns in seconds: each token is the one before plus a shift."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paceline.actors.replay.record import ReplayRecord

if TYPE_CHECKING:
    from paceline.actors.training.candidate import Candidate
    from paceline.actors.training.distiller import MicroStep

TINY_VOCAB = 64
_LENGTH, _TOP = 12, 8


def training_record(
    number: int, *, shift: int = 1, created: float = 0.0, length: int = _LENGTH
) -> ReplayRecord:
    """The ``number``-th record, with an answer of ``length`` tokens."""
    first = 3 + number % (TINY_VOCAB - 3)
    outputs = (first + shift * np.arange(1, length + 1)) % TINY_VOCAB
    ids = (outputs[:, None] + np.arange(_TOP)) % TINY_VOCAB
    mass = np.array([0.9, *[0.01] * (_TOP - 1)])
    return ReplayRecord(
        request_id=f"r{number}",
        topic="sql",
        expert="sql",
        weight_version=0,
        created=created,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        prompt_token_ids=np.array([1, number % TINY_VOCAB, first], dtype=np.int32),
        output_token_ids=outputs.astype(np.int32),
        target_top_ids=ids.astype(np.int32),
        target_top_logprobs=np.tile(np.log(mass), (length, 1)).astype(np.float16),
        target_tail_mass=np.full(length, 1.0 - mass.sum(), dtype=np.float32),
        draft_token_ids=np.full(length, -1, dtype=np.int32),
        accepted=np.full(length, -1, dtype=np.int8),
        draft_logprobs=np.full(length, np.nan, dtype=np.float16),
    )


def learn(candidate: Candidate, records: Sequence[ReplayRecord]) -> MicroStep:
    """Run one micro-step on records that are weighed by themselves."""
    return candidate.learn(candidate.make_shares([records])[0])
