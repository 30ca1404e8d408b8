"""What it costs a draft to read prompts: the part of speculation that no round's steps show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SMOOTHING = 0.1
_WINDOW = 64.0  # requests
_OUTLIER = 1.5
_LEAST_FILLED = 0.5  # of what stretches are padded to
_LEAST_RATIO = 0.1  # to the profile: what is mostly noise must not end at nothing


class Reads(NamedTuple):
    """What a draft has read, or has to read.

    Attributes:
        requests: of which it is.
        tokens: all of them.
    """

    requests: int = 0
    tokens: int = 0


def read_together(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Which stretches to read in one forward, where all are padded to the longest of it.

    A forward costs a draft about as much as a hundred tokens, so short stretches go together; but
    none goes with one so much longer that what pads it would cost more.

    Args:
        lengths: tokens of each stretch.
        most: tokens of a forward, padding included; a longer stretch goes alone.

    Returns:
        indices into ``lengths``, every one once, the longest first.
    """
    parts: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[parts[-1][0]] if parts else 0
        if room > 0 and lengths[index] >= _LEAST_FILLED * longest:
            parts[-1].append(index)
        else:
            longest = lengths[index]
            parts.append([index])
            room = most // max(longest, 1)
        room -= 1
    return parts


class ReadingCosts:
    """Seconds of a draft's reading, spread over the tokens that its requests emit. Pure.

    A draft computes keys and values for all that a request has, prompt and output, before its first
    proposal. For a long prompt with a short answer, or an answer that soon ends, that may be more
    than the rest of the answer can win back.
    """

    def __init__(self, request_s: float = 0.0, token_s: float = 0.0) -> None:
        """Start with what a profile says.

        Args:
            request_s: seconds of a request beside its tokens; 0, like the other, where reading
                is done while the target works and costs the round nothing.
            token_s: seconds of each token.
        """
        self._profiled = request_s, token_s
        self._ratio = 1.0
        # One request whose prompt is as long as its answer, until others are known.
        self._requests = 1.0
        self._prompts = self._outputs = 32.0

    def seconds(self, requests: float, tokens: float) -> float:
        """Seconds of reading so much."""
        request_s, token_s = self._profiled
        return self._ratio * (request_s * requests + token_s * tokens)

    def read(self, reads: Reads, seconds: float) -> None:
        """Take what some reading took; a stall does not count as such."""
        expected = self.seconds(*reads)
        if expected > 0.0:
            times = min(max(seconds, 0.0) / expected, _OUTLIER)
            self._ratio = max(self._ratio * (1.0 + _SMOOTHING * (times - 1.0)), _LEAST_RATIO)

    def ended(self, prompt_tokens: int, output_tokens: int) -> None:
        """Take a finished request's lengths."""
        keep = 1.0 - 1.0 / _WINDOW
        self._requests = keep * self._requests + 1.0
        self._prompts = keep * self._prompts + prompt_tokens
        self._outputs = keep * self._outputs + output_tokens

    @property
    def usual_s(self) -> float:
        """Seconds of reading for each token that requests emit, as they usually are."""
        return self.seconds(self._requests, self._prompts) / max(self._outputs, 1.0)

    @property
    def request_s(self) -> float:
        """Seconds of reading for a request, as they usually are."""
        return self.seconds(1.0, self._prompts / self._requests)

    def left(self, output_tokens: int, limit: int) -> float:
        """Tokens that a request is expected to emit yet, at least 1.

        Args:
            output_tokens: that it has emitted.
            limit: of the request.
        """
        usual = self._outputs / self._requests
        return max(min(limit - output_tokens, max(usual - output_tokens, usual / 4)), 1.0)
