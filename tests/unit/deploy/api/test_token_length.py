"""How long the text of a token may be, with tokenizers of the usual kinds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from paceline.deploy.api.token_length import TokenLength, token_length

BYTES = {token: i for i, token in enumerate(sorted(ByteLevel.alphabet()))}
WORD = ByteLevel(add_prefix_space=False).pre_tokenize_str(" é")[0][0]  # three bytes
NAMED_BYTES = {f"<0x{i:02X}>": i for i in range(256)}
TEXTS = (
    "",
    "a b",
    " " * 99,
    "e\u0301" * 50,
    "\u1f82" * 9,
    "\u03b1\u0313\u0300\u0345" * 9,
    "漢☕\x00",
)


def byte_level(*added: AddedToken, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({**BYTES, WORD: 256}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece(**fields: Any) -> Tokenizer:
    """As Llama 2's: bytes for unknown characters."""
    vocab = {**NAMED_BYTES, "▁": 256, "▁▁": 257, "<unk>": 258}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | fields
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "▁")], **options))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    tokenizer.decoder = decoders.Sequence([])
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "chars"),
    [
        (byte_level(), len(WORD)),
        (byte_level(AddedToken("<|user|>", special=True)), 8),
        (byte_level(normalizer=normalizers.NFC()), 4 * len(WORD)),
        (byte_level(AddedToken("\u0958" * 3), normalizer=normalizers.NFC()), 4 * 6),
        (sentencepiece(), len("<0x00>")),
    ],
)
def test_no_text_has_more_characters_per_token(tokenizer: Tokenizer, chars: int) -> None:
    length = token_length(tokenizer)
    assert length == TokenLength(chars)
    for text in TEXTS:
        assert length.fewest_tokens(text) <= len(tokenizer.encode(text).ids)
    assert length.fewest_tokens("a" * chars * 7 + "a") == 8


def without(*symbols: str, **parts: Any) -> Tokenizer:
    """One whose vocabulary lacks bytes, as SmolLM2's does."""
    content = json.loads(byte_level(**parts).to_str())
    for symbol in symbols:
        del content["model"]["vocab"][symbol]
    return Tokenizer.from_str(json.dumps(content))


def test_dropped_characters_do_not_count() -> None:
    control, lead = ByteLevel().pre_tokenize_str("\x04\U00050000")[0][0][1:3]
    tokenizer = without(control, lead)
    length = token_length(tokenizer)
    assert length == TokenLength(len(WORD), "\x04")
    for text, kept in (("\x04" * 1000, 0), ("\x04a" * 300, 300), ("\U00050000" * 300, 300)):
        assert length.fewest_tokens(text) == kept / len(WORD)
        assert length.fewest_tokens(text) <= len(tokenizer.encode(text).ids)


@pytest.mark.parametrize(
    "tokenizer",
    [
        without(ByteLevel().pre_tokenize_str("\x80")[0][0][-1]),
        without("a", normalizer=normalizers.Replace("b", "a")),
        sentencepiece(byte_fallback=False),
        byte_level(AddedToken("<end>", rstrip=True)),
        byte_level(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        byte_level(normalizer=normalizers.Replace("  ", " ")),
        byte_level(normalizer=normalizers.Replace(" ", "")),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), ByteLevel(add_prefix_space=False)]
            )
        ),
        byte_level(pre_tokenizer=pre_tokenizers.Whitespace()),
        Tokenizer(models.WordLevel({"[UNK]": 0}, "[UNK]")),
    ],
)
def test_what_may_drop_or_join_any_text_has_no_limit(tokenizer: Tokenizer) -> None:
    assert token_length(tokenizer) is None
