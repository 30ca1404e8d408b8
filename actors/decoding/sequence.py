"""The state of one running request."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.actors.decoding.recorder import Recorder
from paceline.actors.decoding.request import (
    DRAFT_OFF,
    FINISH_LENGTH,
    FINISH_STOP,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
)
from paceline.actors.decoding.text import TextStream


@dataclass(slots=True)
class Sequence:
    """Tokens, progress and statistics of one request.

    ``num_speculative_tokens`` None leaves the choice to the engine; ``weight_version`` is that
    of the draft when it last proposed for this request (before: when the request came).
    ``num_computed`` positions have target keys and values; decoding starts when all but the
    last token have, so that every output token, the first too, comes from verification.
    ``num_cached`` of them were there when it began for the first time.
    """

    request: GenerationRequest
    text: TextStream
    max_tokens: int
    num_speculative_tokens: int | None
    weight_version: int
    recorder: Recorder | None
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int | None = None
    finish_reason: str | None = None
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    _unsent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def output(self) -> list[int]:
        """The output tokens."""
        return self.tokens[len(self.request.prompt_token_ids) :]

    @property
    def prefilled(self) -> bool:
        """True where only the last token is left to compute."""
        return self.num_computed >= len(self.tokens) - 1

    def begin(self, computed: int) -> None:
        """Start, or start again, with the keys and values of so many positions."""
        self.num_computed = computed
        if self.num_cached is None:
            self.num_cached = computed

    def budget(self, wanted: int) -> int:
        """How many of ``wanted`` tokens may be drafted: one emitted token is the target's."""
        return max(0, min(wanted, self.max_tokens - self.num_output - 1))

    def accept(self, drafted: int, accepted: int, emitted: list[int], eos: frozenset[int]) -> None:
        """Take the tokens of a round up to the one that ends the answer."""
        if drafted:
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted
            self.num_accepted += accepted
            self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
            self.histogram[accepted] += 1
        for token in emitted:
            self.tokens.append(token)
            self._unsent.append(token)
            self.text.push(token)
            ended = token in eos and not self.request.sampling.ignore_eos
            if ended or self.text.stopped:
                self.finish_reason = FINISH_STOP
                break
            if self.num_output >= self.max_tokens:
                self.finish_reason = FINISH_LENGTH
                break
        self.num_computed = len(self.tokens) - 1

    def chunk(self) -> GenerationChunk:
        """What has come since the last chunk."""
        last = self.finish_reason is not None
        tokens, self._unsent = tuple(self._unsent), []
        return GenerationChunk(
            text=self.text.release(last=last),
            token_ids=tokens,
            finish_reason=self.finish_reason,
            speculative=self.stats() if last else None,
            num_cached_tokens=self.num_cached or 0,
        )

    def stats(self) -> SpeculativeStats:
        """What speculation did so far."""
        return SpeculativeStats(
            draft=DRAFT_OFF if self.num_speculative_tokens == 0 else self.request.draft,
            weight_version=self.weight_version,
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted,
            acceptance_histogram=tuple(self.histogram),
        )
