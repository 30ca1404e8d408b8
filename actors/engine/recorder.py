"""Collects one request's replay record while it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.engine.request import GenerationRequest
from paceline.actors.engine.top_tokens import top_logits
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.speculation.rejection_sampler import Proposal, RejectionSampleOutput

_WAITING_LOGITS = 1 << 19


@dataclass(frozen=True, slots=True)
class TargetLog:
    """The target's view of M emitted positions.

    ``top_ids`` int32 ``[M, K]``; ``top_logprobs`` float16 ``[M, K]`` at T = 1, descending;
    ``tail_mass`` float32 ``[M]``; ``processed`` float16 ``[M, K]``, the probabilities after
    temperature, top_k and top_p of the same ids, None in an all-greedy batch.
    """

    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float16]
    tail_mass: NDArray[np.float32]
    processed: NDArray[np.float16] | None


@torch.inference_mode()
def target_log(logits: Tensor, probs: Tensor | None, size: int) -> TargetLog:
    """Reduce the target's logits to what replay keeps.

    Args:
        logits: float ``[M, V]``.
        probs: float32 ``[M, V]`` processed distribution, or None.
        size: K.
    """
    top, ids, total = top_logits(logits, size)
    logprobs = top - total[:, None]
    tail = (1.0 - logprobs.exp().sum(-1)).clamp(min=0.0)
    processed = None if probs is None else probs.gather(-1, ids).half().cpu().numpy()
    return TargetLog(
        top_ids=ids.int().cpu().numpy(),
        top_logprobs=logprobs.half().cpu().numpy(),
        tail_mass=tail.cpu().numpy(),
        processed=processed,
    )


@dataclass(frozen=True, slots=True)
class Branch:
    """What a draft went on with from a rejected token on, and what the target said behind it.

    ``position`` is the rejected one among the emitted; ``tokens`` are the draft's, the rejected
    one first; ``at`` are the rows of ``log`` that follow each of them.
    """

    position: int
    tokens: list[int]
    log: TargetLog
    at: slice


@dataclass(slots=True)
class Recorder:
    """Emitted positions of one request, in order."""

    _ids: list[NDArray[np.int32]] = field(default_factory=list)
    _logprobs: list[NDArray[np.float16]] = field(default_factory=list)
    _tail: list[NDArray[np.float32]] = field(default_factory=list)
    _processed: list[NDArray[np.float16]] = field(default_factory=list)
    _draft_ids: list[int] = field(default_factory=list)
    _accepted: list[int] = field(default_factory=list)
    _draft_logprobs: list[float] = field(default_factory=list)
    _branches: list[Branch] = field(default_factory=list)

    def add(
        self,
        log: TargetLog,
        at: slice,
        drafts: list[int],
        draft_probs: list[float],
        num_accepted: int,
        behind: slice | None = None,
    ) -> None:
        """Take one round.

        Args:
            log: of all rows of the round.
            at: the emitted positions of this request in it, ``num_accepted + 1`` of them.
            drafts: the drafted tokens.
            draft_probs: q of every drafted token.
            num_accepted: how many were accepted.
            behind: the positions that follow the drafted tokens from the first rejected one on,
                one each; None or empty keeps nothing of these continuations of a rejected prefix.
        """
        self._ids.append(log.top_ids[at])
        self._logprobs.append(log.top_logprobs[at])
        self._tail.append(log.tail_mass[at])
        if log.processed is not None:
            self._processed.append(log.processed[at])
        if behind is not None and behind.stop > behind.start:
            self._branches.append(
                Branch(len(self._draft_ids) + num_accepted, drafts[num_accepted:], log, behind)
            )
        for position in range(num_accepted + 1):
            drafted = position < len(drafts)
            self._draft_ids.append(drafts[position] if drafted else -1)
            self._accepted.append(int(position < num_accepted) if drafted else -1)
            self._draft_logprobs.append(
                float(np.log(max(draft_probs[position], 1e-7))) if drafted else float("nan")
            )

    def finish(
        self,
        request: GenerationRequest,
        output: list[int],
        weight_version: int,
        created: float,
    ) -> ReplayRecord:
        """The record of an answer of ``output`` tokens; later positions are dropped."""
        count = len(output)
        sampling = request.sampling
        processed = None
        if self._processed and not sampling.greedy:
            processed = np.concatenate(self._processed)[:count]
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
            target_top_ids=np.concatenate(self._ids)[:count],
            target_top_logprobs=np.concatenate(self._logprobs)[:count],
            target_tail_mass=np.concatenate(self._tail)[:count],
            draft_token_ids=np.asarray(self._draft_ids[:count], dtype=np.int32),
            accepted=np.asarray(self._accepted[:count], dtype=np.int8),
            draft_logprobs=np.asarray(self._draft_logprobs[:count], dtype=np.float16),
            processed_top_probs=processed,
            **stacked([b for b in self._branches if b.position < count]),
        )


def stacked(branches: Sequence[Branch]) -> dict[str, NDArray[Any]]:
    """The ``branch_*`` arrays of a record; none where there are no branches."""
    if not branches:
        return {}
    return {
        "branch_positions": np.array([b.position for b in branches], dtype=np.int32),
        "branch_lengths": np.array([len(b.tokens) for b in branches], dtype=np.int32),
        "branch_token_ids": np.array([t for b in branches for t in b.tokens], dtype=np.int32),
        "branch_top_ids": np.concatenate([b.log.top_ids[b.at] for b in branches]),
        "branch_top_logprobs": np.concatenate([b.log.top_logprobs[b.at] for b in branches]),
        "branch_tail_mass": np.concatenate([b.log.tail_mass[b.at] for b in branches]),
    }


class RoundLog:
    """Logs the target's distribution at every emitted position, several rounds at a time.

    A round at batch 1 emits a handful of positions, and reducing their logits costs a dozen small
    operations: they are kept until there are enough of them, or a request ends.
    """

    def __init__(self, size: int, *, branches: bool = False) -> None:
        """Keep ``size`` top probabilities per position, with ``branches`` rejected ones' too."""
        self._size = size
        self._branches = branches
        self._logits: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._held = 0  # numbers that the views keep in memory
        self._waiting: list[tuple[Recorder, list[int], list[float], int, int]] = []

    def add(
        self,
        recorders: Sequence[Recorder | None],
        proposal: Proposal,
        sampled: RejectionSampleOutput,
        logits: Tensor,
    ) -> None:
        """Take a round.

        Args:
            recorders: of B rows, None where nothing of the request is kept.
            proposal: what was drafted for them.
            sampled: what rejection sampling accepted and added.
            logits: float ``[B, k + 1, V]``, not written to afterwards.
        """
        kept = [i for i, recorder in enumerate(recorders) if recorder is not None]
        if not kept:
            return
        if bool(self._probs) != (sampled.probs is not None):
            self.flush()
        accepted, drafted = sampled.num_accepted.tolist(), proposal.num_drafted.tolist()
        drafts, draft_probs = proposal.token_ids.tolist(), proposal.token_probs.tolist()
        for i in kept:
            recorder, count = recorders[i], drafted[i]
            assert recorder is not None
            logged = (count if self._branches else accepted[i]) + 1
            # Views: what they look at is new in every round and stays theirs.
            self._logits.append(logits[i, :logged])
            if sampled.probs is not None:
                self._probs.append(sampled.probs[i, :logged])
            self._waiting.append(
                (recorder, drafts[i][:count], draft_probs[i][:count], accepted[i], logged)
            )
        self._held += logits.numel()
        if self._held >= _WAITING_LOGITS:
            self.flush()

    def flush(self) -> None:
        """Hand all that waits to its recorders."""
        if not self._logits:
            return
        logits, probs, waiting = self._logits, self._probs, self._waiting
        self._logits, self._probs, self._waiting, self._held = [], [], [], 0
        log = target_log(torch.cat(logits), torch.cat(probs) if probs else None, self._size)
        start = 0
        for recorder, drafts, draft_probs, accepted, logged in waiting:
            emitted, end = start + accepted + 1, start + logged
            at, behind = slice(start, emitted), slice(emitted, end)
            recorder.add(log, at, drafts, draft_probs, accepted, behind)
            start = end
