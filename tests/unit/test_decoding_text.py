"""Incremental text and stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TEXT, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

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


def byte_fallback_tokenizer() -> Any:
    """A tokenizer of Llama-2's kind: byte tokens, joined by the decoder."""
    vocab = {f"<0x{i:02X}>": i for i in range(256)} | {"▁a": 256, "b": 257, "▁": 258}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0xFF, 0xF0, 0x9F, 256, 257]), max_size=12))
def test_broken_bytes_never_fail_and_hide_no_character(tokens: list[int]) -> None:
    """Decoders that join bytes take earlier text back (a bad byte spoils its neighbours)."""
    stream = TextStream(byte_fallback_tokenizer())
    text = ""
    for token in tokens:
        stream.push(token)
        text += stream.release()
    text += stream.release(last=True)
    for token, shown in ((256, "a"), (257, "b")):
        assert text.count(shown) == tokens.count(token)
