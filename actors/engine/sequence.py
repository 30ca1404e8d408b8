"""The state of one running request."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from paceline.actors.engine.detokenizer import TextStream
from paceline.actors.engine.recorder import Recorder
from paceline.actors.engine.request import (
    DRAFT_OFF,
    FINISH_LENGTH,
    FINISH_STOP,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
    TokenLogprob,
    TokenOrigin,
)
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.slots import candidate_of, expert_of

Placed = TypeVar("Placed", TokenLogprob, TokenOrigin)


@dataclass(slots=True)
class Sequence:
    """Tokens, progress and statistics of one request.

    ``num_speculative_tokens`` None leaves the choice to the engine; ``weight_version`` is that
    of the draft when it last proposed for this request (before: when the request came).
    ``draft`` is the slot of the request's draft, the draft itself where none is given, and
    ``failed_version`` the version in it that failed while it drafted for the request.
    ``num_computed`` positions have target keys and values; decoding starts when all but the
    last token have, so that every output token, the first too, comes from verification.
    ``num_cached`` of them were there when it began for the first time. ``hidden`` is the target's
    final hidden state ``[H]`` from which the last token came, where a draft reads it.
    ``request_id`` is that of this attempt at the request.
    """

    request: GenerationRequest
    text: TextStream
    max_tokens: int
    num_speculative_tokens: int | None
    weight_version: int
    recorder: Recorder | None
    draft: str = ""
    failed_version: int | None = None
    _failure_told: bool = False
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    hidden: Tensor | None = None
    finish_reason: str | None = None
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_cut_rounds: int = 0
    last_round: tuple[int, int] = (0, 0)  # drafted and accepted, as they are counted
    histogram: list[int] = field(default_factory=list)
    _sent: int = 0  # output tokens that chunks have carried
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _origins: list[TokenOrigin] = field(default_factory=list)
    _unsent_rounds: list[tuple[int, int]] = field(default_factory=list)
    _versions: set[int] = field(default_factory=set)
    request_id: str = field(init=False)
    _num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.request_id = self.request.run_id
        self.draft = self.draft or self.request.draft
        self._num_prompt = len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self._num_prompt

    @property
    def output(self) -> list[int]:
        """The output tokens."""
        return self.tokens[self._num_prompt :]

    @property
    def prefilled(self) -> bool:
        """True where only the last token is left to compute."""
        return self.num_computed >= len(self.tokens) - 1

    def start(self, computed: int) -> None:
        """Start, or start again, with the keys and values of so many positions."""
        self.num_computed = computed
        if self.num_cached is None:
            self.num_cached = computed

    def draft_budget(self, wanted: int) -> int:
        """How many of ``wanted`` tokens may be drafted: one emitted token is the target's."""
        return max(0, min(wanted, self.max_tokens - self.num_output - 1))

    def accept(
        self,
        drafted: int,
        accepted: int,
        emitted: list[int],
        eos: frozenset[int],
        logprobs: Items[TokenLogprob] = (),
        origins: Items[TokenOrigin] = (),
    ) -> None:
        """Take the tokens of a round up to the one that ends the answer.

        ``logprobs`` and ``origins`` have an entry per emitted token where the request asks for
        them.
        """
        before, self.last_round = len(self.tokens), (0, 0)
        self._take(emitted, eos)
        self._count(drafted, accepted, len(self.tokens) - before)
        if logprobs:
            self._logprobs.extend(logprobs[: len(self.tokens) - before])
        if origins:
            self._origins.extend(origins[: len(self.tokens) - before])
        self.num_computed = len(self.tokens) - 1

    def _count(self, drafted: int, accepted: int, taken: int) -> None:
        """Count a round of which so many tokens were taken; behind them nothing was drafted."""
        if taken <= accepted:
            drafted = accepted = taken
            self.num_cut_rounds += 1
        self.last_round = drafted, accepted
        if drafted:
            self._unsent_rounds.append((drafted, accepted))
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted
            self.num_accepted += accepted
            self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
            self.histogram[accepted] += 1

    def resume(self, eos: frozenset[int]) -> None:
        """Take the output that the request came with; nothing of it is handed out again."""
        self._take(self.request.output_token_ids, eos)
        self._sent = self.num_output

    def _take(self, emitted: Items[int], eos: frozenset[int]) -> None:
        """Add tokens and their text, up to the one that the answer ends with."""
        sampling, text = self.request.sampling, self.text
        for token in emitted:
            self.tokens.append(token)
            count = len(self.tokens) - self._num_prompt
            if token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos):
                self.finish_reason = FINISH_STOP
                return
            text.push(token, may_stop=count >= sampling.min_tokens)
            if text.stopped:
                self.finish_reason = FINISH_STOP
                return
            if count >= self.max_tokens:
                self.finish_reason = FINISH_LENGTH
                return

    def chunk(self) -> GenerationChunk:
        """What may be shown and has not been."""
        last = self.finish_reason is not None
        text = self.text.release(last=last)
        whole = last and not self.text.stopped
        end = self.num_output if whole else min(self.text.num_released(), self.num_output)
        start, self._sent = self._sent, max(end, self._sent)
        first = self._num_prompt
        told = last or bool(text) or self._sent > start  # or the chunk goes to nobody
        rounds = tuple(self._unsent_rounds) if told else ()
        del self._unsent_rounds[: len(rounds)]
        return GenerationChunk(
            text=text,
            token_ids=tuple(self.tokens[first + start : first + self._sent]),
            finish_reason=self.finish_reason,
            speculative=self.stats() if last else None,
            num_cached_tokens=min(self.num_cached or 0, first),
            logprobs=None
            if self.request.sampling.logprobs is None
            else self._placed(self._logprobs, start, self._sent),
            num_cut_tokens=self.num_output - self._sent if last else 0,
            rounds=rounds,
            origins=self._placed(self._origins, start, self._sent)
            if self.request.origins
            else None,
        )

    def _placed(self, told: list[Placed], start: int, end: int) -> tuple[Placed, ...]:
        """What is told of output tokens, with where their text begins."""
        before = self.num_output - len(told)  # output that it came with
        return tuple(
            replace(told[i - before], text_offset=self.text.start(i))
            for i in range(max(start, before), end)
        )

    def drafted_by(self, weight_version: int) -> None:
        """Note with which weights was drafted."""
        self.weight_version = weight_version
        self._versions.add(weight_version)

    def news(self) -> DraftOutcome | None:
        """What is to be reported after a round: a failure at once, all else at the end."""
        if self.failed_version is not None and not self._failure_told:
            self._failure_told = True
            return self.outcome()
        return self.outcome() if self.finish_reason else None

    @property
    def may_tell_failure(self) -> bool:
        """Whether a failure of its expert's candidate may be reported by it: none has been yet."""
        return self._tells and self.failed_version is None

    @property
    def _tells(self) -> bool:
        """Whether it drafts with one of its expert's slots, and not with initial weights."""
        expert = expert_of(self.draft)
        return self.draft in (expert, candidate_of(expert))

    def outcome(self) -> DraftOutcome | None:
        """What the draft did, where that tells one weight_version from another.

        None where several versions drafted, where the request itself wanted no drafts, and for an
        answer that another replica has begun. No rounds: nothing was drafted, since that did not
        pay.
        """
        if not self._tells:
            return None
        expert = expert_of(self.draft)
        if self.failed_version is not None:
            return DraftOutcome(expert, self.failed_version, 0, 0, failed=True)
        if self.request.output_token_ids:
            return None
        if not self._versions and self.num_speculative_tokens is None:
            return DraftOutcome(expert, self.weight_version, 0, 0)
        if len(self._versions) != 1 or not self.num_spec_steps:
            return None
        accepted = self.num_spec_steps - self.histogram[0]
        return DraftOutcome(expert, self.weight_version, self.num_spec_steps, accepted)

    def stats(self) -> SpeculativeStats:
        """What speculation did so far."""
        return SpeculativeStats(
            draft=DRAFT_OFF if self.num_speculative_tokens == 0 else self.request.draft,
            weight_version=self.weight_version,
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted,
            acceptance_histogram=tuple(self.histogram),
            num_cut_rounds=self.num_cut_rounds,
        )
