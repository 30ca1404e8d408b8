"""Engine with continuous batching and speculative decoding.

Single-threaded and independent of Ray. :meth:`Engine.step` runs one round: apply weight updates,
schedule, prefill, draft, verify, emit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.actors.engine.grammar import GrammarCompiler, GrammarError, tokenizer_json
from paceline.actors.engine.inference import inference
from paceline.actors.engine.logits_processors import TokenMasks, count_tokens, make_token_masks
from paceline.actors.engine.model_runner import ModelRunner, PromptTokens
from paceline.actors.engine.recorder import RecordBuffer
from paceline.actors.engine.request import (
    FAILED,
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_FAULT,
    FINISH_GRAMMAR,
    FINISH_LENGTH,
    FINISH_NOT_FINITE,
    FINISH_REFUSED,
    GenerationChunk,
    GenerationRequest,
    TokenLogprob,
    TokenSource,
)
from paceline.actors.engine.sampling import (
    SamplingBatchCache,
    prompt_logprobs,
    token_logprobs,
)
from paceline.actors.engine.scheduler import Scheduler, split_prefill_budget
from paceline.actors.engine.sequence import Sequence, make_sequence
from paceline.actors.engine.settings import EngineSettings
from paceline.actors.engine.token_sources import token_sources
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.replay.record import MAX_LENGTH, ReplayRecord, fit
from paceline.actors.speculation.draft_runner import DraftRunner
from paceline.actors.speculation.rejection_sampler import (
    Proposal,
    RejectionSampleOutput,
    non_finite_positions,
    rejection_sample,
    up_to_finite,
)
from paceline.actors.weights.draft_outcomes import DraftOutcome

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MAX_PROMPT_LOGITS = 1 << 23  # per forward whose logits are all kept


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one request and round; ``record`` comes with the last chunk."""

    request_id: str
    chunk: GenerationChunk
    record: ReplayRecord | None = None
    outcome: DraftOutcome | None = None


class Engine:
    """Decodes up to ``max_num_seqs`` requests at once.

    Attributes:
        draft_runner: proposes draft tokens.
        updates: weight updates to apply between two rounds.
        grammars: compiles those of requests; a compiled one takes the engine's thread no time.
    """

    def __init__(
        self,
        runner: ModelRunner,
        draft_runner: DraftRunner,
        tokenizer: PreTrainedTokenizerBase,
        settings: EngineSettings,
        generator: torch.Generator,
        now: Callable[[], float],
    ) -> None:
        """Assemble an engine.

        Args:
            runner: the target with its KV cache.
            draft_runner: proposes draft tokens.
            tokenizer: of the target, a transformers fast tokenizer.
            settings: limits.
            generator: randomness of unseeded requests.
            now: unix time in seconds, for records.
        """
        self._runner = runner
        self.draft_runner = draft_runner
        self.updates = draft_runner.updates
        self._tokenizer = tokenizer
        self._settings = settings
        self._generator = generator
        self._record_buffer = self._make_record_buffer()
        self.grammars = GrammarCompiler(
            lambda: tokenizer_json(tokenizer), runner.vocab_size, settings.eos_token_ids
        )
        self._params = SamplingBatchCache(runner.device)
        self._now = now
        self._scheduler = Scheduler(
            kv=runner.kv,
            max_num_seqs=settings.max_num_seqs,
            max_speculative_tokens=settings.max_speculative_tokens,
            prefix_cache=settings.prefix_cache,
            on_free=draft_runner.release,
        )
        self._rows = self._scheduler.rows
        self._running = self._scheduler.running
        self._waiting = self._scheduler.waiting
        self._finished: list[Sequence] = []

    @property
    def draft_failures(self) -> int:
        """Rounds without speculation because a draft failed."""
        return self.draft_runner.failures

    @property
    def num_running(self) -> int:
        """Number of requests with a row."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._waiting)

    @property
    def preemptions(self) -> int:
        """Preemptions so far."""
        return self._scheduler.num_preemptions

    @property
    def prefix_cache(self) -> tuple[int, int]:
        """Prompt tokens that were looked up in the prefix cache so far, and found."""
        return self._scheduler.num_looked_up, self._scheduler.num_cached

    @property
    def kv_blocks(self) -> tuple[int, int]:
        """(total, available) blocks of the target's KV cache."""
        allocator = self._runner.kv.allocator
        return allocator.size, allocator.num_available

    @property
    def admitted(self) -> list[str]:
        """Ids of the requests that got a row in the latest round, some not for the first time."""
        return self._scheduler.admitted

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` has something to do."""
        return bool(self._running or self._waiting or self._finished or self.updates)

    def drafts(self) -> dict[str, int]:
        """Return the weight_version of every draft that a request may name."""
        return self.draft_runner.drafts()

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; one with output is resumed.

        Raises:
            ValueError: it cannot be served, see :func:`make_sequence`.
        """
        sequence = make_sequence(
            request,
            self._settings,
            self._tokenizer,
            self.draft_runner.drafts(),
            self._runner.vocab_size,
            self.grammars,
        )
        (self._waiting if sequence.finish_reason is None else self._finished).append(sequence)

    def abort(self, request_id: str) -> None:
        """Remove a request if it is running or waiting, and free its row and blocks."""
        if request_id in self._running:
            sequence = self._running[request_id]
            sequence.finish_reason = FINISH_ABORT
            self._scheduler.cache_prefix(sequence)  # for a client that timed out and comes back
            self._scheduler.free(request_id)
        for sequence in [s for s in self._waiting if s.request_id == request_id]:
            self._waiting.remove(sequence)
        self._finished = [s for s in self._finished if s.request_id != request_id]

    def reset_prefix_cache(self) -> None:
        """See :meth:`Scheduler.reset_prefix_cache`."""
        self._scheduler.reset_prefix_cache()

    @inference
    def step(self) -> list[StepOutput]:
        """Run one round and return its outputs."""
        finished, self._finished = self._finished, []
        outputs = [StepOutput(s.request_id, s.next_chunk()) for s in finished]
        self.updates.apply(busy=bool(self._running))
        self._scheduler.schedule()
        prompts = self._prefill()
        outputs += self._finish_prompts()
        begun = {s.request_id for s, size in prompts if size == s.num_uncomputed}
        ready = [s for s in self._running.values() if s.prefilled or s.request_id in begun]
        if not ready:
            self._compute(prompts)
            return outputs
        others = [
            s for s in self._running.values() if not s.prefilled and s.request_id not in begun
        ]
        return outputs + self._decode(ready, others, prompts)

    def fail_all(self) -> list[StepOutput]:
        """Finish all requests after a failure of the target, waiting ones as refused."""
        outputs = []
        for sequence in [*self._running.values(), *self._waiting]:
            running = sequence.request_id in self._running
            sequence.finish_reason = FINISH_FAULT if running else FINISH_REFUSED
            outputs.append(StepOutput(sequence.request_id, sequence.next_chunk()))
        self._drop_records()
        for request_id in list(self._running):
            self._scheduler.free(request_id)
        self.reset_prefix_cache()
        self._waiting.clear()
        return outputs

    def _prefill(self) -> list[tuple[Sequence, int]]:
        """Compute at most ``prefill_chunk`` prompt tokens, which bounds the length of a round.

        Returns:
            those of them that decoding computes in the same forward, which reads weights once:
            requests and numbers of tokens.
        """
        left = self._settings.prefill_chunk
        while left and (prompts := [s for s in self._running.values() if not s.prefilled]):
            computing, waiting = self._scheduler.choose_prompts(prompts)
            shares = split_prefill_budget([s.num_uncomputed for s in computing], left)
            now, later = list[tuple[Sequence, int]](), list[tuple[Sequence, int]]()
            for sequence, share in zip(computing, shares, strict=True):
                joins = self._runner.is_ragged and not waiting and sequence.joins_decoding
                if share:
                    (later if joins else now).append((sequence, share))
            self._compute(now)
            if not waiting:
                return later
            left -= sum(shares)
            for sequence in waiting:
                self._scheduler.take_prefix(sequence)
        return []

    def _compute(self, parts: list[tuple[Sequence, int]]) -> None:
        """Compute the next tokens of prompts, so many of each."""
        plain = [part for part in parts if not part[0].needs_prompt_logprobs]
        if plain:
            self._runner.prefill_prompts(self._prompt_tokens(plain))
            self._note_computed(plain)
        for sequence, size in parts:
            if sequence.needs_prompt_logprobs:
                self._compute_logprobs(sequence, size)
                self._scheduler.cache_prefix(sequence)

    def _prompt_tokens(self, parts: list[tuple[Sequence, int]]) -> list[PromptTokens]:
        return [
            PromptTokens(self._rows.row(s.request_id), s.tokens[start : start + size], start)
            for s, size in parts
            for start in (s.num_computed,)
        ]

    def _note_computed(self, parts: list[tuple[Sequence, int]]) -> None:
        for sequence, size in parts:
            sequence.num_computed += size
            self._scheduler.cache_prefix(sequence)

    def _compute_logprobs(self, sequence: Sequence, size: int) -> None:
        """Compute the next tokens of a prompt with their log-probabilities, ``size`` at most."""
        start, row = sequence.num_computed, self._rows.row(sequence.request_id)
        wanted = sequence.request.sampling.prompt_logprobs
        assert wanted is not None
        size = min(size, max(1, _MAX_PROMPT_LOGITS // self._runner.vocab_size))
        logits = self._runner.prefill(row, sequence.tokens[start : start + size], start, keep=0)
        targets = sequence.request.prompt_token_ids[start + 1 : start + 1 + size]
        entries = prompt_logprobs(logits[: len(targets)], targets, wanted)
        sequence.add_prompt_logprobs(entries, start + 1)
        sequence.num_computed += size

    def _finish_prompts(self) -> list[StepOutput]:
        """Finish the requests that end with their prompt."""
        outputs = []
        for sequence in list(self._running.values()):
            if sequence.prefilled and sequence.max_tokens == 0 and sequence.finish_reason is None:
                sequence.finish_reason = FINISH_LENGTH
            if sequence.finish_reason is not None:
                chunk, record = sequence.next_chunk(), self._finish(sequence)
                outcome = sequence.take_outcome()
                outputs.append(StepOutput(sequence.request_id, chunk, record, outcome))
        return outputs

    def _decode(
        self,
        batch: list[Sequence],
        prefilling: list[Sequence],
        prompts: list[tuple[Sequence, int]],
    ) -> list[StepOutput]:
        """Draft, verify, emit.

        Args:
            batch: requests of which all tokens but the last are computed, or are with ``prompts``.
            prefilling: those of which more is left.
            prompts: what is computed in the same forward, see :meth:`_prefill`.
        """
        rows = [self._rows.row(s.request_id) for s in batch]
        proposal = self.draft_runner.propose(batch, rows, prefilling, timed=not prompts)
        device = self._runner.device
        latest = [(s.tokens[-1], len(s.tokens) - 1, s.num_output) for s in batch]
        state = device_tensor(latest, device)
        tokens, positions = state[:, :1], state[:, 1:2]
        if proposal.token_ids.shape[1]:
            tokens = torch.cat([tokens, proposal.token_ids], dim=1)
            positions = positions + _steps(tokens.shape[1], device)
        span = max(len(s.tokens) for s in batch) + tokens.shape[1] - 1
        of_prompts = self._prompt_tokens(prompts)
        logits = self._runner.verify(
            rows, tokens, positions, span, proposal.num_drafted, of_prompts
        )
        self._note_computed(prompts)
        params, counts = self._params.get([s.request.sampling for s in batch]), None
        if params.logits_processors is not None:
            histories = [(s.tokens, s.num_output) for s in batch]
            counts = count_tokens(params.logits_processors, histories, logits.shape[-1], device)
        masks = _token_masks(batch, proposal, logits.shape[-1], device)
        sampled = rejection_sample(
            logits, proposal, params, state[:, 2], self._generator, counts, masks
        )
        wanted = [s.request.sampling.logprobs for s in batch] if params.any_logprobs else None
        return self._emit(batch, proposal, sampled, logits, wanted)

    def _emit(
        self,
        batch: list[Sequence],
        proposal: Proposal,
        sampled: RejectionSampleOutput,
        logits: Tensor,
        wanted: list[int | None] | None,
    ) -> list[StepOutput]:
        drafts, drafted = proposal.token_ids.tolist(), proposal.num_drafted.tolist()
        forced = list(proposal.num_forced) or [0] * len(batch)
        suffix = list(proposal.num_suffix) or [0] * len(batch)
        by_model = proposal.num_by_model
        not_finite = non_finite_positions(logits, drafted)
        skipped = self._fail_not_finite(batch, drafted, not_finite)
        if not_finite:
            sampled = up_to_finite(sampled, drafts, not_finite)
        accepted, final = sampled.num_accepted.tolist(), sampled.final_tokens.tolist()
        self._record(batch, proposal, sampled, logits, skipped)
        emitted = [[*drafts[i][: accepted[i]], final[i]] for i in range(len(batch))]
        logprobs = token_logprobs(logits, emitted, wanted) if wanted else None
        sources = token_sources(batch, proposal, sampled, logits, emitted)
        for i, sequence in enumerate(batch):
            if i in skipped:
                drafted[i] = accepted[i] = by_model[i] = 0
                continue
            own = logprobs[i] if logprobs else []
            counts = (drafted[i], accepted[i], forced[i], suffix[i])
            self._append(sequence, counts, emitted[i], own, sources[i])
        outputs = [
            StepOutput(s.request_id, s.next_chunk(), self._finish(s), s.take_outcome())
            for s in batch
        ]
        self.draft_runner.finish_round(batch, drafted, accepted, by_model)
        return outputs

    def _fail_not_finite(
        self,
        batch: list[Sequence],
        drafted: list[int],
        not_finite: list[list[bool]] | None,
    ) -> set[int]:
        """Finish each request whose own logits are not finite; returns the rows that emit nothing.

        A draft token may be the cause, since attention multiplies a masked NaN by 0: a row that is
        not finite from its first position on is retried without drafts. One whose later positions
        are not emits what comes before them (see up_to_finite): it may have ended there.
        """
        skipped = set()
        for i, flags in enumerate(not_finite or ()):
            if not flags[0]:
                continue
            skipped.add(i)
            batch[i].last_round = batch[i].last_suffix = (0, 0)
            if drafted[i]:
                batch[i].num_speculative_tokens, batch[i].suffix_drafts = 0, False
                continue
            logger.error("request %s fails: its logits are not finite", batch[i].request_id)
            batch[i].finish_reason = FINISH_NOT_FINITE
        return skipped

    def _record(
        self,
        batch: list[Sequence],
        proposal: Proposal,
        sampled: RejectionSampleOutput,
        logits: Tensor,
        skipped: set[int],
    ) -> None:
        """Add the round to the records; if that fails, its requests go on without."""
        recorders = [None if i in skipped else s.recorder for i, s in enumerate(batch)]
        try:
            self._record_buffer.add(recorders, proposal, sampled, logits)
        except Exception:
            logger.exception("the records of a round are lost")
            self._drop_records()

    def _make_record_buffer(self) -> RecordBuffer:
        settings = self._settings
        return RecordBuffer(settings.replay_top_k, branches=settings.replay_branches)

    def _drop_records(self) -> None:
        """Drop the records of all requests that have begun, which are incomplete."""
        self._record_buffer = self._make_record_buffer()
        preempted = (sequence for sequence in self._waiting if sequence.num_output)
        for sequence in (*self._running.values(), *preempted):
            sequence.recorder = None

    def _append(
        self,
        sequence: Sequence,
        counts: tuple[int, int, int, int],
        emitted: list[int],
        logprobs: list[TokenLogprob],
        sources: list[TokenSource],
    ) -> None:
        """Append a row's tokens; an error fails this request alone.

        ``counts`` are (drafted, accepted, forced, suffix), see Sequence.append_round.
        """
        drafted, accepted, *others = counts
        try:
            eos = self._settings.eos_token_ids
            sequence.append_round(drafted, accepted, emitted, eos, logprobs, sources, *others)
        except GrammarError as error:
            logger.warning("request %s fails: %s", sequence.request_id, error)
            sequence.finish_reason = FINISH_GRAMMAR
        except Exception:
            logger.exception("request %s fails", sequence.request_id)
            sequence.finish_reason = FINISH_ERROR

    def _finish(self, sequence: Sequence) -> ReplayRecord | None:
        """Free a finished request and return its record, if it has one."""
        if sequence.finish_reason is None:
            return None
        failed = sequence.finish_reason in FAILED
        if not failed:
            self._scheduler.cache_prefix(sequence)
            self.draft_runner.finish_request(sequence)
        record = None if failed else self._make_record(sequence)
        self._scheduler.free(sequence.request_id, zero=failed)
        return record

    def _make_record(self, sequence: Sequence) -> ReplayRecord | None:
        """Return the record of a finished request that still has its row; None if it is lost."""
        if sequence.recorder is None:
            return None
        try:
            self._record_buffer.flush()
            request = sequence.request
            created = self._now() if request.created is None else request.created
            hidden, start = self._recorded_hidden(sequence)
            return sequence.recorder.finish(
                request, sequence.output, sequence.weight_version, created, hidden, start
            )
        except Exception:
            logger.exception("the record of request %s is lost", sequence.request_id)
            self._drop_records()
            return None

    def _recorded_hidden(self, sequence: Sequence) -> tuple[Tensor | None, int]:
        """Return the hidden states ``[T, H]`` that a record keeps, and their first position."""
        kv, prompt = self._runner.kv, len(sequence.request.prompt_token_ids)
        if not self._settings.record_hidden or not sequence.num_output:
            return None, 0
        kept, outputs = fit(prompt, sequence.num_output, MAX_LENGTH)
        start = prompt - kept
        positions = torch.arange(start, prompt + outputs - 1, device=kv.device)[None]
        return kv.read_hidden([self._rows.row(sequence.request_id)], positions)[0], start


def _token_masks(
    batch: list[Sequence], proposal: Proposal, vocab_size: int, device: torch.device
) -> TokenMasks | None:
    """Return the masks of all positions that verification may reach in rows with a grammar."""
    rows = [(i, s.grammar) for i, s in enumerate(batch) if s.grammar is not None]
    if not rows:
        return None
    tokens, counts = proposal.token_ids.tolist(), proposal.num_drafted.tolist()
    masks = []
    for i, grammar in rows:
        drafts = tokens[i][: counts[i]]
        for step in range(len(drafts) + 1):
            if step and drafts[step - 1] in grammar.eos_token_ids:
                break
            try:
                masks.append((i, step, grammar.mask(drafts[:step])))
            except GrammarError:  # if these drafts are accepted, the request fails
                break
    return make_token_masks(masks, vocab_size, device)


@lru_cache(maxsize=64)
def _steps(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
