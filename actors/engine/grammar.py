"""Grammars of constrained answers: which tokens may follow a prefix, by llguidance.

The definition of a constrained answer is "mask, then sample": every token that the grammar forbids
after the tokens before it has probability 0. Where llguidance knows how the text goes on it allows
one token alone, the first of the text's usual tokenization; such tokens are *forced*.

No torch here: the process that tries out grammars imports this module.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

Mask = NDArray[np.uint32]  # bit t % 32 of word t // 32 is token t

_CACHED = 64  # grammars
# At these limits a step may take 0.1 s and a lexer 100 MB; usual schemas take microseconds and
# kilobytes.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)


class GrammarError(ValueError):
    """A grammar that is invalid, allows no token, or is too complex."""


class _MatcherFailedError(GrammarError):
    """A matcher that is of no more use."""


def allows(mask: Mask, token: int) -> bool:
    """Whether a mask allows a token; none beyond its words."""
    return token >> 5 < len(mask) and bool(mask[token >> 5] >> np.uint32(token & 31) & 1)


def allowed_tokens(mask: Mask) -> list[int]:
    """The tokens that a mask allows, ascending."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    tokens: list[int] = np.flatnonzero(bits).tolist()
    return tokens


def only_token(mask: Mask) -> int | None:
    """The token that a mask allows, if it is one alone."""
    words = np.flatnonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]])
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1


def tokenizer_json(tokenizer: Any) -> str:
    """Return the content of tokenizer.json of a transformers fast tokenizer, without padding."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return str(backend.to_str())


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest ones. Thread-safe."""

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        """Take the tokenizer.

        Args:
            read_tokenizer: see :func:`tokenizer_json`; called with the first grammar.
            vocab_size: of the model.
            eos_token_ids: tokens that end an answer, allowed where the grammar may end.
        """
        self._read_tokenizer, self._vocab_size = read_tokenizer, vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._matchers: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the start of a grammar, to be copied.

        Copies share the lexer, which grows with the texts that it has seen.

        Args:
            grammar: Lark, or llguidance's JSON.

        Raises:
            GrammarError: it is invalid or too complex.
        """
        with self._lock:
            matcher = self._matchers.get(grammar)
            if matcher is not None:
                self._matchers.move_to_end(grammar)
                return matcher
        # Without the lock, for which the engine's thread must not wait.
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        _check(matcher)
        with self._lock:
            self._matchers[grammar] = matcher
            if len(self._matchers) > _CACHED:
                self._matchers.popitem(last=False)
        return matcher

    def forget(self, grammar: str, matcher: LLMatcher | None = None) -> None:
        """Compile a grammar anew the next time, unless another has replaced the given matcher."""
        with self._lock:
            if matcher is None or self._matchers.get(grammar) is matcher:
                self._matchers.pop(grammar, None)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        content, eos = self._read_tokenizer(), sorted(self.eos_token_ids)
        try:
            return LLTokenizer(content, n_vocab=self._vocab_size, eos_token=eos)
        except ValueError:  # it has tokens that the model has not
            return LLTokenizer(content, eos_token=eos)


class GrammarState:
    """The position of one answer in its grammar, and in what drafts propose behind it.

    Attributes:
        eos_token_ids: tokens that end the answer. A path, the tokens that are assumed behind the
            answer, has none of them.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: str) -> None:
        """Start an answer.

        Raises:
            GrammarError: see :meth:`GrammarCompiler.compile`, or it allows no token.
        """
        self.eos_token_ids = compiler.eos_token_ids
        self._compiler, self._grammar = compiler, grammar
        self._answer: list[int] = []
        self._restarted_at = -1  # tokens of the answer
        self._shared = compiler.compile(grammar)
        try:
            self._start()
        except _MatcherFailedError as error:
            self._restart(error)

    def _restart(self, error: _MatcherFailedError) -> None:
        """Start with a lexer that has seen no other text, at which the matcher may have failed.

        Raises:
            GrammarError: it fails again, or the error came after a restart at this token.
        """
        if self._restarted_at == len(self._answer):
            raise error
        self._restarted_at = len(self._answer)
        self._compiler.forget(self._grammar, self._shared)
        self._shared = self._compiler.compile(self._grammar)
        self._start()

    def _start(self) -> None:
        """Make a matcher, and bring it to the end of the answer."""
        self._matcher = self._shared.deep_copy()
        self._matcher.consume_tokens(self._answer)
        _check(self._matcher)
        # A second matcher is ahead of the first by the path. It never goes back: after llguidance's
        # own rollback a mask may differ from that of the same tokens consumed once.
        self._ahead = self._matcher
        self._path: list[int] = []
        self._masks = [_mask(self._matcher)]  # after 0, 1 ... tokens of the path

    def append(self, token: int) -> None:
        """Append a token to the answer.

        Raises:
            GrammarError: the grammar forbids it or allows none behind it, or is too complex.
        """
        _check_allowed(self._masks[0], token)
        if token in self.eos_token_ids:
            return
        self._answer.append(token)
        try:
            self._matcher.consume_token(token)
            _check(self._matcher)
            if self._path[:1] == [token]:
                del self._path[0], self._masks[0]
            else:
                self._path, self._masks = [], [_mask(self._matcher)]
        except _MatcherFailedError as error:
            self._restart(error)

    def mask(self, path: Sequence[int]) -> Mask:
        """Return the tokens that may follow a path.

        Raises:
            GrammarError: the grammar forbids a token of it or allows none behind it, or is too
                complex; other paths are not affected.
        """
        try:
            return self._mask_behind(path)
        except _MatcherFailedError as error:
            self._restart(error)
            return self._mask_behind(path)

    def _mask_behind(self, path: Sequence[int]) -> Mask:
        known = 0
        while known < min(len(path), len(self._path)) and path[known] == self._path[known]:
            known += 1
        if known < len(path) and (known < len(self._path) or known == 0):
            self._ahead = self._matcher.deep_copy()
            self._ahead.consume_tokens(list(path[:known]))
            del self._path[known:], self._masks[known + 1 :]
        for token in path[known:]:
            _check_allowed(self._masks[-1], token)
            self._ahead.consume_token(token)
            try:
                self._masks.append(_mask(self._ahead))
            except _MatcherFailedError:
                self._path, self._masks = [], self._masks[:1]
                raise
            self._path.append(token)
        return self._masks[len(path)]

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """Return the forced tokens behind a path, at most ``most``; the last may end the answer.

        None behind a path that the grammar forbids or that ends the answer.
        """
        tokens = list(path)
        while len(tokens) < len(path) + most and self.eos_token_ids.isdisjoint(tokens[-1:]):
            try:
                token = only_token(self.mask(tokens))
            except GrammarError:
                break
            if token is None:
                break
            tokens.append(token)
        return tokens[len(path) :]

    def num_verifiable(self, drafts: Sequence[int]) -> int:
        """Return the number of draft tokens that verification can reach.

        The last of them may be forbidden or end the answer. It stays: dropping it for its value
        would bias the distribution of the token in its place.
        """
        for i, token in enumerate(drafts):
            try:
                allowed = allows(self.mask(drafts[:i]), token)
            except GrammarError:
                return i
            if not allowed or token in self.eos_token_ids:
                return i + 1
        return len(drafts)


def _mask(matcher: LLMatcher) -> Mask:
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    _check(matcher)
    return words


def _check(matcher: LLMatcher) -> None:
    """Raise the error of a matcher that has failed: it never recovers."""
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("<non-verbose/>")
        raise _MatcherFailedError(" ".join(reason.split()))


def _check_allowed(mask: Mask, token: int) -> None:
    if not allows(mask, token):
        raise GrammarError(f"token {token} is not in the grammar")
