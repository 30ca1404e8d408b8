"""Incremental detokenization and stop strings."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # in place of bytes that are no character
_MIN_PREFIX, _MAX_PREFIX = 4, 32  # tokens of the prompt that the answer is decoded behind
_MAX_INCOMPLETE = 3  # tokens that may be part of a character, which has at most 4 bytes
_MAX_PENDING = 16  # tokens without text, all of which a stream decodes again at each step


@lru_cache(maxsize=8)
def special_tokens(backend: Tokenizer) -> Mapping[int, str]:
    """Return the texts of the special tokens, which decoding skips, by id.

    Args:
        backend: a tokenizer of the tokenizers library.
    """
    added = backend.get_added_tokens_decoder().items()
    return {token: entry.content for token, entry in added if entry.special}


def _common_prefix_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _behind(shown: str, text: str) -> str:
    return text[_common_prefix_length(shown, text) :]


class _PrefixDecoder:
    """Decodes an answer behind the end of its prompt.

    Decoders treat the first token of a text unlike those after it. The prefix is as short as the
    answer's text allows, and starts with a whole character. If the prompt ends within a
    character, the answer's text starts with that character if it completes it, and behind the
    incomplete one if not.

    Attributes:
        token_ids: of the prefix.
        incomplete: whether the prefix ends within a character.
    """

    def __init__(
        self, backend: Tokenizer, prompt: Sequence[int], special: Mapping[int, str]
    ) -> None:
        """Choose the prefix; the tokens of ``special`` have no text."""
        self._backend = backend
        self._skips = bool(special)
        visible = list(islice((t for t in reversed(prompt) if t not in special), _MAX_PREFIX))
        visible.reverse()
        self.token_ids = visible
        for size in range(min(_MIN_PREFIX, len(visible)), len(visible) + 1):
            prefix = visible[len(visible) - size :]
            stable = self._complete_text(prefix)
            whole = stable is not None and stable != "" and stable[0] != _REPLACEMENT
            if stable is not None and (whole or size == len(visible)):
                self.token_ids = prefix
                break
        else:
            stable = None
        text = self._decode(self.token_ids)
        self._prefix_texts = [text] if stable is None else [text, stable]
        self.incomplete = text.endswith(_REPLACEMENT)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skips))

    def _complete_text(self, prefix: list[int]) -> str | None:
        """Return the text of a prefix without an incomplete character at its end."""
        for end in range(len(prefix), max(0, len(prefix) - _MAX_INCOMPLETE) - 1, -1):
            text = self._decode(prefix[:end])
            if not text.endswith(_REPLACEMENT):
                return text
        return None

    def strip(self, text: str) -> str:
        """Remove the prefix from its text with the answer's."""
        return text[max(_common_prefix_length(own, text) for own in self._prefix_texts) :]

    def decode(self, answer: list[int]) -> str:
        """Return the answer's text."""
        return self.strip(self._decode([*self.token_ids, *answer]))


class _SpecialStopMatcher:
    """Finds stop strings that contain a special token in the text with its special tokens.

    Attributes:
        stops: of the stop strings, those that contain one.
        special: texts of the special tokens by id; empty without ``stops``.
    """

    def __init__(self, stops: Iterable[str], special: Mapping[int, str]) -> None:
        self.stops = [stop for stop in stops if any(text in stop for text in special.values())]
        self.special = special if self.stops else {}
        self._partial = PartialStops(self.stops)
        self._text = ""
        self._hidden: list[tuple[int, int]] = []  # offset and length of each special token

    def append(self, piece: str, *, hidden: bool = False) -> tuple[int, int] | None:
        """Append text; return the visible range of a stop string that it completes, if any."""
        if not self.stops:
            return None
        before = len(self._text)
        if hidden:
            self._hidden.append((before, len(piece)))
        self._text += piece
        found = find_stop(self._text, self.stops, before)
        return None if found is None else (self._visible(found[0]), self._visible(found[1]))

    def releasable(self) -> int:
        """Return the length of the visible text that is no start of a stop string."""
        return self._visible(len(self._text) - self._partial.length(self._text))

    def _visible(self, end: int) -> int:
        return end - sum(min(size, end - at) for at, size in self._hidden if at < end)


def find_stop(text: str, stops: Sequence[str], before: int) -> tuple[int, int] | None:
    """Return the range of the first stop string that ends behind ``before``, if any."""
    found = ((text.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in stops)
    return min(((at, at + size) for at, size in found if at >= 0), default=None)


class PartialStops:
    """Finds what may be the start of a stop string at the end of a text.

    It looks once from each place where one may start, however many they are.
    """

    def __init__(self, stops: Collection[str]) -> None:
        """Take non-empty strings, perhaps none."""
        self._stops = sorted(stops)
        self._longest = max(map(len, stops), default=1)
        first = "".join({re.escape(stop[0]) for stop in stops})
        self._first = re.compile(f"[{first}]" if first else "(?!)")

    def length(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that may start a stop string."""
        for found in self._first.finditer(text, max(0, len(text) - self._longest + 1)):
            suffix = text[found.start() :]
            # Longer strings that start with it follow it in the order.
            at = bisect.bisect_right(self._stops, suffix)
            if at < len(self._stops) and self._stops[at].startswith(suffix):
                return len(suffix)
        return 0


class IncrementalDetokenizer:
    """Detokenizes one answer token by token and ends it at a stop string.

    Attributes:
        stopped: whether a stop string is complete.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str] = (),
        sent_chars: int = 0,
        prompt: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """Start an answer.

        Args:
            tokenizer: a transformers fast tokenizer.
            stops: non-empty strings that end the answer. One that contains the text of a special
                token is searched in the text with special tokens, the others in the text without.
            sent_chars: length of the text that another replica released for the same tokens; it
                is not released again.
            prompt: token ids before the answer, whose text is what both decode to less what the
                prompt decodes to alone.
            skip_special_tokens: False gives special tokens their text.
            include_stop: True ends the text behind the stop string, not before it.
        """
        self._backend = tokenizer.backend_tokenizer
        self._skips = skip_special_tokens
        self._include_stop = include_stop
        self._special = special = special_tokens(self._backend) if skip_special_tokens else {}
        self._prefix = _PrefixDecoder(self._backend, prompt, special)
        self._stream = self._decode_stream(self._prefix.token_ids)
        self._pending: list[int] = []  # tokens whose text the stream has not returned
        self._strip: Callable[[str], str] | None = None  # removes what is shown of their text
        if self._prefix.incomplete:  # the first text contains the prefix's end
            self._pending, self._strip = [*self._prefix.token_ids], self._prefix.strip
        self._special_stops = _SpecialStopMatcher(stops, special)
        self._stops = tuple(stop for stop in stops if stop not in self._special_stops.stops)
        self._partial_stops = PartialStops(self._stops)
        self._has_stops = bool(stops)
        self._tokens: list[int] = []
        self._starts: list[int] = []  # offset of each token's text
        self._decoded = ""
        self._released = sent_chars
        self.stopped = False

    def append(self, token: int, *, may_stop: bool = True) -> None:
        """Append a token, and set :attr:`stopped` if it completes a stop string.

        Args:
            token: its id.
            may_stop: False if the answer may not end yet; a stop string that this token completes
                is then text like any other.
        """
        self._tokens.append(token)
        self._starts.append(len(self._decoded))
        if token in self._special:  # it has no text; the stream would decode it again and again
            if special := self._special_stops.special.get(token):
                self._cut(self._special_stops.append(special, hidden=True), may_stop)
            return
        self._pending.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # the tokenizers library has no narrower one
            # The stream fails if a decoder that joins bytes takes back text that it returned.
            # That text stands. A new stream starts behind this very token, so that its text is
            # not decoded as the first of a text.
            self._stream = self._decode_stream([token])
            piece = self._stream.step(self._backend, token)
        if piece:
            if self._strip is not None:
                piece, self._strip = self._strip(piece), None
            if len(self._pending) > 1:
                self._set_start(token, piece)
            self._pending = []
            self._extend(piece, may_stop)
        elif len(self._pending) > _MAX_PENDING:
            self._pass_on_broken(may_stop)

    def _decode_stream(self, token_ids: list[int]) -> DecodeStream:
        return DecodeStream(ids=token_ids, skip_special_tokens=self._skips)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skips))

    def _pending_text(self) -> str:
        text = self._decode(self._pending)
        return text if self._strip is None else self._strip(text)

    def _pass_on_broken(self, may_stop: bool) -> None:
        """Pass on the text of bytes that are no character, but for its end, which may become one.

        The last tokens, among them all of an incomplete character, start a new stream.
        """
        text = self._pending_text()
        if not text.endswith(_REPLACEMENT):
            return
        last = self._pending[-_MAX_INCOMPLETE - 1 :]
        shown = self._decode(last)
        self._stream = self._decode_stream(last)
        if shown.endswith(_REPLACEMENT):
            text, shown = text[:-1], shown[:-1]
            self._pending, self._strip = last, partial(_behind, shown)
        else:  # bytes before them spoiled them, in a decoder that joins bytes
            self._pending, self._strip = [], None
        self._extend(text, may_stop)
        if self._pending:  # the end of the token's text is yet to come
            self._starts[-1] = len(self._decoded)

    def _set_start(self, token: int, piece: str) -> None:
        """Set the start of a token whose text comes with that of broken bytes before it."""
        once, twice = self._decode([token]), self._decode([token] * 2)
        own = twice.removeprefix(once)
        if own and _REPLACEMENT not in own and piece.endswith(own):
            self._starts[-1] = len(self._decoded) + len(piece) - len(own)

    def _extend(self, piece: str, may_stop: bool) -> None:
        before = len(self._decoded)
        self._decoded += piece
        if self._has_stops:
            self._cut(find_stop(self._decoded, self._stops, before), may_stop)
            self._cut(self._special_stops.append(piece), may_stop)

    def _cut(self, found: tuple[int, int] | None, may_stop: bool) -> None:
        """End the text at a stop string, if there is one, given as its range."""
        if found is not None and may_stop:
            self._decoded = self._decoded[: found[self._include_stop]]
            self.stopped = True

    def start(self, index: int) -> int:
        """Return the offset of a token's text in characters; past the last one, the text's end."""
        return self._starts[index] if index < len(self._starts) else len(self._decoded)

    def num_released(self) -> int:
        """Return the number of tokens that may be sent.

        With stop strings, those whose text is released, at least in part, since the others may
        still be cut.
        """
        if not self._has_stops:
            return len(self._starts)
        return bisect.bisect_left(self._starts, self._released)

    def release(self, *, last: bool = False, may_stop: bool = True) -> str:
        """Return the text that may be sent and has not been.

        Args:
            last: the answer has ended: no text is held back, and bytes that never became a
                character are decoded as the tokenizer does. If their text completes a stop string,
                :attr:`stopped` is set.
            may_stop: see :meth:`append`.
        """
        if last and not self.stopped:
            whole = self._prefix.decode(self._tokens)
            if whole.startswith(self._decoded):
                self._extend(whole[len(self._decoded) :], may_stop)
            else:
                self._extend(self._pending_text(), may_stop)
        end = len(self._decoded)
        if not (last or self.stopped):
            end -= self._partial_stops.length(self._decoded)
            if self._special_stops.stops:
                end = min(end, self._special_stops.releasable())
        # Partial stop strings are held back, so the end never moves back; max() states it.
        end = max(end, self._released)
        text = self._decoded[self._released : end]
        self._released = end
        return text
