"""From tokens to text: incremental decoding and stop strings."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

from tokenizers.decoders import DecodeStream

_BROKEN = "\ufffd"
_LEAST_TAIL, _MOST_TAIL = 4, 32  # tokens of a prompt that its answer is decoded behind
_MOST_OPEN = 3  # tokens at a text's end that may be a part of a character: of at most 4 bytes


@lru_cache(maxsize=8)
def special_tokens(backend: Any) -> Mapping[int, str]:
    """Texts of the special tokens, which decoding skips, by id.

    Args:
        backend: a tokenizer of the tokenizers library.
    """
    added = backend.get_added_tokens_decoder().items()
    return {token: entry.content for token, entry in added if entry.special}


def _num_common(one: str, other: str) -> int:
    """Length of the longest text that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


class _Behind:
    """Decodes tokens behind others: decoders treat a text's first token unlike those after it."""

    def __init__(self, backend: Any, prompt: Sequence[int]) -> None:
        """Find as much of a prompt's end as its answer's text depends on.

        Decoding begins with a whole character. Where the prompt ends within one, the answer's text
        begins with that character if it completes it, and behind the broken one if not.
        """
        self._backend = backend
        special = special_tokens(backend)
        visible = list(islice((t for t in reversed(prompt) if t not in special), _MOST_TAIL))
        visible.reverse()
        self.token_ids = visible
        for size in range(min(_LEAST_TAIL, len(visible)), len(visible) + 1):
            tail = visible[len(visible) - size :]
            stable = self._stable(tail)
            whole = stable is not None and stable != "" and stable[0] != _BROKEN
            if stable is not None and (whole or size == len(visible)):
                self.token_ids = tail
                break
        else:
            stable = None
        text = self._decode(self.token_ids)
        self._known = [text] if stable is None else [text, stable]
        self.open = text.endswith(_BROKEN)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def _stable(self, tail: list[int]) -> str | None:
        """Text of the tail without the character that its last tokens begin, if there is one."""
        for end in range(len(tail), max(0, len(tail) - _MOST_OPEN) - 1, -1):
            text = self._decode(tail[:end])
            if not text.endswith(_BROKEN):
                return text
        return None

    def rest(self, text: str) -> str:
        """What is the answer's in a text of the tail and the answer."""
        return text[max(_num_common(known, text) for known in self._known) :]

    def text(self, answer: list[int]) -> str:
        """The answer's text."""
        return self.rest(self._decode([*self.token_ids, *answer]))


class _Marked:
    """The text with its special tokens in it, for the stop strings that have one in them."""

    def __init__(self, stops: Iterable[str], special: Mapping[int, str]) -> None:
        """Begin with no text."""
        self.stops = [stop for stop in stops if any(text in stop for text in special.values())]
        self.special = special if self.stops else {}
        self._text = ""
        self._hidden: list[tuple[int, int]] = []  # where a special token is, and its length

    def add(self, piece: str, *, hidden: bool = False) -> int | None:
        """Add text; where a stop string is complete now, the place before it in what is shown."""
        if not self.stops:
            return None
        before = len(self._text)
        if hidden:
            self._hidden.append((before, len(piece)))
        self._text += piece
        at = first_stop(self._text, self.stops, before)
        return None if at is None else self._shown(at)

    def free(self) -> int:
        """How much of what is shown is no beginning of a stop string."""
        return self._shown(len(self._text) - held_back(self._text, self.stops))

    def _shown(self, end: int) -> int:
        return end - sum(min(size, end - at) for at, size in self._hidden if at < end)


def first_stop(text: str, stops: Sequence[str], before: int) -> int | None:
    """Where the first stop string begins that ends behind ``before``; None where none does."""
    found = (text.find(stop, max(0, before - len(stop) + 1)) for stop in stops)
    return min((at for at in found if at >= 0), default=None)


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a stop string."""
    longest = max((len(stop) for stop in stops), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0


class TextStream:
    """Decodes one answer token by token and cuts it before a stop string."""

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        sent_chars: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        """Start an answer.

        Args:
            tokenizer: a transformers fast tokenizer.
            stops: non-empty strings that end the answer; they are not part of the text. One in
                which a special token's text occurs is looked for in the text with its special
                tokens, the others in the text as it is shown.
            sent_chars: length of the text that has been shown already, by another stream of
                the same tokens; it is not released again.
            prompt: token ids that the answer follows; its text is what they and the answer
                decode to, less what they decode to alone.
        """
        self._backend = tokenizer.backend_tokenizer
        self._behind = _Behind(self._backend, prompt)
        self._stream = DecodeStream(ids=self._behind.token_ids, skip_special_tokens=True)
        self._open = self._behind.open  # the stream's first text has the tail's in it
        self._marked = _Marked(stops, special_tokens(self._backend))
        self._stops = tuple(stop for stop in stops if stop not in self._marked.stops)
        self._may_be_cut = bool(stops)
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
            # then refuses to go on. What was given stands, a new one starts here: behind this
            # very token, whose text is then that of any but a text's first.
            self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
            piece = self._stream.step(self._backend, token)
        if piece and self._open:
            piece, self._open = self._behind.rest(piece), False
        if piece:
            if self._shown < len(self._tokens) - 1:
                self._place(token, piece)
            self._shown = len(self._tokens)
            self._extend(piece, may_stop)
        elif special := self._marked.special.get(token):
            self._cut(self._marked.add(special, hidden=True), may_stop)

    def _place(self, token: int, piece: str) -> None:
        """Where a token begins whose text comes with that of broken bytes before it."""
        once, twice = (
            str(self._backend.decode([token] * times, skip_special_tokens=True)) for times in (1, 2)
        )
        own = twice.removeprefix(once)
        if own and _BROKEN not in own and piece.endswith(own):
            self._starts[-1] = len(self._decoded) + len(piece) - len(own)

    def _extend(self, piece: str, may_stop: bool = True) -> None:
        before = len(self._decoded)
        self._decoded += piece
        if self._may_be_cut:
            self._cut(first_stop(self._decoded, self._stops, before), may_stop)
            self._cut(self._marked.add(piece), may_stop)

    def _cut(self, at: int | None, may_stop: bool) -> None:
        """End the text before a stop string, if there is one."""
        if at is not None and may_stop:
            self._decoded = self._decoded[:at]
            self.stopped = True

    def start(self, index: int) -> int:
        """Where the text of a token begins, in characters; past the last one, the text's end."""
        return self._starts[index] if index < len(self._starts) else len(self._decoded)

    def num_released(self) -> int:
        """How many of the first tokens may be shown.

        Where there are stop strings, those whose text has been released, at least in part: the
        others may turn out to be cut.
        """
        if not self._may_be_cut:
            return len(self._starts)
        return bisect.bisect_left(self._starts, self._released)

    def release(self, *, last: bool = False) -> str:
        """The text that may be shown now and has not been.

        Args:
            last: the answer is over: nothing is held back, and bytes that never became a
                character are shown as the tokenizer shows them.
        """
        if last and not self.stopped:
            whole = self._behind.text(self._tokens)
            if whole.startswith(self._decoded):
                self._extend(whole[len(self._decoded) :])
            else:
                rest = self._tokens[self._shown :]
                self._extend(str(self._backend.decode(rest, skip_special_tokens=True)))
        end = len(self._decoded)
        if not (last or self.stopped):
            end -= held_back(self._decoded, self._stops)
            if self._marked.stops:
                end = min(end, self._marked.free())
        # A stop string may begin in text that had to be released before it was complete;
        # held_back makes that impossible, max() only states it.
        end = max(end, self._released)
        text = self._decoded[self._released : end]
        self._released = end
        return text
