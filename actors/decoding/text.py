"""From tokens to text: incremental decoding and stop strings."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0


class TextStream:
    """Decodes one answer token by token and cuts it before a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), sent_chars: int = 0) -> None:
        """Start an answer.

        Args:
            tokenizer: a transformers fast tokenizer.
            stops: non-empty strings that end the answer; they are not part of the text.
            sent_chars: length of the text that has been shown already, by another stream of
                the same tokens; it is not released again.
        """
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text has come out of the stream
        self._starts: list[int] = []  # where the text of each token begins
        self._decoded = ""
        self._released = sent_chars
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> None:
        """Take one token; :attr:`stopped` turns True where it completes a stop string.

        Args:
            token: its id.
            may_stop: False where the answer may not end yet: a stop string that this token
                completes is text like any other.
        """
        self._tokens.append(token)
        self._starts.append(len(self._decoded))
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # the tokenizers library has no narrower one
            # Decoders that join bytes may take back text that they gave before; the stream
            # then refuses to go on. What was given stands, a new one starts here.
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self._stream.step(self._backend, token)
        if piece:
            if self._shown < len(self._tokens) - 1:
                self._place(token, piece)
            self._shown = len(self._tokens)
            self._extend(piece, may_stop)

    def _place(self, token: int, piece: str) -> None:
        """Where a token begins whose text comes with that of broken bytes before it."""
        own = str(self._backend.decode([token], skip_special_tokens=True))
        if own and "\ufffd" not in own and piece.endswith(own):
            self._starts[-1] = len(self._decoded) + len(piece) - len(own)

    def _extend(self, piece: str, may_stop: bool = True) -> None:
        before = len(self._decoded)
        self._decoded += piece
        if not (may_stop and self._stops):
            return
        # A stop string that ends in the new piece begins at most its length before it.
        found = [
            at
            for stop in self._stops
            if (at := self._decoded.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            self._decoded = self._decoded[: min(found)]
            self.stopped = True

    def start(self, index: int) -> int:
        """Where the text of a token begins, in characters; past the last one, the text's end."""
        return self._starts[index] if index < len(self._starts) else len(self._decoded)

    def num_released(self) -> int:
        """How many of the first tokens may be shown.

        Where there are stop strings, those whose text has been released, at least in part: the
        others may turn out to be cut.
        """
        if not self._stops:
            return len(self._starts)
        return bisect.bisect_left(self._starts, self._released)

    def release(self, *, last: bool = False) -> str:
        """The text that may be shown now and has not been.

        Args:
            last: the answer is over: nothing is held back, and bytes that never became a
                character are shown as the tokenizer shows them.
        """
        if last and not self.stopped:
            whole = str(self._backend.decode(self._tokens, skip_special_tokens=True))
            if whole.startswith(self._decoded):
                self._extend(whole[len(self._decoded) :])
            else:
                rest = self._tokens[self._shown :]
                self._extend(str(self._backend.decode(rest, skip_special_tokens=True)))
        free = last or self.stopped or not self._stops
        hold = 0 if free else held_back(self._decoded, self._stops)
        # A stop string may begin in text that had to be released before it was complete;
        # held_back makes that impossible, max() only states it.
        end = max(len(self._decoded) - hold, self._released)
        text = self._decoded[self._released : end]
        self._released = end
        return text
