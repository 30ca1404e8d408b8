"""From what the engine gives back to OpenAI's objects and server-sent events: pure functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from paceline.actors.engine.request import GenerationChunk, SpeculativeStats, TokenLogprob
from paceline.deploy.api.responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Envelope,
    Metrics,
    PromptTokensDetails,
    SpeculativeMetrics,
    TokenOriginEntry,
    TopLogprob,
    Usage,
)
from paceline.deploy.api.token_names import TokenName, TokenNames
from paceline.deploy.errors import ApiError

# What OpenAI sends for a token that is as good as impossible: JSON has no infinity.
LEAST = -9999.0


def chat_logprobs(chunk: GenerationChunk, names: TokenNames) -> ChatLogprobs | None:
    """Of a chat answer or a piece of one; None where none were asked for."""
    if chunk.logprobs is None:
        return None
    content = []
    for token_id, item in zip(chunk.token_ids, chunk.logprobs, strict=True):
        top = [_top(names.name(other), logprob) for other, logprob in item.top]
        own = _top(names.name(token_id), item.logprob)
        content.append(ChatTokenLogprob(**own.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def _top(name: TokenName, logprob: float) -> TopLogprob:
    utf8 = None if name.utf8 is None else list(name.utf8)
    return TopLogprob(token=name.text, logprob=max(logprob, LEAST), bytes=utf8)


def completion_logprobs(chunk: GenerationChunk, names: TokenNames) -> CompletionLogprobs | None:
    """Of a completion or a piece of one; None where none were asked for."""
    if chunk.logprobs is None:
        return None
    pairs: Sequence[tuple[int, TokenLogprob]] = list(
        zip(chunk.token_ids, chunk.logprobs, strict=True)
    )
    return CompletionLogprobs(
        tokens=[_word(names.name(token_id)) for token_id, _ in pairs],
        token_logprobs=[max(item.logprob, LEAST) for _, item in pairs],
        top_logprobs=[_alternatives(token_id, item, names) for token_id, item in pairs],
        text_offset=[item.text_offset for _, item in pairs],
    )


def _word(name: TokenName) -> str:
    return f"bytes:{name.text}" if name.partial and name.utf8 is not None else name.text


def _alternatives(token_id: int, item: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The most probable tokens and the chosen one; of two that read alike, the likelier."""
    alternatives: dict[str, float] = {}
    for other, logprob in (*item.top, (token_id, item.logprob)):
        alternatives.setdefault(_word(names.name(other)), max(logprob, LEAST))
    return alternatives


def token_origins(chunk: GenerationChunk, names: TokenNames) -> list[TokenOriginEntry] | None:
    """An entry per token of an answer or a piece of one; None where none were asked for."""
    if chunk.origins is None:
        return None
    entries = []
    for token_id, item in zip(chunk.token_ids, chunk.origins, strict=True):
        rejected = item.rejected_token_id
        entries.append(
            TokenOriginEntry(
                token=names.name(token_id).text,
                text_offset=item.text_offset,
                origin=item.origin,
                draft=item.draft,
                weight_version=item.weight_version,
                target_probability=item.target_probability,
                acceptance_probability=item.acceptance_probability,
                rejected_token=None if rejected is None else names.name(rejected).text,
            )
        )
    return entries


MIXED = "mixed"
DONE = b"data: [DONE]\n\n"
# Line breaks that JSON leaves as they are; clients that split as str.splitlines does break at them.
_LINE_BREAKS = [(c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What stays the same over all pieces of one answer.

    Attributes:
        id: ``cmpl-…`` or ``chatcmpl-…``.
        created: unix seconds.
        model: the served model's name.
        chat: True for ``/v1/chat/completions``.
        token_ids: True where the request wants the ids beside the text.
        topics: topic of every prompt.
        prompt_tokens: of all prompts together.
        names: words log-probabilities.
        num_choices: answers per prompt; those to the first prompt come first.
    """

    id: str
    created: int
    model: str
    chat: bool
    token_ids: bool
    topics: Sequence[str]
    prompt_tokens: int
    names: TokenNames
    num_choices: int = 1

    def topic(self, index: int) -> str:
        """Topic of a choice."""
        return self.topics[index // self.num_choices]


class Tally:
    """Counts the tokens of an answer's choices as they come."""

    def __init__(self, answer: Answer) -> None:
        """Start from nothing."""
        self._answer = answer
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, index: int, chunk: GenerationChunk) -> None:
        """Count a chunk of a choice; tokens that a stop string cut were generated too."""
        self._completion_tokens += len(chunk.token_ids) + chunk.num_cut_tokens
        if chunk.finish_reason is not None:
            prompt = index // self._answer.num_choices
            cached = chunk.num_cached_tokens
            # The choices of a prompt may read it from each other; the least is from earlier.
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))

    def usage(self) -> Usage:
        """OpenAI's usage object: every prompt counts once, every choice by itself."""
        prompt_tokens = self._answer.prompt_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


def metrics(parts: Sequence[tuple[SpeculativeStats, str]]) -> Metrics | None:
    """Speculation figures of a request, summed over its choices.

    Args:
        parts: per choice its figures and its topic. Draft and topic read ``mixed``, and the
            version None, where the choices differ.
    """
    if not parts:
        return None
    stats = [part for part, _ in parts]
    steps = sum(part.num_spec_steps for part in stats)
    drafted = sum(part.num_draft_tokens for part in stats)
    accepted = sum(part.num_accepted_draft_tokens for part in stats)
    cut = sum(part.num_cut_rounds for part in stats)
    histograms = (part.acceptance_histogram for part in stats)
    versions = {part.weight_version for part in stats}
    return Metrics(
        speculative_decoding=SpeculativeMetrics(
            mean_acceptance_length=1.0 + (accepted - cut) / steps if steps else 0.0,
            draft_acceptance_rate=accepted / drafted if drafted else 0.0,
            acceptance_histogram=[sum(column) for column in zip_longest(*histograms, fillvalue=0)],
            num_spec_steps=steps,
            num_accepted_draft_tokens=accepted,
            num_draft_tokens=drafted,
            draft=_one({part.draft for part in stats}),
            weight_version=versions.pop() if len(versions) == 1 else None,
            topic=_one({topic for _, topic in parts}),
        )
    )


def _one(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else MIXED


def whole(answer: Answer, chunks: Sequence[GenerationChunk]) -> bytes:
    """The JSON body of an answer that is not streamed, a choice per chunk."""
    tally = Tally(answer)
    for index, chunk in enumerate(chunks):
        tally.add(index, chunk)
    parts = [
        (chunk.speculative, answer.topic(index))
        for index, chunk in enumerate(chunks)
        if chunk.speculative is not None
    ]
    envelope = Envelope(
        id=answer.id,
        object="chat.completion" if answer.chat else "text_completion",
        created=answer.created,
        model=answer.model,
        choices=[_choice(answer, index, chunk) for index, chunk in enumerate(chunks)],
        usage=tally.usage(),
        metrics=metrics(parts),
    )
    return envelope.model_dump_json().encode()


def _choice(answer: Answer, index: int, chunk: GenerationChunk) -> CompletionChoice | ChatChoice:
    if answer.chat:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=chunk.text),
            logprobs=chat_logprobs(chunk, answer.names),
            finish_reason=chunk.finish_reason,
            token_ids=_token_ids(answer, chunk),
            token_origins=token_origins(chunk, answer.names),
        )
    return _completion_choice(answer, index, chunk)


def _completion_choice(answer: Answer, index: int, chunk: GenerationChunk) -> CompletionChoice:
    return CompletionChoice(
        index=index,
        text=chunk.text,
        logprobs=completion_logprobs(chunk, answer.names),
        finish_reason=chunk.finish_reason,
        token_ids=_token_ids(answer, chunk),
        token_origins=token_origins(chunk, answer.names),
    )


def _token_ids(answer: Answer, chunk: GenerationChunk) -> list[int] | None:
    return list(chunk.token_ids) if answer.token_ids else None


def _event(
    answer: Answer,
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice],
    figures: Metrics | None = None,
    total: Usage | None = None,
) -> bytes:
    envelope = Envelope(
        id=answer.id,
        object="chat.completion.chunk" if answer.chat else "text_completion",
        created=answer.created,
        model=answer.model,
        choices=choices,
        usage=total,
        metrics=figures,
    )
    return _frame(envelope.model_dump_json())


def _frame(data: str) -> bytes:
    """The event of a JSON text, on one line by every rule of what a line is."""
    line = data.encode()
    for raw, escaped in _LINE_BREAKS:
        line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


def opening_event(answer: Answer, index: int) -> bytes:
    """The event that gives a chat message its role."""
    return _event(answer, [ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))])


def piece_event(answer: Answer, index: int, chunk: GenerationChunk) -> bytes:
    """The event of a chunk; the last one of a choice carries its reason and its figures."""
    choice: CompletionChoice | ChatChunkChoice
    if answer.chat:
        choice = ChatChunkChoice(
            index=index,
            delta=Delta(content=chunk.text or None),
            logprobs=chat_logprobs(chunk, answer.names),
            finish_reason=chunk.finish_reason,
            token_ids=_token_ids(answer, chunk),
            token_origins=token_origins(chunk, answer.names),
        )
    else:
        choice = _completion_choice(answer, index, chunk)
    figures = (
        None if chunk.speculative is None else metrics([(chunk.speculative, answer.topic(index))])
    )
    return _event(answer, [choice], figures)


def usage_event(answer: Answer, total: Usage) -> bytes:
    """The event that ``stream_options.include_usage`` asks for: no choices, all tokens."""
    return _event(answer, [], total=total)


def error_event(error: ApiError) -> bytes:
    """An error after the stream has begun, as OpenAI's clients read it."""
    return _frame(json.dumps(error.body()))
