"""Replay records of requests, collected while they are decoded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.engine.inference import inference
from paceline.actors.engine.request import GenerationRequest
from paceline.actors.engine.sampling import TargetProbs
from paceline.actors.engine.top_tokens import top_logits_of
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.speculation.rejection_sampler import Proposal, RejectionSampleOutput

_MAX_PENDING_LOGITS = 1 << 22
_MIN_DRAFT_PROB = 1e-7


@dataclass(frozen=True, slots=True)
class TargetTopK:
    """The target's top K tokens at M positions.

    Attributes:
        ids: int32 ``[M, K]``.
        logits: float32 ``[M, K]``, descending.
        logsumexp: float32 ``[M]``, of all logits.
        processed: float32 ``[M, K]``, probabilities of the same ids after temperature, top_k and
            top_p; None in an all-greedy batch.
    """

    ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    logsumexp: NDArray[np.float32]
    processed: NDArray[np.float32] | None


@inference
def target_top_k(logits: Sequence[Tensor], probs: Sequence[TargetProbs], size: int) -> TargetTopK:
    """Reduce the target's logits to the top K tokens.

    Args:
        logits: of consecutive positions, float ``[m, V]`` each, M in all.
        probs: their processed distributions; or none.
        size: K.
    """
    top, ids, total = top_logits_of(logits, size)
    processed = None
    if probs:
        parts = zip(probs, torch.split(ids, [len(part) for part in logits]), strict=True)
        processed = torch.cat([part.of(own) for part, own in parts]).cpu().numpy()
    return TargetTopK(ids.int().cpu().numpy(), top.cpu().numpy(), total.cpu().numpy(), processed)


@dataclass(frozen=True, slots=True)
class Branch:
    """A draft's continuation from a rejected token on, with the target's distributions.

    Attributes:
        position: of the rejected token in the output.
        tokens: the rejected draft token and those after it.
        log: distributions of the round.
        at: rows of ``log`` that follow each of ``tokens``.
    """

    position: int
    tokens: list[int]
    log: TargetTopK
    at: slice


@dataclass(slots=True)
class Recorder:
    """Emitted positions of one request, in order."""

    _emitted: list[tuple[TargetTopK, slice]] = field(default_factory=list)
    _draft_ids: list[int] = field(default_factory=list)
    _accepted: list[int] = field(default_factory=list)
    _draft_probs: list[float] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)

    def add(
        self,
        log: TargetTopK,
        at: slice,
        drafts: list[int],
        draft_probs: list[float],
        num_accepted: int,
        behind: slice | None = None,
    ) -> None:
        """Append one round.

        Args:
            log: distributions of all rows of the batch, several rounds of them.
            at: this request's emitted positions in it, ``num_accepted + 1``.
            drafts: drafted tokens.
            draft_probs: of every drafted token, see Proposal.token_probs.
            num_accepted: number of accepted ones.
            behind: the positions that follow the drafted tokens from the first rejected one on;
                None or empty records no branch, nor does one that the target could not compute.
        """
        self._emitted.append((log, at))
        if (
            behind is not None
            and behind.stop > behind.start
            and np.isfinite(log.logsumexp[behind]).all()
        ):
            self._branches.append(
                Branch(len(self._draft_ids) + num_accepted, drafts[num_accepted:], log, behind)
            )
        emitted, drafted = num_accepted + 1, min(num_accepted + 1, len(drafts))
        undrafted = emitted - drafted
        self._draft_ids += drafts[:emitted] + [-1] * undrafted
        self._draft_probs += draft_probs[:emitted] + [math.nan] * undrafted
        accepted = min(num_accepted, drafted)
        self._accepted += [1] * accepted + [0] * (drafted - accepted) + [-1] * undrafted

    def finish(
        self,
        request: GenerationRequest,
        output: list[int],
        weight_version: int,
        created: float,
        hidden: Tensor | None = None,
        hidden_start: int = 0,
    ) -> ReplayRecord:
        """Make the record of the ``output`` tokens; later positions are dropped.

        Args:
            request: with the prompt.
            output: its tokens.
            weight_version: of the draft.
            created: unix seconds.
            hidden: the target's hidden states ``[T, H]`` from ``hidden_start`` on, or None.
            hidden_start: a position.
        """
        count = len(output)
        sampling = request.sampling
        processed = None
        if not sampling.greedy and not request.grammar:
            processed = _processed(self._emitted, count)
        top_ids, top_logprobs, tail_mass = _distributions(self._emitted)
        draft_probs = np.maximum(self._draft_probs[:count], _MIN_DRAFT_PROB)
        return ReplayRecord(
            request_id=request.request_id,
            topic=request.topic,
            expert=request.draft,
            weight_version=weight_version,
            created=created,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            prompt_token_ids=np.asarray(request.prompt_token_ids, dtype=np.int32),
            output_token_ids=np.asarray(output, dtype=np.int32),
            target_top_ids=top_ids[:count],
            target_top_logprobs=top_logprobs[:count],
            target_tail_mass=tail_mass[:count],
            draft_token_ids=np.asarray(self._draft_ids[:count], dtype=np.int32),
            accepted=np.asarray(self._accepted[:count], dtype=np.int8),
            draft_logprobs=np.log(draft_probs).astype(np.float16),
            processed_top_probs=processed,
            hidden=None if hidden is None else _bfloat16_bits(hidden),
            hidden_start=hidden_start,
            first_prompt=request.first_prompt,
            **stack_branches([b for b in self._branches if b.position < count]),
        )


def _distributions(
    logs: Sequence[tuple[TargetTopK, slice]],
) -> tuple[NDArray[np.int32], NDArray[np.float16], NDArray[np.float32]]:
    """Top ids, their log-probabilities, and the mass of all other tokens, of logged positions."""
    ids = np.concatenate([log.ids[at] for log, at in logs])
    top = np.concatenate([log.logits[at] for log, at in logs])
    logprobs = top - np.concatenate([log.logsumexp[at] for log, at in logs])[:, None]
    tail = np.maximum(1.0 - np.exp(logprobs).sum(-1), 0.0)
    return ids, logprobs.astype(np.float16), tail.astype(np.float32)


def _processed(logs: Sequence[tuple[TargetTopK, slice]], count: int) -> NDArray[np.float16] | None:
    """Processed probabilities of the first positions; None if there are none."""
    found = [log.processed[at] for log, at in logs if log.processed is not None]
    return np.concatenate(found)[:count].astype(np.float16) if found else None


def _bfloat16_bits(hidden: Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = hidden.to("cpu", torch.bfloat16).view(torch.uint16).numpy()
    return bits


class BranchArrays(TypedDict, total=False):
    """The ``branch_*`` arrays of a ReplayRecord."""

    branch_positions: NDArray[np.int32]
    branch_lengths: NDArray[np.int32]
    branch_token_ids: NDArray[np.int32]
    branch_top_ids: NDArray[np.int32]
    branch_top_logprobs: NDArray[np.float16]
    branch_tail_mass: NDArray[np.float32]


def stack_branches(branches: Sequence[Branch]) -> BranchArrays:
    """Return the ``branch_*`` arrays of a record; empty without branches."""
    if not branches:
        return {}
    top_ids, top_logprobs, tail_mass = _distributions([(b.log, b.at) for b in branches])
    return {
        "branch_positions": np.array([b.position for b in branches], dtype=np.int32),
        "branch_lengths": np.array([len(b.tokens) for b in branches], dtype=np.int32),
        "branch_token_ids": np.array([t for b in branches for t in b.tokens], dtype=np.int32),
        "branch_top_ids": top_ids,
        "branch_top_logprobs": top_logprobs,
        "branch_tail_mass": tail_mass,
    }


class RecordBuffer:
    """Reduces the logits of several rounds at a time and passes them to the recorders.

    A round at batch 1 has a handful of positions; behind a forward, Python that is not in the
    processor's caches takes longer than their reduction. So logits are kept until there are enough
    of them, or a request ends.
    """

    def __init__(self, size: int, *, branches: bool = False) -> None:
        """Record ``size`` tokens per position, with ``branches`` also behind rejected ones."""
        self._size = size
        self._branches = branches
        self._logits: list[Tensor] = []
        self._probs: list[TargetProbs] = []
        self._num_pending = 0  # logits that the views keep in memory
        self._pending: list[tuple[Recorder, list[int], list[float], int, int]] = []

    def add(
        self,
        recorders: Sequence[Recorder | None],
        proposal: Proposal,
        sampled: RejectionSampleOutput,
        logits: Tensor,
    ) -> None:
        """Add a round.

        Args:
            recorders: of B rows, None for requests without a record.
            proposal: their draft tokens.
            sampled: output of the rejection sampler.
            logits: float ``[B, k + 1, V]``, not modified afterwards.
        """
        kept = [i for i, recorder in enumerate(recorders) if recorder is not None]
        if not kept:
            return
        if bool(self._probs) != (sampled.probs is not None):
            self.flush()
        accepted, drafted = sampled.num_accepted.tolist(), proposal.num_by_model
        drafts, draft_probs = proposal.token_ids.tolist(), proposal.token_probs.tolist()
        for i in kept:
            recorder, count = recorders[i], drafted[i]
            assert recorder is not None
            logged = max(count if self._branches else 0, accepted[i]) + 1
            # Views suffice: every round has new tensors.
            self._logits.append(logits[i, :logged])
            if sampled.probs is not None:
                self._probs.append(sampled.probs[i, :logged])
            self._pending.append(
                (recorder, drafts[i][:count], draft_probs[i][:count], accepted[i], logged)
            )
        self._num_pending += logits.numel()
        if self._num_pending >= _MAX_PENDING_LOGITS:
            self.flush()

    def flush(self) -> None:
        """Reduce the pending logits and pass them to their recorders."""
        if not self._logits:
            return
        logits, probs, pending = self._logits, self._probs, self._pending
        self._logits, self._probs, self._pending, self._num_pending = [], [], [], 0
        log = target_top_k(logits, probs, self._size)
        start = 0
        for recorder, drafts, draft_probs, accepted, logged in pending:
            emitted, end = start + accepted + 1, start + logged
            at, behind = slice(start, emitted), slice(emitted, end)
            recorder.add(log, at, drafts, draft_probs, accepted, behind)
            start = end
