"""Read calls of tools in an answer's text, whole or as it comes; pure.

In a stream a call is sent as soon as its name is known and its arguments have begun; what the model
writes as arguments is then sent as it is. In a whole answer a call with invalid JSON is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from paceline.deploy.api.tool_formats import ToolFormat

_STRING = r'"((?:[^"\\]|\\.){0,256})"'  # of a key or a name: no function has a longer one
_FIRST_KEY = re.compile(r"\{\s*(?:([^\s\"}])|" + _STRING + r"\s*:)", re.DOTALL)
_KIND = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?'
_NAME = re.compile(_KIND + r'"name"\s*:\s*(?:([^\s"])|' + _STRING + ")", re.DOTALL)
_HEAD = re.compile(
    _KIND + r'"name"\s*:\s*' + _STRING + r'\s*,\s*"(arguments|parameters)"\s*:\s*\{', re.DOTALL
)
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_LINE = re.compile(r"(?<=\n)[ \t]*(?=\{)")
_FIRST_LINE = re.compile(r"\s*(?=\{)")
# Objects without an end that are looked into for calls: each is read to the end of the answer.
_MAX_UNCLOSED = 16
_MAX_SPACE = 256  # between a tag and its object: a model may write nothing else for ever


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How the answers to a request call its tools.

    Attributes:
        format: of the calls.
        names: of the functions; an object that names another one is text.
        several: False keeps the first call of an answer alone.
    """

    format: ToolFormat
    names: frozenset[str]
    several: bool = True


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call.

    Attributes:
        index: of the call in the answer.
        name: of the function, in a call's first piece alone.
        arguments: what follows of the JSON text.
    """

    index: int
    name: str | None
    arguments: str


Piece = str | CallDelta  # text, or a piece of a call


@dataclass(slots=True)
class WholeCall:
    """A call: the function's name and its arguments, a JSON text."""

    name: str
    arguments: str


def collect(pieces: Iterable[Piece]) -> tuple[str, list[WholeCall]]:
    """Put pieces together: the text and the calls."""
    text, calls = "", list[WholeCall]()
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
        elif piece.name is not None:
            calls.append(WholeCall(piece.name, piece.arguments))
        else:
            calls[-1].arguments += piece.arguments
    return text, calls


class _ObjectScanner:
    """Finds the end of a JSON object, and of the first object inside it, by counting brackets.

    Attributes:
        position: up to where the text is read.
        inner_end: behind the first object at depth 2, None as long as it is not known.
        end: behind the object, likewise.
    """

    def __init__(self, start: int) -> None:
        self.position = start
        self.inner_end: int | None = None
        self.end: int | None = None
        self._depth = 0
        self._in_string = False

    def advance(self, text: str) -> None:
        """Read on; ``text`` is what was read before and what follows it."""
        while self.end is None:
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, self.position)
            if found is None:
                self.position = len(text)
                return
            char, behind = found[0], found.end()
            if char == "\\":
                if behind == len(text):  # wait for what it escapes
                    self.position = found.start()
                    return
                behind += 1
            elif char == '"':
                self._in_string = not self._in_string
            elif char in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 1 and self.inner_end is None:
                    self.inner_end = behind
                if self._depth == 0:
                    self.end = behind
            self.position = behind


class ToolCallParser:
    """Splits one answer into its text and its calls.

    White space around calls is in neither.

    Args:
        syntax: of the request.
        whole: read the answer at once: calls with invalid JSON, or without an end though the
            answer was not cut, stay text.

    Attributes:
        num_calls: read so far, that under way included.
        text_end: characters of the answer before its first call, None without a call.
    """

    def __init__(self, syntax: ToolSyntax, *, whole: bool = False) -> None:
        self._syntax, self._form, self._whole = syntax, syntax.format, whole
        self._rest = ""  # not yet released
        self._released = 0  # characters of the answer before it
        self._has_text = False
        self._line_start = True  # of the rest
        self._behind_call = False  # and what closes it has not come
        self._candidate: tuple[int, int] | None = None  # start and end of its opening in the rest
        self._scanner: _ObjectScanner | None = None
        self._sent: int | None = None  # end of the sent arguments in the rest
        self._num_unclosed = 0  # objects that the answer's end left open and that are no calls
        self.num_calls = 0
        self.text_end: int | None = None

    @property
    def num_released(self) -> int:
        """Characters of the answer that have been read to the end, as text or as calls."""
        return self._released

    @property
    def in_call(self) -> bool:
        """Whether a call is under way of which a part was returned."""
        return self._sent is not None

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> list[Piece]:
        """Read on.

        Args:
            text: of the answer.
            last: whether it ends here.
            cut: whether it ends at its limit of tokens.
        """
        self._rest += text
        pieces: list[Piece] = []
        while self._step(pieces, last, cut):
            pass
        return pieces

    def _step(self, pieces: list[Piece], last: bool, cut: bool) -> bool:
        """Take one part of the rest; returns whether there may be another."""
        if self._candidate is not None:
            return self._read_candidate(pieces, last, cut)
        if self.num_calls and not self._syntax.several:
            self._drop(len(self._rest))
            return False
        if self._behind_call and not self._close(last):
            return False
        found = self._find_opening()
        if found is None:
            if last and self.num_calls:
                self._rest = self._rest.rstrip()
            self._release(pieces, len(self._rest) if last else self._settled())
            return False
        start, end = found
        self._release(pieces, len(self._rest[:start].rstrip()))
        held = len(self._rest) - len(self._rest.lstrip())
        self._candidate = (held, held + end - start)
        return True

    def _close(self, last: bool) -> bool:
        """Drop what closes a call; returns False if it may still come."""
        rest = self._rest.lstrip()
        if rest.startswith(self._form.closing):
            self._drop(len(self._rest) - len(rest) + len(self._form.closing))
        elif self._form.closing.startswith(rest) and not last:
            return False
        self._behind_call, self._line_start = False, True
        return True

    def _find_opening(self) -> tuple[int, int] | None:
        """Start and end in the rest of what may open a call, white space before it left out."""
        if self._num_unclosed == _MAX_UNCLOSED:
            return None
        spans = []
        at = self._rest.find(self._form.tag)
        if at >= 0:
            spans.append((at, at + len(self._form.tag)))
        if self._form.bare:
            line = _FIRST_LINE.match(self._rest) if self._line_start else None
            line = line or _LINE.search(self._rest)
            if line is not None:
                spans.append((line.end(), line.end()))
        return min(spans, default=None)

    def _settled(self) -> int:
        """How much of the rest is certainly text: not the start of a tag, nor space before it."""
        rest, tag = self._rest, self._form.tag
        for size in range(min(len(tag) - 1, len(rest)), 0, -1):
            if rest.endswith(tag[:size]):
                rest = rest[:-size]
                break
        return len(rest.rstrip())

    def _release(self, pieces: list[Piece], count: int) -> None:
        """Pass on the first characters of the rest as text."""
        text = self._rest[:count]
        if self.num_calls and not self._has_text:
            text = text.lstrip()
        if count:
            self._line_start = False
        self._drop(count)
        if text:
            self._has_text = True
            pieces.append(text)

    def _drop(self, count: int) -> None:
        self._rest = self._rest[count:]
        self._released += count

    def _read_candidate(self, pieces: list[Piece], last: bool, cut: bool) -> bool:
        """Read what may be a call."""
        assert self._candidate is not None
        start = self._candidate[1]
        while start < len(self._rest) and self._rest[start].isspace():
            start += 1
            if start - self._candidate[1] > _MAX_SPACE:
                return self._refuse(pieces, start)
        if self._sent is None and self._is_no_call(start):
            return self._refuse(pieces, max(self._candidate[1], start + (self._rest[start] == "{")))
        if start == len(self._rest):
            return last and self._refuse(pieces, self._candidate[1])
        scanner = self._scanner = self._scanner or _ObjectScanner(start)
        scanner.advance(self._rest)
        if self._sent is None and not self._whole:
            self._begin(pieces, start)
        if self._sent is not None:
            self._send_arguments(pieces)
        if scanner.end is not None:
            if self._sent is None and not self._read_object(pieces, start, scanner.end):
                return self._refuse(pieces, scanner.end)
            self._drop(scanner.end)
            self._candidate = self._scanner = self._sent = None
            self._behind_call = True
            return True
        if not last or self._sent is not None:
            return False
        if cut and self._begin(pieces, start):
            self._send_arguments(pieces)
            return False
        self._num_unclosed += 1
        return self._refuse(pieces, start + 1)

    def _is_no_call(self, start: int) -> bool:
        """Whether the object's beginning shows that it is none of the request's calls."""
        if start < len(self._rest) and self._rest[start] != "{":
            return True
        key = _FIRST_KEY.match(self._rest, start)
        if key is not None and key[2] not in ("name", "type", *self._form.arguments):
            return True
        name = _NAME.match(self._rest, start)
        return name is not None and _unquoted(name[2]) not in self._syntax.names

    def _refuse(self, pieces: list[Piece], end: int) -> bool:
        """Pass on the candidate up to ``end`` as text, and read on behind it."""
        self._candidate = self._scanner = None
        self._release(pieces, end)
        return True

    def _begin(self, pieces: list[Piece], start: int) -> bool:
        """Send a call's name once its arguments have begun."""
        head = _HEAD.match(self._rest, start)
        name = None if head is None else _unquoted(head[1])
        if head is None or name is None or head[2] not in self._form.arguments:
            return False
        self._start_call(pieces, name)
        self._sent = head.end() - 1
        return True

    def _start_call(self, pieces: list[Piece], name: str) -> None:
        if self.text_end is None:
            self.text_end = self._released
        pieces.append(CallDelta(self.num_calls, name, ""))
        self.num_calls += 1

    def _send_arguments(self, pieces: list[Piece]) -> None:
        assert self._scanner is not None
        assert self._sent is not None
        end = self._scanner.inner_end or self._scanner.position
        if end > self._sent:
            pieces.append(CallDelta(self.num_calls - 1, None, self._rest[self._sent : end]))
            self._sent = end

    def _read_object(self, pieces: list[Piece], start: int, end: int) -> bool:
        """Send a complete call; returns False if the object is none."""
        try:
            call: Any = from_json(self._rest[start:end], allow_inf_nan=False)
        except ValueError:
            return False
        key = next((key for key in self._form.arguments if key in call), None)
        arguments = {} if key is None else call[key]
        name = call.get("name")
        if not isinstance(name, str) or name not in self._syntax.names:
            return False
        if not isinstance(arguments, dict):
            return False
        if self._begin(pieces, start):
            self._send_arguments(pieces)
        else:
            self._start_call(pieces, name)
            text = json.dumps(arguments, ensure_ascii=False)
            pieces.append(CallDelta(self.num_calls - 1, None, text))
        return True


def _unquoted(text: str | None) -> str | None:
    """The content of a JSON string, None if it is none."""
    if text is None:
        return None
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return None
