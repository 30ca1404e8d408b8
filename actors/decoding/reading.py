"""What it costs a draft to read prompts: the part of speculation that no round's steps show."""

from __future__ import annotations

_SMOOTHING = 0.2
_WINDOW = 64.0  # requests
_OUTLIER = 4.0


class ReadingCosts:
    """Seconds of a draft's reading, spread over the tokens that its requests emit. Pure.

    A draft computes keys and values for all that a request has, prompt and output, before its first
    proposal. For a long prompt with a short answer, or an answer that soon ends, that may be more
    than the rest of the answer can win back.
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
    def token_s(self) -> float:
        """Seconds of reading a token."""
        return self._token_s

    def left(self, output_tokens: int, limit: int) -> float:
        """Tokens that a request is expected to emit yet, at least 1.

        Args:
            output_tokens: that it has emitted.
            limit: of the request.
        """
        usual = self._outputs / self._requests
        return max(min(limit - output_tokens, max(usual - output_tokens, usual / 4)), 1.0)

    @property
    def request_s(self) -> float:
        """Seconds of reading for a request."""
        return self._token_s * self._prompts / self._requests
