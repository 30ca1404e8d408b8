"""An index of token sequences: the longest match of a suffix and its most frequent continuation.

After SuffixDecoding (arXiv 2411.04975); hash chains over a ring of tokens in place of a suffix
tree, so that the memory is bounded and old tokens are dropped at no cost.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.actors.engine.native.library import load_library

MAX_MATCH = 32  # tokens that are compared
MAX_CONTINUATION = 32  # tokens
SEPARATOR = -1  # between sequences: no match and no continuation goes across
_FOUND = ctypes.c_int32 * (2 + 3 * MAX_CONTINUATION)


class Match(NamedTuple):
    """The most frequent continuation behind the places with the longest match, at least one token.

    Attributes:
        length: tokens that match, at most ``MAX_MATCH``.
        tokens: of the continuation.
        votes: per token, how many of the places that agree so far go on with it.
        voters: per token, how many of them go on at all.
    """

    length: int
    tokens: list[int]
    votes: list[int]
    voters: list[int]


class SuffixIndex:
    """Holds the latest tokens of a growing text, in native memory. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        """Start empty.

        Args:
            limit: most tokens, a power of two of at least 1,024; memory grows as they come, by 28
                bytes a token.

        Raises:
            RuntimeError: the machine has no compiler, see `available`.
        """
        library = load_library()
        if library is None:
            raise RuntimeError("no native library")
        self._library = _typed(library)
        self._index = library.suffixes_new(limit)
        self._found = _FOUND()
        # Not at exit: other threads may still be reading.
        weakref.finalize(self, library.suffixes_free, self._index).atexit = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append token ids, or separators; beyond the limit the oldest are overwritten."""
        given = array("i", tokens)
        self._library.suffixes_append(self._index, given.buffer_info()[0], len(given))

    def find(self, context: SuffixIndex, most: int) -> Match | None:
        """Continue the last tokens of a context, which may be this index itself.

        Args:
            context: its last tokens, back to a separator.
            most: tokens of the continuation, at most ``MAX_CONTINUATION``.
        """
        found = self._found
        self._library.suffixes_find(self._index, context._index, most, found)
        count = found[1]
        if not count:
            return None
        votes, voters = 2 + MAX_CONTINUATION, 2 + 2 * MAX_CONTINUATION
        return Match(
            found[0],
            found[2 : 2 + count],
            found[votes : votes + count],
            found[voters : voters + count],
        )

    def set_limit(self, limit: int) -> None:
        """Hold at most so many tokens from now on, the latest; see the constructor."""
        self._library.suffixes_set_limit(self._index, limit)

    def erase(self, start: int, stop: int) -> None:
        """Overwrite the tokens of positions ``start`` to ``stop - 1``, as far as they are held."""
        self._library.suffixes_erase(self._index, start, stop)

    @property
    def tail(self) -> int:
        """Position of the oldest token that is held; positions count all tokens so far."""
        return self._sizes()[0]

    @property
    def end(self) -> int:
        """Position of the next token; below 2^31."""
        return self._sizes()[1]

    @property
    def capacity(self) -> int:
        """Tokens for which there is memory at present."""
        return self._sizes()[2]

    def _sizes(self) -> list[int]:
        sizes = (ctypes.c_int64 * 3)()
        self._library.suffixes_sizes(self._index, sizes)
        return list(sizes)


def available() -> bool:
    """Whether the machine can index: the native library needs a compiler once."""
    return load_library() is not None


@functools.cache
def _typed(library: ctypes.CDLL) -> Any:
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.suffixes_new.argtypes, library.suffixes_new.restype = [size], pointer
    for name, arguments in (
        ("free", [pointer]),
        ("append", [pointer, pointer, size]),
        ("set_limit", [pointer, size]),
        ("erase", [pointer, size, size]),
        ("sizes", [pointer, pointer]),
        ("find", [pointer, pointer, size, pointer]),
    ):
        function = getattr(library, f"suffixes_{name}")
        function.argtypes, function.restype = arguments, None
    return library
