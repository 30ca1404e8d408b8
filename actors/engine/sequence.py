"""State of one request in the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from paceline.actors.engine.detokenizer import IncrementalDetokenizer, special_tokens
from paceline.actors.engine.grammar import GrammarCompiler, GrammarState
from paceline.actors.engine.recorder import Recorder
from paceline.actors.engine.request import (
    DRAFT_OFF,
    FINISH_LENGTH,
    FINISH_NOT_FINITE,
    FINISH_STOP,
    GenerationChunk,
    GenerationRequest,
    SpeculativeStats,
    TokenLogprob,
    TokenSource,
    with_all_stop_token_ids,
    with_stop_token_ids,
)
from paceline.actors.engine.settings import EngineSettings
from paceline.actors.general import GENERAL
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.slots import candidate_of, expert_of, slot_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Placed = TypeVar("Placed", TokenLogprob, TokenSource)


@dataclass(slots=True)
class Sequence:
    """Tokens, progress and statistics of one request.

    Decoding starts when all tokens but the last are computed, so that every output token, the
    first included, comes from verification.

    Attributes:
        request: as submitted, with its stop tokens resolved.
        detokenizer: of the output.
        max_tokens: maximum output tokens within the context.
        num_speculative_tokens: None leaves the choice to the controller.
        weight_version: of the draft in its latest round; before, when the request arrived.
        recorder: of the replay record, if there is one.
        grammar: of a constrained answer, at its end.
        draft: the request's draft or the weight slot that it uses.
        failed_version: weight_version in the slot that failed while it drafted.
        tokens: of prompt and output.
        num_computed: positions with keys and values of the target.
        num_cached: of these, found in the prefix cache before its first token or preemption.
        preempted: whether it has lost its row before.
        suffix_drafts: whether suffixes may draft for it, whatever its draft does.
        num_suffix_tokens: drafted by suffixes; in no other statistics.
        num_accepted_suffix_tokens: of these, accepted.
        last_round: (drafted, accepted) as counted in the statistics.
        last_suffix: the same of suffixes.
        histogram: speculative rounds by accepted draft tokens.
        cacheable: whether later requests may find its keys and values.
        request_id: of this attempt.
    """

    request: GenerationRequest
    detokenizer: IncrementalDetokenizer
    max_tokens: int
    num_speculative_tokens: int | None
    weight_version: int
    recorder: Recorder | None
    grammar: GrammarState | None = None
    draft: str = ""
    failed_version: int | None = None
    _failure_reported: bool = False
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    preempted: bool = False
    finish_reason: str | None = None
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_cut_rounds: int = 0
    suffix_drafts: bool = False
    num_suffix_tokens: int = 0
    num_accepted_suffix_tokens: int = 0
    last_round: tuple[int, int] = (0, 0)
    last_suffix: tuple[int, int] = (0, 0)
    histogram: list[int] = field(default_factory=list)
    _sent: int = 0  # output tokens in chunks so far
    _prompt_logprobs: list[TokenLogprob] | None = None  # of tokens 1, 2 ...; None: unwanted or sent
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _token_sources: list[TokenSource] = field(default_factory=list)
    _unsent_rounds: list[tuple[int, int]] = field(default_factory=list)
    _unsent_suffix_rounds: list[tuple[int, int]] = field(default_factory=list)
    _versions: set[int] = field(default_factory=set)
    cacheable: bool = field(init=False)
    request_id: str = field(init=False)
    _num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        # Background requests are left out: they would evict what users may come back to.
        self.cacheable = self.request.store and not self.request.background
        self.request_id = self.request.run_id
        self.draft = self.draft or self.request.draft
        self._num_prompt = len(self.tokens)
        if self.request.sampling.prompt_logprobs is not None:
            self._prompt_logprobs = []

    @property
    def num_output(self) -> int:
        """Number of output tokens."""
        return len(self.tokens) - self._num_prompt

    @property
    def output(self) -> list[int]:
        """Output tokens."""
        return self.tokens[self._num_prompt :]

    @property
    def num_uncomputed(self) -> int:
        """Tokens to compute before the last."""
        return len(self.tokens) - 1 - self.num_computed

    @property
    def prefilled(self) -> bool:
        """Whether all tokens but the last are computed."""
        return self.num_uncomputed <= 0

    @property
    def joins_decoding(self) -> bool:
        """Whether the forward that computes the end of the prompt may give the first token."""
        return self.max_tokens > 0 and not self.needs_prompt_logprobs

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to be computed."""
        return self.first_position < self._num_prompt - 1

    @property
    def first_position(self) -> int:
        """Position before which no logits are needed any more; a cached prefix may end there."""
        if self._prompt_logprobs is None or len(self._prompt_logprobs) >= self._num_prompt - 1:
            return len(self.tokens) - 1
        return len(self._prompt_logprobs)

    def start(self, num_computed: int) -> None:
        """Start or restart with the keys and values of the first positions."""
        self.num_computed = num_computed
        if not self.preempted:
            self.num_cached = num_computed

    def add_prompt_logprobs(self, entries: Items[TokenLogprob], position: int) -> None:
        """Add entries of the tokens from ``position`` on, of which earlier ones are known.

        An entry that is not a number ends the request.
        """
        assert self._prompt_logprobs is not None
        known = len(self._prompt_logprobs) + 1 - position
        self._prompt_logprobs.extend(entries[known:])
        if any(math.isnan(entry.logprob) for entry in entries):
            self.finish_reason = FINISH_NOT_FINITE

    def most_draft_tokens(self, most: int) -> int:
        """Most tokens that may be drafted in the next round; ``most`` is the engine's limit."""
        k = self.num_speculative_tokens
        return self.draft_budget(most if k is None or self.suffix_drafts else k)

    def draft_budget(self, k: int) -> int:
        """Limit k to the remaining tokens, of which one per round is the target's."""
        return max(0, min(k, self.max_tokens - self.num_output - 1))

    def append_round(
        self,
        drafted: int,
        accepted: int,
        emitted: list[int],
        eos: frozenset[int],
        logprobs: Items[TokenLogprob] = (),
        token_sources: Items[TokenSource] = (),
        forced: int = 0,
        suffix: int = 0,
    ) -> None:
        """Append a round's tokens up to the one that ends the answer.

        ``logprobs`` and ``token_sources`` have an entry per emitted token if requested; the last
        ``forced`` of the drafted tokens are no draft's, and in no statistics. The first ``suffix``
        are suffixes', and in theirs alone.

        Raises:
            GrammarError: the grammar cannot go on.
        """
        before, self.last_round, self.last_suffix = len(self.tokens), (0, 0), (0, 0)
        self._append(emitted, eos)
        count = len(self.tokens) - before
        if suffix:
            ended = min(suffix, count) if count <= accepted else suffix
            self.last_suffix = ended, min(accepted, ended)
            self._unsent_suffix_rounds.append(self.last_suffix)
            self.num_suffix_tokens += ended
            self.num_accepted_suffix_tokens += self.last_suffix[1]
        self._update_stats(drafted - forced - suffix, accepted, count)
        self._logprobs.extend(logprobs[:count])
        self._token_sources.extend(token_sources[:count])
        self.num_computed = len(self.tokens) - 1

    def _update_stats(self, drafted: int, accepted: int, count: int) -> None:
        """Count a round of which ``count`` tokens were appended, and no drafts behind them.

        Of the ``accepted`` tokens those beyond ``drafted`` were forced.
        """
        cut = count <= accepted
        if cut:
            drafted = min(drafted, count)
        accepted = min(accepted, drafted)
        self.last_round = drafted, accepted
        if drafted:
            self.num_cut_rounds += cut
            self._unsent_rounds.append((drafted, accepted))
            self.num_spec_steps += 1
            self.num_draft_tokens += drafted
            self.num_accepted += accepted
            self.histogram.extend([0] * (drafted + 1 - len(self.histogram)))
            self.histogram[accepted] += 1

    def resume(self, eos: frozenset[int]) -> None:
        """Append the output that the request came with, as sent already."""
        self._append(self.request.output_token_ids, eos)
        self._sent = self.num_output

    def _append(self, token_ids: Items[int], eos: frozenset[int]) -> None:
        """Append tokens and their text, up to the one that ends the answer."""
        sampling, detokenizer = self.request.sampling, self.detokenizer
        for token in token_ids:
            self.tokens.append(token)
            if self.grammar is not None:
                self.grammar.append(token)
            count = len(self.tokens) - self._num_prompt
            ends = token in eos and (self.grammar is not None or not sampling.ignore_eos)
            if ends or token in sampling.stop_token_ids:
                self.finish_reason = FINISH_STOP
                if sampling.include_stop:
                    detokenizer.append(token, may_stop=False)
                return
            detokenizer.append(token, may_stop=count >= sampling.min_tokens)
            if detokenizer.stopped:
                self.finish_reason = FINISH_STOP
                return
            if count >= self.max_tokens:
                self.finish_reason = FINISH_LENGTH
                return

    def next_chunk(self) -> GenerationChunk:
        """Take what can be sent and has not been."""
        last = self.finish_reason is not None
        may_stop = self.num_output >= self.request.sampling.min_tokens
        text = self.detokenizer.release(last=last, may_stop=may_stop)
        if self.detokenizer.stopped and self.finish_reason == FINISH_LENGTH:
            self.finish_reason = FINISH_STOP  # by the text of an incomplete character at the end
        whole = last and not self.detokenizer.stopped
        end = self.num_output if whole else min(self.detokenizer.num_released(), self.num_output)
        start, self._sent = self._sent, max(end, self._sent)
        first = self._num_prompt
        filled = last or bool(text) or self._sent > start  # empty chunks are not sent
        rounds: tuple[tuple[int, int], ...] = ()
        suffix_rounds, prompt_logprobs = rounds, None
        if filled:
            rounds, suffix_rounds = tuple(self._unsent_rounds), tuple(self._unsent_suffix_rounds)
            self._unsent_rounds.clear()
            self._unsent_suffix_rounds.clear()
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return GenerationChunk(
            text=text,
            token_ids=tuple(self.tokens[first + start : first + self._sent]),
            finish_reason=self.finish_reason,
            speculative=self.stats() if last else None,
            num_cached_tokens=min(self.num_cached, first),
            logprobs=None
            if self.request.sampling.logprobs is None
            else self._with_offsets(self._logprobs, start, self._sent),
            num_cut_tokens=self.num_output - self._sent if last else 0,
            rounds=rounds,
            suffix_rounds=suffix_rounds,
            token_sources=self._with_offsets(self._token_sources, start, self._sent)
            if self.request.token_sources
            else None,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        )

    def _with_offsets(self, items: list[Placed], start: int, end: int) -> tuple[Placed, ...]:
        """Return the items of output tokens start..end-1 with their text offsets."""
        before = self.num_output - len(items)  # output of another replica
        return tuple(
            replace(items[i - before], text_offset=self.detokenizer.start(i))
            for i in range(max(start, before), end)
        )

    def set_draft_version(self, weight_version: int) -> None:
        """Note the weights that drafted in this round."""
        self.weight_version = weight_version
        self._versions.add(weight_version)

    def take_outcome(self) -> DraftOutcome | None:
        """Return the outcome to report after a round: a failure at once, others at the end."""
        if self.failed_version is not None and not self._failure_reported:
            self._failure_reported = True
            return self._outcome()
        return self._outcome() if self.finish_reason else None

    @property
    def can_report_failure(self) -> bool:
        """Whether it uses a weight slot of its expert and has reported no failure."""
        return self._uses_slot and self.failed_version is None

    @property
    def _uses_slot(self) -> bool:
        expert = expert_of(self.draft)
        return self.draft in (expert, candidate_of(expert))

    def _outcome(self) -> DraftOutcome | None:
        """Return the draft's outcome if it can be attributed to one weight_version.

        None for initial weights, if several versions drafted, if the request has a number of
        tokens of its own but no rounds, for all choices of a prompt but the first, as they are no
        further evidence, and for an answer that another replica started. An outcome without rounds
        means that the controller never drafted, or the draft never did.
        """
        if not self._uses_slot:
            return None
        expert = expert_of(self.draft)
        if self.failed_version is not None:
            return DraftOutcome(expert, self.failed_version, 0, 0, failed=True)
        if self.request.output_token_ids or len(self._versions) > 1:
            return None
        if self.request.sampling.choice:
            return None
        if not self.num_spec_steps:
            silent = self.num_speculative_tokens is None
            return DraftOutcome(expert, self.weight_version, 0, 0) if silent else None
        accepted = self.num_spec_steps - self.histogram[0]
        return DraftOutcome(expert, self.weight_version, self.num_spec_steps, accepted)

    def stats(self) -> SpeculativeStats:
        """Return the statistics of speculation so far."""
        return SpeculativeStats(
            draft=DRAFT_OFF if self.num_speculative_tokens == 0 else self.request.draft,
            weight_version=self.weight_version,
            num_spec_steps=self.num_spec_steps,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_draft_tokens=self.num_accepted,
            acceptance_histogram=tuple(self.histogram),
            num_cut_rounds=self.num_cut_rounds,
            num_suffix_tokens=self.num_suffix_tokens,
            num_accepted_suffix_tokens=self.num_accepted_suffix_tokens,
        )


def make_sequence(
    request: GenerationRequest,
    settings: EngineSettings,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Mapping[str, int],
    vocab_size: int,
    grammars: GrammarCompiler,
) -> Sequence:
    """Validate a request and turn it into a sequence, resumed if it has output.

    Args:
        request: as submitted.
        settings: limits.
        tokenizer: of the target, a transformers fast tokenizer.
        drafts: weight_version of every draft.
        vocab_size: of the target.
        grammars: compiles the request's.

    Raises:
        GrammarError: the grammar is invalid, or does not allow the request's output.
        ValueError: the prompt is empty or leaves no room for a token, or a token id is not in the
            vocabulary, which would fail the forward of all requests.
    """
    room = settings.max_model_len - len(request.prompt_token_ids)
    if not request.prompt_token_ids or room < 1:
        raise ValueError(
            f"the prompt has {len(request.prompt_token_ids)} tokens; "
            f"1 to {settings.max_model_len - 1} can be served"
        )
    sampling = request.sampling
    biased = [token for token, _ in sampling.logit_bias]
    prompt, output = request.prompt_token_ids, request.output_token_ids
    for token_ids in (prompt, output, sampling.stop_token_ids, biased):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise ValueError(f"a token id is not in the target's vocabulary of {vocab_size}")
    request = with_stop_token_ids(request, special_tokens(tokenizer.backend_tokenizer), vocab_size)
    request = with_all_stop_token_ids(request, settings.eos_token_ids, vocab_size)
    if request.draft != DRAFT_OFF and request.draft not in drafts:
        suffix = request.draft.removeprefix(expert_of(request.draft))  # of initial weights
        request = replace(request, draft=GENERAL + suffix)
    k = request.num_speculative_tokens
    if k is None:
        k = settings.num_speculative_tokens
    prompt_only = request.sampling.max_tokens == 0
    suffix_drafts = settings.suffix_drafts and k is None and request.draft != DRAFT_OFF
    if prompt_only or request.draft == DRAFT_OFF or request.draft not in drafts:
        k = 0
    draft = slot_for(request.draft, request.request_id, settings.canary_share, drafts)
    sequence = Sequence(
        request=request,
        detokenizer=IncrementalDetokenizer(
            tokenizer,
            request.sampling.stop,
            request.sent_chars,
            request.prompt_token_ids,
            skip_special_tokens=request.sampling.skip_special_tokens,
            include_stop=request.sampling.include_stop,
        ),
        max_tokens=min(request.sampling.max_tokens, room),
        num_speculative_tokens=k,
        suffix_drafts=suffix_drafts,
        weight_version=drafts.get(draft, 0),
        draft=draft,
        recorder=Recorder() if request.has_record and not prompt_only else None,
        grammar=GrammarState(grammars, request.grammar) if request.grammar else None,
    )
    sequence.resume(settings.eos_token_ids)
    return sequence
