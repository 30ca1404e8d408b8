"""What a chat template writes around a user's text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from paceline.actors.engine.turn_marks import TurnMarks, turn_marks

MARKS = TurnMarks(opening=(3,), cue=(4,))
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def test_the_marks_of_the_small_target_s_form() -> None:
    assert turn_marks(tiny_tokenizer()) == MARKS


def test_the_marks_of_a_form_with_system_prompts_and_roles() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    marks = turn_marks(tokenizer)
    assert tokenizer.decode(marks.cue) == "<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(marks.opening).endswith("<|im_start|>user\n")
    later = [("user", "hello there"), ("assistant", "yes"), ("user", "and what else is new")]
    for turns in (later[2:], later):
        chat = [{"role": role, "content": text} for role, text in turns]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert tuple(ids[-len(marks.cue) :]) == marks.cue
        start = marks.last_user_text(ids[: -len(marks.cue)])
        assert start is not None
        assert tokenizer.decode(ids[start : -len(marks.cue)]) == "and what else is new"


@pytest.mark.parametrize("template", [None, "", WORDS, "{{ raise_exception('no') }}", "{% if"])
def test_forms_without_marks_are_refused(template: str | None) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"chat template"):
        turn_marks(tokenizer)


@given(
    st.lists(st.integers(5, 299), min_size=2, max_size=40),
    st.lists(st.integers(5, 299), max_size=10),
)
def test_the_last_user_s_text_begins_behind_the_last_opening(
    text: list[int], history: list[int]
) -> None:
    head = [1, 3, *history, 2, 3]
    assert MARKS.last_user_text([*head, *text]) == len(head)


@pytest.mark.parametrize("prompt", [(), (5, 6, 7), (1, 5, 6, 7)])
def test_what_is_not_templated_has_no_user_s_text(prompt: tuple[int, ...]) -> None:
    assert MARKS.last_user_text(prompt) is None
