"""What a request asks of the engine and what it gets back: frozen, picklable, free of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

DRAFT_OFF = "off"
FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"  # this request failed, alone
FINISH_NOT_FINITE = "not_finite"  # this request's logits are NaN or infinite
FINISH_FAULT = "fault"  # the engine failed while it ran this request, perhaps among others
FINISH_REFUSED = "refused"  # the engine failed, and had not begun with this request
FINISH_YIELDED = "yielded"  # a background request, to others
FAILED = frozenset({FINISH_ERROR, FINISH_NOT_FINITE, FINISH_FAULT, FINISH_REFUSED})

Origin = Literal["accepted", "recovered", "bonus", "plain"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the words are OpenAI's.

    ``temperature`` 0 is greedy. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off. With a
    ``seed`` the text depends on the target's distributions, the seed and ``choice``, the index
    among the choices of one prompt, alone (Gumbel coupling).

    ``repetition_penalty`` counts prompt and output, ``frequency_penalty`` and
    ``presence_penalty`` the output. ``logit_bias`` holds (token id, what is added to its logit),
    no token twice. No answer ends before ``min_tokens``, by whatever would end it.
    ``stop_token_ids`` end an answer as the end-of-sequence token does. ``logprobs`` is how many
    alternatives are reported beside every token, None reports nothing. ``ending_token_ids`` is
    the engine's to fill in: all tokens that may not come before ``min_tokens``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    choice: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ending_token_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        """True where the most probable token is taken at every position."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True where the tokens so far change the next one's logits."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate.

    ``draft`` names an expert (a topic, ``general``), an expert's initial weights
    (``sql@0``), or ``off``. ``num_speculative_tokens`` None takes the engine's own value;
    0 is plain decoding. ``store`` False keeps everything of the request out of replay, and its keys
    and values from later ones; ``recorded`` False leaves its record out alone.

    A request that another replica has begun carries the output which it has already, as
    ``output_token_ids``, and how many characters of its text the client has, ``sent_chars``:
    the engine goes on from there and gives only what comes after. ``attempt`` counts the
    replicas that it has been sent to before, and ``failed_on`` names those that said themselves
    that they failed, the last one last. ``origins`` reports where every token comes from.

    A ``background`` request is nobody's: it counts as no load, and ends as `FINISH_YIELDED` where
    another is at work or comes. ``created`` is the time that its record bears, unix seconds; None
    is that of its end.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    topic: str = "general"
    draft: str = "general"
    num_speculative_tokens: int | None = None
    store: bool = True
    recorded: bool = True
    output_token_ids: tuple[int, ...] = ()
    sent_chars: int = 0
    attempt: int = 0
    failed_on: tuple[str, ...] = ()
    origins: bool = False
    background: bool = False
    created: float | None = None

    @property
    def leaves_record(self) -> bool:
        """Whether its answer is recorded: a whole one alone, not one that another has begun."""
        return self.store and self.recorded and not self.output_token_ids

    @property
    def run_id(self) -> str:
        """The id of this attempt: two of one request may meet on a replica, the first dying."""
        return f"{self.request_id}#{self.attempt}" if self.attempt else self.request_id


def stopped_by_id(
    request: GenerationRequest, special: Mapping[int, str], vocab_size: int
) -> GenerationRequest:
    """The same request; a stop string that is a special token's text stops at the token, too.

    Args:
        request: see GenerationRequest.
        special: texts of the special tokens by id; they never come up in the answer's text.
        vocab_size: of the target; a tokenizer may have tokens beyond it.
    """
    sampling = request.sampling
    if not sampling.stop:
        return request
    ids = (token for token, text in special.items() if token < vocab_size and text in sampling.stop)
    stop_token_ids = (*sampling.stop_token_ids, *ids)
    return replace(request, sampling=replace(sampling, stop_token_ids=stop_token_ids))


def ended_late(request: GenerationRequest, eos_token_ids: frozenset[int]) -> GenerationRequest:
    """The same request; where it has ``min_tokens``, with every token that must wait for them."""
    sampling = request.sampling
    if sampling.min_tokens == 0:
        return request
    ids = tuple(sorted(eos_token_ids.union(sampling.stop_token_ids)))
    return replace(request, sampling=replace(sampling, ending_token_ids=ids))


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """What speculation did for one request.

    ``acceptance_histogram[i]`` counts the speculative rounds in which exactly ``i`` draft
    tokens were accepted. Draft tokens behind the one that ended the answer count neither as drafted
    nor as accepted; ``num_cut_rounds`` are the rounds that ended with a draft's token so, without
    one of the target's own."""

    draft: str
    weight_version: int
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    num_cut_rounds: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
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
    """What the target said of one output token: natural logarithms of its own softmax, T = 1.

    Neither temperature nor filters, bias or penalties are in them. ``top`` holds (token id,
    log-probability), the most probable first; ``text_offset`` is where the token's text begins
    in the answer's, in characters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """Where one output token comes from.

    ``origin`` is ``accepted`` for a draft's token that the target accepted, ``recovered`` for the
    target's own in place of one that it rejected, ``bonus`` for the target's own after all that
    were drafted had been accepted, ``plain`` for a round without drafts. ``draft`` proposed in
    the round, with ``weight_version``; both are None where the token is plain.

    ``target_probability`` is the token's in the target's own softmax at T = 1, before bias,
    penalties, temperature and filters. ``acceptance_probability`` is min(1, p/q) of the token
    drafted at this position, p and q being what the request samples from; None where nothing was
    drafted, and for greedy and seeded requests, which do not leave acceptance to chance.
    ``rejected_token_id`` is the draft's token that a recovered one stands for; ``text_offset`` is
    where the token's text begins in the answer's, in characters.
    """

    origin: Origin
    draft: str | None
    weight_version: int | None
    target_probability: float
    acceptance_probability: float | None = None
    rejected_token_id: int | None = None
    text_offset: int = 0


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """A piece of the answer; the last one carries ``finish_reason`` and ``speculative``.

    With stop strings ``token_ids`` are those whose text has been shown, at least in part: what
    is held back, or cut with a stop string, is not among them; ``num_cut_tokens`` says in the
    last chunk how many were cut. ``logprobs`` and ``origins`` have an entry per token id, None
    where none are wanted. ``num_cached_tokens`` of the prompt were not computed again.

    ``rounds`` are the speculative rounds since the chunk before, as (drafted, accepted): should
    the replica die, no last chunk tells. A chunk with nothing in it says that the request lives.
    Where ``finish_reason`` is one of `FAILED`, ``replica_id`` names the replica.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    speculative: SpeculativeStats | None = None
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_cut_tokens: int = 0
    rounds: tuple[tuple[int, int], ...] = ()
    replica_id: str = ""
    origins: tuple[TokenOrigin, ...] | None = None


def joined(chunks: Sequence[GenerationChunk]) -> GenerationChunk:
    """One chunk that says what these said, at least one of them; figures are the last one's."""
    if len(chunks) == 1:
        return chunks[0]
    said = [c for c in chunks if c.token_ids or c.text or c.finish_reason is not None]
    last = said[-1] if said else chunks[-1]
    logprobs = None
    if last.logprobs is not None:
        logprobs = tuple(item for chunk in said for item in chunk.logprobs or ())
    origins = None
    if last.origins is not None:
        origins = tuple(item for chunk in said for item in chunk.origins or ())
    return replace(
        last,
        text="".join(chunk.text for chunk in said),
        token_ids=tuple(token for chunk in said for token in chunk.token_ids),
        logprobs=logprobs,
        rounds=tuple(each for chunk in chunks for each in chunk.rounds),
        origins=origins,
    )
