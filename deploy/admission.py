"""How much is let in: admission in the ingress, so that a refusal has OpenAI's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from paceline.deploy.errors import ApiError, overloaded, rate_limited


class Slots:
    """How many sequences are under way, and the most that are let in: of all, and of a client."""

    def __init__(self, limit: int, per_client: int | None = None) -> None:
        """Start with none of ``limit`` taken; None lets one client take them all."""
        self.resize(limit, per_client)
        self._taken: Counter[str] = Counter()

    def resize(self, limit: int, per_client: int | None = None) -> None:
        """Let in so many from now on; those that are in stay, however many."""
        self._limit = limit
        self._per_client = limit if per_client is None else min(limit, per_client)

    @property
    def taken(self) -> int:
        """Sequences under way."""
        return self._taken.total()

    def take(self, count: int, client: str = "", param: str = "prompt") -> Callable[[], None]:
        """Let ``count`` sequences in; the returned call, once or more often, lets them out.

        Args:
            count: sequences of one request.
            client: who asks.
            param: the request's field that makes them so many.

        Raises:
            ApiError: 503 with Retry-After where they are too many just now, 429 where the
                client's are, 400 where they always are.
        """
        if count > self._per_client:
            text = f"{param}: at most {self._per_client} answers at once"
            raise ApiError(400, text, param=param, code="invalid_value")
        if self._taken.total() + count > self._limit:
            raise overloaded("The server is overloaded; try again.")
        if self._taken[client] + count > self._per_client:
            raise rate_limited("Too many of your requests are under way; try again.")
        self._taken[client] += count
        held = [count]

        def release() -> None:
            if not held:
                return
            self._taken[client] -= held.pop()
            if not self._taken[client]:
                del self._taken[client]

        return release
