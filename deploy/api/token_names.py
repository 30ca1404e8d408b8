"""Text and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenName:
    """Text and bytes of a token.

    Attributes:
        text: its characters; for a part of a character its bytes as ``\\xe6\\xbc``.
        utf8: its bytes, None if the tokenizer does not give them.
        partial: True if the bytes are not complete characters.
    """

    text: str
    utf8: tuple[int, ...] | None
    partial: bool = False


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE writes bytes (Radford et al., GPT-2's encoder)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


class TokenNames:
    """The token texts of a transformers fast tokenizer, cached."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend = tokenizer.backend_tokenizer
        decoder = json.loads(self._backend.to_str()).get("decoder")
        self._alphabet = _byte_alphabet() if '"ByteLevel"' in json.dumps(decoder) else None
        # Decoders drop a space at the start of a text: decode every token after another one.
        self._prefix_ids = list(self._backend.encode("a", add_special_tokens=False).ids)
        self._prefix = self._decode([])
        self.name = lru_cache(maxsize=1 << 16)(self._name)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(self._prefix_ids + token_ids, skip_special_tokens=False))

    def _name(self, token_id: int) -> TokenName:
        text = self._decode([token_id])[len(self._prefix) :]
        if _REPLACEMENT not in text:
            return TokenName(text, tuple(text.encode()))
        utf8 = self._bytes(self._backend.id_to_token(token_id) or "")
        if utf8 is None:
            return TokenName(text, None, partial=True)
        return TokenName("".join(f"\\x{byte:02x}" for byte in utf8), utf8, partial=True)

    def _bytes(self, piece: str) -> tuple[int, ...] | None:
        """The bytes of a vocabulary entry that is not valid text."""
        single = _BYTE_TOKEN.fullmatch(piece)
        if single is not None:
            return (int(single[1], 16),)
        if self._alphabet is None or not all(char in self._alphabet for char in piece):
            return None
        return tuple(self._alphabet[char] for char in piece)
