"""Incremental text and stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TEXT, tiny_tokenizer

from paceline.actors.decoding.text import TextStream, held_back

TOKENIZER = tiny_tokenizer()


def stream(tokens: list[int], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces that a client sees."""
    text = TextStream(TOKENIZER, stops)
    pieces = []
    for token in tokens:
        text.push(token)
        if text.stopped:
            break
        pieces.append(text.release())
    pieces.append(text.release(last=True))
    return pieces, text.stopped


@pytest.mark.parametrize("sentence", TEXT)
def test_pieces_join_to_the_whole(sentence: str) -> None:
    tokens = TOKENIZER.encode(sentence, add_special_tokens=False)
    pieces, stopped = stream(tokens, ())
    assert "".join(pieces) == sentence
    assert not stopped
    assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.lists(st.integers(0, 299), max_size=30),
    st.lists(st.text("abe ,:;", min_size=1, max_size=4), max_size=3),
)
def test_any_tokens_give_the_text_cut_at_the_first_stop(
    tokens: list[int], stops: list[str]
) -> None:
    pieces, stopped = stream(tokens, tuple(stops))
    shown = "".join(pieces)
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert not any(stop in shown for stop in stops)
    if stopped:
        assert any(stop in whole for stop in stops)
    else:
        assert shown == whole
    # Nothing that was shown belongs to what is cut.
    assert whole.startswith(shown) or "\ufffd" in whole


def test_a_stop_over_token_borders_is_held_back() -> None:
    tokens = TOKENIZER.encode("SELECT name FROM people WHERE", add_special_tokens=False)
    pieces, stopped = stream(tokens, ("ROM peo",))
    assert stopped
    assert "".join(pieces) == "SELECT name F"


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_held_back_is_the_longest_open_stop(text: str, stops: list[str]) -> None:
    size = held_back(text, stops)
    openings = [
        n
        for n in range(1, len(text) + 1)
        if any(stop.startswith(text[-n:]) and len(stop) > n for stop in stops)
    ]
    assert size == max(openings, default=0)
