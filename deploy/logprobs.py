"""Log-probabilities in OpenAI's two shapes: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.actors.decoding.request import GenerationChunk, TokenLogprob
from paceline.deploy.openai_answers import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)
from paceline.deploy.token_names import TokenName, TokenNames

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
