"""Build OpenAI's response bodies and server-sent events from the engine's chunks; pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from pydantic_core import to_json

from paceline.actors.engine.request import (
    FINISH_LENGTH,
    FINISH_STOP,
    GenerationChunk,
    SpeculativeStats,
    TokenLogprob,
)
from paceline.deploy.api.prompt_encoder import EchoedPrompt
from paceline.deploy.api.response_schemas import (
    AssistantMessage,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FunctionDelta,
    GenerationResponse,
    MessageToolCall,
    Metrics,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    SpeculativeMetrics,
    TokenSourceEntry,
    ToolCallDelta,
    TopLogprob,
    Usage,
    UsageChunk,
)
from paceline.deploy.api.token_names import TokenName, TokenNames
from paceline.deploy.api.tool_calls import Piece, ToolCallParser, ToolSyntax, collect
from paceline.deploy.errors import ApiError

# OpenAI's value for an impossible token: JSON has no infinity.
MIN_LOGPROB = -9999.0


def chat_logprobs(chunk: GenerationChunk, names: TokenNames) -> ChatLogprobs | None:
    """Log-probabilities of a chat chunk; None if they were not requested."""
    if chunk.logprobs is None:
        return None
    content = []
    for token_id, item in zip(chunk.token_ids, chunk.logprobs, strict=True):
        top = [_top_logprob(names.name(other), logprob) for other, logprob in item.top]
        own = _top_logprob(names.name(token_id), item.logprob)
        content.append(ChatTokenLogprob(**own.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def _top_logprob(name: TokenName, logprob: float) -> TopLogprob:
    utf8 = None if name.utf8 is None else list(name.utf8)
    return TopLogprob(token=name.text, logprob=max(logprob, MIN_LOGPROB), bytes=utf8)


def completion_logprobs(
    chunk: GenerationChunk, names: TokenNames, shift: int
) -> CompletionLogprobs | None:
    """Log-probabilities of a completion chunk; None if they were not requested.

    Args:
        chunk: of the engine.
        names: token texts.
        shift: start of the answer in the choice's text, in characters.
    """
    if chunk.logprobs is None:
        return None
    offsets = [shift + entry.text_offset for entry in chunk.logprobs]
    return _columns([*zip(chunk.token_ids, chunk.logprobs, offsets, strict=True)], names)


def echo_logprobs(
    chunk: GenerationChunk, names: TokenNames, echo: EchoedPrompt
) -> CompletionLogprobs | None:
    """Log-probabilities of a prompt that a chunk's text starts with; None if not requested."""
    if chunk.logprobs is None:
        return None
    of_prompt = (None, *(chunk.prompt_logprobs or ()))
    return _columns([*zip(echo.token_ids, of_prompt, echo.text_offsets, strict=True)], names)


def _columns(
    items: Sequence[tuple[int, TokenLogprob | None, int]], names: TokenNames
) -> CompletionLogprobs:
    """Log-probabilities of tokens, from id, entry and text offset of each."""
    return CompletionLogprobs(
        tokens=[_token_key(names.name(token_id)) for token_id, _, _ in items],
        token_logprobs=[
            None if entry is None else max(entry.logprob, MIN_LOGPROB) for _, entry, _ in items
        ],
        top_logprobs=[
            None if entry is None else _alternatives(token_id, entry, names)
            for token_id, entry, _ in items
        ],
        text_offset=[offset for _, _, offset in items],
    )


def _joined(
    one: CompletionLogprobs | None, other: CompletionLogprobs | None
) -> CompletionLogprobs | None:
    if one is None or other is None:
        return one or other
    return CompletionLogprobs(
        tokens=one.tokens + other.tokens,
        token_logprobs=one.token_logprobs + other.token_logprobs,
        top_logprobs=one.top_logprobs + other.top_logprobs,
        text_offset=one.text_offset + other.text_offset,
    )


def prompt_logprobs(
    chunk: GenerationChunk, prompt: Sequence[int], names: TokenNames
) -> PromptLogprobs | None:
    """Log-probabilities of a prompt in vLLM's form; None if they were not requested."""
    if chunk.prompt_logprobs is None:
        return None
    entries: PromptLogprobs = [None]
    for token_id, item in zip(prompt[1:], chunk.prompt_logprobs, strict=True):
        ranked = {token_id: (item.logprob, item.rank)}
        for rank, (other, logprob) in enumerate(item.top, 1):
            ranked.setdefault(other, (logprob, rank))
        entries.append(
            {
                other: PromptLogprob(
                    logprob=max(logprob, MIN_LOGPROB),
                    rank=rank,
                    decoded_token=names.name(other).text,
                )
                for other, (logprob, rank) in ranked.items()
            }
        )
    return entries


def _token_key(name: TokenName) -> str:
    return f"bytes:{name.text}" if name.partial and name.utf8 is not None else name.text


def _alternatives(token_id: int, item: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """The most probable tokens and the chosen one; of two with the same text, the likelier."""
    alternatives: dict[str, float] = {}
    for other, logprob in (*item.top, (token_id, item.logprob)):
        alternatives.setdefault(_token_key(names.name(other)), max(logprob, MIN_LOGPROB))
    return alternatives


def token_sources(chunk: GenerationChunk, names: TokenNames) -> list[TokenSourceEntry] | None:
    """The source of every token of a chunk; None if they were not requested."""
    if chunk.token_sources is None:
        return None
    entries = []
    for token_id, item in zip(chunk.token_ids, chunk.token_sources, strict=True):
        rejected = item.rejected_token_id
        entries.append(
            TokenSourceEntry(
                token=names.name(token_id).text,
                text_offset=item.text_offset,
                source=item.kind,
                draft=item.draft,
                weight_version=item.weight_version,
                target_probability=item.target_probability,
                acceptance_probability=item.acceptance_probability,
                rejected_token=None if rejected is None else names.name(rejected).text,
            )
        )
    return entries


MIXED = "mixed"
FINISH_TOOL_CALLS = "tool_calls"
DONE = b"data: [DONE]\n\n"
# Line breaks that JSON does not escape and that clients using str.splitlines split at.
_LINE_BREAKS = [(c.encode(), f"\\u{ord(c):04x}".encode()) for c in "\x85\u2028\u2029"]


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """What all chunks of a response have in common.

    Attributes:
        id: ``cmpl-…`` or ``chatcmpl-…``.
        created: unix seconds.
        model: the served model's name.
        chat: True for ``/v1/chat/completions``.
        token_ids: True to return token ids beside the text.
        topics: of every prompt.
        prompts: token ids of every prompt.
        names: token texts for log-probabilities.
        num_choices: per prompt; those of the first prompt come first.
        echoes: of every prompt, what its answers start with; empty if with nothing.
        prompt_logprobs: whether to return those of the prompts.
        include_usage: whether a stream ends with the token counts.
        continuous_usage: whether all its chunks have them.
        tools: how answers call tools; None if they do not.
    """

    id: str
    created: int
    model: str
    chat: bool
    token_ids: bool
    topics: Sequence[str]
    prompts: Sequence[Sequence[int]]
    names: TokenNames
    num_choices: int = 1
    echoes: Sequence[EchoedPrompt] = ()
    prompt_logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: ToolSyntax | None = None

    def topic(self, index: int) -> str:
        """Topic of a choice."""
        return self.topics[index // self.num_choices]

    def prompt(self, index: int) -> Sequence[int]:
        """Token ids of a choice's prompt."""
        return self.prompts[index // self.num_choices]

    def echo(self, index: int) -> EchoedPrompt | None:
        """What a choice's text starts with, if with its prompt."""
        return self.echoes[index // self.num_choices] if self.echoes else None

    def call_id(self, index: int, call: int) -> str:
        """Id of a call in a choice; of at most 40 characters, as OpenAI's clients send it back."""
        return f"call_{self.id.rpartition('_')[2].rpartition('-')[2][:24]}{index:x}_{call:x}"


class UsageCounter:
    """Counts the tokens of a response's choices."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, index: int, chunk: GenerationChunk) -> None:
        """Count a chunk; tokens cut by a stop string were generated too."""
        self._completion_tokens += len(chunk.token_ids) + chunk.num_cut_tokens
        if chunk.finish_reason is not None:
            prompt = index // self._context.num_choices
            cached = chunk.num_cached_tokens
            # Choices may share their prompt's prefix; the least was cached before this request.
            self._cached[prompt] = min(cached, self._cached.get(prompt, cached))

    def usage(self) -> Usage:
        """OpenAI's usage object: prompts count once each, not per choice."""
        prompt_tokens = sum(map(len, self._context.prompts))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


def speculative_metrics(parts: Sequence[tuple[SpeculativeStats, str]]) -> Metrics | None:
    """Speculation statistics of a request, summed over its choices.

    Draft and topic are ``mixed``, and the version None, if the choices differ.

    Args:
        parts: per choice its statistics and its topic.
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
            num_suffix_tokens=sum(part.num_suffix_tokens for part in stats),
            num_accepted_suffix_tokens=sum(part.num_accepted_suffix_tokens for part in stats),
            draft=_one({part.draft for part in stats}),
            weight_version=versions.pop() if len(versions) == 1 else None,
            topic=_one({topic for _, topic in parts}),
        )
    )


def _one(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else MIXED


def response_body(context: ResponseContext, chunks: Sequence[GenerationChunk]) -> bytes:
    """The JSON body of a response that is not streamed, a choice per chunk."""
    usage = UsageCounter(context)
    for index, chunk in enumerate(chunks):
        usage.add(index, chunk)
    prompts = [
        _prompt_part(context, index, chunks[index])
        for index in range(0, len(chunks), context.num_choices)
    ]
    parts = [
        (chunk.speculative, context.topic(index))
        for index, chunk in enumerate(chunks)
        if chunk.speculative is not None
    ]
    response = GenerationResponse(
        id=context.id,
        object="chat.completion" if context.chat else "text_completion",
        created=context.created,
        model=context.model,
        choices=[
            _choice(context, index, chunk, prompts[index // context.num_choices])
            for index, chunk in enumerate(chunks)
        ],
        usage=usage.usage(),
        metrics=speculative_metrics(parts),
        prompt_logprobs=prompts[0].entries if context.chat else None,
    )
    return response.model_dump_json().encode()


@dataclass(frozen=True, slots=True)
class _PromptPart:
    """What answers say of their prompt; its choices share it.

    Attributes:
        text: that they repeat.
        logprobs: of that text; None if not requested.
        entries: vLLM's; None if not requested.
    """

    text: str
    logprobs: CompletionLogprobs | None
    entries: PromptLogprobs | None


def _prompt_part(context: ResponseContext, index: int, chunk: GenerationChunk) -> _PromptPart:
    """The part of the prompt that a chunk, a choice's first one, comes with."""
    echo, names = context.echo(index), context.names
    return _PromptPart(
        text="" if echo is None else echo.text,
        logprobs=None if echo is None else echo_logprobs(chunk, names, echo),
        entries=prompt_logprobs(chunk, context.prompt(index), names)
        if context.prompt_logprobs
        else None,
    )


def _choice(
    context: ResponseContext, index: int, chunk: GenerationChunk, prompt: _PromptPart
) -> CompletionChoice | ChatChoice:
    if context.chat:
        message, finish_reason = _message(context, index, chunk)
        return ChatChoice(
            index=index,
            message=message,
            logprobs=chat_logprobs(chunk, context.names),
            finish_reason=finish_reason,
            token_ids=_token_ids(context, chunk),
            token_sources=token_sources(chunk, context.names),
        )
    return _completion_choice(context, index, chunk, prompt)


def read_whole(syntax: ToolSyntax, chunk: GenerationChunk) -> list[Piece]:
    """Text and calls of a whole answer."""
    parser = ToolCallParser(syntax, whole=True)
    return parser.feed(chunk.text, last=True, cut=chunk.finish_reason == FINISH_LENGTH)


def _message(
    context: ResponseContext, index: int, chunk: GenerationChunk
) -> tuple[AssistantMessage, str | None]:
    """The message of a whole answer, and its finish reason."""
    if context.tools is None:
        return AssistantMessage(content=chunk.text), chunk.finish_reason
    text, calls = collect(read_whole(context.tools, chunk))
    if not calls:
        return AssistantMessage(content=text), chunk.finish_reason
    tool_calls = [
        MessageToolCall(
            id=context.call_id(index, i),
            function=CalledFunction(name=call.name, arguments=call.arguments),
        )
        for i, call in enumerate(calls)
    ]
    return AssistantMessage(content=text or None, tool_calls=tool_calls), _finish_reason(chunk)


def _finish_reason(chunk: GenerationChunk) -> str | None:
    """The finish reason of an answer with calls."""
    return FINISH_TOOL_CALLS if chunk.finish_reason == FINISH_STOP else chunk.finish_reason


def _completion_choice(
    context: ResponseContext, index: int, chunk: GenerationChunk, prompt: _PromptPart | None
) -> CompletionChoice:
    """A completion, or a chunk of one; ``prompt`` is what it says first, None if nothing."""
    echo = context.echo(index)
    logprobs = completion_logprobs(chunk, context.names, 0 if echo is None else len(echo.text))
    return CompletionChoice(
        index=index,
        text=chunk.text if prompt is None else prompt.text + chunk.text,
        logprobs=logprobs if prompt is None else _joined(prompt.logprobs, logprobs),
        finish_reason=chunk.finish_reason,
        prompt_logprobs=None if prompt is None else prompt.entries,
        token_ids=_token_ids(context, chunk),
        token_sources=token_sources(chunk, context.names),
    )


def _token_ids(context: ResponseContext, chunk: GenerationChunk) -> list[int] | None:
    return list(chunk.token_ids) if context.token_ids else None


def _event(
    context: ResponseContext,
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice],
    stats: Metrics | None = None,
    total: Usage | None = None,
) -> bytes:
    response = (UsageChunk if context.include_usage else GenerationResponse)(
        id=context.id,
        object="chat.completion.chunk" if context.chat else "text_completion",
        created=context.created,
        model=context.model,
        choices=choices,
        usage=total,
        metrics=stats,
    )
    return _frame(response.model_dump_json())


def _frame(data: str) -> bytes:
    """The server-sent event of a JSON text, without any line break in it."""
    line = data.encode()
    for raw, escaped in _LINE_BREAKS:
        line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


def event_frame(kind: str, fields: Mapping[str, object]) -> bytes:
    """The server-sent event of a kind; pydantic's models are among its fields."""
    return f"event: {kind}\n".encode() + _frame(to_json(fields).decode())


class ChatDeltas:
    """Turns the chunks of one choice into deltas of its message."""

    def __init__(self, context: ResponseContext, index: int) -> None:
        self._context, self._index = context, index
        self._parser = None if context.tools is None else ToolCallParser(context.tools)

    def read(self, chunk: GenerationChunk) -> tuple[list[Delta], GenerationChunk]:
        """The deltas of a chunk, and the chunk with the finish reason of the choice."""
        parser = self._parser
        if parser is None:
            return [Delta(content=chunk.text)] if chunk.text else [], chunk
        last, cut = chunk.finish_reason is not None, chunk.finish_reason == FINISH_LENGTH
        deltas = [self._delta(piece) for piece in parser.feed(chunk.text, last=last, cut=cut)]
        # A call that a stop string has cut must not be run.
        if parser.num_calls and not parser.in_call:
            chunk = replace(chunk, finish_reason=_finish_reason(chunk))
        return deltas, chunk

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, str):
            return Delta(content=piece)
        function = FunctionDelta(name=piece.name, arguments=piece.arguments)
        call = ToolCallDelta(index=piece.index, function=function)
        if piece.name is not None:
            call_id = self._context.call_id(self._index, piece.index)
            call = call.model_copy(update={"id": call_id, "type": "function"})
        return Delta(tool_calls=[call])


def role_event(context: ResponseContext, index: int, total: Usage | None = None) -> bytes:
    """The first event of a chat choice, with its role."""
    return delta_event(context, index, Delta(role="assistant", content=""), total)


def delta_event(
    context: ResponseContext, index: int, delta: Delta, total: Usage | None = None
) -> bytes:
    """The event of a delta that is not the last one of its chunk."""
    return _event(context, [ChatChunkChoice(index=index, delta=delta)], total=total)


def chunk_event(
    context: ResponseContext,
    index: int,
    chunk: GenerationChunk,
    total: Usage | None = None,
    *,
    first: bool,
    delta: Delta | None = None,
) -> bytes:
    """The event of a chunk; a choice's last one has its finish reason and its statistics.

    In a chat ``delta`` is what it adds to the message, if anything.
    """
    choice: CompletionChoice | ChatChunkChoice
    if context.chat:
        choice = ChatChunkChoice(
            index=index,
            delta=delta or Delta(),
            logprobs=chat_logprobs(chunk, context.names),
            finish_reason=chunk.finish_reason,
            token_ids=_token_ids(context, chunk),
            token_sources=token_sources(chunk, context.names),
        )
    else:
        prompt = _prompt_part(context, index, chunk) if first else None
        choice = _completion_choice(context, index, chunk, prompt)
    stats = (
        None
        if chunk.speculative is None
        else speculative_metrics([(chunk.speculative, context.topic(index))])
    )
    return _event(context, [choice], stats, total)


def usage_event(context: ResponseContext, total: Usage) -> bytes:
    """The last event with ``include_usage``: no choices, all tokens."""
    return _event(context, [], total=total)


def error_event(error: ApiError) -> bytes:
    """The event of an error after the stream has started."""
    return _frame(json.dumps(error.body()))
