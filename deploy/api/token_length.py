"""How few tokens a text may have, for which one of too many characters need not be tokenized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

_NFC_CHARS = 4  # characters that NFC makes one of, at most: no canonical decomposition has more
_NUM_BYTES = 0xC0  # those of ASCII, then those that continue a character of several bytes


@dataclass(frozen=True, slots=True)
class TokenLength:
    """How long the text of a token may be.

    Attributes:
        chars: characters per token, at most.
        dropped: characters that the tokenizer drops.
    """

    chars: int
    dropped: str = ""

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of a text."""
        kept = len(text) - sum(map(text.count, self.dropped))
        return -(-kept // self.chars)


def token_length(tokenizer: Tokenizer) -> TokenLength | None:
    """How long the text of a tokenizer's tokens may be.

    Returns:
        None if a part of it may drop or join any number of characters, or is not known not to: one
        that strips white space, or one token for a run of unknown text.
    """
    parts: dict[str, Any] = json.loads(tokenizer.to_str())
    normalizers = _flat(parts["normalizer"], "normalizers")
    splitters = _flat(parts["pre_tokenizer"], "pretokenizers")
    dropped = _dropped(parts["model"], [*normalizers, *splitters])
    added = tokenizer.get_added_tokens_decoder().values()
    known = (
        dropped is not None
        and all(_keeps_length(part, dropped) for part in normalizers)
        and all(map(_keeps_text, splitters))
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if dropped is None or not known:
        return None
    contents = [token.content for token in added]
    if tokenizer.normalizer is not None:  # some are looked for in the normalized text
        contents += [tokenizer.normalizer.normalize_str(content) for content in contents]
    longest = max(map(len, (*parts["model"]["vocab"], *contents)))
    times = sum(part["type"] == "NFC" for part in normalizers)
    return TokenLength(longest * int(_NFC_CHARS**times), dropped)


def _flat(part: Mapping[str, Any] | None, items: str) -> list[Mapping[str, Any]]:
    """A part of tokenizer.json, or the items of a sequence of them."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [leaf for item in part[items] for leaf in _flat(item, items)]


def _keeps_length(normalizer: Mapping[str, Any], dropped: str) -> bool:
    """Whether it does not shorten a text, but for NFC, of which the caller knows how much."""
    if normalizer["type"] == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return pattern is not None and len(content) >= len(pattern) and not dropped
    return normalizer["type"] in ("NFC", "Prepend", "ByteLevel")


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    if splitter["type"] == "Split":
        return bool(splitter["behavior"] != "Removed")
    return splitter["type"] in ("ByteLevel", "Metaspace", "Digits")


def _dropped(model: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> str | None:
    """Characters without a token; None if it is not a BPE of bytes, or drops more than ASCII."""
    vocab = model["vocab"]
    suffixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model["type"] != "BPE" or suffixes:
        return None
    if model["byte_fallback"]:
        return "" if all(f"<0x{byte:02X}>" in vocab for byte in range(256)) else None
    if all(part["type"] != "ByteLevel" for part in parts):
        return None
    level = ByteLevel(add_prefix_space=False, use_regex=False)
    # The last byte of a character below 0xC0 is its number. Vocabularies of trained tokenizers may
    # lack bytes that their text did not have; the start of a longer character may be missing.
    symbols = {chr(i): level.pre_tokenize_str(chr(i))[0][0][-1] for i in range(_NUM_BYTES)}
    dropped = "".join(char for char, symbol in symbols.items() if symbol not in vocab)
    return dropped if dropped.isascii() else None
