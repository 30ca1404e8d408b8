"""The engine: continuous batching over rounds of propose, verify, emit.

Single-threaded and free of Ray: requests come in by :meth:`Engine.add`, weights by
:meth:`Engine.swap`, and :meth:`Engine.step` runs one round and returns what it emitted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.actors.decoding.kv import RowTable
from paceline.actors.decoding.proposer import DraftRow, Proposer
from paceline.actors.decoding.recorder import Recorder, target_log
from paceline.actors.decoding.request import (
    DRAFT_OFF,
    FINISH_ABORT,
    FINISH_ERROR,
    GenerationChunk,
    GenerationRequest,
)
from paceline.actors.decoding.runner import ModelRunner
from paceline.actors.decoding.sampling import batch_params
from paceline.actors.decoding.sequence import Sequence
from paceline.actors.decoding.text import TextStream
from paceline.actors.decoding.verification import Proposal, Verdict, verify
from paceline.actors.replay.record import ReplayRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Limits of an engine; see TargetSettings for the words."""

    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int
    replay_top_k: int
    prefill_chunk: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one request got from a round; ``record`` comes with the last chunk."""

    request_id: str
    chunk: GenerationChunk
    record: ReplayRecord | None = None


class Engine:
    """Decodes up to ``max_num_seqs`` requests at once."""

    def __init__(
        self,
        runner: ModelRunner,
        proposer: Proposer,
        tokenizer: Any,
        settings: EngineSettings,
        generator: torch.Generator,
        now: Callable[[], float],
    ) -> None:
        """Put the parts together.

        Args:
            runner: the target with its rows.
            proposer: where draft tokens come from.
            tokenizer: a transformers fast tokenizer, for text and stop strings.
            settings: limits.
            generator: randomness of unseeded requests.
            now: unix time in seconds, for records.
        """
        self._runner = runner
        self._proposer = proposer
        self._tokenizer = tokenizer
        self._settings = settings
        self._generator = generator
        self._now = now
        self._rows = RowTable(settings.max_num_seqs)
        self._running: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._swaps: deque[tuple[str, int, Mapping[str, Tensor]]] = deque()
        self.draft_failures = 0

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True where :meth:`step` has something to do."""
        return bool(self._running or self._waiting or self._swaps)

    def drafts(self) -> dict[str, int]:
        """Every draft that a request may name, with its weight_version."""
        return self._proposer.drafts()

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: for an empty prompt, or one that leaves no room for a token.
        """
        room = self._settings.max_model_len - len(request.prompt_token_ids)
        if not request.prompt_token_ids or room < 1:
            raise ValueError(
                f"the prompt has {len(request.prompt_token_ids)} tokens; "
                f"1 to {self._settings.max_model_len - 1} can be served"
            )
        wanted = request.num_speculative_tokens
        k = self._settings.num_speculative_tokens if wanted is None else wanted
        drafts = self._proposer.drafts()
        if request.draft == DRAFT_OFF or request.draft not in drafts:
            k = 0
        self._waiting.append(
            Sequence(
                request=request,
                text=TextStream(self._tokenizer, request.sampling.stop),
                max_tokens=min(request.sampling.max_tokens, room),
                num_speculative_tokens=k,
                weight_version=drafts.get(request.draft, 0),
                recorder=Recorder() if request.store else None,
            )
        )

    def abort(self, request_id: str) -> None:
        """Drop a request, running or waiting, and free what it holds; unknown ids are fine."""
        if request_id in self._running:
            self._running[request_id].finish_reason = FINISH_ABORT
            self._release(request_id)
        self._waiting = deque(s for s in self._waiting if s.request_id != request_id)

    def swap(self, expert: str, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Queue new draft weights; they take effect between two rounds."""
        self._swaps.append((expert, weight_version, state))

    def step(self) -> list[StepOutput]:
        """Run one round; returns what every request got."""
        self._apply_swaps()
        self._admit()
        self._prefill()
        ready = [s for s in self._running.values() if s.prefilled]
        return self._decode(ready) if ready else []

    def fail_all(self) -> list[StepOutput]:
        """End every request with an error, after a fault of the target itself."""
        outputs = []
        for sequence in [*self._running.values(), *self._waiting]:
            sequence.finish_reason = FINISH_ERROR
            outputs.append(StepOutput(sequence.request_id, sequence.chunk()))
        for request_id in list(self._running):
            self._release(request_id)
        self._waiting.clear()
        return outputs

    def _apply_swaps(self) -> None:
        while self._swaps:
            expert, version, state = self._swaps.popleft()
            try:
                self._proposer.swap(expert, version, state)
            except (KeyError, ValueError):
                logger.exception("draft %s: version %d was not taken", expert, version)

    def _admit(self) -> None:
        while self._waiting and not self._rows.full:
            sequence = self._waiting.popleft()
            self._rows.add(sequence.request_id)
            self._running[sequence.request_id] = sequence

    def _prefill(self) -> None:
        """Compute at most ``prefill_chunk`` prompt tokens, so that no round takes long."""
        budget = self._settings.prefill_chunk
        for sequence in self._running.values():
            if budget <= 0:
                return
            start = sequence.num_computed
            end = min(len(sequence.tokens) - 1, start + budget)
            if end > start:
                row = self._rows.row(sequence.request_id)
                self._runner.prefill(row, sequence.tokens[start:end], start)
                sequence.num_computed = end
                budget -= end - start

    def _release(self, request_id: str) -> None:
        del self._running[request_id]
        self._proposer.release(request_id)
        moved = self._rows.release(request_id)
        if moved is not None:
            other, source, destination = moved
            length = self._running[str(other)].num_computed
            self._runner.kv.move(source, destination, length)

    def _propose(self, batch: list[Sequence]) -> Proposal:
        """Draft tokens for the batch; a failing proposer costs this round its drafts only."""
        indices = [i for i, s in enumerate(batch) if s.draft_budget() > 0]
        nothing = Proposal.empty(len(batch), self._runner.device)
        if not indices:
            return nothing
        rows = [
            DraftRow(
                request_id=batch[i].request_id,
                draft=batch[i].request.draft,
                tokens=batch[i].tokens,
                num_output=batch[i].num_output,
                num_draft_tokens=batch[i].draft_budget(),
                sampling=batch[i].request.sampling,
            )
            for i in indices
        ]
        try:
            proposal = self._proposer.propose(rows)
        except Exception:
            self.draft_failures += 1
            logger.exception("the round goes on without speculation")
            for row in rows:
                self._proposer.release(row.request_id)
            return nothing
        return proposal if len(indices) == len(batch) else _spread(proposal, indices, len(batch))

    @torch.inference_mode()
    def _decode(self, batch: list[Sequence]) -> list[StepOutput]:
        batch.sort(key=lambda s: self._rows.row(s.request_id))
        proposal = self._propose(batch)
        device = self._runner.device
        last = torch.tensor([s.tokens[-1] for s in batch], device=device)
        tokens = torch.cat([last[:, None], proposal.token_ids], dim=1)
        starts = torch.tensor([len(s.tokens) - 1 for s in batch], device=device)
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=device)
        span = max(len(s.tokens) for s in batch) + tokens.shape[1] - 1
        rows = [self._rows.row(s.request_id) for s in batch]
        logits = self._runner.forward(rows, tokens, positions, span)
        outputs = torch.tensor([s.num_output for s in batch], device=device)
        params = batch_params([s.request.sampling for s in batch], device)
        verdict = verify(logits, proposal, params, outputs, self._generator)
        return self._emit(batch, proposal, verdict, logits)

    def _emit(
        self, batch: list[Sequence], proposal: Proposal, verdict: Verdict, logits: Tensor
    ) -> list[StepOutput]:
        drafts, drafted = proposal.token_ids.tolist(), proposal.num_drafted.tolist()
        accepted, final = verdict.num_accepted.tolist(), verdict.final_tokens.tolist()
        self._record(batch, proposal, verdict, logits)
        for i, sequence in enumerate(batch):
            emitted = [*drafts[i][: accepted[i]], final[i]]
            sequence.accept(drafted[i], accepted[i], emitted, self._settings.eos_token_ids)
        # Only now: closing one request moves another's row, as long as that one knows it is.
        return [StepOutput(s.request_id, s.chunk(), self._close(s)) for s in batch]

    def _close(self, sequence: Sequence) -> ReplayRecord | None:
        """Free a finished request; returns its record where one is kept."""
        if sequence.finish_reason is None:
            return None
        self._release(sequence.request_id)
        if sequence.recorder is None:
            return None
        return sequence.recorder.finish(
            sequence.request, sequence.output, sequence.weight_version, self._now()
        )

    def _record(
        self, batch: list[Sequence], proposal: Proposal, verdict: Verdict, logits: Tensor
    ) -> None:
        """Log the target's distribution at every emitted position of the stored requests."""
        kept = [i for i, s in enumerate(batch) if s.recorder is not None]
        if not kept:
            return
        accepted = verdict.num_accepted.tolist()
        at = [(i, position) for i in kept for position in range(accepted[i] + 1)]
        rows, steps = torch.tensor(at, device=logits.device).T
        probs = None if verdict.probs is None else verdict.probs[rows, steps]
        log = target_log(logits[rows, steps], probs, self._settings.replay_top_k)
        draft_probs = proposal.token_probs.tolist()
        start = 0
        for i in kept:
            count = int(proposal.num_drafted[i])
            recorder = batch[i].recorder
            assert recorder is not None
            recorder.add(
                log,
                slice(start, start + accepted[i] + 1),
                proposal.token_ids[i, :count].tolist(),
                draft_probs[i][:count],
                accepted[i],
            )
            start += accepted[i] + 1


def _spread(proposal: Proposal, indices: list[int], rows: int) -> Proposal:
    """A proposal for some rows of a batch as one for all of them; the others draft nothing."""
    at = torch.tensor(indices, device=proposal.token_ids.device)

    def widen(part: Tensor) -> Tensor:
        return part.new_zeros(rows, *part.shape[1:]).index_copy_(0, at, part)

    return Proposal(
        token_ids=widen(proposal.token_ids),
        num_drafted=widen(proposal.num_drafted),
        token_probs=widen(proposal.token_probs),
        support_ids=widen(proposal.support_ids),
        support_probs=widen(proposal.support_probs),
    )
