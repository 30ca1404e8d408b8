"""Requests to the engine and the chunks of their answers: frozen and picklable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paceline.actors.general import GENERAL

DRAFT_OFF = "off"
SUFFIX = "suffix"  # as the draft of tokens that suffixes proposed
FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"  # this request failed, alone
FINISH_NOT_FINITE = "not_finite"  # this request's logits are NaN or infinite
FINISH_GRAMMAR = "grammar"  # this request's grammar is too complex, or at a dead end
FINISH_FAULT = "fault"  # the engine failed while this request was running
FINISH_REFUSED = "refused"  # the engine failed while this request was waiting
FINISH_YIELDED = "yielded"  # a background request gave way to others
FAILED = frozenset({FINISH_ERROR, FINISH_NOT_FINITE, FINISH_GRAMMAR, FINISH_FAULT, FINISH_REFUSED})

SourceKind = Literal["accepted", "recovered", "bonus", "forced", "plain"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, named as in OpenAI's API and vLLM.

    Attributes:
        max_tokens: maximum output tokens; 0 computes the prompt alone.
        temperature: 0 is greedy.
        top_p: 1 is off.
        top_k: 0 is off.
        seed: makes the text depend on the target's distributions, the seed and ``choice`` alone
            (Gumbel coupling).
        stop: strings that end the answer.
        ignore_eos: go on after an end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        include_stop: the text ends behind the stop string or stop token, not before it.
        min_p: 0 is off.
        choice: index among the choices of one prompt.
        repetition_penalty: over prompt and output tokens.
        frequency_penalty: over output tokens.
        presence_penalty: over output tokens.
        logit_bias: (token id, term added to its logit), each token once.
        min_tokens: the answer does not end before, for any reason.
        stop_token_ids: end the answer as the end-of-sequence token does.
        logprobs: alternatives to report with every token, None for no log-probabilities.
        prompt_logprobs: the same for every prompt token but the first.
        all_stop_token_ids: tokens banned before ``min_tokens``; set by the engine.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    min_p: float = 0.0
    choice: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    all_stop_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken at every position."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of the next one."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    Attributes:
        request_id: the same in every attempt.
        prompt_token_ids: at least one.
        sampling: sampling parameters.
        topic: of the replay table.
        draft: an expert (a topic, ``general``), its initial weights (``sql@0``), or ``off``. For
            one that a replica lacks, as of an added topic, ``general`` or ``general@0`` drafts.
        num_speculative_tokens: None takes the engine's value; 0 is plain decoding.
        store: False keeps the request out of replay and of the prefix cache.
        recorded: False keeps it out of replay and of suffix drafts.
        replayed: False keeps it out of replay alone.
        cache_salt: requests share KV blocks of the prefix cache only with those of the same one.
        output_token_ids: generated before, by another replica; only what follows is returned.
        sent_chars: characters of their text that the client has.
        attempt: number of replicas that the request was sent to before.
        failed_on: ids of the replicas that reported their own failure, the last one last.
        token_sources: report the source of every token.
        background: counts as no load, and finishes as `FINISH_YIELDED` if other requests are
            there or arrive.
        created: unix time of its record in seconds; None is the time when it finishes.
        first_prompt: of its record, see ReplayRecord; None: the replica finds it.
        grammar: of the answer, see GrammarCompiler; empty allows every text. The answer ends with
            the grammar, whatever ``ignore_eos`` and ``min_tokens`` say.
        grammar_param: the client's field that has it, for errors.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    topic: str = GENERAL
    draft: str = GENERAL
    num_speculative_tokens: int | None = None
    store: bool = True
    recorded: bool = True
    replayed: bool = True
    cache_salt: str = ""
    output_token_ids: tuple[int, ...] = ()
    sent_chars: int = 0
    attempt: int = 0
    failed_on: tuple[str, ...] = ()
    token_sources: bool = False
    background: bool = False
    created: float | None = None
    first_prompt: int | None = None
    grammar: str = ""
    grammar_param: str | None = None

    @property
    def may_be_repeated(self) -> bool:
        """Whether suffix drafts of later requests may repeat the answer; not a resumed one."""
        return self.store and self.recorded and not self.output_token_ids

    @property
    def has_record(self) -> bool:
        """Whether the answer is recorded; a resumed one is not, as its record would be partial."""
        return self.may_be_repeated and self.replayed

    @property
    def run_id(self) -> str:
        """Id of this attempt; two attempts of a request may meet on a replica."""
        return f"{self.request_id}#{self.attempt}" if self.attempt else self.request_id


def with_stop_token_ids(
    request: GenerationRequest, special: Mapping[int, str], vocab_size: int
) -> GenerationRequest:
    """Add the special tokens that are stop strings to ``stop_token_ids``.

    Args:
        request: of the client.
        special: texts of the special tokens by id, which the answer's text leaves out.
        vocab_size: of the target; a tokenizer may have further tokens.
    """
    sampling = request.sampling
    if not sampling.stop:
        return request
    ids = (token for token, text in special.items() if token < vocab_size and text in sampling.stop)
    stop_token_ids = (*sampling.stop_token_ids, *ids)
    return replace(request, sampling=replace(sampling, stop_token_ids=stop_token_ids))


def with_all_stop_token_ids(
    request: GenerationRequest, eos_token_ids: frozenset[int], vocab_size: int
) -> GenerationRequest:
    """Set ``all_stop_token_ids`` if the request has ``min_tokens``.

    Args:
        request: of the client.
        eos_token_ids: of the target; a tokenizer may have some that the target has not.
        vocab_size: of the target.
    """
    sampling = request.sampling
    if sampling.min_tokens == 0:
        return request
    known = (token for token in eos_token_ids if token < vocab_size)
    ids = tuple(sorted({*known, *sampling.stop_token_ids}))
    return replace(request, sampling=replace(sampling, all_stop_token_ids=ids))


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """Statistics of speculation for one request.

    Draft tokens behind the one that ended the answer count neither as drafted nor as accepted.

    Attributes:
        draft: as in the request, ``off`` for plain decoding.
        weight_version: of the draft's latest round.
        num_spec_steps: rounds with draft tokens.
        num_draft_tokens: drafted tokens.
        num_accepted_draft_tokens: of these, accepted.
        acceptance_histogram: entry i counts the rounds with exactly i accepted draft tokens.
        num_cut_rounds: rounds that ended the answer with a draft token, without a token of the
            target's own.
        num_suffix_tokens: tokens drafted by suffixes, which count in no other field.
        num_accepted_suffix_tokens: of these, accepted.
    """

    draft: str
    weight_version: int
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    num_cut_rounds: int = 0
    num_suffix_tokens: int = 0
    num_accepted_suffix_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        drafted = self.num_draft_tokens
        return self.num_accepted_draft_tokens / drafted if drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative round, the bonus token included; 0 without rounds."""
        steps = self.num_spec_steps
        cut = self.num_cut_rounds
        return 1.0 + (self.num_accepted_draft_tokens - cut) / steps if steps else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one token: the target's softmax at T = 1, natural logarithm.

    Bias, penalties, temperature and filters are not applied.

    Attributes:
        logprob: of the token.
        top: (token id, log-probability), the most probable first.
        text_offset: start of an output token's text in the answer's, in characters.
        rank: of a prompt token: number of tokens that are at least as probable.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Source of one output token.

    Attributes:
        kind: ``accepted`` is a draft token, ``recovered`` the target's token in place of a
            rejected one, ``bonus`` the target's token after all draft tokens were accepted,
            ``forced`` the only one that the grammar allows, which no draft had to propose,
            ``plain`` the target's token of a round without drafts.
        draft: that proposed in the round; None if forced or plain.
        weight_version: of the draft; None if forced or plain, or if suffixes drafted.
        target_probability: of the token in the target's softmax at T = 1, before bias, penalties,
            temperature and filters.
        acceptance_probability: min(1, p/q) of the token drafted at this position, p and q as
            sampled from; None if nothing was drafted, and for greedy and seeded requests, whose
            acceptance is not random.
        rejected_token_id: the draft token that a recovered one replaces; None if a suffix
            proposed it, as it may be of somebody else's answer.
        text_offset: start of the token's text in the answer's, in characters.
    """

    kind: SourceKind
    draft: str | None
    weight_version: int | None
    target_probability: float
    acceptance_probability: float | None = None
    rejected_token_id: int | None = None
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of an answer; an empty one is a heartbeat.

    Attributes:
        text: follows that of the chunk before.
        token_ids: with stop strings, those whose text is released, at least in part.
        finish_reason: of the last chunk.
        speculative: of the last chunk.
        num_cached_tokens: of the prompt, taken from the prefix cache.
        logprobs: per token id; None if not requested.
        num_cut_tokens: of the last chunk, tokens cut together with a stop string.
        rounds: (drafted, accepted) per speculative round since the chunk before; kept in every
            chunk since the replica may die before the last one.
        suffix_rounds: the same of suffixes.
        replica_id: if ``finish_reason`` is one of `FAILED`.
        token_sources: per token id; None if not requested.
        prompt_logprobs: per prompt token but the first, in the first chunk that is not empty; None
            in the others and if not requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    speculative: SpeculativeStats | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_cut_tokens: int = 0
    rounds: tuple[tuple[int, int], ...] = ()
    suffix_rounds: tuple[tuple[int, int], ...] = ()
    replica_id: str = ""
    token_sources: tuple[TokenSource, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None


def merge_chunks(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """Merge consecutive chunks, at least one, into one with the figures of the last."""
    if len(chunks) == 1:
        return chunks[0]
    filled = [c for c in chunks if c.token_ids or c.text or c.finish_reason is not None]
    last = filled[-1] if filled else chunks[-1]
    logprobs = token_sources = None
    of_prompt = (c.prompt_logprobs for c in filled if c.prompt_logprobs is not None)
    if last.logprobs is not None:
        logprobs = tuple(item for chunk in filled for item in chunk.logprobs or ())
    if last.token_sources is not None:
        token_sources = tuple(item for chunk in filled for item in chunk.token_sources or ())
    return replace(
        last,
        text="".join(chunk.text for chunk in filled),
        token_ids=tuple(token for chunk in filled for token in chunk.token_ids),
        logprobs=logprobs,
        rounds=tuple(each for chunk in chunks for each in chunk.rounds),
        suffix_rounds=tuple(each for chunk in chunks for each in chunk.suffix_rounds),
        token_sources=token_sources,
        prompt_logprobs=next(of_prompt, None),
    )
