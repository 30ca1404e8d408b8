"""What a chat template writes around a user's text, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXTS = ("apples?", "7 Zebras run!")  # nothing in common, at neither end


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """Token ids around a user's text.

    Attributes:
        opening: right before it, in a first turn and in later ones.
        cue: behind the last one; an answer follows.
    """

    opening: tuple[int, ...]
    cue: tuple[int, ...]

    def last_user_text(self, prompt: Sequence[int]) -> int | None:
        """Where the last user's text begins in a prompt's token ids; None: it is not templated."""
        width = len(self.opening)
        ends = range(len(prompt), width - 1, -1)
        return next((i for i in ends if tuple(prompt[i - width : i]) == self.opening), None)


def turn_marks(tokenizer: PreTrainedTokenizerBase) -> TurnMarks:
    """The marks of a tokenizer's chat template.

    Args:
        tokenizer: of transformers.

    Raises:
        ValueError: there is no template, it raises, or it ends a user's text by ordinary words,
            which a user's text may hold.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the target's tokenizer has no chat template")
    firsts = [_templated(tokenizer, [text]) for text in _TEXTS]
    seconds = [_templated(tokenizer, ["why", "so", text]) for text in _TEXTS]
    cue = _common_end(*firsts)
    opening = _common_end(_common_start(*firsts), _common_start(*seconds))
    if not cue or not opening:
        raise ValueError("the chat template does not mark a user's text")
    if cue[0] not in tokenizer.added_tokens_decoder:
        word = tokenizer.decode([cue[0]])
        raise ValueError(f"the chat template ends a user's text by an ordinary token, {word!r}")
    return TurnMarks(tuple(opening), tuple(cue))


def first_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens before a first user's text by a tokenizer's chat template."""
    return tuple(_common_start(*(_templated(tokenizer, [text]) for text in _TEXTS)))


def _templated(tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> list[int]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # a template is a program by the model's authors
        raise ValueError(f"the chat template refuses a user's text: {error}") from error
    return [int(i) for i in ids]


def _common_start(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a for a, _ in takewhile(lambda p: p[0] == p[1], zip(first, second, strict=False))]


def _common_end(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return _common_start(first[::-1], second[::-1])[::-1]
