"""An agent's long conversation: every turn computes what is new, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

import httpx
import pytest
from tiny_models import tiny_tokenizer

pytestmark = pytest.mark.cluster

BLOCK, ANSWER, TURNS = 16, 24, 8
# Letters that no token joins: their text is encoded as it was generated, whatever is generated.
LETTERS = {str(tiny_tokenizer().encode(letter)[0]): 100 for letter in "zqjxkv"}
SYSTEM = {
    "role": "system",
    "content": "You fix bugs. Call read_file(path) and run_tests(), one at a time.",
}


def new_messages() -> Iterator[list[dict[str, Any]]]:
    """What a client adds before each turn: questions, tools' outputs, notes of the system."""
    yield [SYSTEM, {"role": "user", "content": "The tests of sum.py fail. Please fix it."}]
    for turn in range(1, TURNS):
        result = {
            "role": "tool",
            "tool_call_id": f"call_{turn}",
            "content": f"file {turn}: 42\n" * 4,
        }
        note = {"role": "system", "content": f"You have {TURNS - turn} steps left."}
        question = {"role": "user", "content": f"Now the tests of part {turn}, please."}
        yield [[result], [result, note], [question]][turn % 3]


def common(one: list[int], other: list[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Conversation:
    """A client that sends the whole history on every turn."""

    def __init__(self, http: httpx.Client, **more: Any) -> None:
        self._http, self._more = http, more
        self.messages: list[dict[str, Any]] = []

    def encoded(self) -> list[int]:
        answer = self._http.post("/tokenize", json={"messages": self.messages})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    def turn(self, new: list[dict[str, Any]]) -> tuple[list[int], list[int], int]:
        """The turn's prompt and answer in tokens, and how many of the prompt were cached."""
        self.messages += new
        body = {
            "model": "paceline",
            "messages": self.messages,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self._http.post("/v1/chat/completions", json=body | self._more)
        assert answer.status_code == 200, answer.text
        (choice,), usage = answer.json()["choices"], answer.json()["usage"]
        prompt = self.encoded()
        assert len(prompt) == usage["prompt_tokens"]
        self.messages.append({"role": "assistant", "content": choice["message"]["content"]})
        return prompt, choice["token_ids"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("speculative", [{"draft": "general"}, {"draft": "off"}])
def test_each_turn_reuses_all_whole_blocks_of_the_turn_before_and_its_answer(
    http: httpx.Client, speculative: dict[str, Any]
) -> None:
    """The draft is part of the first message: the conversations share no more than its start."""
    agent = Conversation(http, logit_bias=LETTERS, speculative=speculative)
    agent.messages.append({"role": "system", "content": f"Today's draft is {speculative}."})
    history: list[int] = []
    reused = []
    for new in new_messages():
        prompt, answer, cached = agent.turn(new)
        if history:
            # The last token of an answer is never computed, as nothing followed it.
            assert prompt[: len(history)] == history
            assert cached == (len(history) - 1) // BLOCK * BLOCK
            assert cached > len(history) - 1 - BLOCK
        reused.append(cached)
        history = prompt + answer
    assert len(reused) == TURNS
    assert all(later >= earlier + ANSWER for earlier, later in pairwise(reused[1:]))


def test_an_answer_whose_text_is_encoded_otherwise_is_reused_up_to_there(
    http: httpx.Client,
) -> None:
    """A random model writes any bytes, and tokens that its text would be merged into."""
    agent = Conversation(http)
    before: list[int] = []
    differed = False
    for new in new_messages():
        prompt, answer, cached = agent.turn(new)
        if before:
            shared = common(prompt, before)
            differed |= shared < len(before)
            assert cached == min(shared, len(before) - 1) // BLOCK * BLOCK
        before = prompt + answer
    assert differed


def test_a_conversation_that_is_not_stored_leaves_nothing_to_reuse(http: httpx.Client) -> None:
    agent = Conversation(http, logit_bias=LETTERS, store=False)
    agent.messages.append({"role": "system", "content": "Nothing of this is to be kept."})
    for new in new_messages():
        _, _, cached = agent.turn(new)
        assert cached < 2 * BLOCK  # what all prompts begin with
