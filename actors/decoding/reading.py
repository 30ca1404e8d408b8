"""What it costs a draft to read prompts: the part of speculation that no round's steps show."""

from __future__ import annotations

_SMOOTHING = 0.2
_WINDOW = 64.0  # requests
_OUTLIER = 4.0


class ReadingCosts:
    """Seconds of a draft's reading, spread over the tokens that its requests emit. Pure.

    A draft computes keys and values for the whole prompt before its first proposal. A long prompt
    with a short answer may cost more of that than the answer can win back.
    """

    def __init__(self, token_s: float) -> None:
        """Start with a guess of the seconds that reading a token takes."""
        self._token_s = token_s
        # One request whose prompt is as long as its answer, until others are known.
        self._requests = 1.0
        self._prompts = self._outputs = 32.0

    def read(self, tokens: int, seconds: float) -> None:
        """Take what reading some tokens took, at least one."""
        token_s = min(max(seconds, 0.0) / tokens, _OUTLIER * self._token_s)
        self._token_s += _SMOOTHING * (token_s - self._token_s)

    def ended(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take a finished request's lengths."""
        keep = 1.0 - 1.0 / _WINDOW
        self._requests = keep * self._requests + 1.0
        self._prompts = keep * self._prompts + prompt_tokens
        self._outputs = keep * self._outputs + output_tokens

    @property
    def emitted_s(self) -> float:
        """Seconds of reading for every token that a request emits."""
        return self._token_s * self._prompts / max(self._outputs, 1.0)

    @property
    def request_s(self) -> float:
        """Seconds of reading for a request."""
        return self._token_s * self._prompts / self._requests
