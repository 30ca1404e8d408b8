"""Incremental detokenization and stop strings."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import TEXT, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from paceline.actors.engine.detokenizer import IncrementalDetokenizer, PartialStops

TOKENIZER = tiny_tokenizer()


def stream(tokens: list[int], stops: tuple[str, ...]) -> tuple[list[str], bool]:
    """The pieces that a client sees."""
    text = IncrementalDetokenizer(TOKENIZER, stops)
    pieces = []
    for token in tokens:
        text.append(token)
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
def test_the_text_is_cut_at_the_first_stop_string(tokens: list[int], stops: list[str]) -> None:
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


def test_a_stop_string_over_token_borders_is_held_back() -> None:
    tokens = TOKENIZER.encode("SELECT name FROM people WHERE", add_special_tokens=False)
    pieces, stopped = stream(tokens, ("ROM peo",))
    assert stopped
    assert "".join(pieces) == "SELECT name F"


def test_the_text_ends_behind_a_stop_string_where_it_is_included() -> None:
    tokens = TOKENIZER.encode("SELECT name FROM people WHERE", add_special_tokens=False)
    text = IncrementalDetokenizer(TOKENIZER, ("ROM peo", "OM"), include_stop=True)
    shown = ""
    for token in tokens:
        text.append(token)
        shown += text.release()
        if text.stopped:
            break
    assert shown + text.release(last=True) == "SELECT name FROM"


@given(st.lists(st.integers(0, 299), max_size=30), st.lists(st.integers(0, 299), max_size=6))
def test_special_tokens_have_text_where_they_are_not_skipped(
    tokens: list[int], prompt: list[int]
) -> None:
    text = IncrementalDetokenizer(TOKENIZER, prompt=prompt, skip_special_tokens=False)
    shown = ""
    for token in tokens:
        text.append(token)
        shown += text.release()
    shown += text.release(last=True)
    special = [TOKENIZER.decode([token]) for token in tokens if token in TOKENIZER.all_special_ids]
    assert all(shown.count(each) >= special.count(each) for each in special)
    if not prompt and "\ufffd" not in shown:
        assert shown == TOKENIZER.decode(tokens, skip_special_tokens=False)


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_longest_partial_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    size = PartialStops(stops).length(text)
    openings = [
        n
        for n in range(1, len(text) + 1)
        if any(stop.startswith(text[-n:]) and len(stop) > n for stop in stops)
    ]
    assert size == max(openings, default=0)


class Counted(str):
    """A stop string that counts how often texts are compared with its start."""

    times = 0

    def startswith(self, *arguments: Any) -> bool:
        Counted.times += 1
        return super().startswith(*arguments)


def test_however_many_stop_strings_the_end_of_a_text_is_looked_at_once_from_each_place() -> None:
    stops = [Counted("a" * 255 + chr(0x100 + i)) for i in range(128)]
    text = IncrementalDetokenizer(TOKENIZER, stops)
    for token in TOKENIZER.encode("a" * 300 + "b", add_special_tokens=False):
        text.append(token)
    Counted.times = 0
    assert text.release() == "a" * 300 + "b"
    assert Counted.times <= 255


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
    stream = IncrementalDetokenizer(byte_fallback_tokenizer())
    text = ""
    for token in tokens:
        stream.append(token)
        text += stream.release()
    text += stream.release(last=True)
    for token, shown in ((256, "a"), (257, "b")):
        assert text.count(shown) == tokens.count(token)


BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = ["<s>", "<|end|>", "▁", "▁▁", "▁a", "b", "▁a▁b", ",", "##c", "<tool>"]
SPECIAL = ("<s>", "<|end|>")
SENTENCE_PIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "strip": decoders.Sequence([*SENTENCE_PIECE, decoders.Strip(" ", 1, 0)]),
    "no-strip": decoders.Sequence(SENTENCE_PIECE),
    "metaspace-always": decoders.Metaspace(prepend_scheme="always"),
    "metaspace-first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "fallback-metaspace": decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    ),
}


@cache
def tokenizer_of(kind: str) -> Any:
    """A tokenizer of a kind: words, bytes, two special tokens and one that is only added."""
    if kind == "byte-level":
        fast = tiny_tokenizer()
        fast.add_tokens([AddedToken("<|end|>", special=True)], special_tokens=True)
        fast.add_tokens([AddedToken("<tool>", special=False)])
        return fast
    vocab = {word: i for i, word in enumerate([*WORDS, *BYTES])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = DECODERS[kind]
    backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def decode(kind: str, tokens: list[int]) -> str:
    return str(tokenizer_of(kind).backend_tokenizer.decode(tokens, skip_special_tokens=True))


def pieces_of(kind: str, prompt: list[int], answer: list[int], **more: Any) -> list[str]:
    text = IncrementalDetokenizer(tokenizer_of(kind), prompt=prompt, **more)
    pieces = []
    for token in answer:
        text.append(token)
        if text.stopped:
            break
        pieces.append(text.release())
    return [*pieces, text.release(last=True)]


WORD_IDS = st.lists(st.integers(0, len(WORDS) - 1), max_size=40)
# Whole characters: decoders that join bytes take text back where some are broken.
CHARACTERS = st.sampled_from(["é", "☕", "😀", "x"]).map(
    lambda char: [len(WORDS) + byte for byte in char.encode()]
)
WHOLE = st.lists(st.integers(0, len(WORDS) - 1).map(lambda i: [i]) | CHARACTERS, max_size=25).map(
    lambda units: [token for unit in units for token in unit]
)


@pytest.mark.parametrize("kind", DECODERS)
@given(WHOLE, st.integers(0, 60))
@settings(max_examples=150)
def test_an_answer_is_decoded_behind_its_prompt(kind: str, tokens: list[int], at: int) -> None:
    """Prompts that end within a character, with special tokens, with none that is seen."""
    prompt, answer = tokens[:at], tokens[at:]
    whole = decode(kind, tokens)
    stable = prompt
    while decode(kind, stable).endswith("\ufffd"):
        stable = stable[:-1]
    assert whole.startswith(decode(kind, stable))
    right = whole[len(decode(kind, stable)) :]
    pieces = pieces_of(kind, prompt, answer)
    assert "".join(pieces) == right
    # Another replica goes on: of the same tokens nothing that was shown is shown again.
    for sent in {0, len(right) // 2, len(right)}:
        assert "".join(pieces_of(kind, prompt, answer, sent_chars=sent)) == right[sent:]


@given(st.lists(st.integers(0, 301), max_size=40), st.integers(0, 40))
@settings(max_examples=300)
def test_any_bytes_are_decoded_behind_any_bytes(tokens: list[int], at: int) -> None:
    known, whole = decode("byte-level", tokens[:at]), decode("byte-level", tokens)
    common = takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    right = whole[len(list(common)) :]
    assert "".join(pieces_of("byte-level", tokens[:at], tokens[at:])) == right


@cache
def parts_tokenizer() -> Any:
    """A byte-level tokenizer of parts of characters; tokens begin and end anywhere in them."""
    text = "☕☕é😀é".encode()
    parts = {text[at : at + size] for size in range(1, 6) for at in range(len(text) - size + 1)}
    # As byte-level vocabularies write these bytes, all of which are above 0x7F.
    names = ["".join(chr(b if b > 0xA0 else b + 162) for b in part) for part in sorted(parts)]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 999), min_size=1, max_size=4), st.integers(1, 20)),
        max_size=5,
    ),
    st.integers(0, 3),
)
@settings(max_examples=300)
def test_long_runs_of_broken_bytes_have_the_text_of_the_whole(
    runs: list[tuple[list[int], int]], at: int
) -> None:
    tokenizer = parts_tokenizer()
    tokens = [token % len(tokenizer) for unit, times in runs for token in unit * times]
    known, whole = tokenizer.decode(tokens[:at]), tokenizer.decode(tokens)
    common = takewhile(lambda pair: pair[0] == pair[1], zip(known, whole, strict=False))
    text = IncrementalDetokenizer(tokenizer, prompt=tokens[:at])
    shown = ""
    for token in tokens[at:]:
        text.append(token)
        shown += text.release()
    assert shown + text.release(last=True) == whole[len(list(common)) :]


@pytest.mark.parametrize("unit", [b"\x98", b"\xe2", b"\xf0\x9f", b"\x98\x95\xe2"])
@pytest.mark.parametrize("prompt", [[], [0, 0]])
def test_broken_bytes_do_not_pile_up_behind_each_other(unit: bytes, prompt: list[int]) -> None:
    """Every step decodes what is not yet text: without an end its work would be quadratic."""
    tokenizer = parts_tokenizer()
    name = "".join(chr(b if b > 0xA0 else b + 162) for b in unit)
    tokens = [tokenizer.convert_tokens_to_ids(name)] * 200
    text = IncrementalDetokenizer(tokenizer, ("x",), prompt=prompt)
    shown = ""
    for i, token in enumerate(tokens, 1):
        text.append(token)
        shown += text.release()
        assert text.num_released() < i
        assert len(shown) >= len(tokenizer.decode(tokens[: max(0, i - 17)])) - 1
    text.release(last=True)
    assert text.num_released() == len(tokens)


def test_broken_bytes_that_a_decoder_joins_do_not_pile_up_and_hide_no_character() -> None:
    tokenizer = byte_fallback_tokenizer()
    text = IncrementalDetokenizer(tokenizer, prompt=[256])
    shown = ""
    for i in range(200):
        text.append(0xFF)
        shown += text.release()
        assert len(shown) >= i - 16
    for token in (0x41, 256, *"😀é".encode(), 257):
        text.append(token)
        shown += text.release()
    shown += text.release(last=True)
    assert shown == "\ufffd" * 201 + " a😀éb"


def test_special_tokens_without_text_do_not_pile_up() -> None:
    text = IncrementalDetokenizer(tokenizer_of("strip"), prompt=[5])
    for token in [0, 1] * 50:
        text.append(token)
        assert text._pending == []
    text.append(4)
    assert text.release(last=True) == " a"


@pytest.mark.parametrize("kind", ["strip", "metaspace-always", "byte-level"])
def test_special_tokens_before_an_answer_are_no_text(kind: str) -> None:
    """However many: the word before them is what it follows; without one it begins the text."""
    backend = tokenizer_of(kind).backend_tokenizer
    start = backend.token_to_id("<s>")
    word, other = (
        [backend.token_to_id(t)] for t in (("Ġa", "b") if kind == "byte-level" else ("▁a", "b"))
    )
    assert "".join(pieces_of(kind, [*other, *[start] * 500], word)) == " a"
    first = "".join(pieces_of(kind, [start] * 500, word))
    assert first == decode(kind, word)


@pytest.mark.parametrize("kind", ["strip", "metaspace-first", "byte-level"])
def test_the_offset_of_a_token_behind_broken_bytes(kind: str) -> None:
    backend = tokenizer_of(kind).backend_tokenizer
    names = ("Ġa", "â") if kind == "byte-level" else ("▁a", "<0xE2>")
    word, broken = (backend.token_to_id(name) for name in names)
    text = IncrementalDetokenizer(tokenizer_of(kind), prompt=[word])
    for token in (broken, word, word):
        text.append(token)
    shown = text.release(last=True)
    if kind == "metaspace-first":  # bytes are words to it
        assert shown == "<0xE2> a a"
    else:
        assert shown == "\ufffd a a"
    assert [shown[text.start(i) :] for i in (1, 2, 3)] == [" a a", " a", ""]


@given(
    WORD_IDS,
    WORD_IDS,
    st.lists(
        st.lists(
            st.sampled_from(["<|end|>", "<s>", " ", "a", "b", ",", "<"]), min_size=1, max_size=3
        ).map("".join),
        min_size=1,
        max_size=3,
    ),
)
@example([4], [4, 1, 4], ["<|end|>"])
@example([4], [5, 7, 1, 4], [",<|end|>"])
@example([4], [5, 1, 4, 5], ["<|end|> a"])
@example([4], [5, 1, 0, 5], ["<|end|><s>", "b<|end|>b"])
@settings(max_examples=300)
def test_stops_with_special_tokens_cut_the_text_before_them(
    prompt: list[int], answer: list[int], stops: list[str]
) -> None:
    """The words of these tokens are the same everywhere behind a first one."""
    prompt = [5, *prompt]
    own = ["", "", " ", "  ", " a", "b", " a b", ",", "##c", "<tool>"]
    shown, seen, right, stopped = "", "", "", False
    places: list[int] = []  # of every character of `seen` in `shown`
    marked = [stop for stop in stops if any(text in stop for text in SPECIAL)]
    for token in answer:
        hidden = WORDS[token] if token < 2 else own[token]
        places += [len(shown) + (i if token >= 2 else 0) for i in range(len(hidden))]
        shown, seen = shown + own[token], seen + hidden
        cuts = [shown.find(stop) for stop in stops if stop not in marked and stop in shown]
        cuts += [places[seen.find(stop)] for stop in marked if stop in seen]
        if cuts:
            shown, stopped = shown[: min(cuts)], True
            break
    right = shown
    pieces = pieces_of("no-strip", prompt, answer, stops=stops)
    assert "".join(pieces) == right
    stream = IncrementalDetokenizer(tokenizer_of("no-strip"), stops, prompt=prompt)
    for token in answer:
        stream.append(token)
        if stream.stopped:
            break
    assert stream.stopped == stopped


@given(WORD_IDS, st.lists(st.text(" ab,", min_size=1, max_size=3), min_size=1, max_size=3))
@settings(max_examples=150)
def test_stops_see_the_blank_before_the_first_word(answer: list[int], stops: list[str]) -> None:
    whole = "".join(pieces_of("strip", [5], answer))
    shown = "".join(pieces_of("strip", [5], answer, stops=stops))
    assert not any(stop in shown for stop in stops)
    assert whole.startswith(shown)
    assert shown == whole or any(stop in whole for stop in stops)
