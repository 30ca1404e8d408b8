"""Turns of one conversation are found, and nothing else is taken for one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fixture_models import TARGET
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.engine.turn_marks import turn_marks
from paceline.actors.replay.conversations import Conversations
from paceline.actors.replay.record import prompt_digest

CUE = (4, 9)
TEMPLATE = (
    r"{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '</s>\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def found(own: Conversations, prompt: Sequence[int]) -> int:
    return own.find(np.asarray(prompt, dtype=np.int32))


def turns(*texts: Sequence[int]) -> list[list[int]]:
    """Prompts of a conversation: user's and assistant's texts in turns."""
    prompts: list[list[int]] = []
    tokens: list[int] = []
    for i, text in enumerate(texts):
        tokens = [*tokens, 3, *text, *CUE] if i % 2 == 0 else [*tokens, *text, 4]
        if i % 2 == 0:
            prompts.append(tokens)
    return prompts


def test_later_turns_belong_to_the_first_prompt() -> None:
    own = Conversations(CUE)
    prompts = turns([10, 11], [20, 21, 22], [12], [23, 4, 24], [13, 14])
    first = prompt_digest(prompts[0])
    assert [found(own, p) for p in prompts] == [first] * 3
    assert [found(own, p) for p in prompts] == [first] * 3  # asked again
    skipped = Conversations(CUE)
    assert [found(skipped, p) for p in (prompts[0], prompts[2])] == [first] * 2


@pytest.mark.parametrize("answer", ["SELECT 1", "\n\nSELECT 1", "  SELECT 1", "\n"])
def test_white_space_before_an_answer_is_joined_with_the_template_s(answer: str) -> None:
    tokenizer = load_tokenizer(str(TARGET))
    tokenizer.chat_template = TEMPLATE
    own = Conversations(turn_marks(tokenizer).cue)

    def prompt(*texts: str) -> NDArray[np.int32]:
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return np.asarray(tokenizer(shown)["input_ids"], np.int32)

    first = own.find(prompt("hi"))
    assert own.find(prompt("hi", answer, "go on")) == first == prompt_digest(prompt("hi"))


def test_a_beginning_that_many_share_is_no_conversation() -> None:
    own = Conversations(CUE)
    greeting = [10]
    several = [turns(greeting, [20], [30 + i], [40], [50 + i]) for i in range(4)]
    shared = prompt_digest(several[0][0])
    conversations = [[found(own, prompt) for prompt in prompts] for prompts in several]
    assert conversations[0] == [shared] * 3
    for prompts, ids in zip(several[1:], conversations[1:], strict=True):
        assert ids == [shared, prompt_digest(prompts[1]), prompt_digest(prompts[1])]


def test_examples_in_front_of_a_prompt_were_never_asked() -> None:
    own = Conversations(CUE)
    prompts = [turns([10], [20], [30 + i])[1] for i in range(3)]
    assert [found(own, p) for p in prompts] == [prompt_digest(p) for p in prompts]


def test_the_longest_ago_are_forgotten() -> None:
    own = Conversations(CUE)
    first, second, third = turns([10], [20], [30], [21], [31])
    found(own, first)
    found(own, second)
    for i in range(2**14 - 1):
        found(own, [3, 100 + i, *CUE])
    assert found(own, second) == prompt_digest(first)
    assert found(own, third) == prompt_digest(first)
    for i in range(2**14):
        found(own, [3, 100 + i, *CUE])
    assert found(own, third) == prompt_digest(third)


tokens = st.lists(st.integers(0, 12), max_size=12)


@given(st.lists(tokens, min_size=1, max_size=8))
def test_any_prompt_has_its_own_conversation_or_that_of_one_that_it_begins_with(
    prompts: list[list[int]],
) -> None:
    def kept(prompt: list[int]) -> list[int]:
        return prompt[:-1] if tuple(prompt[-2:]) == CUE else prompt

    own = Conversations(CUE)
    for i, prompt in enumerate(prompts):
        known = {prompt_digest(p) for p in prompts[:i] if prompt[: len(kept(p))] == kept(p)}
        assert found(own, prompt) in known | {prompt_digest(prompt)}
