"""How much is let in: admission in the ingress, so that a refusal has OpenAI's shape."""

from __future__ import annotations

from collections.abc import Callable

from paceline.deploy.errors import ApiError, overloaded


class Slots:
    """How many sequences are under way, and the most that are let in."""

    def __init__(self, limit: int) -> None:
        """Start with none of ``limit`` taken."""
        self._limit = limit
        self._taken = 0

    def take(self, count: int) -> Callable[[], None]:
        """Let ``count`` sequences in; the returned call, once or more often, lets them out.

        Raises:
            ApiError: 503 with Retry-After where they are too many, 400 where they always are.
        """
        if count > self._limit:
            raise ApiError(400, f"prompt: at most {self._limit} at once", param="prompt")
        if self._taken + count > self._limit:
            raise overloaded("The server is overloaded; try again.")
        self._taken += count
        held = [count]

        def release() -> None:
            self._taken -= held.pop() if held else 0

        return release
